"""The modulated norms: against float64 by the oracle's budget, in place of their parts, and refused by name."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from covering import triples
from support import CPU, CUDA, EAGER, TRITON, Target, check
from test_errors import outcome
from torch import Tensor
from torch.nn import functional as F

import kernel_fusion as kf
from kernel_fusion.core.groups import Groups, groups_of
from kernel_fusion.testing.oracle import ModulatedNormCase, Tensors, run

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
VERBS = ("modulated_layer_norm", "modulated_rms_norm")


def _backend(target: Target) -> str:
    return target.backend


# ---- Against float64 -------------------------------------------------------------------------------------------------


# Grid rationale. x, scale, shift and y each have a load or store of their own; a sample has rows for one block or for
# several, and its numbers meet kernels of the bare norm and, beside another dtype of y or an activation, those with
# stages.
@pytest.mark.parametrize(("dtype", "out"), [*product((F16, BF16, F32), (None, BF16, F32))])
@pytest.mark.parametrize("scale", [F32, BF16])
@pytest.mark.parametrize("shift", [None, F32, F16])
@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize("varies", [(3, 1), (3, 20), (20,)], ids=["sample", "token", "position"])
def test_dtype_mixes(
    varies: tuple[int, ...], activation: Any, shift: Any, scale: Any, dtype: Any, out: Any, target: Target
) -> None:
    """Any mix of the dtypes of x, scale, shift and y is within budget."""
    options: dict[str, Any] = {"scale": scale, "shift": shift, "out_dtype": out, "activation": activation}
    for verb in VERBS:
        check(ModulatedNormCase(verb, (3, 20, 255), dtype, varies=varies, **options), target)


# Grid rationale. As for the bare norms: vectors, tails, warps, clusters, and rows that do not stay on chip.
@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", [F32, BF16, F64])
@pytest.mark.parametrize("cols", [8, 17, 64, 1000, 1024, 4096, 4099, 12288, 32768])
@pytest.mark.parametrize("varies", [(2, 1), (2, 65)], ids=["sample", "token"])
def test_row_lengths(cols: int, varies: tuple[int, ...], dtype: torch.dtype, target: Target) -> None:
    """Any row length is within budget."""
    rows = 65 if cols < 2000 else 3
    varies = (2, min(rows, varies[1]))
    for verb in VERBS:
        check(ModulatedNormCase(verb, (2, rows, cols), dtype, scale=dtype, shift=dtype, varies=varies), target)


# Grid rationale. The gate has a load of its own beside what is before it, and its gradient a sum beside two others, by
# groups and by blocks of rows; the lengths are those of rows that a program or a thread holds, and of others. Types are
# those of x, the gate and the residual.
@pytest.mark.covering(1)
@triples(
    dtypes=(*product((F32, BF16, F16), (F32, BF16), (F32, BF16)), (F64, F64, F64)),
    before=({}, {"pre_activation": "silu"}, {"dropout_p": 0.25}),
    cols=(17, 255, 4096, 33000),
    varies=((2, 1), (2, 70), (70,), ()),
)
def test_gated_sums(dtypes: Any, before: Any, cols: int, varies: tuple[int, ...], target: Target) -> None:
    """h, y and every gradient of a gated addition are within budget, whatever stands before the gate."""
    dtype, gate, residual = dtypes
    rows = 70 if cols < 4096 else 3
    varies = tuple(min(size, rows) for size in varies)
    options: dict[str, Any] = {"gate": gate, "residual": residual, "scale": gate, "shift": gate, **before}
    for verb in VERBS:
        check(ModulatedNormCase(f"add_{verb}", (2, rows, cols), dtype, varies=varies, **options), target)


# Grid rationale. With one dtype for all, the CPU stores these gradients as it computes them: of rows that its loops
# keep, and of rows of several stretches.
@pytest.mark.parametrize("dtype", [F32, BF16, F16])
@pytest.mark.parametrize("cols", [17, 1000, 2500])
@pytest.mark.parametrize("gated", [False, True])
def test_rows_that_share_nothing(gated: bool, cols: int, dtype: torch.dtype) -> None:
    """Gradients of scales, shifts and gates per token, all of x's dtype, are within budget, in strided rows too."""
    options: dict[str, Any] = {"gate": dtype, "residual": dtype, "layout": "padded"} if gated else {}
    verb = "add_modulated_layer_norm" if gated else "modulated_layer_norm"
    check(ModulatedNormCase(verb, (2, 3, cols), dtype, scale=dtype, shift=dtype, varies=(2, 3), **options), CPU)


