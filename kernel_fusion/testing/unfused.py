"""PyTorch's own unfused calls for each function of the library, in the dtypes of their arguments.

`verify`, the benchmarks and the tests compare with these. An argument has the meaning and the name that it has in the
function of the library. `dropout`, which callers may pass, is a function of a tensor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from kernel_fusion.core.activations import IDENTITY, formula

Dropout = Callable[[Tensor], Tensor]


def keep_all(t: Tensor) -> Tensor:
    """Return the tensor itself, as the `dropout` that drops nothing."""
    return t


def norm(
    x: Tensor,
    shape: Sequence[int],
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    *,
    rms: bool,
    weight_offset: float = 0.0,
    rounding: str = "once",
) -> Tensor:
    """Return `F.layer_norm`, or `F.rms_norm` and an addition, in float32 for mixed dtypes, which PyTorch refuses.

    Rounding "hf" rounds the normalised value to x's dtype, then multiplies by the weight with type promotion.
    """
    if rounding == "hf":
        y = norm(x, shape, None, None, eps, rms=rms)
        y = y if weight is None else y * (weight + weight_offset if weight_offset else weight)
        return y if bias is None else y + bias
    dtypes = {t.dtype for t in (x, weight, bias) if t is not None}
    compute = x.dtype if len(dtypes) == 1 else torch.float32
    weight, bias = (None if t is None else t.to(compute) for t in (weight, bias))
    if weight is not None and weight_offset:
        weight = weight + weight_offset
    if not rms:
        return F.layer_norm(x.to(compute), list(shape), weight, bias, eps)
    y = F.rms_norm(x.to(compute), list(shape), weight, eps)
    return y if bias is None else y + bias


def staged_norm(
    x: Tensor,
    residual: Tensor | None,
    *affine: Any,
    pre_activation: str | None = None,
    activation: str | None = None,
    out_dtype: torch.dtype | None = None,
    dropout: Dropout = keep_all,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """y and h: activation, dropout, addition, norm (with the other arguments of `norm`) and activation."""
    h = dropout(formula(pre_activation or IDENTITY)(x))
    if residual is not None:
        h = (residual + h).to(residual.dtype)
    y = norm(h, *affine, **options).to(out_dtype or x.dtype)
    return formula(activation or IDENTITY)(y), h


def gated_norm(
    x: Tensor,
    gate: Tensor,
    shape: Sequence[int],
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    *,
    gate_activation: str | None = "silu",
    gate_first: bool = False,
    group_size: int | None = None,
    out_dtype: torch.dtype | None = None,
    **options: Any,
) -> Tensor:
    """Activation, `norm` and product. With groups, or "hf", weight and bias come after a norm without them."""
    factor = formula(gate_activation or IDENTITY)(gate)
    h = x * factor if gate_first else x
    if group_size is not None:
        h = h.unflatten(-1, (-1, group_size))
        weight, bias = (None if t is None else t.unflatten(-1, (-1, group_size)) for t in (weight, bias))
        shape, options["rounding"] = (group_size,), "hf"
    y = norm(h, shape, weight, bias, eps, **options).reshape(x.shape)
    y = y if gate_first else y.to(x.dtype) * factor
    return y.to(out_dtype or x.dtype)


def modulated(y: Tensor, scale: Tensor, shift: Tensor | None, activation: str | None = None) -> Tensor:
    """A norm's result as diffusion transformers change it, and an activation."""
    y = y * (1 + scale)
    return formula(activation or IDENTITY)(y if shift is None else y + shift)


def rope(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """Return the rotated heads, by products and a sum in the promoted dtype, with every cosine and sine twice."""
    half = cos.shape[-1]
    turned, rest = x[..., : 2 * half], x[..., 2 * half :]
    if interleaved:
        cos, sin = cos.repeat_interleave(2, -1), sin.repeat_interleave(2, -1)
        across = torch.stack((-turned[..., 1::2], turned[..., ::2]), -1).flatten(-2)
    else:
        cos, sin = torch.cat((cos, cos), -1), torch.cat((sin, sin), -1)
        across = torch.cat((-turned[..., half:], turned[..., :half]), -1)
    y = turned * cos + across * sin
    return torch.cat((y, rest), -1) if rest.shape[-1] else y


def pointwise(verb: str, a: Tensor, b: Tensor | None, activation: str | None, dropout: Dropout = keep_all) -> Tensor:
    """Return `add_act`, `bias_act`, `mul_act`, `gated_act` or `act_dropout`, by PyTorch's operations one by one."""
    act = formula(activation or IDENTITY)
    if b is None:
        y = act(a)
    elif verb == "gated_act":
        y = act(a) * b
    else:
        y = act(a * b if verb == "mul_act" else a + b)
    return dropout(y)


def reduce(verb: str, x: Tensor, dim: int | tuple[int, ...] | None = None, keepdim: bool = False) -> Tensor:
    """Return `sum_squared` or `mean_abs`, by the pointwise function and then the reduction, both in x's dtype."""
    return x.square().sum(dim, keepdim) if verb == "sum_squared" else x.abs().mean(dim, keepdim)


def masked(scores: Tensor, mask: Tensor | None = None, causal: bool = False) -> Tensor:
    """Return the scores with an additive or boolean mask, in which True keeps an element.

    `causal` keeps the columns up to the row's number.
    """
    if mask is not None:
        scores = torch.where(mask, scores, -math.inf) if mask.dtype == torch.bool else scores + mask
    if causal:
        rows, cols = (torch.arange(size, device=scores.device) for size in scores.shape[-2:])
        scores = torch.where(cols <= rows[:, None], scores, -math.inf)
    return scores


def scaled(x: Tensor, scale: float = 1.0, mask: Tensor | None = None, causal: bool = False) -> Tensor:
    """Return the logits of which weights are made: x after a multiplication and the mask."""
    return masked(x if scale == 1.0 else x * scale, mask, causal)


def attention_scores(query: Tensor, key: Tensor, scale: float | None = None) -> Tensor:
    """Return the product of query and key, multiplied by the scale."""
    return query @ key.mT * (query.shape[-1] ** -0.5 if scale is None else scale)
