"""Reductions: plans and sources (kernels/reduce_rows.cuh, reduce_columns.cuh)."""

from __future__ import annotations

from dataclasses import dataclass

from kernel_fusion.backends.cuda.device import Device
from kernel_fusion.backends.cuda.launch import Launch
from kernel_fusion.backends.cuda.source import Source
from kernel_fusion.core.fields import constants
from kernel_fusion.core.spec import ITEMSIZE, ReduceAccess, ReduceSpec

_WARP_CAPACITY = 256  # vectors of the longest rows that lanes of a warp sum up: 4 KB
_WARP_THREADS = 128
_LOADS = 4  # that a thread has in flight
# A launch over columns has four blocks of so many threads to a multiprocessor, with 64 KB in flight.
# Or one of more threads, which takes all rows, or small ones where rows are few.
COLUMN_THREADS, COLUMN_BLOCKS = 256, 4
_MANY_LOADS = 8  # in blocks of other sizes, and of narrow vectors


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
        narrow = access.vec * ITEMSIZE[spec.input] < 8
        return ReducePlan(
            threads=access.threads,
            per_block=access.lanes * access.vec,
            lanes=access.lanes,
            unroll=_MANY_LOADS if narrow or access.threads != COLUMN_THREADS else _LOADS,
            min_blocks=COLUMN_BLOCKS if access.threads <= COLUMN_THREADS else 1,
        )
    if access.capacity <= _WARP_CAPACITY:
        # Two vectors to a lane where there are so many: neighbouring lanes then still read 32 bytes and more in a row.
        threads, lanes = _WARP_THREADS, min(32, max(1, access.capacity // 2))
    else:
        threads = lanes = _block_threads(access.capacity)
    unroll = min(_LOADS, access.capacity // lanes)
    each = _LOADS // unroll
    # As many threads as a multiprocessor holds: 32 registers suffice where one row is read by whole vectors, into at
    # most 8 registers of sums.
    lean = each == 1 and access.contiguous and access.align == 16 and access.vec * ITEMSIZE[spec.acc] <= 32
    return ReducePlan(
        threads=threads,
        per_block=threads // lanes * each,
        lanes=lanes,
        each=each,
        unroll=unroll,
        min_blocks=device.resident_threads // threads if lean else 1,
    )


def _block_threads(capacity: int) -> int:
    """Threads of a block that sums up a row, four to eight vectors each.

    8192x8192 on an H200 (torch 2.11.0+cu130, in no result file): the chunks of a sum of all, which have 4096 vectors,
    take 61.6 us in fp32 and 32.6 in bf16 with 512 threads, 61.8 and 32.9 with 256.
    """
    return 128 if capacity <= 512 else 256 if capacity <= 2048 else 512


def source(spec: ReduceSpec, access: ReduceAccess, plan: ReducePlan) -> Source:
    """What the kernel is compiled from."""
    types: dict[str, str | None] = {"In": spec.input, "Out": spec.out, "Acc": spec.acc}
    known = constants(spec, "map") | constants(access, "vec", "align") | constants(plan, "threads", "lanes", "unroll")
    header = "reduce_columns" if access.lanes else "reduce_rows"
    if access.lanes:
        known |= constants(access, "align_out")
    else:
        known |= constants(plan, "each") | constants(access, "contiguous", "chunked", "nested")
    name = f"kf_{header}_{spec.map}_{spec.input}"
    return Source(name, header, "ReduceArgs", types, known, plan.threads, plan.min_blocks)
