"""The gated norms: against float64 by the oracle's budget, in place of their parts, in groups, and refused by name."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from support import CPU, EAGER, TRITON, Target, check
from test_errors import outcome
from torch import Tensor
from torch.nn import functional as F

import kernel_fusion as kf
from kernel_fusion.testing.oracle import GatedNormCase, lay_out

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
VERBS = ("gated_layer_norm", "gated_rms_norm")
_FIRST = pytest.mark.parametrize("first", [False, True], ids=["last", "first"])


# ---- Against float64 -------------------------------------------------------------------------------------------------


# Grid rationale. Every activation on either side of the norm; 255 has full vectors and a tail in every dtype.
@pytest.mark.parametrize("dtype", [F32, BF16, F64])
@_FIRST
@pytest.mark.parametrize("name", [None, *kf.ACTIVATIONS])
def test_activations(name: str | None, first: bool, dtype: torch.dtype, target: Target) -> None:
    """Each activation of the gate is within budget, in value and slope."""
    options: dict[str, Any] = {"gate": dtype, "gate_activation": name, "gate_first": first}
    check(GatedNormCase("gated_layer_norm", (33, 255), dtype, weight=dtype, bias=dtype, **options), target)
    check(GatedNormCase("gated_rms_norm", (33, 255), dtype, weight=dtype, **options), target)


# Grid rationale. x, gate, weight and y each have a load or store of their own; either parameter may be absent.
@pytest.mark.parametrize(("dtype", "gate", "out"), [*product((F16, BF16, F32), (F16, BF16, F32), (None, BF16, F32))])
@_FIRST
@pytest.mark.parametrize("weight", [None, F32, BF16])
def test_dtype_mixes(dtype: torch.dtype, gate: torch.dtype, out: Any, weight: Any, first: bool, target: Target) -> None:
    """Any mix of the dtypes of x, gate, parameters and y is within budget."""
    options: dict[str, Any] = {"gate": gate, "gate_first": first, "out_dtype": out}
    check(GatedNormCase("gated_layer_norm", (7, 255), dtype, weight=weight, bias=F32, **options), target)
    check(GatedNormCase("gated_rms_norm", (7, 255), dtype, weight=F32, bias=weight, **options), target)


# Grid rationale. As for the norms with stages: vectors, tails, warps, clusters, and rows that do not stay on chip.
_LENGTHS = [*product((F32, BF16, F64), (8, 17, 64, 255, 256, 1000, 1024, 4096, 4099, 12288))]
_LENGTHS += product((F32, BF16), (32768, 131072))


@pytest.mark.parametrize(("dtype", "cols"), _LENGTHS)
@_FIRST
def test_row_lengths(dtype: torch.dtype, cols: int, first: bool, target: Target) -> None:
    """Any row length is within budget, as a row and as one of three groups."""
    rows = 1000 if cols < 64 else 65 if cols < 2000 else 3
    options: dict[str, Any] = {"weight": dtype, "bias": dtype, "gate": dtype, "gate_first": first}
    for verb in VERBS:
        check(GatedNormCase(verb, (rows, cols), dtype, **options), target)
        check(GatedNormCase(verb, (rows, 3 * cols), dtype, group_size=cols, **options), target)


@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize("weight", [BF16, F32, None])
@_FIRST
@pytest.mark.parametrize("cols", [255, 4099])
def test_rounding_of_hugging_face(
    cols: int, weight: torch.dtype | None, dtype: torch.dtype, first: bool, target: Target
) -> None:
    """With `rounding="hf"` results are within the budget of what Hugging Face's norms do."""
    options: dict[str, Any] = {"weight": weight, "gate": dtype, "gate_first": first, "rounding": "hf"}
    check(GatedNormCase("gated_rms_norm", (65, cols), dtype, **options), target)
    check(GatedNormCase("gated_layer_norm", (65, cols), dtype, bias=weight, out_dtype=F32, **options), target)
    check(GatedNormCase("gated_rms_norm", (65, 2 * cols), dtype, group_size=cols, **options), target)


# Grid rationale. x, the gate and the cotangent have strides of their own.
@pytest.mark.parametrize("layout", ["padded", "unaligned", "transposed", "half", "channels-last", "expanded"])
@pytest.mark.parametrize("gate_layout", ["contiguous", "half", "unaligned", "transposed", "strided"])
@pytest.mark.parametrize("group_size", [None, 51])
def test_layouts(layout: str, gate_layout: str, group_size: int | None, target: Target) -> None:
    """Strided rows, permuted dimensions and storage offsets are within budget."""
    options: dict[str, Any] = {"layout": layout, "gate_layout": gate_layout, "group_size": group_size, "gate": BF16}
    for verb, first in product(VERBS, (False, True)):
        check(GatedNormCase(verb, (5, 3, 4, 255), BF16, weight=F32, gate_first=first, **options), target)


