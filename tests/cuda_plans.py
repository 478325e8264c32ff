"""CUDA plans as tests see them: what makes one sound, and the other plans that run the same reduction tree.

Nothing here needs a GPU, so that the plans which tests force upon one are checked where there is none.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from kernel_fusion.backends.cuda import planner
from kernel_fusion.backends.cuda.device import Device
from kernel_fusion.backends.cuda.plan import Pace, Plan, Ring
from kernel_fusion.core.spec import ITEMSIZE, Access, RowNormSpec

_MAX_ELEMENTS = 64  # per thread: the most that an executor without spare registers is asked to hold


def anywhere(spec: RowNormSpec) -> Access:
    """How rows of a spec lie that begin at any element, with several strides."""
    own = planner.contiguous_access(spec)
    other = spec.residual or (None if spec.direction.startswith("backward") else spec.gate)
    return replace(
        own,
        x=ITEMSIZE[spec.row] if spec.direction.startswith("backward") else ITEMSIZE[spec.x],
        y=ITEMSIZE[spec.y],
        strided_x=True,
        strided_y=True,
        residual=ITEMSIZE[other] if other else 16,
        pre_x=ITEMSIZE[spec.gate or spec.x],
        strided_residual=True,
        strided_pre_x=True,
    )


def tree(plan: Plan) -> tuple[int, int, int, int]:
    """The key of a row's summation."""
    return plan.vec, plan.lanes, plan.warps, plan.center


