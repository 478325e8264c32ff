"""LayerNorm and RMSNorm, backward, with the stages around them.

With n = norm(h), w = offset + weight, g = dy * activation'(n w + bias) and the means E over a row:

    dh = rstd * (g w - n E[g w n] - E[g w]) + what arrives at h      (without E[g w] for RMSNorm)
    dresidual = dh, dx = dh * keep * pre_activation'(x), dweight = sum of g n over rows, dbias = sum of g over rows

With s = gate_activation and a gate a behind the norm, g = dy * s(a) and da = dy * (n w + bias) * s'(a). With a gate
before the norm, h = x * s(a), dx = dh * s(a) and da = dh * x * s'(a). The residual or the gate is the *other row*.

With the rounding "hf", the n in dweight and in the activation's argument, and that argument, are rounded as in forward.

h is recomputed from x, or read if forward stored it, which it does if there is a residual. To sum columns too, programs
are persistent: each walks through tiles of rows, keeps its sums for dweight and dbias in registers, and writes one
partial row; sum_partials adds those in order. Longer rows (C.looped) have a program each for dx, which reads them
twice, and another launch (C.columns) sums their columns. Bytes for each element: x and dy in, dx out; x and dy once
more if columns are summed apart.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernel_fusion.backends.triton.kernels.constants import kernel
from kernel_fusion.backends.triton.kernels.elementary import divide, quotient
from kernel_fusion.backends.triton.kernels.row_norm_tiles import (
    before_gate,
    gradient,
    rows_at,
    statistics_of,
    store_partials,
    write,
    write_factor,
)
from kernel_fusion.backends.triton.kernels.rows import load, of_all, of_group, place, scalar, within


@triton.jit
def _add_pairs(a0, a1, b0, b1):
    """The sum of two pairs."""
    return a0 + b0, a1 + b1


@triton.jit
def _row_means(gwn, gw, count, each, C: tl.constexpr):
    """E[gwn] and E[gw] of rows, from tiles that hold sums by lanes; both cross the program at once.

    `each` is 1 / `count`. RMSNorm needs no E[gw].
    """
    if C.rms:
        mean_gwn = quotient(tl.sum(gwn, axis=1)[:, None], count, each)
        mean_gw = tl.zeros_like(mean_gwn)
    else:
        first, second = tl.reduce((gwn, gw), 1, _add_pairs)
        mean_gwn = quotient(first[:, None], count, each)
        mean_gw = quotient(second[:, None], count, each)
    return mean_gwn, mean_gw


@triton.jit
def _long_rows(pointers, rows, col, statistics, row_mask, num_cols, count, each, C: tl.constexpr):
    """Write dx and dother of rows that are read block by block, twice."""
    ROWS: tl.constexpr = C.rows
    BLOCK: tl.constexpr = C.block
    sum_gwn = tl.zeros([ROWS, BLOCK], C.acc)
    sum_gw = tl.zeros([ROWS, BLOCK], C.acc)
    for start in range(0, num_cols, BLOCK):
        at = start + col
        col_mask = within(at, num_cols, C.exact)
        n, _, _, gw, _ = gradient(pointers, rows, start, at, statistics, (row_mask & col_mask, col_mask), C)
        sum_gwn += gw * n
        sum_gw += gw
    means = _row_means(sum_gwn, sum_gw, count, each, C)
    for start in range(0, num_cols, BLOCK):
        at = start + col
        col_mask = within(at, num_cols, C.exact)
        masks = (row_mask & col_mask, col_mask)
        n, _, _, gw, dfactor = gradient(pointers, rows, start, at, statistics, masks, C)
        write_factor(pointers, rows, at, dfactor, masks[0], C)
        write(pointers, rows, start, at, n, gw, means, statistics[1], masks, C)


@triton.jit
def _whole_rows(pointers, rows, col, statistics, row_mask, sums, num_cols, count, each, C: tl.constexpr):
    """Write dx and dother of rows that registers hold.

    `sums` are the program's sums for dweight, dbias and dgate, each a tuple by pieces. They come back with the terms of
    these rows added.
    """
    PIECES: tl.constexpr = C.pieces
    dweight, dbias, dgate = sums
    ns = ()
    gws = ()
    dweight_now = ()
    dbias_now = ()
    dgate_now = ()
    for i in tl.static_range(PIECES):
        start = i * C.block
        at = start + col
        col_mask = within(at, num_cols, C.exact)
        mask = row_mask & col_mask
        n, rounded, g, gw, dfactor = gradient(pointers, rows, start, at, statistics, (mask, col_mask), C)
        write_factor(pointers, rows, at, dfactor, mask, C)
        ns = ns + (n,)
        gws = gws + (gw,)
        if i == 0:
            sum_gwn = gw * n
            sum_gw = gw
        else:
            sum_gwn += gw * n
            sum_gw += gw
        dweight_now = dweight_now + (dweight[i] + tl.sum(g * rounded, axis=0) if C.dweight else dweight[i],)
        dbias_now = dbias_now + (dbias[i] + tl.sum(g, axis=0) if C.dbias else dbias[i],)
    if C.dx or C.dother:
        means = _row_means(sum_gwn, sum_gw, count, each, C)
        for i in tl.static_range(PIECES):
            start = i * C.block
            at = start + col
            col_mask = within(at, num_cols, C.exact)
            masks = (row_mask & col_mask, col_mask)
            of_gate = write(pointers, rows, start, at, ns[i], gws[i], means, statistics[1], masks, C)
            dgate_now = dgate_now + (dgate[i] + tl.sum(of_gate, axis=0) if C.dgate else dgate[i],)
    if not C.dgate:
        dgate_now = dgate
    return dweight_now, dbias_now, dgate_now


@triton.jit
def _rows(pointers, partials, here, lengths, strides, steps, counts, C: tl.constexpr):
    """Write dx and dother, and partial sums of columns unless rows are looped over."""
    ROWS: tl.constexpr = C.rows
    BLOCK: tl.constexpr = C.block
    PIECES: tl.constexpr = C.pieces
    num_rows = lengths[0]
    num_cols = lengths[1]
    number, group, groups, per_group = here
    count, each = counts
    program = number.to(tl.int64)
    programs = tl.num_programs(0)
    if C.grouped:
        programs = per_group
    all_rows = of_all(num_rows, groups, C)
    col = tl.arange(0, BLOCK)[None, :]
    dweight = ()
    dbias = ()
    dgate = ()
    for _piece in tl.static_range(PIECES):
        dweight = dweight + (tl.zeros([BLOCK if C.dweight else 1], C.acc),)
        dbias = dbias + (tl.zeros([BLOCK if C.dbias else 1], C.acc),)
        dgate = dgate + (tl.zeros([BLOCK if C.dgate else 1], C.acc),)
    for tile in range(program, tl.cdiv(num_rows, ROWS), programs):
        sample = tile * ROWS + tl.arange(0, ROWS)[:, None].to(tl.int64)
        row, rows, row_mask = rows_at(sample, group, lengths, strides, steps, C)
        statistics = statistics_of(pointers[10], row, all_rows, row_mask, C)
        if C.looped:
            _long_rows(pointers, rows, col, statistics, row_mask, num_cols, count, each, C)
        else:
            kept_sums = (dweight, dbias, dgate)
            dweight, dbias, dgate = _whole_rows(
                pointers, rows, col, statistics, row_mask, kept_sums, num_cols, count, each, C
            )
    width = of_all(num_cols, groups, C)
    for i in tl.static_range(PIECES):
        at = i * BLOCK + tl.arange(0, BLOCK)
        store_partials(partials, program, programs, at, (dweight[i], dbias[i], dgate[i]), num_cols, width, C)


@triton.jit
def _columns(pointers, partials, here, lengths, strides, steps, C: tl.constexpr):
    """Write the partial sums alone, of a block of columns and of some tiles of rows."""
    ROWS: tl.constexpr = C.rows
    BLOCK: tl.constexpr = C.block
    num_rows = lengths[0]
    num_cols = lengths[1]
    number, group, groups, _per_group = here
    start = number * BLOCK
    program = tl.program_id(1).to(tl.int64)
    programs = tl.num_programs(1)
    col = start + tl.arange(0, BLOCK)[None, :]
    col_mask = within(col, num_cols, C.exact)
    dweight = tl.zeros([ROWS, BLOCK], C.acc)
    dbias = tl.zeros([ROWS, BLOCK], C.acc)
    dgate = tl.zeros([ROWS, BLOCK], C.acc)
    for tile in range(program, tl.cdiv(num_rows, ROWS), programs):
        sample = tile * ROWS + tl.arange(0, ROWS)[:, None].to(tl.int64)
        row, rows, row_mask = rows_at(sample, group, lengths, strides, steps, C)
        statistics = statistics_of(pointers[10], row, of_all(num_rows, groups, C), row_mask, C)
        mask = row_mask & col_mask
        _, rounded, g, _, _ = gradient(pointers, rows, start, col, statistics, (mask, col_mask), C)
        if C.dweight:
            dweight += g * rounded
        if C.dbias:
            dbias += g
        if C.dgate:
            u = before_gate(pointers[2], pointers[7], rows[2] + col, rows[3] + start, mask, C)
            dgate += load(pointers[9], rows[3] + col, mask, C.wide) * u
    at = start + tl.arange(0, BLOCK)
    store_partials(partials, program, programs, at, (dweight, dbias, dgate), num_cols, of_all(num_cols, groups, C), C)


# fmt: off
@kernel()
def row_norm_bwd(
    dy_ptr, h_ptr, other_ptr, weight_ptr, bias_ptr, gate_ptr, seed_ptr, dh_ptr, stats_ptr,
    dx_ptr, dother_ptr, partials_ptr, dgate_partials_ptr,
    per_group, num_rows, col_units, middle, inner, g0, g1, g2, h0, h1, h2, o0, o1, o2,
    sample_step, group_step, weight_pitch, bias_pitch, gate_pitch, C: tl.constexpr,
):
    # fmt: on
    """Write the gradients, or a part of them.

    `num_rows` is the number of samples, each of which has a row in every group. With C.columns, the partial sums of
    columns alone are written.
    """
    num_cols = col_units * C.unit
    # The division comes first, because the compiler would move an approximate one between the sums of a row.
    count = scalar(num_cols, C.acc)
    each = divide(tl.full([1, 1], 1.0, C.acc), count)
    number, group, groups = place(per_group, C)
    here = (number, group, groups, per_group)
    weight = of_group(weight_ptr, group, weight_pitch * C.unit, C)
    bias = of_group(bias_ptr, group, bias_pitch * C.unit, C)
    gate = of_group(gate_ptr, group, gate_pitch * C.unit, C)
    pointers = (dy_ptr, h_ptr, other_ptr, dh_ptr, weight, bias, gate, seed_ptr, dx_ptr, dother_ptr, stats_ptr)
    lengths = (num_rows, num_cols, middle, inner)
    strides = ((g0, g1, g2), (h0, h1, h2), (o0, o1, o2))
    steps = (sample_step, group_step)
    partials = (of_group(partials_ptr, group, num_cols, C), of_group(dgate_partials_ptr, group, num_cols, C))
    if C.columns:
        _columns(pointers, partials, here, lengths, strides, steps, C)
    else:
        _rows(pointers, partials, here, lengths, strides, steps, (count, each), C)
