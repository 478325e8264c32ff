"""The rule that plans backward row norms."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from kernel_fusion.backends.cuda.plan import Plan, Ring, direct_plan, pace_of, streamed_plan
from kernel_fusion.backends.cuda.tree import MAX_BLOCK_WARPS, MAX_CLUSTER, Tree, ceil_div, power_of_two, spread_row
from kernel_fusion.backends.cuda.tuned import Facts
from kernel_fusion.core.activations import IDENTITY
from kernel_fusion.core.spec import ITEMSIZE

# The bytes of x per thread. Each element needs two accumulators, so 16 elements take 32 of 128 registers. Wider
# elements may take twice as many bytes before a row needs a cluster.
_THREAD_BYTES = 32
_SHORT_ROW_BYTES = 512  # up to here a thread takes one vector; direct plans take twice as many threads
_NARROW_ELEMENTS = 6  # the elements per thread of short rows in narrow vectors
_MAX_CLUSTER_SINGLES = 16  # for rows of single elements; more than is portable
_MIN_STREAMED_COLS = 256  # copies of shorter rows are too small to pay
# With stages, the most bytes of a direct row per thread of 128 registers, with sums and without. More bytes would
# spill.
_MAX_HELD_WITH_SUMS, _MAX_HELD = 224, 160
_MAX_WIDE = 28  # the most weight elements in registers; 32 spill, even with one sum
_STATIC_SHARED_BYTES = 8192  # a bound of the static shared memory, without sums


def plan_backward(facts: Facts) -> Plan:
    """The plan of a backward."""
    thread_bytes = _THREAD_BYTES if facts.row_bytes > _SHORT_ROW_BYTES else _THREAD_BYTES // 2
    if facts.itemsize > 2 and facts.row_bytes > MAX_BLOCK_WARPS * 32 * thread_bytes:
        thread_bytes *= 2
    facts = facts.of(_tree(facts, thread_bytes))
    return _streamed(facts) or _direct(facts, thread_bytes)


def _tree(facts: Facts, thread_bytes: int) -> Tree:
    cols, most_filled = facts.spec.cols, facts.tuned("fills_block", 0)

    def fills_block(warps: int, elements: int) -> bool:
        """Whether groups of `warps` warps fill a block and leave registers for `elements` per thread."""
        fits = elements <= most_filled or warps == 1 or cols % (warps * 32 * elements) > 0
        return most_filled > 0 and MAX_BLOCK_WARPS % warps == 0 and fits

    max_cluster = facts.tuned("max_cluster", MAX_CLUSTER)
    spread = partial(spread_row, facts.spec, facts.device, thread_bytes, thread_bytes + 16, fills_block, max_cluster)
    tree = _narrow_tree(facts) or spread()
    return tree.narrowed(cols, (facts.spec.y,)) if facts.of(tree).tuned("dy_in_16_bytes", False) else tree


def _narrow_tree(facts: Facts) -> Tree | None:
    """A tree of narrow vectors on few lanes, or of single elements on few warps, if rows gain by it, else None."""
    cols, vec = facts.spec.cols, facts.vec
    if vec * facts.itemsize <= 4 and cols <= 32 * _NARROW_ELEMENTS:
        lanes = power_of_two(ceil_div(cols // vec, _NARROW_ELEMENTS // vec))
        return Tree(vec, lanes, 1, 1, ceil_div(cols // vec, lanes))
    most = facts.tuned("singles", 0)
    if vec > 1 or not most or facts.row_bytes <= _SHORT_ROW_BYTES:
        return None
    slots = ceil_div(cols, 32)
    warps = power_of_two(ceil_div(slots, most))
    cluster = ceil_div(warps, MAX_BLOCK_WARPS)
    return Tree(1, 32, warps, cluster, ceil_div(slots, warps)) if cluster <= _MAX_CLUSTER_SINGLES else None


def _streamed(facts: Facts) -> Plan | None:
    """The plan of the first arrangement that has room for its slots, or None."""
    spec, access, tree = facts.spec, facts.access, facts.tree
    short = spec.cols < _MIN_STREAMED_COLS or facts.row_bytes <= _SHORT_ROW_BYTES or tree.lanes < 32
    too_long = tree.elements > facts.tuned("streamed_elements", 24)
    if not facts.device.has_clusters or spec.acc != "f32" or short or too_long or spec.one_row or spec.passes != "both":
        return None
    # Vectors that are loaded in pieces take more registers, and so do most stages.
    widest = tree.vec * max(facts.itemsize, ITEMSIZE[spec.y])
    whole = access.x >= tree.vec * facts.itemsize and access.y >= min(16, widest)
    facts = facts.also(widest=widest, roomy=whole and facts.tuned("roomy", not spec.has_stages))
    for spread, groups, least in _arrangements(facts, _groups(facts)):
        plan = _by_groups(facts.of(spread), groups)
        if plan is not None and plan.ring.slots >= least:
            own_loop = plan.ring.slots > 2 and plan.cluster == 1  # the loop for few rows needs these
            return replace(plan, variant=facts.of(spread).tuned("streamed_variant", "") if own_loop else "")
    return None


def _groups(facts: Facts) -> int:
    """How many rows a block takes at a time, so that 16 warps have work."""
    most, warps, cluster = facts.tuned("warps", 0), facts.tree.block_warps, facts.tree.cluster
    alone = 1 if cluster > 1 else max(1, MAX_BLOCK_WARPS // warps)
    filled = max(1, (MAX_BLOCK_WARPS if MAX_BLOCK_WARPS % warps == 0 else most) // warps)
    return int(facts.tuned("groups", filled if most else alone))


def _arrangements(facts: Facts, groups: int) -> Iterator[tuple[Tree, int, int]]:
    """Trees, rows at a time and wanted slots, the best first: then fewer rows, then larger clusters.

    Only stages, whose slots are larger, need the last ones. A cluster takes several rows only if it has a third slot.
    """
    tree, stages = facts.tree, facts.spec.has_stages
    yield tree, groups, 3 if tree.cluster > 1 and groups > 1 else 2
    if stages:
        yield from ((tree, fewer, 4) for fewer in range(groups - 1, 1, -1))
    if groups > 1 and (stages or tree.cluster > 1):
        yield tree, 1, 2
    while stages and 2 * tree.cluster <= MAX_CLUSTER and tree.warps % (2 * tree.cluster) == 0:
        tree = replace(tree, cluster=2 * tree.cluster)
        if (tree.cluster - 1) * tree.block_warps * 32 * tree.elements >= facts.spec.cols:
            return  # some block would have no columns
        yield tree, 1, 2


def _by_groups(facts: Facts, groups: int) -> Plan | None:
    """A plan with `groups` rows at a time, with the weight in shared memory if it fits there, or None."""
    weight, tree = facts.spec.weight, facts.tree
    facts = facts.also(team=groups * tree.block_warps)
    plan = partial(streamed_plan, facts, Ring(facts.tuned("slots", 4), pace=pace_of(facts, keeps=True)), groups)
    if weight is not None and (tree.elements <= 8 or _has_registers(facts)):
        return plan(keeps=facts.tuned("keeps", "weight"))
    if weight is None or (tree.vec == 1 and tree.cluster == 1):
        return plan()  # the L1 cache holds a short weight beside the rows
    # All of the weight is kept, or at least half, so that a third slot fits.
    for unkept in range(tree.vectors // 2 + 1):
        kept_bytes = (tree.vectors - unkept) * tree.vec * 32 * tree.block_warps * ITEMSIZE[weight]
        shared = plan(kept_bytes, keeps="shared", unkept=unkept)
        if (shared is not None and shared.ring.slots > 2) or weight == "f32":
            return shared  # otherwise every row would read fp32 parameters again
    return plan()


def _has_registers(facts: Facts) -> bool:
    spec, tree, threads = facts.spec, facts.tree, 32 * facts.known["team"]
    if not facts.tuned("counts_registers", False):
        return facts.known["roomy"] and tree.elements <= 16 and tree.vec > 1 and threads <= MAX_BLOCK_WARPS * 32
    registers = 168 if threads <= 384 else 128 if threads <= MAX_BLOCK_WARPS * 32 else 96
    vectors = 2 * tree.vec * max(1, ITEMSIZE[spec.y] // facts.itemsize)  # the elements that are in registers at a time
    needed = tree.elements * (1 + sum(spec.grads[1:])) + vectors + 48
    return facts.known["roomy"] and tree.elements <= _MAX_WIDE and needed <= registers


def _direct(facts: Facts, planned_bytes: int) -> Plan:
    """A plan that holds rows in registers or, if there is no room, reads them twice."""
    spec, tree, itemsize, acc = facts.spec, facts.tree, facts.itemsize, ITEMSIZE[facts.spec.acc]
    wants_sums = any(spec.column_sums) and not spec.one_row
    no_sums = "stored" if spec.one_row and any(spec.column_sums) else "none"
    elements, thread_bytes = tree.elements, tree.elements * itemsize
    sums_bytes = elements * (3 if spec.dgate else 2) * acc
    facts = facts.also(singles=tree.vec * itemsize == 2)
    # A block of 512 threads has 128 registers for each: for a row, the next row and both sums.
    threads = facts.tuned("threads", 512)
    plan = direct_plan("row_norm_bwd", tree)
    plan = replace(plan, min_blocks=max(1, threads // plan.threads))
    # The gate is a factor, and its gradient is wanted.
    beside = 2 * ITEMSIZE[spec.beside] if spec.beside else 0
    beside += ITEMSIZE[spec.x] if spec.dgate else 0
    held = elements * (ITEMSIZE[spec.row] * (2 if spec.dh else 1) + ITEMSIZE[spec.y] + beside)
    scarce = spec.has_stages or ITEMSIZE[spec.y] > itemsize
    fits = not scarce or held + (sums_bytes if wants_sums else 0) <= _MAX_HELD_WITH_SUMS
    # The block adds its sums up in shared memory.
    if thread_bytes <= planned_bytes + 16 and (fits or tree.warps == 1):
        table = plan.per_block * spec.cols * acc if wants_sums and plan.per_block > 1 else 0
        # Single elements take a register each.
        loads_few = elements * max(itemsize, ITEMSIZE[spec.y], 4 if tree.vec == 1 else 0) <= _THREAD_BYTES
        spills = spec.has_stages or (spec.acc == "f64" and tree.cluster > 2)
        next_row = threads <= 512 and not spills and not spec.one_row and loads_few
        keeps = "weight" if elements <= 8 and spec.acc == "f32" else "nothing"
        sums = "registers" if wants_sums else no_sums
        return replace(plan, sums=sums, variant="next" if next_row else "", shared_bytes=table, keeps=keeps)
    # Sums move to shared memory if they fit there. Without them, registers hold twice as many elements.
    # An activation of x needs registers of two elements.
    most = 24 if spec.pre_activation == IDENTITY else 22
    resident = thread_bytes <= 2 * planned_bytes and elements <= facts.tuned("held_elements", most)
    resident = resident and tree.cluster <= MAX_CLUSTER and (held <= _MAX_HELD or not spec.has_stages)
    plan = replace(plan, variant="" if resident else "again")
    shared = plan.threads * sums_bytes
    if wants_sums and resident and shared <= facts.device.shared_bytes - _STATIC_SHARED_BYTES:
        return replace(plan, sums="shared", shared_bytes=shared)
    return replace(plan, sums="apart" if wants_sums else no_sums)
