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
row_norm_bwd_columns sums their columns. Bytes per element: x and dy in, dx out; x and dy once more if columns are
summed apart.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernel_fusion.backends.triton.kernels.activations import times_slope, value
from kernel_fusion.backends.triton.kernels.chain import wait_for_previous_kernel
from kernel_fusion.backends.triton.kernels.constants import kernel
from kernel_fusion.backends.triton.kernels.dropout import kept
from kernel_fusion.backends.triton.kernels.elementary import divide, quotient
from kernel_fusion.backends.triton.kernels.row_norm_fwd import affine, normalised, weight_and_bias
from kernel_fusion.backends.triton.kernels.rows import (
    load,
    of_all,
    of_group,
    place,
    row_of,
    row_offset,
    scalar,
    shifted,
    store,
    store_sums,
    within,
)
from kernel_fusion.backends.triton.kernels.stages import factor, times_factor_slope


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
def statistics_of(stats_ptr, row, num_stats, row_mask, C: tl.constexpr):
    """Mean and rstd.

    Not by `rows_at`: Inductor takes what a function reads for written if another of its results leads to a store.
    """
    if C.rms:
        rstd = load(stats_ptr, row, row_mask, C.wide)
        mean = tl.zeros_like(rstd)
    else:
        mean = load(stats_ptr, row, row_mask, C.wide)
        rstd = load(stats_ptr, num_stats + row, row_mask, C.wide)
    return mean, rstd


@triton.jit
def rows_at(sample, group, lengths, strides, steps, C: tl.constexpr):
    """The rows of samples in a group: their numbers, where they begin in memory, and which exist.

    They begin in dy, h and the other row, whose strides are given, and in dense results.
    """
    num_rows, num_cols, middle, inner = lengths
    row_mask = sample < num_rows
    row = row_of(sample, group, steps, C)
    dy_row = row_offset(row, (middle, inner), strides[0], C.unit, C.flat)
    h_row = row_offset(row, (middle, inner), strides[1], C.unit, C.flat)
    other_row = row_offset(row, (middle, inner), strides[2], C.unit, C.flat)
    return row, (dy_row, h_row, other_row, row * num_cols), row_mask


@triton.jit
def gradient(pointers, rows, start, at, statistics, mask, col_mask, C: tl.constexpr, LAST: tl.constexpr):
    """n, n as it is rounded, g, g * w and the gradient of a last factor's row, of columns `at`, from `start` on.

    `pointers`, here and below, are dy, h, the other row (x where forward stored h), dh, weight, bias, gate, seed, dx
    and dother. Masked dy is read as zero, so g is zero there, and n finite.
    """
    dy_ptr, h_ptr, other_ptr, _, weight_ptr, bias_ptr, _, seed_ptr, _, _ = pointers
    dy_row, h_row, other_row, out_row = rows
    mean, rstd = statistics
    dy_offset = dy_row + at
    h_offset = h_row + at
    position = out_row + start
    if C.stored:
        h = load(h_ptr, h_offset, mask, C.wide, LAST)
    else:
        of_forward = (h_ptr, other_ptr, seed_ptr, weight_ptr)  # without a residual there is no gate
        h = normalised(of_forward, (h_offset, other_row + at), at, position, (mask, col_mask), C, C.block, LAST)
    n = (h - mean) * rstd
    g = load(dy_ptr, dy_offset, mask, C.wide, LAST)
    weight, bias = weight_and_bias((weight_ptr, bias_ptr), at, col_mask, C)
    rounded, z = affine(n, (weight, bias), C, h_ptr.dtype.element_ty)
    if C.rounding == "hf":  # where masked it may have become infinite
        rounded = tl.where(mask, rounded, 0.0)
        z = tl.where(mask, z, 0.0)
    if C.activation != "identity":
        g = times_slope(g, z, C.activation)
    dfactor = g
    if C.last_factor:
        row = load(other_ptr, other_row + at, mask, C.wide, LAST)
        dfactor = times_factor_slope(g * z, row, C)
        g = g * factor(row, C)
    if C.has_weight:
        gw = g * shifted(weight.to(g.dtype), C.offset)
    else:
        gw = g
    return n, rounded, g, gw, dfactor


@triton.jit
def before_gate(pointers, other_row, at, position, mask, C: tl.constexpr, LAST: tl.constexpr):
    """A tile of dropout(pre_activation(x)), which the residual's gate multiplies."""
    u = value(load(pointers[2], other_row + at, mask, C.wide, LAST), C.pre_activation)
    if C.threshold > 0:
        u = tl.where(kept(pointers[7], position, C.threshold, C.aligned, C.block), u * C.kept_scale, 0.0)
    return u


