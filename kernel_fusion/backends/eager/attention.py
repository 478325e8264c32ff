"""Softmax, scaled and masked."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kernel_fusion.core import checks
from kernel_fusion.core.spec import compute_dtype

__all__ = ["causal_mask", "softmax"]


def softmax(input: Tensor, mask: Tensor | None, scale: float, causal: bool) -> Tensor:
    """softmax(scale * input + mask); the mask is boolean (True = keep) or additive.

    With a mask or `causal`, a row of -inf gives zeros, and masked elements are 0 even beside NaN.
    """
    if mask is not None:
        checks.mask("softmax", mask)
    if input.dtype not in checks.FLOATING:
        return torch.softmax(input, -1)
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
        return torch.softmax(logits, -1).to(input.dtype)
    dead = (logits == -math.inf).all(-1, keepdim=True)
    y = torch.softmax(logits.masked_fill(dead, 0.0), -1)
    for part in (dead, *left_out):
        y = y.masked_fill(part, 0.0)
    return y.to(input.dtype)


def causal_mask(scores: Tensor) -> Tensor:
    """True for column j <= row i."""
    return scores.new_ones(scores.shape[-2:], dtype=torch.bool).tril()
