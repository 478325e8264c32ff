"""Reductions: plans and sources (kernels/reduce_rows.cuh, reduce_columns.cuh)."""

from __future__ import annotations

from dataclasses import dataclass

from kernel_fusion.backends.cuda.device import Device
from kernel_fusion.backends.cuda.source import Launch, Source
from kernel_fusion.core.fields import constants
from kernel_fusion.core.other_specs import ReduceAccess, ReduceSpec
from kernel_fusion.core.spec import ITEMSIZE, VECTOR_BYTES

_WARP_CAPACITY = 256  # vectors of the longest row of a warp's lanes
_WARP_THREADS = 128
_LOADS = 4  # in flight per thread
_MANY_LOADS = 8  # in blocks of few or of all rows, and for narrow vectors


@dataclass(frozen=True)
class ReduceRule:
    """How the launcher divides a reduction (native/extension/reduce_cuda.cpp).

    A tile is a block's columns. Several blocks share its rows, in chunks that a second kernel adds up, or one takes
    all. Constants keep the order independent of registers and of the number of rows.

    Attributes:
        chunk_bytes: a chunk of a row; constant.
        column_threads: of blocks that share a tile's rows.
        column_blocks: such blocks per multiprocessor; constant.
        rows_per_thread: at least, so that few rows make few chunks.
        lanes: the most threads along columns; wider tiles leave more chunks.
        lanes_of_chunks: the same when adding up chunks.
        few_rows: up to here a block is one line of threads.
        few_threads: of such a block; small, so that many multiprocessors share the wait.
        all_threads: of a block that takes a tile's rows.
        filled: one does if tiles fill the device: at least 5 of 9 multiprocessors have one, and none has two.
        all_bytes: and if a vector has this many; narrower ones leave too little in flight.
    """

    chunk_bytes: int = 65536
    column_threads: int = 256
    column_blocks: int = 4
    rows_per_thread: int = 8
    lanes: int = 16
    lanes_of_chunks: int = 8
    few_rows: int = 16
    few_threads: int = 64
    all_threads: int = 512
    filled: tuple[int, int] = (5, 9)
    all_bytes: int = 8


_RULE = ReduceRule()


@dataclass(frozen=True)
class ReducePlan(Launch):
    """How a reduction runs.

    Attributes:
        lanes: threads per row, or along the columns.
        each: rows that a thread sums up at once.
        unroll: vectors of a row, or rows of a column, at once.
    """

    vec: int
    lanes: int
    each: int = 1
    unroll: int = _LOADS


def plan(spec: ReduceSpec, access: ReduceAccess, device: Device) -> ReducePlan:
    """Columns by tiles; short rows by lanes of a warp, long ones by a block."""
    if access.lanes:
        # They need more in flight.
        narrow = access.vec * ITEMSIZE[spec.input] < _RULE.all_bytes
        in_chunks = access.threads == _RULE.column_threads
        return ReducePlan(
            vec=access.vec,
            threads=access.threads,
            per_block=access.lanes * access.vec,
            lanes=access.lanes,
            unroll=_LOADS if in_chunks and not narrow else _MANY_LOADS,
            min_blocks=1 if access.threads == _RULE.all_threads else _RULE.column_blocks,
        )
    vec = VECTOR_BYTES // ITEMSIZE[spec.input]
    if access.capacity <= _WARP_CAPACITY:
        # Two vectors per lane if there are enough; neighbours read at least 32 bytes together.
        threads, lanes = _WARP_THREADS, min(32, max(1, access.capacity // 2))
    else:
        threads = lanes = _block_threads(access.capacity)
    unroll = min(_LOADS, access.capacity // lanes)
    each = _LOADS // unroll
    # All threads of a multiprocessor: 32 registers suffice for one row in whole vectors, with at most 8 of sums.
    lean = each == 1 and access.contiguous and access.align == VECTOR_BYTES and vec * ITEMSIZE[spec.acc] <= 32
    return ReducePlan(
        threads=threads,
        per_block=threads // lanes * each,
        vec=vec,
        lanes=lanes,
        each=each,
        unroll=unroll,
        min_blocks=device.resident_threads // threads if lean else 1,
    )


def _block_threads(capacity: int) -> int:
    """A block that sums up a row: four to eight vectors per thread."""
    return 128 if capacity <= 512 else 256 if capacity <= 2048 else 512


def source(spec: ReduceSpec, access: ReduceAccess, plan: ReducePlan) -> Source:
    """The source of the kernel."""
    types: dict[str, str | None] = {"In": spec.input, "Out": spec.out, "Acc": spec.acc}
    known = constants(spec, "map") | constants(access, "align") | constants(plan, "threads", "vec", "lanes", "unroll")
    header = "reduce_columns" if access.lanes else "reduce_rows"
    if access.lanes:
        known |= constants(access, "align_out")
    else:
        known |= constants(plan, "each") | constants(access, "contiguous", "chunked", "nested")
    name = f"kf_{header}_{spec.map}_{spec.input}"
    return Source(name, header, "ReduceArgs", types, known, plan.threads, plan.min_blocks)