@pytest.mark.parametrize("shape", [(0, 8), (2, 0, 8), (0,), (3, 0)])
@pytest.mark.parametrize("verb", VERBS)
def test_empty(verb: str, shape: tuple[int, ...], target: Target) -> None:
    """Empty inputs give empty results and zero gradients of the parameters."""
    check(GatedNormCase(verb, shape, F32, weight=F32, bias=F32), target)
    if shape[-1]:
        check(GatedNormCase(verb, shape, F32, weight=F32, bias=F32, group_size=4), target)


@pytest.mark.parametrize("verb", VERBS)
@_FIRST
def test_several_normalized_dimensions(verb: str, first: bool, target: Target) -> None:
    """Rows may span several last dimensions."""
    check(GatedNormCase(verb, (4, 3, 5, 17), F32, 2, weight=F32, bias=F32, gate_first=first), target)


# ---- What it is the same as ------------------------------------------------------------------------------------------


def _gradients(y: Tensor, dy: Tensor, *leaves: Tensor) -> list[Tensor]:
    return [y.detach(), *torch.autograd.grad(y, leaves, dy)]


@_FIRST
@pytest.mark.parametrize("verb", VERBS)
def test_groups_are_norms_of_their_own(verb: str, first: bool, target: Target) -> None:
    """y, dx and dgate of a group have the bits of a call of this group alone, with its weight and bias."""
    x, gate, dy = torch.randn(3, 9, 4 * 96, device=target.device).unbind()
    w, b = torch.randn(2, 4 * 96, device=target.device).unbind()
    leaves = [t.clone().requires_grad_() for t in (x, gate)]
    norm, options = getattr(kf, verb), {"gate_first": first, "eps": 1e-5, "backend": target.backend}
    with target.ran(forward=5, backward=5):
        whole = _gradients(norm(*leaves, 384, w, bias=b, group_size=96, **options), dy, *leaves)
        for i in range(4):
            part = slice(96 * i, 96 * (i + 1))
            alone = [t[:, part].clone().requires_grad_() for t in (x, gate)]
            y = norm(*alone, 96, w[part], bias=b[part], **options)
            for ours, theirs in zip(whole, _gradients(y, dy[:, part].contiguous(), *alone), strict=True):
                assert torch.equal(ours[:, part], theirs)


@_FIRST
def test_one_group_is_the_whole_row(first: bool, any_target: Target) -> None:
    """A group as long as the row is no group, weight and bias gradients included."""
    x, gate, dy = torch.randn(3, 9, 96, device=any_target.device).unbind()
    w, b = torch.randn(2, 96, device=any_target.device).unbind()
    leaves = [t.clone().requires_grad_() for t in (x, gate, w, b)]

    def run(group_size: int | None) -> list[Tensor]:
        x, gate, w, b = leaves
        options: dict[str, Any] = {"gate_first": first, "group_size": group_size, "backend": any_target.backend}
        return _gradients(kf.gated_layer_norm(x, gate, 96, w, b, **options), dy, *leaves)

    with any_target.ran(forward=2, backward=2):
        for ours, theirs in zip(run(96), run(None), strict=True):
            torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("layout", ["half", "padded", "unaligned"])
