"""LayerNorm and RMSNorm, forward, with the stages around them:

    u = dropout(pre_activation(x)), h = residual + gate * u, y = activation(norm(h) * (offset + weight) + bias)

or with a gate: h = x * gate_activation(gate), if that comes first, or y = (norm(x) * ...) * gate_activation(gate). The
residual or the gate is the other row.

A program has ROWS whole rows, each in PIECES blocks of columns, or one row whose blocks are cut in SLICES: x is read
once, and the variance is that of deviations from the mean. Longer rows (LOOPED) are read twice, a block at a time:
first for the sums of deviations and their squares, then, from the L2 cache, to be normalised. The sums are about the
mean of the row's first block, so near the row's that moving them there leaves enough digits. h is rounded to the
residual's type before the statistics, y once. Bytes per element: x and the other row in, y and h out.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernel_fusion.backends.triton.kernels.activations import value
from kernel_fusion.backends.triton.kernels.constants import kernel
from kernel_fusion.backends.triton.kernels.elementary import divide, quotient, reciprocal_sqrt
from kernel_fusion.backends.triton.kernels.quantize import given_scale, store_codes
from kernel_fusion.backends.triton.kernels.row_norm_tiles import (
    affine,
    factor,
    normalised,
    rows_at,
    store_statistics,
    weight_and_bias,
)
from kernel_fusion.backends.triton.kernels.rows import (
    let_next_kernel_start,
    load,
    means_over_ranks,
    of_all,
    of_group,
    part_of,
    place,
    scalar,
    store,
    store_sums,
    wait_for_previous_kernel,
    within,
)


@triton.jit
def sum_of(tiles):
    """The sums of rows whose tiles lie side by side: by lanes, then once across the program."""
    total = tiles[0]
    for i in tl.static_range(1, len(tiles)):
        total += tiles[i]
    return tl.sum(total, axis=1)[:, None]


@triton.jit
def _join(mean_a, squares_a, count_a, mean_b, squares_b, count_b):
    """Mean, squared deviations and number of elements of two parts of a row together (Chan et al., 1979)."""
    count = count_a + count_b
    share = count_b / tl.maximum(count, 1.0)
    shift = mean_b - mean_a
    return mean_a + shift * share, squares_a + squares_b + shift * shift * (count_a * share), count


@triton.jit
def _moments(hs, col, start, num_cols, count, each, C: tl.constexpr):
    """The mean (zero for RMSNorm) of rows in registers, zero beyond them; deviations, and the mean of their squares."""
    ACC: tl.constexpr = C.acc
    SLICES: tl.constexpr = C.slices
    WIDTH: tl.constexpr = C.block // C.slices
    part = count
    each_part = each
    if SLICES > 1:
        part = tl.zeros([SLICES, 1], ACC)
        for i in tl.static_range(len(hs)):
            part += tl.minimum(tl.maximum(num_cols - i * C.block - start, 0), WIDTH).to(ACC)
        each_part = divide(tl.full([SLICES, 1], 1.0, ACC), tl.maximum(part, 1.0))
    if C.rms:
        mean = tl.zeros([hs[0].shape[0], 1], ACC)
        deviations = hs
    else:
        mean = quotient(sum_of(hs), part, each_part)
        deviations = _deviations(hs, mean, col, num_cols, C)
    squares = ()
    for i in tl.static_range(len(hs)):
        squares = squares + (deviations[i] * deviations[i],)
    total = sum_of(squares)
    if SLICES > 1:
        mean, total, _ = tl.reduce((mean, total, part), 0, _join, keep_dims=True)
        deviations = _deviations(hs, mean, col, num_cols, C)
    return mean, deviations, quotient(total, count, each)


@triton.jit
def _deviations(hs, mean, col, num_cols, C: tl.constexpr):
    """Deviations of rows in registers from a mean; zero outside the row."""
    deviations = ()
    for i in tl.static_range(len(hs)):
        deviation = hs[i] - mean
        if not C.exact:
            deviation = tl.where(i * C.block + col < num_cols, deviation, 0.0)
        deviations = deviations + (deviation,)
    return deviations


@triton.jit
def _moments_of_long_rows(pointers, h_ptr, rows, row_mask, col, num_cols, count, each, C: tl.constexpr):
    """Mean and variance of rows that are read a block at a time; now h is written, if the row is a part."""
    ROWS: tl.constexpr = C.rows
    BLOCK: tl.constexpr = C.block
    x_row, other_row, y_row = rows
    center = tl.zeros([ROWS, 1], C.acc)
    if not C.rms:
        h = normalised(pointers, (x_row + col, other_row + col), col, y_row, (row_mask, None), C, BLOCK, False)
        center = tl.sum(h, axis=1)[:, None] * (1.0 / BLOCK)
    sums = tl.zeros([ROWS, BLOCK], C.acc)
    squares = tl.zeros([ROWS, BLOCK], C.acc)
    for start in range(0, num_cols, BLOCK):
        at = start + col
        col_mask = within(at, num_cols, C.exact)
        mask = row_mask & col_mask
        h = normalised(pointers, (x_row + at, other_row + at), at, y_row + start, (mask, col_mask), C, BLOCK, False)
        if C.part and C.has_residual:
            store(h_ptr, y_row + at, h, mask)
        deviation = h - center
        if not C.exact:
            deviation = tl.where(mask, deviation, 0.0)
        sums += deviation
        squares += deviation * deviation
    rest = quotient(sum_of((sums,)), count, each)
    mean = center
    variance = quotient(sum_of((squares,)), count, each)
    if not C.rms:
        mean = center + rest
        variance = tl.where(variance < float("inf"), variance - rest * rest, variance)
    return mean, variance


@triton.jit
def _long_rows(pointers, parameters, results, rows, row_mask, col, num_cols, count, each, C: tl.constexpr):
    """y, h, mean and rstd of rows that are read a block at a time, twice; of parts h, mean and variance."""
    ROW: tl.constexpr = pointers[1].dtype.element_ty if C.has_residual else pointers[0].dtype.element_ty
    x_row, other_row, y_row = rows
    y_ptr = results[0]
    h_ptr = results[1]
    mean, variance = _moments_of_long_rows(pointers, h_ptr, rows, row_mask, col, num_cols, count, each, C)
    if C.part:
        return mean, variance
    rstd = reciprocal_sqrt(variance + C.eps)
    for start in range(0, num_cols, C.block):
        at = start + col
        col_mask = within(at, num_cols, C.exact)
        mask = row_mask & col_mask
        h = normalised(pointers, (x_row + at, other_row + at), at, y_row + start, (mask, col_mask), C, C.block, True)
        if C.has_residual:
            store(h_ptr, y_row + at, h, mask, LAST=True)
        here = weight_and_bias(parameters, at, col_mask, C)
        _, z = affine((h - mean) * rstd, here, C, ROW)
        y_offset = y_row + at
        y = value(z, C.activation)
        if C.last_factor:
            y = y * factor(load(pointers[1], other_row + at, mask, C.wide, True), C)
        store(y_ptr, y_offset, y, mask, LAST=True)
    return mean, rstd


@triton.jit
def _whole_rows(pointers, parameters, results, rows, row_mask, start, col, num_cols, count, each, C: tl.constexpr):
    """y, or its codes, h, mean and rstd of rows that registers hold; of parts h, mean and variance."""
    ROW: tl.constexpr = pointers[1].dtype.element_ty if C.has_residual else pointers[0].dtype.element_ty
    PIECES: tl.constexpr = C.pieces
    x_row, other_row, y_row = rows
    y_ptr, h_ptr, codes = results
    hs = ()
    affines = ()
    lasts = ()
    ys = ()
    for i in tl.static_range(PIECES):
        at = i * C.block + col
        col_mask = within(at, num_cols, C.exact)
        mask = row_mask & col_mask
        offsets = (x_row + at, other_row + at)
        position = y_row + i * C.block + start
        h = normalised(pointers, offsets, at, position, (mask, col_mask), C, C.block // C.slices, False)
        if C.pre_activation != "identity" and not C.exact:
            h = tl.where(mask, h, 0.0)  # as it was read
        hs = hs + (h,)
        if C.early:
            affines = affines + (weight_and_bias(parameters, at, col_mask, C),)
            if C.last_factor:
                lasts = lasts + (load(pointers[1], offsets[1], mask, C.wide),)
    if C.has_residual:
        for i in tl.static_range(PIECES):
            at = i * C.block + col
            store(h_ptr, y_row + at, hs[i], row_mask & within(at, num_cols, C.exact))
    mean, deviations, variance = _moments(hs, col, start, num_cols, count, each, C)
    if C.part:
        return mean, variance
    rstd = reciprocal_sqrt(variance + C.eps)
    for i in tl.static_range(PIECES):
        at = i * C.block + col
        col_mask = within(at, num_cols, C.exact)
        if not C.early:
            weight, bias = weight_and_bias(parameters, at, col_mask, C)
        else:
            weight, bias = affines[i]
        _, z = affine(deviations[i] * rstd, (weight, bias), C, ROW)
        y_offset = y_row + at
        y = value(z, C.activation)
        mask = row_mask & col_mask
        if C.last_factor:
            if not C.early:
                row = load(pointers[1], other_row + at, mask, C.wide)
            else:
                row = lasts[i]
            y = y * factor(row, C)
        if C.keeps:
            store(y_ptr, y_offset, y, mask)
        if C.codes != "":
            ys = ys + (tl.where(mask, y.to(y_ptr.dtype.element_ty).to(tl.float32), 0.0),)
    if C.codes != "":
        # As many as of y, so that its sums are those of the norm without codes.
        VECTOR: tl.constexpr = 128 // y_ptr.dtype.element_ty.primitive_bitwidth
        store_codes(ys, given_scale(codes[1], C), codes, y_row, row_mask, start, col, num_cols, C, VECTOR)
    return mean, rstd


@triton.jit
def _rows(pointers, parameters, results, number, here, lengths, strides, counts, C: tl.constexpr):
    """y, or its codes, and h of whole rows, and their statistics; of parts of rows h and sums."""
    ROWS: tl.constexpr = C.rows
    SLICES: tl.constexpr = C.slices
    WIDTH: tl.constexpr = C.block // C.slices
    num_cols = lengths[1]
    group, all_rows, steps = here
    y_ptr, h_ptr, stats_ptr, codes_ptr = results
    count, each = counts
    sample = number.to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    row, rows, row_mask = rows_at(sample, group, lengths, strides, steps, C)
    start = tl.arange(0, SLICES)[:, None] * WIDTH
    col = start + tl.arange(0, WIDTH)[None, :]
    written = (y_ptr, h_ptr, (codes_ptr, stats_ptr, all_rows, row))
    wait_for_previous_kernel(C.chained)
    let_next_kernel_start(C.chained and C.releases)
    if C.looped:
        mean, rstd = _long_rows(pointers, parameters, written, rows, row_mask, col, num_cols, count, each, C)
    else:
        mean, rstd = _whole_rows(pointers, parameters, written, rows, row_mask, start, col, num_cols, count, each, C)
    if C.part:
        # The variance replaces rstd. In float64, moments of float32 move to zero without loss of digits.
        shift = mean.to(tl.float64)
        number_of = count.to(tl.float64)
        if C.wide and not C.rms:
            squares = rstd * number_of
        else:
            squares = (rstd.to(tl.float64) + shift * shift) * number_of
            shift = shift * number_of
        store_sums(stats_ptr, row, all_rows, num_cols, row_mask, (squares, shift), C)
    elif C.stats:
        store_statistics(stats_ptr, row, all_rows, row_mask, (mean, rstd), C)


@triton.jit
def _joined(pointers, parameters, results, number, here, lengths, strides, C: tl.constexpr):
    """y and the statistics of rows whose other columns are on other ranks, from sums over all of them.

    The sums take the place of h in `results`. The last rows come first, because some are still in the L2 cache. Rows
    are asked for before the sums are divided, which branches.
    """
    num_cols = lengths[1]
    group, all_rows, steps = here
    y_ptr, sums_ptr, stats_ptr, _ = results
    sample, start = part_of(number, num_cols, C)
    row, rows, row_mask = rows_at(sample, group, lengths, strides, steps, C)
    h_row, other_row, y_row = rows
    at = start + tl.arange(0, C.block)[None, :]
    col_mask = within(at, num_cols, C.exact)
    mask = row_mask & col_mask
    h = normalised(pointers, (h_row + at, other_row + at), at, y_row + start, (mask, col_mask), C, C.block, True)
    vectors = weight_and_bias(parameters, at, col_mask, C)
    variance, mean = means_over_ranks(sums_ptr, row, all_rows, row_mask, C)
    if not C.rms and not C.wide:
        variance -= mean * mean
        variance = tl.where(variance < 0.0, 0.0, variance)
    mean = mean.to(C.acc)
    rstd = reciprocal_sqrt(variance.to(C.acc) + C.eps)
    _, z = affine((h - mean) * rstd, vectors, C, pointers[0].dtype.element_ty)
    y = value(z, C.activation)
    if C.last_factor:
        y = y * factor(load(pointers[1], other_row + at, mask, C.wide, True), C)
    store(y_ptr, y_row + at, y, mask, LAST=True)
    if not C.looped or start == 0:
        store_statistics(stats_ptr, row, all_rows, row_mask, (mean, rstd), C)


@kernel()
def row_norm_fwd(
    x_ptr,
    other_ptr,
    weight_ptr,
    bias_ptr,
    gate_ptr,
    seed_ptr,
    y_ptr,
    h_ptr,
    stats_ptr,
    codes_ptr,
    per_group,
    num_rows,
    col_units,
    middle,
    inner,
    x0,
    x1,
    x2,
    o0,
    o1,
    o2,
    sample_step,
    group_step,
    weight_pitch,
    bias_pitch,
    gate_pitch,
    C: tl.constexpr,
):
    """y, h where there is a residual, and the statistics if C.stats.

    `num_rows` is that of samples, each of which has a row in every group. C.part: h, and instead of statistics the sums
    of squares and of values, or for LayerNorm of float64 of squared deviations, and the mean. C.joined: these of all
    ranks take the place of h, and y comes of them. C.codes: codes of y, and instead of statistics their scales,
    which may be given.
    """
    num_cols = col_units * C.unit
    # Divided before anything is waited for; the compiler would move an approximate division between the sums.
    count = scalar(num_cols, C.acc)
    each = divide(tl.full([1, 1], 1.0, C.acc), count)
    number, group, groups = place(per_group, C, C.joined)
    here = (group, of_all(num_rows, groups, C), (sample_step, group_step))
    weight = of_group(weight_ptr, group, weight_pitch * C.unit, C)
    parameters = (weight, of_group(bias_ptr, group, bias_pitch * C.unit, C))
    pointers = (x_ptr, other_ptr, seed_ptr, of_group(gate_ptr, group, gate_pitch * C.unit, C))
    results = (y_ptr, h_ptr, stats_ptr, codes_ptr)
    lengths = (num_rows, num_cols, middle, inner)
    strides = ((x0, x1, x2), (o0, o1, o2))
    if C.joined:
        _joined(pointers, parameters, results, number, here, lengths, strides, C)
    else:
        _rows(pointers, parameters, results, number, here, lengths, strides, (count, each), C)
