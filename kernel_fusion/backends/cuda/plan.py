"""A plan of a row norm, and the two kinds that both directions know: rows read directly, and rows that are streamed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kernel_fusion.backends.cuda.device import Device
from kernel_fusion.backends.cuda.launch import Launch
from kernel_fusion.backends.cuda.tree import Tree, ceil_div
from kernel_fusion.core.spec import ITEMSIZE, Access, RowNormSpec

SMALL_ROW_THREADS = 128  # of a block that several rows share


@dataclass(frozen=True)
class Pace:
    """How the blocks of a streamed plan keep together (kernels/pace.cuh).

    Attributes:
        tolerance: how far a block may be ahead of the average, in quarters of a row per group: 8 is two rows.
        least: rows per group below which blocks go apart.
    """

    tolerance: int = 8
    least: int = 15


@dataclass(frozen=True)
class Plan(Launch):
    """How a row-norm kernel runs. The first group decides how a row is summed: a function of spec and device.

    Attributes:
        vec: elements per vector; lanes: lanes per warp that share a row; warps: warps per row (see kernels/tree.cuh).
        resident: the row stays in registers, else it is read again.
        center: how many of a lane's first vectors give the center of LayerNorm's statistics (see kernels/moments.cuh).
        batches: how many vectors a thread loads at a time of a row that forward reads again: for the statistics, at
            first those of the center, and for y.
        ahead: forward loads weight and bias beside x, before the statistics.
        together: of how many vectors it loads them at a time otherwise, after the statistics.
        early: forward loads those of the first `together` vectors before a row's warps exchange their sums.
        anew: a thread of forward finds its columns again after the statistics, instead of keeping them in registers.
        weight: where backward keeps the weight of a thread's columns for all rows: "wide" (registers, in the compute
            type), "shared" memory, or nowhere: "memory".
        unkept: of how many of a thread's vectors, its last ones, the weight is not kept.
        bias: the same of the bias, where backward needs it.
        storage: where backward keeps dweight and dbias: "none", "registers" or "shared".
        prefetch: backward loads the next row early.
        slots: rows are streamed through shared memory, with this many slots per group of threads; 0: read directly.
        helpers: warps of a streamed block without columns (kernels/row_stream.cuh): one is the combiner, the second
            one the producer.
        few: streamed backward has a loop of its own for no more rows than are in its slots at once.
        pace: how the blocks that stream rows keep together; None: they go apart.
        shifted: forward stores single elements by whole sectors (kernels/shifted_store.cuh).
        tiled: all rows of a block pass through shared memory together.
    """

    vec: int
    lanes: int
    warps: int
    center: int = 0
    resident: bool = True
    ahead: bool = False
    together: int = 1
    early: bool = False
    anew: bool = False
    weight: str = "memory"
    unkept: int = 0
    bias: str = "memory"
    storage: str = "none"
    prefetch: bool = False
    slots: int = 0
    helpers: int = 0
    few: bool = False
    pace: Pace | None = None
    shifted: bool = False
    tiled: bool = False
    batches: tuple[int, int] = (0, 0)

    def __str__(self) -> str:
        if self.slots:
            rows = f"{self.per_block} rows at a time" if self.per_block > 1 else "a row at a time"
            where = f"clusters of {self.cluster} blocks" if self.cluster > 1 else "blocks"
            shape = f"persistent {where} of {self.threads} threads, {rows}, {self.slots} rows each on their way"
        elif self.per_block > 1:
            shape = f"{self.per_block} rows per block of {self.threads} threads, {self.lanes} lanes per row"
        elif self.cluster > 1:
            shape = f"a cluster of {self.cluster} blocks of {self.threads} threads per row"
        else:
            shape = f"a block of {self.threads} threads per row"
        row = "row in registers" if self.resident else "row read again"
        row = "rows through shared memory" if self.slots or self.tiled else row
        sums = f", sums in {self.storage}" if self.storage != "none" else ""
        split = ", weight gradients in a pass of their own" if self.splits_weight else ""
        helpers = ("", ", a warp combines sums", ", a warp combines sums, another copies rows")[self.helpers]
        stores = ", y stored by whole sectors" if self.shifted else ""
        return f"{shape}{helpers}, {self.vec}-element vectors, {row}{stores}{sums}{split}"


def direct_plan(tree: Tree, shared_by: int = SMALL_ROW_THREADS, **options: Any) -> Plan:
    """A plan that reads rows straight into registers: a block of `shared_by` threads for several rows, or a block or
    cluster per row."""
    if tree.warps == 1:
        per_block, threads = shared_by // tree.lanes, shared_by
    else:
        per_block, threads = 1, tree.warps // tree.cluster * 32
    return Plan(tree.vec, tree.lanes, tree.warps, cluster=tree.cluster, per_block=per_block, threads=threads, **options)


def streamed_plan(
    spec: RowNormSpec,
    access: Access,
    device: Device,
    tree: Tree,
    groups: int,
    max_slots: int,
    pace: Pace | None,
    helpers: int = 0,
    shared_bytes: int = 0,
    weight: str = "memory",
    unkept: int = 0,
    bias: str = "memory",
) -> Plan | None:
    """A plan that streams rows through shared memory, of which it takes `shared_bytes` besides; None without room."""
    threads = tree.warps // tree.cluster * 32
    columns = tree.vectors * threads * tree.vec
    tensors = _streamed(spec, access)
    slot_bytes = sum(ceil_div(columns * ITEMSIZE[t], 16) * 16 + (16 if align < 16 else 0) for t, align in tensors)
    sums_bytes = groups * (32 * tree.warps + 256)  # at most: statistics, `Shared` of row_stream.cuh and pace.cuh
    slots = min(max_slots, (device.shared_bytes - sums_bytes - shared_bytes) // (groups * slot_bytes))
    if slots < 2:
        return None
    return Plan(
        tree.vec,
        tree.lanes,
        tree.warps,
        cluster=tree.cluster,
        per_block=groups,
        persistent=True,
        threads=groups * threads + 32 * helpers,
        storage="registers" if spec.direction == "backward" else "none",
        shared_bytes=slots * groups * slot_bytes + shared_bytes,
        weight=weight,
        unkept=unkept,
        bias=bias,
        slots=slots,
        helpers=helpers,
        pace=pace,
    )


def _streamed(spec: RowNormSpec, access: Access) -> list[tuple[str, int]]:
    """Types and alignments of the tensors whose rows a slot holds."""
    if spec.direction != "backward":
        return [(spec.x, access.x)] + ([(spec.residual, access.residual)] if spec.residual else [])
    tensors = [(spec.row, access.x), (spec.y, access.y)]
    tensors += [(spec.row, access.residual)] if spec.dh else []
    return tensors + ([(spec.pre_x, access.pre_x)] if spec.pre_x else [])