@_FIRST
@pytest.mark.parametrize("group_size", [None, 64])
def test_a_strided_gate_gives_the_same_bits(layout: str, first: bool, group_size: int | None, target: Target) -> None:
    """A gate that is a slice of a projection is read where it lies; its gradient is contiguous, in its dtype."""
    x, dy = torch.randn(2, 9, 256, device=target.device).unbind()
    options: dict[str, Any] = {"gate_first": first, "group_size": group_size, "backend": target.backend}
    results = []
    for lies in ("contiguous", layout):
        gate = lay_out(torch.randn(9, 256, generator=torch.Generator().manual_seed(0)).to(x.device, BF16), lies)
        gate.requires_grad_()
        with target.ran(backward=1):
            y = kf.gated_rms_norm(x, gate, 256, **options)
            (dgate,) = torch.autograd.grad(y, gate, dy)
        assert dgate.is_contiguous()
        assert dgate.dtype == BF16
        results.append((y.detach(), dgate))
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize("wanted", [*product([False, True], repeat=4)], ids=lambda w: "".join(map(str, map(int, w))))
@_FIRST
@pytest.mark.parametrize("group_size", [None, 48])
def test_any_subset_of_gradients(wanted: tuple[bool, ...], first: bool, group_size: int | None, target: Target) -> None:
    """Whichever gradients are asked for, they are those of the call that asks for all."""
    if not any(wanted):
        wanted = (True, False, False, False)
    x, gate, dy = torch.randn(3, 9, 96, device=target.device).unbind()
    w, b = torch.randn(2, 96, device=target.device).unbind()

    def run(requires: tuple[bool, ...]) -> list[Tensor | None]:
        leaves = [t.clone().requires_grad_(r) for t, r in zip((x, gate, w, b), requires, strict=True)]
        options: dict[str, Any] = {"gate_first": first, "group_size": group_size, "backend": target.backend}
        kf.gated_layer_norm(leaves[0], leaves[1], 96, leaves[2], leaves[3], **options).backward(dy)
        return [t.grad for t in leaves]

    with target.ran(forward=2, backward=2):
        some, every = run(wanted), run((True,) * 4)
    for one, other, is_wanted in zip(some, every, wanted, strict=True):
        if is_wanted:
            assert one is not None
            torch.testing.assert_close(one, other)
        else:
            assert one is None


# Grid rationale. The weight in the dtype of x, where the product is rounded to it, and in float32, where it is not.
@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize("weight", [None, F32], ids=["alike", "f32"])
@_FIRST
def test_forward_is_that_of_hugging_face(
    dtype: torch.dtype, weight: torch.dtype | None, first: bool, any_target: Target
) -> None:
    """`Qwen3NextRMSNormGated`, gate last, and `MambaRMSNormGated`, gate first: at most 0.1 % of y differ."""
    x, gate = (2 * torch.randn(2, 300, 1024, device=any_target.device)).to(dtype).unbind()
    w = (1 + 0.3 * torch.randn(1024, device=any_target.device)).to(weight or dtype)
    factor = F.silu(gate.float())
    u = x.float() * factor if first else x.float()
    n = u * torch.rsqrt(u.square().mean(-1, keepdim=True) + 1e-6)
    z = w * n.to(dtype)
    expected = z if first else (z * factor).to(dtype)
    with any_target.ran(forward=2):
        options: dict[str, Any] = {"gate_first": first, "out_dtype": expected.dtype, "backend": any_target.backend}
        y = kf.gated_rms_norm(x, gate, 1024, w, 1e-6, rounding="hf", **options)
        once = kf.gated_rms_norm(x, gate, 1024, w, 1e-6, **options)
    assert (y != expected).double().mean() <= 1e-3
    assert (once != expected).double().mean() > 0.1, "the test sees no difference"


# ---- Refusals --------------------------------------------------------------------------------------------------------

_X = torch.ones(4, 8)
_REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "none": ({"gate": None}, "TypeError", "`gate` must be a tensor, got None; without one the verb is `rms_norm`"),
    "number": ({"gate": 1.0}, "TypeError", "`gate` must be a tensor, got 1.0"),
    "shape": ({"gate": _X[:, :4]}, "RuntimeError", "`gate` must have the shape of `input`, [4, 8], got [4, 4]"),
    "row": ({"gate": _X[0]}, "RuntimeError", "`gate` must have the shape of `input`, [4, 8], got [8]"),
    "shape-groups": (
        {"gate": _X[:, :4], "group_size": 4},
        "RuntimeError",
        "`gate` must have the shape of `input`, [4, 8], got [4, 4]",
    ),
    "dtype": (
        {"gate": _X.double()},
        "RuntimeError",
        "`gate` must be float16 or bfloat16 or float32 for float32 input, got float64",
    ),
    "device": (
        {"gate": _X.to("meta")},
        "RuntimeError",
        "expected all tensors to be on the same device, but `gate` is on meta and `input` is on cpu",
    ),
    "gate_first": ({"gate_first": "yes"}, "TypeError", "`gate_first` must be a bool, got 'yes'"),
    "group_size": ({"group_size": 3}, "ValueError", "`group_size` must divide the length of a row, N = 8, got 3"),
    "group_size-0": ({"group_size": 0}, "ValueError", "`group_size` must divide the length of a row, N = 8, got 0"),
    "group_size-type": ({"group_size": 4.0}, "TypeError", "`group_size` must be an int or None, got 4.0"),
    "group_size-dims": (
        {"group_size": 4, "normalized_shape": (4, 8)},
        "ValueError",
        "`group_size` goes with a `normalized_shape` of one dimension, got [4, 8]",
    ),
    "weight_offset": (
        {"weight_offset": 1.0},
        "ValueError",
        "`weight_offset` needs a `weight`, got weight_offset=1.0 without one",
    ),
    "rounding": ({"rounding": "up"}, "ValueError", "`rounding` must be one of 'once', 'hf', got 'up'"),
}


