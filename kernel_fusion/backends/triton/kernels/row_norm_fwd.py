"""LayerNorm and RMSNorm, forward, with the stages around them:

    u = dropout(pre_activation(x)), h = residual + u, y = activation(norm(h) * (offset + weight) + bias)

A program has ROWS whole rows, each in one block of columns: x is read once, and the variance is that of the deviations
from the mean, in registers. Rows longer than the block (LOOPED) are read twice: chunks of a row give a mean and a sum
of squared deviations each, which are joined in order (Chan, Golub, LeVeque 1979); the second reading normalises. h is
rounded to the residual's type before the statistics, y once. Bytes per element: x and the residual in, y and h out.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernel_fusion.backends.triton.kernels.activations import value
from kernel_fusion.backends.triton.kernels.dropout import kept
from kernel_fusion.backends.triton.kernels.elementary import divide, reciprocal_sqrt
from kernel_fusion.backends.triton.kernels.rows import load, row_offset, shifted, store, within

# What may differ between calls of one compiled kernel. What they are divisible by is UNIT.
LENGTHS = ["num_rows", "col_units", "middle", "inner", "x0", "x1", "x2", "r0", "r1", "r2"]


@triton.jit
def normalised(
    x_ptr,
    residual_ptr,
    seed_ptr,
    x_offset,
    residual_offset,
    position,
    mask,
    PRE: tl.constexpr,
    THRESHOLD: tl.constexpr,
    KEPT_SCALE: tl.constexpr,
    ALIGNED: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDE: tl.constexpr,
):
    """h of a tile, from x and the residual."""
    h = value(load(x_ptr, x_offset, mask, WIDE, ONCE=True), PRE)
    if THRESHOLD > 0:
        h = tl.where(kept(seed_ptr, position, THRESHOLD, ALIGNED, BLOCK), h * KEPT_SCALE, 0.0)
    if HAS_RESIDUAL:
        h = load(residual_ptr, residual_offset, mask, WIDE, ONCE=True) + h
        h = h.to(residual_ptr.dtype.element_ty).to(tl.float64 if WIDE else tl.float32)
    return h


@triton.jit
def _moments(h, mask, count, PRE: tl.constexpr, RMS: tl.constexpr, EXACT: tl.constexpr):
    """Of each row of a tile: the mean (zero for RMSNorm), the deviations from it and the sum of their squares.

    What is masked was read as zero, and is still zero unless there is a pre-activation.
    """
    if PRE != "identity" and not EXACT:
        h = tl.where(mask, h, 0.0)
    if RMS:
        mean = tl.zeros([h.shape[0], 1], h.dtype)
        deviation = h
    else:
        mean = divide(tl.sum(h, axis=1)[:, None], count)
        deviation = h - mean
        if not EXACT:
            deviation = tl.where(mask, deviation, 0.0)
    return mean, deviation, tl.sum(deviation * deviation, axis=1)[:, None]


@triton.jit
def _parameters(weight_ptr, bias_ptr, col, mask, HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr):
    """Weight and bias of some columns, as they are stored; of what is absent nothing is read."""
    weight = col
    bias = col
    if HAS_WEIGHT:
        weight = tl.load(weight_ptr + col, mask=mask, other=0.0)
    if HAS_BIAS:
        bias = tl.load(bias_ptr + col, mask=mask, other=0.0)
    return weight, bias


@triton.jit
def _affine(
    deviation,
    rstd,
    weight,
    bias,
    OFFSET: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr,
):
    """y of a tile."""
    y = deviation * rstd
    if HAS_WEIGHT:
        y = y * shifted(weight.to(y.dtype), OFFSET)
    if HAS_BIAS:
        y = y + bias.to(y.dtype)
    return value(y, ACTIVATION)


@triton.jit(do_not_specialize=LENGTHS)
def row_norm_fwd(
    x_ptr,
    residual_ptr,
    weight_ptr,
    bias_ptr,
    seed_ptr,
    y_ptr,
    h_ptr,
    stats_ptr,
    num_rows,
    col_units,
    middle,
    inner,
    x0,
    x1,
    x2,
    r0,
    r1,
    r2,
    EPS: tl.constexpr,
    OFFSET: tl.constexpr,
    PRE: tl.constexpr,
    ACTIVATION: tl.constexpr,
    THRESHOLD: tl.constexpr,
    KEPT_SCALE: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    RMS: tl.constexpr,
    STATS: tl.constexpr,
    WIDE: tl.constexpr,
    FLAT: tl.constexpr,
    UNIT: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    EXACT: tl.constexpr,
    LOOPED: tl.constexpr,
    EARLY: tl.constexpr,
):
    """`col_units` and the strides count units of UNIT elements: so the compiler knows what they are divisible by."""
    num_cols = col_units * UNIT
    ALIGNED: tl.constexpr = UNIT % 8 == 0
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    row_mask = row < num_rows
    col = tl.arange(0, BLOCK)[None, :]
    x_row = row_offset(row, middle, inner, x0 * UNIT, x1 * UNIT, x2 * UNIT, FLAT)
    residual_row = row_offset(row, middle, inner, r0 * UNIT, r1 * UNIT, r2 * UNIT, FLAT)
    y_row = row * num_cols
    if LOOPED:
        mean = tl.zeros([ROWS, 1], tl.float64 if WIDE else tl.float32)
        squares = tl.zeros([ROWS, 1], tl.float64 if WIDE else tl.float32)
        for start in range(0, num_cols, BLOCK):
            at = start + col
            mask = row_mask & within(at, num_cols, EXACT)
            h = normalised(
                x_ptr, residual_ptr, seed_ptr, x_row + at, residual_row + at, y_row + start, mask,
                PRE, THRESHOLD, KEPT_SCALE, ALIGNED, HAS_RESIDUAL, BLOCK, WIDE,
            )  # fmt: skip
            after = tl.minimum(start + BLOCK, num_cols)
            count = (after - start).to(h.dtype)
            share = divide(count, after.to(h.dtype))
            chunk_mean, _, chunk_squares = _moments(h, mask, count, PRE, RMS, EXACT)
            delta = chunk_mean - mean
            mean += delta * share
            squares += chunk_squares + delta * delta * ((after.to(h.dtype) - count) * share)
        rstd = reciprocal_sqrt(divide(squares, num_cols.to(squares.dtype)) + EPS)
        for start in range(0, num_cols, BLOCK):
            at = start + col
            col_mask = within(at, num_cols, EXACT)
            mask = row_mask & col_mask
            h = normalised(
                x_ptr, residual_ptr, seed_ptr, x_row + at, residual_row + at, y_row + start, mask,
                PRE, THRESHOLD, KEPT_SCALE, ALIGNED, HAS_RESIDUAL, BLOCK, WIDE,
            )  # fmt: skip
            if HAS_RESIDUAL:
                store(h_ptr, y_row + at, h, mask, ONCE=True)
            weight, bias = _parameters(weight_ptr, bias_ptr, at, col_mask, HAS_WEIGHT, HAS_BIAS)
            y = _affine(h - mean, rstd, weight, bias, OFFSET, HAS_WEIGHT, HAS_BIAS, ACTIVATION)
            store(y_ptr, y_row + at, y, mask, ONCE=True)
    else:
        col_mask = within(col, num_cols, EXACT)
        mask = row_mask & col_mask
        h = normalised(
            x_ptr, residual_ptr, seed_ptr, x_row + col, residual_row + col, y_row, mask,
            PRE, THRESHOLD, KEPT_SCALE, ALIGNED, HAS_RESIDUAL, BLOCK, WIDE,
        )  # fmt: skip
        if EARLY:
            weight, bias = _parameters(weight_ptr, bias_ptr, col, col_mask, HAS_WEIGHT, HAS_BIAS)
        if HAS_RESIDUAL:
            store(h_ptr, y_row + col, h, mask, ONCE=True)
        mean, deviation, squares = _moments(h, mask, num_cols.to(h.dtype), PRE, RMS, EXACT)
        rstd = reciprocal_sqrt(divide(squares, num_cols.to(h.dtype)) + EPS)
        if not EARLY:
            weight, bias = _parameters(weight_ptr, bias_ptr, col, col_mask, HAS_WEIGHT, HAS_BIAS)
        y = _affine(deviation, rstd, weight, bias, OFFSET, HAS_WEIGHT, HAS_BIAS, ACTIVATION)
        store(y_ptr, y_row + col, y, mask, ONCE=True)
    if STATS:
        # Mean and rstd, one after the other; for RMSNorm rstd alone.
        if RMS:
            store(stats_ptr, row, rstd, row_mask)
        else:
            store(stats_ptr, row, mean, row_mask)
            store(stats_ptr, num_rows + row, rstd, row_mask)
