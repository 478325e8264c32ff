"""The plan of a row norm, and makers of plans that read rows directly or stream them through shared memory."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Any

from kernel_fusion.backends.cuda.tree import Tree, ceil_div
from kernel_fusion.backends.cuda.tuned import Facts
from kernel_fusion.core.fields import Names
from kernel_fusion.core.spec import ITEMSIZE, Access, RowNormSpec

# Backward keeps these for all rows, in registers or shared memory.
KeptParameters = Annotated[str, Names("KeptParameters", ("nothing", "weight", "both", "shared"))]
# The place of column sums; "apart": a pass of their own, as of codes; "stored": of one row, they are the gradients.
KeptSums = Annotated[str, Names("KeptSums", ("none", "registers", "shared", "apart", "stored"))]

SMALL_ROW_THREADS = 128  # of a block with several rows


@dataclass(frozen=True)
class Pace:
    """How a streamed plan's blocks keep together (kernels/pace.cuh).

    Attributes:
        tolerance: how far a block may be ahead, in quarters of a row per group.
        least: with fewer rows per group, blocks do not wait.
    """

    tolerance: int = 8
    least: int = 15


@dataclass(frozen=True)
class Ring:
    """How rows pass through shared memory.

    Attributes:
        slots: of a group of threads; 0 without.
        helpers: warps without columns (kernels/row_stream.cuh): combiner, producer.
    """

    slots: int = 0
    helpers: int = 0
    pace: Pace | None = None


@dataclass(frozen=True)
class Plan:
    """How a row-norm kernel runs.

    `kernel`, `vec`, `lanes`, `warps` and `center` decide how a row is summed, and depend only on spec and device.
    """

    kernel: str
    vec: int
    lanes: int  # that share a row
    warps: int  # of a row (kernels/tree.cuh)
    center: int = 0  # a lane's first vectors, for LayerNorm's center (kernels/moments.cuh)
    cluster: int = 1
    per_block: int = 1  # rows, or a weight pass's columns
    min_blocks: int = 1  # per multiprocessor that registers allow
    shared_bytes: int = 0  # dynamic
    # Forward loads weight and bias "ahead", beside x; "early", before warps exchange sums; or later ("anew": looking up
    # columns again). Backward loads the "next" row early, reads rows "again", or loops over "few" streamed rows.
    variant: str = ""
    batches: tuple[int, ...] = (1,)  # vectors at a time: of parameters; of a row read twice, each time
    keeps: KeptParameters = "nothing"
    unkept: int = 0  # last vectors whose weight is not kept in shared memory
    sums: KeptSums = "none"
    ring: Ring = Ring()
    shifted: bool = False  # store whole sectors (kernels/rows.cuh)
    shares: int = 1  # warps of the tree that a warp executes
    rows_ahead: int = 0  # a block brings the row this far ahead to L2, in calls of few rows

    @property
    def tiled(self) -> bool:
        """Whether a block's rows pass through shared memory together."""
        return self.kernel == "row_norm_fwd_tile"

    @property
    def resident(self) -> bool:
        """Whether a row stays in registers."""
        return self.kernel != "row_norm_fwd_long" and self.variant != "again"

    @property
    def threads(self) -> int:
        """Threads per block."""
        if self.tiled or self.kernel == "row_norm_bwd_weight":
            return SMALL_ROW_THREADS
        return self.per_block * self.lanes * self.warps // (self.cluster * self.shares) + 32 * self.ring.helpers

    @property
    def least_per_block(self) -> int:
        """The fewest rows per block, so that few rows fill the device."""
        return self.threads // self.lanes if self.tiled else self.per_block

    @property
    def persistent(self) -> bool:
        """Whether no more blocks start than run at once."""
        return self.ring.slots > 0 or self.kernel == "row_norm_bwd"

    @property
    def splits(self) -> bool:
        """Whether dweight and dbias, or codes, have a pass of their own."""
        return self.sums == "apart"

    def order(self, spec: RowNormSpec) -> tuple[object, ...]:
        """The key of the order of sums; sums over rows also depend on how many blocks run."""
        row = self.vec, self.lanes, self.warps, self.center, self.resident
        if spec.direction != "backward" or not any(spec.column_sums):
            return row
        return *row, self.kernel, self.per_block, self.cluster, self.sums

    def __str__(self) -> str:
        if self.ring.slots:
            rows = f"{self.per_block} rows at a time" if self.per_block > 1 else "a row at a time"
            where = f"clusters of {self.cluster} blocks" if self.cluster > 1 else "blocks"
            shape = f"persistent {where} of {self.threads} threads, {rows}, {self.ring.slots} rows each on their way"
        elif self.per_block > 1:
            shape = f"{self.per_block} rows per block of {self.threads} threads, {self.lanes} lanes per row"
        elif self.cluster > 1:
            shape = f"a cluster of {self.cluster} blocks of {self.threads} threads per row"
        else:
            shape = f"a block of {self.threads} threads per row"
        row = "row in registers" if self.resident else "row read again"
        row = "rows through shared memory" if self.ring.slots or self.tiled else row
        sums = f", sums in {self.sums}" if self.sums in ("registers", "shared") else ""
        later = "weight gradients" if self.kernel.startswith("row_norm_bwd") else "codes"
        split = f", {later} in a pass of their own" if self.splits else ""
        helpers = ("", ", a warp combines sums", ", a warp combines sums, another copies rows")[self.ring.helpers]
        stores = ", y stored by whole sectors" if self.shifted else ""
        return f"{shape}{helpers}, {self.vec}-element vectors, {row}{stores}{sums}{split}"


