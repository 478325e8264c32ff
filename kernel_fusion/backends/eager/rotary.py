"""The rotary embedding of query and key, perhaps after each head's RMSNorm."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from kernel_fusion.backends.eager.row_norm import rounded
from kernel_fusion.core.rotary import Rotary, problem, rounds_to
from kernel_fusion.core.spec import compute_dtype


def qk_norm_rope(*args: Any) -> tuple[Tensor, Tensor]:
    """Query and key (empty if absent); core/rotary.py has the arguments.

    A head x has n = x / sqrt(E[x²] + eps) * (weight_offset + weight), or without `eps` n = x. Its first R columns are
    pairs (n1, n2): i and i + R / 2, or 2 i and 2 i + 1 if `interleaved`.

        y1 = n1 * cos[i] - n2 * sin[i], y2 = n2 * cos[i] + n1 * sin[i], elsewhere y = n

    y is rounded once, with "hf" as `rounds_to` says.
    """
    c = Rotary(*args)
    if text := problem(c):
        raise RuntimeError(f"`{'rope' if c.eps is None else 'qk_norm_rope'}`: {text}")
    wide = compute_dtype(c.query.dtype)
    angles = [_of_tokens(t, c.positions).to(wide) for t in (c.cos, c.sin)]
    results = [_rotated(c, x, weight, angles) for _, x, weight in c.heads]
    return results[0], c.query.new_empty(0) if c.key is None else results[1]


def _of_tokens(table: Tensor, positions: Tensor | None) -> Tensor:
    if positions is None:
        return table.unsqueeze(-2)
    rows = table[0]
    if table.is_cuda:  # an index out of range would end the context; a last row of NaN stands for all of these
        count = len(rows)
        rows = F.pad(rows, (0, 0, 0, 1), value=math.nan)
        positions = positions.where((positions >= 0) & (positions < count), count)
    return F.embedding(positions, rows).unsqueeze(-2)


def _rotated(c: Rotary, x: Tensor, weight: Tensor | None, angles: list[Tensor]) -> Tensor:
    def to_dtype(rounds: bool) -> Callable[[Tensor], Tensor]:
        return lambda v: rounded(v, x.dtype) if rounds else v

    after_weight, after_rotation = map(to_dtype, rounds_to(c, weight))
    n = x.to(angles[0].dtype)
    if c.eps is not None:
        n = n / torch.sqrt(n.square().mean(-1, keepdim=True) + c.eps)
        n = to_dtype(c.rounding == "hf")(n)
        if weight is not None:
            n = after_weight(n * (weight.to(n.dtype) + c.weight_offset))
    cos, sin = angles
    turned, rest = n[..., : 2 * c.half], n[..., 2 * c.half :]
    n1, n2 = (turned[..., ::2], turned[..., 1::2]) if c.interleaved else (n[..., : c.half], turned[..., c.half :])
    y1 = after_rotation(after_rotation(n1 * cos) - after_rotation(n2 * sin))
    y2 = after_rotation(after_rotation(n2 * cos) + after_rotation(n1 * sin))
    y = torch.stack((y1, y2), -1).flatten(-2) if c.interleaved else torch.cat((y1, y2), -1)
    return torch.cat((y, rest), -1).to(x.dtype)
