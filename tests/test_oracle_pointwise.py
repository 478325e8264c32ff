"""The pointwise chains against float64: dtypes, shapes, layouts, activations. The budgets are the oracle's."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from support import Target, check
from torch import Tensor

import kernel_fusion as kf
from kernel_fusion.core.activations import ACTIVATIONS
from kernel_fusion.testing.oracle import PointwiseCase, lay_out

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
BINARY = ("add_act", "mul_act", "bias_act", "gated_act")


# Grid rationale. Each operand is loaded by its dtype; results are promoted as in PyTorch; 255 has a tail.
@pytest.mark.parametrize("verb", ["add_act", "mul_act", "gated_act"])
@pytest.mark.parametrize(("a", "b"), list(product((F16, BF16, F32, F64), repeat=2)), ids=str)
def test_dtype_mixes(verb: str, a: torch.dtype, b: torch.dtype, target: Target) -> None:
    """Any mix of dtypes is promoted as PyTorch does and within budget; gradients come in their operand's dtype."""
    check(PointwiseCase(verb, (7, 255), a, activation="gelu", other_dtype=b), target)


# Grid rationale. One operand or both broadcast, in front, in the middle, behind, or everywhere; an operand without
# dimensions, without elements, of one element; rows shared by few and by many, shorter and longer than a chunk.
_SHAPES = [
    ((), ()),
    ((), (5,)),
    ((7,), ()),
    ((1,), (7,)),
    ((7, 1), (1, 5)),
    ((2, 3, 4), (4,)),
    ((4,), (2, 3, 4)),
    ((2, 1, 4), (3, 1)),
    ((1, 1), (1,)),
    ((2, 3, 5, 7), (3, 1, 1)),
    ((0, 5), (5,)),
    ((3, 0), (1,)),
    ((1,), (0,)),
    ((3, 4099), (4099,)),
    ((5000, 17), (17,)),
    ((40, 3000), (40, 1)),
    ((2, 2, 1, 2, 2), (3, 1, 1)),
]


@pytest.mark.parametrize("verb", BINARY)
@pytest.mark.parametrize(("a", "b"), _SHAPES, ids=str)
def test_broadcasting(verb: str, a: tuple[int, ...], b: tuple[int, ...], target: Target) -> None:
    """Any shapes that broadcast are within budget, and gradients have their operand's shape."""
    check(PointwiseCase(verb, a, F32, activation="silu", other=b), target)


@pytest.mark.parametrize(("verb", "activation"), [("bias_act", "gelu"), ("bias_act", "relu"), ("gated_act", "gelu")])
@pytest.mark.parametrize("dtype", [F16, BF16, F64])
@pytest.mark.parametrize(("rows", "cols"), [(1, 255), (33, 1), (300, 256), (1000, 100), (3, 12289)])
def test_a_row_for_all_rows(
    verb: str, activation: str, dtype: torch.dtype, rows: int, cols: int, target: Target
) -> None:
    """The gradient of an operand that is one row is the sum over rows, within budget in every dtype."""
    check(PointwiseCase(verb, (rows, cols), dtype, activation=activation, other=(cols,)), target)


# Grid rationale. Around one vector, one chunk, one block and the grain of a thread.
@pytest.mark.parametrize("size", [1, 2, 7, 8, 9, 31, 33, 1023, 1024, 1025, 4099, 65537, 300007])
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_sizes(size: int, dtype: torch.dtype, target: Target) -> None:
    """Any number of elements is within budget, with one operand and with two."""
    check(PointwiseCase("act_dropout", (size,), dtype, activation="gelu", dropout_p=0.25), target)
    check(PointwiseCase("add_act", (size,), dtype, activation="tanh"), target)
    check(PointwiseCase("add_act", (size,), dtype, activation="leaky_relu"), target)


_LAYOUTS = ("contiguous", "padded", "unaligned", "transposed", "channels-last", "half", "strided", "expanded")


@pytest.mark.parametrize(("a", "b"), list(product(_LAYOUTS, repeat=2)), ids=str)
def test_layouts(a: str, b: str, target: Target) -> None:
    """Operands that lie in memory in any two ways are within budget."""
    for dtype in (F32, BF16):
        case = PointwiseCase("gated_act", (4, 6, 5, 8), dtype, activation="silu", layout=a, other_layout=b)
        check(case, target)


@pytest.mark.parametrize("layout", _LAYOUTS)
@pytest.mark.parametrize(("activation", "dropout_p"), [("mish", 0.0), ("mish", 0.5), ("leaky_relu", 0.0)])
def test_layouts_of_one_operand(layout: str, activation: str, dropout_p: float, target: Target) -> None:
    """A single operand that lies in memory in any way is within budget, and dropout knows its places."""
    case = PointwiseCase("act_dropout", (4, 6, 5, 8), BF16, activation=activation, layout=layout, dropout_p=dropout_p)
    check(case, target)


