"""The arguments of the rotary embedding: which are right, which of them kernels take, and the layout of results.

There is a query (B, L, H, D) and perhaps a key (B, L, H', D); the norm's weights have the shape (D,). cos and sin are
(B or 1, L, R / 2), or tables (1, M, R / 2) whose rows positions (B or 1, L) choose. R, `rotary_dim`, is at most D.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kernel_fusion.core.checks import FLOATING, either, short
from kernel_fusion.core.spec import ROUNDINGS
from kernel_fusion.core.symbols import alike, broadcasts, possible

_POSITIONS = (torch.int32, torch.int64)


class Rotary(NamedTuple):
    """The arguments of the operator. If `eps` is None, there is no norm."""

    query: Tensor
    key: Tensor | None
    query_weight: Tensor | None
    key_weight: Tensor | None
    cos: Tensor
    sin: Tensor
    positions: Tensor | None
    eps: float | None
    weight_offset: float
    interleaved: bool
    rounding: str

    @property
    def half(self) -> int:
        """The number of pairs that are rotated, R / 2."""
        return self.cos.shape[-1]

    @property
    def heads(self) -> tuple[tuple[str, Tensor, Tensor | None], ...]:
        """The name, tensor and weight of the query and, if there is one, of the key."""
        query, key = ("query" if self.eps is not None else "input", self.query, self.query_weight), self.key
        return (query,) if key is None else (query, ("key", key, self.key_weight))


def problem(c: Rotary) -> str | None:
    """What is wrong with the arguments, as the end of an error text that begins with the function's name, or None."""
    return _heads_problem(c) or _table_problem(c) or _positions_problem(c) or _weights_problem(c)


def _heads_problem(c: Rotary) -> str | None:
    shape = list(c.query.shape)
    for name, x, _ in c.heads:
        if x.dim() != 4:
            return f"`{name}` must have shape (B, L, H, D), got {list(x.shape)}"
        if x.dtype not in FLOATING:
            return f"`{name}` must be {either(FLOATING)}, got {short(x.dtype)}"
        if not alike([*x.shape[:2], x.shape[3]], [*shape[:2], shape[3]]):
            expected = f"(B, L, D) = ({shape[0]}, {shape[1]}, {shape[3]})"
            return f"`{name}` must have the query's {expected} around its heads, got {list(x.shape)} as (B, L, H, D)"
        if x.dtype != c.query.dtype or x.device != c.query.device:
            return f"`{name}` must be {_kind(c.query)} as the query is, got {_kind(x)}"
    return None


def _table_problem(c: Rotary) -> str | None:
    batch, tokens, _, cols = c.query.shape
    rows = "L" if c.positions is None else "M"
    for name, t in (("cos", c.cos), ("sin", c.sin)):
        fits = t.dim() == 3 and broadcasts(t.shape[0], batch if c.positions is None else 1)
        if not fits or (c.positions is None and not possible(t.shape[1] == tokens)):
            values = f", with L = {tokens}" + (f" and B = {batch}" if c.positions is None else "")
            return (
                f"`{name}` must have shape ({rows}, R / 2){' or (B, L, R / 2)' if rows == 'L' else ''}{values}, "
                f"got {list(t.shape)}"
            )
        if not possible(2 * t.shape[2] <= cols):
            hint = f"; of halves that are equal, give one: `{name}[..., : {cols // 2}]`" if t.shape[2] == cols else ""
            return f"`{name}` must have at most D / 2 = {cols // 2} columns, got {t.shape[2]}: one for each pair{hint}"
        if not _mixes(t.dtype, c.query.dtype) or t.device != c.query.device:
            return f"`{name}` must be {_partners(c.query)}, got {_kind(t)}"
    if not alike(c.sin.shape, c.cos.shape) or c.sin.dtype != c.cos.dtype:
        return f"`sin` must have the shape and dtype of `cos`, {_shown(c.cos)}, got {_shown(c.sin)}"
    return None


def _positions_problem(c: Rotary) -> str | None:
    p = c.positions
    if p is None:
        return None
    batch, tokens = c.query.shape[:2]
    if p.dtype not in _POSITIONS or p.device != c.query.device:
        return f"`positions` must be int32 or int64 on {c.query.device}, got {_kind(p)}"
    if p.dim() != 2 or not broadcasts(p.shape[0], batch) or not possible(p.shape[1] == tokens):
        return f"`positions` must have shape (L,) or (B, L), with B = {batch} and L = {tokens}, got {list(p.shape)}"
    return None


def _weights_problem(c: Rotary) -> str | None:
    cols = c.query.shape[3]
    for name, _, weight in c.heads:
        if weight is None:
            if c.weight_offset != 0.0:
                return f"`weight_offset` needs a weight, got {c.weight_offset} without `{name}_weight`"
            continue
        if not alike(weight.shape, [cols]):
            return f"`{name}_weight` must have shape (D,) = ({cols},), got {list(weight.shape)}"
        if not _mixes(weight.dtype, c.query.dtype) or weight.device != c.query.device:
            return f"`{name}_weight` must be {_partners(c.query)}, got {_kind(weight)}"
        if c.eps is None:
            return f"`{name}_weight` needs `eps`, got None"
    if c.rounding not in ROUNDINGS:
        return f"`rounding` must be one of {', '.join(map(repr, ROUNDINGS))}, got {c.rounding!r}"
    return None


def served_by_kernels(c: Rotary) -> bool:
    """Whether the arguments are right and there is anything for a kernel to do."""
    return problem(c) is None and all(possible(x.numel() > 0) for _, x, _ in c.heads) and possible(c.half > 0)


def result_like(x: Tensor) -> Tensor:
    """An uninitialised result without gaps, its dimensions in the order of x's strides, its columns contiguous."""
    like = torch.empty_like(x)
    if like.stride(-1) == 1 or like.shape[-1] == 1:
        return like
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def rounds_to(c: Rotary, weight: Tensor | None) -> tuple[bool, bool]:
    """Whether rounding "hf" rounds the product with the weight, and whether it rounds the products with cos and sin.

    A product has the promoted type of its factors. It is not rounded if that is the compute type.
    """
    dtype = c.query.dtype
    if c.rounding != "hf" or dtype not in (torch.float16, torch.bfloat16):
        return False, False
    product = weight is None or weight.dtype == dtype
    return product, product and c.cos.dtype == dtype


def _mixes(dtype: torch.dtype, with_dtype: torch.dtype) -> bool:
    return dtype in FLOATING and (dtype == torch.float64) == (with_dtype == torch.float64)


def _partners(x: Tensor) -> str:
    return f"{either((torch.float64,) if x.dtype == torch.float64 else FLOATING[:3])} on {x.device}"


def _kind(t: Tensor) -> str:
    return f"{short(t.dtype)} on {t.device}"


def _shown(t: Tensor) -> str:
    return f"{list(t.shape)} {short(t.dtype)}"
