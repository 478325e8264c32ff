"""Whether two computations are the same function, and whether they round alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

# Another eps, offset or formula leaves 1e-4 of a row's largest value at least, and what fp32 rounds leaves 1e-6.
SAME_FUNCTION = 2.0**-14
# "hf" and "once" differ in a tenth of all elements; two orders of summation in fp32 differ in a thousandth.
SAME_ROUNDING = 0.01

Function = Callable[..., Tensor]


def same_function(found: Tensor, exact: Tensor) -> bool:
    """Whether an fp32 result is that of a float64 evaluation, each row beside its largest value."""
    if found.shape != exact.shape or not found.isfinite().all():
        return False
    largest = exact.abs().amax(-1, keepdim=True)
    return bool(((found.double() - exact).abs() <= SAME_FUNCTION * largest + 1e-30).all())


def differing_bits(ours: Tensor, theirs: Tensor) -> float:
    """The part of the elements that differ; 1 where one differs by more than a unit in the last place."""
    if ours.dtype != theirs.dtype or ours.shape != theirs.shape:
        return 1.0
    off = (ours.double() - theirs.double()).abs()
    unit = torch.finfo(theirs.dtype).eps * torch.maximum(ours.double().abs(), theirs.double().abs())
    return 1.0 if (off > unit).any() else float((off > 0).double().mean())


def no_worse(ours: Tensor, theirs: Tensor, exact: Tensor) -> bool:
    """Whether the error of ours is at most twice that of theirs and one rounding, taken over the whole tensor."""
    if ours.dtype != theirs.dtype or ours.shape != theirs.shape or not ours.isfinite().all():
        return False
    exact = exact.double()
    unit = torch.finfo(ours.dtype).eps / 2 * exact.abs().max()
    return bool((ours.double() - exact).abs().max() <= 2 * ((theirs.double() - exact).abs().max() + unit))


def gradients(function: Function, inputs: Sequence[Tensor], cotangent: Tensor) -> tuple[Tensor, ...]:
    """The result of a function and the gradients of its inputs."""
    with torch.enable_grad():
        leaves = [x.detach().requires_grad_() for x in inputs]
        y = function(*leaves)
        return (y.detach(), *torch.autograd.grad(y, leaves, cotangent.to(y.dtype).to(y.device)))


def disagreement(ours: Function, theirs: Function, exact: Function, inputs: Sequence[Tensor]) -> str | None:
    """What is worse in ours, forward and backward, beside the float64 evaluation `exact`; None if nothing is."""
    y = theirs(*inputs)
    random = torch.Generator().manual_seed(1)
    cotangent = torch.randn(y.shape, generator=random).to(y.dtype)
    wide = gradients(exact, [x.double() for x in inputs], cotangent)
    both = zip(gradients(ours, inputs, cotangent), gradients(theirs, inputs, cotangent), wide, strict=True)
    for index, (mine, other, true) in enumerate(both):
        if not no_worse(mine, other, true):
            return "the result" if index == 0 else f"the gradient of input {index}"
    return None
