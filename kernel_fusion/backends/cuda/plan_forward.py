"""Plans of the forward of a row norm: one readable rule, each part with its reason."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import product

from kernel_fusion.backends.cuda.device import Device
from kernel_fusion.backends.cuda.plan import SMALL_ROW_THREADS, Pace, Plan, direct_plan, streamed_plan
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

# 64 bytes of x per thread are 4 loads in flight each and 16 registers for the row.
_FORWARD_BYTES = 64
_MOST_TWICE = 24576  # columns up to which rows are read twice (`_twice`)
_FOUR_BLOCKS_SHAPE = (8, 48)  # warps, and elements of 16 bits to a thread, of which four blocks fit (`_is_bound`)
_EARLY_REGISTERS = 80  # in which weight and bias of 16 elements of fp32 have room beside 32 of a row (`_direct`)
_SMALL_BLOCK_WARPS = 8  # up to which rows of fp32 need no bound on registers (`_is_bound`)
_MAX_EIGHT_SINGLE_WARPS = 14  # of which a multiprocessor has two blocks of up to 72 registers (`_together`)
_MAX_STREAMED_ELEMENTS = 32  # of a thread, in 128 registers
# Rows of 16 bits in narrow vectors (`_streamed_narrow`): warps of a block and the most elements of a thread that leave
# registers for weight and bias; from how many columns on, single elements of LayerNorm and others; and up to how many
# vectors of two or four elements.
_NARROW_SHAPES = ((8, 44), (12, 38), (14, 37))
_LEAST_SINGLE, _LEAST_NARROW, _MOST_NARROW = 6657, 9473, 2**14
# Rows of which a block takes many together (`_tiled`), about as many bytes of them: this many elements of a row per
# lane, whose weight and bias then stay in its registers beside them, or up to twice as many without these. Vectors of 4
# bytes in longer rows reach the floor by themselves: 125490x255 fp32 1.01 on an H200, tiled 1.05.
_TILE_BYTES = 17 * 2**10
_TILED_ELEMENTS = 16
_MAX_TILED_WORDS = 192


def plan_forward(spec: RowNormSpec, access: Access, device: Device) -> Plan:
    """The plan of a forward, for inference or for training."""
    plan = _plan(spec, access, device)
    vectors = ceil_div(spec.cols, plan.vec * plan.lanes * plan.warps)
    # Counting deviations from the mean of half a row saves an addition for each element of the other half, which shows
    # where rows stream: LayerNorm 2048x65536 bf16 on an H200 1.10 of the floor with all of it, 1.08 with half;
    # 1273x50257 1.56 and, with a quarter, 1.45. Rows in registers gain nothing, and some lose.
    center = plan.batches[0] or (ceil_div(vectors, 4 if plan.vec == 1 else 2) if plan.slots else vectors)
    return replace(plan, center=min(vectors, center), shifted=_shifts_stores(spec, plan, vectors, device))


def _plan(spec: RowNormSpec, access: Access, device: Device) -> Plan:
    tiled = _tiled(spec, device)
    if tiled is not None:
        return tiled
    streamed = _streamed_narrow(spec, access, device)
    if streamed is not None:
        return streamed
    tree = _tree(spec, device)
    # Over the floor on an H200, in vectors of 16 bytes of x and narrowed. Weights in fp32: LayerNorm of 8192x1024 bf16
    # 1.14 and 1.05, 2048x4096 1.27 and 1.12, 8192x16384 1.13 and 1.04, 5461x24576 1.18 and 1.13; y in fp32 as well:
    # 16384x4096 1.16 and 1.05, RMSNorm 1.52 and 1.05; a residual in fp32: RMSNorm of 16384x4096 1.06 and 1.03.
    in_16_bytes = partial(narrowed, spec, dtypes=(spec.weight, spec.bias, spec.residual, spec.y))
    twice = _twice(spec, device, tree)
    if twice is not None:
        twice = in_16_bytes(twice)
        # Rows that begin anywhere take more registers than the bound leaves them.
        threads = direct_plan(twice).threads
        min_blocks = max(1, 1024 // threads) if access.x >= twice.vec * ITEMSIZE[spec.x] else 1
        return direct_plan(twice, resident=False, batches=_batches(twice), min_blocks=min_blocks)
    most = 24 if spec.changes_x and spec.residual else _MAX_STREAMED_ELEMENTS
    if tree.cluster > 1 and tree.vectors * tree.vec <= most and spec.acc == "f32":
        # y alone, as x comes from shared memory and the parameters from registers. Of fp32, LayerNorm of 2048x65536
        # takes 306 us with vectors whose y has 32 bytes, 212 with 16. With stages, or on other devices, not measured.
        streamed_tree = tree if spec.has_stages else narrowed(spec, tree, (spec.y,))
        helpers = _helpers(spec, access, streamed_tree, device)
        pace = _pace(spec, streamed_tree, helpers, device)
        streamed = streamed_plan(spec, access, device, streamed_tree, groups=1, max_slots=4, pace=pace, helpers=helpers)
        if streamed is not None:
            return streamed
    return _direct(spec, access, device, in_16_bytes(tree))


def _tree(spec: RowNormSpec, device: Device) -> Tree:
    """How a row is spread, unless a block takes many rows together or reads a row twice."""
    itemsize = ITEMSIZE[spec.x]
    bytes_per_thread = _FORWARD_BYTES
    # Twice as many of fp32 beyond a block; but clusters that have the row, in full vectors, without do better with
    # twice the threads: 2048x65536 fp32 on an H200 in eight blocks 1.03, in four 1.08.
    blocks = spec.cols * itemsize / (MAX_BLOCK_WARPS * 32 * bytes_per_thread)
    spread = device.has_clusters and vector_of(spec) * itemsize == 16 and 2 < blocks <= MAX_CLUSTER
    if itemsize == 4 and blocks > 1 and not spread:
        bytes_per_thread *= 2
    tuned = device.arch == 90 and itemsize == 2 and not spec.has_stages  # what follows was measured for these alone
    # 2048x1600 on an H200, bf16: 1.28 of the floor as 2 warps with up to 4 vectors, 1.06 as 1 warp with 7.
    most_bytes = bytes_per_thread * 7 // 4
    tree = spread_row(
        spec, device, bytes_per_thread, most_bytes, prefer=lambda *shape: tuned and shape == _FOUR_BLOCKS_SHAPE
    )
    if tuned and spec.rms and _takes_half(spec, tree):
        tree = spread_row(spec, device, bytes_per_thread // 2, most_bytes // 2)
    elif tree.cluster > 1 and tree.vectors * tree.vec > _MAX_STREAMED_ELEMENTS and spec.acc == "f32":
        # So that its blocks can stream rows: LayerNorm of 1000x64000 bf16 on an H200 with 40 elements to a thread, in
        # registers, 1.56 of the floor, streamed 1.14; 1280x50002 with 34 1.94, and 1.23.
        tree = spread_row(spec, device, bytes_per_thread, most_bytes=bytes_per_thread)
    return tree


def _takes_half(spec: RowNormSpec, tree: Tree) -> bool:
    """Whether threads of a block take half as much of a row: of RMSNorm, which has no bias, in 16 bits.

    RMSNorm bf16 on an H200 in microseconds, with 32 elements to a thread and with 16: 4x4096 1.55 and 1.01, 2048x4096
    10.3 and 9.9, 32768x4096 131 and 132; 1024x8192 10.7 and 10.1, 16384x8192 131 and 130. Not in blocks of ten to
    fourteen warps: 16384x5120 81.9 and 84.4, 8929x7168 63.0 and 65.4. LayerNorm of 1024x8192 10.9 and 11.4.
    """
    warps = ceil_div(spec.cols, 32 * 16)
    return tree.vec == 8 and tree.warps > 1 and (warps <= 8 or warps == MAX_BLOCK_WARPS)


def _direct(spec: RowNormSpec, access: Access, device: Device, tree: Tree) -> Plan:
    """Rows in registers, or, where there are none for them, read again."""
    itemsize = ITEMSIZE[spec.x]
    per_thread = tree.vectors * tree.vec
    # Weight and bias of few elements are loaded beside x, before the statistics: 2048x2048 fp32 on an H200 0.79 of the
    # floor, afterwards 0.85. More of them cost more threads than that is worth, as do more than 64 registers: 2048x5120
    # fp32 1.15, afterwards 1.04; and 16 bits by 16 warps: 8192x8192 bf16 1.04, afterwards 1.03. So are 32 beside a
    # residual that is wider than x: 8192x8192 bf16 and fp32 1.03, afterwards 1.08.
    wide_residual = spec.residual is not None and ITEMSIZE[spec.residual] > itemsize and not spec.changes_x
    ahead = per_thread <= (32 if wide_residual and device.arch == 90 else 16)
    ahead = ahead and not (itemsize == 2 and tree.warps == MAX_BLOCK_WARPS)
    bound = _is_bound(spec, access, device, tree, ahead)
    block = partial(direct_plan, tree, shared_by=_shared_by(spec, tree, device))
    threads = block().threads
    min_blocks = max(1, 1024 // threads) if bound else 1
    # Stages may hold the row in a wider type than x. Single elements take a register each: 40 of them spill on sm_120.
    held = max(itemsize, 4) if tree.vec == 1 else itemsize
    resident = per_thread * held <= 2 * _FORWARD_BYTES and per_thread * ITEMSIZE[spec.row] <= 3 * _FORWARD_BYTES
    # 512x12288 fp32 on an H200 1.11 of the floor, early 1.08, RMSNorm 1.06 and 1.04; 8576x12288 1.03 both ways. Fewer
    # registers spill, and so do rows that end among a thread's vectors: 614x10240 1.11 and 1.23. Where more threads
    # hide the wait it gains nothing: 2048x4096 bf16 1.03 both ways, 1024x8192 1.06.
    early = bound and resident and not ahead and itemsize == 4 and covers(spec, tree)
    early = early and 2**16 // (min_blocks * threads) >= _EARLY_REGISTERS
    return block(
        resident=resident,
        batches=(0, 0) if resident else _batches(tree),
        ahead=ahead,
        together=_together(spec, tree, bound),
        early=early,
        anew=bound and not spec.rms and (tree.warps, per_thread) == _FOUR_BLOCKS_SHAPE,
        min_blocks=min_blocks,
    )


def _is_bound(spec: RowNormSpec, access: Access, device: Device, tree: Tree, ahead: bool) -> bool:
    """Whether the compiler is to do with the registers that 1024 threads of a multiprocessor have: 64 or some more.

    Where weight and bias are loaded beside x. And on an H200, over the floor, free and bound: of 16 bits, five vectors
    of a warp, LayerNorm of 4096x1280 bf16 1.15 and 1.02, 50000x1280 1.03 both ways (seven spill; so do five beside a y
    or a residual of fp32, and where anything stands before a residual); six of each of eight warps, of which four
    blocks fit, where of twelve warps with four vectors three do: 512x12288 9.5 and 8.0 microseconds, 8192x12288 99.5
    both ways, with weights in fp32 10.3 and 8.0, 100.0 and 100.5. LayerNorm fits 64 registers only where a thread finds
    its columns anew for y, and not without a weight, nor where rows end among a thread's vectors. Of fp32, blocks of
    more than eight warps, which load weight and bias of 16 elements together: 8576x12288 1.19 and 1.02, by the vector
    1.03.
    """
    if device.arch != 90 or spec.acc != "f32" or tree.vec == 1:
        return False
    # Vectors put together from pieces and rows that end among a thread's vectors take a few registers more.
    plain = access.x >= tree.vec * ITEMSIZE[spec.x] or covers(spec, tree)
    if ahead:
        return plain and not spec.has_stages
    elements, narrow = tree.vectors * tree.vec, ITEMSIZE[spec.x] == 2
    if narrow and tree.warps == 1 and ceil_div(spec.cols, 32 * vector_of(spec)) * vector_of(spec) == 40:
        spills = ITEMSIZE[spec.y] > 2 or spec.residual == "f32" or (spec.residual and spec.changes_x)
        return plain and not spills
    if access.x < 16 or spec.y != spec.x or spec.offset or spec.has_stages:
        return False
    if narrow:
        fits = spec.rms or (spec.weight is not None and covers(spec, tree))
        return fits and (tree.warps, elements) == _FOUR_BLOCKS_SHAPE
    return tree.vec == 4 and tree.warps > _SMALL_BLOCK_WARPS and (spec.rms or spec.weight == spec.x)


def _together(spec: RowNormSpec, tree: Tree, bound: bool) -> int:
    """Of how many vectors weight and bias are loaded at a time, once the statistics are known.

    Of 16 elements, since each wait for them is time in which a thread asks for nothing else. LayerNorm on an H200, over
    the floor, one vector at a time and so: 8192x1024 bf16 1.14 and 1.07, 2048x4096 1.11 and 1.05, 32768x4096 1.03 both
    ways; 4096x1280 fp32 1.10 and 1.02, 512x12288 1.22 and 1.14, 8576x12288 1.03 and 1.02; 16376x4098 bf16, in vectors
    of 2, two at a time 1.08 and 1.04. Fewer where the registers would cost blocks: with parameters or y wider than x
    (RMSNorm of 8192x8192 bf16 1.03 and 1.27), except beside more than 40 elements of a row by a warp (2048x1600 1.15
    and 1.02, LayerNorm 1.12 and 0.98); in fp32 by more than eight warps that are not bound; in 16 bits by 16 warps
    (8192x16384 1.03 both ways), and of LayerNorm where registers are scarce as it is, an activation takes some
    (8192x8192 with gelu 1.12 and 1.22, behind relu 1.02 and 1.06), or the rows of several warps end among a thread's
    vectors (12800x5000 1.05 and 1.08). Eight single elements of 16 bits by 15 or 16 warps take so many registers that a
    multiprocessor has one block instead of two: 3906x16383 bf16 2.17, by four 1.50.
    """
    elements = 16
    if tree.vec == 1 and ITEMSIZE[spec.x] == 2:
        elements = 4 if tree.warps > _MAX_EIGHT_SINGLE_WARPS and not spec.rms else 8
    elif spec.x == "f32" and tree.warps > _SMALL_BLOCK_WARPS and not bound:
        elements = 4
    elif _is_wide(spec):
        elements = 16 if tree.warps == 1 and tree.vec >= 4 and tree.vectors * tree.vec > 40 else 8
    elif ITEMSIZE[spec.x] == 2 and vector_of(spec) == 8:
        uneven = tree.warps > 1 and not covers(spec, tree)
        costly = spec.pre_activation != IDENTITY or spec.activation not in (IDENTITY, "relu")
        scarce = (bound and tree.warps == 1) or uneven or costly
        elements = 8 if tree.warps == MAX_BLOCK_WARPS or (scarce and not spec.rms) else 16
    return max(1, min(8, elements // tree.vec))


def _is_wide(spec: RowNormSpec) -> bool:
    """Whether the parameters or y are wider than x."""
    return any(ITEMSIZE[dtype] > ITEMSIZE[spec.x] for dtype in (spec.weight, spec.bias, spec.y) if dtype)


def _shared_by(spec: RowNormSpec, tree: Tree, device: Device) -> int:
    """How many threads a block has whose warps have rows of their own.

    Smaller blocks leave less over when they end. On an H200, over the floor, blocks of 128 and of 64 threads:
    LayerNorm 65536x1024 bf16 1.04 and 1.03, 65536x512 fp32 1.04 and 1.02, RMSNorm 1.04 and 1.02, 1.02 and 1.01. Not
    where a thread reads but 32 bytes: LayerNorm 524288x128 bf16 1.09 and 1.23.
    """
    thread_bytes = tree.vectors * tree.vec * ITEMSIZE[spec.x]
    return SMALL_ROW_THREADS // 2 if device.arch == 90 and thread_bytes > 32 else SMALL_ROW_THREADS


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
    threads = SMALL_ROW_THREADS
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


def _shifts_stores(spec: RowNormSpec, plan: Plan, vectors: int, device: Device) -> bool:
    """Whether single elements leave by whole sectors of memory (kernels/shifted_store.cuh), which takes shuffles.

    On an H200, over the floor, as they come and shifted. RMSNorm of 1273x50257 bf16 1.28 and 1.17, fp32 1.20 and 1.13,
    488x131071 1.29 and 1.15; in registers 6395x8191 1.19 and 1.14; without helpers not of less than 20 elements to a
    thread. LayerNorm of rows that stream in fp32: 244x131071 1.23 and 1.18, 636x50257 1.17 and 1.16; in 16 bits with
    helpers 1273x50257 1.25 and 1.16, 3199x20001 1.23 and 1.13, but of 26 elements to a thread or fewer 976x65537 1.27
    and 1.43; without helpers 1273x50257 1.43 and 1.54; nor in registers, 6398x5001 fp32 1.24 and 1.50.
    """
    narrow = ITEMSIZE[spec.x] == 2
    single = plan.vec == 1 and plan.per_block == 1 and plan.resident and spec.y == spec.x
    if not single or device.arch != 90 or spec.acc != "f32" or spec.has_stages:
        return False
    if spec.rms:
        return plan.helpers > 0 or plan.slots == 0 or not narrow or vectors >= 20
    return plan.slots > 0 and (not narrow or (plan.helpers > 0 and vectors > 26))


def _streamed_narrow(spec: RowNormSpec, access: Access, device: Device) -> Plan | None:
    """A streamed plan for long rows of 16 bits in vectors of fewer than 16 bytes; None where that does not apply.

    Such rows take 13 instructions for an element of LayerNorm and 145 for each warp of a row, and a multiprocessor's
    four schedulers share its warps one by one: the time of a block follows ceil(warps / 4) * (13 * elements + 145) of a
    thread. So few warps, in fours, with many elements each. LayerNorm on an H200 over the floor, in blocks of 8, 12, 13
    and 16 such warps: 1273x50257 bf16 1.18, 1.16, 1.32 and 1.24; 20001 columns 1.13, 1.21 and, by 16, 1.26; 10007
    columns 1.14, 1.20, 1.37 and, in registers, 1.33. RMSNorm of 50257 columns 1.13, 1.14 and, by 16, 1.15. In vectors
    of two or four: 10002 columns 1.13 and, in registers, 1.39, 16382 1.18 and 1.66; but 7002 1.14 and 1.09, 50004 1.20
    and, as other rows are streamed, 1.14; RMSNorm of 10002 1.11 and 1.02.
    """
    if device.arch != 90 or ITEMSIZE[spec.x] != 2 or spec.y != spec.x or spec.has_stages:
        return None
    vec = vector_of(spec)
    if vec == 1:
        applies = spec.cols >= (_LEAST_NARROW if spec.rms else _LEAST_SINGLE)
    else:
        applies = vec <= 4 and not spec.rms and not _is_wide(spec) and _LEAST_NARROW <= spec.cols <= _MOST_NARROW
    if not applies:
        return None
    for cluster, (warps, elements) in product((1, 2, 4, MAX_CLUSTER), _NARROW_SHAPES):
        vectors = ceil_div(spec.cols // vec, 32 * warps * cluster)
        if vectors * vec <= elements:
            tree = Tree(vec, 32, warps * cluster, cluster, vectors)
            max_slots = 4 if spec.rms or cluster == 1 else 6  # of 20001 columns LayerNorm 1.13, with four 1.14
            pace = _pace(spec, tree, 2, device)
            return streamed_plan(spec, access, device, tree, groups=1, max_slots=max_slots, pace=pace, helpers=2)
    return None


def _helpers(spec: RowNormSpec, access: Access, tree: Tree, device: Device) -> int:
    """How many warps of a streamed forward have no columns: the combiner, then the producer (kernels/row_stream.cuh).

    A combiner saves every other warp 75 instructions of a row; beside 16 warps it leaves a thread 96 registers instead
    of 128, so none where that spills. LayerNorm on an H200 over the floor, without and with one: 2048x65536 bf16 1.06
    and 1.04, 1024x131072 1.09 and 1.05, behind relu 5461x24576 1.14 and 1.05, behind gelu 2048x65536 fp32 1.37 and
    1.05; RMSNorm of 2048x65536 bf16 behind silu 1.21 and 1.05, of 1365x98304 with weights in fp32 1.08 and 1.04; none
    beside a residual (1.08 all ways). A producer pays where arithmetic is what a row waits for: LayerNorm behind gelu
    2048x65536 bf16 1.61, with a combiner 1.26, with both 1.17; 1280x50004 1.42, 1.17 and 1.14; or blocks have fewer
    than 16 warps: 2730x49152 1.10, 1.11 and 1.06, 1365x98304 1.23, 1.10 and 1.05, 2340x57344 1.16, 1.04 and 1.03; or
    tensors are of fp32, without helpers and with both: weights beside 1024x131072 bf16 1.08 and 1.05, beside
    1342x100002 1.38 and 1.12, all 2730x49152 1.10 and 1.02, 2340x28672 1.02 and 1.03.
    Elsewhere the first thread of a block that copies rows keeps it from asking for more than memory has: 2048x65536
    1.08 with a producer.
    """
    if device.arch != 90 or spec.residual or spec.dropout:
        return 0
    per_thread = tree.vectors * tree.vec
    costly = any(stage not in (IDENTITY, "relu") for stage in (spec.pre_activation, spec.activation))
    if spec.x == "f32":
        if costly:
            return 2 if per_thread <= 16 or not spec.changes_x else 0
        return 0 if spec.rms or spec.has_stages else 2
    if tree.vec == 1:
        return 0 if spec.changes_x and not spec.rms and per_thread > 20 else 2
    largest = tree.warps == MAX_BLOCK_WARPS * tree.cluster
    anywhere = access.x < 16  # where rows begin; their addresses take registers, too
    if _is_wide(spec) and (spec.has_stages or (largest and anywhere and not spec.rms)):
        return 0
    if spec.rms:
        return 2 if costly and spec.changes_x else 1
    few_warps = not largest and not spec.has_stages
    return 2 if costly or few_warps or per_thread < _MAX_STREAMED_ELEMENTS or _is_wide(spec) else 1


def _pace(spec: RowNormSpec, tree: Tree, helpers: int, device: Device) -> Pace | None:
    """How the blocks of a streamed forward keep together (kernels/pace.cuh), where memory is what they wait for.

    On an H200, over the floor, together and apart. With helpers: LayerNorm of 1024x131072 bf16 1.05 and 1.08,
    5461x24576 behind relu 1.05 and 1.14, 6553x20480 behind gelu 1.30 and 1.42. Without them vectors of up to 4 bytes
    wait for arithmetic: 1273x50257 bf16 1.61 and 1.44, LayerNorm of 637x50257 fp32 1.20 and 1.17, of 1280x50002 bf16
    1.37 and 1.23; but RMSNorm of the latter two 1.19 and 1.22, 1.13 and 1.20. So does LayerNorm of 16 bits in clusters
    of eight, or by at most twelve warps to a block: 1024x131072 bf16 1.18 and 1.08, 5461x24576 1.15 and 1.09; but
    2048x65536 1.09 and 1.10, fp32 1.03 and 1.07, and RMSNorm of 1024x131072 bf16 1.04 and 1.09.

    A block may be 2 rows ahead of the average. By 2 and by 1.75, which RMSNorm and a combiner's clusters of two take:
    RMSNorm bf16 1365x98304 1.07 and 1.06, fp32 2730x49152 1.07 and 1.05, LayerNorm bf16 4096x32768 1.06 and 1.04; but
    2048x65536 1.04 and 1.05, 1024x131072 1.04 and 1.08. A producer, which has nothing else to do, by 2 and by 1.5:
    LayerNorm bf16 3906x16382 1.19 and 1.14, 1273x50257 1.15 (apart 1.16) and 1.15; RMSNorm of the latter, by 2 and by
    1.75, 1.12 (apart 1.14) and 1.11. But single elements of a row that has one block: 6395x10007 bf16 apart 1.14,
    together 1.15.
    """
    if device.arch != 90:  # unmeasured, and on sm_120 it spills
        return None
    vector_bytes = tree.vec * ITEMSIZE[spec.x]
    if helpers > 1 and not spec.has_stages:
        return Pace(tolerance=7 if spec.rms else 6) if vector_bytes > 2 or tree.cluster > 1 else None
    if helpers:
        together = vector_bytes > 2
    elif vector_bytes <= 4:
        together = spec.rms and vector_bytes == 4
    else:
        together = spec.rms or ITEMSIZE[spec.x] > 2 or (tree.cluster <= 4 and tree.warps > 12 * tree.cluster)
    light = not spec.has_stages and (spec.rms or tree.cluster == 2)
    return Pace(tolerance=7 if light else 8) if together else None


def _twice(spec: RowNormSpec, device: Device, tree: Tree) -> Tree | None:
    """The tree of a row that a single block reads twice, where that beats `tree`; else None.

    It pays while the L1 cache has room for the rows of a multiprocessor, two of 48 KB or one of 96, beside the
    parameters. On an H200, over the floor, read twice and as clusters: RMSNorm of 5461x24576 bf16 1.03 and 1.07,
    with weights in fp32 1.04 and 1.03, fp32 2730x24576 1.03 and 1.06; but 4096x32768 bf16 1.04 both ways, with weights
    in fp32 1.19 and 1.05, 2340x28672 fp32 1.04 and 1.01. LayerNorm has a bias too: bf16 7710x17408 1.08 and 1.12,
    6553x20480 1.08 and 1.05, 4681x28672 1.12 and 1.05, with weights in fp32 1.30 and 1.09, 1.18 and 1.04, 1.29 and
    1.04; few rows lose, 264x24576 bf16 9.5 and 11.0 us, or gain, 64x24576 5.1 and 4.6. Single elements do not pay:
    6400x10007 bf16 1.54, in registers 1.33; 1273x50257 1.76, as a streamed cluster 1.46.
    """
    itemsize = ITEMSIZE[spec.x]
    if device.arch != 90 or itemsize == 8 or spec.has_stages or not spec.rms:
        return None
    if tree.vec * itemsize < 16 or tree.cluster == 1 or spec.cols > _MOST_TWICE:
        return None
    slots = ceil_div(spec.cols, 32 * tree.vec)
    warps = MAX_BLOCK_WARPS if itemsize == 2 else 2 * MAX_BLOCK_WARPS
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
