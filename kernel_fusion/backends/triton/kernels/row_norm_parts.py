"""LayerNorm and RMSNorm of rows whose other columns are on other ranks: what follows the all-reduce, in each direction.

`row_norm_fwd` and `row_norm_bwd` (C.part) come before it: they give the sums of a rank's columns, h if there is a
residual, and partial sums of dweight and dbias. Here a program has ROWS rows of a block of columns. It takes the last
rows first, because some are still in the L2 cache. Forward asks for rows before it divides the sums, which branches.
Bytes per element, less those in the cache: x or h in and y out; backward x or h and dy in, dx out.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernel_fusion.backends.triton.kernels.activations import value
from kernel_fusion.backends.triton.kernels.constants import kernel
from kernel_fusion.backends.triton.kernels.elementary import reciprocal_sqrt
from kernel_fusion.backends.triton.kernels.row_norm_bwd import gradient, rows_at, statistics_of, write, write_factor
from kernel_fusion.backends.triton.kernels.row_norm_fwd import affine, normalised, store_statistics, weight_and_bias
from kernel_fusion.backends.triton.kernels.rows import (
    load,
    means_over_ranks,
    of_all,
    of_group,
    place,
    row_of,
    row_offset,
    store,
    within,
)
from kernel_fusion.backends.triton.kernels.stages import factor


@triton.jit
def _tile(num_cols, per_group, C: tl.constexpr):
    """This program's samples; the first of its columns; its group; and how many groups there are.

    C.looped: other programs have other columns of these rows.
    """
    ROWS: tl.constexpr = C.rows
    number, group, groups = place(per_group, C, True)
    start = tl.full([], 0, tl.int32)
    if C.looped:
        blocks = tl.cdiv(num_cols, C.block)
        start = number % blocks * C.block
        number = number // blocks
    return number.to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None], start, group, groups


@kernel()
def row_norm_apply(
    h_ptr,
    other_ptr,
    weight_ptr,
    bias_ptr,
    gate_ptr,
    seed_ptr,
    y_ptr,
    sums_ptr,
    stats_ptr,
    per_group,
    num_rows,
    col_units,
    middle,
    inner,
    h0,
    h1,
    h2,
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
    """y and the statistics, from h as it was written, or else from x. Lengths and strides count units."""
    BLOCK: tl.constexpr = C.block
    num_cols = col_units * C.unit
    sample, start, group, groups = _tile(num_cols, per_group, C)
    row_mask = sample < num_rows
    row = row_of(sample, group, (sample_step, group_step), C)
    all_rows = of_all(num_rows, groups, C)
    at = start + tl.arange(0, BLOCK)[None, :]
    col_mask = within(at, num_cols, C.exact)
    mask = row_mask & col_mask
    h_offset = row_offset(row, (middle, inner), (h0, h1, h2), C.unit, C.flat) + at
    other_offset = row_offset(row, (middle, inner), (o0, o1, o2), C.unit, C.flat) + at
    pointers = (h_ptr, other_ptr, seed_ptr, gate_ptr)
    h = normalised(pointers, (h_offset, other_offset), at, row * num_cols + start, (mask, col_mask), C, BLOCK, True)
    weight = of_group(weight_ptr, group, weight_pitch * C.unit, C)
    bias = of_group(bias_ptr, group, bias_pitch * C.unit, C)
    parameters = weight_and_bias((weight, bias), at, col_mask, C)
    variance, mean = means_over_ranks(sums_ptr, row, all_rows, row_mask, C)
    if not C.rms:
        variance -= mean * mean
        variance = tl.where(variance < 0.0, 0.0, variance)
    mean = mean.to(C.acc)
    rstd = reciprocal_sqrt(variance.to(C.acc) + C.eps)
    _, z = affine((h - mean) * rstd, parameters, C, h_ptr.dtype.element_ty)
    y = value(z, C.activation)
    if C.last_factor:
        y = y * factor(load(other_ptr, other_offset, mask, C.wide, True), C)
    store(y_ptr, row * num_cols + at, y, mask, LAST=True)
    if not C.looped or start == 0:
        store_statistics(stats_ptr, row, all_rows, row_mask, (mean, rstd), C)


@kernel()
def row_norm_bwd_apply(
    dy_ptr,
    h_ptr,
    other_ptr,
    dh_ptr,
    weight_ptr,
    bias_ptr,
    gate_ptr,
    seed_ptr,
    stats_ptr,
    dx_ptr,
    dother_ptr,
    sums_ptr,
    per_group,
    num_rows,
    col_units,
    middle,
    inner,
    g0,
    g1,
    g2,
    h0,
    h1,
    h2,
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
    """dx and dother. Lengths and strides count units."""
    num_cols = col_units * C.unit
    sample, start, group, groups = _tile(num_cols, per_group, C)
    at = start + tl.arange(0, C.block)[None, :]
    col_mask = within(at, num_cols, C.exact)
    lengths = (num_rows, num_cols, middle, inner)
    strides = ((g0, g1, g2), (h0, h1, h2), (o0, o1, o2))
    steps = (sample_step, group_step)
    row, rows, row_mask = rows_at(sample, group, lengths, strides, steps, C)
    statistics = statistics_of(stats_ptr, row, of_all(num_rows, groups, C), row_mask, C)
    mask = row_mask & col_mask
    mean_gwn, mean_gw = means_over_ranks(sums_ptr, row, of_all(num_rows, groups, C), row_mask, C)
    means = (mean_gwn.to(C.acc), mean_gw.to(C.acc))
    weight = of_group(weight_ptr, group, weight_pitch * C.unit, C)
    bias = of_group(bias_ptr, group, bias_pitch * C.unit, C)
    gate = of_group(gate_ptr, group, gate_pitch * C.unit, C)
    pointers = (dy_ptr, h_ptr, other_ptr, dh_ptr, weight, bias, gate, seed_ptr, dx_ptr, dother_ptr)
    n, _, _, gw, dfactor = gradient(pointers, rows, start, at, statistics, mask, col_mask, C, True)
    write_factor(pointers, rows, at, dfactor, mask, C, True)
    write(pointers, rows, start, at, n, gw, means, statistics[1], (mask, col_mask), C, True)