# Grid rationale. Weight and bias are multiplied into what varies most, in the dtypes of x, of the parameters, and of y;
# a gate per token varies beside a weight that does not.
@pytest.mark.covering(1)
@pytest.mark.parametrize("dtypes", [(F32, F32), (BF16, BF16), (BF16, F32), (F16, BF16)])
@pytest.mark.parametrize("out", [None, BF16, F32])
@pytest.mark.parametrize("varies", [((2, 7), None), ((2, 1), (2, 7)), ((2, 7), (7,))], ids=str)
@pytest.mark.parametrize("verb", [*VERBS, "add_modulated_layer_norm", "add_modulated_rms_norm"])
def test_a_weight_beside_numbers_per_token(verb: str, varies: Any, out: Any, dtypes: Any, target: Target) -> None:
    """A weight and a bias of the norm's own are within budget where every token has a scale or a shift."""
    dtype, other = dtypes
    options: dict[str, Any] = {"varies": varies[0], "shift_varies": varies[1], "out_dtype": out}
    options |= dict.fromkeys(("weight", "bias", "scale", "shift"), other)
    options |= {"residual": dtype, "gate": other} if verb.startswith("add_") else {}
    check(ModulatedNormCase(verb, (2, 7, 255), dtype, weight_offset=0.5, **options), target)


@pytest.mark.covering(1)
@pytest.mark.parametrize("layout", ["padded", "unaligned", "transposed", "half", "channels-last", "expanded"])
@pytest.mark.parametrize("varies", [(5, 1, 1), (3, 4), (3, 1), (5, 3, 4)], ids=str)
def test_layouts(varies: tuple[int, ...], layout: str, target: Target) -> None:
    """Strided rows, permuted dimensions and storage offsets are within budget, whatever the groups."""
    options: dict[str, Any] = {"layout": layout, "scale": F32, "shift": BF16, "varies": varies}
    check(ModulatedNormCase("modulated_layer_norm", (5, 3, 4, 255), BF16, **options), target)
    options |= {"residual": F32, "gate": BF16}
    check(ModulatedNormCase("add_modulated_rms_norm", (5, 3, 4, 255), BF16, **options), target)


@pytest.mark.parametrize("shape", [(0, 3, 8), (2, 0, 8), (2, 3, 0)])
def test_empty(shape: tuple[int, ...], target: Target) -> None:
    """Empty inputs give empty results and zero gradients of scale and shift."""
    check(ModulatedNormCase("modulated_layer_norm", shape, F32, shift=F32, varies=(shape[0], 1)), target)


def test_several_normalized_dimensions(target: Target) -> None:
    """Rows may span several last dimensions."""
    case = ModulatedNormCase("modulated_layer_norm", (4, 3, 5, 17), F32, 2, shift=F32, varies=(4, 1))
    check(case, target)


# ---- What it is the same as ------------------------------------------------------------------------------------------


def test_one_row_for_all_is_the_plain_norm(any_target: Target) -> None:
    """A scale of the normalised shape, with leading dimensions of size 1 or without, is a weight with an offset."""
    x, (scale, shift) = torch.randn(2, 9, 96, device=any_target.device), torch.randn(2, 96, device=any_target.device)
    with any_target.ran(forward=3):
        plain = kf.layer_norm(x, 96, scale, shift, weight_offset=1.0, backend=any_target.backend)
        for leading in ((), (1, 1)):
            modulation = (t.view(*leading, 96) for t in (scale, shift))
            y = kf.modulated_layer_norm(x, 96, *modulation, backend=any_target.backend)
            assert torch.equal(y, plain)


