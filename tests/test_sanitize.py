"""The cases and the logic of the compute-sanitizer runs on a GPU (tests/sanitize.py), here on the CPU backend."""

from __future__ import annotations

from itertools import chain, product

import pytest
import sanitize
import torch
from sanitize import BF16, F32, F64, FAMILIES
from support import CPU, EAGER

from kernel_fusion.backends.cuda import planner
from kernel_fusion.backends.cuda.device import KNOWN_DEVICES
from kernel_fusion.core import checks
from kernel_fusion.core.activations import IDENTITY
from kernel_fusion.core.spec import RowNormSpec, dtype_name
from kernel_fusion.testing import oracle
from kernel_fusion.testing.oracle import StagedNormCase

_LENGTHS = (64, 255, 256, 1000, 1023, 4096, 8192, 12288, 12289, 32768, 50257, 131072)


@pytest.mark.parametrize("family", FAMILIES)
def test_cases_pass_on_the_cpu(
    family: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first case of each family and one of its middle run, and are reported; no case is there twice."""
    cases = list(FAMILIES[family]())
    assert len(set(cases)) == len(cases)
    first, middle = cases[0], cases[len(cases) // 2]
    monkeypatch.setitem(FAMILIES, family, lambda: iter((first, middle)))
    assert sanitize.main([family], EAGER if checks.without_kernels(first.verb, "cpu") else CPU) == 0
    assert capsys.readouterr().out == f"{first}: ok\n{middle}: ok\n0 cases failed\n"


def test_wrong_results_are_reported(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A gradient outside its budget is a failed case."""
    case = next(FAMILIES["softmaxes"]())
    monkeypatch.setitem(FAMILIES, "softmaxes", lambda: iter((case,)))
    right = oracle.run
    monkeypatch.setattr(oracle, "run", lambda *args: right(*args) | {"dx": torch.zeros(case.shape, dtype=BF16)})
    assert sanitize.main(["softmaxes"], CPU) == 1
    out = capsys.readouterr().out
    assert "name='dx'" in out
    assert "1 cases failed" in out


def test_a_run_without_kernels_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """Right results by other means than the kernels are none."""
    ours = oracle.SoftmaxCase.ours
    monkeypatch.setattr(oracle.SoftmaxCase, "ours", lambda self, inputs, _: ours(self, inputs, "eager"))
    with pytest.raises(AssertionError, match="wanted"):
        sanitize.run(next(FAMILIES["softmaxes"]()), CPU)


def test_unknown_families_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """The message names the known ones."""
    with pytest.raises(SystemExit):
        sanitize.main(["softmaxes", "norms"])
    assert (
        "unknown families: norms; there are row_norms, staged_norms, gated_norms, modulated_norms"
        in capsys.readouterr().err
    )


def test_parts_are_the_whole(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Every case runs in one part."""
    cases = list(FAMILIES["reductions"]())[:3]
    monkeypatch.setitem(FAMILIES, "reductions", lambda: iter(cases))
    lines = []
    for part in ("1/2", "2/2"):
        assert sanitize.main(["reductions", "--part", part], CPU) == 0
        lines += capsys.readouterr().out.splitlines()[:-1]
    assert sorted(lines) == sorted(f"{case}: ok" for case in cases)


@pytest.mark.parametrize("layout", ["contiguous", "padded", "unaligned", "transposed", "half"])
def test_zeros_are_all_around(layout: str) -> None:
    """The copy is equal and lies as the tensor does; what is not it is zero, 16 elements behind it at least."""
    t = oracle.lay_out(torch.rand(3, 5, dtype=F64) + 1, layout).requires_grad_()
    copy = sanitize.among_zeros(t, "cpu")
    assert copy is not None
    assert torch.equal(copy, t)
    assert (copy.stride(), copy.storage_offset(), copy.requires_grad) == (t.stride(), t.storage_offset(), True)
    memory = copy.detach().as_strided((copy.untyped_storage().nbytes() // 8,), (1,), 0)
    assert memory.count_nonzero() == t.numel()
    assert memory[-16:].count_nonzero() == 0


def _plan_kinds(case: StagedNormCase, arch: int) -> set[tuple[object, ...]]:
    """Template and kind of plan of every kernel of a case on contiguous rows."""
    weight, residual = (None if t is None else dtype_name(t) for t in (case.weight, case.residual))
    specs = planner.family(
        case.shape[-1],
        dtype_name(case.dtype),
        weight,
        rms=case.rms,
        residual=residual,
        pre_activation=case.pre_activation or IDENTITY,
        activation=case.activation or IDENTITY,
        dropout=case.dropout_p > 0,
    )
    device, kinds = KNOWN_DEVICES[arch], set()
    launched = (planner.with_helpers(s, planner.plan_for(s, planner.contiguous_access(s), device)) for s in specs)
    for spec in chain.from_iterable(launched):
        access = planner.contiguous_access(spec)
        plan = planner.plan_for(spec, access, device)
        if isinstance(spec, RowNormSpec):
            spread = (plan.lanes < 32, plan.warps > 1, plan.cluster > 1, plan.per_block > 1, plan.vec == 1)
            kept = (plan.resident, plan.sums, plan.keeps, plan.variant == "ahead")
            kinds.add((planner.source_of(spec, access, plan).header, *spread, *kept))
    return kinds


@pytest.mark.parametrize("arch", [80, 90, 120])
def test_staged_norms_reach_every_kind_of_plan(arch: int) -> None:
    """Every kind that any of the sets of stages meets at any length, in types of each size, is met by a case."""
    reached = set().union(*(_plan_kinds(case, arch) for case in sanitize.staged_norms()))
    for (verb, options, _), dtype, cols in product(sanitize.STAGES, (BF16, F32, F64), _LENGTHS):
        if options.get("residual") is None or dtype == BF16:
            residual = {"residual": dtype} if verb.startswith("add_") else {}
            case = StagedNormCase(verb, (1, cols), dtype, weight=dtype, **{**residual, **options})
            assert _plan_kinds(case, arch) <= reached, case
