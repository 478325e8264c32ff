"""LayerNorm and RMSNorm, forward, with the stages around them.

    u = dropout(pre_activation(x)), h = residual + gate * u, y = activation(norm(h) * (offset + weight) + bias)

A gated norm has instead h = x * gate_activation(gate), if the gate comes first, or else
y = (norm(x) * ...) * gate_activation(gate). The residual or the gate of such a norm is the *other row* of this file.

A program has C.rows whole rows, each in C.pieces blocks of columns. It reads x once and keeps the rows in registers, so
the variance is that of deviations from the mean. Longer rows (C.looped) are read twice, block by block: first for the
sums of deviations and of their squares, then, from the L2 cache, to be normalised. Those deviations are from the mean
of the row's first block, which is so near the row's mean that moving the sums there leaves enough digits. h is rounded
to the residual's type before the statistics, and y is rounded once. Bytes for each element: x and the other row in, y
and h out.
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
from kernel_fusion.backends.triton.kernels.rows import load, of_all, of_group, place, scalar, store, within


@triton.jit
def _sum_of(tiles):
    """The sums of rows whose tiles lie side by side: first each lane's own columns, then once across the program."""
    total = tiles[0]
    for i in tl.static_range(1, len(tiles)):
        total += tiles[i]
    return tl.sum(total, axis=1)[:, None]


@triton.jit
def _moments(hs, col, num_cols, count, each, C: tl.constexpr):
    """The mean of rows in registers, their deviations from it, and the mean of the squared deviations.

    `hs` are the tiles of the rows, zero beyond their ends. `count` is the number of columns and `each` is 1 / count.
    The mean of RMSNorm is zero.
    """
    if C.rms:
        mean = tl.zeros([hs[0].shape[0], 1], C.acc)
        deviations = hs
    else:
        mean = quotient(_sum_of(hs), count, each)
        deviations = ()
        for i in tl.static_range(len(hs)):
            deviation = hs[i] - mean
            if not C.exact:
                deviation = tl.where(i * C.block + col < num_cols, deviation, 0.0)
            deviations = deviations + (deviation,)
    squares = ()
    for i in tl.static_range(len(hs)):
        squares = squares + (deviations[i] * deviations[i],)
    return mean, deviations, quotient(_sum_of(squares), count, each)


@triton.jit
def _moments_of_long_rows(pointers, rows, row_mask, col, num_cols, count, each, C: tl.constexpr):
    """Mean and variance of rows that are read block by block."""
    ROWS: tl.constexpr = C.rows
    BLOCK: tl.constexpr = C.block
    x_row, other_row, y_row = rows
    center = tl.zeros([ROWS, 1], C.acc)
    if not C.rms:
        h = normalised(pointers, (x_row + col, other_row + col), col, y_row, (row_mask, None), C)
        center = tl.sum(h, axis=1)[:, None] * (1.0 / BLOCK)
    sums = tl.zeros([ROWS, BLOCK], C.acc)
    squares = tl.zeros([ROWS, BLOCK], C.acc)
    for start in range(0, num_cols, BLOCK):
        at = start + col
        col_mask = within(at, num_cols, C.exact)
        mask = row_mask & col_mask
        h = normalised(pointers, (x_row + at, other_row + at), at, y_row + start, (mask, col_mask), C)
        deviation = h - center
        if not C.exact:
            deviation = tl.where(mask, deviation, 0.0)
        sums += deviation
        squares += deviation * deviation
    rest = quotient(_sum_of((sums,)), count, each)
    mean = center
    variance = quotient(_sum_of((squares,)), count, each)
    if not C.rms:
        mean = center + rest
        variance = tl.where(variance < float("inf"), variance - rest * rest, variance)
    return mean, variance


@triton.jit
def _finished(deviation, rstd, vectors, pointers, other, mask, C: tl.constexpr, ROW: tl.constexpr):
    """y of a tile, from deviations from the mean and 1 / standard deviation, and the tile's weight and bias.

    `other` is the offset of the other row's tile, which is a factor of y if C.last_factor. ROW is the type of h.
    """
    _, z = affine(deviation * rstd, vectors, C, ROW)
    y = value(z, C.activation)
    if C.last_factor:
        y = y * factor(load(pointers[1], other, mask, C.wide), C)
    return y


@triton.jit
def _long_rows(pointers, parameters, results, rows, row_mask, col, num_cols, count, each, C: tl.constexpr):
    """y, h, mean and rstd of rows that are read block by block, twice."""
    ROW: tl.constexpr = pointers[1].dtype.element_ty if C.has_residual else pointers[0].dtype.element_ty
    x_row, other_row, y_row = rows
    y_ptr, h_ptr, _ = results
    mean, variance = _moments_of_long_rows(pointers, rows, row_mask, col, num_cols, count, each, C)
    rstd = reciprocal_sqrt(variance + C.eps)
    for start in range(0, num_cols, C.block):
        at = start + col
        col_mask = within(at, num_cols, C.exact)
        mask = row_mask & col_mask
        h = normalised(pointers, (x_row + at, other_row + at), at, y_row + start, (mask, col_mask), C)
        if C.has_residual:
            store(h_ptr, y_row + at, h, mask)
        vectors = weight_and_bias(parameters, at, col_mask, C)
        store(y_ptr, y_row + at, _finished(h - mean, rstd, vectors, pointers, other_row + at, mask, C, ROW), mask)
    return mean, rstd