# Grid rationale. Vectors broadcast in every way over samples and tokens; for one token alone, two ways have one shape.
# A weight of the norm's own is multiplied into them. Types are those of x and of the vectors.
@pytest.mark.covering(1, "on.backend", "affine")
@pytest.mark.parametrize("verb", [*VERBS, "add_modulated_layer_norm", "add_modulated_rms_norm"])
@pytest.mark.parametrize("varies", [(3, 1), (3, 5), (1, 5), (5,), (1, 1), ()], ids=str)
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("dtypes", [(F32, BF16), (BF16, F32), (BF16, BF16)])
@pytest.mark.parametrize(
    "on", [CPU, EAGER, TRITON, pytest.param(CUDA, marks=pytest.mark.cuda)], ids=lambda t: t.backend
)
def test_one_token_alone(on: Target, dtypes: Any, affine: bool, varies: tuple[int, ...], verb: str) -> None:
    """A token without the others of its sample, and without other samples, has the same bits, in y, h and dx."""
    dtype, other = dtypes
    options: dict[str, Any] = {"scale": other, "shift": other, "gate": None, "varies": varies}
    options |= {"weight": other, "bias": other, "weight_offset": 0.5} if affine else {}
    options |= {"residual": dtype, "gate": other} if verb.startswith("add_") else {}
    case = ModulatedNormCase(verb, (3, 5, 96), dtype, **options)
    inputs = case.make_inputs(on.device)

    def part(t: Tensor | None, samples: slice, tokens: slice) -> Tensor | None:
        if t is None or t.dim() == 1:
            return t
        cut = t.detach() if t.dim() == 3 else t.detach()[None]
        cut = cut if cut.shape[0] == 1 else cut[samples]
        return (cut if cut.shape[1] == 1 else cut[:, tokens]).requires_grad_(t.requires_grad)

    expected = run(case, inputs, on.backend)
    for samples, tokens in ((slice(1, 2), slice(None)), (slice(None), slice(2, 3)), (slice(1, 2), slice(2, 3))):
        few = Tensors(**{name: part(t, samples, tokens) for name, t in vars(inputs).items()})
        for name, t in run(case, few, on.backend).items():
            if name in ("y", "h", "dx", "dresidual"):
                assert torch.equal(t, expected[name][samples, tokens]), (name, samples, tokens)


# Grid rationale. Samples of rows that are one block of backward, and several; shorter rows are summed in other ways.
@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("rows", [5, 300])
@pytest.mark.parametrize("cols", [96, 1000])
def test_samples_are_norms_of_their_own(cols: int, rows: int, dtype: torch.dtype, target: Target) -> None:
    """y, dx and on the CPU dscale and dshift of a sample have the bits of a call with this sample alone."""
    x, dy = torch.randn(2, 3, rows, cols, device=target.device).to(dtype).unbind()
    projection = torch.randn(3, 1, 2 * cols, device=target.device).to(dtype)

    def run(part: slice) -> list[Tensor]:
        leaves = [x[part].clone().requires_grad_(), projection[part].clone().requires_grad_()]
        scale, shift = leaves[1].chunk(2, -1)
        y = kf.modulated_layer_norm(leaves[0], cols, scale, shift, backend=target.backend)
        return [y.detach(), *torch.autograd.grad(y, leaves, dy[part])][: 3 if target == CPU else 2]

    with target.ran(forward=4, backward=4):
        whole = run(slice(None))
        for i in range(3):
            alone = run(slice(i, i + 1))
            assert all(torch.equal(ours[i : i + 1], theirs) for ours, theirs in zip(whole, alone, strict=True))


def test_many_groups(target: Target) -> None:
    """There may be more groups than a grid of CUDA has blocks along its second dimension."""
    check(ModulatedNormCase("modulated_rms_norm", (2, 35000, 8), F32, shift=F32, varies=(2, 35000)), target)


@pytest.mark.parametrize(("dtype", "residual"), [(BF16, F32), (BF16, BF16), (F32, BF16), (F16, BF16)])
def test_the_gated_sum_is_rounded_once(dtype: torch.dtype, residual: torch.dtype, any_target: Target) -> None:
    """h is the exact sum in the residual's dtype, and y the modulated norm of this h, in the input's dtype."""
    x, r = torch.randn(2, 2, 5, 96, device=any_target.device).unbind()
    x, r = x.to(dtype), r.to(residual)
    shift, scale, gate = torch.randn(2, 1, 288, device=any_target.device).to(dtype).chunk(3, -1)
    options: dict[str, Any] = {"backend": any_target.backend}
    y, h = kf.add_modulated_layer_norm(x, r, 96, scale, shift, gate=gate, **options)
    exact = r.double() + gate.double() * x.double()
    # In float32 both the product and the sum are rounded before.
    assert ((h.double() - exact).abs() <= (torch.finfo(residual).eps / 2 + 2e-7) * (exact.abs() + 1e-6) + 1e-6).all()
    assert h.dtype == residual
    assert torch.equal(y, kf.modulated_layer_norm(h, 96, scale, shift, out_dtype=dtype, **options))


