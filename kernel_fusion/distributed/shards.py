"""The part of each axis of an operator's tensors that this rank has, chosen so that little is moved.

Each dimension of the mesh shards at most one axis, which is one that the largest argument has sharded already.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from kernel_fusion.backends.triton.layout import dense_strides
from kernel_fusion.distributed.axes import Axes, Call

# 2^64 / golden ratio; odd, so multiples differ.
_SEED_STEP = 0x9E3779B97F4A7C15


@dataclass(frozen=True)
class Part:
    """The axis that a dimension of the mesh shards, and in how many interleaved pieces."""

    axis: int
    pieces: int = 1

    def placement(self, dim: int) -> Placement:
        """Return the placement of a tensor whose dimension `dim` is this axis."""
        return Shard(dim) if self.pieces == 1 else _StridedShard(dim, split_factor=self.pieces)


@dataclass(frozen=True)
class Shards:
    """The parts that the dimensions of the mesh shard, in their order.

    A part is None if all ranks along that dimension compute the same.
    """

    mesh: DeviceMesh
    parts: tuple[Part | None, ...]

    @classmethod
    def chosen(cls, call: Call, operands: dict[int, DTensor], mesh: DeviceMesh) -> Shards:
        """Return the shards that the largest of the `operands` have already, as far as `call` allows them."""
        by_size = sorted(operands, key=lambda i: -elements(operands[i]))

        def part(mesh_dim: int) -> Part | None:
            for i in by_size:
                axes = call.operands[i]
                found = _part_of(operands[i].placements[mesh_dim], axes)
                # A sharded weight alone does not spread rows: it is gathered.
                allowed = call.free | call.joined if len(axes) == len(call.sizes) else call.free
                if found is not None and found.axis in allowed:
                    return found
            return None

        return cls(mesh, tuple(map(part, range(mesh.ndim))))

    def placements(self, axes: Axes, otherwise: Placement) -> tuple[Placement, ...]:
        """Return the placements of a tensor with these axes; `otherwise` is that for an axis that it lacks."""
        return tuple(
            Replicate() if part is None else part.placement(axes.index(part.axis)) if part.axis in axes else otherwise
            for part in self.parts
        )

    def local(self, tensor: DTensor, axes: Axes, is_small: bool) -> torch.Tensor:
        """Return this rank's part of an argument. The gradient of an argument that ranks share is the sum over them.

        A small replicated argument is sliced after `to_local`, because PyTorch would gather the gradient of its own
        slice.
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
        """Return the DTensor of which `result` is this rank's part, or one term of a sum over the ranks."""
        shape = torch.Size(1 if axis is None else sizes[axis] for axis in axes)
        placements = self.placements(axes, Partial())
        stride = _dense_strides(shape, result)
        return DTensor.from_local(result, self.mesh, placements, run_check=False, shape=shape, stride=stride)

    def along(self, axes: frozenset[int]) -> tuple[int, ...]:
        """Return the dimensions of the mesh that shard one of these axes."""
        return tuple(m for m, part in enumerate(self.parts) if part is not None and part.axis in axes)

    def seed(self, seed: torch.Tensor) -> torch.Tensor:
        """Return the seed of this rank's part, which is the same for copies of the part on other ranks."""
        index = 0
        for mesh_dim, part in enumerate(self.parts):
            if part is not None:
                index = index * self.mesh.size(mesh_dim) + self.mesh.get_local_rank(mesh_dim)
        step = index * _SEED_STEP % 2**64
        return seed + (step - 2**64 if step >= 2**63 else step)

    def slice(self, tensor: torch.Tensor, dim: int, axis: int | None) -> torch.Tensor:
        """Return this rank's part of the tensor, whose dimension `dim` is `axis`."""
        for mesh_dim, part in enumerate(self.parts):
            if part is not None and part.axis == axis:
                world, rank = self.mesh.size(mesh_dim), self.mesh.get_local_rank(mesh_dim)
                chunks = [_chunk(piece, dim, world, rank) for piece in tensor.chunk(part.pieces, dim)]
                tensor = chunks[0] if len(chunks) == 1 else torch.cat(chunks, dim)
        return tensor


def _laid_out(tensor: DTensor, placements: tuple[Placement, ...]) -> DTensor:
    """The tensor with these placements."""
    return tensor if tensor.placements == placements else tensor.redistribute(placements=placements)


def gathered(tensor: DTensor, whole: Callable[[int], bool]) -> DTensor:
    """Return the tensor with all placements for which `whole` holds replicated.

    PyTorch's views do not gather what they need.
    """
    shards = [isinstance(p, (Shard, _StridedShard)) and whole(p.dim) for p in tensor.placements]
    placed = zip(tensor.placements, shards, strict=True)
    return _laid_out(tensor, tuple(Replicate() if gathers else p for p, gathers in placed))


def _chunk(tensor: torch.Tensor, dim: int, world: int, rank: int) -> torch.Tensor:
    chunks = tensor.chunk(world, dim)
    return chunks[rank] if rank < len(chunks) else tensor.narrow(dim, 0, 0)


def elements(tensor: torch.Tensor) -> int:
    """Return the number of elements of a tensor, in which an expanded dimension counts once."""
    return math.prod([size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride])


def _part_of(placement: Placement, axes: Axes) -> Part | None:
    if not isinstance(placement, (Shard, _StridedShard)):
        return None
    axis = axes[placement.dim]
    return None if axis is None else Part(axis, getattr(placement, "split_factor", 1))


def _dense_strides(shape: torch.Size, like: torch.Tensor) -> tuple[int, ...]:
    """The strides without gaps of a tensor whose dimensions lie in the order of those of `like`."""
    dims = range(len(shape))
    order = dims if like.is_contiguous() else sorted(dims, key=lambda d: (-like.stride()[d], d))
    return tuple(dense_strides(shape, order))


def halves(input: DTensor, dim: int) -> tuple[torch.Tensor, ...]:
    """Return both halves of the input along `dim`.

    Nothing is sent if each rank has the same part of both halves. Otherwise PyTorch's chunk makes them.
    """
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
