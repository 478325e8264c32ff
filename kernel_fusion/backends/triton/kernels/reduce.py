"""Sums and means of a function of the elements: out[o][i] is the sum of map(in[o][r][i]) over r, perhaps divided.

`reduce_rows` serves innermost dimensions: a program has C.rows rows and one section of each. In `reduce_columns` a
program has a block of columns and one section of the rows. How many sections there are depends on the length alone, and
a second launch adds their sums.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernel_fusion.backends.triton.kernels.constants import kernel
from kernel_fusion.backends.triton.kernels.elementary import divide
from kernel_fusion.backends.triton.kernels.rows import load, scalar, store, tile_of_rows


@triton.jit
def _map(x, C: tl.constexpr):
    """The function of the elements of a tile."""
    if C.map == "square":
        return x * x
    elif C.map == "abs":
        return tl.abs(x)
    else:
        return x


@triton.jit
def _finish(total, count, C: tl.constexpr):
    """`total`, or with C.mean the mean of `count` elements."""
    if C.mean:
        return divide(total, scalar(count, total.dtype))
    else:
        return total


@kernel()
def reduce_rows(in_ptr, out_ptr, num_rows, length, section, stride, count, C: tl.constexpr):
    """Write out[row][s], the sum of section s of a row.

    Axis 0 of the grid has the tiles of rows and axis 1 the sections, each `section` elements long, a multiple of
    C.block. `length` is that of a row, and rows are `stride` elements apart.
    """
    ROWS: tl.constexpr = C.rows
    BLOCK: tl.constexpr = C.block
    row, row_mask, col = tile_of_rows(num_rows, C)
    first = tl.program_id(1).to(tl.int64) * section
    end = tl.minimum(first + section, length)
    total = tl.zeros([ROWS, BLOCK], C.acc)
    for start in range(first, end, BLOCK):
        at = start + col
        total += _map(load(in_ptr, row * stride + at, row_mask & (at < end), C.wide), C)
    sums = _finish(tl.sum(total, axis=1)[:, None], count, C)
    store(out_ptr, row * tl.num_programs(1) + tl.program_id(1), sums, row_mask)


@kernel()
def reduce_columns(in_ptr, out_ptr, length, section, num_cols, outer_stride, stride, count, C: tl.constexpr):
    """Write out[o][s][col], the sum of section s of the rows of matrix o.

    Axis 0 of the grid has the blocks of columns of all matrices and axis 1 the sections, each `section` rows long.
    Matrices are `outer_stride` elements apart and their rows `stride`.
    """
    ROWS: tl.constexpr = C.rows
    BLOCK: tl.constexpr = C.block
    tiles = tl.cdiv(num_cols, BLOCK)
    program = tl.program_id(0).to(tl.int64)
    outer = program // tiles
    col = (program % tiles) * BLOCK + tl.arange(0, BLOCK)[None, :]
    first = tl.program_id(1).to(tl.int64) * section
    end = tl.minimum(first + section, length)
    total = tl.zeros([ROWS, BLOCK], C.acc)
    for start in range(first, end, ROWS):
        row = start + tl.arange(0, ROWS)[:, None]
        mask = (row < end) & (col < num_cols)
        total += _map(load(in_ptr, outer * outer_stride + row * stride + col, mask, C.wide), C)
    sums = _finish(tl.sum(total, axis=0)[None, :], count, C)
    out_row = outer * tl.num_programs(1) + tl.program_id(1)
    store(out_ptr, out_row * num_cols + col, sums, col < num_cols)


@kernel("num_cols")
def sum_partials(partials_ptr, first_ptr, second_ptr, num_partials, num_cols, C: tl.constexpr):
    """Add up the partial rows of a block of columns, in order, and round once.

    With C.pair there are the partial rows of two sums, and axis 1 of the grid says which sum is meant. That is a
    constant, because Inductor must know which tensors are written.
    """
    ROWS: tl.constexpr = C.rows
    BLOCK: tl.constexpr = C.block
    which = tl.program_id(1)
    block = tl.program_id(0)
    if C.many:
        block = block.to(tl.int64)
    col = block * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([ROWS, BLOCK], C.acc)
    for start in range(0, num_partials, ROWS):
        partial = start + tl.arange(0, ROWS)[:, None]
        if C.many:
            partial = partial.to(tl.int64)
        mask = (partial < num_partials) & (col < num_cols)[None, :]
        total += load(partials_ptr, (which * num_partials + partial) * num_cols + col[None, :], mask, C.wide)
    sums = tl.sum(total, axis=0)
    if C.pair:
        if which == 0:
            store(first_ptr, col, sums, col < num_cols)
        else:
            store(second_ptr, col, sums, col < num_cols)
    else:
        store(first_ptr, col, sums, col < num_cols)
