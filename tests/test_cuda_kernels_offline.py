"""The CUDA kernels without a GPU: each compiles for every architecture without spilling, and every plan is sound.

A spill to local memory costs more bandwidth than the kernel has to spare and shows in no test of results, so the
compiler's own count is tested, for every architecture that the library knows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from cuda_plans import anywhere, assert_sound, executors, tree
from cuda_spills import GENERATIONS, Grid, Kernel, assert_no_local_memory, local_memory
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kernel_fusion.backends.cuda import planner
from kernel_fusion.backends.cuda.compile import compile_source, counters, cubin
from kernel_fusion.backends.cuda.device import KNOWN_DEVICES, Device
from kernel_fusion.backends.cuda.plan import Plan
from kernel_fusion.backends.cuda.row_norm_plan import plan_row_norm
from kernel_fusion.core.cache import CUBINS
from kernel_fusion.core.quantize import Codes
from kernel_fusion.core.spec import ITEMSIZE, Access, RowNormSpec, SumPartialsSpec
from kernel_fusion.errors import CompileError

_CONTROL = """
extern "C" __global__ void __launch_bounds__(1024, 2) control(float* p) {
  float v[128];
#pragma unroll
  for (int i = 0; i < 128; ++i) v[i] = p[i * 1024 + threadIdx.x];
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 128; ++i) p[i * 1024 + threadIdx.x] = v[127 - i] * v[i ^ 1];
}
"""

# Grid rationale. The lengths stand for a row in part of a warp (64), of odd length, whose vectors are single elements
# (255, 1023, 4099, 32769, 50257), in one or a few warps (768, 1024, 1280, 1600, 3000, which divide in ways of their
# own), in a block that takes several rows at a time (4096; 5120, at 96 registers a thread) or one (6144, 8192), read
# twice (RMSNorm of 20480 and 24576) or in a cluster (12288, 32768, 65536; 65528 ends among a thread's vectors) that may
# take two rows at a time (9216, 10240, 20480), and in the largest one (131072). The mixes of x, parameters and y are
# those of training: one dtype throughout, bf16 with float32 parameters, and what autocast makes of it.
_LENGTHS = (64, 255, 768, 1023, 1024, 1280, 1600, 3000, 4096, 4099, 5120, 6144, 8192, 9216, 10240, 12288, 20480, 24576)
_LENGTHS += (32768, 32769, 50257, 65528, 65536, 131072)
_MIXES = (
    ("f32", "f32", "f32"),
    ("bf16", "bf16", "bf16"),
    ("f16", "f16", "f16"),
    ("bf16", "f32", "bf16"),
    ("bf16", "f32", "f32"),
    ("f64", "f64", "f64"),
)


def planned(spec: RowNormSpec, device: Device) -> Plan:
    """The plan for contiguous tensors."""
    return plan_row_norm(spec, planner.contiguous_access(spec), device)


def _norms(arch: int) -> Iterator[Kernel]:
    """Forward, backward, and the kernels that finish the weight gradients.

    LayerNorm takes more registers, so it also has dx alone, and rows at any alignment, whose shorter loads and
    addresses take registers too. RMSNorm also has rows that are read twice, which LayerNorm never has. On sm_90, whose
    plans are tightest, there are also inference (one store less than forward, yet it has spilled alone), both without a
    bias, and any alignment beside fp32 parameters.
    """
    for rms, cols, (x, weight, y) in product((False, True), _LENGTHS, _MIXES):
        inference, forward, backward = planner.family(cols, x, weight, rms=rms, y=y)
        specs = [forward, backward]
        if arch == 90:
            specs += [inference, *(replace(spec, bias=None) for spec in (inference, forward) if not rms)]
        wanted = [(spec, planner.contiguous_access(spec)) for spec in specs]
        one_dtype = (not rms or cols == 24576) and x == weight != "f16"
        wide_parameters = arch == 90 and not rms and (x, weight, y) == ("bf16", "f32", "bf16")
        if one_dtype:
            dx = replace(backward, grads=(True, False, False))
            wanted.append((dx, planner.contiguous_access(dx)))
        if one_dtype or wide_parameters:
            wanted += [(spec, anywhere(spec)) for spec in (forward, backward)]
        for spec, access in wanted:
            yield from _with_helpers(spec, access, arch)


def _with_helpers(spec: RowNormSpec, access: Access, arch: int) -> Iterator[Kernel]:
    for each in planner.with_helpers(spec, plan_row_norm(spec, access, KNOWN_DEVICES[arch])):
        yield each, access


# Grid rationale. Everything for which stages take registers: an activation after the norm, cheap or not, whose argument
# backward recomputes; one before it; a residual, in the type of x or wider, with a gradient of its own and one that
# arrives; dropout's random bits; intermediate rounding; a gate, last or first, in the type of x or wider, and groups.
# Plans change at these lengths.
_STAGED_LENGTHS = (64, 255, 768, 1024, 1280, 4096, 4099, 5120, 10240, 12288, 32768, 131072)
_STAGES: dict[str, dict[str, Any]] = {
    "gelu": {"activation": "gelu"},
    "relu": {"activation": "relu"},
    "pre-relu": {"pre_activation": "relu"},
    "add": {"residual": "bf16"},
    "add-f32": {"residual": "f32"},
    "add-dropout": {"residual": "bf16", "dropout": True, "rms": True},
    "hf": {"rounding": "hf"},
    "gate": {"gate": "bf16", "gate_activation": "silu"},
    "gate-f32": {"gate": "f32", "gate_activation": "silu", "grouped": True},
    "gate-first": {"gate": "bf16", "gate_activation": "silu", "gate_first": True, "grouped": True, "rms": True},
    "gate-first-f32": {"gate": "f32", "gate_activation": "mish", "gate_first": True},
    "modulated": {"grouped": True, "offset": True},
    "add-modulated": {"grouped": True, "offset": True, "residual": "bf16", "rms": True},
    "add-gated": {"grouped": True, "offset": True, "residual": "bf16", "residual_gate": "bf16"},
    "add-gated-rows": {"grouped": True, "offset": True, "residual": "bf16", "residual_gate": "bf16", "one_row": True},
    "add-gated-f32": {"residual": "f32", "residual_gate": "f32", "dropout": True, "pre_activation": "gelu"},
    "hf-gate": {"rounding": "hf", "gate": "bf16", "gate_activation": "sigmoid"},
    "hf-add-silu": {"rounding": "hf", "residual": "bf16", "activation": "silu"},
    "everything": {"residual": "f32", "dropout": True, "pre_activation": "gelu", "activation": "silu"},
}


def _staged_norms(arch: int) -> Iterator[Kernel]:
    """Each direction with some stages; of the architectures one of each generation."""
    if arch not in (80, 90, 120):
        return
    # Rounding, gates and an expensive activation also beside float32 parameters, which take the most registers.
    beside_f32 = [*(_STAGES[name] for name in ("hf", "gate-f32", "gate-first-f32")), {"pre_activation": "gelu"}]
    wanted = [*product(_STAGED_LENGTHS, ["bf16"], _STAGES.values()), *product(_STAGED_LENGTHS, ["f32"], beside_f32)]
    for cols, weight, stages in wanted:
        for spec in planner.family(cols, "bf16", weight, **{"rms": False, **stages}):
            yield from _with_helpers(spec, planner.contiguous_access(spec), arch)


# Grid rationale. Rows in part of a warp, of single elements, in a warp, and in warps that do the work of several.
def _norms_with_codes(arch: int) -> Iterator[Kernel]:
    """Codes after all stages: float8, which older architectures round in integers, and int8 beside y."""
    codes = *(Codes("float8_e4m3fn", scales) for scales in ("given", "row", "block")), Codes("int8", "row", True)
    for cols, stages, code in product((64, 255, 1024, 4096, 8192), ({}, {"rms": True}, *_STAGES.values()), codes):
        for weight in ("bf16", "f32"):
            spec = replace(planner.family(cols, "bf16", weight, **{"rms": False, **stages})[0], codes=code)
            yield spec, planner.contiguous_access(spec)


def _norms_in_passes(arch: int) -> Iterator[Kernel]:
    """Both passes of rows that lie in pieces, in either direction; of the architectures one of each generation."""
    if arch not in (80, 90, 120):
        return
    for cols, weight, stages in product(_STAGED_LENGTHS, ("bf16", "f32"), ({}, {"rms": True}, *_STAGES.values())):
        for spec in planner.family(cols, "bf16", weight, **{"rms": False, **stages})[1:]:
            yield from ((each, planner.contiguous_access(each)) for each in planner.in_passes(spec))


_OTHERS = [name for name in GENERATIONS if name != "hopper"]


@pytest.mark.parametrize(
    ("grid", "strength", "generations"),
    [
        pytest.param(_norms, 1, GENERATIONS, id="norms-some"),
        pytest.param(_norms, 2, GENERATIONS, id="norms-pairs", marks=pytest.mark.slow),
        pytest.param(_staged_norms, 1, GENERATIONS, id="staged-some"),
        pytest.param(_norms_with_codes, 1, GENERATIONS, id="codes-some"),
        pytest.param(_norms_with_codes, 2, GENERATIONS, id="codes-pairs", marks=pytest.mark.slow),
        pytest.param(_norms_in_passes, 1, GENERATIONS, id="passes-some"),
        pytest.param(_norms_in_passes, 2, GENERATIONS, id="passes-pairs", marks=pytest.mark.slow),
        pytest.param(_staged_norms, None, ["hopper"], id="staged-hopper", marks=pytest.mark.slow),
        pytest.param(_staged_norms, 2, _OTHERS, id="staged-pairs", marks=pytest.mark.slow),
    ],
)
def test_no_kernel_spills(grid: Grid, strength: int | None, generations: list[str]) -> None:
    """With stages on sm_90 every kernel, else those with every pair of values, compiles without local memory."""
    assert_no_local_memory(grid, strength, generations)


def test_a_spill_is_found() -> None:
    """A kernel that needs more registers than its launch bounds allow is reported."""
    assert "spill" in (local_memory(_CONTROL, "control", 90) or "")


# Grid rationale. Beside dtype and length, alignment of the rows and strides decide the code of a load.
_COLS = (255, 4096, 32768)


@pytest.mark.parametrize("rms", [False, True])
@pytest.mark.parametrize("cols", _COLS)
@pytest.mark.parametrize("direction", ["inference", "forward", "backward", "backward_weight"])
@pytest.mark.parametrize(
    "access", [Access(2, 2, 2, 2), Access(4, 8, 16, 2, True, False), Access(strided_x=True, strided_y=True)], ids=str
)
def test_every_access_compiles(direction: str, access: Access, cols: int, rms: bool) -> None:
    """Unaligned and strided rows have kernels too, for LayerNorm and RMSNorm."""
    spec = RowNormSpec(direction, rms, cols, "bf16", "f32", "f32", None, True, (True, True, False))
    _assert_compiles(spec, access, 90)


def _assert_compiles(spec: RowNormSpec, access: Access, arch: int) -> None:
    source = planner.source_of(spec, access, plan_row_norm(spec, access, KNOWN_DEVICES[arch]))
    assert compile_source(source.text(), arch)[0].startswith(b"\x7fELF")


@pytest.mark.parametrize("arriving", [False, True])
@pytest.mark.parametrize("cols", _COLS)
@pytest.mark.parametrize("direction", ["forward", "backward", "backward_weight"])
@pytest.mark.parametrize(
    "access", [Access(2, 2, 2, 2, True, True, 4, 2, True, True), Access(4, 8, 16, 2, residual=8)], ids=str
)
def test_every_access_compiles_with_stages(direction: str, access: Access, cols: int, arriving: bool) -> None:
    """Residuals, arriving gradients and x beside h may be unaligned and strided too."""
    stages = {"residual": "f32", "pre_activation": "silu", "activation": "tanh", "dropout": True}
    spec = RowNormSpec(direction, False, cols, "bf16", "f32", "f32", "bf16", True, **stages)
    _assert_compiles(replace(spec, dh=arriving, dresidual=not arriving), access, 90)


# Grid rationale. As above; a gate of fp32 may begin anywhere, and every kernel that knows groups has them once.
@pytest.mark.parametrize("arch", [80, 90])
@pytest.mark.parametrize("cols", _COLS)
@pytest.mark.parametrize("direction", ["inference", "forward", "backward", "backward_weight"])
@pytest.mark.parametrize("gate_first", [False, True])
def test_every_access_compiles_with_a_gate(direction: str, gate_first: bool, cols: int, arch: int) -> None:
    """Gates may be unaligned and strided, in groups of columns or without, and their gradient need not be wanted."""
    gate = {"gate": "f32", "gate_activation": "silu", "gate_first": gate_first, "grouped": arch == 90}
    spec = RowNormSpec(direction, False, cols, "bf16", "f32", "bf16", "bf16", dresidual=cols != 255, **gate)
    _assert_compiles(spec, anywhere(spec), arch)


def test_compile_error_holds_the_log() -> None:
    """A source that does not compile raises with the compiler's words."""
    with pytest.raises(CompileError, match=r"(?s)sm_90.*nonsense"):
        compile_source("nonsense", 90)


