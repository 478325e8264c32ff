"""LayerNorm and RMSNorm, backward, with the stages around them.

With n = norm(h), w = offset + weight, g = dy * activation'(n w + bias) and the means E over a row:

    dh = rstd * (g w - n E[g w n] - E[g w]) + what arrives at h      (without E[g w] for RMSNorm)
    dresidual = dh, dx = dh * keep * pre_activation'(x), dweight = sum of g n over rows, dbias = sum of g over rows

and with s = gate_activation of a last gate a, g = dy * s(a) and da = dy * (n w + bias) * s'(a); of a first one,
h = x * s(a), dx = dh * s(a) and da = dh * x * s'(a). The residual or the gate is the other row.

HF: the n of dweight and of activation's argument, and that argument, are rounded as in forward.

h is recomputed from x or, with a residual, read. Where columns are summed too, programs are persistent: each walks
through tiles of rows, with sums for dweight and dbias in registers, and writes one partial row; sum_partials adds those
in order. Longer rows (plan.py) have a program each for dx, which reads them twice if registers do not hold them
(LOOPED), and row_norm_bwd_columns sums their columns. Bytes per element: x and dy in, dx out; x and dy once more where
columns are summed apart.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernel_fusion.backends.triton.kernels.activations import times_slope, value
from kernel_fusion.backends.triton.kernels.chain import let_next_kernel_start, wait_for_previous_kernel
from kernel_fusion.backends.triton.kernels.dropout import kept
from kernel_fusion.backends.triton.kernels.elementary import divide, quotient
from kernel_fusion.backends.triton.kernels.row_norm_fwd import OF_GROUPS, affine, normalised, weight_and_bias
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

# These may differ between calls of one compiled kernel, and count units.
LENGTHS = ["num_rows", "col_units", "middle", "inner", "g0", "g1", "g2", "h0", "h1", "h2", "o0", "o1", "o2"]


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
    """Mean and rstd of rows."""
    if C.rms:
        rstd = load(stats_ptr, row, row_mask, C.wide)
        mean = tl.zeros_like(rstd)
    else:
        mean = load(stats_ptr, row, row_mask, C.wide)
        rstd = load(stats_ptr, num_stats + row, row_mask, C.wide)
    return mean, rstd


@triton.jit
def gradient(pointers, rows, start, at, statistics, mask, col_mask, C: tl.constexpr, LAST: tl.constexpr):
    """n, n as it is rounded, g, g * w and the gradient of a last factor's row, of columns `at`, from `start` on.

    `pointers` are dy, h, the other row, weight, bias and seed. Masked dy is read as zero, so g is zero there, and n
    finite.
    """
    dy_ptr, h_ptr, other_ptr, weight_ptr, bias_ptr, seed_ptr = pointers
    dy_row, h_row, other_row, out_row = rows
    mean, rstd = statistics
    dy_offset = dy_row + at
    h_offset = h_row + at
    position = out_row + start
    if C.stored:
        h = load(h_ptr, h_offset, mask, C.wide, LAST)
    else:
        pointers = (h_ptr, other_ptr, seed_ptr, weight_ptr)  # without a residual there is no gate
        h = normalised(pointers, (h_offset, other_row + at), at, position, (mask, col_mask), C, C.block, LAST)
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
    """A tile of dropout(pre_activation(x)), which the residual's gate multiplies; `pointers`: x, seed."""
    u = value(load(pointers[0], other_row + at, mask, C.wide, LAST), C.pre_activation)
    if C.threshold > 0:
        u = tl.where(kept(pointers[1], position, C.threshold, C.aligned, C.block), u * C.kept_scale, 0.0)
    return u


@triton.jit
def write(pointers, rows, start, at, n, gw, means, rstd, masks, C: tl.constexpr, LAST: tl.constexpr):
    """dx, and the gradient of the residual or of a first factor's row, of a tile; returns what dgate sums up.

    `pointers` are dh, h, the other row (x where forward stored h), seed, the two, and the gate.
    """
    dh_ptr, h_ptr, other_ptr, seed_ptr, dx_ptr, dother_ptr, gate_ptr = pointers
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
        u = before_gate((other_ptr, seed_ptr), other_row, at, position, mask, C, LAST)
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
    """The gradient of a last factor, of a tile; `pointers` as for `write`."""
    if C.last_factor and C.dother:
        store(pointers[5], rows[3] + at, dfactor, mask, LAST)


@triton.jit
def _long_rows(sources, targets, rows, col, statistics, row_mask, num_cols, count, each, C: tl.constexpr):
    """dx and dother of rows that are read a block at a time, twice; of parts of rows, the sums of gwn and gw."""
    ROWS: tl.constexpr = C.rows
    BLOCK: tl.constexpr = C.block
    sum_gwn = tl.zeros([ROWS, BLOCK], C.acc)
    sum_gw = tl.zeros([ROWS, BLOCK], C.acc)
    for start in range(0, num_cols, BLOCK):
        at = start + col
        col_mask = within(at, num_cols, C.exact)
        n, _, _, gw, _ = gradient(sources, rows, start, at, statistics, row_mask & col_mask, col_mask, C, False)
        sum_gwn += gw * n
        sum_gw += gw
    if C.part:
        return _row_sums(sum_gwn, sum_gw, C)
    means = _row_means(sum_gwn, sum_gw, count, each, C)
    for start in range(0, num_cols, BLOCK):
        at = start + col
        col_mask = within(at, num_cols, C.exact)
        mask = row_mask & col_mask
        n, _, _, gw, dfactor = gradient(sources, rows, start, at, statistics, mask, col_mask, C, True)
        write_factor(targets, rows, at, dfactor, mask, C, True)
        write(targets, rows, start, at, n, gw, means, statistics[1], (mask, col_mask), C, True)
    return means


