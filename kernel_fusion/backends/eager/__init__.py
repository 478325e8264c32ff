"""The definition of every operation in plain PyTorch: the specification that all other backends are tested against.

It is also what runs where no kernel of ours can, and what `torch.func`, forward-mode AD and double backward
differentiate. So it must be a composition of differentiable PyTorch operations, obvious at a glance.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernel_fusion.core import checks


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type that every backend accumulates in: float64 for float64, float32 for the rest."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def row_norm(
    input: Tensor,
    num_dims: int,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    weight_offset: float,
    out_dtype: torch.dtype | None,
    rms: bool,
) -> Tensor:
    """LayerNorm (`rms=False`) or RMSNorm (`rms=True`) over the last `num_dims` dimensions."""
    verb = "rms_norm" if rms else "layer_norm"
    checks.row_norm(verb, input, num_dims, weight, bias, weight_offset)
    checks.out_dtype(verb, out_dtype, input.dtype)
    if not input.is_floating_point():
        return pytorch_row_norm(input, num_dims, weight, bias, eps, weight_offset, rms)
    return row_norm_formula(input, num_dims, weight, bias, eps, weight_offset, out_dtype, rms)


def row_norm_formula(
    input: Tensor,
    num_dims: int,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    weight_offset: float,
    out_dtype: torch.dtype | None,
    rms: bool,
) -> Tensor:
    """The definition itself, for floating-point `input` and any weight and bias that broadcast against it."""
    dtype = compute_dtype(input.dtype)
    dims = tuple(range(-num_dims, 0))
    h = input.to(dtype)
    if not rms:
        h = h - h.mean(dims, keepdim=True)
    y = h * torch.rsqrt(h.square().mean(dims, keepdim=True) + eps)
    if weight is not None:
        y = y * (weight.to(dtype) + weight_offset)
    if bias is not None:
        y = y + bias.to(dtype)
    return y.to(out_dtype or input.dtype)


def pytorch_row_norm(
    input: Tensor,
    num_dims: int,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float | None,
    weight_offset: float,
    rms: bool,
) -> Tensor:
    """PyTorch's own call, for what is PyTorch's affair: integers (its error), complex numbers, tensor subclasses."""
    normalized_shape = list(input.shape[input.dim() - num_dims :])
    if weight is not None and weight_offset:
        weight = weight + weight_offset
    if not rms:
        return torch.nn.functional.layer_norm(input, normalized_shape, weight, bias, 1e-5 if eps is None else eps)
    y = torch.nn.functional.rms_norm(input, normalized_shape, weight, eps)
    return y if bias is None else y + bias