@pytest.mark.parametrize("damage", ["truncated", "garbage", "foreign", "writable"])
def test_bad_cubins_are_compiled_again(damage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel on disk is used if it is whole and of its key, and compiled again otherwise."""
    monkeypatch.setenv("KERNEL_FUSION_CACHE_DIR", str(tmp_path / "cache"))
    spec = RowNormSpec("inference", False, 64, "f32", "f32")
    source = planner.source_of(spec, Access(), planned(spec, KNOWN_DEVICES[90])).text()
    start = counters.compiled, counters.from_disk
    code = cubin(source, 90)
    assert cubin(source, 90) == code
    assert (counters.compiled - start[0], counters.from_disk - start[1]) == (1, 1)
    (path,) = CUBINS.entries()
    if damage == "truncated":
        path.write_bytes(path.read_bytes()[:-7])
    elif damage == "garbage":
        path.write_bytes(b"garbage" * 1000)
    elif damage == "foreign":
        cubin(source, 80)
        (other,) = set(CUBINS.entries()) - {path}
        other.rename(path)
        start = start[0] + 1, start[1]
    else:
        path.chmod(0o666)
    assert cubin(source, 90) == code
    assert (counters.compiled - start[0], counters.from_disk - start[1]) == (2, 1)


# Lengths of every natural alignment, which decides the vectors: integers alone would seldom be multiples of 64.
_any_length = st.integers(0, 12).flatmap(lambda shift: st.integers(1, 300_000 >> shift).map(lambda n: n << shift))
_fields = {
    "direction": st.sampled_from(["inference", "forward", "backward", "backward_weight"]),
    "rms": st.booleans(),
    "cols": _any_length,
    "x": st.sampled_from(list(ITEMSIZE)),
    "y": st.sampled_from(list(ITEMSIZE)),
    "weight": st.sampled_from([None, *ITEMSIZE]),
    "bias": st.sampled_from([None, *ITEMSIZE]),
    "grads": st.tuples(st.booleans(), st.booleans(), st.booleans()).filter(any),
}
_specs_of_any_length = st.builds(RowNormSpec, **_fields)
_specs_with_a_gate = st.builds(
    RowNormSpec,
    **_fields,
    gate=st.sampled_from(list(ITEMSIZE)),
    gate_activation=st.sampled_from(["identity", "silu"]),
    gate_first=st.booleans(),
    grouped=st.booleans(),
    dresidual=st.booleans(),
)


def _with_a_gate_or_without_a_residual(spec: RowNormSpec) -> RowNormSpec:
    """The spec with those gradients and gates alone that go with its residual."""
    if not spec.residual:
        return replace(spec, dh=False, dresidual=False, residual_gate=None)
    return replace(spec, dgate=spec.residual_gate is not None and spec.dresidual)


_specs_with_stages = st.builds(
    RowNormSpec,
    **_fields,
    residual=st.sampled_from([None, *ITEMSIZE]),
    pre_activation=st.sampled_from(["identity", "gelu"]),
    activation=st.sampled_from(["identity", "relu"]),
    dropout=st.booleans(),
    residual_gate=st.sampled_from([None, *ITEMSIZE]),
    dh=st.booleans(),
    dresidual=st.booleans(),
).map(_with_a_gate_or_without_a_residual)
_devices = st.sampled_from(list(KNOWN_DEVICES.values()))


# The examples: rows that the warps of their cluster do not divide, of which the last block of 16 has few columns.
@given(spec=st.one_of(_specs_of_any_length, _specs_with_stages, _specs_with_a_gate), device=_devices)
@example(spec=RowNormSpec("forward", False, 33344, "bf16", "bf16"), device=KNOWN_DEVICES[90])
@example(spec=RowNormSpec("backward", False, 106539, "bf16", "bf16", "bf16", "bf16"), device=KNOWN_DEVICES[90])
@settings(max_examples=2000, deadline=None)
def test_plans_are_sound(spec: RowNormSpec, device: Device) -> None:
    """Every plan fits its device and covers the row, whether rows are aligned or begin anywhere."""
    for access in (planner.contiguous_access(spec), anywhere(spec)):
        plan = plan_row_norm(spec, access, device)
        assert_sound(spec, access, plan, device)
        if spec.direction in ("inference", "forward") and not (plan.ring.slots or plan.tiled):
            dtypes = filter(None, (spec.y, spec.weight, spec.bias, spec.residual, spec.gate, spec.residual_gate))
            assert plan.vec * max(ITEMSIZE[dtype] for dtype in dtypes) <= 16


# The examples: lengths whose trees tuned rows choose, of a norm whose parameters groups of rows share on a GPU; and a
# row that is short enough for a tile.
@given(
    spec=st.one_of(_specs_of_any_length, _specs_with_stages, _specs_with_a_gate),
    device=_devices,
    other=_specs_of_any_length,
)
@example(
    spec=RowNormSpec("forward", True, 4096, "bf16", "bf16", "bf16"),
    device=KNOWN_DEVICES[90],
    other=RowNormSpec("forward", True, 1, "f32", "f32", "f32"),
)
@example(
    spec=RowNormSpec("forward", False, 3072, "bf16", "bf16", "bf16", "bf16"),
    device=KNOWN_DEVICES[90],
    other=RowNormSpec("forward", False, 1, "f32", "f32", "f32"),
)
@example(
    spec=RowNormSpec("inference", False, 3, "f16", "f16", grads=(False, False, True)),
    device=KNOWN_DEVICES[90],
    other=RowNormSpec("inference", False, 1, "f16", "f16", grads=(False, False, True)),
)
@settings(max_examples=500, deadline=None)
def test_the_tree_depends_on_length_and_types_alone(spec: RowNormSpec, device: Device, other: RowNormSpec) -> None:
    """Gradients, an offset, groups and the memory layout do not change how a row is summed."""
    varied = replace(spec, grads=other.grads, offset=not spec.offset, grouped=not spec.grouped)
    if spec.gate is not None:
        varied = replace(varied, dresidual=not spec.dresidual)
    moved = plan_row_norm(spec, anywhere(spec), device)
    assert tree(planned(spec, device)) == tree(planned(varied, device)) == tree(moved)


# The examples: a row that is read twice, whose weight, were it wider, would leave the cache no room for it; one that
# streams by helpers of which wider parameters ask for more; and one that streams by few warps, with parameters and
# without.
@given(spec=_specs_of_any_length, device=_devices, other=_specs_of_any_length)
@example(
    spec=RowNormSpec("forward", True, 24576, "bf16", "bf16", "bf16"),
    device=KNOWN_DEVICES[90],
    other=RowNormSpec("forward", True, 1, "f32", "f32", "f32"),
)
@example(
    spec=RowNormSpec("forward", False, 32768, "bf16", "bf16", "bf16", "bf16"),
    device=KNOWN_DEVICES[90],
    other=RowNormSpec("forward", False, 1, "f32", "f32", "f32", "f32"),
)
@example(
    spec=RowNormSpec("forward", False, 7169, "f16", "f16"),
    device=KNOWN_DEVICES[90],
    other=RowNormSpec("forward", False, 1, "f32", "f32", "f32", "f32"),
)
@settings(max_examples=500, deadline=None)
def test_other_types_than_that_of_x_decide_the_vectors_alone(
    spec: RowNormSpec, device: Device, other: RowNormSpec
) -> None:
    """The same lanes and warps share a row whatever the parameters and, forward, the output; so the tree differs only
    where vectors do. Long fp16 and bf16 rows in narrow vectors stream by few warps on sm_90, but only where y has the
    type of x, and in vectors of two and four only where the parameters are no wider either; so those are kept there."""
    backward = spec.direction.startswith("backward")
    streams = not backward and device.arch == 90 and ITEMSIZE[spec.x] == 2 and spec.cols % 8 != 0 and spec.cols > 6656
    varied = replace(other, direction=spec.direction, rms=spec.rms, cols=spec.cols, x=spec.x)
    if backward or streams:
        varied = replace(varied, y=spec.y)
    if streams and spec.cols % 2 == 0:
        varied = replace(varied, weight=spec.weight, bias=spec.bias)
    one, two = planned(spec, device), planned(varied, device)
    assert (one.lanes, one.warps) == (two.lanes, two.warps)
    assert one.vec != two.vec or tree(one) == tree(two)


@given(spec=_specs_of_any_length, device=_devices)
@settings(max_examples=200, deadline=None)
def test_inference_and_training_share_the_tree(spec: RowNormSpec, device: Device) -> None:
    """Inference and training forward sum a row in the same order."""
    plans = [planned(replace(spec, direction=direction), device) for direction in ("inference", "forward")]
    assert tree(plans[0]) == tree(plans[1])


# Grid rationale. Both sides of every edge of the rule: RMSNorm, of full vectors, from where a block cannot hold them.
@pytest.mark.parametrize(
    ("dtype", "rms", "twice", "once"),
    [
        ("bf16", False, (), (16384, 17408, 24576, 32760, 32768, 33024, 65536, 4097, 17412, 32769, 50257)),
        ("bf16", True, (17408, 24576), (16384, 24584, 32768, 65536, 66048, 4097, 17412, 32769, 50257)),
        ("f32", False, (), (16384, 17408, 24576, 32768, 16385)),
        ("f32", True, (17408, 24576), (16384, 24580, 32768, 33280, 16385)),
    ],
)
def test_rows_that_are_read_twice(dtype: str, rms: bool, twice: tuple[int, ...], once: tuple[int, ...]) -> None:
    """On sm_90 one block reads them twice, and the first vectors that give the center are at least a ninth of a row."""
    for cols in (*twice, *once):
        plan = planned(RowNormSpec("forward", rms, cols, dtype, dtype, dtype, dtype), KNOWN_DEVICES[90])
        assert (plan.cluster == 1 and not plan.resident) == (cols in twice), cols
        if cols in twice:
            vectors = -(-cols // (plan.vec * plan.lanes * plan.warps))
            assert 9 * plan.batches[0] >= vectors >= max(plan.batches)


def _elements(plan: Plan, cols: int) -> int:
    return -(-cols // (plan.vec * plan.lanes * plan.warps)) * plan.vec


def test_finish_of_few_columns_has_more_threads() -> None:
    """Up to 256 columns a block of 1024 threads adds the partial rows."""
    specs = [SumPartialsSpec(cols, "f32", "bf16", "bf16") for cols in (1, 256, 257)]
    assert [planner.plan_for(spec, Access(), KNOWN_DEVICES[90]).threads for spec in specs] == [1024, 1024, 256]


# Grid rationale. Each tensor by itself; rows of part of a warp, a warp, a block, and of clusters, which stream; vectors
# of four elements by nature (1604).
@pytest.mark.parametrize("wider", [{"weight": "f32"}, {"bias": "f32"}, {"y": "f32"}, {"residual": "f32"}], ids=str)
@pytest.mark.parametrize("cols", [64, 768, 1604, 4096, 16384, 24576, 65536])
def test_no_vector_of_forward_has_more_than_16_bytes(wider: dict[str, str], cols: int) -> None:
    """The threads stay the same. Streamed rows, whose parameters stay in registers, require it of y only."""
    spec = RowNormSpec("forward", False, cols, "bf16", "bf16", "bf16", "bf16", residual=wider.get("residual"))
    device = KNOWN_DEVICES[90]
    plan = planned(replace(spec, **wider), device)
    same = planned(replace(spec, residual=spec.residual and "bf16"), device)
    assert plan.vec == (8 if plan.ring.slots and "y" not in wider else 4)
    assert (plan.lanes, plan.warps) == (same.lanes, same.warps)


@pytest.mark.parametrize(
    ("cols", "vec", "rows"), [(1024, 4, 8), (5120, 4, 2), (5000, 8, 1), (3000, 8, 4), (768, 4, 12)]
)
def test_backward_beside_dy_of_fp32(cols: int, vec: int, rows: int) -> None:
    """On sm_90 vectors of dy have 16 bytes, but where rows end among them; no block has 20 warps there, which spill."""
    plan = planned(RowNormSpec("backward", False, cols, "bf16", "f32", "f32", "f32"), KNOWN_DEVICES[90])
    assert (plan.vec, plan.per_block) == (vec, rows)


@pytest.mark.parametrize(("cols", "rows"), [(640, 7), (768, 7), (1408, 3), (2944, 1)])
def test_rows_of_large_slots(cols: int, rows: int) -> None:
    """On sm_90 backward beside a residual of fp32 takes as many rows at a time as have four slots each."""
    spec = RowNormSpec("backward", True, cols, "bf16", "bf16", "bf16", None, residual="f32", dh=True, dresidual=True)
    plan = planned(spec, KNOWN_DEVICES[90])
    assert (plan.per_block, plan.ring.slots) == (rows, 4)


@pytest.mark.parametrize(("dtype", "cols"), [("bf16", 50002), ("bf16", 64000), ("bf16", 128000), ("f32", 32000)])
def test_rows_of_clusters_stream(dtype: str, cols: int) -> None:
    """Lengths that more elements to a thread would divide are streamed like their neighbours."""
    plan = planned(RowNormSpec("forward", False, cols, dtype, dtype, dtype, dtype), KNOWN_DEVICES[90])
    assert plan.ring.slots > 1
    assert _elements(plan, cols) <= 32


# Grid rationale. Both sides of every edge of the rule: vectors of 2 bytes up to 1024 columns, of 4 bytes up to 192 of
# them, never wider ones.
@pytest.mark.parametrize(
    ("dtype", "tiled", "not_tiled"),
    [
        ("bf16", (1, 3, 17, 255, 1023, 130, 382), (4, 252, 256, 1025, 386)),
        ("f32", (1, 17, 191), (2, 193, 255)),
        ("f64", (), (1, 17)),
    ],
)
def test_rows_taken_many_at_a_time(dtype: str, tiled: tuple[int, ...], not_tiled: tuple[int, ...]) -> None:
    """Short rows of narrow vectors, from sm_90 on and without a residual or a gate."""
    for cols in (*tiled, *not_tiled):
        spec = RowNormSpec("forward", False, cols, dtype, dtype, dtype, dtype)
        assert planned(spec, KNOWN_DEVICES[90]).tiled == (cols in tiled), cols
        assert not planned(spec, KNOWN_DEVICES[80]).tiled
        assert not planned(replace(spec, residual=dtype), KNOWN_DEVICES[90]).tiled
        assert not planned(replace(spec, gate=dtype), KNOWN_DEVICES[90]).tiled


@given(
    spec=st.one_of(_specs_of_any_length, _specs_with_a_gate).filter(lambda spec: spec.direction != "backward_weight"),
    device=_devices,
)
@example(RowNormSpec("inference", False, 16577, "f16", "f16"), KNOWN_DEVICES[90])  # six slots, fewer helpers
@example(RowNormSpec("backward", False, 8, "f16", "f32", None, "f64"), KNOWN_DEVICES[90])  # backward reads no such bias
@example(RowNormSpec("backward", False, 272, "f16", "f16"), KNOWN_DEVICES[90])  # `few` needs three slots
@settings(max_examples=200, deadline=None)
def test_executors_are_sound(spec: RowNormSpec, device: Device) -> None:
    """The plans that test_cuda_executors.py forces upon a GPU are sound and keep the tree."""
    plan, access = planned(spec, device), planner.contiguous_access(spec)
    for other in executors(spec, plan, device):
        assert_sound(spec, access, other, device)
        assert tree(other) == tree(plan)


# Grid rationale. Through shared memory go rows that need a cluster in forward, and all of 256 columns or more in
# backward, several at a time. Four slots let a test try two, three and four.
@pytest.mark.parametrize(("direction", "cols"), [("forward", 65536), ("backward", 1024), ("backward", 4096)])
def test_executors_of_streamed_rows(direction: str, cols: int) -> None:
    """On sm_90 a streamed plan has direct executors, and streamed ones with every number of slots, and all compile."""
    spec, device = RowNormSpec(direction, False, cols, "bf16", "bf16", "bf16", "bf16"), KNOWN_DEVICES[90]
    plan, access = planned(spec, device), planner.contiguous_access(spec)
    plans = executors(spec, plan, device)
    assert {other.ring.slots for other in [plan, *plans]} == {0, 2, 3, 4}
    for other in plans:
        assert compile_source(planner.source_of(spec, access, other).text(), 90)[0].startswith(b"\x7fELF")
