"""Sums of a function of the elements: out[o][i] = factor * sum over r of map(in[o][r][i]).

In `reduce_rows`, for innermost dimensions, a program has ROWS rows and one section of each; in `reduce_columns` a block
of columns and a section of the rows. The length alone decides how many sections there are; a second launch adds their
sums.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernel_fusion.backends.triton.kernels.constants import kernel
from kernel_fusion.backends.triton.kernels.elementary import divide
from kernel_fusion.backends.triton.kernels.rows import (
    let_next_kernel_start,
    load,
    scalar,
    store,
    wait_for_previous_kernel,
)


@triton.jit
def _map(x, C: tl.constexpr):
    if C.map == "square":
        return x * x
    elif C.map == "abs":
        return tl.abs(x)
    else:
        return x


@triton.jit
def _finish(total, count, C: tl.constexpr):
    """`total`, or the mean of `count` elements."""
    if C.mean:
        return divide(total, scalar(count, total.dtype))
    else:
        return total


@kernel()
def reduce_rows(in_ptr, out_ptr, num_rows, length, section, stride, count, C: tl.constexpr):
    """out[row][s], the sum over section s (axis 1 of the grid), a multiple of BLOCK long."""
    ROWS: tl.constexpr = C.rows
    BLOCK: tl.constexpr = C.block
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    row_mask = row < num_rows
    first = tl.program_id(1).to(tl.int64) * section
    end = tl.minimum(first + section, length)
    col = tl.arange(0, BLOCK)[None, :]
    total = tl.zeros([ROWS, BLOCK], C.acc)
    for start in range(first, end, BLOCK):
        at = start + col
        total += _map(load(in_ptr, row * stride + at, row_mask & (at < end), C.wide), C)
    sums = _finish(tl.sum(total, axis=1)[:, None], count, C)
    store(out_ptr, row * tl.num_programs(1) + tl.program_id(1), sums, row_mask)


@kernel()
def reduce_columns(in_ptr, out_ptr, length, section, num_cols, outer_stride, stride, count, C: tl.constexpr):
    """out[o][s][col]; the grid is (blocks of columns times o, s)."""
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
    """Adds the partial rows of a block of columns, in order, and rounds once.

    C.pair: of two sums; axis 1 of the grid says which. A constant, because Inductor must know which tensors are
    written.
    """
    ROWS: tl.constexpr = C.rows
    BLOCK: tl.constexpr = C.block
    wait_for_previous_kernel(C.chained)
    let_next_kernel_start(C.chained)
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
