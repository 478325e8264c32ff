"""Plans: how a spec runs on a device. One readable rule per direction, each with its reason.

Two things decide speed here. A thread should hold few enough elements to stay in registers, yet enough to keep
several 16-byte loads in flight; and a row should be spread over no more warps than that needs. All sizes below follow.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from kernel_fusion.backends.cuda.device import Device
from kernel_fusion.backends.cuda.launch import Launch
from kernel_fusion.backends.cuda.tree import (
    MAX_BLOCK_WARPS,
    MAX_CLUSTER,
    Tree,
    ceil_div,
    power_of_two,
    spread_row,
    vector_of,
)
from kernel_fusion.core.activations import IDENTITY
from kernel_fusion.core.spec import ITEMSIZE, Access, RowNormSpec

# Forward: 64 bytes of x per thread are 4 loads in flight each and 16 registers for the row.
_FORWARD_BYTES = 64
# Backward, where each element has two accumulators: 16 elements of 16 bits take 32 of the 128 registers that a thread
# of 512 has. Longer rows of wide elements take twice as many bytes before they take a cluster.
_BACKWARD_BYTES = 32
# Elements per thread of rows of narrow vectors (`_narrow_tree`): short ones, and single elements of 16 bits, more of
# which spill.
_NARROW_ELEMENTS, _MAX_SINGLES = 6, 25
_SHORT_ROW_BYTES = 512  # up to which a thread takes one vector in backward, and there are twice as many threads
_MAX_CLUSTER_SM90 = 16  # backward of fp32 rows: 131072 columns take 1.08 of the floor on an H200, 1.41 in clusters of 8
_SMALL_ROW_THREADS = 128
# Forward by two readings of a row (`_twice`). The second comes from the L1 cache: a multiprocessor's holds two rows of
# this many bytes, or one of twice as many, beside their weight.
_TWICE_BYTES = 2**16
_MIN_STAGED_COLS = 256  # shorter rows make copies too small to be worth their issue
# Rows of which a block takes many together (`_tiled`), about as many bytes of them: this many elements of a row per
# lane, whose weight and bias then stay in its registers beside them, or up to twice as many without these. Vectors of 4
# bytes in longer rows reach the floor by themselves: 125490x255 fp32 1.01 on an H200, tiled 1.05.
_TILE_BYTES = 17 * 2**10
_TILED_ELEMENTS = 16
_MAX_TILED_WORDS = 192
# With stages, whose arithmetic takes registers too: bytes that a thread of 128 registers can hold of a row in the
# direct backward, beside the sums or without any; and elements in the staged one. More spill.
_MAX_HELD_WITH_SUMS, _MAX_HELD, _MAX_STAGED_ELEMENTS = 224, 160, 24
# Activations whose slopes leave no registers for the bias beside the weight.
_COSTLY = ("gelu", "mish")
_STATIC_SHARED_BYTES = 8192  # at most: what a kernel declares besides its sums


@dataclass(frozen=True)
class Plan(Launch):
    """How a row-norm kernel runs. The first group decides the order of summation: a function of spec and device.

    Attributes:
        vec: elements per vector; lanes: lanes per virtual warp; warps: virtual warps per row (see kernels/tree.cuh).
        played: virtual warps per physical warp; the cluster is that of a row.
        resident: the row stays in registers, else it is read again.
        batches: how many vectors a thread loads at a time of a row that forward reads again: for the statistics, whose
            center the first ones give, and for y.
        ahead: forward loads weight and bias beside x, before the statistics.
        weight: where backward keeps the weight of a thread's columns for all rows: "wide" (registers, in the compute
            type), "shared" memory, or nowhere: "memory".
        bias: the same of the bias, where backward needs it.
        storage: where backward keeps dweight and dbias: "none", "registers" or "shared".
        prefetch: backward loads the next row early.
        stages: rows are streamed through shared memory, with this many slots per group of threads; 0: read directly.
        tiled: all rows of a block pass through shared memory together.
    """

    vec: int
    lanes: int
    warps: int
    played: int = 1
    resident: bool = True
    ahead: bool = False
    weight: str = "memory"
    bias: str = "memory"
    storage: str = "none"
    prefetch: bool = False
    stages: int = 0
    tiled: bool = False
    batches: tuple[int, int] = (0, 0)

    def __str__(self) -> str:
        if self.stages:
            rows = f"{self.per_block} rows at a time" if self.per_block > 1 else "a row at a time"
            where = f"clusters of {self.cluster} blocks" if self.cluster > 1 else "blocks"
            shape = f"persistent {where} of {self.threads} threads, {rows}, {self.stages} rows each on their way"
        elif self.per_block > 1:
            shape = f"{self.per_block} rows per block of {self.threads} threads, {self.lanes} lanes per row"
        elif self.cluster > 1:
            shape = f"a cluster of {self.cluster} blocks of {self.threads} threads per row"
        else:
            shape = f"a block of {self.threads} threads per row"
        row = "row in registers" if self.resident else "row read again"
        row = "rows through shared memory" if self.stages or self.tiled else row
        sums = f", sums in {self.storage}" if self.storage != "none" else ""
        split = ", weight gradients in a pass of their own" if self.splits_weight else ""
        return f"{shape}, {self.vec}-element vectors, {row}{sums}{split}"


def plan_row_norm(spec: RowNormSpec, access: Access, device: Device) -> Plan:
    """The plan of a row-norm kernel."""
    if spec.direction == "backward_weight":
        vec, threads = vector_of(spec), 128
        return Plan(vec, lanes=32, warps=1, threads=threads, per_block=threads * vec)
    return (_plan_backward if spec.direction == "backward" else _plan_forward)(spec, access, device)


def _plan_forward(spec: RowNormSpec, access: Access, device: Device) -> Plan:
    tiled = _tiled(spec, device)
    if tiled is not None:
        return tiled
    itemsize = ITEMSIZE[spec.x]
    bytes_per_thread = _FORWARD_BYTES
    if spec.cols * itemsize > MAX_BLOCK_WARPS * 32 * bytes_per_thread:  # more than a block has
        bytes_per_thread *= 2 if itemsize == 4 else 1
    # 2048x1600 on an H200, bf16: 1.28 of the floor as 2 warps with up to 4 vectors, 1.06 as 1 warp with 7.
    tree = spread_row(spec, device, bytes_per_thread, most_bytes=bytes_per_thread * 7 // 4)
    twice = _twice(spec, device, tree)
    if twice is not None:
        # Rows that begin anywhere take more registers than the bound leaves them.
        threads = _direct(twice).threads
        min_blocks = max(1, 1024 // threads) if access.x >= twice.vec * itemsize else 1
        return _direct(twice, resident=False, batches=_batches(twice), min_blocks=min_blocks)
    per_thread = tree.vectors * tree.vec
    most = 24 if spec.changes_x and spec.residual else 32  # in 128 registers
    if tree.cluster > 1 and per_thread <= most and spec.acc == "f32":
        staged = _staged(spec, access, device, tree, groups=1, max_stages=4)
        if staged is not None:
            return staged
    # Weight and bias of few elements are loaded beside x, before the statistics: 2048x2048 fp32 on an H200 0.79 of the
    # floor, afterwards 0.85. More of them cost more threads than that is worth, as do more than 64 registers: 2048x5120
    # fp32 1.15, afterwards 1.04. So are 32 beside a residual that is wider than x: 8192x8192 bf16 and fp32 1.03,
    # afterwards 1.08.
    wide_residual = spec.residual is not None and ITEMSIZE[spec.residual] > itemsize and not spec.changes_x
    ahead = per_thread <= (32 if wide_residual and device.arch == 90 else 16)
    # Vectors put together from pieces and rows that end among a thread's vectors take a few registers more.
    plain = access.x >= tree.vec * itemsize or spec.cols == tree.warps * tree.lanes * tree.vectors * tree.vec
    bound = ahead and plain and tree.vec > 1 and spec.acc == "f32" and device.arch == 90 and not spec.has_stages
    min_blocks = max(1, 1024 // _direct(tree).threads) if bound else 1
    # Stages may hold the row in a wider type than x. Single elements take a register each: 40 of them spill on sm_120.
    held = max(itemsize, 4) if tree.vec == 1 else itemsize
    resident = per_thread * held <= 2 * _FORWARD_BYTES and per_thread * ITEMSIZE[spec.row] <= 3 * _FORWARD_BYTES
    batches = (0, 0) if resident else _batches(tree)
    return _direct(tree, resident=resident, batches=batches, ahead=ahead, min_blocks=min_blocks)


def _tiled(spec: RowNormSpec, device: Device) -> Plan | None:
    """A plan for short rows of narrow vectors, of which a block takes many together; None where that does not apply.

    Measured on an H200, bf16, time over the floor, row by row and so: 250980x255 1.36 and 1.04, 62561x1023 1.18 and
    1.13.
    """
    itemsize, vec = ITEMSIZE[spec.x], vector_of(spec)
    longest = _MAX_TILED_WORDS if vec * itemsize == 4 else 64 * _TILED_ELEMENTS
    if vec * itemsize > 4 or spec.cols > longest * vec or spec.residual:
        return None
    if spec.acc != "f32" or not device.has_clusters:
        return None
    vectors, each = spec.cols // vec, _TILED_ELEMENTS // vec
    lanes = min(32, power_of_two(ceil_div(vectors, each)))
    threads = _SMALL_ROW_THREADS
    at_a_time = threads // lanes
    most = _TILE_BYTES // (at_a_time * spec.cols * itemsize)
    rows = at_a_time * (power_of_two(most + 1) // 2)
    tensors = {spec.x} if ITEMSIZE[spec.y] == itemsize else {spec.x, spec.y}
    return Plan(
        vec,
        lanes,
        warps=1,
        per_block=rows,
        least_per_block=at_a_time,
        threads=threads,
        tiled=True,
        ahead=vectors <= lanes * each,
        shared_bytes=sum(ceil_div(rows * spec.cols * ITEMSIZE[t], 16) * 16 + 16 for t in tensors),
        min_blocks=(1024 if device.arch == 90 else 768) // threads,
    )


def _twice(spec: RowNormSpec, device: Device, tree: Tree) -> Tree | None:
    """The tree of a row that a single block reads twice, where that beats `tree`; else None.

    On an H200, over the floor. RMSNorm of rows up to 128 KB: 4096x32768 bf16 1.05, as a staged cluster 1.11; fp32 1.04
    and 1.09. A bias takes room in the L1 cache too, so LayerNorm pays up to 64 KB: 4096x32768 bf16 1.08 and 1.17, but
    4096x24576 fp32 1.13 and 1.09. Single elements do not pay: 6400x10007 bf16 1.54, in registers 1.33; 1273x50257 1.76,
    as a staged cluster 1.46.
    """
    itemsize = ITEMSIZE[spec.x]
    row_bytes = spec.cols * itemsize
    if device.arch != 90 or itemsize == 8 or spec.has_stages:
        return None
    if tree.vec * itemsize < 16 or tree.cluster == 1 or row_bytes > _TWICE_BYTES * (2 if spec.rms else 1):
        return None
    slots = ceil_div(spec.cols, 32 * tree.vec)
    warps = MAX_BLOCK_WARPS if row_bytes <= _TWICE_BYTES else 2 * MAX_BLOCK_WARPS
    each = ceil_div(slots, warps)
    return Tree(tree.vec, 32, ceil_div(slots, each), 1, each)


def _batches(tree: Tree) -> tuple[int, int]:
    """How many vectors a thread loads at a time in the first and in the second reading of a row.

    In the first one at least a ninth of the row, or 16 vectors: their mean is to be a fair center. If the columns that
    give it lie far off the rest, a tenth of 122880 fp32 columns costs 1.4 of the budget, an eighth of 131072 0.7.
    """
    first, second = (16, 8) if tree.vec == 1 else (6, 4)
    fair = min(16, ceil_div(tree.vectors, 9))
    return max(_even(tree.vectors, first), fair), _even(tree.vectors, second)


def _even(vectors: int, most: int) -> int:
    """At most so many that divide `vectors`, or `most` where fewer than half of that would."""
    even = max(n for n in range(1, most + 1) if vectors % n == 0)
    return even if 2 * even >= min(most, vectors) else most


def _direct(tree: Tree, small_row_threads: int = _SMALL_ROW_THREADS, **options: Any) -> Plan:
    """A plan that reads rows straight into registers: several rows per block, or a block or cluster per row."""
    if tree.warps == 1:
        per_block, threads = small_row_threads // tree.lanes, small_row_threads
    else:
        per_block, threads = 1, tree.warps // tree.cluster * 32
    return Plan(tree.vec, tree.lanes, tree.warps, cluster=tree.cluster, per_block=per_block, threads=threads, **options)


def _staged(
    spec: RowNormSpec,
    access: Access,
    device: Device,
    tree: Tree,
    groups: int,
    max_stages: int,
    shared_bytes: int = 0,
    weight: str = "memory",
    bias: str = "memory",
) -> Plan | None:
    """A plan that streams rows through shared memory, of which it takes `shared_bytes` besides; None without room."""
    threads = tree.warps // tree.cluster * 32
    columns = tree.vectors * threads * tree.vec
    tensors = _streamed(spec, access)
    slot_bytes = sum(ceil_div(columns * ITEMSIZE[t], 16) * 16 + (16 if align < 16 else 0) for t, align in tensors)
    sums_bytes = groups * (32 * tree.warps + 256)  # at most: `Shared` of kernels/row_stream.cuh
    stages = min(max_stages, (device.shared_bytes - sums_bytes - shared_bytes) // (groups * slot_bytes))
    if stages < 2:
        return None
    return Plan(
        tree.vec,
        tree.lanes,
        tree.warps,
        cluster=tree.cluster,
        per_block=groups,
        persistent=True,
        threads=groups * threads,
        storage="registers" if spec.direction == "backward" else "none",
        shared_bytes=stages * groups * slot_bytes + shared_bytes,
        weight=weight,
        bias=bias,
        stages=stages,
    )


def _streamed(spec: RowNormSpec, access: Access) -> list[tuple[str, int]]:
    """Types and alignments of the tensors whose rows a slot holds."""
    if spec.direction != "backward":
        return [(spec.x, access.x)] + ([(spec.residual, access.residual)] if spec.residual else [])
    tensors = [(spec.row, access.x), (spec.y, access.y)]
    tensors += [(spec.row, access.residual)] if spec.dh else []
    return tensors + ([(spec.pre_x, access.pre_x)] if spec.pre_x else [])


def _plan_backward(spec: RowNormSpec, access: Access, device: Device) -> Plan:
    row_bytes = spec.cols * ITEMSIZE[spec.x]
    bytes_per_thread = _BACKWARD_BYTES if row_bytes > _SHORT_ROW_BYTES else _BACKWARD_BYTES // 2
    if ITEMSIZE[spec.x] > 2 and row_bytes > MAX_BLOCK_WARPS * 32 * bytes_per_thread:
        bytes_per_thread *= 2
    tree = _narrow_tree(spec, device) or spread_row(
        spec,
        device,
        bytes_per_thread,
        bytes_per_thread + 16,
        # Groups of rows then fill the block, where rows are staged.
        prefer=lambda warps: device.arch == 90 and MAX_BLOCK_WARPS % warps == 0,
        max_cluster=_MAX_CLUSTER_SM90 if device.arch == 90 and (spec.x == "f32" or spec.has_stages) else MAX_CLUSTER,
    )
    staged = _plan_staged_backward(spec, tree, access, device)
    if staged is not None:
        return staged
    wants_sums = spec.grads[1] or spec.grads[2]
    per_thread = tree.vectors * tree.vec
    thread_bytes = per_thread * ITEMSIZE[spec.x]
    # 512 threads per multiprocessor: 128 registers each, enough for a row, the next row and both sums. One vector each
    # leaves room for twice as many, which do without the next row: 131072x256 bf16 on an H200 1.28 and 1.16.
    # Stages get 168 registers, where a block leaves them.
    # Many single elements need the next row more: 250980x255 bf16 1.32, and 1.40 with twice the threads.
    singles = tree.vec * ITEMSIZE[spec.x] == 2
    short = tree.warps == 1 and thread_bytes <= 16 and spec.acc == "f32" and not spec.has_stages
    short = short and not (singles and per_thread > 5)
    threads = 1024 if short else 384 if spec.has_stages else 512
    plan = partial(_direct, tree, persistent=True, min_blocks=max(1, threads // _direct(tree).threads))
    held = _held_bytes(spec, tree)
    fits = held + (2 * per_thread * ITEMSIZE[spec.acc] if wants_sums else 0) <= _MAX_HELD_WITH_SUMS
    # Rows that share a block keep their sums in registers, of which they have 168: shared memory is where the block
    # adds them up.
    if thread_bytes <= bytes_per_thread + 16 and (fits or not spec.has_stages or tree.warps == 1):
        rows = _direct(tree).per_block
        table = rows * spec.cols * ITEMSIZE[spec.acc] if wants_sums and rows > 1 else 0
        storage = "registers" if wants_sums else "none"
        # A longer next row has registers on sm_90 alone, on sm_120 the compiler spills; and so it does where many
        # elements of 16 bits take a register each.
        longest = 16 if singles else bytes_per_thread if device.arch == 90 else _BACKWARD_BYTES
        prefetch = not short and thread_bytes <= longest and not spec.has_stages
        weight = "wide" if per_thread <= 8 and spec.acc == "f32" else "memory"
        return plan(storage=storage, prefetch=prefetch, shared_bytes=table, weight=weight)
    # Twice the elements still fit in registers without their sums, which move to shared memory where there is room.
    most = 8 if spec.x == "f64" else 16 if tree.vec == 1 else device.max_elements
    resident = thread_bytes <= 2 * bytes_per_thread and per_thread <= most and tree.cluster <= MAX_CLUSTER
    resident = resident and (held <= _MAX_HELD or not spec.has_stages)
    shared = _direct(tree).threads * per_thread * 2 * ITEMSIZE[spec.acc]
    if not wants_sums:
        return plan(resident=resident)
    if resident and shared <= device.shared_bytes - _STATIC_SHARED_BYTES:
        return plan(storage="shared", shared_bytes=shared)
    return plan(resident=resident, splits_weight=True)


def _narrow_tree(spec: RowNormSpec, device: Device) -> Tree | None:
    """The tree of a row of narrow vectors in backward; None of others, and where that has not paid.

    On an H200, over the floor. Short rows, in vectors of up to 4 bytes, take few lanes of up to six elements each:
    3764705x17 bf16 1.61, by lanes of two 3.30. Single elements of 16 bits leave registers that a vector would take:
    1273x50257 1.28 in clusters of 4 blocks, 1.62 in clusters of 8 with half as many elements per thread. The warps of
    such a row, a power of two, fill a block.
    """
    itemsize, vec = ITEMSIZE[spec.x], vector_of(spec)
    vectors = spec.cols // vec
    if vec * itemsize <= 4 and spec.cols <= 32 * _NARROW_ELEMENTS:
        lanes = power_of_two(ceil_div(vectors, _NARROW_ELEMENTS // vec))
        return Tree(vec, lanes, 1, 1, ceil_div(vectors, lanes))
    if vec * itemsize > 2 or spec.cols * itemsize <= _SHORT_ROW_BYTES or device.arch != 90 or spec.has_stages:
        return None
    slots = ceil_div(spec.cols, 32)
    warps = power_of_two(ceil_div(slots, _MAX_SINGLES))
    cluster = ceil_div(warps, MAX_BLOCK_WARPS)
    return Tree(1, 32, warps, cluster, ceil_div(slots, warps)) if cluster <= _MAX_CLUSTER_SM90 else None


def _held_bytes(spec: RowNormSpec, tree: Tree) -> int:
    """What a thread of the direct backward holds of a resident row."""
    itemsizes = ITEMSIZE[spec.row] * (2 if spec.dh else 1) + ITEMSIZE[spec.y]
    return tree.vectors * tree.vec * itemsizes


def _plan_staged_backward(spec: RowNormSpec, tree: Tree, access: Access, device: Device) -> Plan | None:
    """A plan that copies whole rows into shared memory in bulk, or None where that is impossible: it takes sm_90.

    Measured on an H200, bf16, time over the floor, directly and so: 32768x4096 1.42 and 1.18, 16384x8192 1.57 and 1.06,
    4096x32768 2.13 and 1.35.
    """
    if not (device.has_clusters and spec.acc == "f32" and spec.cols >= _MIN_STAGED_COLS):
        return None
    short = spec.cols * ITEMSIZE[spec.x] <= _SHORT_ROW_BYTES
    if tree.lanes < 32 or short or tree.vectors * tree.vec > _max_staged_elements(spec, device):
        return None
    # Vectors put together from pieces take more registers, and so do stages: on sm_90 all but an activation after the
    # norm of whole vectors. 8192x8192 bf16 with relu takes 1.28 of the floor with weight and bias in registers, 1.47
    # without; and 1.22 where there is no relu.
    activated = device.arch == 90 and tree.vec > 1 and spec.residual is None and not spec.changes_x
    roomy = min(access.x, access.y) >= tree.vec * ITEMSIZE[spec.x]
    roomy = roomy and (not spec.has_stages or activated)
    plan = _staged_groups(spec, tree, access, device, _groups(tree, roomy and not spec.has_stages, device), roomy)
    if plan is None and spec.has_stages:
        # They may need larger slots: fewer rows at a time, then a share of the row for each of more blocks.
        plan = _staged_groups(spec, tree, access, device, 1, roomy)
        while plan is None and (larger := _larger_cluster(spec, tree)):
            tree = larger
            plan = _staged_groups(spec, tree, access, device, 1, roomy)
    return plan


def _max_staged_elements(spec: RowNormSpec, device: Device) -> int:
    if spec.activation == "mish":  # whose slope takes the registers of the others
        return 16
    return _MAX_STAGED_ELEMENTS if spec.has_stages else device.max_elements


def _larger_cluster(spec: RowNormSpec, tree: Tree) -> Tree | None:
    """The same tree executed by twice as many blocks, none without columns; None where there is none."""
    cluster = 2 * tree.cluster
    if cluster > MAX_CLUSTER or tree.lanes < 32 or tree.warps % cluster:
        return None
    columns = tree.warps // cluster * 32 * tree.vec * tree.vectors
    return replace(tree, cluster=cluster) if (cluster - 1) * columns < spec.cols else None


def _staged_groups(
    spec: RowNormSpec, tree: Tree, access: Access, device: Device, groups: int, roomy: bool
) -> Plan | None:
    threads, elements = tree.warps // tree.cluster * 32, tree.vectors * tree.vec
    staged = partial(_staged, spec, access, device, tree, groups)
    if spec.weight is None:
        return staged(max_stages=4)
    if elements <= 8 or (roomy and _keeps_weight(spec, tree, groups * threads, device)):
        keeps_bias = roomy and spec.bias is not None and spec.activation not in (IDENTITY, *_COSTLY)
        return staged(max_stages=4, weight="wide", bias="wide" if keeps_bias else "memory")
    if tree.vec == 1 and tree.cluster == 1:
        return staged(max_stages=4)  # a short weight, which L1 holds beside the rows
    shared = staged(max_stages=4, weight="shared", shared_bytes=elements * threads * ITEMSIZE[spec.weight])
    if (shared is not None and shared.stages > 2) or spec.weight == "f32":
        return shared  # fp32 read from memory for every row takes registers that are not there
    return staged(max_stages=4)


def _keeps_weight(spec: RowNormSpec, tree: Tree, threads: int, device: Device) -> bool:
    """Whether a thread of a staged backward has registers for the weight of its columns, beside their sums.

    Read for every row it costs most where each element is a load: 62561x1023 bf16 on an H200 1.54 of the floor, kept
    1.18.
    """
    elements = tree.vectors * tree.vec
    if spec.has_stages or device.arch != 90:
        return elements <= 16 and tree.vec > 1 and threads <= MAX_BLOCK_WARPS * 32
    registers = 128 if threads <= MAX_BLOCK_WARPS * 32 else 96
    return elements * (1 + sum(spec.grads[1:])) <= registers - 48 - 2 * tree.vec


def _groups(tree: Tree, roomy: bool, device: Device) -> int:
    """How many rows a persistent block takes at a time: 16 warps' worth, at 128 registers a thread.

    Or on sm_90 up to 20 warps, at 96 registers, where 16 would not come out even: measured in backward on an H200,
    16384x5120 bf16, one row of 10 warps at a time 1.46 of the floor, two rows 1.15. Elsewhere 96 registers spill.
    """
    if tree.cluster > 1:
        return 1
    few = not roomy or device.arch != 90 or tree.vec == 1 or tree.vectors * tree.vec > 16
    if few or MAX_BLOCK_WARPS % tree.warps == 0:
        return max(1, MAX_BLOCK_WARPS // tree.warps)
    return max(1, 20 // tree.warps)
