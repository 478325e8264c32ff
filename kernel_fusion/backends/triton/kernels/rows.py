"""The places of rows in memory, and loads and stores in the type that a kernel computes in.

A kernel that works on rows takes a tile of C.rows rows and C.block columns at a time. A norm may have *groups* of rows,
each with a weight and a bias of its own. All groups have as many rows, which are called their *samples*.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def scalar(argument, DTYPE: tl.constexpr):
    """A number that the kernel was given, as DTYPE. PyTorch 2.11 traces a 1 as a plain number."""
    return tl.full([], argument, DTYPE)


@triton.jit
def row_offset(row, extents, strides, UNIT: tl.constexpr, FLAT: tl.constexpr):
    """The offset of row number `row` (int64) in a tensor whose rows are indexed (outer, middle, inner).

    `extents` are the sizes of middle and inner. `strides` are all three, and count UNIT elements. FLAT says that both
    extents are 1, which saves divisions.
    """
    if FLAT:
        return row * (strides[0] * UNIT)
    middle, inner = extents
    plane = row // inner
    outer_offset = (plane // middle) * (strides[0] * UNIT)
    return outer_offset + (plane % middle) * (strides[1] * UNIT) + (row % inner) * (strides[2] * UNIT)


@triton.jit
def tile_of_rows(num_rows, C: tl.constexpr):
    """The numbers of a program's rows (int64, one below the other), which of them exist, and C.block columns."""
    ROWS: tl.constexpr = C.rows
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    return row, row < num_rows, tl.arange(0, C.block)[None, :]


@triton.jit
def place(per_group, C: tl.constexpr):
    """The number of this program among those of its group, the group's number, and how many groups there are.

    Axis 0 of the grid has `per_group` programs for each group.
    """
    number = tl.program_id(0)
    group = tl.full([], 0, tl.int64)
    groups = tl.full([], 1, tl.int64)
    if C.grouped:
        group = (number // per_group).to(tl.int64)
        groups = (tl.num_programs(0) // per_group).to(tl.int64)
        number = number % per_group
    return number, group, groups


@triton.jit
def row_of(sample, group, steps, C: tl.constexpr):
    """The number of the row of `sample` in `group`. `steps` are the rows from a sample, and a group, to the next."""
    if C.grouped:
        sample = sample * steps[0] + group * steps[1]
    return sample


@triton.jit
def of_all(count, groups, C: tl.constexpr):
    """The number of rows, or of columns, of all groups together, if each group has `count`."""
    if C.grouped:
        count = count * groups
    return count


@triton.jit
def of_group(ptr, group, pitch, C: tl.constexpr):
    """The pointer to the first column of a group's vector. The vectors of groups are `pitch` elements apart."""
    if C.grouped:
        ptr += group * pitch
    return ptr


@triton.jit
def within(col, num_cols, EXACT: tl.constexpr):
    """The mask of the columns that exist. EXACT says that all do, and the compiler then drops the mask."""
    if EXACT:
        return tl.full(col.shape, True, tl.int1)
    return col < num_cols


@triton.jit
def plus_offset(weight, OFFSET: tl.constexpr):
    """`weight` + OFFSET. The compiler could not drop an addition of zero, because of -0."""
    if OFFSET == 0.0:
        return weight
    return weight + OFFSET


@triton.jit
def load(ptr, offset, mask, WIDE: tl.constexpr):
    """A tile at these offsets, widened to float64 if WIDE and else to float32, and zero outside the mask."""
    if mask is None:
        values = tl.load(ptr + offset)
    else:
        values = tl.load(ptr + offset, mask=mask, other=0.0)
    if WIDE:
        return values.to(tl.float64)
    else:
        return values.to(tl.float32)


@triton.jit
def store(ptr, offset, values, mask):
    """Store a tile at these offsets, inside the mask, rounded to the tensor's type."""
    tl.store(ptr + offset, values.to(ptr.dtype.element_ty), mask=mask)