@pytest.mark.parametrize("target", [CPU, TRITON, EAGER], ids=lambda t: t.backend)
@pytest.mark.parametrize("name", _REFUSED)
def test_refusals(name: str, target: Target) -> None:
    """Wrong arguments are refused in words that name verb and argument."""
    changed, kind, text = _REFUSED[name]
    arguments = {"gate": _X, "normalized_shape": 8, "backend": target.backend} | changed
    with target.ran(forward=0):
        assert outcome(lambda: kf.gated_rms_norm(_X, **arguments)) == (kind, f"`gated_rms_norm`: {text}")


def test_unknown_gate_activation() -> None:
    """An activation that is none is named, with those that there are."""
    kind, text = outcome(lambda: kf.gated_layer_norm(_X, _X, 8, gate_activation="swish"))
    assert kind == "ValueError"
    assert text.startswith("`gated_layer_norm`: `gate_activation` must be one of 'relu', ")


@pytest.mark.parametrize("group_size", [None, 4])
def test_parameters_that_do_not_fit(group_size: int | None) -> None:
    """A weight of another shape raises PyTorch's error, in groups too."""
    theirs = outcome(lambda: F.rms_norm(_X, (8,), _X))
    assert outcome(lambda: kf.gated_rms_norm(_X, _X, 8, _X, group_size=group_size)) == theirs
    grouped = torch.ones(2, 4)
    theirs = outcome(lambda: F.layer_norm(_X, (8,), grouped))
    assert outcome(lambda: kf.gated_layer_norm(_X, _X, 8, grouped, group_size=group_size)) == theirs


@pytest.mark.parametrize("stage", ["residual", "pre_activation", "activation", "dropout_p"])
@pytest.mark.parametrize("operator", ["staged_row_norm", "staged_row_norm_reference", "row_norm_fwd"])
def test_a_gate_goes_without_other_stages(operator: str, stage: str) -> None:
    """An operator refuses a gate beside another stage."""
    call: dict[str, Any] = {"residual": None, "pre_activation": "identity", "activation": "identity", "dropout_p": 0.0}
    call |= {"num_dims": 1, "weight": None, "bias": None, "eps": 1e-5, "weight_offset": 0.0, "out_dtype": None}
    call |= {"rms": True, "seed": None, "gate": _X, "gate_activation": "silu"}
    served = getattr(torch.ops.kernel_fusion, operator)
    served(_X, **call)
    values = {"residual": _X, "dropout_p": 0.5}
    call |= {stage: values.get(stage, "relu")} | ({"seed": torch.ones(1).long()} if stage == "dropout_p" else {})
    text = "arguments that its kernels do not take" if operator == "row_norm_fwd" else "does not go with a `gate`"
    with pytest.raises(RuntimeError, match=text):
        served(_X, **call)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
@_FIRST
def test_other_dtypes_in_groups(dtype: torch.dtype, first: bool) -> None:
    """Complex numbers go by PyTorch's operations, where these know them, with parameters of groups too."""
    x, gate = torch.randn(2, 4, 8, dtype=dtype).unbind()
    w = torch.randn(8, dtype=dtype)
    u = x * torch.tanh(gate) if first else x

    def pytorch() -> Tensor:
        y = F.rms_norm(u.unflatten(-1, (2, 4)), (4,), eps=1e-5).flatten(-2) * w
        return y if first else y * torch.tanh(gate)

    expected = outcome(pytorch)
    options: dict[str, Any] = {"gate_activation": "tanh", "gate_first": first, "group_size": 4}
    with EAGER.ran():
        got = outcome(lambda: kf.gated_rms_norm(x, gate, 8, w, 1e-5, **options))
    assert isinstance(got, Tensor) == isinstance(expected, Tensor)
    if isinstance(expected, Tensor):
        torch.testing.assert_close(got, expected)
