"""Pointwise chains, y = dropout(scale * f(a, b)), and their gradients.

y is dense, and the kernels walk through its memory: in rows of `num_cols` elements, of which the operands have the
offsets of up to three outer strides and a column stride (0 where broadcast). A tensor without structure (FLAT) is one
long row, whose full tiles are not masked, so that they are loaded in vectors whatever its length. The element at offset
i of y is number i of dropout. Bytes per element: a and b in, y out; backward dy, a and b in, da and db out.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernel_fusion.backends.triton.kernels.activations import times_slope, value
from kernel_fusion.backends.triton.kernels.dropout import kept
from kernel_fusion.backends.triton.kernels.rows import load, row_offset, scalar, store

# What may differ between calls of one compiled kernel. What they are divisible by is UNIT.
LENGTHS = ["num_rows", "col_units", "middle", "inner", "a0", "a1", "a2", "b0", "b1", "b2"]


@triton.jit
def _chain(a, b, COMBINE: tl.constexpr, ACTIVATION: tl.constexpr):
    """f(a, b); `b` is not looked at for "first"."""
    if COMBINE == "first":
        y = value(a, ACTIVATION)
    elif COMBINE == "add":
        y = value(a + b, ACTIVATION)
    elif COMBINE == "mul":
        y = value(a * b, ACTIVATION)
    else:
        y = value(a, ACTIVATION) * b
    return y


@triton.jit
def _derive(g, a, b, COMBINE: tl.constexpr, ACTIVATION: tl.constexpr):
    """Of g, the gradient of f: those of a and b."""
    if COMBINE == "first":
        da = times_slope(g, a, ACTIVATION)
        db = da
    elif COMBINE == "add":
        da = times_slope(g, a + b, ACTIVATION)
        db = da
    elif COMBINE == "mul":
        inner = times_slope(g, a * b, ACTIVATION)
        da = inner * b
        db = inner * a
    else:
        da = times_slope(g * b, a, ACTIVATION)
        db = g * value(a, ACTIVATION)
    return da, db


@triton.jit
def _forward_tile(
    a_ptr,
    b_ptr,
    seed_ptr,
    y_ptr,
    a_offset,
    b_offset,
    y_row,
    col,
    mask,
    COMBINE: tl.constexpr,
    ACTIVATION: tl.constexpr,
    SCALE: tl.constexpr,
    THRESHOLD: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDE: tl.constexpr,
):
    a = load(a_ptr, a_offset, mask, WIDE)
    if COMBINE == "first":
        b = a
    else:
        b = load(b_ptr, b_offset, mask, WIDE)
    y = _chain(a, b, COMBINE, ACTIVATION)
    if SCALE != 1.0:
        y = y * SCALE
    if THRESHOLD > 0:
        y = tl.where(kept(seed_ptr, y_row, THRESHOLD, ALIGNED, BLOCK), y, 0.0)
    store(y_ptr, y_row + col, y, mask)


@triton.jit(do_not_specialize=LENGTHS)
def pointwise_fwd(
    a_ptr,
    b_ptr,
    seed_ptr,
    y_ptr,
    num_rows,
    col_units,
    middle,
    inner,
    a0,
    a1,
    a2,
    a_step,
    b0,
    b1,
    b2,
    b_step,
    COMBINE: tl.constexpr,
    ACTIVATION: tl.constexpr,
    SCALE: tl.constexpr,
    THRESHOLD: tl.constexpr,
    WIDE: tl.constexpr,
    FLAT: tl.constexpr,
    SIMPLE: tl.constexpr,
    UNIT: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """y. Lengths and outer strides count units of UNIT elements. SIMPLE: a single outer dimension."""
    num_cols = scalar(col_units, tl.int64) * UNIT
    tiles = tl.cdiv(num_cols, BLOCK)
    program = tl.program_id(0).to(tl.int64)
    start = (program % tiles) * BLOCK
    col = tl.arange(0, BLOCK)[None, :]
    at = start + col
    if FLAT:
        # One row. Tiles begin with a block of random bits, and only the last one needs a mask.
        if start + BLOCK <= num_cols:
            _forward_tile(
                a_ptr, b_ptr, seed_ptr, y_ptr, at, at, start + tl.zeros([1, 1], tl.int64), col, None,
                COMBINE, ACTIVATION, SCALE, THRESHOLD, True, BLOCK, WIDE,
            )  # fmt: skip
        else:
            _forward_tile(
                a_ptr, b_ptr, seed_ptr, y_ptr, at, at, start + tl.zeros([1, 1], tl.int64), col, at < num_cols,
                COMBINE, ACTIVATION, SCALE, THRESHOLD, True, BLOCK, WIDE,
            )  # fmt: skip
    else:
        row = (program // tiles) * ROWS + tl.arange(0, ROWS)[:, None]
        a_offset = row_offset(row, middle, inner, a0 * UNIT, a1 * UNIT, a2 * UNIT, SIMPLE) + at * a_step
        b_offset = row_offset(row, middle, inner, b0 * UNIT, b1 * UNIT, b2 * UNIT, SIMPLE) + at * b_step
        _forward_tile(
            a_ptr, b_ptr, seed_ptr, y_ptr, a_offset, b_offset, row * num_cols + start, col,
            (row < num_rows) & (at < num_cols),
            COMBINE, ACTIVATION, SCALE, THRESHOLD, UNIT % 8 == 0, BLOCK, WIDE,
        )  # fmt: skip


@triton.jit
def _gradients(
    dy_ptr,
    a_ptr,
    b_ptr,
    seed_ptr,
    a_offset,
    b_offset,
    y_row,
    col,
    mask,
    COMBINE: tl.constexpr,
    ACTIVATION: tl.constexpr,
    SCALE: tl.constexpr,
    THRESHOLD: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDE: tl.constexpr,
):
    """The gradients of a and b of a tile, in the type that is computed in."""
    g = load(dy_ptr, y_row + col, mask, WIDE)
    if SCALE != 1.0:
        g = g * SCALE
    if THRESHOLD > 0:
        g = tl.where(kept(seed_ptr, y_row, THRESHOLD, ALIGNED, BLOCK), g, 0.0)
    a = load(a_ptr, a_offset, mask, WIDE)
    if COMBINE == "first":
        b = a
    else:
        b = load(b_ptr, b_offset, mask, WIDE)
    return _derive(g, a, b, COMBINE, ACTIVATION)


@triton.jit
def _backward_tile(
    dy_ptr,
    a_ptr,
    b_ptr,
    seed_ptr,
    da_ptr,
    db_ptr,
    a_offset,
    b_offset,
    y_row,
    col,
    mask,
    COMBINE: tl.constexpr,
    ACTIVATION: tl.constexpr,
    SCALE: tl.constexpr,
    THRESHOLD: tl.constexpr,
    DA: tl.constexpr,
    DB: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDE: tl.constexpr,
):
    da, db = _gradients(
        dy_ptr, a_ptr, b_ptr, seed_ptr, a_offset, b_offset, y_row, col, mask,
        COMBINE, ACTIVATION, SCALE, THRESHOLD, ALIGNED, BLOCK, WIDE,
    )  # fmt: skip
    if DA:
        store(da_ptr, y_row + col, da, mask)
    if DB:
        store(db_ptr, y_row + col, db, mask)


@triton.jit(do_not_specialize=LENGTHS)
def pointwise_bwd(
    dy_ptr,
    a_ptr,
    b_ptr,
    seed_ptr,
    da_ptr,
    db_ptr,
    num_rows,
    col_units,
    middle,
    inner,
    a0,
    a1,
    a2,
    a_step,
    b0,
    b1,
    b2,
    b_step,
    COMBINE: tl.constexpr,
    ACTIVATION: tl.constexpr,
    SCALE: tl.constexpr,
    THRESHOLD: tl.constexpr,
    DA: tl.constexpr,
    DB: tl.constexpr,
    WIDE: tl.constexpr,
    FLAT: tl.constexpr,
    SIMPLE: tl.constexpr,
    UNIT: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """da and db, of the shape of y and laid out like it, as dy is."""
    num_cols = scalar(col_units, tl.int64) * UNIT
    tiles = tl.cdiv(num_cols, BLOCK)
    program = tl.program_id(0).to(tl.int64)
    start = (program % tiles) * BLOCK
    col = tl.arange(0, BLOCK)[None, :]
    at = start + col
    if FLAT:
        if start + BLOCK <= num_cols:
            _backward_tile(
                dy_ptr, a_ptr, b_ptr, seed_ptr, da_ptr, db_ptr, at, at, start + tl.zeros([1, 1], tl.int64), col, None,
                COMBINE, ACTIVATION, SCALE, THRESHOLD, DA, DB, True, BLOCK, WIDE,
            )  # fmt: skip
        else:
            _backward_tile(
                dy_ptr, a_ptr, b_ptr, seed_ptr, da_ptr, db_ptr, at, at, start + tl.zeros([1, 1], tl.int64), col,
                at < num_cols, COMBINE, ACTIVATION, SCALE, THRESHOLD, DA, DB, True, BLOCK, WIDE,
            )  # fmt: skip
    else:
        row = (program // tiles) * ROWS + tl.arange(0, ROWS)[:, None]
        a_offset = row_offset(row, middle, inner, a0 * UNIT, a1 * UNIT, a2 * UNIT, SIMPLE) + at * a_step
        b_offset = row_offset(row, middle, inner, b0 * UNIT, b1 * UNIT, b2 * UNIT, SIMPLE) + at * b_step
        _backward_tile(
            dy_ptr, a_ptr, b_ptr, seed_ptr, da_ptr, db_ptr, a_offset, b_offset, row * num_cols + start, col,
            (row < num_rows) & (at < num_cols),
            COMBINE, ACTIVATION, SCALE, THRESHOLD, DA, DB, UNIT % 8 == 0, BLOCK, WIDE,
        )  # fmt: skip


@triton.jit(do_not_specialize=["num_rows", "col_units"])
def pointwise_bwd_columns(
    dy_ptr,
    a_ptr,
    b_ptr,
    seed_ptr,
    da_ptr,
    partials_ptr,
    num_rows,
    col_units,
    COMBINE: tl.constexpr,
    ACTIVATION: tl.constexpr,
    SCALE: tl.constexpr,
    THRESHOLD: tl.constexpr,
    DA: tl.constexpr,
    WIDE: tl.constexpr,
    UNIT: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """da, and partial sums of db over rows, where b is one row: a program has a block of columns and some rows."""
    ACC: tl.constexpr = tl.float64 if WIDE else tl.float32
    num_cols = col_units * UNIT
    start = tl.program_id(0) * BLOCK
    program = tl.program_id(1).to(tl.int64)
    col = tl.arange(0, BLOCK)[None, :]
    at = start + col
    total = tl.zeros([ROWS, BLOCK], ACC)
    for tile in range(program, tl.cdiv(num_rows, ROWS), tl.num_programs(1)):
        row = tile * ROWS + tl.arange(0, ROWS)[:, None].to(tl.int64)
        mask = (row < num_rows) & (at < num_cols)
        y_row = row * num_cols + start
        da, db = _gradients(
            dy_ptr, a_ptr, b_ptr, seed_ptr, y_row + col, at, y_row, col, mask,
            COMBINE, ACTIVATION, SCALE, THRESHOLD, UNIT % 8 == 0, BLOCK, WIDE,
        )  # fmt: skip
        if DA:
            store(da_ptr, y_row + col, da, mask)
        total += tl.where(mask, db, 0.0)
    last = start + tl.arange(0, BLOCK)
    tl.store(partials_ptr + program * num_cols + last, tl.sum(total, axis=0), mask=last < num_cols)
