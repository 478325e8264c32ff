"""Whether two computations are the same function, and whether they round alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

# Another eps, offset or formula changes at least 1e-4 of a row's largest value; fp32 rounding changes 1e-6.
SAME_FUNCTION = 2.0**-14
# Units in the last place; a gradient that is cut off, as by `detach`, is further off in fp32.
_SAME_GRADIENT = 2.0**12

FLOATING = (torch.float32, torch.bfloat16, torch.float16)

Function = Callable[..., Tensor]


def has_shape(x: Any) -> bool:
    """Whether it is a tensor, but no strided nested one."""
    return isinstance(x, Tensor) and not (x.is_nested and x.layout is torch.strided)


def is_floating(x: Any) -> bool:
    """Whether it is one of these dtypes."""
    return has_shape(x) and x.dtype in FLOATING


def in_order(x: Tensor, expanded: bool = False) -> bool:
    """Whether elementwise operations return contiguous memory for x: its strides decrease, perhaps with gaps.

    With `expanded` it may be repeated along dimensions, as a vector is that broadcasts to another operand.
    """
    if x.is_contiguous():
        return True
    if type(x) is not Tensor:
        return False
    strides = [stride for stride, size in zip(x.stride(), x.shape, strict=True) if size > 1]
    if expanded:
        strides = [stride for stride in strides if stride]
    return 0 not in strides and strides == sorted(strides, reverse=True)


def same_order(a: Tensor, b: Tensor) -> bool:
    """Whether elementwise operations on both, of one shape, return the same strides, whichever comes first."""
    if a.is_contiguous() and b.is_contiguous():
        return True
    return a.stride() == b.stride() or (in_order(a) and in_order(b))


def attempt(function: Callable[..., Any], *inputs: Tensor) -> Tensor | None:
    """The tensor that unknown code returns; None if it raises."""
    try:
        with torch.no_grad():
            result = function(*inputs)
    except Exception:
        return None
    return result if isinstance(result, Tensor) else None


def same_function(found: Tensor, exact: Tensor) -> bool:
    """Whether an fp32 result agrees with a float64 one, relative to each row's largest value."""
    if found.shape != exact.shape or not found.isfinite().all():
        return False
    largest = exact.abs().amax(-1, keepdim=True)
    return bool(((found.double() - exact).abs() <= SAME_FUNCTION * largest + 1e-30).all())


def same_values(found: Tensor, expected: Tensor) -> bool:
    """Whether an fp32 result has NaN and infinities where another one has, and the same numbers elsewhere."""
    return found.shape == expected.shape and torch.allclose(found, expected, 1e-4, 1e-5, equal_nan=True)


def differing_bits(ours: Tensor, theirs: Tensor) -> float:
    """The share of elements that differ; 1 if one differs by more than a unit in the last place."""
    if ours.dtype != theirs.dtype or ours.shape != theirs.shape:
        return 1.0
    off = (ours.double() - theirs.double()).abs()
    unit = torch.finfo(theirs.dtype).eps * torch.maximum(ours.double().abs(), theirs.double().abs())
    return 1.0 if (off > unit).any() else float((off > 0).double().mean())


def no_worse(ours: Tensor, theirs: Tensor, exact: Tensor, coarse: float) -> bool:
    """Whether our largest error is at most twice (theirs + one rounding), and theirs not beyond `coarse`."""
    if ours.dtype != theirs.dtype or ours.shape != theirs.shape or not ours.isfinite().all():
        return False
    exact = exact.double()
    unit, error = torch.finfo(ours.dtype).eps / 2 * exact.abs().max(), (theirs.double() - exact).abs().max()
    return bool(
        (ours.double() - exact).abs().max() <= 2 * (error + unit) and error <= coarse * exact.abs().max().clamp(min=1)
    )


def gradients(function: Function, inputs: Sequence[Tensor], cotangent: Tensor) -> tuple[Tensor, ...]:
    """The result of a function and the gradients of its inputs."""
    with torch.enable_grad():
        leaves = [x.detach().requires_grad_() for x in inputs]
        y = function(*leaves)
        return (y.detach(), *torch.autograd.grad(y, leaves, cotangent.to(y.dtype).to(y.device)))


def disagreement(ours: Function, theirs: Function, exact: Function, inputs: Sequence[Tensor]) -> str | None:
    """The result or gradient in which ours is worse than theirs against the float64 evaluation `exact`, or None."""
    y = attempt(theirs, *inputs)
    if y is None:
        return "what it takes"
    random = torch.Generator().manual_seed(7)  # x as its own cotangent has hardly any gradient
    cotangent = torch.randn(y.shape, generator=random).to(y.dtype)
    wide = gradients(exact, [x.double() for x in inputs], cotangent)
    coarse = _SAME_GRADIENT * max(torch.finfo(t.dtype).eps for t in (y, *inputs))
    try:
        others = gradients(theirs, inputs, cotangent)
    except Exception:  # it may detach
        return "whether it has gradients"
    for index, (mine, other, true) in enumerate(zip(gradients(ours, inputs, cotangent), others, wide, strict=True)):
        if not no_worse(mine, other, true, coarse):
            return "the result" if index == 0 else f"the gradient of input {index}"
    return None
