"""The rule that plans forward row norms. It tries candidates, the best first; the last one always fits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from kernel_fusion.backends.cuda.plan import SMALL_ROW_THREADS, Plan, Ring, direct_plan, pace_of, streamed_plan
from kernel_fusion.backends.cuda.tree import MAX_BLOCK_WARPS, MAX_CLUSTER, Tree, ceil_div, power_of_two, spread_row
from kernel_fusion.backends.cuda.tuned import Facts
from kernel_fusion.core.spec import ITEMSIZE

_THREAD_BYTES = 64  # the bytes of x per thread: 4 loads in flight, and 16 registers for the row
_MAX_STREAMED_ELEMENTS = 32  # the elements per thread for which 128 registers suffice
_SLOTS = 4  # the most rows of a block in shared memory
_MAX_HELD = 256  # the bytes of x, parameters and a stage's row for which 128 registers suffice
# The bytes of a block's rows, and the elements per lane, for which weight and bias stay in registers. Without weight
# and bias twice as many elements fit.
_TILE_BYTES, _TILED_ELEMENTS, _MAX_TILED_WORDS = 17 * 2**10, 16, 192
_TILE_THREADS = 768  # the threads per multiprocessor for which registers must suffice


def plan_forward(facts: Facts) -> Plan:
    """The plan of a forward, for inference or training."""
    plan = next(plan for plan in _candidates(facts) if plan is not None)
    vectors = center = ceil_div(facts.spec.cols, plan.vec * plan.lanes * plan.warps)
    if not plan.resident:
        center = min(vectors, plan.batches[0])
    elif plan.ring.slots:  # the center is then the mean of fewer columns, which takes fewer additions
        center = ceil_div(vectors, 4 if plan.vec == 1 else 2)
    single = plan.vec == 1 and plan.per_block == 1 and plan.resident
    facts = facts.also(helpers=plan.ring.helpers)
    return replace(plan, center=center, shifted=single and facts.tuned("shifted", False))


def _candidates(facts: Facts) -> Iterator[Plan | None]:
    spec = facts.spec
    in_16_bytes = (spec.weight, spec.bias, spec.residual, spec.beside, spec.residual_gate, spec.y)
    if spec.passes != "both":
        yield _direct(facts.of(_tree(facts).narrowed(spec.cols, in_16_bytes)))
    tile = _tile_tree(facts)
    if tile is not None:
        yield _direct(facts.of(tile)) if spec.grouped else _tiled(facts.of(tile))
    few = _few_warps(facts)
    if few is not None:
        yield _streamed(facts.of(few))
    tree = _tree(facts)
    if facts.of(tree).tuned("twice", False):
        yield _read_twice(facts, _one_block(facts, tree).narrowed(spec.cols, in_16_bytes))
    wide_beside = spec.beside is not None and ITEMSIZE[spec.beside] > facts.itemsize
    most = 24 if spec.changes_x and (spec.residual or wide_beside) else _MAX_STREAMED_ELEMENTS
    if tree.cluster > 1 and tree.elements <= facts.tuned("streamed_elements", most) and spec.acc == "f32":
        # x comes from shared memory and parameters from registers, so only y may require shorter vectors.
        streamed = tree if spec.has_stages else tree.narrowed(spec.cols, (spec.y,))
        yield _streamed(facts.of(streamed))
    yield _direct(facts.of(tree.narrowed(spec.cols, in_16_bytes)))


def _tree(facts: Facts) -> Tree:
    spec, device = facts.spec, facts.device
    thread_bytes = facts.tuned("thread_bytes", _THREAD_BYTES)
    # fp32 rows too long for a block take twice as many bytes per thread, unless a cluster with twice the threads holds
    # the row in full vectors.
    blocks = facts.row_bytes / (MAX_BLOCK_WARPS * 32 * thread_bytes)
    spread = device.has_clusters and facts.vec * facts.itemsize == 16 and 2 < blocks <= MAX_CLUSTER
    if facts.itemsize == 4 and blocks > 1 and not spread:
        thread_bytes *= 2
    preferred = facts.tuned("elements", 0)
    tree = spread_row(spec, device, thread_bytes, thread_bytes * 7 // 4, lambda _, elements: elements == preferred)
    if tree.cluster > 1 and tree.elements > _MAX_STREAMED_ELEMENTS and spec.acc == "f32":
        return spread_row(spec, device, thread_bytes, most_bytes=thread_bytes)  # so its blocks can stream rows
    return tree


def _tile_tree(facts: Facts) -> Tree | None:
    """The tree of short rows of narrow vectors without stages, or None. Groups that share parameters have it, too."""
    spec, vec, itemsize = facts.spec, facts.vec, facts.itemsize
    longest = _MAX_TILED_WORDS if vec * itemsize == 4 else 64 * _TILED_ELEMENTS
    applies = facts.device.has_clusters and spec.acc == "f32" and spec.residual is None and spec.beside is None
    if not applies or vec * itemsize > 4 or spec.cols > longest * vec:
        return None
    vectors = spec.cols // vec
    lanes = min(32, power_of_two(ceil_div(vectors, _TILED_ELEMENTS // vec)))
    return Tree(vec, lanes, 1, 1, ceil_div(vectors, lanes))


def _tiled(facts: Facts) -> Plan:
    """A plan that copies many rows together into a block's shared memory."""
    spec, tree, itemsize = facts.spec, facts.tree, facts.itemsize
    at_a_time = SMALL_ROW_THREADS // tree.lanes
    rows = at_a_time * (power_of_two(_TILE_BYTES // (at_a_time * facts.row_bytes) + 1) // 2)
    tensors = {spec.x} if ITEMSIZE[spec.y] == itemsize else {spec.x, spec.y}
    return Plan(
        "row_norm_fwd_tile",
        tree.vec,
        tree.lanes,
        warps=1,
        per_block=rows,
        variant="ahead" if tree.elements <= _TILED_ELEMENTS else "",
        shared_bytes=sum(ceil_div(rows * spec.cols * ITEMSIZE[t], 16) * 16 + 16 for t in tensors),
        min_blocks=_TILE_THREADS // SMALL_ROW_THREADS,
    )


def _few_warps(facts: Facts) -> Tree | None:
    """A tree of few warps with many elements each, for rows in narrow vectors, which then stream faster.

    Four schedulers should get equal numbers of warps, and a warp's fixed work per row costs as much as many elements.
    """
    cols, vec = facts.spec.cols, facts.vec
    for cluster, (warps, elements) in product((1, 2, 4, MAX_CLUSTER), facts.tuned("few_warps", ())):
        vectors = ceil_div(cols // vec, 32 * warps * cluster)
        if vectors * vec <= elements:
            return Tree(vec, 32, warps * cluster, cluster, vectors)
    return None


def _streamed(facts: Facts) -> Plan | None:
    helpers = facts.tuned("helpers", 0)
    facts = facts.also(helpers=helpers)
    return streamed_plan(facts, Ring(_SLOTS, helpers, pace_of(facts, keeps=False)))


def _one_block(facts: Facts, tree: Tree) -> Tree:
    """The tree of a row that one block reads twice, because it does not fit into registers."""
    slots = ceil_div(facts.spec.cols, 32 * tree.vec)
    each = ceil_div(slots, MAX_BLOCK_WARPS if facts.itemsize == 2 else 2 * MAX_BLOCK_WARPS)
    return Tree(tree.vec, 32, ceil_div(slots, each), 1, each)


def _read_twice(facts: Facts, tree: Tree) -> Plan:
    plan = direct_plan("row_norm_fwd_long", tree, batches=_batches(tree))
    # Unaligned rows need more registers than a block of 1024 threads has for each.
    aligned = facts.access.x >= tree.vec * facts.itemsize
    return replace(plan, min_blocks=max(1, 1024 // plan.threads) if aligned else 1)


def _direct(facts: Facts) -> Plan:
    """A plan that holds rows in registers or, if there is no room, reads them twice."""
    tree, itemsize, elements = facts.tree, facts.itemsize, facts.tree.elements
    # Many parameters beside x cost resident threads, as in fp16 and bf16 rows of 16 warps.
    ahead = facts.tuned("ahead", _loads_ahead(facts)) and not (itemsize == 2 and tree.warps == MAX_BLOCK_WARPS)
    bound = facts.tuned("bound", False)
    plan = direct_plan("row_norm_fwd", tree)
    plan = replace(plan, min_blocks=max(1, 1024 // plan.threads) if bound else 1)
    # Stages may widen the row in registers. Single elements take a register each.
    held = max(itemsize, 4) if tree.vec == 1 else itemsize
    if elements * held > 2 * _THREAD_BYTES or elements * ITEMSIZE[facts.spec.row] > 3 * _THREAD_BYTES:
        return replace(plan, kernel="row_norm_fwd_long", batches=_batches(tree))
    facts = facts.also(bound=bound, registers=2**16 // (plan.min_blocks * plan.threads))
    together = max(1, min(8, facts.tuned("parameters", 16) // tree.vec))
    later = facts.tuned("variant", "") if tree.warps > 1 else ""  # later than a step of the exchange between warps
    rows_ahead = facts.tuned("rows_ahead", 0)
    return replace(plan, variant="ahead" if ahead else later, batches=(together,), rows_ahead=rows_ahead)


def _loads_ahead(facts: Facts) -> bool:
    """Whether registers suffice to load parameters together with x. A stage's row goes before them."""
    spec, elements = facts.spec, facts.tree.elements
    if spec.beside is None or spec.changes_x:
        return elements <= 16
    held = sum(ITEMSIZE[dtype] for dtype in (spec.x, spec.weight, spec.bias, spec.beside) if dtype)
    return elements * held <= _MAX_HELD


def _batches(tree: Tree) -> tuple[int, int]:
    """How many vectors are loaded at a time in the first and in the second reading of a row.

    The first batch is at least a ninth of the row, or 16 vectors, because its mean must be a fair center.
    """
    first, second = (16, 8) if tree.vec == 1 else (6, 4)
    fair = min(16, ceil_div(tree.vectors, 9))
    return max(_even(tree.vectors, first), fair), _even(tree.vectors, second)


def _even(vectors: int, most: int) -> int:
    """The largest divisor of `vectors` that is at most `most`, or `most` if that divisor is less than half of it."""
    even = max(n for n in range(1, most + 1) if vectors % n == 0)
    return even if 2 * even >= min(most, vectors) else most
