"""Which part of each axis this rank has: chosen from how the arguments lie, so that as little as may be is moved.

In each dimension of the mesh at most one axis is sharded, the first that a large argument has sharded already. What
lies otherwise is brought there as PyTorch's own operators do: a part of what a rank has whole costs nothing, a sum over
ranks is scattered or, where nothing is sharded, added up everywhere, and the rest is gathered or exchanged.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from kernel_fusion.distributed.axes import Axes, Call

# Odd, so that all multiples of it up to 2^64 are different: 2^64 / golden ratio.
_SEED_STEP = 0x9E3779B97F4A7C15


@dataclass(frozen=True)
class Part:
    """The axis that a dimension of the mesh shards, in so many interleaved pieces (1: in one)."""

    axis: int
    pieces: int = 1

    def placement(self, dim: int) -> Placement:
        """That of a tensor whose dimension `dim` is the axis."""
        return Shard(dim) if self.pieces == 1 else _StridedShard(dim, split_factor=self.pieces)


@dataclass(frozen=True)
class Shards:
    """What each dimension of the mesh shards: a part, or None where all ranks along it compute the same."""

    mesh: DeviceMesh
    parts: tuple[Part | None, ...]

    @classmethod
    def chosen(cls, call: Call, operands: dict[int, DTensor], mesh: DeviceMesh) -> Shards:
        """Those that move least."""
        by_size = sorted(operands, key=lambda i: -elements(operands[i]))

        def part(mesh_dim: int) -> Part | None:
            for i in by_size:
                axes = call.operands[i]
                found = _part_of(operands[i].placements[mesh_dim], axes)
                # Rows are spread because they are, not because a weight is: that is gathered.
                allowed = call.free | call.joined if len(axes) == len(call.sizes) else call.free
                if found is not None and found.axis in allowed:
                    return found
            return None

        return cls(mesh, tuple(map(part, range(mesh.ndim))))

    def placements(self, axes: Axes, otherwise: Placement) -> tuple[Placement, ...]:
        """How a tensor of these axes lies, if it is `otherwise` along the axes that it does not have."""
        return tuple(
            Replicate() if part is None else part.placement(axes.index(part.axis)) if part.axis in axes else otherwise
            for part in self.parts
        )

    def local(self, tensor: DTensor, axes: Axes, is_small: bool) -> torch.Tensor:
        """This rank's part of an argument; what ranks share has a gradient that is the sum of theirs.

        A small one that all ranks have whole is sliced after autograd has been told so, and its gradient is such a sum
        too: that of a slice taken by PyTorch would be gathered at once.
        """
        placements, grads = self.placements(axes, Replicate()), self.placements(axes, Partial())
        sharded = [m for m, part in enumerate(self.parts) if part is not None and part.axis in axes]
        if is_small and sharded and all(tensor.placements[m].is_replicate() for m in sharded):
            replicated = tuple(Replicate() if m in sharded else p for m, p in enumerate(placements))
            partial = tuple(Partial() if m in sharded else p for m, p in enumerate(grads))
            part = _laid_out(tensor, replicated).to_local(grad_placements=partial)
            for dim, axis in enumerate(axes):
                part = self.slice(part, dim, axis)
            return part
        return _laid_out(tensor, placements).to_local(grad_placements=grads)

    def whole(self, result: torch.Tensor, axes: Axes, sizes: Sequence[int]) -> DTensor:
        """The tensor of which `result` is this rank's part, or its share of a sum."""
        shape = torch.Size(1 if axis is None else sizes[axis] for axis in axes)
        placements = self.placements(axes, Partial())
        stride = _dense_strides(shape, result)
        return DTensor.from_local(result, self.mesh, placements, run_check=False, shape=shape, stride=stride)

    def along(self, axes: frozenset[int]) -> tuple[int, ...]:
        """The dimensions of the mesh that shard one of these axes."""
        return tuple(m for m, part in enumerate(self.parts) if part is not None and part.axis in axes)

    def seed(self, seed: torch.Tensor) -> torch.Tensor:
        """The seed of this rank's part, which is another for every part and the same for copies of it."""
        index = 0
        for mesh_dim, part in enumerate(self.parts):
            if part is not None:
                index = index * self.mesh.size(mesh_dim) + self.mesh.get_local_rank(mesh_dim)
        step = index * _SEED_STEP % 2**64
        return seed + (step - 2**64 if step >= 2**63 else step)

    def slice(self, tensor: torch.Tensor, dim: int, axis: int | None) -> torch.Tensor:
        """This rank's part of a dimension that is the axis."""
        for mesh_dim, part in enumerate(self.parts):
            if part is not None and part.axis == axis:
                world, rank = self.mesh.size(mesh_dim), self.mesh.get_local_rank(mesh_dim)
                chunks = [_chunk(piece, dim, world, rank) for piece in tensor.chunk(part.pieces, dim)]
                tensor = chunks[0] if len(chunks) == 1 else torch.cat(chunks, dim)
        return tensor


def _laid_out(tensor: DTensor, placements: tuple[Placement, ...]) -> DTensor:
    return tensor if tensor.placements == placements else tensor.redistribute(placements=placements)


def _chunk(tensor: torch.Tensor, dim: int, world: int, rank: int) -> torch.Tensor:
    chunks = tensor.chunk(world, dim)
    return chunks[rank] if rank < len(chunks) else tensor.narrow(dim, 0, 0)


def elements(tensor: torch.Tensor) -> int:
    """How many different ones there are: those along which it was expanded count once."""
    return math.prod([size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride])


def _part_of(placement: Placement, axes: Axes) -> Part | None:
    if not isinstance(placement, (Shard, _StridedShard)):
        return None
    axis = axes[placement.dim]
    return None if axis is None else Part(axis, getattr(placement, "split_factor", 1))


def _dense_strides(shape: torch.Size, like: torch.Tensor) -> tuple[int, ...]:
    """Strides without gaps, in the order of those of `like`."""
    strides, size = [1] * len(shape), 1
    order: list[Any] = sorted(range(len(shape)), key=lambda d: (like.stride(d), -d))
    for d in range(len(shape) - 1, -1, -1) if like.is_contiguous() else order:
        strides[d] = size
        size *= max(shape[d], 1)
    return tuple(strides)
