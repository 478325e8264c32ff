"""Pointwise chains, y = dropout(scale * f(a, b)), and their gradients.

y is dense, and kernels walk through its memory in rows of `num_cols` elements. Operands have up to three outer strides,
and a column stride, which is 0 if they are broadcast. If the operands lie like y (C.flat), all of it is one long row,
whose full tiles need no mask. Bytes for each element: a and b in, y out; in backward dy, a and b in, da and db out.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernel_fusion.backends.triton.kernels.activations import times_slope, value
from kernel_fusion.backends.triton.kernels.constants import kernel
from kernel_fusion.backends.triton.kernels.dropout import kept
from kernel_fusion.backends.triton.kernels.rows import load, row_offset, scalar, store


@triton.jit
def _chain(a, b, C: tl.constexpr):
    """f(a, b) of a tile. A chain of one operand ("first") ignores `b`."""
    if C.combine == "first":
        y = value(a, C.activation)
    elif C.combine == "add":
        y = value(a + b, C.activation)
    elif C.combine == "mul":
        y = value(a * b, C.activation)
    else:
        y = value(a, C.activation) * b
    return y


@triton.jit
def _derive(g, a, b, C: tl.constexpr):
    """The gradients of a and b of a tile, from the gradient `g` of f."""
    if C.combine == "first":
        da = times_slope(g, a, C.activation)
        db = da
    elif C.combine == "add":
        da = times_slope(g, a + b, C.activation)
        db = da
    elif C.combine == "mul":
        inner = times_slope(g, a * b, C.activation)
        da = inner * b
        db = inner * a
    else:
        da = times_slope(g * b, a, C.activation)
        db = g * value(a, C.activation)
    return da, db


@triton.jit
def _operands(pointers, offsets, mask, C: tl.constexpr):
    """a and b of a tile, or a twice for a chain of one operand.

    `pointers`, here and below, begin with those of dy, a, b and the seed. `offsets` are those of the tile in a and b.
    """
    a = load(pointers[1], offsets[0], mask, C.wide)
    if C.combine == "first":
        b = a
    else:
        b = load(pointers[2], offsets[1], mask, C.wide)
    return a, b


@triton.jit
def _kept(v, seed_ptr, y_row, C: tl.constexpr):
    """The elements `v` of a tile times C.scale, or 0 if dropout drops them. `y_row` are the positions of column 0."""
    if C.scale != 1.0:
        v = v * C.scale
    if C.threshold > 0:
        v = tl.where(kept(seed_ptr, y_row, C.threshold, C.aligned, C.block), v, 0.0)
    return v


@triton.jit
def _gradients(pointers, offsets, y_row, col, mask, C: tl.constexpr):
    """The gradients of a and b of a tile, in the type that the kernel computes in.

    `y_row` are the tile's positions of column 0 in y and dy, and `col` are its columns.
    """
    g = _kept(load(pointers[0], y_row + col, mask, C.wide), pointers[3], y_row, C)
    a, b = _operands(pointers, offsets, mask, C)
    return _derive(g, a, b, C)


@triton.jit
def _tile(pointers, offsets, y_row, col, mask, C: tl.constexpr):
    """Write y of a tile, or with C.backward da and db. Behind the seed's, `pointers` has those of the two results."""
    if C.backward:
        da, db = _gradients(pointers, offsets, y_row, col, mask, C)
        if C.da:
            store(pointers[4], y_row + col, da, mask)
        if C.db:
            store(pointers[5], y_row + col, db, mask)
    else:
        a, b = _operands(pointers, offsets, mask, C)
        store(pointers[4], y_row + col, _kept(_chain(a, b, C), pointers[3], y_row, C), mask)


# fmt: off
@kernel("a_step", "b_step")
def pointwise(
    dy_ptr, a_ptr, b_ptr, seed_ptr, first_ptr, second_ptr,
    num_rows, col_units, middle, inner, a0, a1, a2, b0, b1, b2, a_step, b_step, C: tl.constexpr,
):
    # fmt: on
    """Write y to the first result; or with C.backward da and db to both, laid out like y and dy.

    `a_step` and `b_step` are the strides of the operands' columns, in elements.
    """
    ROWS: tl.constexpr = C.rows
    BLOCK: tl.constexpr = C.block
    num_cols = scalar(col_units, tl.int64) * C.unit
    tiles = tl.cdiv(num_cols, BLOCK)
    program = tl.program_id(0).to(tl.int64)
    start = (program % tiles) * BLOCK
    col = tl.arange(0, BLOCK)[None, :]
    at = start + col
    pointers = (dy_ptr, a_ptr, b_ptr, seed_ptr, first_ptr, second_ptr)
    if C.flat:
        # Every tile begins with a block of random bits, and only the last one needs a mask.
        if start + BLOCK <= num_cols:
            _tile(pointers, (at, at), start + tl.zeros([1, 1], tl.int64), col, None, C)
        else:
            _tile(pointers, (at, at), start + tl.zeros([1, 1], tl.int64), col, at < num_cols, C)
    else:
        row = (program // tiles) * ROWS + tl.arange(0, ROWS)[:, None]
        a_offset = row_offset(row, (middle, inner), (a0, a1, a2), C.unit, C.simple) + at * a_step
        b_offset = row_offset(row, (middle, inner), (b0, b1, b2), C.unit, C.simple) + at * b_step
        y_row = row * num_cols + start
        _tile(pointers, (a_offset, b_offset), y_row, col, (row < num_rows) & (at < num_cols), C)


@kernel()
def pointwise_bwd_columns(dy_ptr, a_ptr, b_ptr, seed_ptr, da_ptr, partials_ptr, num_rows, col_units, C: tl.constexpr):
    """Write da, and partial sums of the row db. A program has a block of columns and some tiles of rows."""
    ROWS: tl.constexpr = C.rows
    BLOCK: tl.constexpr = C.block
    num_cols = col_units * C.unit
    start = tl.program_id(0) * BLOCK
    program = tl.program_id(1).to(tl.int64)
    col = tl.arange(0, BLOCK)[None, :]
    at = start + col
    total = tl.zeros([ROWS, BLOCK], C.acc)
    for tile in range(program, tl.cdiv(num_rows, ROWS), tl.num_programs(1)):
        row = tile * ROWS + tl.arange(0, ROWS)[:, None].to(tl.int64)
        mask = (row < num_rows) & (at < num_cols)
        y_row = row * num_cols + start
        da, db = _gradients((dy_ptr, a_ptr, b_ptr, seed_ptr), (y_row + col, at), y_row, col, mask, C)
        if C.da:
            store(da_ptr, y_row + col, da, mask)
        total += tl.where(mask, db, 0.0)
    last = start + tl.arange(0, BLOCK)
    tl.store(partials_ptr + program * num_cols + last, tl.sum(total, axis=0), mask=last < num_cols)
