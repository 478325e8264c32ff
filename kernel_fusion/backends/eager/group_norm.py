"""GroupNorm with an addition before it, and a modulation and an activation after it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from kernel_fusion.core import checks
from kernel_fusion.core.activations import formula
from kernel_fusion.core.autocast import widened
from kernel_fusion.core.group_norm import GroupNorm, laid_out_as, spread
from kernel_fusion.core.spec import compute_dtype
from kernel_fusion.core.symbols import alike


def group_norm(*args: Any) -> Tensor:
    """activation(norm(input + add) * weight + bias, times scale_offset + scale, plus shift).

    `add`, `scale` and `shift` are (N, C), or have the input's shape. The result lies as core/group_norm.py says.
    """
    c = GroupNorm(*args)
    x = c.input
    if x.dtype not in checks.FLOATING or x.layout != torch.strided:
        return _foreign(c)
    checks.companions("group_norm", x, weight=c.weight, bias=c.bias, add=c.add, scale=c.scale, shift=c.shift)
    wide = compute_dtype(x.dtype)

    def around(t: Tensor) -> Tensor:
        return spread(t, x.dim()).to(wide)

    u = x.to(wide) if c.add is None else x.to(wide) + around(c.add)
    weight, bias = (None if t is None else t.to(wide) for t in (c.weight, c.bias))
    n = _norm(u, c.num_groups, weight, bias, c.eps)
    if c.scale is not None:
        n = n * (around(c.scale) + c.scale_offset)
    if c.shift is not None:
        n = n + around(c.shift)
    result = c.out_dtype or widened(x, "group_norm") or x.dtype
    return laid_out_as(formula(c.activation)(n).to(result), x)


def _norm(u: Tensor, groups: int, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """The norm of u, times weight and plus bias in this order, so that infinite ones give infinities as kernels do."""
    if any(t is not None and not alike(t.shape, u.shape[1:2]) for t in (weight, bias)):
        return F.group_norm(u, groups, weight, bias, eps)  # raises
    n = F.group_norm(_near_zero(u, groups), groups, eps=eps)
    of_channels = (-1, *[1] * (u.dim() - 2))
    n = n if weight is None else n * weight.reshape(of_channels)
    return n if bias is None else n + bias.reshape(of_channels)


def _near_zero(u: Tensor, groups: int) -> Tensor:
    """u minus a number near its group's mean, which changes no norm: PyTorch subtracts the mean after multiplying.

    Equal elements become zeros by the first subtraction.
    """
    if groups < 1 or u.dim() < 2 or u.shape[1] % groups or u.shape[1] == 0 or 0 in u.shape[2:]:
        return u  # PyTorch's norm raises, or there is nothing
    rows: Tensor = u.unflatten(1, (groups, -1))
    dims = tuple(range(2, rows.dim()))
    first = rows
    for dim in dims:
        first = first.narrow(dim, 0, 1)
    rows = rows - first.detach()
    rows = rows - rows.detach().mean(dims, keepdim=True)
    return rows.flatten(1, 2)


def _foreign(c: GroupNorm) -> Tensor:
    """PyTorch's operations in the input's own dtype."""
    checks.not_float8("group_norm", c.input.dtype)
    u = c.input if c.add is None else c.input + spread(c.add, c.input.dim())
    n = F.group_norm(u, c.num_groups, c.weight, c.bias, c.eps)
    n = n if c.scale is None else n * (spread(c.scale, n.dim()) + c.scale_offset)
    y: Tensor = formula(c.activation)(n if c.shift is None else n + spread(c.shift, n.dim()))
    return y
