"""LayerNorm and RMSNorm, with the stages around them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kernel_fusion.backends.eager.dropout import dropout
from kernel_fusion.core import checks
from kernel_fusion.core.activations import IDENTITY, formula
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
    foreign = input.dtype not in checks.FLOATING or input.layout != torch.strided
    if foreign or not checks.parameters_fit(shape, weight, bias):
        return pytorch_row_norm(input, shape, weight, bias, eps, weight_offset, out_dtype, rms)
    checks.row_norm(verb, input, weight, bias, weight_offset, out_dtype)
    h = input.to(compute_dtype(input.dtype))
    return _normalize(h, num_dims, weight, bias, eps, weight_offset, rms).to(out_dtype or input.dtype)


def _normalize(
    h: Tensor,
    num_dims: int,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    weight_offset: float,
    rms: bool,
    rounds_to: torch.dtype | None = None,
) -> Tensor:
    """The norm in the compute type; of h of dtype `rounds_to`, if given, as Hugging Face's norms round it."""
    dims = tuple(range(-num_dims, 0))
    if not rms:
        h = h - h.mean(dims, keepdim=True)
    y = h / torch.sqrt(h.square().mean(dims, keepdim=True) + eps)
    if rounds_to is not None:
        y = _rounded(y, rounds_to)
    if weight is not None:
        y = y * (weight.to(h.dtype) + weight_offset)
    if bias is not None:
        y = y + bias.to(h.dtype)
    if rounds_to is not None and weight is not None:
        y = _rounded(y, torch.promote_types(rounds_to, weight.dtype))
    return y


def _rounded(v: Tensor, dtype: torch.dtype) -> Tensor:
    """v rounded to `dtype`, in its own; gradients pass straight through, unrounded."""
    exact = v.detach()
    # The difference is 0, but NaN for an infinity; subtracting it leaves the value and passes the gradient on.
    return exact.to(dtype).to(v.dtype) - torch.nan_to_num(exact - v)


def _gated(v: Tensor, gate: Tensor | None, activation: str) -> Tensor:
    """v times the activation of a gate, if there is one."""
    return v if gate is None else v * formula(activation)(gate)


def staged_row_norm(
    input: Tensor,
    residual: Tensor | None,
    num_dims: int,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    weight_offset: float,
    out_dtype: torch.dtype | None,
    rms: bool,
    pre_activation: str,
    activation: str,
    dropout_p: float,
    seed: Tensor | None,
    rounding: str = "once",
    gate: Tensor | None = None,
    gate_activation: str = IDENTITY,
    gate_first: bool = False,
) -> tuple[Tensor, Tensor]:
    """The norm with its stages, and h, what it normalises: in the residual's dtype, or without elements.

    u = dropout(pre_activation(input)), h = residual + u, output = activation(norm(h) * weight + bias); `seed` is None
    without dropout. h is rounded to the residual's dtype before it is normalised; without a residual it is not.
    With rounding "hf" norm(h) is rounded to the dtype of h, or without a residual of the input; and where there is a
    weight, the argument of the activation to the promoted dtype of that and the weight's.
    A gate, beside which there are no other stages, multiplies after its activation: the input if `gate_first`, else the
    result. Beside it weight and bias may have a dimension more than is normalised, for groups of columns.
    """
    first, last = (gate, None) if gate_first else (None, gate)
    normalized_shape = list(input.shape[input.dim() - num_dims :])
    shape = checks.parameter_shape(input, num_dims, gate is not None, weight, bias)
    foreign = input.dtype not in checks.FLOATING or input.layout != torch.strided
    if foreign or not checks.parameters_fit(shape, weight, bias):
        # PyTorch's words, or its rules for dtypes that we have no kernels for.
        apart = (rounding == "hf" or shape != normalized_shape) and checks.parameters_fit(shape, weight, bias)
        h = _gated(formula(pre_activation)(input), first, gate_activation)
        h = h if seed is None else torch.nn.functional.dropout(h, dropout_p)
        h = h if residual is None else h + residual
        y = pytorch_row_norm(h, normalized_shape, weight, bias, eps, weight_offset, out_dtype, rms, apart)
        y = _gated(y, last, gate_activation)
        return formula(activation)(y), torch.empty(0, dtype=y.dtype, device=y.device) if residual is None else h
    checks.staged_row_norm(input, residual, gate, weight, bias, weight_offset, out_dtype, rms)
    wide = compute_dtype(input.dtype)
    first, last = (None if t is None else t.to(wide) for t in (first, last))
    h = _gated(formula(pre_activation)(input.to(wide)), first, gate_activation)
    if seed is not None:
        h = dropout(h.contiguous(), dropout_p, seed)
    summed = input.new_empty(0)
    if residual is not None:
        summed = (h + residual.to(wide)).to(residual.dtype)
        h = summed.to(wide)
    rounds_to = (input if residual is None else residual).dtype if rounding == "hf" else None
    y = _gated(_normalize(h, num_dims, weight, bias, eps, weight_offset, rms, rounds_to), last, gate_activation)
    return formula(activation)(y).to(out_dtype or input.dtype), summed


def pytorch_row_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float | None,
    weight_offset: float,
    out_dtype: torch.dtype | None,
    rms: bool,
    apart: bool = False,
) -> Tensor:
    """PyTorch's own call, for what is PyTorch's affair; with weight and bias in calls of their own if they are `apart`.

    That is: integers, complex numbers, other layouts, tensor subclasses; and shapes that don't fit, so that the error
    is PyTorch's own, in the words of the version at hand.
    """
    shape = [normalized_shape] if isinstance(normalized_shape, int) else list(normalized_shape)
    if weight is not None and weight_offset:
        weight = weight + weight_offset
    if apart:
        y = pytorch_row_norm(input, shape, None, None, eps, 0.0, None, rms)
        y = y if weight is None else y * weight
        y = y if bias is None else y + bias
    elif not rms:
        y = torch.nn.functional.layer_norm(input, shape, weight, bias, 1e-5 if eps is None else eps)
    else:
        y = torch.nn.functional.rms_norm(input, shape, weight, eps)
        if bias is not None and list(bias.shape) != shape:
            torch.nn.functional.layer_norm(input, shape, None, bias)  # raises: rms_norm has no words for a bias
        y = y if bias is None else y + bias
    return y if out_dtype is None else y.to(out_dtype)
