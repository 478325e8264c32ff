"""The two halves of a packed tensor that is spread over ranks."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard


def halves(input: DTensor, dim: int) -> tuple[Tensor, ...]:
    """Both halves: without sending anything where each rank has the same part of both, else by PyTorch's chunk."""
    dim %= input.dim()
    sharded = [m for m, p in enumerate(input.placements) if isinstance(p, (Shard, _StridedShard)) and p.dim == dim]
    if len(sharded) != 1 or getattr(input.placements[sharded[0]], "split_factor", 1) != 2:
        return input.chunk(2, dim)
    placements = tuple(Shard(dim) if m in sharded else p for m, p in enumerate(input.placements))
    shape = torch.Size(size // 2 if d == dim else size for d, size in enumerate(input.shape))
    stride = torch.empty(shape, device="meta").stride()
    return tuple(
        DTensor.from_local(half, input.device_mesh, placements, run_check=False, shape=shape, stride=stride)
        for half in input.to_local().chunk(2, dim)
    )
