"""LayerNorm and RMSNorm of rows whose other columns are on other ranks: what follows the all-reduce, in each direction.

`row_norm_fwd` and `row_norm_bwd` (C.part) come before it: they give the sums of a rank's columns, h where there is a
residual, and partial sums of dweight and dbias. Here a program has ROWS rows of a block of columns, because nothing
more is summed. It takes the last rows first, so that some are still in the L2 cache. Bytes per element, less those: x
or h in and y out; backward x or h and dy in, dx out.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernel_fusion.backends.triton.kernels.activations import value
from kernel_fusion.backends.triton.kernels.elementary import reciprocal_sqrt
from kernel_fusion.backends.triton.kernels.row_norm_bwd import LENGTHS as BWD_LENGTHS
from kernel_fusion.backends.triton.kernels.row_norm_bwd import gradient, statistics_of, write, write_factor
from kernel_fusion.backends.triton.kernels.row_norm_fwd import (
    LENGTHS,
    OF_GROUPS,
    affine,
    normalised,
    weight_and_bias,
)
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
def _tile(num_rows, num_cols, of_groups, C: tl.constexpr):
    """This program's rows; the first of its columns; its group; how many rows all groups have; and what rows exist."""
    ROWS: tl.constexpr = C.rows
    per_group, sample_step, group_step = of_groups
    number, group, groups = place(per_group, C, True)
    blocks = tl.cdiv(num_cols, C.block)
    sample = (number // blocks).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    row = row_of(sample, group, (sample_step, group_step), C)
    return row, number % blocks * C.block, group, of_all(num_rows, groups, C), sample < num_rows


@triton.jit(do_not_specialize=LENGTHS + OF_GROUPS)
def row_norm_apply(
    h_ptr,
    other_ptr,
    weight_ptr,
    bias_ptr,
    seed_ptr,
    sums_ptr,
    y_ptr,
    stats_ptr,
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
    per_group,
    sample_step,
    group_step,
    weight_pitch,
    bias_pitch,
    gate_pitch,
    gate_ptr,
    C: tl.constexpr,
):
    """y and the statistics, from h as it was written, or else from x. Lengths and strides count units."""
    BLOCK: tl.constexpr = C.block
    num_cols = col_units * C.unit
    row, start, group, all_rows, row_mask = _tile(num_rows, num_cols, (per_group, sample_step, group_step), C)
    at = start + tl.arange(0, BLOCK)[None, :]
    col_mask = within(at, num_cols, C.exact)
    mask = row_mask & col_mask
    h_offset = row_offset(row, (middle, inner), (h0, h1, h2), C.unit, C.flat) + at
    other_offset = row_offset(row, (middle, inner), (o0, o1, o2), C.unit, C.flat) + at
    variance, mean = means_over_ranks(sums_ptr, row, all_rows, row_mask, C)
    if not C.rms:
        variance -= mean * mean
        variance = tl.where(variance < 0.0, 0.0, variance)
    mean = mean.to(C.acc)
    rstd = reciprocal_sqrt(variance.to(C.acc) + C.eps)
    pointers = (h_ptr, other_ptr, seed_ptr, gate_ptr)
    h = normalised(pointers, (h_offset, other_offset), at, row * num_cols + start, (mask, col_mask), C, BLOCK, True)
    weight = of_group(weight_ptr, group, weight_pitch * C.unit, C)
    bias = of_group(bias_ptr, group, bias_pitch * C.unit, C)
    parameters = weight_and_bias((weight, bias), at, col_mask, C)
    _, z = affine((h - mean) * rstd, parameters, C, h_ptr.dtype.element_ty)
    y = value(z, C.activation)
    if C.last_factor:
        y = y * factor(load(other_ptr, other_offset, mask, C.wide, True), C)
    store(y_ptr, row * num_cols + at, y, mask, LAST=True)
    if start == 0:
        if C.rms:
            store(stats_ptr, row, rstd, row_mask)
        else:
            store(stats_ptr, row, mean, row_mask)
            store(stats_ptr, all_rows + row, rstd, row_mask)


@triton.jit(do_not_specialize=BWD_LENGTHS + OF_GROUPS)
def row_norm_bwd_apply(
    dy_ptr,
    h_ptr,
    other_ptr,
    dh_ptr,
    weight_ptr,
    bias_ptr,
    seed_ptr,
    stats_ptr,
    sums_ptr,
    dx_ptr,
    dother_ptr,
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
    per_group,
    sample_step,
    group_step,
    weight_pitch,
    bias_pitch,
    gate_pitch,
    C: tl.constexpr,
):
    """dx and dother. Lengths and strides count units."""
    BLOCK: tl.constexpr = C.block
    num_cols = col_units * C.unit
    row, start, group, all_rows, row_mask = _tile(num_rows, num_cols, (per_group, sample_step, group_step), C)
    at = start + tl.arange(0, BLOCK)[None, :]
    col_mask = within(at, num_cols, C.exact)
    mask = row_mask & col_mask
    dy_row = row_offset(row, (middle, inner), (g0, g1, g2), C.unit, C.flat)
    h_row = row_offset(row, (middle, inner), (h0, h1, h2), C.unit, C.flat)
    other_row = row_offset(row, (middle, inner), (o0, o1, o2), C.unit, C.flat)
    rows = (dy_row, h_row, other_row, row * num_cols)
    mean_gwn, mean_gw = means_over_ranks(sums_ptr, row, all_rows, row_mask, C)
    means = (mean_gwn.to(C.acc), mean_gw.to(C.acc))
    statistics = statistics_of(stats_ptr, row, all_rows, row_mask, C)
    weight = of_group(weight_ptr, group, weight_pitch * C.unit, C)
    bias = of_group(bias_ptr, group, bias_pitch * C.unit, C)
    sources = (dy_ptr, h_ptr, other_ptr, weight, bias, seed_ptr)
    targets = (dh_ptr, h_ptr, other_ptr, seed_ptr, dx_ptr, dother_ptr, weight)  # no gate
    n, _, _, gw, dfactor = gradient(sources, rows, start, at, statistics, mask, col_mask, C, True)
    write_factor(targets, rows, at, dfactor, mask, C, True)
    write(targets, rows, start, at, n, gw, means, statistics[1], (mask, col_mask), C, True)
