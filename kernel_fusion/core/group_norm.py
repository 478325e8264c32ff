"""What a group norm takes, and how its result lies in memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kernel_fusion.core import checks
from kernel_fusion.core.symbols import alike, known


class GroupNorm(NamedTuple):
    """The arguments of the operator.

    Attributes:
        input: (N, C, *).
        weight, bias: (C,).
        add, scale, shift: (N, C), or of the input's shape.
        out_dtype: of the result; None means what autocast says, or the input's.
    """

    input: Tensor
    num_groups: int
    weight: Tensor | None
    bias: Tensor | None
    add: Tensor | None
    scale: Tensor | None
    shift: Tensor | None
    eps: float
    scale_offset: float
    activation: str
    out_dtype: torch.dtype | None


def has_channels_last(input: Tensor) -> bool:
    """Whether a position's channels lie together, and positions and samples in order, without gaps."""
    if input.dim() < 3 or not known(input.stride(1) == 1) or known(input.shape[1] == 1):
        return False
    if all(known(size == 1) for size in input.shape[2:]):
        return False  # contiguous, too
    expected = input.shape[1]
    for dim in (*range(input.dim() - 1, 1, -1), 0):
        if not known(input.shape[dim] == 1):
            if not known(input.stride(dim) == expected):
                return False
            expected = expected * input.shape[dim]
    return True


def result_like(input: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """An uninitialised result: with channels last if the input has them, else contiguous."""
    if not has_channels_last(input):
        return torch.empty_like(input, dtype=dtype, memory_format=torch.contiguous_format)
    moved = torch.empty_like(input.movedim(1, -1), dtype=dtype, memory_format=torch.contiguous_format)
    return moved.movedim(-1, 1)


def laid_out_as(result: Tensor, input: Tensor) -> Tensor:
    """The result, contiguous or with channels last as `result_like` says."""
    if not has_channels_last(input):
        return result.contiguous()
    return result.movedim(1, -1).contiguous().movedim(-1, 1)


def spread(t: Tensor, dims: int) -> Tensor:
    """A tensor of shape (N, C) as (N, C, 1, ...) of `dims` dimensions; one of the input's shape as it is."""
    return t.reshape([*t.shape, *[1] * (dims - 2)]) if t.dim() == 2 else t


def per_channel(verb: str, argument: str, value: Tensor | None, input: Tensor) -> Tensor | None:
    """`add`, `scale` or `shift` as (N, C) or in the input's shape, a view. Raise unless it fits."""
    if value is None:
        return None
    checks.tensor(verb, argument, value)
    shape, channels = list(input.shape), list(input.shape[:2])
    if alike(value.shape, shape) and (len(shape) == 2 or not all(known(size == 1) for size in shape[2:])):
        return value
    if alike(value.shape, channels):
        return value
    if len(shape) > 2 and alike(value.shape, [*channels, *[1] * (len(shape) - 2)]):
        return value.flatten(1)
    raise RuntimeError(
        f"`{verb}`: `{argument}` must have shape (N, C) = {channels}, {_ones(channels, len(shape))}or that of `input`, "
        f"{shape}, got {list(value.shape)}"
    )


def _ones(channels: Sequence[int], dims: int) -> str:
    return f"{[*channels, *[1] * (dims - 2)]} " if dims > 2 else ""
