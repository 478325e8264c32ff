"""Softmax, scaled and masked."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kernel_fusion.core import checks
from kernel_fusion.core.spec import compute_dtype

__all__ = ["causal_mask", "softmax"]


def softmax(input: Tensor, mask: Tensor | None, scale: float, causal: bool, log: bool = False) -> Tensor:
    """softmax(scale * input + mask) or, with `log`, its logarithm; the mask is boolean (True = keep) or additive.

    With a mask or `causal`, a row of -inf gives zeros, and masked elements are 0 even beside NaN. With `log` these are
    -inf. No gradient flows through a logarithm of -inf where there is a mask or `causal`.
    """
    function, nothing = (torch.log_softmax, -math.inf) if log else (torch.softmax, 0.0)
    if mask is not None:
        checks.mask("softmax", mask)
    if input.dtype not in checks.FLOATING:
        return function(input, -1)
    logits = input.to(compute_dtype(input.dtype)) * scale
    left_out: list[Tensor] = []
    if mask is not None and mask.dtype == torch.bool:
        left_out.append(~mask)
    elif mask is not None:
        logits = logits + mask.to(logits.dtype)
    if causal:
        left_out.append(causal_mask(input).logical_not())
    for part in left_out:
        logits = logits.masked_fill(part, -math.inf)
    if mask is None and not causal:
        return function(logits, -1).to(input.dtype)
    dead = (logits == -math.inf).all(-1, keepdim=True)
    y = function(logits.masked_fill(dead, 0.0), -1)
    for part in (dead, *left_out):
        y = y.masked_fill(part, nothing)
    y = y.to(input.dtype)
    return y.masked_fill(y == nothing, nothing) if log else y


def causal_mask(scores: Tensor) -> Tensor:
    """True for column j <= row i."""
    return scores.new_ones(scores.shape[-2:], dtype=torch.bool).tril()
