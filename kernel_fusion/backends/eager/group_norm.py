"""GroupNorm with an addition before it, and a modulation and an activation after it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.nn import functional as F

from kernel_fusion.backends.availability import PLAIN_TENSORS
from kernel_fusion.core import checks
from kernel_fusion.core.activations import formula
from kernel_fusion.core.autocast import widened
from kernel_fusion.core.group_norm import GroupNorm, has_channels_last, laid_out_as, spread
from kernel_fusion.core.spec import compute_dtype
from kernel_fusion.core.symbols import alike

# |mean| / deviation up to which PyTorch's kernel of a CPU is exact enough: it loses as many units in the last place, or
# their square where the variance is a difference of squares. From _LONG positions on it cuts channels last otherwise.
_NEAR, _NEAR_WITH_SQUARES, _LONG = 16.0, 4.0, 1024


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
    result = c.out_dtype or widened(x, "group_norm") or x.dtype

    def around(t: Tensor) -> Tensor:
        return spread(t, x.dim()).to(wide)

    alone = c.add is None and c.scale is None and c.shift is None and result == x.dtype
    u = x if alone else x.to(wide) if c.add is None else x.to(wide) + around(c.add)
    weight, bias = (None if t is None else t.to(wide) for t in (c.weight, c.bias))
    n = found = _by_kernel(u, c.num_groups, weight, bias, c.eps)
    if n is None:
        n = _norm(u.to(wide), c.num_groups, weight, bias, c.eps)
    if c.scale is not None:
        n = n * (around(c.scale) + c.scale_offset)
    if c.shift is not None:
        n = n + around(c.shift)
    if c.activation == "silu" and found is not None and not n.requires_grad:
        return laid_out_as(F.silu(n, inplace=True).to(result), x)  # fresh memory takes as long as the function
    return laid_out_as(formula(c.activation)(n).to(result), x)


def _by_kernel(u: Tensor, groups: int, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor | None:
    """The norm by PyTorch's kernel of a CPU; None if it takes no such call.

    Samples for which it is not exact enough are computed again: it subtracts the mean after multiplying, and with
    channels last the variance is a difference of squares. Parameters of fp32 make it keep the statistics in fp32.
    """
    given = [t for t in (u, weight, bias) if t is not None]
    if not all(map(_is_plain, given)) or not _is_usual(u, groups, given[1:]):
        return None
    channels, positions = u.shape[1], u[0, 0].numel()
    last = u.dim() in (4, 5) and has_channels_last(u)  # of other tensors PyTorch makes contiguous copies
    v = u if last else u.contiguous()
    if weight is None and bias is None:
        weight = torch.ones(channels, dtype=compute_dtype(u.dtype))
    # The kernel cuts long channels among threads, across samples.
    pieces = v.split(1) if last and positions >= _LONG else (v,)
    found = [torch.native_group_norm(p, weight, bias, len(p), channels, positions, groups, eps) for p in pieces]
    y, mean, rstd = found[0] if len(found) == 1 else map(torch.cat, zip(*found, strict=True))
    near = (((mean * rstd).abs() <= (_NEAR_WITH_SQUARES if last else _NEAR)) & (rstd > 0)).all(1)
    if not near.all():
        rows = near.logical_not().nonzero()[:, 0]
        exact = _norm(u[rows].to(compute_dtype(u.dtype)), groups, weight, bias, eps)
        y = y.index_copy(0, rows, exact.to(y.dtype).reshape(len(rows), *y.shape[1:]))
    return laid_out_as(y.reshape(u.shape), u)


def _is_plain(t: Tensor) -> bool:
    """Whether a tensor of a CPU has memory that may be looked into now, and no transform, mode or tracer sees it."""
    return (
        type(t) in PLAIN_TENSORS
        and t.device.type == "cpu"
        and not (t.is_nested or t._is_zerotensor())
        and not (is_compiling() or torch.jit.is_tracing() or torch._C._are_functorch_transforms_active())  # type: ignore[attr-defined, no-untyped-call]
        and torch._C._len_torch_dispatch_stack() == 0
    )


def _is_usual(u: Tensor, groups: int, parameters: Sequence[Tensor]) -> bool:
    """Whether shapes are right, rows have more than one element, and parameters are finite."""
    return (
        u.dim() >= 2
        and groups >= 1
        and u.shape[1] % groups == 0
        and u.numel() > len(u) * groups
        and all(t.shape == u.shape[1:2] and math.isfinite(t.detach().sum()) for t in parameters)
    )


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
