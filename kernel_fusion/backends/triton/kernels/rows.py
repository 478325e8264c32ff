"""Places of rows, the type that a kernel computes in, and programmatic dependent launch.

A chained kernel starts while the one before it runs, and waits for all earlier launches before it touches memory.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def wait_for_previous_kernel(CHAINED: tl.constexpr):
    """Before memory is touched, if the kernel is chained."""
    if CHAINED:  # pragma: gpu
        tl.extra.cuda.gdc_wait()


@triton.jit
def let_next_kernel_start(RELEASES: tl.constexpr):
    """Once every program is here or ended, a chained next kernel may start."""
    if RELEASES:  # pragma: gpu
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def scalar(argument, DTYPE: tl.constexpr):
    """PyTorch 2.11 traces a 1 as a plain number."""
    return tl.full([], argument, DTYPE)


@triton.jit
def row_offset(row, extents, strides, UNIT: tl.constexpr, FLAT: tl.constexpr):
    """The offset of row number `row` (int64) of a tensor whose rows are indexed (outer, middle, inner).

    `extents` are middle and inner, `strides` all three in UNIT elements. FLAT: both extents are 1, which saves
    divisions.
    """
    if FLAT:
        return row * (strides[0] * UNIT)
    middle, inner = extents
    plane = row // inner
    outer_offset = (plane // middle) * (strides[0] * UNIT)
    return outer_offset + (plane % middle) * (strides[1] * UNIT) + (row % inner) * (strides[2] * UNIT)


@triton.jit
def place(per_group, C: tl.constexpr, REVERSED: tl.constexpr = False):
    """This program's number in its group of rows, the group, and their number.

    Axis 0 of the grid has `per_group` programs for each.
    """
    number = tl.program_id(0)
    if REVERSED:
        number = tl.num_programs(0) - 1 - number
    group = tl.full([], 0, tl.int64)
    groups = tl.full([], 1, tl.int64)
    if C.grouped:
        group = (number // per_group).to(tl.int64)
        groups = (tl.num_programs(0) // per_group).to(tl.int64)
        number = number % per_group
    return number, group, groups


@triton.jit
def part_of(number, num_cols, C: tl.constexpr):
    """The samples of a program that has some blocks of columns, and the first of these.

    C.looped: other programs have other columns of these rows.
    """
    ROWS: tl.constexpr = C.rows
    start = tl.full([], 0, tl.int32)
    if C.looped:
        blocks = tl.cdiv(num_cols, C.block)
        start = number % blocks * C.block
        number = number // blocks
    return number.to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None], start


@triton.jit
def row_of(sample, group, steps, C: tl.constexpr):
    """The row of a sample in a group; `steps` lead to the next sample and group."""
    if C.grouped:
        sample = sample * steps[0] + group * steps[1]
    return sample


@triton.jit
def of_all(count, groups, C: tl.constexpr):
    """How many all groups have, if each has `count`."""
    if C.grouped:
        count = count * groups
    return count


@triton.jit
def of_group(ptr, group, pitch, C: tl.constexpr):
    """The first of a group's columns, `pitch` elements apart."""
    if C.grouped:
        ptr += group * pitch
    return ptr


@triton.jit
def within(col, num_cols, EXACT: tl.constexpr):
    """Which columns exist. EXACT: all do, and the compiler drops the masks."""
    if EXACT:
        return tl.full(col.shape, True, tl.int1)
    return col < num_cols


@triton.jit
def shifted(weight, OFFSET: tl.constexpr):
    """`weight` + OFFSET; the compiler could not drop an addition of zero, because of -0."""
    if OFFSET == 0.0:
        return weight
    return weight + OFFSET


@triton.jit
def load(ptr, offset, mask, WIDE: tl.constexpr, LAST: tl.constexpr = False):
    """A tile, widened to float64 if WIDE, else to float32. Zero where masked.

    LAST: the second of two readings, which pushes nothing out of the L2 cache. Not a single one: after a kernel that
    filled the cache, it would find little room.
    """
    policy: tl.constexpr = "evict_first" if LAST else ""
    if mask is None:
        values = tl.load(ptr + offset, eviction_policy=policy)
    else:
        values = tl.load(ptr + offset, mask=mask, other=0.0, eviction_policy=policy)
    if WIDE:
        return values.to(tl.float64)
    else:
        return values.to(tl.float32)


@triton.jit
def store(ptr, offset, values, mask, LAST: tl.constexpr = False):
    """A tile, rounded to the tensor's type."""
    policy: tl.constexpr = "evict_first" if LAST else ""
    tl.store(ptr + offset, values.to(ptr.dtype.element_ty), mask=mask, eviction_policy=policy)


@triton.jit
def store_sums(ptr, row, num_rows, num_cols, row_mask, sums, C: tl.constexpr):
    """Two sums of each row, for RMSNorm one, over a rank's columns; and how many those are, once.

    In float64, and by kinds: the first sum of all rows, then the second, then the number of columns.
    """
    store(ptr, row, sums[0], row_mask)
    if not C.rms:
        store(ptr, num_rows + row, sums[1], row_mask)
    if tl.program_id(0) == 0:
        tl.store(ptr + (1 if C.rms else 2) * num_rows, scalar(num_cols, tl.float64))


@triton.jit
def means_over_ranks(ptr, row, num_rows, row_mask, C: tl.constexpr):
    """The sums of `store_sums`, added up over all ranks, divided by the number of all columns."""
    first = load(ptr, row, row_mask, True)
    second = tl.zeros_like(first)
    if not C.rms:
        second = load(ptr, num_rows + row, row_mask, True)
    each = 1.0 / tl.load(ptr + (1 if C.rms else 2) * num_rows)  # last: it branches
    return first * each, second * each
