"""Softmax over rows, y = softmax(scale * x + mask), and its backward, dx = scale * (dy - sum(dy y)) y.

A program has ROWS whole rows, each in one block of columns. Rows longer than the block (LOOPED) are read twice: a
running maximum and the sum of exponentials relative to it (Milakov, Gimelshein 2018), then the quotients. What the mask
leaves out, or what is beyond the diagonal, is not read and is zero, also in a row with NaN; a row of which nothing is
left is zero.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernel_fusion.backends.triton.kernels.elementary import exp
from kernel_fusion.backends.triton.kernels.rows import load, row_offset, store

LENGTHS = ["num_rows", "col_units", "matrix_rows", "middle", "inner", "x0", "x1", "x2", "m0", "m1", "m2"]


@triton.jit
def _logits(
    x_ptr,
    mask_ptr,
    x_row,
    mask_row,
    mask_step,
    diagonal,
    at,
    inside,
    SCALE: tl.constexpr,
    MASK: tl.constexpr,
    CAUSAL: tl.constexpr,
    WIDE: tl.constexpr,
):
    """scale * x + mask of a tile, -inf where left out; and what is not left out."""
    read = inside
    if CAUSAL:
        read = read & (at <= diagonal)
    if MASK == "bool":
        read = read & (tl.load(mask_ptr + mask_row + at * mask_step, mask=read, other=0) != 0)
    logits = load(x_ptr, x_row + at, read, WIDE) * SCALE
    if MASK == "additive":
        logits += load(mask_ptr, mask_row + at * mask_step, read, WIDE)
    return tl.where(read, logits, -float("inf")), read


@triton.jit
def _maximum(logits):
    """Of each row; NaN where the row has one."""
    largest = tl.max(logits, axis=1)[:, None]
    has_nan = tl.max((logits != logits).to(tl.int32), axis=1)[:, None]
    return tl.where(has_nan > 0, float("nan"), largest)


@triton.jit
def _quotients(logits, kept, largest, total, MASKED: tl.constexpr, LEAVES_OUT: tl.constexpr):
    y = exp(logits - largest) / total
    if MASKED:
        # Only a row of which nothing is left, not one that holds a NaN: that compares unequal.
        y = tl.where(largest == -float("inf"), 0.0, y)
    if LEAVES_OUT:
        y = tl.where(kept, y, 0.0)
    return y


@triton.jit(do_not_specialize=LENGTHS)
def softmax_fwd(
    x_ptr,
    mask_ptr,
    y_ptr,
    num_rows,
    col_units,
    matrix_rows,
    middle,
    inner,
    x0,
    x1,
    x2,
    m0,
    m1,
    m2,
    mask_step,
    SCALE: tl.constexpr,
    MASK: tl.constexpr,
    CAUSAL: tl.constexpr,
    WIDE: tl.constexpr,
    FLAT: tl.constexpr,
    UNIT: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    LOOPED: tl.constexpr,
):
    """y. `col_units` and the strides of x count units of UNIT elements; those of the mask count elements."""
    ACC: tl.constexpr = tl.float64 if WIDE else tl.float32
    MASKED: tl.constexpr = CAUSAL or MASK != "none"
    LEAVES_OUT: tl.constexpr = CAUSAL or MASK == "bool"
    num_cols = col_units * UNIT
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    row_mask = row < num_rows
    col = tl.arange(0, BLOCK)[None, :]
    x_row = row_offset(row, middle, inner, x0 * UNIT, x1 * UNIT, x2 * UNIT, FLAT)
    mask_row = row_offset(row, middle, inner, m0, m1, m2, FLAT)
    diagonal = row % matrix_rows
    if LOOPED:
        largest = tl.full([ROWS, 1], -float("inf"), ACC)
        total = tl.zeros([ROWS, 1], ACC)
        for start in range(0, num_cols, BLOCK):
            at = start + col
            logits, _ = _logits(
                x_ptr, mask_ptr, x_row, mask_row, mask_step, diagonal, at, row_mask & (at < num_cols),
                SCALE, MASK, CAUSAL, WIDE,
            )  # fmt: skip
            found = _maximum(logits)
            # A NaN stays: it compares false with everything.
            larger = tl.where((found <= largest) | (largest != largest), largest, found)
            # Nothing but -inf so far: exp(-inf - -inf) would be NaN.
            shift = tl.where(larger == -float("inf"), 0.0, larger)
            total = total * exp(largest - shift) + tl.sum(exp(logits - shift), axis=1)[:, None]
            largest = larger
        for start in range(0, num_cols, BLOCK):
            at = start + col
            inside = row_mask & (at < num_cols)
            logits, kept = _logits(
                x_ptr, mask_ptr, x_row, mask_row, mask_step, diagonal, at, inside, SCALE, MASK, CAUSAL, WIDE
            )
            y = _quotients(logits, kept, largest, total, MASKED, LEAVES_OUT)
            store(y_ptr, row * num_cols + at, y, inside)
    else:
        inside = row_mask & (col < num_cols)
        logits, kept = _logits(
            x_ptr, mask_ptr, x_row, mask_row, mask_step, diagonal, col, inside, SCALE, MASK, CAUSAL, WIDE
        )
        largest = _maximum(logits)
        total = tl.sum(tl.where(inside, exp(logits - largest), 0.0), axis=1)[:, None]
        y = _quotients(logits, kept, largest, total, MASKED, LEAVES_OUT)
        store(y_ptr, row * num_cols + col, y, inside)


@triton.jit
def _gradient(dy, y, total, SCALE: tl.constexpr, LEAVES_OUT: tl.constexpr):
    dx = (dy - total) * y * SCALE
    if LEAVES_OUT:
        dx = tl.where(y == 0, 0.0, dx)
    return dx


@triton.jit(do_not_specialize=["num_rows", "col_units"])
def softmax_bwd(
    dy_ptr,
    y_ptr,
    dx_ptr,
    num_rows,
    col_units,
    SCALE: tl.constexpr,
    LEAVES_OUT: tl.constexpr,
    WIDE: tl.constexpr,
    UNIT: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    LOOPED: tl.constexpr,
):
    """dx, of contiguous dy and y; with LEAVES_OUT 0 where y is."""
    num_cols = col_units * UNIT
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    row_mask = row < num_rows
    col = tl.arange(0, BLOCK)[None, :]
    at_row = row * num_cols
    if LOOPED:
        sums = tl.zeros([ROWS, BLOCK], tl.float64 if WIDE else tl.float32)
        for start in range(0, num_cols, BLOCK):
            at = start + col
            mask = row_mask & (at < num_cols)
            sums += load(dy_ptr, at_row + at, mask, WIDE) * load(y_ptr, at_row + at, mask, WIDE)
        total = tl.sum(sums, axis=1)[:, None]
        for start in range(0, num_cols, BLOCK):
            at = start + col
            mask = row_mask & (at < num_cols)
            y = load(y_ptr, at_row + at, mask, WIDE)
            dy = load(dy_ptr, at_row + at, mask, WIDE)
            store(dx_ptr, at_row + at, _gradient(dy, y, total, SCALE, LEAVES_OUT), mask)
    else:
        mask = row_mask & (col < num_cols)
        dy = load(dy_ptr, at_row + col, mask, WIDE)
        y = load(y_ptr, at_row + col, mask, WIDE)
        total = tl.sum(dy * y, axis=1)[:, None]
        store(dx_ptr, at_row + col, _gradient(dy, y, total, SCALE, LEAVES_OUT), mask)
