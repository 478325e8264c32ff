"""The plan of a row norm's kernel, and functions that make plans.

A plan reads rows directly from global memory, or streams them through shared memory.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Any

from kernel_fusion.backends.cuda.tree import Tree, ceil_div
from kernel_fusion.backends.cuda.tuned import Facts
from kernel_fusion.core.fields import Names
from kernel_fusion.core.spec import ITEMSIZE, Access, RowNormSpec

# The parameters that backward keeps for all rows that a block takes, in registers or shared memory.
KeptParameters = Annotated[str, Names("KeptParameters", ("nothing", "weight", "both", "shared"))]
# The place of column sums. "apart" means that they, or codes, have a pass of their own; "stored" means that each row's
# terms are gradients, so nothing is summed.
KeptSums = Annotated[str, Names("KeptSums", ("none", "registers", "shared", "apart", "stored"))]

SMALL_ROW_THREADS = 128  # the threads of a block that takes several rows


@dataclass(frozen=True)
class Pace:
    """How the blocks of a streamed plan keep together (kernels/pace.cuh).

    Attributes:
        tolerance: how far a block may be ahead of the others, in quarters of a row per group.
        least: the number of rows per group from which on blocks wait for each other.
    """

    tolerance: int = 8
    least: int = 15


@dataclass(frozen=True)
class Ring:
    """How rows pass through shared memory.

    Attributes:
        slots: the number of rows in shared memory per group of threads; 0 if rows do not pass through it.
        helpers: the number of warps that have no columns: a combiner, or a combiner and a producer
            (kernels/row_stream.cuh).
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
    lanes: int  # the lanes that share a row
    warps: int  # the warps that share a row (kernels/tree.cuh)
    center: int = 0  # how many first vectors give LayerNorm's center (kernels/moments.cuh)
    cluster: int = 1
    per_block: int = 1  # the rows of a block, or the columns in a pass for weights
    min_blocks: int = 1  # the blocks per multiprocessor for which registers must suffice
    shared_bytes: int = 0  # the dynamic shared memory of a block
    # Forward loads weight and bias "ahead", together with x; "early", before warps exchange sums; or later ("anew": and
    # computes the columns again). Backward loads the "next" row early, reads rows "again", or has a loop for "few"
    # streamed rows.
    variant: str = ""
    batches: tuple[int, ...] = (1,)  # the vectors taken at a time: of parameters, or in each reading of a row
    keeps: KeptParameters = "nothing"
    unkept: int = 0  # the number of last vectors whose weight is not kept in shared memory
    sums: KeptSums = "none"
    ring: Ring = Ring()
    shifted: bool = False  # whether stores are shifted to whole sectors (kernels/rows.cuh)
    shares: int = 1  # the number of the tree's warps that one warp executes
    rows_ahead: int = 0  # in calls of few rows, a block brings the row this far ahead into L2

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
        """The threads of a block."""
        if self.tiled or self.kernel == "row_norm_bwd_weight":
            return SMALL_ROW_THREADS
        return self.per_block * self.lanes * self.warps // (self.cluster * self.shares) + 32 * self.ring.helpers

    @property
    def least_per_block(self) -> int:
        """The fewest rows of a block, for calls of few rows, which then still fill the device."""
        return self.threads // self.lanes if self.tiled else self.per_block

    @property
    def persistent(self) -> bool:
        """Whether no more blocks start than run at once."""
        return self.ring.slots > 0 or self.kernel == "row_norm_bwd"

    @property
    def splits(self) -> bool:
        """Whether dweight and dbias, or codes, are made in a pass of their own."""
        return self.sums == "apart"

    def order(self, spec: RowNormSpec) -> tuple[object, ...]:
        """What decides the order of sums within a row, as a key. Sums over rows also depend on how many blocks run."""
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
    """A plan that holds rows in registers: several in a block of `shared_by` threads, or one in a block or cluster."""
    per_block = shared_by // tree.lanes if tree.warps == 1 else 1
    return Plan(kernel, tree.vec, tree.lanes, tree.warps, cluster=tree.cluster, per_block=per_block, **options)


def pace_of(facts: Facts, keeps: bool) -> Pace | None:
    """The pace that the tables give; without a row there, the usual one if `keeps` is true, else None."""
    return Pace(*facts.tuned("pace", (8, 15))) if facts.tuned("keeps_pace", keeps) else None


def streamed_plan(facts: Facts, most: Ring, groups: int = 1, shared_bytes: int = 0, **options: Any) -> Plan | None:
    """A plan that streams rows through shared memory, or None if it has no room.

    `most` has the largest number of slots; `shared_bytes` are needed for other things.
    """
    spec, tree = facts.spec, facts.tree
    columns = 32 * tree.block_warps * tree.elements
    tensors = _streamed(spec, facts.access)
    slot_bytes = sum(ceil_div(columns * ITEMSIZE[t], 16) * 16 + (16 if align < 16 else 0) for t, align in tensors)
    sums_bytes = groups * (32 * tree.warps + 256)  # the most for `Shared` of row_stream.cuh and pace.cuh
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
    """The types and alignments of the tensors whose rows a slot holds."""
    if spec.direction != "backward":
        other = spec.residual or spec.beside
        return [(spec.x, access.x)] + ([(other, access.residual)] if other else [])
    tensors = [(spec.row, access.x), (spec.y, access.y)]
    tensors += [(spec.row, access.residual)] if spec.dh else []
    return tensors + ([(spec.pre_x, access.pre_x)] if spec.pre_x else [])
