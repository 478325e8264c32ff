"""Reductions: plans and sources (kernels/reduce_rows.cuh, reduce_columns.cuh)."""

from __future__ import annotations

from dataclasses import dataclass

from kernel_fusion.backends.cuda.device import Device
from kernel_fusion.backends.cuda.launch import Launch
from kernel_fusion.backends.cuda.source import Source
from kernel_fusion.core.families import MAPS, ReduceAccess, ReduceSpec
from kernel_fusion.core.spec import ITEMSIZE

_WARP_CAPACITY = 128  # vectors of the longest rows that some lanes of a warp sum up: 2 KB
_WARP_THREADS = 128
_COLUMN_THREADS = 256
_LOADS = 4  # that a thread has in flight
# The same where a block takes a row of no more than 8 vectors a thread: 8192x8192 bf16 on an H200, 32.6 us with 4, 32.0
# with 2; longer ones, as of a sum of all, rather take 4: fp32 62.8 and 63.8.
_SHORT_ROW_LOADS, _SHORT_ROW_VECTORS = 2, 8


@dataclass(frozen=True)
class ReducePlan(Launch):
    """How a reduction runs.

    Attributes:
        lanes: threads per row, or along the columns.
        each: rows that a thread sums up at once.
        unroll: vectors of a row, or rows of a column, at once.
    """

    lanes: int
    each: int = 1
    unroll: int = _LOADS


def plan(spec: ReduceSpec, access: ReduceAccess, device: Device) -> ReducePlan:
    """Columns by tiles; short rows by lanes of a warp, long ones by a block."""
    if access.lanes:
        # Vectors of fewer bytes need more of them on their way.
        unroll = _LOADS if access.vec * ITEMSIZE[spec.input] >= 8 else 2 * _LOADS
        per_block = access.lanes * access.vec
        return ReducePlan(threads=_COLUMN_THREADS, per_block=per_block, lanes=access.lanes, unroll=unroll)
    if access.capacity <= _WARP_CAPACITY:
        # Two vectors to a lane where there are so many: neighbouring lanes then still read 32 bytes and more in a row.
        lanes = min(32, max(1, access.capacity // 2))
        unroll = min(2, access.capacity // lanes)
        each = _LOADS // unroll
        per_block = _WARP_THREADS // lanes * each
        return ReducePlan(threads=_WARP_THREADS, per_block=per_block, lanes=lanes, each=each, unroll=unroll)
    threads = 128 if access.capacity <= 512 else 256
    vectors = access.capacity // threads
    unroll = min(vectors, _LOADS if vectors > _SHORT_ROW_VECTORS else _SHORT_ROW_LOADS)
    return ReducePlan(threads=threads, per_block=1, lanes=threads, unroll=unroll)


def source(spec: ReduceSpec, access: ReduceAccess, plan: ReducePlan) -> Source:
    """What the kernel is compiled from."""
    types: dict[str, str | None] = {"In": spec.input, "Out": spec.out, "Acc": spec.acc}
    constants = {
        "kMap": MAPS.index(spec.map),
        "kVec": access.vec,
        "kThreads": plan.threads,
        "kLanes": plan.lanes,
        "kUnroll": plan.unroll,
        "kAlign": access.align,
    }
    if access.lanes:
        header = "reduce_columns"
        constants["kAlignOut"] = access.align_out
    else:
        header = "reduce_rows"
        constants |= {"kEach": plan.each, "kContiguous": access.contiguous}
    return Source(
        f"kf_{header}_{spec.map}_{spec.input}", header, "ReduceArgs", types, constants, plan.threads, plan.min_blocks
    )