def columns_per_thread(spec: RowNormSpec, plan: Plan) -> int:
    """Columns of a row that one thread works on, those past its end included."""
    return -(-spec.cols // (plan.warps * plan.lanes * plan.vec)) * plan.vec


def last_block_begins(spec: RowNormSpec, plan: Plan) -> int:
    """The first column of the last block of a cluster: `Place::start` of kernels/tree.cuh."""
    chunk = plan.lanes * plan.vec
    share, more = divmod(-(-spec.cols // chunk), plan.warps)
    warp = plan.warps - plan.warps // plan.cluster
    return (warp * share + min(warp, more)) * chunk


def assert_sound(spec: RowNormSpec, access: Access, plan: Plan, device: Device) -> None:
    """The plan is within the hardware's limits, and the kernel that it stands for covers the row once."""
    natural = min(16 // ITEMSIZE[spec.x], spec.cols & -spec.cols)
    # Backward asks only dy how long its vectors may be beside x; a streamed forward asks only y.
    asked = [(), (spec.y,)]
    if spec.direction != "backward":
        asked.append((spec.y, spec.weight, spec.bias, spec.residual, spec.gate, spec.residual_gate))
    assert plan.vec in [min([natural, *(16 // ITEMSIZE[dtype] for dtype in dtypes if dtype)]) for dtypes in asked]
    assert 32 <= plan.threads <= 1024
    assert plan.threads % 32 == 0
    assert plan.min_blocks * plan.threads <= 1536
    if spec.direction == "backward_weight":
        assert plan.per_block == plan.threads * plan.vec
        return
    assert plan.persistent == (spec.direction == "backward" or plan.ring.slots > 0)
    for power in (plan.lanes, plan.cluster):
        assert power & (power - 1) == 0
    most_blocks = 16 if device.arch == 90 else 8
    assert 1 <= plan.cluster <= (most_blocks if device.has_clusters else 1)
    assert plan.warps == 1 or plan.lanes == 32
    if plan.variant in ("early", "anew"):
        assert plan.kernel == "row_norm_fwd"
        assert plan.warps > 1
    physical, rest = divmod(plan.warps, plan.cluster)
    assert rest == 0
    if plan.ring.slots:
        _assert_streamed(spec, plan, device)
    elif plan.tiled:
        assert (plan.warps, device.has_clusters, spec.acc) == (1, True, "f32")
        assert (spec.residual, spec.gate, spec.grouped) == (None, None, False)
        rounds, rest = divmod(plan.per_block, plan.least_per_block)
        assert rest == 0
        assert rounds & (rounds - 1) == 0  # as the kernel counts them
    elif plan.warps > 1:
        assert (plan.per_block, physical <= 32) == (1, True)
    dynamic, static = _shared_bytes(spec, access, plan)
    assert dynamic <= plan.shared_bytes
    assert plan.shared_bytes + static <= device.shared_bytes


def _assert_streamed(spec: RowNormSpec, plan: Plan, device: Device) -> None:
    assert device.has_clusters
    assert spec.acc == "f32"
    assert plan.lanes == 32
    forward = spec.direction in ("inference", "forward")
    if forward:  # x comes from shared memory, and parameters are in registers: y alone may ask for shorter vectors
        natural = min(16 // ITEMSIZE[spec.x], spec.cols & -spec.cols)
        assert plan.vec == (natural if spec.has_stages else min(natural, 16 // ITEMSIZE[spec.y]))
    assert 2 <= plan.ring.slots <= 4
    assert plan.ring.helpers in ((0, 1, 2) if forward else (0,))
    assert plan.ring.helpers == 0 or (plan.per_block == 1 and plan.warps > 1)
    assert plan.sums in ("none", "registers")
    assert plan.variant != "few" or (spec.direction == "backward" and plan.ring.slots > 2)
    assert last_block_begins(spec, plan) < spec.cols, "a block without columns would copy what lies behind the row"


def _shared_bytes(spec: RowNormSpec, access: Access, plan: Plan) -> tuple[int, int]:
    """Dynamic and static shared memory that the kernel uses."""
    acc, per_thread = ITEMSIZE[spec.acc], columns_per_thread(spec, plan)
    if plan.tiled:
        tensors = [(spec.x, access.x)] + [(spec.y, access.y)] * (ITEMSIZE[spec.y] != ITEMSIZE[spec.x])
        elements = plan.per_block * spec.cols
        return sum(-(-(elements * ITEMSIZE[t] + 16 - min(align, 16)) // 16) * 16 for t, align in tensors), 8
    # The rows of a block add up their sums in a table: one after the other, or all at once if streamed.
    sums, several = plan.sums == "registers" and any(spec.column_sums) and plan.per_block > 1, 3 if spec.dgate else 2
    members = (plan.threads - 32 * plan.ring.helpers) // plan.per_block
    table_cols = per_thread * members if plan.ring.slots else spec.cols
    table = plan.per_block * table_cols * acc * (several if plan.ring.slots else 1) if sums else 0
    if plan.ring.slots:
        tensors = _streamed(spec, access)
        # Whatever its alignment, a row lies in this many units of 16 bytes.
        slot = sum(-(-(per_thread * members * ITEMSIZE[t] + 16 - min(align, 16)) // 16) * 16 for t, align in tensors)
        kept = (per_thread - plan.unkept * plan.vec) * members * ITEMSIZE[spec.weight] if spec.weight else 0
        parameters = kept if plan.keeps == "shared" else 0
        ring = plan.ring.slots * plan.per_block * slot
        barriers = (2 * plan.ring.slots + 8) * 8 + 4 * 2 * acc  # and what a combiner makes
        each = barriers + 4 * plan.warps * 2 * acc + 16  # at most, for what keeps blocks together
        if spec.direction == "backward":
            each += plan.ring.slots * 2 * acc  # statistics
        return max(ring, table) + parameters, plan.per_block * each
    assert plan.keeps in ("weight", "nothing")
    if plan.sums == "shared":
        assert plan.warps > 1  # the rows of a block are added up where the sums would be
        table = plan.threads * per_thread * several * acc
    return table, 2 * 2 * plan.warps * acc


def _streamed(spec: RowNormSpec, access: Access) -> list[tuple[str, int]]:
    """Types and alignments of the rows that come through shared memory."""
    if spec.direction == "forward" or spec.direction == "inference":
        tensors = [(spec.x, access.x), (spec.residual or spec.gate, access.residual)]
    else:
        dh = spec.residual if spec.dh else None
        normalised = spec.residual or spec.x
        tensors = [(normalised, access.x), (spec.y, access.y), (dh, access.residual), (spec.pre_x, access.pre_x)]
    return [(t, align) for t, align in tensors if t]


def executors(spec: RowNormSpec, plan: Plan, device: Device) -> list[Plan]:
    """Other plans that run the tree of `plan`: direct ones, and where that one is streamed, other streamed ones."""
    return [*_direct(spec, plan, device), *_streamed_executors(spec, plan)]


def _direct(spec: RowNormSpec, plan: Plan, device: Device) -> Iterator[Plan]:
    """Rows that are not streamed: by fewer or more rows to a block, or other clusters."""
    backward = spec.direction == "backward"
    resident = "row_norm_bwd" if backward else "row_norm_fwd"
    plain = replace(
        plan,
        kernel=resident if plan.resident else plan.kernel,
        variant="" if plan.resident else plan.variant,
        cluster=1,
        per_block=1,
        min_blocks=1,
        shared_bytes=0,
        keeps="nothing",
        unkept=0,
        sums="registers" if backward else "none",
        ring=Ring(),
        shifted=False,
    )
    if plan.warps == 1:
        for threads in (32, 64, 256):
            per_block = threads // plan.lanes
            table = per_block * spec.cols * ITEMSIZE[spec.acc] if backward and per_block > 1 else 0
            yield replace(plain, per_block=per_block, shared_bytes=table)
        return
    for cluster in (1, 2, 4, 8) if device.has_clusters else (1,):
        physical, rest = divmod(plan.warps, cluster)
        if rest == 0 and physical <= 16:
            other = replace(plain, cluster=cluster)
            if not other.resident or columns_per_thread(spec, other) <= _MAX_ELEMENTS:
                yield other


def _streamed_executors(spec: RowNormSpec, plan: Plan) -> Iterator[Plan]:
    """Fewer slots, helpers or rows at a time, blocks together or apart, larger clusters: all fit where `plan` does."""
    if plan.ring.slots:
        yield replace(plan, ring=replace(plan.ring, pace=None))
        pace = Pace(plan.ring.pace.tolerance if plan.ring.pace else 8, least=1)
        yield replace(plan, ring=replace(plan.ring, pace=pace))
        if plan.variant == "few":
            yield replace(plan, variant="")
    for helpers in range(plan.ring.helpers):
        yield replace(plan, ring=replace(plan.ring, helpers=helpers))
    for slots in range(2, plan.ring.slots):
        yield replace(plan, ring=replace(plan.ring, slots=slots), variant=plan.variant if slots > 2 else "")
    if plan.ring.slots and plan.per_block > 1:
        yield replace(plan, per_block=1)
    if plan.ring.slots and plan.per_block == 1 and plan.cluster <= 4 and plan.warps % (2 * plan.cluster) == 0:
        larger = replace(plan, cluster=2 * plan.cluster)
        if last_block_begins(spec, larger) < spec.cols:
            yield larger
