"""LayerNorm and RMSNorm, forward, with the stages around them:

    u = dropout(pre_activation(x)), h = residual + u, y = activation(norm(h) * (offset + weight) + bias)

A program has ROWS whole rows, each in PIECES blocks of columns, or one row whose blocks are cut in SLICES: x is read
once, and the variance is that of the deviations from the mean, in registers. Longer rows (LOOPED) are read twice, a
block at a time, the second time from the L2 cache: first every lane sums the deviations of its columns and their
squares, then the row is normalised. The sums are about the mean of the row's first block, which is within
sqrt(N / BLOCK) standard deviations of the row's mean: so many digits are left when they are moved there. h is rounded
to the residual's type before the statistics, y once. Bytes per element: x and the residual in, y and h out.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernel_fusion.backends.triton.kernels.activations import value
from kernel_fusion.backends.triton.kernels.chain import let_next_kernel_start, wait_for_previous_kernel
from kernel_fusion.backends.triton.kernels.dropout import kept
from kernel_fusion.backends.triton.kernels.elementary import divide, quotient, reciprocal_sqrt
from kernel_fusion.backends.triton.kernels.rows import load, row_offset, scalar, shifted, store, within

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
    LAST: tl.constexpr,
):
    """h of a tile, from x and the residual. LAST as for `load`."""
    h = value(load(x_ptr, x_offset, mask, WIDE, LAST), PRE)
    if THRESHOLD > 0:
        h = tl.where(kept(seed_ptr, position, THRESHOLD, ALIGNED, BLOCK), h * KEPT_SCALE, 0.0)
    if HAS_RESIDUAL:
        h = load(residual_ptr, residual_offset, mask, WIDE, LAST) + h
        h = h.to(residual_ptr.dtype.element_ty).to(tl.float64 if WIDE else tl.float32)
    return h


@triton.jit
def sum_of(tiles):
    """The sums of rows whose tiles lie beside each other: by lanes first, then once across the program."""
    total = tiles[0]
    for i in tl.static_range(1, len(tiles)):
        total += tiles[i]
    return tl.sum(total, axis=1)[:, None]


@triton.jit
def _join(mean_a, squares_a, count_a, mean_b, squares_b, count_b):
    """Mean, squared deviations from it, and number of elements of two parts of a row together (Chan et al., 1979)."""
    count = count_a + count_b
    share = count_b / tl.maximum(count, 1.0)
    shift = mean_b - mean_a
    return mean_a + shift * share, squares_a + squares_b + shift * shift * (count_a * share), count


@triton.jit
def _moments(
    hs, col, start, num_cols, count, each, RMS: tl.constexpr, EXACT: tl.constexpr, BLOCK: tl.constexpr,
    SLICES: tl.constexpr,
):  # fmt: skip
    """Of rows in registers: the mean (zero for RMSNorm), the deviations from it, and the mean of their squares.

    What is outside the row is zero in `hs`; `count` is N, and `each` is 1 / N. A row in SLICES has the moments of each
    joined, in one exchange between its warps instead of two.
    """
    ACC: tl.constexpr = hs[0].dtype
    WIDTH: tl.constexpr = BLOCK // SLICES
    part = count
    each_part = each
    if SLICES > 1:
        part = tl.zeros([SLICES, 1], ACC)
        for i in tl.static_range(len(hs)):
            part += tl.minimum(tl.maximum(num_cols - i * BLOCK - start, 0), WIDTH).to(ACC)
        each_part = divide(tl.full([SLICES, 1], 1.0, ACC), tl.maximum(part, 1.0))
    if RMS:
        mean = tl.zeros([hs[0].shape[0], 1], ACC)
        deviations = hs
    else:
        mean = quotient(sum_of(hs), part, each_part)
        deviations = _deviations(hs, mean, col, num_cols, EXACT, BLOCK)
    squares = ()
    for i in tl.static_range(len(hs)):
        squares = squares + (deviations[i] * deviations[i],)
    total = sum_of(squares)
    if SLICES > 1:
        mean, total, _ = tl.reduce((mean, total, part), 0, _join, keep_dims=True)
        deviations = _deviations(hs, mean, col, num_cols, EXACT, BLOCK)
    return mean, deviations, quotient(total, count, each)


@triton.jit
def _deviations(hs, mean, col, num_cols, EXACT: tl.constexpr, BLOCK: tl.constexpr):
    """Those of rows in registers from a mean; zero outside the row."""
    deviations = ()
    for i in tl.static_range(len(hs)):
        deviation = hs[i] - mean
        if not EXACT:
            deviation = tl.where(i * BLOCK + col < num_cols, deviation, 0.0)
        deviations = deviations + (deviation,)
    return deviations


@triton.jit
def weight_and_bias(weight_ptr, bias_ptr, col, mask, HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr):
    """Weight and bias of some columns, as they are stored; of what is absent nothing is read."""
    weight = col
    bias = col
    if HAS_WEIGHT:
        weight = tl.load(weight_ptr + col, mask=mask, other=0.0)
    if HAS_BIAS:
        bias = tl.load(bias_ptr + col, mask=mask, other=0.0)
    return weight, bias


@triton.jit
def affine(
    n,
    weight,
    bias,
    OFFSET: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ROUNDS_TO: tl.constexpr,
):
    """norm(h) of a tile, n, and the argument of the activation.

    Both are rounded if ROUNDS_TO is a type, that of h or of x: n to it, and the argument to the promoted type of it and
    the weight's, which is less than the compute type where the two are one.
    """
    if ROUNDS_TO is not None:
        n = n.to(ROUNDS_TO).to(n.dtype)
    z = n
    if HAS_WEIGHT:
        z = z * shifted(weight.to(z.dtype), OFFSET)
    if HAS_BIAS:
        z = z + bias.to(z.dtype)
    if HAS_WEIGHT and weight.dtype == ROUNDS_TO:
        z = z.to(ROUNDS_TO).to(z.dtype)
    return n, z


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
    HF: tl.constexpr,
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
    PIECES: tl.constexpr,
    EXACT: tl.constexpr,
    LOOPED: tl.constexpr,
    SLICES: tl.constexpr,
    EARLY: tl.constexpr,
    CHAINED: tl.constexpr,
    RELEASES: tl.constexpr,
):
    """`col_units` and the strides count units of UNIT elements: so the compiler knows what they are divisible by."""
    ACC: tl.constexpr = tl.float64 if WIDE else tl.float32
    ROUNDS_TO: tl.constexpr = residual_ptr.dtype.element_ty if HF else None  # without a residual it is x
    ALIGNED: tl.constexpr = UNIT % 8 == 0
    num_cols = col_units * UNIT
    # Divided before anything is waited for. An approximate division is moved in between the sums by the compiler.
    count = scalar(num_cols, ACC)
    each = divide(tl.full([1, 1], 1.0, ACC), count)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    row_mask = row < num_rows
    WIDTH: tl.constexpr = BLOCK // SLICES
    start = tl.arange(0, SLICES)[:, None] * WIDTH
    col = start + tl.arange(0, WIDTH)[None, :]
    x_row = row_offset(row, middle, inner, x0 * UNIT, x1 * UNIT, x2 * UNIT, FLAT)
    residual_row = row_offset(row, middle, inner, r0 * UNIT, r1 * UNIT, r2 * UNIT, FLAT)
    y_row = row * num_cols
    wait_for_previous_kernel(CHAINED)
    let_next_kernel_start(RELEASES)
    if LOOPED:
        center = tl.zeros([ROWS, 1], ACC)
        if not RMS:
            h = normalised(
                x_ptr, residual_ptr, seed_ptr, x_row + col, residual_row + col, y_row, row_mask,
                PRE, THRESHOLD, KEPT_SCALE, ALIGNED, HAS_RESIDUAL, BLOCK, WIDE, False,
            )  # fmt: skip
            center = tl.sum(h, axis=1)[:, None] * (1.0 / BLOCK)
        sums = tl.zeros([ROWS, BLOCK], ACC)
        squares = tl.zeros([ROWS, BLOCK], ACC)
        for start in range(0, num_cols, BLOCK):
            at = start + col
            mask = row_mask & within(at, num_cols, EXACT)
            h = normalised(
                x_ptr, residual_ptr, seed_ptr, x_row + at, residual_row + at, y_row + start, mask,
                PRE, THRESHOLD, KEPT_SCALE, ALIGNED, HAS_RESIDUAL, BLOCK, WIDE, False,
            )  # fmt: skip
            deviation = h - center
            if not EXACT:
                deviation = tl.where(mask, deviation, 0.0)
            sums += deviation
            squares += deviation * deviation
        rest = quotient(sum_of((sums,)), count, each)
        mean = center
        variance = quotient(sum_of((squares,)), count, each)
        if not RMS:
            mean = center + rest
            variance = tl.where(variance < float("inf"), variance - rest * rest, variance)
        rstd = reciprocal_sqrt(variance + EPS)
        for start in range(0, num_cols, BLOCK):
            at = start + col
            col_mask = within(at, num_cols, EXACT)
            mask = row_mask & col_mask
            h = normalised(
                x_ptr, residual_ptr, seed_ptr, x_row + at, residual_row + at, y_row + start, mask,
                PRE, THRESHOLD, KEPT_SCALE, ALIGNED, HAS_RESIDUAL, BLOCK, WIDE, True,
            )  # fmt: skip
            if HAS_RESIDUAL:
                store(h_ptr, y_row + at, h, mask, LAST=True)
            weight, bias = weight_and_bias(weight_ptr, bias_ptr, at, col_mask, HAS_WEIGHT, HAS_BIAS)
            _, z = affine((h - mean) * rstd, weight, bias, OFFSET, HAS_WEIGHT, HAS_BIAS, ROUNDS_TO)
            store(y_ptr, y_row + at, value(z, ACTIVATION), mask, LAST=True)
    else:
        hs = ()
        parameters = ()
        for i in tl.static_range(PIECES):
            at = i * BLOCK + col
            col_mask = within(at, num_cols, EXACT)
            mask = row_mask & col_mask
            h = normalised(
                x_ptr, residual_ptr, seed_ptr, x_row + at, residual_row + at, y_row + i * BLOCK + start, mask,
                PRE, THRESHOLD, KEPT_SCALE, ALIGNED, HAS_RESIDUAL, WIDTH, WIDE, False,
            )  # fmt: skip
            if PRE != "identity" and not EXACT:
                h = tl.where(mask, h, 0.0)  # as it was read
            hs = hs + (h,)
            if EARLY:
                parameters = parameters + (weight_and_bias(weight_ptr, bias_ptr, at, col_mask, HAS_WEIGHT, HAS_BIAS),)
        if HAS_RESIDUAL:
            for i in tl.static_range(PIECES):
                at = i * BLOCK + col
                store(h_ptr, y_row + at, hs[i], row_mask & within(at, num_cols, EXACT))
        mean, deviations, variance = _moments(hs, col, start, num_cols, count, each, RMS, EXACT, BLOCK, SLICES)
        rstd = reciprocal_sqrt(variance + EPS)
        for i in tl.static_range(PIECES):
            at = i * BLOCK + col
            col_mask = within(at, num_cols, EXACT)
            if EARLY:
                weight, bias = parameters[i]
            else:
                weight, bias = weight_and_bias(weight_ptr, bias_ptr, at, col_mask, HAS_WEIGHT, HAS_BIAS)
            _, z = affine(deviations[i] * rstd, weight, bias, OFFSET, HAS_WEIGHT, HAS_BIAS, ROUNDS_TO)
            store(y_ptr, y_row + at, value(z, ACTIVATION), row_mask & col_mask)
    if STATS:
        # Mean and rstd, one after the other; for RMSNorm rstd alone.
        if RMS:
            store(stats_ptr, row, rstd, row_mask)
        else:
            store(stats_ptr, row, mean, row_mask)
            store(stats_ptr, num_rows + row, rstd, row_mask)
