"""The definition of every operation in plain PyTorch: the specification that all other backends are tested against.

It is also what runs where no kernel of ours can, and what `torch.func`, forward-mode AD and double backward
differentiate. So it must be a composition of differentiable PyTorch operations, obvious at a glance.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kernel_fusion.core import checks
from kernel_fusion.core.spec import compute_dtype


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
    shape = list(input.shape[input.dim() - num_dims :])
    foreign = not input.is_floating_point() or input.layout != torch.strided
    if foreign or not checks.parameters_fit(shape, weight, bias):
        return pytorch_row_norm(input, shape, weight, bias, eps, weight_offset, out_dtype, rms)
    checks.row_norm(verb, input, weight, bias, weight_offset, out_dtype)
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
    y = h / torch.sqrt(h.square().mean(dims, keepdim=True) + eps)
    if weight is not None:
        y = y * (weight.to(dtype) + weight_offset)
    if bias is not None:
        y = y + bias.to(dtype)
    return y.to(out_dtype or input.dtype)


def pytorch_row_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float | None,
    weight_offset: float,
    out_dtype: torch.dtype | None,
    rms: bool,
) -> Tensor:
    """PyTorch's own call, for what is PyTorch's affair.

    That is: integers, complex numbers, other layouts, tensor subclasses; and shapes that don't fit, so that the error
    is PyTorch's own, in the words of the version at hand.
    """
    shape = [normalized_shape] if isinstance(normalized_shape, int) else list(normalized_shape)
    if weight is not None and weight_offset:
        weight = weight + weight_offset
    if not rms:
        y = torch.nn.functional.layer_norm(input, shape, weight, bias, 1e-5 if eps is None else eps)
    else:
        y = torch.nn.functional.rms_norm(input, shape, weight, eps)
        y = y if bias is None else y + bias
    return y if out_dtype is None else y.to(out_dtype)
