"""LayerNorm and RMSNorm, backward, with the stages around them.

With n = norm(h), w = offset + weight, g = dy * activation'(n w + bias) and the means E over a row:

    dh = rstd * (g w - n E[g w n] - E[g w]) + what arrives at h      (without E[g w] for RMSNorm)
    dresidual = dh, dx = dh * keep * pre_activation'(x), dweight = sum of g n over rows, dbias = sum of g over rows

HF: with the n of dweight and of the argument of the activation', and with that argument, rounded as in forward.

h is recomputed from x, or, where there is a residual, read as forward wrote it. Where columns are summed too, programs
are persistent: each walks through tiles of rows, with sums for dweight and dbias in registers, and writes one partial
row; sum_partials adds those in order. Rows too long for that (plan.py) have a program each for dx, which reads them
twice if they do not fit in registers (LOOPED), and row_norm_bwd_columns sums their columns. Bytes per element: x and dy
in, dx out; x and dy once more where columns are summed apart.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernel_fusion.backends.triton.kernels.activations import times_slope
from kernel_fusion.backends.triton.kernels.chain import let_next_kernel_start, wait_for_previous_kernel
from kernel_fusion.backends.triton.kernels.dropout import kept
from kernel_fusion.backends.triton.kernels.elementary import divide, quotient
from kernel_fusion.backends.triton.kernels.row_norm_fwd import affine, normalised, weight_and_bias
from kernel_fusion.backends.triton.kernels.rows import load, row_offset, scalar, shifted, store, within

# What may differ between calls of one compiled kernel. What they are divisible by is UNIT.
LENGTHS = ["num_rows", "col_units", "middle", "inner", "g0", "g1", "g2", "h0", "h1", "h2", "x0", "x1", "x2"]


@triton.jit
def _add_pairs(a0, a1, b0, b1):
    return a0 + b0, a1 + b1


@triton.jit
def _row_means(gwn, gw, count, each, RMS: tl.constexpr):
    """E[gwn] and E[gw], unused by RMSNorm, of sums by lanes: across the program at once. `each` is 1 / count."""
    if RMS:
        mean_gwn = quotient(tl.sum(gwn, axis=1)[:, None], count, each)
        mean_gw = tl.zeros_like(mean_gwn)
    else:
        first, second = tl.reduce((gwn, gw), 1, _add_pairs)
        mean_gwn = quotient(first[:, None], count, each)
        mean_gw = quotient(second[:, None], count, each)
    return mean_gwn, mean_gw


@triton.jit
def _statistics(stats_ptr, row, num_rows, row_mask, RMS: tl.constexpr, WIDE: tl.constexpr):
    """Mean and rstd of rows."""
    if RMS:
        rstd = load(stats_ptr, row, row_mask, WIDE)
        mean = tl.zeros_like(rstd)
    else:
        mean = load(stats_ptr, row, row_mask, WIDE)
        rstd = load(stats_ptr, num_rows + row, row_mask, WIDE)
    return mean, rstd


@triton.jit
def _gradient(
    dy_ptr,
    h_ptr,
    weight_ptr,
    bias_ptr,
    seed_ptr,
    dy_offset,
    h_offset,
    position,
    col,
    mean,
    rstd,
    mask,
    col_mask,
    OFFSET: tl.constexpr,
    PRE: tl.constexpr,
    ACTIVATION: tl.constexpr,
    ROUNDS_TO: tl.constexpr,
    THRESHOLD: tl.constexpr,
    KEPT_SCALE: tl.constexpr,
    ALIGNED: tl.constexpr,
    STORED: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDE: tl.constexpr,
    LAST: tl.constexpr,
):
    """n, n as it is rounded, g and g * w of a tile. LAST as for `load`.

    Where masked, dy is read as zero, so g is zero, and n finite.
    """
    if STORED:
        h = load(h_ptr, h_offset, mask, WIDE, LAST)
    else:
        h = normalised(
            h_ptr, h_ptr, seed_ptr, h_offset, h_offset, position, mask,
            PRE, THRESHOLD, KEPT_SCALE, ALIGNED, False, BLOCK, WIDE, LAST,
        )  # fmt: skip
    n = (h - mean) * rstd
    g = load(dy_ptr, dy_offset, mask, WIDE, LAST)
    weight, bias = weight_and_bias(weight_ptr, bias_ptr, col, col_mask, HAS_WEIGHT, HAS_BIAS)
    rounded, z = affine(n, weight, bias, OFFSET, HAS_WEIGHT, HAS_BIAS, ROUNDS_TO)
    if ROUNDS_TO is not None:  # where masked it may have become infinite
        rounded = tl.where(mask, rounded, 0.0)
        z = tl.where(mask, z, 0.0)
    if ACTIVATION != "identity":
        g = times_slope(g, z, ACTIVATION)
    if HAS_WEIGHT:
        gw = g * shifted(weight.to(g.dtype), OFFSET)
    else:
        gw = g
    return n, rounded, g, gw


@triton.jit
def _write(
    n,
    gw,
    mean_gwn,
    mean_gw,
    rstd,
    dh_ptr,
    x_ptr,
    seed_ptr,
    dx_ptr,
    dresidual_ptr,
    x_offset,
    out_offset,
    position,
    mask,
    PRE: tl.constexpr,
    THRESHOLD: tl.constexpr,
    KEPT_SCALE: tl.constexpr,
    ALIGNED: tl.constexpr,
    HAS_DH: tl.constexpr,
    DX: tl.constexpr,
    DRESIDUAL: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDE: tl.constexpr,
    LAST: tl.constexpr,
):
    """dx and dresidual of a tile."""
    dh = rstd * (gw - n * mean_gwn - mean_gw)
    if HAS_DH:
        dh += load(dh_ptr, out_offset, mask, WIDE, LAST)
    if DRESIDUAL:
        store(dresidual_ptr, out_offset, dh, mask, LAST)
    if DX:
        if THRESHOLD > 0:
            dh = tl.where(kept(seed_ptr, position, THRESHOLD, ALIGNED, BLOCK), dh * KEPT_SCALE, 0.0)
        if PRE != "identity":
            dh = times_slope(dh, load(x_ptr, x_offset, mask, WIDE), PRE)
        store(dx_ptr, out_offset, dh, mask, LAST)


@triton.jit(do_not_specialize=LENGTHS)
def row_norm_bwd(
    dy_ptr,
    h_ptr,
    x_ptr,
    dh_ptr,
    weight_ptr,
    bias_ptr,
    seed_ptr,
    stats_ptr,
    dx_ptr,
    dresidual_ptr,
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
    x0,
    x1,
    x2,
    OFFSET: tl.constexpr,
    PRE: tl.constexpr,
    ACTIVATION: tl.constexpr,
    HF: tl.constexpr,
    THRESHOLD: tl.constexpr,
    KEPT_SCALE: tl.constexpr,
    STORED: tl.constexpr,
    HAS_DH: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    RMS: tl.constexpr,
    DX: tl.constexpr,
    DRESIDUAL: tl.constexpr,
    DWEIGHT: tl.constexpr,
    DBIAS: tl.constexpr,
    WIDE: tl.constexpr,
    FLAT: tl.constexpr,
    UNIT: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    PIECES: tl.constexpr,
    AGAIN: tl.constexpr,
    EXACT: tl.constexpr,
    LOOPED: tl.constexpr,
    STAGES: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """dx and dresidual, and partial sums if DWEIGHT, DBIAS, never if LOOPED. Lengths and strides: in UNIT elements."""
    ACC: tl.constexpr = tl.float64 if WIDE else tl.float32
    ROUNDS_TO: tl.constexpr = h_ptr.dtype.element_ty if HF else None
    ALIGNED: tl.constexpr = UNIT % 8 == 0
    num_cols = col_units * UNIT
    # Divided before anything is waited for.
    count = scalar(num_cols, ACC)
    each = divide(tl.full([1, 1], 1.0, ACC), count)
    program = tl.program_id(0).to(tl.int64)
    col = tl.arange(0, BLOCK)[None, :]
    dweight = ()
    dbias = ()
    for _piece in tl.static_range(PIECES):
        dweight = dweight + (tl.zeros([BLOCK if DWEIGHT else 1], ACC),)
        dbias = dbias + (tl.zeros([BLOCK if DBIAS else 1], ACC),)
    wait_for_previous_kernel(CHAINED)
    for tile in tl.range(program, tl.cdiv(num_rows, ROWS), tl.num_programs(0), num_stages=STAGES):
        row = tile * ROWS + tl.arange(0, ROWS)[:, None].to(tl.int64)
        row_mask = row < num_rows
        mean, rstd = _statistics(stats_ptr, row, num_rows, row_mask, RMS, WIDE)
        dy_row = row_offset(row, middle, inner, g0 * UNIT, g1 * UNIT, g2 * UNIT, FLAT)
        h_row = row_offset(row, middle, inner, h0 * UNIT, h1 * UNIT, h2 * UNIT, FLAT)
        x_row = row_offset(row, middle, inner, x0 * UNIT, x1 * UNIT, x2 * UNIT, FLAT)
        out_row = row * num_cols
        sum_gwn = tl.zeros([ROWS, BLOCK], ACC)
        sum_gw = tl.zeros([ROWS, BLOCK], ACC)
        if LOOPED:
            for start in range(0, num_cols, BLOCK):
                at = start + col
                col_mask = within(at, num_cols, EXACT)
                n, _, _, gw = _gradient(
                    dy_ptr, h_ptr, weight_ptr, bias_ptr, seed_ptr, dy_row + at, h_row + at, out_row + start, at,
                    mean, rstd, row_mask & col_mask, col_mask, OFFSET, PRE, ACTIVATION, ROUNDS_TO, THRESHOLD,
                    KEPT_SCALE, ALIGNED, STORED, HAS_WEIGHT, HAS_BIAS, BLOCK, WIDE, False,
                )  # fmt: skip
                sum_gwn += gw * n
                sum_gw += gw
            mean_gwn, mean_gw = _row_means(sum_gwn, sum_gw, count, each, RMS)
            for start in range(0, num_cols, BLOCK):
                at = start + col
                col_mask = within(at, num_cols, EXACT)
                mask = row_mask & col_mask
                n, _, _, gw = _gradient(
                    dy_ptr, h_ptr, weight_ptr, bias_ptr, seed_ptr, dy_row + at, h_row + at, out_row + start, at,
                    mean, rstd, mask, col_mask, OFFSET, PRE, ACTIVATION, ROUNDS_TO, THRESHOLD, KEPT_SCALE, ALIGNED,
                    STORED, HAS_WEIGHT, HAS_BIAS, BLOCK, WIDE, True,
                )  # fmt: skip
                _write(
                    n, gw, mean_gwn, mean_gw, rstd, dh_ptr, x_ptr, seed_ptr, dx_ptr,
                    dresidual_ptr, x_row + at, out_row + at, out_row + start, mask, PRE, THRESHOLD, KEPT_SCALE,
                    ALIGNED, HAS_DH, DX, DRESIDUAL, BLOCK, WIDE, True,
                )  # fmt: skip
        else:
            ns = ()
            gws = ()
            dweight_now = ()
            dbias_now = ()
            for i in tl.static_range(PIECES):
                at = i * BLOCK + col
                col_mask = within(at, num_cols, EXACT)
                n, rounded, g, gw = _gradient(
                    dy_ptr, h_ptr, weight_ptr, bias_ptr, seed_ptr, dy_row + at, h_row + at, out_row + i * BLOCK, at,
                    mean, rstd, row_mask & col_mask, col_mask, OFFSET, PRE, ACTIVATION, ROUNDS_TO, THRESHOLD,
                    KEPT_SCALE, ALIGNED, STORED, HAS_WEIGHT, HAS_BIAS, BLOCK, WIDE, False,
                )  # fmt: skip
                if not AGAIN:
                    ns = ns + (n,)
                    gws = gws + (gw,)
                sum_gwn = gw * n if i == 0 else sum_gwn + gw * n
                sum_gw = gw if i == 0 else sum_gw + gw
                dweight_now = dweight_now + (dweight[i] + tl.sum(g * rounded, axis=0) if DWEIGHT else dweight[i],)
                dbias_now = dbias_now + (dbias[i] + tl.sum(g, axis=0) if DBIAS else dbias[i],)
            dweight = dweight_now
            dbias = dbias_now
            if DX or DRESIDUAL:
                mean_gwn, mean_gw = _row_means(sum_gwn, sum_gw, count, each, RMS)
                for i in tl.static_range(PIECES):
                    at = i * BLOCK + col
                    col_mask = within(at, num_cols, EXACT)
                    mask = row_mask & col_mask
                    if AGAIN:
                        n, _, _, gw = _gradient(
                            dy_ptr, h_ptr, weight_ptr, bias_ptr, seed_ptr, dy_row + at, h_row + at, out_row + i * BLOCK,
                            at, mean, rstd, mask, col_mask, OFFSET, PRE, ACTIVATION, ROUNDS_TO, THRESHOLD, KEPT_SCALE,
                            ALIGNED, STORED, HAS_WEIGHT, HAS_BIAS, BLOCK, WIDE, True,
                        )  # fmt: skip
                    else:
                        n = ns[i]
                        gw = gws[i]
                    _write(
                        n, gw, mean_gwn, mean_gw, rstd, dh_ptr, x_ptr, seed_ptr, dx_ptr, dresidual_ptr,
                        x_row + at, out_row + at, out_row + i * BLOCK, mask, PRE, THRESHOLD, KEPT_SCALE, ALIGNED,
                        HAS_DH, DX, DRESIDUAL, BLOCK, WIDE, AGAIN,
                    )  # fmt: skip
    # Partial rows: those of dweight, one per program, then those of dbias.
    for i in tl.static_range(PIECES):
        at = i * BLOCK + tl.arange(0, BLOCK)
        if DWEIGHT:
            tl.store(partials_ptr + program * num_cols + at, dweight[i], mask=at < num_cols)
        if DBIAS:
            first = tl.num_programs(0) if DWEIGHT else 0
            tl.store(partials_ptr + (first + program) * num_cols + at, dbias[i], mask=at < num_cols)


@triton.jit(do_not_specialize=LENGTHS[:-3])
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
    OFFSET: tl.constexpr,
    PRE: tl.constexpr,
    ACTIVATION: tl.constexpr,
    HF: tl.constexpr,
    THRESHOLD: tl.constexpr,
    KEPT_SCALE: tl.constexpr,
    STORED: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    RMS: tl.constexpr,
    DWEIGHT: tl.constexpr,
    DBIAS: tl.constexpr,
    WIDE: tl.constexpr,
    FLAT: tl.constexpr,
    UNIT: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    EXACT: tl.constexpr,
):
    """The partial sums of dweight and dbias alone: a program has a block of columns, and some tiles of rows."""
    ACC: tl.constexpr = tl.float64 if WIDE else tl.float32
    ROUNDS_TO: tl.constexpr = h_ptr.dtype.element_ty if HF else None
    ALIGNED: tl.constexpr = UNIT % 8 == 0
    num_cols = col_units * UNIT
    start = tl.program_id(0) * BLOCK
    program = tl.program_id(1).to(tl.int64)
    col = start + tl.arange(0, BLOCK)[None, :]
    dweight = tl.zeros([ROWS, BLOCK], ACC)
    dbias = tl.zeros([ROWS, BLOCK], ACC)
    for tile in range(program, tl.cdiv(num_rows, ROWS), tl.num_programs(1)):
        row = tile * ROWS + tl.arange(0, ROWS)[:, None].to(tl.int64)
        row_mask = row < num_rows
        col_mask = within(col, num_cols, EXACT)
        mask = row_mask & col_mask
        mean, rstd = _statistics(stats_ptr, row, num_rows, row_mask, RMS, WIDE)
        dy_row = row_offset(row, middle, inner, g0 * UNIT, g1 * UNIT, g2 * UNIT, FLAT)
        h_row = row_offset(row, middle, inner, h0 * UNIT, h1 * UNIT, h2 * UNIT, FLAT)
        _, rounded, g, _ = _gradient(
            dy_ptr, h_ptr, weight_ptr, bias_ptr, seed_ptr, dy_row + col, h_row + col, row * num_cols + start, col,
            mean, rstd, mask, col_mask, OFFSET, PRE, ACTIVATION, ROUNDS_TO, THRESHOLD, KEPT_SCALE, ALIGNED, STORED,
            HAS_WEIGHT, HAS_BIAS, BLOCK, WIDE, True,
        )  # fmt: skip
        if DWEIGHT:
            dweight += g * rounded
        if DBIAS:
            dbias += g
    last = start + tl.arange(0, BLOCK)
    if DWEIGHT:
        tl.store(partials_ptr + program * num_cols + last, tl.sum(dweight, axis=0), mask=last < num_cols)
    if DBIAS:
        first = tl.num_programs(1) if DWEIGHT else 0
        tl.store(partials_ptr + (first + program) * num_cols + last, tl.sum(dbias, axis=0), mask=last < num_cols)


@triton.jit(do_not_specialize=["num_partials"])
def sum_partials(
    partials_ptr,
    first_ptr,
    second_ptr,
    num_partials,
    num_cols,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    PAIR: tl.constexpr,
    WIDE: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """Adds the partial rows of a block of columns, in order, and rounds once.

    PAIR: of two sums, axis 1 of the grid says of which. Known to the compiler, and to Inductor, which must be told of
    every tensor that a kernel writes, and of none twice.
    """
    wait_for_previous_kernel(CHAINED)
    let_next_kernel_start(CHAINED)
    which = tl.program_id(1)
    col = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([ROWS, BLOCK], tl.float64 if WIDE else tl.float32)
    for start in range(0, num_partials, ROWS):
        partial = start + tl.arange(0, ROWS)[:, None]
        mask = (partial < num_partials) & (col < num_cols)[None, :]
        total += load(partials_ptr, (which * num_partials + partial) * num_cols + col[None, :], mask, WIDE)
    sums = tl.sum(total, axis=0)
    if PAIR:
        if which == 0:
            store(first_ptr, col, sums, col < num_cols)
        else:
            store(second_ptr, col, sums, col < num_cols)
    else:
        store(first_ptr, col, sums, col < num_cols)