def direct_plan(kernel: str, tree: Tree, shared_by: int = SMALL_ROW_THREADS, **options: Any) -> Plan:
    """Rows in registers, several among `shared_by` threads, or one in a block or cluster."""
    per_block = shared_by // tree.lanes if tree.warps == 1 else 1
    return Plan(kernel, tree.vec, tree.lanes, tree.warps, cluster=tree.cluster, per_block=per_block, **options)


def pace_of(facts: Facts, keeps: bool) -> Pace | None:
    """The tables say, else `keeps`."""
    return Pace(*facts.tuned("pace", (8, 15))) if facts.tuned("keeps_pace", keeps) else None


def streamed_plan(facts: Facts, most: Ring, groups: int = 1, shared_bytes: int = 0, **options: Any) -> Plan | None:
    """Rows through shared memory beside `shared_bytes`, or None if there is no room; `most` has the most slots."""
    spec, tree = facts.spec, facts.tree
    columns = 32 * tree.block_warps * tree.elements
    tensors = _streamed(spec, facts.access)
    slot_bytes = sum(ceil_div(columns * ITEMSIZE[t], 16) * 16 + (16 if align < 16 else 0) for t, align in tensors)
    sums_bytes = groups * (32 * tree.warps + 256)  # at most: statistics, `Shared` of row_stream.cuh and pace.cuh
    slots = min(most.slots, (facts.device.shared_bytes - sums_bytes - shared_bytes) // (groups * slot_bytes))
    if slots < 2:
        return None
    backward = spec.direction == "backward"
    return Plan(
        "row_norm_bwd_streamed" if backward else "row_norm_fwd_streamed",
        tree.vec,
        tree.lanes,
        tree.warps,
        cluster=tree.cluster,
        per_block=groups,
        sums="registers" if backward else "none",
        shared_bytes=slots * groups * slot_bytes + shared_bytes,
        ring=replace(most, slots=slots),
        **options,
    )


def _streamed(spec: RowNormSpec, access: Access) -> list[tuple[str, int]]:
    """Types and alignments of the tensors in a slot."""
    if spec.direction != "backward":
        other = spec.residual or spec.beside
        return [(spec.x, access.x)] + ([(other, access.residual)] if other else [])
    tensors = [(spec.row, access.x), (spec.y, access.y)]
    tensors += [(spec.row, access.residual)] if spec.dh else []
    return tensors + ([(spec.pre_x, access.pre_x)] if spec.pre_x else [])
