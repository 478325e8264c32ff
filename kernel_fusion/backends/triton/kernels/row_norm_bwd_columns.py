"""LayerNorm and RMSNorm, backward: the column sums of rows that are too long for row_norm_bwd.py to keep them.

Bytes per element: x and dy in; for dgate also x beside h, and the gradient at h as it was rounded.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernel_fusion.backends.triton.kernels.row_norm_bwd import LENGTHS, before_gate, gradient, statistics_of
from kernel_fusion.backends.triton.kernels.row_norm_fwd import OF_GROUPS
from kernel_fusion.backends.triton.kernels.rows import load, of_all, of_group, place, row_of, row_offset, within


@triton.jit(do_not_specialize=LENGTHS + OF_GROUPS)
def row_norm_bwd_columns(
    dy_ptr,
    h_ptr,
    weight_ptr,
    bias_ptr,
    seed_ptr,
    stats_ptr,
    partials_ptr,
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
    other_ptr,
    o0,
    o1,
    o2,
    per_group,
    sample_step,
    group_step,
    weight_pitch,
    bias_pitch,
    gate_pitch,
    dother_ptr,
    dgate_partials_ptr,
    C: tl.constexpr,
):
    """The partial sums of dweight and dbias alone: a program has a block of columns, and some tiles of rows."""
    ROWS: tl.constexpr = C.rows
    BLOCK: tl.constexpr = C.block
    num_cols = col_units * C.unit
    number, group, groups = place(per_group, C)
    start = number * BLOCK
    program = tl.program_id(1).to(tl.int64)
    col = start + tl.arange(0, BLOCK)[None, :]
    weight_ptr = of_group(weight_ptr, group, weight_pitch * C.unit, C)
    bias_ptr = of_group(bias_ptr, group, bias_pitch * C.unit, C)
    sources = (dy_ptr, h_ptr, other_ptr, weight_ptr, bias_ptr, seed_ptr)
    dweight = tl.zeros([ROWS, BLOCK], C.acc)
    dbias = tl.zeros([ROWS, BLOCK], C.acc)
    dgate = tl.zeros([ROWS, BLOCK], C.acc)
    for tile in range(program, tl.cdiv(num_rows, ROWS), tl.num_programs(1)):
        sample = tile * ROWS + tl.arange(0, ROWS)[:, None].to(tl.int64)
        row_mask = sample < num_rows
        row = row_of(sample, group, (sample_step, group_step), C)
        col_mask = within(col, num_cols, C.exact)
        mask = row_mask & col_mask
        statistics = statistics_of(stats_ptr, row, of_all(num_rows, groups, C), row_mask, C)
        dy_row = row_offset(row, (middle, inner), (g0, g1, g2), C.unit, C.flat)
        h_row = row_offset(row, (middle, inner), (h0, h1, h2), C.unit, C.flat)
        other_row = row_offset(row, (middle, inner), (o0, o1, o2), C.unit, C.flat)
        rows = (dy_row, h_row, other_row, row * num_cols)
        _, rounded, g, _, _ = gradient(sources, rows, start, col, statistics, mask, col_mask, C, True)
        if C.dweight:
            dweight += g * rounded
        if C.dbias:
            dbias += g
        if C.dgate:
            out_row = row * num_cols
            u = before_gate((other_ptr, seed_ptr), other_row, col, out_row + start, mask, C, True)
            dgate += load(dother_ptr, out_row + col, mask, C.wide, True) * u
    partials_ptr = of_group(partials_ptr, group, num_cols, C)
    dgate_partials_ptr = of_group(dgate_partials_ptr, group, num_cols, C)
    width = of_all(num_cols, groups, C)
    last = start + tl.arange(0, BLOCK)
    if C.dweight:
        tl.store(partials_ptr + program * width + last, tl.sum(dweight, axis=0), mask=last < num_cols)
    if C.dbias:
        first = tl.num_programs(1) if C.dweight else 0
        tl.store(partials_ptr + (first + program) * width + last, tl.sum(dbias, axis=0), mask=last < num_cols)
    if C.dgate:
        tl.store(dgate_partials_ptr + program * width + last, tl.sum(dgate, axis=0), mask=last < num_cols)
