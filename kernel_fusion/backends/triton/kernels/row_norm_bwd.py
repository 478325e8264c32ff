"""LayerNorm and RMSNorm, backward, with the stages around them.

With n = norm(h), w = offset + weight, g = dy * activation'(n w + bias) and the means E over a row:

    dh = rstd * (g w - n E[g w n] - E[g w]) + what arrives at h      (without E[g w] for RMSNorm)
    dresidual = dh, dx = dh * keep * pre_activation'(x), dweight = sum of g n over rows, dbias = sum of g over rows

and with s = gate_activation of a last gate a, g = dy * s(a) and da = dy * (n w + bias) * s'(a); of a first one, h = x *
s(a), dx = dh * s(a) and da = dh * x * s'(a). The residual or the gate is the other row.

HF: the n of dweight and of activation's argument, and that argument, are rounded as in forward.

h is recomputed from x or, with a residual, read. To sum columns too, programs are persistent: each walks through tiles
of rows, with sums for dweight and dbias in registers, and writes one partial row; sum_partials adds those in order.
Longer rows (plan.py) have a program each for dx, which reads them twice if registers do not hold them (LOOPED), and
another launch sums their columns. Bytes per element: x and dy in, dx out; x and dy once more if columns are summed
apart.
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
from kernel_fusion.backends.triton.kernels.rows import (
    load,
    means_over_ranks,
    of_all,
    of_group,
    part_of,
    place,
    scalar,
    store_sums,
    wait_for_previous_kernel,
    within,
)


@triton.jit
def _add_pairs(a0, a1, b0, b1):
    return a0 + b0, a1 + b1


@triton.jit
def _row_sums(gwn, gw, C: tl.constexpr):
    """Sums of gwn and gw (not for RMSNorm), which are sums by lanes, across the program at once."""
    if C.rms:
        sum_gwn = tl.sum(gwn, axis=1)[:, None]
        sum_gw = tl.zeros_like(sum_gwn)
    else:
        first, second = tl.reduce((gwn, gw), 1, _add_pairs)
        sum_gwn = first[:, None]
        sum_gw = second[:, None]
    return sum_gwn, sum_gw


@triton.jit
def _row_means(gwn, gw, count, each, C: tl.constexpr):
    """E[gwn] and E[gw] (not for RMSNorm). `each` is 1 / count."""
    sum_gwn, sum_gw = _row_sums(gwn, gw, C)
    mean_gwn = quotient(sum_gwn, count, each)
    mean_gw = sum_gw
    if not C.rms:
        mean_gw = quotient(sum_gw, count, each)
    return mean_gwn, mean_gw


@triton.jit
def _long_rows(pointers, rows, col, statistics, row_mask, num_cols, count, each, C: tl.constexpr):
    """dx and dother of rows that are read a block at a time, twice; of parts of rows, the sums of gwn and gw."""
    ROWS: tl.constexpr = C.rows
    BLOCK: tl.constexpr = C.block
    sum_gwn = tl.zeros([ROWS, BLOCK], C.acc)
    sum_gw = tl.zeros([ROWS, BLOCK], C.acc)
    for start in range(0, num_cols, BLOCK):
        at = start + col
        col_mask = within(at, num_cols, C.exact)
        n, _, _, gw, _ = gradient(pointers, rows, start, at, statistics, row_mask & col_mask, col_mask, C, False)
        sum_gwn += gw * n
        sum_gw += gw
    if C.part:
        return _row_sums(sum_gwn, sum_gw, C)
    means = _row_means(sum_gwn, sum_gw, count, each, C)
    for start in range(0, num_cols, BLOCK):
        at = start + col
        col_mask = within(at, num_cols, C.exact)
        mask = row_mask & col_mask
        n, _, _, gw, dfactor = gradient(pointers, rows, start, at, statistics, mask, col_mask, C, True)
        write_factor(pointers, rows, at, dfactor, mask, C, True)
        write(pointers, rows, start, at, n, gw, means, statistics[1], (mask, col_mask), C, True)
    return means


@triton.jit
def _whole_rows(pointers, rows, col, statistics, row_mask, sums, num_cols, count, each, C: tl.constexpr):
    """dx and dother of rows that registers hold; and `sums` over rows, by pieces, with theirs."""
    PIECES: tl.constexpr = C.pieces
    AGAIN: tl.constexpr = C.again
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
        n, rounded, g, gw, dfactor = gradient(pointers, rows, start, at, statistics, mask, col_mask, C, False)
        write_factor(pointers, rows, at, dfactor, mask, C, AGAIN)
        if not AGAIN:
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
    row_sums = (sum_gwn, sum_gw)
    if C.part:
        row_sums = _row_sums(sum_gwn, sum_gw, C)
    elif C.dx or C.dother:
        means = _row_means(sum_gwn, sum_gw, count, each, C)
        for i in tl.static_range(PIECES):
            start = i * C.block
            at = start + col
            col_mask = within(at, num_cols, C.exact)
            mask = row_mask & col_mask
            if AGAIN:
                n, _, _, gw, _ = gradient(pointers, rows, start, at, statistics, mask, col_mask, C, True)
            else:
                n = ns[i]
                gw = gws[i]
            of_gate = write(pointers, rows, start, at, n, gw, means, statistics[1], (mask, col_mask), C, AGAIN)
            dgate_now = dgate_now + (dgate[i] + tl.sum(of_gate, axis=0) if C.dgate else dgate[i],)
    if not C.dgate:
        dgate_now = dgate
    return dweight_now, dbias_now, dgate_now, row_sums


@triton.jit
def _rows(pointers, partials, here, lengths, strides, steps, counts, C: tl.constexpr):
    """dx and dother; unless rows are looped over, partial sums of their columns too."""
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
    col = tl.arange(0, BLOCK)[None, :]
    dweight = ()
    dbias = ()
    dgate = ()
    for _piece in tl.static_range(PIECES):
        dweight = dweight + (tl.zeros([BLOCK if C.dweight else 1], C.acc),)
        dbias = dbias + (tl.zeros([BLOCK if C.dbias else 1], C.acc),)
        dgate = dgate + (tl.zeros([BLOCK if C.dgate else 1], C.acc),)
    wait_for_previous_kernel(C.chained)
    for tile in tl.range(program, tl.cdiv(num_rows, ROWS), programs, num_stages=C.stages):
        sample = tile * ROWS + tl.arange(0, ROWS)[:, None].to(tl.int64)
        row, rows, row_mask = rows_at(sample, group, lengths, strides, steps, C)
        statistics = statistics_of(pointers[10], row, of_all(num_rows, groups, C), row_mask, C)
        if C.looped:
            sums = _long_rows(pointers, rows, col, statistics, row_mask, num_cols, count, each, C)
        else:
            kept_sums = (dweight, dbias, dgate)
            dweight, dbias, dgate, sums = _whole_rows(
                pointers, rows, col, statistics, row_mask, kept_sums, num_cols, count, each, C
            )
        if C.part and C.dx:
            store_sums(pointers[8], row, of_all(num_rows, groups, C), num_cols, row_mask, sums, C)
    width = of_all(num_cols, groups, C)
    for i in tl.static_range(PIECES):
        at = i * BLOCK + tl.arange(0, BLOCK)
        store_partials(partials, program, programs, at, (dweight[i], dbias[i], dgate[i]), num_cols, width, C)


@triton.jit
def _columns(pointers, partials, here, lengths, strides, steps, C: tl.constexpr):
    """The partial sums alone, of a block of columns and some tiles of rows."""
    ROWS: tl.constexpr = C.rows
    BLOCK: tl.constexpr = C.block
    num_rows = lengths[0]
    num_cols = lengths[1]
    number, group, groups, _per_group = here
    start = number * BLOCK
    program = tl.program_id(1).to(tl.int64)
    programs = tl.num_programs(1)
    col = start + tl.arange(0, BLOCK)[None, :]
    dweight = tl.zeros([ROWS, BLOCK], C.acc)
    dbias = tl.zeros([ROWS, BLOCK], C.acc)
    dgate = tl.zeros([ROWS, BLOCK], C.acc)
    for tile in range(program, tl.cdiv(num_rows, ROWS), programs):
        sample = tile * ROWS + tl.arange(0, ROWS)[:, None].to(tl.int64)
        row, rows, row_mask = rows_at(sample, group, lengths, strides, steps, C)
        statistics = statistics_of(pointers[10], row, of_all(num_rows, groups, C), row_mask, C)
        col_mask = within(col, num_cols, C.exact)
        mask = row_mask & col_mask
        _, rounded, g, _, _ = gradient(pointers, rows, start, col, statistics, mask, col_mask, C, True)
        if C.dweight:
            dweight += g * rounded
        if C.dbias:
            dbias += g
        if C.dgate:
            u = before_gate(pointers[2], pointers[7], rows[2] + col, rows[3] + start, mask, C, C.block, True)
            dgate += load(pointers[9], rows[3] + col, mask, C.wide, True) * u
    at = start + tl.arange(0, BLOCK)
    store_partials(partials, program, programs, at, (dweight, dbias, dgate), num_cols, of_all(num_cols, groups, C), C)


@triton.jit
def _joined(pointers, sums_ptr, here, lengths, strides, steps, C: tl.constexpr):
    """dx and dother of rows whose other columns are on other ranks, from sums over all; the last rows first."""
    num_rows = lengths[0]
    num_cols = lengths[1]
    number, group, groups, _ = here
    sample, start = part_of(number, num_cols, C)
    at = start + tl.arange(0, C.block)[None, :]
    col_mask = within(at, num_cols, C.exact)
    row, rows, row_mask = rows_at(sample, group, lengths, strides, steps, C)
    statistics = statistics_of(pointers[10], row, of_all(num_rows, groups, C), row_mask, C)
    mask = row_mask & col_mask
    mean_gwn, mean_gw = means_over_ranks(sums_ptr, row, of_all(num_rows, groups, C), row_mask, C)
    means = (mean_gwn.to(C.acc), mean_gw.to(C.acc))
    n, _, _, gw, dfactor = gradient(pointers, rows, start, at, statistics, mask, col_mask, C, True)
    write_factor(pointers, rows, at, dfactor, mask, C, True)
    write(pointers, rows, start, at, n, gw, means, statistics[1], (mask, col_mask), C, True)


@kernel()
def row_norm_bwd(
    dy_ptr,
    h_ptr,
    other_ptr,
    weight_ptr,
    bias_ptr,
    gate_ptr,
    seed_ptr,
    dh_ptr,
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
    """Backward, or a part of it. `num_rows` counts samples: rows in every group.

    C.columns: partial sums alone. C.part: `dx_ptr` gets the rows' sums of gwn and gw. C.joined: `partials_ptr` has
    these, added up over the ranks, for dx and dother alone.
    """
    num_cols = col_units * C.unit
    # Divided before anything is waited for.
    count = scalar(num_cols, C.acc)
    each = divide(tl.full([1, 1], 1.0, C.acc), count)
    number, group, groups = place(per_group, C, C.joined)
    here = (number, group, groups, per_group)
    weight = of_group(weight_ptr, group, weight_pitch * C.unit, C)
    bias = of_group(bias_ptr, group, bias_pitch * C.unit, C)
    gate = of_group(gate_ptr, group, gate_pitch * C.unit, C)
    pointers = (dy_ptr, h_ptr, other_ptr, dh_ptr, weight, bias, gate, seed_ptr, dx_ptr, dother_ptr, stats_ptr)
    lengths = (num_rows, num_cols, middle, inner)
    strides = ((g0, g1, g2), (h0, h1, h2), (o0, o1, o2))
    steps = (sample_step, group_step)
    if C.joined:
        _joined(pointers, partials_ptr, here, lengths, strides, steps, C)
    else:
        partials = (of_group(partials_ptr, group, num_cols, C), of_group(dgate_partials_ptr, group, num_cols, C))
        if C.columns:
            _columns(pointers, partials, here, lengths, strides, steps, C)
        else:
            _rows(pointers, partials, here, lengths, strides, steps, (count, each), C)
