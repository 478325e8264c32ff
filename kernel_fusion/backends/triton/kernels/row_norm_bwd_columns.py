"""LayerNorm and RMSNorm, backward: the column sums of rows that are too long for row_norm_bwd.py to keep them.

Bytes per element: x and dy in; for dgate also x beside h, and the gradient at h as it was rounded.
"""

from __future__ import annotations

import triton.language as tl

from kernel_fusion.backends.triton.kernels.constants import kernel
from kernel_fusion.backends.triton.kernels.row_norm_bwd import (
    before_gate,
    gradient,
    rows_at,
    statistics_of,
    store_partials,
)
from kernel_fusion.backends.triton.kernels.rows import load, of_all, of_group, place, within


@kernel()
def row_norm_bwd_columns(
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
    partials_ptr,
    dgate_partials_ptr,
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
    """The partial sums of `row_norm_bwd` alone: a program has a block of columns, and some tiles of rows."""
    ROWS: tl.constexpr = C.rows
    BLOCK: tl.constexpr = C.block
    num_cols = col_units * C.unit
    number, group, groups = place(per_group, C)
    start = number * BLOCK
    program = tl.program_id(1).to(tl.int64)
    programs = tl.num_programs(1)
    col = start + tl.arange(0, BLOCK)[None, :]
    weight = of_group(weight_ptr, group, weight_pitch * C.unit, C)
    bias = of_group(bias_ptr, group, bias_pitch * C.unit, C)
    pointers = (dy_ptr, h_ptr, other_ptr, dh_ptr, weight, bias, gate_ptr, seed_ptr, dx_ptr, dother_ptr)
    lengths = (num_rows, num_cols, middle, inner)
    strides = ((g0, g1, g2), (h0, h1, h2), (o0, o1, o2))
    dweight = tl.zeros([ROWS, BLOCK], C.acc)
    dbias = tl.zeros([ROWS, BLOCK], C.acc)
    dgate = tl.zeros([ROWS, BLOCK], C.acc)
    for tile in range(program, tl.cdiv(num_rows, ROWS), programs):
        sample = tile * ROWS + tl.arange(0, ROWS)[:, None].to(tl.int64)
        steps = (sample_step, group_step)
        row, rows, row_mask = rows_at(sample, group, lengths, strides, steps, C)
        statistics = statistics_of(stats_ptr, row, of_all(num_rows, groups, C), row_mask, C)
        col_mask = within(col, num_cols, C.exact)
        mask = row_mask & col_mask
        _, rounded, g, _, _ = gradient(pointers, rows, start, col, statistics, mask, col_mask, C, True)
        if C.dweight:
            dweight += g * rounded
        if C.dbias:
            dbias += g
        if C.dgate:
            u = before_gate(pointers, rows[2], col, rows[3] + start, mask, C, True)
            dgate += load(dother_ptr, rows[3] + col, mask, C.wide, True) * u
    partials = (of_group(partials_ptr, group, num_cols, C), of_group(dgate_partials_ptr, group, num_cols, C))
    at = start + tl.arange(0, BLOCK)
    store_partials(partials, program, programs, at, (dweight, dbias, dgate), num_cols, of_all(num_cols, groups, C), C)
