"""LayerNorm and RMSNorm with their stages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from kernel_fusion.backends.eager.dropout import dropout
from kernel_fusion.core import checks
from kernel_fusion.core.activations import formula
from kernel_fusion.core.autocast import norm_dtype
from kernel_fusion.core.spec import compute_dtype
from kernel_fusion.core.stages import Given, NormCall, norm_call, rows_in


def row_norm(input: Tensor, *norm: Any) -> Tensor:
    """The norm without a residual."""
    return staged_row_norm(input, None, *norm)[0]


def _normalize(h: Tensor, c: NormCall, rounds_to: torch.dtype | None = None) -> Tensor:
    """In the compute type; given `rounds_to`, h's dtype, it rounds as Hugging Face's norms do."""
    dims = tuple(range(-c.num_dims, 0))
    if not c.rms:
        h = h - h.mean(dims, keepdim=True)
    y = h / torch.sqrt(h.square().mean(dims, keepdim=True) + c.eps)
    if rounds_to is not None:
        y = rounded(y, rounds_to)
    if c.weight is not None:
        y = y * (c.weight.to(h.dtype) + c.weight_offset)
    if c.bias is not None:
        y = y + c.bias.to(h.dtype)
    if rounds_to is not None and c.weight is not None:
        y = rounded(y, torch.promote_types(rounds_to, c.weight.dtype))
    return y


def rounded(v: Tensor, dtype: torch.dtype) -> Tensor:
    """v rounded to `dtype`, in its own; gradients are not rounded."""
    exact = v.detach()
    # Subtracting the difference, 0 or an infinity's NaN, passes the gradient.
    return exact.to(dtype).to(v.dtype) - torch.nan_to_num(exact - v)


def _gated(v: Tensor, gate: Tensor | None, s: Given) -> Tensor:
    return v if gate is None else v * formula(s.gate_activation)(gate)


def before_norm(x: Tensor, s: Given, drop: Callable[[Tensor], Tensor]) -> Tensor:
    """u, times the residual's gate; `drop` is the dropout."""
    u = _gated(formula(s.pre_activation)(x), s.gate if s.gate_first else None, s)
    u = u if s.seed is None else drop(u)
    return u if s.residual_gate is None else s.residual_gate * u


def after_norm(n: Tensor, s: Given) -> Tensor:
    """y, from norm(h) * weight + bias."""
    return formula(s.activation)(_gated(n, None if s.gate_first else s.gate, s))


def staged_row_norm(*args: Any) -> tuple[Tensor, Tensor]:
    """The norm with its stages, and h in the residual's dtype, or empty.

    u = dropout(pre_activation(input)), h = residual + residual_gate * u, output = activation(norm(h) * weight + bias).
    A gate goes with no other stage: its activation multiplies the input if `gate_first`, else the result. If `grouped`,
    weight, bias and residual_gate broadcast to the input (core/groups.py).
    """
    c = norm_call(*args)
    input, residual = c.input, c.residual
    shape = checks.parameter_shape(input, c.num_dims, c.stages.grouped, *c.vectors)
    foreign = input.dtype not in checks.FLOATING or input.layout != torch.strided
    if foreign or not checks.shaped(shape, *c.vectors):
        return _foreign(c, shape)
    checks.staged_row_norm(c)
    wide = compute_dtype(input.dtype)
    s = rows_in(wide, c.stages)
    h = before_norm(input.to(wide), s, lambda u: dropout(u.contiguous(), s.dropout_p, s.seed))
    summed = input.new_empty(0)
    if residual is not None:
        summed = (h + residual.to(wide)).to(residual.dtype)
        h = summed.to(wide)
    rounds_to = (input if residual is None else residual).dtype if s.rounding == "hf" else None
    result = c.out_dtype or norm_dtype(input, c.rms) or input.dtype
    return after_norm(_normalize(h, c, rounds_to), s).to(result), summed


def _foreign(c: NormCall, shape: Sequence[int]) -> tuple[Tensor, Tensor]:
    s, affine = c.stages, (c.weight, c.bias, c.eps, c.weight_offset, c.out_dtype, c.rms)
    normalized_shape = list(c.input.shape[c.input.dim() - c.num_dims :])
    apart = (s.rounding == "hf" or shape != normalized_shape) and checks.shaped(shape, c.weight, c.bias)
    h = before_norm(c.input, s, lambda u: torch.nn.functional.dropout(u, s.dropout_p))
    h = h if c.residual is None else h + c.residual
    y = after_norm(pytorch_row_norm(h, normalized_shape, *affine, apart), s)
    return y, torch.empty(0, dtype=y.dtype, device=y.device) if c.residual is None else h


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
    """PyTorch's call, for integers, complex numbers, layouts, subclasses and errors.

    `apart` gives weight and bias their own calls.
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
            torch.nn.functional.layer_norm(input, shape, None, bias)  # rms_norm has no error for a bias
        y = y if bias is None else y + bias
    return y if out_dtype is None else y.to(out_dtype)