# ---- Groups ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("parameter", "groups"),
    [
        ((8,), Groups(1, 1)),
        ((2, 1, 1, 8), Groups(2, 12)),
        ((2, 3, 1, 8), Groups(6, 4)),
        ((4, 8), Groups(4, 1)),
        ((1, 3, 4, 8), Groups(12, 1)),
        ((2, 3, 4, 8), Groups(24, 1)),
        ((1, 3, 1, 8), None),
        ((2, 1, 4, 8), None),
    ],
)
def test_groups(parameter: tuple[int, ...], groups: Groups | None) -> None:
    """The rows that broadcasting gives the same parameters are those of a group."""
    assert groups_of((2, 3, 4, 8), parameter, 1) == groups
    if groups is not None:
        names = torch.arange(groups.count).view(parameter[:-1]).expand(2, 3, 4).flatten()
        assert names.tolist() == [row // groups.inner % groups.count for row in range(24)]


# ---- Refusals --------------------------------------------------------------------------------------------------------

_X, _S = torch.ones(2, 3, 8), torch.ones(2, 1, 8)
_FIT = "must end with `normalized_shape`, [8], and broadcast to the shape of `input`, [2, 3, 8], got"
_REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "none": (
        {"scale": None},
        "TypeError",
        "`scale` must be a tensor, got None; without one the verb is `add_rms_norm`",
    ),
    "residual": (
        {"residual": None},
        "TypeError",
        "`residual` must be a tensor, got None; without one the verb is `modulated_rms_norm`",
    ),
    "number": ({"shift": 1.0}, "TypeError", "`shift` must be a tensor, got 1.0"),
    "rows": ({"scale": _X[:, :2]}, "RuntimeError", f"`scale` {_FIT} [2, 2, 8]"),
    "columns": ({"shift": torch.ones(2, 1, 1)}, "RuntimeError", f"`shift` {_FIT} [2, 1, 1]"),
    "dimensions": ({"scale": _S[None]}, "RuntimeError", f"`scale` {_FIT} [1, 2, 1, 8]"),
    "gate": ({"gate": _X[:, :2]}, "RuntimeError", f"`gate` {_FIT} [2, 2, 8]"),
    "samples": (
        {"scale": _S[:, 0]},
        "RuntimeError",
        f"`scale` {_FIT} [2, 8]; for one per sample, view it as [2, 1, 8]",
    ),
    "order": (
        {"normalized_shape": _S},
        "TypeError",
        "`normalized_shape` must be an int or a sequence of ints, got Tensor",
    ),
    "dtype": (
        {"scale": _S.double()},
        "RuntimeError",
        "`scale` must be float16 or bfloat16 or float32 for float32 input, got float64",
    ),
    "device": (
        {"shift": _S.to("meta")},
        "RuntimeError",
        "expected all tensors to be on the same device, but `shift` is on meta and `input` is on cpu",
    ),
    "weight_offset": (
        {"weight_offset": 1.0},
        "ValueError",
        "`weight_offset` needs a `weight`, got weight_offset=1.0 without one",
    ),
}


@pytest.mark.parametrize("target", [CPU, TRITON, EAGER], ids=lambda t: t.backend)
@pytest.mark.parametrize("name", _REFUSED)
def test_refusals(name: str, target: Target) -> None:
    """An argument that does not fit is refused in words that name verb and argument."""
    changed, kind, text = _REFUSED[name]
    arguments = {"residual": _X, "normalized_shape": 8, "scale": _S, "backend": target.backend} | changed
    with target.ran(forward=0):
        expected = (kind, f"`add_modulated_rms_norm`: {text}")
        assert outcome(lambda: kf.add_modulated_rms_norm(_X, **arguments)) == expected


def test_a_nested_input_has_one_scale() -> None:
    """Examples of other lengths have no rows in common with a scale that varies."""
    x = torch.nested.nested_tensor([torch.ones(2, 8), torch.ones(3, 8)], layout=torch.jagged)
    with pytest.raises(RuntimeError, match=r"^`modulated_layer_norm`: `scale`.*nested"):
        kf.modulated_layer_norm(x, 8, torch.ones(2, 1, 8))


def test_other_verbs_take_no_groups() -> None:
    """A weight that varies over rows raises PyTorch's error where the verb is no modulated one."""
    theirs = outcome(lambda: F.layer_norm(_X, (8,), _S))
    assert outcome(lambda: kf.layer_norm(_X, 8, _S)) == theirs
    assert outcome(lambda: kf.layer_norm(_X, 8, _S, activation="relu")) == theirs
    assert outcome(lambda: kf.add_layer_norm(_X, _X, 8, _S)) == theirs
    assert outcome(lambda: kf.gated_layer_norm(_X, _X, 8, _S)) == theirs
    assert outcome(lambda: kf.modulated_layer_norm(_X, 8, _S, weight=_S)) == theirs
