"""Plans of row operations other than norms, whose rows have a run-time length (kernels/row_executors.cuh).

A kernel serves all lengths up to 2^k or 3 * 2^k vectors, so a new length seldom compiles anything.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated

from kernel_fusion.backends.cuda.device import Device
from kernel_fusion.backends.cuda.plan import SMALL_ROW_THREADS, Ring
from kernel_fusion.backends.cuda.source import Launch
from kernel_fusion.backends.cuda.tree import MAX_CLUSTER, ceil_div, power_of_two
from kernel_fusion.core.fields import Names, constants
from kernel_fusion.core.other_specs import RowAccess
from kernel_fusion.core.spec import ITEMSIZE

# How a row is read: into registers; through shared memory, while coming rows are copied there; or twice or once from
# memory.
Reading = Annotated[str, Names("Reading", ("resident", "streamed", "twice", "once"))]

_STREAM_THREADS = 512
_PIECE_BYTES = 32768  # of one tensor, that a block of a cluster streams at best
# Slots that a stream needs, and shared memory for its barriers and sums at most.
_LEAST_SLOTS, _BARRIER_BYTES = 2, 6144
_NO_RING = Ring()


@dataclass(frozen=True)
class RowPlan(Launch):
    """How a row operation runs.

    Attributes:
        reading: how a row is read.
        lanes: threads of a warp that share a row; fewer than 32 only if a row has one warp.
        warps: of a row, over all blocks of its cluster.
        vectors: a thread's, at most; 0 for rows that are read twice or once.
        dealt: whether a row's chunks are dealt to its warps in turn, instead of a stretch to each.
        unroll: vectors at a time, of rows that are read twice or once.
        ring: how rows pass through shared memory.
    """

    reading: Reading
    lanes: int
    warps: int
    vectors: int = 0
    dealt: bool = False
    unroll: int = 4
    ring: Ring = _NO_RING

    def __str__(self) -> str:
        where = f"a cluster of {self.cluster} blocks" if self.cluster > 1 else "a block"
        if self.per_block > 1:
            shape = f"{self.per_block} rows per block of {self.threads} threads, {self.lanes} lanes per row"
        else:
            shape = f"{where} of {self.threads} threads per row"
        words = {"resident": "row in registers", "streamed": "rows through shared memory"}
        return f"{shape}, {words.get(self.reading, f'row read {self.reading}')}"


def resident_plan(lanes: int, vectors: int, resident_threads: int, dealt: bool) -> RowPlan:
    """Rows in the registers of `lanes` threads each, with registers for `resident_threads` on a multiprocessor."""
    threads = max(lanes, SMALL_ROW_THREADS) if lanes <= 32 else lanes
    return RowPlan(
        threads=threads,
        per_block=threads // lanes,
        reading="resident",
        lanes=min(lanes, 32),
        warps=max(1, lanes // 32),
        vectors=vectors,
        dealt=dealt,
        min_blocks=max(1, resident_threads // threads),
    )


def streamed_plan(
    capacity: int, vec: int, dtypes: Iterable[str], device: Device, ring: Ring, most: int
) -> RowPlan | None:
    """Rows through the shared memory of a cluster, or None if it has no room for two.

    Args:
        capacity: vectors of the longest row.
        vec: elements of a vector.
        dtypes: of the tensors that pass through shared memory.
        device: that the kernel runs on.
        ring: with the most slots.
        most: elements that a thread holds.
    """
    itemsizes = [ITEMSIZE[dtype] for dtype in dtypes]
    pieces = ceil_div(capacity * vec * max(itemsizes), _PIECE_BYTES), ceil_div(capacity * vec, _STREAM_THREADS * most)
    wanted = power_of_two(max(pieces))
    clusters = [min(MAX_CLUSTER, wanted)]
    if clusters[0] < wanted and device.arch == 90:
        clusters.append(2 * MAX_CLUSTER)
    plans = (_streamed_by(cluster, capacity, vec, itemsizes, device, ring, most) for cluster in clusters)
    return next(filter(None, plans), None) if device.has_clusters else None


def _streamed_by(
    cluster: int, capacity: int, vec: int, itemsizes: Sequence[int], device: Device, ring: Ring, most: int
) -> RowPlan | None:
    threads = _STREAM_THREADS
    vectors = ceil_div(capacity, cluster * threads)
    # The tree depends on no alignment, so rows of any alignment must fit.
    slot_bytes = sum(ceil_div(threads * vectors * vec * itemsize, 16) * 16 + 16 for itemsize in itemsizes)
    slots = min(ring.slots, (device.shared_bytes - _BARRIER_BYTES) // slot_bytes)
    if slots < _LEAST_SLOTS or vectors * vec > most:
        return None
    return RowPlan(
        threads=threads + 32 * ring.helpers,
        cluster=cluster,
        shared_bytes=slots * slot_bytes,
        persistent=True,
        reading="streamed",
        lanes=32,
        warps=cluster * threads // 32,
        vectors=vectors,
        ring=Ring(slots, ring.helpers, ring.pace),
    )


def twice_plan(threads: int, unroll: int) -> RowPlan:
    """Rows that a block reads twice; each thread takes `unroll` vectors at a time."""
    return RowPlan(threads=threads, reading="twice", lanes=32, warps=threads // 32, dealt=True, unroll=unroll)


def once_plan(lanes: int, unroll: int, resident_threads: int) -> RowPlan:
    """Rows that `lanes` threads each read once, in registers for as many threads as `resident_plan` says."""
    return replace(resident_plan(lanes, 0, resident_threads, dealt=True), reading="once", unroll=unroll)


def row_constants(plan: RowPlan, vec: int, aligned: Mapping[str, RowAccess]) -> dict[str, int | str]:
    """The constants of a row kernel; `aligned` has its tensors' accesses by the names of their types."""
    known: dict[str, int | str] = {"kVec": vec, "kUnroll": plan.unroll, "kRows": plan.per_block, "kGrouped": 0}
    known |= constants(plan, "threads", "lanes", "warps", "cluster", "vectors", "dealt", "reading")
    known |= constants(plan.ring, "slots", "helpers")
    known["kPaceTolerance"] = plan.ring.pace.tolerance if plan.ring.pace else 0
    known["kPaceLeast"] = plan.ring.pace.least if plan.ring.pace else 0
    for name, rows in aligned.items():
        known |= {f"{key}{name}": value for key, value in constants(rows, "align", "strided").items()}
    return known