@pytest.mark.parametrize(("a", "b"), list(product(_LAYOUTS, repeat=2)), ids=str)
def test_strides_are_those_of_pytorch(a: str, b: str, target: Target) -> None:
    """The result's strides are those of PyTorch's sum, and those of PyTorch's activation for one operand."""
    values = torch.randn(2, 4, 6, 5, 8, device=target.device)
    one, other = lay_out(values[0], a), lay_out(values[1], b)
    with target.ran(forward=2):
        assert kf.add_act(one, other, "relu", backend=target.backend).stride() == (one + other).stride()
        alone = kf.act_dropout(one, "relu", training=False, backend=target.backend)
    assert alone.stride() == torch.relu(one).stride()


# Grid rationale. Values at which an activation is curved, and at which it is nearly flat or straight.
@pytest.mark.parametrize("std", [0.1, 2.0, 20.0])
@pytest.mark.parametrize("dtype", [F32, BF16, F16, F64])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations(name: str, dtype: torch.dtype, std: float, target: Target) -> None:
    """Value and slope of each activation are within budget."""
    check(PointwiseCase("act_dropout", (33, 255), dtype, activation=name, std=std), target)


# Grid rationale. Special numbers, every kink (0, 3, -3), both sides of the threshold of softplus and mish, and values
# whose exponentials overflow and vanish in float32 and float64.
_SPECIAL = (float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 3.0, -3.0, 19.99, 20.0, 20.01, -20.0, 88.0, -88.0)
_HUGE = (104.0, -104.0, 720.0, -720.0, 1e4, -1e4, 6e4, -6e4, 1e-6, -1e-6)


@pytest.mark.parametrize("dtype", [F32, BF16, F16, F64])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_special_values_as_in_pytorch(name: str, dtype: torch.dtype, target: Target) -> None:
    """NaN, infinities, kinks and saturation give PyTorch's value and slope, as it computes them in float64.

    In float32, with AVX-512, its gelu of infinity is NaN; so that of the definition is, which it computes.
    """
    x = torch.tensor([*_SPECIAL, *_HUGE], dtype=dtype).repeat(9)  # in vectors and in tails

    def value_and_slope(function: object, x: Tensor) -> list[Tensor]:
        x = x.clone().requires_grad_()
        y = function(x)
        return [y.detach().cpu(), torch.autograd.grad(y, x, torch.ones_like(y))[0].cpu()]

    with target.ran(forward=1, backward=1):
        ours = value_and_slope(
            lambda t: kf.act_dropout(t, name, training=False, backend=target.backend), x.to(target.device)
        )
    # In fp16 and bf16, PyTorch takes these slopes from the rounded result, and so do we on the CPU.
    rounds = target.backend == "cpu" and name in ("tanh", "sigmoid") and dtype in (BF16, F16)
    wide = torch.promote_types(dtype, F32) if target.backend == "eager" else F64
    theirs = value_and_slope(ACTIVATIONS[name], x if rounds else x.to(wide))
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other.to(dtype), equal_nan=True)


def test_relu_of_nan_is_nan(target: Target) -> None:
    """A maximum that drops NaN would hide divergence."""
    nan = torch.full((17,), float("nan"), device=target.device)
    with target.ran(forward=4):
        assert kf.add_act(nan, nan, "relu", backend=target.backend).isnan().all()
        assert kf.bias_act(nan, nan, "relu", backend=target.backend).isnan().all()
        assert kf.gated_act(nan, nan.new_ones(17), "relu_squared", backend=target.backend).isnan().all()
        assert kf.act_dropout(nan, "leaky_relu", training=False, backend=target.backend).isnan().all()


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("dtype", [F32, BF16, F16])
def test_relu_takes_nan_of_either_sign(dtype: torch.dtype, sign: float, target: Target) -> None:
    """x86 makes a negative NaN of inf - inf; gradients pass at it like at any NaN."""
    x = torch.full((33,), float("nan"), dtype=dtype, device=target.device).copysign(sign).requires_grad_()
    dy = torch.randn(33, dtype=dtype, device=target.device)
    with target.ran(forward=1, backward=1):
        y = kf.act_dropout(x, "relu", training=False, backend=target.backend)
        (dx,) = torch.autograd.grad(y, x, dy)
    assert y.isnan().all()
    assert torch.equal(dx, torch.autograd.grad(torch.relu(x), x, dy)[0])


@pytest.mark.parametrize("name", ["relu", "relu_squared", "hardswish"])
@pytest.mark.parametrize("arriving", ["inf", "nan"])
def test_no_gradient_where_there_is_no_slope(name: str, arriving: str, target: Target) -> None:
    """At a flat point of the activation the gradient is 0, whatever arrives, as in PyTorch's backward."""
    x = torch.full((17,), -4.0, device=target.device, requires_grad=True)
    dy = torch.full_like(x, float(arriving))
    with target.ran(forward=2, backward=2):
        y = kf.act_dropout(x, name, training=False, backend=target.backend)
        gated = kf.gated_act(x, dy, name, backend=target.backend)
        for result, gradient in ((y, dy), (gated, torch.ones_like(x))):
            assert torch.autograd.grad(result, x, gradient)[0].eq(0).all()
