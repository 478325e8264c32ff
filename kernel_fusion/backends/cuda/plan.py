"""A plan of a row norm, and how plans are made whose rows are read directly or stream through shared memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from kernel_fusion.backends.cuda.tree import Tree, ceil_div
from kernel_fusion.backends.cuda.tuned import Facts
from kernel_fusion.core.fields import Names
from kernel_fusion.core.spec import ITEMSIZE, Access, RowNormSpec

# What backward keeps for all rows: nothing, the weight or both parameters in registers, or the weight in shared memory.
KeptParameters = Annotated[str, Names("KeptParameters", ("nothing", "weight", "both", "shared"))]
# Where it keeps dweight and dbias: in registers, in shared memory, or "apart", in a pass of their own.
KeptSums = Annotated[str, Names("KeptSums", ("none", "registers", "shared", "apart"))]

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
class Plan:
    """How a row-norm kernel runs; the launcher's numbers (`Launch`) that are not fields are properties.

    `kernel`, `vec`, `lanes`, `warps` and `center` decide how a row is summed, and follow from spec and device alone.
    """

    kernel: str  # the template, and the header of native/kernels that holds it
    vec: int  # elements per vector
    lanes: int  # of a warp that share a row
    warps: int  # per row (kernels/tree.cuh)
    center: int = (
        0  # how many of a lane's first vectors give the center of LayerNorm's statistics (kernels/moments.cuh)
    )
    cluster: int = 1  # blocks that work together
    per_block: int = 1  # rows at a time, or columns of a pass over the weight alone
    min_blocks: int = 1  # per multiprocessor that registers must allow
    shared_bytes: int = 0  # dynamic
    # Forward: weight and bias are loaded "ahead", beside x, "early", before warps exchange their sums, or afterwards;
    # "anew" is the last, by a thread that finds its columns again. Backward: the "next" row is loaded early, rows are
    # read "again", or streamed rows have a loop of their own for "few" rows.
    variant: str = ""
    batches: tuple[int, ...] = (1,)  # vectors loaded at a time: of parameters; of a row that is read twice, each time
    keeps: KeptParameters = (
        "nothing"  # for all rows, backward: "weight" or "both" parameters in registers, "shared": the weight
    )
    unkept: int = 0  # of a thread's vectors, its last ones, whose weight is not kept in shared memory
    sums: KeptSums = "none"
    slots: int = 0  # of a group of threads in shared memory, for rows that stream
    helpers: int = 0  # warps of a block without columns (kernels/row_stream.cuh): the combiner, then the producer
    pace: Pace | None = None  # None: blocks go apart
    shifted: bool = False  # single elements are stored by whole sectors (kernels/shifted_store.cuh)

    @property
    def tiled(self) -> bool:
        """Whether all rows of a block pass through shared memory together."""
        return self.kernel == "row_norm_fwd_tile"

    @property
    def resident(self) -> bool:
        """Whether a row stays in registers, or else is read again."""
        return self.kernel != "row_norm_fwd_long" and self.variant != "again"

    @property
    def threads(self) -> int:
        """Threads per block."""
        if self.tiled or self.kernel == "row_norm_bwd_weight":
            return SMALL_ROW_THREADS
        return self.per_block * self.lanes * self.warps // self.cluster + 32 * self.helpers

    @property
    def least_per_block(self) -> int:
        """Rows per block at least, so that few rows fill the device."""
        return self.threads // self.lanes if self.tiled else self.per_block

    @property
    def persistent(self) -> bool:
        """No more blocks than run at once, each of which takes its turn until nothing is left."""
        return self.slots > 0 or self.kernel == "row_norm_bwd"

    @property
    def splits_weight(self) -> bool:
        """Whether dweight and dbias take a pass of their own."""
        return self.sums == "apart"

    def order(self, spec: RowNormSpec) -> tuple[object, ...]:
        """What decides in which order sums are made: of a row, and in backward over the rows.

        The latter also depends on how many blocks run at once, which only the device tells.
        """
        row = self.vec, self.lanes, self.warps, self.center, self.resident
        if spec.direction != "backward" or not any(spec.grads[1:]):
            return row
        return *row, self.kernel, self.per_block, self.cluster, self.sums

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
        sums = f", sums in {self.sums}" if self.sums in ("registers", "shared") else ""
        split = ", weight gradients in a pass of their own" if self.splits_weight else ""
        helpers = ("", ", a warp combines sums", ", a warp combines sums, another copies rows")[self.helpers]
        stores = ", y stored by whole sectors" if self.shifted else ""
        return f"{shape}{helpers}, {self.vec}-element vectors, {row}{stores}{sums}{split}"


def direct_plan(kernel: str, tree: Tree, shared_by: int = SMALL_ROW_THREADS, **options: Any) -> Plan:
    """A plan that reads rows into registers: `shared_by` threads for several rows, or a block or cluster for one."""
    per_block = shared_by // tree.lanes if tree.warps == 1 else 1
    return Plan(kernel, tree.vec, tree.lanes, tree.warps, cluster=tree.cluster, per_block=per_block, **options)


def pace_of(facts: Facts, keeps: bool) -> Pace | None:
    """How blocks keep together, if they do, by the tables or else as `keeps` says; groups of columns go apart."""
    if facts.spec.grouped or not facts.tuned("keeps_pace", keeps):
        return None
    return Pace(*facts.tuned("pace", (8, 15)))


def streamed_plan(facts: Facts, max_slots: int, groups: int = 1, shared_bytes: int = 0, **options: Any) -> Plan | None:
    """A plan that streams rows through shared memory, of which it takes `shared_bytes` besides; None without room."""
    spec, tree = facts.spec, facts.tree
    columns = 32 * tree.block_warps * tree.elements
    tensors = _streamed(spec, facts.access)
    slot_bytes = sum(ceil_div(columns * ITEMSIZE[t], 16) * 16 + (16 if align < 16 else 0) for t, align in tensors)
    sums_bytes = groups * (32 * tree.warps + 256)  # at most: statistics, `Shared` of row_stream.cuh and pace.cuh
    slots = min(max_slots, (facts.device.shared_bytes - sums_bytes - shared_bytes) // (groups * slot_bytes))
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
        slots=slots,
        **options,
    )


def _streamed(spec: RowNormSpec, access: Access) -> list[tuple[str, int]]:
    """Types and alignments of the tensors whose rows a slot holds."""
    if spec.direction != "backward":
        other = spec.residual or spec.beside
        return [(spec.x, access.x)] + ([(other, access.residual)] if other else [])
    tensors = [(spec.row, access.x), (spec.y, access.y)]
    tensors += [(spec.row, access.residual)] if spec.dh else []
    return tensors + ([(spec.pre_x, access.pre_x)] if spec.pre_x else [])