@triton.jit
def _whole_rows(sources, targets, rows, col, statistics, row_mask, sums, num_cols, count, each, C: tl.constexpr):
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
        n, rounded, g, gw, dfactor = gradient(sources, rows, start, at, statistics, mask, col_mask, C, False)
        write_factor(targets, rows, at, dfactor, mask, C, AGAIN)
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
                n, _, _, gw, _ = gradient(sources, rows, start, at, statistics, mask, col_mask, C, True)
            else:
                n = ns[i]
                gw = gws[i]
            of_gate = write(targets, rows, start, at, n, gw, means, statistics[1], (mask, col_mask), C, AGAIN)
            dgate_now = dgate_now + (dgate[i] + tl.sum(of_gate, axis=0) if C.dgate else dgate[i],)
    if not C.dgate:
        dgate_now = dgate
    return dweight_now, dbias_now, dgate_now, row_sums


@triton.jit(do_not_specialize=LENGTHS + OF_GROUPS)
def row_norm_bwd(
    dy_ptr,
    h_ptr,
    other_ptr,
    dh_ptr,
    weight_ptr,
    bias_ptr,
    seed_ptr,
    stats_ptr,
    dx_ptr,
    dother_ptr,
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
    dgate_partials_ptr,
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
    weight_ptr = of_group(weight_ptr, group, weight_pitch * C.unit, C)
    bias_ptr = of_group(bias_ptr, group, bias_pitch * C.unit, C)
    sources = (dy_ptr, h_ptr, other_ptr, weight_ptr, bias_ptr, seed_ptr)
    gate_ptr = of_group(gate_ptr, group, gate_pitch * C.unit, C)
    targets = (dh_ptr, h_ptr, other_ptr, seed_ptr, dx_ptr, dother_ptr, gate_ptr)
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
        row_mask = sample < num_rows
        row = row_of(sample, group, (sample_step, group_step), C)
        statistics = statistics_of(stats_ptr, row, of_all(num_rows, groups, C), row_mask, C)
        dy_row = row_offset(row, (middle, inner), (g0, g1, g2), C.unit, C.flat)
        h_row = row_offset(row, (middle, inner), (h0, h1, h2), C.unit, C.flat)
        other_row = row_offset(row, (middle, inner), (o0, o1, o2), C.unit, C.flat)
        rows = (dy_row, h_row, other_row, row * num_cols)
        if C.looped:
            sums = _long_rows(sources, targets, rows, col, statistics, row_mask, num_cols, count, each, C)
        else:
            kept_sums = (dweight, dbias, dgate)
            dweight, dbias, dgate, sums = _whole_rows(
                sources, targets, rows, col, statistics, row_mask, kept_sums, num_cols, count, each, C
            )
        if C.part and C.dx:
            store_sums(dx_ptr, row, of_all(num_rows, groups, C), num_cols, row_mask, sums, C)
    # Partial rows, of all groups: those of dweight, one per program, then those of dbias.
    partials_ptr = of_group(partials_ptr, group, num_cols, C)
    dgate_partials_ptr = of_group(dgate_partials_ptr, group, num_cols, C)
    width = of_all(num_cols, groups, C)
    for i in tl.static_range(PIECES):
        at = i * BLOCK + tl.arange(0, BLOCK)
        if C.dweight:
            tl.store(partials_ptr + program * width + at, dweight[i], mask=at < num_cols)
        if C.dbias:
            first = programs if C.dweight else 0
            tl.store(partials_ptr + (first + program) * width + at, dbias[i], mask=at < num_cols)
        if C.dgate:
            tl.store(dgate_partials_ptr + program * width + at, dgate[i], mask=at < num_cols)


@triton.jit(do_not_specialize=["num_partials"])
def sum_partials(partials_ptr, first_ptr, second_ptr, num_partials, num_cols, C: tl.constexpr):
    """Adds the partial rows of a block of columns, in order, and rounds once.

    C.pair: of two sums; axis 1 of the grid says which. A constant, because Inductor must know which tensors are
    written.
    """
    ROWS: tl.constexpr = C.rows
    BLOCK: tl.constexpr = C.block
    wait_for_previous_kernel(C.chained)
    let_next_kernel_start(C.chained)
    which = tl.program_id(1)
    block = tl.program_id(0)
    if C.many:
        block = block.to(tl.int64)
    col = block * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([ROWS, BLOCK], C.acc)
    for start in range(0, num_partials, ROWS):
        partial = start + tl.arange(0, ROWS)[:, None]
        if C.many:
            partial = partial.to(tl.int64)
        mask = (partial < num_partials) & (col < num_cols)[None, :]
        total += load(partials_ptr, (which * num_partials + partial) * num_cols + col[None, :], mask, C.wide)
    sums = tl.sum(total, axis=0)
    if C.pair:
        if which == 0:
            store(first_ptr, col, sums, col < num_cols)
        else:
            store(second_ptr, col, sums, col < num_cols)
    else:
        store(first_ptr, col, sums, col < num_cols)