@triton.jit
def write(pointers, rows, start, at, n, gw, means, rstd, masks, C: tl.constexpr, LAST: tl.constexpr):
    """dx, and the gradient of the residual or of a first factor's row, of a tile; returns what dgate sums up."""
    _, h_ptr, other_ptr, dh_ptr, _, _, gate_ptr, seed_ptr, dx_ptr, dother_ptr = pointers
    mask, col_mask = masks
    _, h_row, other_row, out_row = rows
    mean_gwn, mean_gw = means
    other_offset = other_row + at
    out_offset = out_row + at
    position = out_row + start
    dh = rstd * (gw - n * mean_gwn - mean_gw)
    if C.has_dh:
        dh += load(dh_ptr, out_offset, mask, C.wide, LAST)
    if C.first_factor:
        row = load(other_ptr, other_offset, mask, C.wide, LAST)
        if C.dother:
            x = load(h_ptr, h_row + at, mask, C.wide, LAST)
            store(dother_ptr, out_offset, times_factor_slope(dh * x, row, C), mask, LAST)
        dh = dh * factor(row, C)
    elif C.dother and not C.last_factor:
        store(dother_ptr, out_offset, dh, mask, LAST)
    of_gate = dh
    if C.dgate:
        u = before_gate(pointers, other_row, at, position, mask, C, LAST)
        of_gate = tl.where(mask, dh * u, 0.0)
    if C.dx:
        if C.gates_residual:
            dh = dh * load(gate_ptr, at, col_mask, C.wide)
        if C.threshold > 0:
            dh = tl.where(kept(seed_ptr, position, C.threshold, C.aligned, C.block), dh * C.kept_scale, 0.0)
        if C.pre_activation != "identity":
            dh = times_slope(dh, load(other_ptr, other_offset, mask, C.wide), C.pre_activation)
        store(dx_ptr, out_offset, dh, mask, LAST)
    return of_gate


@triton.jit
def write_factor(pointers, rows, at, dfactor, mask, C: tl.constexpr, LAST: tl.constexpr):
    """The gradient of a last factor, of a tile."""
    if C.last_factor and C.dother:
        store(pointers[9], rows[3] + at, dfactor, mask, LAST)


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
    """dx and dother of rows that registers hold; and `sums` over rows, by pieces, with theirs.

    Parts of rows give no dx and dother, but the sums of gwn and gw.
    """
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
def store_partials(pointers, program, programs, at, sums, num_cols, width, C: tl.constexpr):
    """A program's partial rows of dweight, of dbias, which lie behind those of dweight, and of dgate, at columns `at`.

    A row of all groups is `width` long. Sums by rows of a tile are added up.
    """
    partials_ptr, of_gate_ptr = pointers
    dweight, dbias, dgate = sums
    if C.dweight:
        tl.store(partials_ptr + program * width + at, _down(dweight), mask=at < num_cols)
    if C.dbias:
        first = programs if C.dweight else 0
        tl.store(partials_ptr + (first + program) * width + at, _down(dbias), mask=at < num_cols)
    if C.dgate:
        tl.store(of_gate_ptr + program * width + at, _down(dgate), mask=at < num_cols)


@triton.jit
def _down(sums):
    if len(sums.shape) == 2:
        sums = tl.sum(sums, axis=0)
    return sums


@kernel()
def row_norm_bwd(
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
    """dx and dother; unless rows are looped over, partial sums too. `num_rows` counts samples: rows in every group.

    C.part: `dx_ptr` gets the rows' sums of gwn and gw, for `row_norm_bwd_apply`.
    """
    ROWS: tl.constexpr = C.rows
    BLOCK: tl.constexpr = C.block
    PIECES: tl.constexpr = C.pieces
    num_cols = col_units * C.unit
    # Divided before anything is waited for.
    count = scalar(num_cols, C.acc)
    each = divide(tl.full([1, 1], 1.0, C.acc), count)
    number, group, groups = place(per_group, C)
    program = number.to(tl.int64)
    programs = tl.num_programs(0)
    if C.grouped:
        programs = per_group
    col = tl.arange(0, BLOCK)[None, :]
    weight = of_group(weight_ptr, group, weight_pitch * C.unit, C)
    bias = of_group(bias_ptr, group, bias_pitch * C.unit, C)
    gate = of_group(gate_ptr, group, gate_pitch * C.unit, C)
    pointers = (dy_ptr, h_ptr, other_ptr, dh_ptr, weight, bias, gate, seed_ptr, dx_ptr, dother_ptr)
    lengths = (num_rows, num_cols, middle, inner)
    strides = ((g0, g1, g2), (h0, h1, h2), (o0, o1, o2))
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
        steps = (sample_step, group_step)
        row, rows, row_mask = rows_at(sample, group, lengths, strides, steps, C)
        statistics = statistics_of(stats_ptr, row, of_all(num_rows, groups, C), row_mask, C)
        if C.looped:
            sums = _long_rows(pointers, rows, col, statistics, row_mask, num_cols, count, each, C)
        else:
            kept_sums = (dweight, dbias, dgate)
            dweight, dbias, dgate, sums = _whole_rows(
                pointers, rows, col, statistics, row_mask, kept_sums, num_cols, count, each, C
            )
        if C.part and C.dx:
            store_sums(dx_ptr, row, of_all(num_rows, groups, C), num_cols, row_mask, sums, C)
    partials = (of_group(partials_ptr, group, num_cols, C), of_group(dgate_partials_ptr, group, num_cols, C))
    width = of_all(num_cols, groups, C)
    for i in tl.static_range(PIECES):
        at = i * BLOCK + tl.arange(0, BLOCK)
        store_partials(partials, program, programs, at, (dweight[i], dbias[i], dgate[i]), num_cols, width, C)