@triton.jit
def _whole_rows(pointers, parameters, results, rows, row_mask, col, num_cols, count, each, C: tl.constexpr):
    """y or its codes, h, mean and rstd of rows that registers hold."""
    ROW: tl.constexpr = pointers[1].dtype.element_ty if C.has_residual else pointers[0].dtype.element_ty
    PIECES: tl.constexpr = C.pieces
    x_row, other_row, y_row = rows
    y_ptr, h_ptr, codes = results
    hs = ()
    ys = ()
    for i in tl.static_range(PIECES):
        at = i * C.block + col
        col_mask = within(at, num_cols, C.exact)
        mask = row_mask & col_mask
        h = normalised(pointers, (x_row + at, other_row + at), at, y_row + i * C.block, (mask, col_mask), C)
        if C.pre_activation != "identity" and not C.exact:
            h = tl.where(mask, h, 0.0)  # the zeros that were read beyond the row may have become another number
        hs = hs + (h,)
    if C.has_residual:  # after the last load, since no load may pass a store
        for i in tl.static_range(PIECES):
            at = i * C.block + col
            store(h_ptr, y_row + at, hs[i], row_mask & within(at, num_cols, C.exact))
    mean, deviations, variance = _moments(hs, col, num_cols, count, each, C)
    rstd = reciprocal_sqrt(variance + C.eps)
    for i in tl.static_range(PIECES):
        at = i * C.block + col
        col_mask = within(at, num_cols, C.exact)
        mask = row_mask & col_mask
        vectors = weight_and_bias(parameters, at, col_mask, C)
        y = _finished(deviations[i], rstd, vectors, pointers, other_row + at, mask, C, ROW)
        if C.keeps:
            store(y_ptr, y_row + at, y, mask)
        if C.codes != "":
            ys = ys + (tl.where(mask, y.to(y_ptr.dtype.element_ty).to(tl.float32), 0.0),)
    if C.codes != "":
        # As many codes as elements of y, so that the row's sums have the order of the norm without codes.
        VECTOR: tl.constexpr = 128 // y_ptr.dtype.element_ty.primitive_bitwidth
        store_codes(ys, given_scale(codes[1], C), codes, y_row, row_mask, 0, col, num_cols, C, VECTOR)
    return mean, rstd


@triton.jit
def _rows(pointers, parameters, results, number, here, lengths, strides, counts, C: tl.constexpr):
    """y or its codes, h and the statistics of a program's rows."""
    ROWS: tl.constexpr = C.rows
    num_cols = lengths[1]
    group, all_rows, steps = here
    y_ptr, h_ptr, stats_ptr, codes_ptr = results
    count, each = counts
    sample = number.to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    row, rows, row_mask = rows_at(sample, group, lengths, strides, steps, C)
    col = tl.arange(0, C.block)[None, :]
    written = (y_ptr, h_ptr, (codes_ptr, stats_ptr, all_rows, row))
    if C.looped:
        mean, rstd = _long_rows(pointers, parameters, written, rows, row_mask, col, num_cols, count, each, C)
    else:
        mean, rstd = _whole_rows(pointers, parameters, written, rows, row_mask, col, num_cols, count, each, C)
    if C.stats:
        store_statistics(stats_ptr, row, all_rows, row_mask, mean, rstd, C)


# fmt: off
@kernel()
def row_norm_fwd(
    x_ptr, other_ptr, weight_ptr, bias_ptr, gate_ptr, seed_ptr, y_ptr, h_ptr, stats_ptr, codes_ptr,
    per_group, num_rows, col_units, middle, inner, x0, x1, x2, o0, o1, o2,
    sample_step, group_step, weight_pitch, bias_pitch, gate_pitch, C: tl.constexpr,
):
    # fmt: on
    """Write y, h if there is a residual, and the statistics if C.stats.

    `num_rows` is the number of samples, each of which has a row in every group. With C.codes, the codes of y are
    written, and their scales, which may be given, take the place of the statistics.
    """
    num_cols = col_units * C.unit
    # The division comes first, because the compiler would move an approximate one between the sums of a row.
    count = scalar(num_cols, C.acc)
    each = divide(tl.full([1, 1], 1.0, C.acc), count)
    number, group, groups = place(per_group, C)
    here = (group, of_all(num_rows, groups, C), (sample_step, group_step))
    weight = of_group(weight_ptr, group, weight_pitch * C.unit, C)
    parameters = (weight, of_group(bias_ptr, group, bias_pitch * C.unit, C))
    pointers = (x_ptr, other_ptr, seed_ptr, of_group(gate_ptr, group, gate_pitch * C.unit, C))
    results = (y_ptr, h_ptr, stats_ptr, codes_ptr)
    lengths = (num_rows, num_cols, middle, inner)
    strides = ((x0, x1, x2), (o0, o1, o2))
    _rows(pointers, parameters, results, number, here, lengths, strides, (count, each), C)
