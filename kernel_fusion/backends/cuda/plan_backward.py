"""Plans of the backward of a row norm: one readable rule, each part with its reason."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from kernel_fusion.backends.cuda.device import Device
from kernel_fusion.backends.cuda.plan import Pace, Plan, direct_plan, streamed_plan
from kernel_fusion.backends.cuda.tree import (
    MAX_BLOCK_WARPS,
    MAX_CLUSTER,
    Tree,
    ceil_div,
    covers,
    narrowed,
    power_of_two,
    spread_row,
    vector_of,
)
from kernel_fusion.core.activations import IDENTITY
from kernel_fusion.core.spec import ITEMSIZE, Access, RowNormSpec

# Each element has two accumulators: 16 elements of 16 bits take 32 of the 128 registers that a thread of 512 has.
# Longer rows of wide elements take twice as many bytes before they take a cluster.
_BACKWARD_BYTES = 32
# Elements per thread of rows of narrow vectors (`_narrow_tree`): short ones, and single elements of 16 bits, more of
# which spill.
_NARROW_ELEMENTS, _MAX_SINGLES = 6, 25
_SHORT_ROW_BYTES = 512  # up to which a thread takes one vector in backward, and there are twice as many threads
# Rows of fp32: 131072 columns take 1.08 of the floor on an H200, 1.41 in clusters of 8. Beside dy of fp32 those have no
# shared memory to stream such rows of 16 bits, and read directly these spill (16 is not measured there).
_MAX_CLUSTER_SM90 = 16
_MIN_STREAMED_COLS = 256  # shorter rows make copies too small to be worth their issue
# With stages, whose arithmetic takes registers too: bytes that a thread of 128 registers can hold of a row in the
# direct backward, beside the sums or without any; and elements in the streamed one. More spill.
_MAX_HELD_WITH_SUMS, _MAX_HELD, _MAX_STREAMED_ELEMENTS = 224, 160, 24
_MAX_WIDE = 28  # elements of a weight in registers: 32 of RMSNorm, which has but one sum beside them, spill
# Activations whose slopes leave no registers for the bias beside the weight.
_COSTLY = ("gelu", "mish")
# How much arithmetic a slope takes, as far as `_pace` asks; the others take more.
_SLOPES = {IDENTITY: 0, "relu": 1, "relu_squared": 1, "leaky_relu": 1, "hardswish": 2}
_STATIC_SHARED_BYTES = 8192  # at most: what a kernel declares besides its sums


def plan_backward(spec: RowNormSpec, access: Access, device: Device) -> Plan:
    """The plan of a backward: dx, dweight and dbias as they are wanted."""
    bytes_per_thread = _bytes_per_thread(spec)
    tree = _tree(spec, device, bytes_per_thread)
    plan = _plan_staged_backward(spec, tree, access, device)
    if plan is None:
        return _direct(spec, device, tree, bytes_per_thread)
    return replace(plan, few=_has_loop_for_few(spec, plan, device))


def _has_loop_for_few(spec: RowNormSpec, plan: Plan, device: Device) -> bool:
    """Whether no more rows than are in the slots at once have a loop of their own, a third more to compile.

    One after the other, without the instructions that a ring and a second row take. bf16 on an H200 in microseconds:
    2048x1600 10.2 and 9.6, 4096x1024 10.8 and 10.3, 512x6144 11.0 and 10.0; RMSNorm of 2048x2048 10.0 and 9.6. In
    clusters 256x12288 11.3 and 11.1, but 4096x32768 196 and 199. Single elements would take too long to compile.
    """
    return plan.slots > 2 and plan.cluster == 1 and plan.vec > 1 and device.arch == 90 and not spec.has_stages


def _bytes_per_thread(spec: RowNormSpec) -> int:
    row_bytes = spec.cols * ITEMSIZE[spec.x]
    each = _BACKWARD_BYTES if row_bytes > _SHORT_ROW_BYTES else _BACKWARD_BYTES // 2
    return 2 * each if ITEMSIZE[spec.x] > 2 and row_bytes > MAX_BLOCK_WARPS * 32 * each else each


def _tree(spec: RowNormSpec, device: Device, bytes_per_thread: int) -> Tree:
    """How a row is spread."""
    larger = device.arch == 90 and ("f32" in (spec.x, spec.y) or spec.has_stages)
    tree = _narrow_tree(spec, device) or spread_row(
        spec,
        device,
        bytes_per_thread,
        bytes_per_thread + 16,
        prefer=lambda warps, elements: device.arch == 90 and _fills_block(spec, warps, elements),
        max_cluster=_MAX_CLUSTER_SM90 if larger else MAX_CLUSTER,
    )
    if device.arch == 90 and not spec.has_stages and covers(spec, tree):
        # dy of fp32 beside x of bf16, over the floor on an H200: LayerNorm 16384x5120 1.92, as 32 bytes spill, and
        # 1.05; 2048x4096 1.30 and 1.28, RMSNorm 1.25 and 1.22, others 0 to 2 % less. Beside a residual in fp32 some
        # lose, and rows that end among a thread's vectors spill.
        tree = narrowed(spec, tree, (spec.y,))
    return tree


def _direct(spec: RowNormSpec, device: Device, tree: Tree, bytes_per_thread: int) -> Plan:
    """Rows in registers, or, where there are none for them, read again."""
    itemsize = ITEMSIZE[spec.x]
    wants_sums = spec.grads[1] or spec.grads[2]
    per_thread = tree.vectors * tree.vec
    thread_bytes = per_thread * itemsize
    # 512 threads per multiprocessor: 128 registers each, enough for a row, the next row and both sums. One vector each
    # leaves room for twice as many, which do without the next row: 131072x256 bf16 on an H200 1.28 and 1.16.
    # Stages get 168 registers, where a block leaves them.
    # Many single elements need the next row more: 250980x255 bf16 1.32, and 1.40 with twice the threads.
    singles = tree.vec * itemsize == 2
    plain = spec.acc == "f32" and not spec.has_stages
    short = tree.warps == 1 and thread_bytes <= 16 and plain and not (singles and per_thread > 5)
    threads = 1024 if short else 384 if spec.has_stages else 512
    plan = partial(direct_plan, tree, persistent=True, min_blocks=max(1, threads // direct_plan(tree).threads))
    held = _held_bytes(spec, tree)
    scarce = spec.has_stages or ITEMSIZE[spec.y] > itemsize
    fits = not scarce or held + (2 * per_thread * ITEMSIZE[spec.acc] if wants_sums else 0) <= _MAX_HELD_WITH_SUMS
    # Rows that share a block keep their sums in registers, of which they have 168: shared memory is where the block
    # adds them up.
    if thread_bytes <= bytes_per_thread + 16 and (fits or tree.warps == 1):
        rows = direct_plan(tree).per_block
        table = rows * spec.cols * ITEMSIZE[spec.acc] if wants_sums and rows > 1 else 0
        storage = "registers" if wants_sums else "none"
        # A next row of more than 32 bytes has registers on sm_90 alone; elsewhere dy counts where it is wider. Many
        # single elements of 16 bits take a register each.
        longest = 16 if singles else bytes_per_thread if device.arch == 90 else _BACKWARD_BYTES
        next_bytes = thread_bytes if device.arch == 90 else per_thread * max(itemsize, ITEMSIZE[spec.y])
        prefetch = not short and next_bytes <= longest and not spec.has_stages
        prefetch = prefetch and not (spec.acc == "f64" and tree.cluster > 2)  # 16384 columns would spill
        weight = "wide" if per_thread <= 8 and spec.acc == "f32" else "memory"
        return plan(storage=storage, prefetch=prefetch, shared_bytes=table, weight=weight)
    # Twice the elements still fit in registers without their sums, which move to shared memory where there is room.
    most = 8 if spec.x == "f64" else 16 if tree.vec == 1 else device.max_elements
    if spec.activation != IDENTITY and device.arch < 90:
        most = min(most, 16)  # 24, of 12288 columns, spill beside a slope
    resident = thread_bytes <= 2 * bytes_per_thread and per_thread <= most and tree.cluster <= MAX_CLUSTER
    resident = resident and (held <= _MAX_HELD or not spec.has_stages)
    shared = direct_plan(tree).threads * per_thread * 2 * ITEMSIZE[spec.acc]
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


def _fills_block(spec: RowNormSpec, warps: int, elements: int) -> bool:
    """Whether groups of so many warps fill a block, where rows are streamed, with registers for a thread's elements.

    24 of them are too many: on an H200, bf16, 8192x12288 as a block 1.15 of the floor, as a cluster of two with 16 per
    thread 1.10; 16384x6144 1.15 and, in twelve warps, 1.08. But a single warp has no sums to exchange: 131072x768 1.16,
    in three warps 1.24. And where a row ends among a thread's vectors, three rows of six warps spill.
    """
    if MAX_BLOCK_WARPS % warps:
        return False
    return elements <= 20 or warps == 1 or spec.cols % (warps * 32 * elements) > 0


def _held_bytes(spec: RowNormSpec, tree: Tree) -> int:
    """What a thread of the direct backward holds of a resident row."""
    itemsizes = ITEMSIZE[spec.row] * (2 if spec.dh else 1) + ITEMSIZE[spec.y]
    return tree.vectors * tree.vec * itemsizes


def _plan_staged_backward(spec: RowNormSpec, tree: Tree, access: Access, device: Device) -> Plan | None:
    """A plan that copies whole rows into shared memory in bulk, or None where that is impossible: it takes sm_90.

    Measured on an H200, bf16, time over the floor, directly and so: 32768x4096 1.42 and 1.18, 16384x8192 1.57 and 1.06,
    4096x32768 2.13 and 1.35.
    """
    if not (device.has_clusters and spec.acc == "f32" and spec.cols >= _MIN_STREAMED_COLS):
        return None
    short = spec.cols * ITEMSIZE[spec.x] <= _SHORT_ROW_BYTES
    if tree.lanes < 32 or short or tree.vectors * tree.vec > _max_streamed_elements(spec, device):
        return None
    # Vectors put together from pieces take more registers, and so do stages: on sm_90 all but an activation after the
    # norm of whole vectors. 8192x8192 bf16 with relu takes 1.28 of the floor with weight and bias in registers, 1.47
    # without; and 1.22 where there is no relu.
    activated = device.arch == 90 and tree.vec > 1 and spec.residual is None and not spec.changes_x
    itemsize = ITEMSIZE[spec.x]
    roomy = access.x >= tree.vec * itemsize and access.y >= min(16, tree.vec * max(itemsize, ITEMSIZE[spec.y]))
    roomy = roomy and (not spec.has_stages or activated)
    groups = _groups(spec, tree, roomy, device)
    plan = _streamed_groups(spec, tree, access, device, groups, roomy)
    if tree.cluster > 1 and groups > 1 and (plan is None or plan.slots < 3):
        # Not for the third slot, without which rows go one after the other.
        plan = _streamed_groups(spec, tree, access, device, 1, roomy)
    if plan is None and spec.has_stages:
        # They may need larger slots: as many rows at a time as have four each, then a share of the row for each of more
        # blocks. A residual in fp32 beside bf16, on an H200, one row and so: RMSNorm 65536x768 1.65 and 1.06,
        # 32768x1408 1.17 and 1.04; by three slots each 1.07 and 1.07.
        fewer = (_streamed_groups(spec, tree, access, device, n, roomy) for n in range(groups - 1, 1, -1))
        plan = next((p for p in fewer if p is not None and p.slots == 4), None)
        plan = plan or _streamed_groups(spec, tree, access, device, 1, roomy)
        while plan is None and (larger := _larger_cluster(spec, tree)):
            tree = larger
            plan = _streamed_groups(spec, tree, access, device, 1, roomy)
    return plan


def _max_streamed_elements(spec: RowNormSpec, device: Device) -> int:
    if spec.activation == "mish":  # whose slope takes the registers of the others
        return 16
    return _MAX_STREAMED_ELEMENTS if spec.has_stages else device.max_elements


def _larger_cluster(spec: RowNormSpec, tree: Tree) -> Tree | None:
    """The same tree executed by twice as many blocks, none without columns; None where there is none."""
    cluster = 2 * tree.cluster
    if cluster > MAX_CLUSTER or tree.lanes < 32 or tree.warps % cluster:
        return None
    columns = tree.warps // cluster * 32 * tree.vec * tree.vectors
    return replace(tree, cluster=cluster) if (cluster - 1) * columns < spec.cols else None


def _streamed_groups(
    spec: RowNormSpec, tree: Tree, access: Access, device: Device, groups: int, roomy: bool
) -> Plan | None:
    threads, elements = tree.warps // tree.cluster * 32, tree.vectors * tree.vec
    pace = _pace(spec, tree, groups, device)
    max_slots = 3 if _has_three_vectors(spec, tree, roomy, device) else 4
    streamed = partial(streamed_plan, spec, access, device, tree, groups, max_slots, pace)
    if spec.weight is None:
        return streamed()
    if elements <= 8 or (roomy and _keeps_weight(spec, tree, groups * threads, device)):
        keeps_bias = roomy and spec.bias is not None and spec.activation not in (IDENTITY, *_COSTLY)
        return streamed(weight="wide", bias="wide" if keeps_bias else "memory")
    if tree.vec == 1 and tree.cluster == 1:
        return streamed()  # a short weight, which L1 holds beside the rows
    # All of it, or so much, half at least, that a third slot has room: 1024x131072 bf16 on an H200 1.33 of the floor
    # with a weight from memory, 1.20 with three quarters of it from shared memory.
    for unkept in range(tree.vectors // 2 + 1):
        kept_bytes = (elements - unkept * tree.vec) * threads * ITEMSIZE[spec.weight]
        shared = streamed(weight="shared", shared_bytes=kept_bytes, unkept=unkept)
        if (shared is not None and shared.slots > 2) or spec.weight == "f32":
            return shared  # fp32 read from memory for every row takes registers that are not there
    return streamed()


def _keeps_weight(spec: RowNormSpec, tree: Tree, threads: int, device: Device) -> bool:
    """Whether a thread of a streamed backward has registers for the weight of its columns, beside their sums.

    Read for every row it costs most where each element is a load: 62561x1023 bf16 on an H200 1.54 of the floor, kept
    1.18.
    """
    elements = tree.vectors * tree.vec
    if spec.has_stages or device.arch != 90:
        return elements <= 16 and tree.vec > 1 and threads <= MAX_BLOCK_WARPS * 32
    registers = 168 if threads <= 384 else 128 if threads <= MAX_BLOCK_WARPS * 32 else 96
    vectors = 2 * tree.vec * max(1, ITEMSIZE[spec.y] // ITEMSIZE[spec.x])  # registers of what is being worked on
    return elements <= _MAX_WIDE and elements * (1 + sum(spec.grads[1:])) <= registers - 48 - vectors


def _pace(spec: RowNormSpec, tree: Tree, groups: int, device: Device) -> Pace | None:
    """How blocks of so many groups keep together (kernels/pace.cuh), where memory is what they wait for.

    32768x2048 bf16 on an H200 takes 1.06 of the floor together, 1.18 apart. Where they wait for arithmetic, or the
    blocks of a cluster for each other, a wait more costs time. LayerNorm of 16 bits by at most twelve warps to a block,
    several of which share a row: 8192x12288 bf16 1.14 together, 1.07 apart, but fp32 1.03 and 1.08, and fourteen warps,
    16384x7168 bf16, 1.07 and 1.09. 16 bits in clusters of eight: 2048x65536 bf16 1.20 and 1.11, but fp32 1.03 and 1.07;
    of sixteen: RMSNorm of 1024x131072 fp32 1.19 and 1.11. The slope of an activation after the norm, of 8192x8192:
    LayerNorm bf16 with relu 1.18 and 1.09, but RMSNorm 1.07 and 1.20, and LayerNorm fp32 1.08 and 1.13; RMSNorm bf16
    with hardswish 1.29 and 1.22, but fp32 1.07 and 1.12; with sigmoid 1.35 and 1.26, fp32 1.25 and 1.18.

    A block may be 2 rows ahead of the average. More, and the blocks are less together; less, and it waits where it had
    work to do. But 2.25 rows where LayerNorm of 16 bits takes four rows of several warps at a time or a cluster of four
    a row, by 2 and by 2.25: 16384x1024 bf16 30.1 and 29.6 us (by 1.5 33.5), 4096x32768 1.08 and 1.07; otherwise
    16384x8192 1.035 and 1.047, and single warps 131072x768 1.035 and 1.046. And 1.75 in vectors of fp32, by 2 and by
    1.75: 2048x6144 42.0 and 41.4 us, 8192x16384 1.046 and 1.041, 21333x3000 1.05 and 1.03; otherwise RMSNorm of
    1273x50257 fp32 1.12 and 1.16, of 8192x12288 bf16 1.05 and 1.13.

    Blocks go apart below 15 rows, 16384x1024 bf16 apart 30.5 us, together 30.1; in fp32, with half as much arithmetic
    to a byte, below seven: 512x12288 24.7 and 24.3. None of this is measured on other devices.
    """
    narrow = ITEMSIZE[spec.x] == 2
    few = groups * tree.warps <= 12 * tree.cluster and tree.warps > 1 and narrow and not spec.rms
    most = 2 if not narrow else 1 if spec.rms else 0
    if few or tree.cluster > 2 * ITEMSIZE[spec.x] or _SLOPES.get(spec.activation, 3) > most:
        return None
    if device.arch != 90:
        return Pace()
    if not narrow:
        return Pace(tolerance=7 if tree.vec > 1 and not spec.has_stages else 8, least=7)
    many = tree.cluster > 2 or (groups >= 4 and tree.warps > 1)
    return Pace(tolerance=9 if many and not (spec.rms or spec.has_stages) else 8)


def _groups(spec: RowNormSpec, tree: Tree, roomy: bool, device: Device) -> int:
    """How many rows a persistent block or cluster takes at a time: 16 warps' worth a block, at 128 registers a thread.

    Or on sm_90 up to 20 warps, at 96 registers, where 16 would not come out even: measured in backward on an H200,
    16384x5120 bf16, one row of 10 warps at a time 1.46 of the floor, two rows 1.15; 13107x10240 in clusters of two such
    blocks 1.22 and 1.05. Elsewhere 96 registers spill, and where dy is wider than x and rows end among a thread's
    vectors. Rows of three vectors a thread go twelve at a time.
    """
    if _has_three_vectors(spec, tree, roomy, device):
        return 12
    warps = tree.warps // tree.cluster
    uneven = ITEMSIZE[spec.y] > ITEMSIZE[spec.x] and not covers(spec, tree)
    few = not roomy or spec.has_stages or device.arch != 90 or tree.vec == 1 or tree.vectors * tree.vec > 16 or uneven
    if few and tree.cluster > 1:
        return 1
    most = MAX_BLOCK_WARPS if few or MAX_BLOCK_WARPS % warps == 0 else 20
    return max(1, most // warps)


def _has_three_vectors(spec: RowNormSpec, tree: Tree, roomy: bool, device: Device) -> bool:
    """Whether a row is a warp's, with 48 bytes to a thread, three vectors of x, and takes blocks that suit it on sm_90.

    Twelve warps leave registers for the weight beside the sums, and three slots are enough: on an H200, over the floor,
    sixteen warps with four slots and so, LayerNorm of 16384x768 bf16 1.30 and 1.22, of 131072x768 1.07 and 1.04,
    RMSNorm 1.19 and 1.16, 1.06 and 1.03.
    """
    itemsize = ITEMSIZE[spec.x]
    whole = roomy and tree.vec * max(itemsize, ITEMSIZE[spec.y]) == 16 and tree.vectors * tree.vec * itemsize == 48
    return whole and tree.warps == 1 and device.arch == 90 and not spec.has_stages
