"""Group norms: plans and sources (kernels/group_norm.cuh, group_norm_bwd.cuh)."""

from __future__ import annotations

from dataclasses import dataclass

from kernel_fusion.backends.cuda.device import Device
from kernel_fusion.backends.cuda.source import Launch, Source
from kernel_fusion.core.fields import constants
from kernel_fusion.core.other_specs import GroupNormAccess, GroupNormSpec
from kernel_fusion.core.spec import ITEMSIZE, VECTOR_BYTES

_FORWARD = ("row", "moments", "finish", "apply")
_LOADS = 4  # in flight per thread; of narrow vectors more
# The threads per multiprocessor for which registers must suffice. A thread has 80 registers forward; 128 for gradients,
# for the parameters of several channels, and in fp64; and 255 for gradients in fp64.
_RESIDENT, _RESIDENT_OF_MANY, _RESIDENT_OF_MOST = 768, 512, 256


@dataclass(frozen=True)
class GroupNormRule:
    """How the launcher divides a group norm (native/extension/group_norm.cpp).

    Only the sizes of one sample decide, so its bits do not depend on the batch.

    Attributes:
        row: elements of the longest row that one block takes.
        piece, pieces: the least positions of a channel in a piece, and the most pieces of a channel.
        tile, tiles: the least elements of a tile of channels in a piece, and the most pieces, with channels last.
        threads: of a block that takes pieces.
        row_threads, per_thread: the most threads for a row, half as many in fp64, and the least elements of it for a
            thread.
    """

    row: int = 32768
    piece: int = 8192
    pieces: int = 32
    tile: int = 16384
    tiles: int = 1024
    threads: int = 256
    row_threads: int = 512
    per_thread: int = 16


@dataclass(frozen=True)
class GroupNormPlan(Launch):
    """How a step runs; `unroll` vectors are in flight per thread."""

    unroll: int = _LOADS


def plan(spec: GroupNormSpec, access: GroupNormAccess, device: Device) -> GroupNormPlan:
    """Plan a step; the launcher has divided the work."""
    narrow = access.vec * ITEMSIZE[spec.x] < VECTOR_BYTES // 2
    backward, wide = spec.step not in _FORWARD, spec.acc == "f64"
    # The numbers and sums of a vector of channels, with a factor among them, leave no registers for a second vector.
    crowded = spec.step == "sums" and spec.channels_last and spec.scale is not None
    if backward and wide:
        unroll, resident = 1, _RESIDENT_OF_MOST
    else:
        unroll = _LOADS * (2 if narrow else 1) // (2 if backward else 1)
        unroll = 1 if crowded else unroll
        resident = _RESIDENT_OF_MANY if backward or spec.channels_last or wide else _RESIDENT
    return GroupNormPlan(threads=access.threads, unroll=unroll, min_blocks=max(1, resident // access.threads))


def source(spec: GroupNormSpec, access: GroupNormAccess, plan: GroupNormPlan) -> Source:
    """The source of the kernel."""
    header = "group_norm" if spec.step in _FORWARD else "group_norm_bwd"
    tensors = ("x", "y", "weight", "bias", "add", "scale", "shift")
    types: dict[str, str | None] = {name.capitalize(): getattr(spec, name) for name in tensors}
    types |= {"Acc": spec.acc} | ({} if header == "group_norm" else {"Finest": spec.finest})
    known = constants(spec, "step", "activation", "channels_last", "sums_x")
    known |= constants(access, "vec", "lanes", "threads", "align", "align_out") | constants(plan, "unroll")
    name = f"kf_group_norm_{spec.step}_{spec.x}"
    return Source(name, header, "GroupNormArgs", types, known, plan.threads, plan.min_blocks)
