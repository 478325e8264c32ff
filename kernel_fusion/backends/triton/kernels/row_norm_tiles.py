"""The steps with a tile that all passes of the norms share. row_norm_fwd.py and row_norm_bwd.py have the formulas."""

from __future__ import annotations

import triton
import triton.language as tl

from kernel_fusion.backends.triton.kernels.activations import times_slope, value
from kernel_fusion.backends.triton.kernels.dropout import kept
from kernel_fusion.backends.triton.kernels.rows import load, row_of, row_offset, shifted, store


@triton.jit
def factor(row, C: tl.constexpr):
    """The factor for a tile of a stage's row: gate_activation(gate)."""
    return value(row, C.gate_activation)


@triton.jit
def times_factor_slope(g, row, C: tl.constexpr):
    """The row's gradient, from the factor's."""
    return times_slope(g, row, C.gate_activation)


@triton.jit
def _dropped(v, seed_ptr, position, C: tl.constexpr, BLOCK: tl.constexpr):
    """Dropout of a tile; `position` is that of column 0 of every row."""
    if C.threshold > 0:
        v = tl.where(kept(seed_ptr, position, C.threshold, C.aligned, BLOCK), v * C.kept_scale, 0.0)
    return v


@triton.jit
def before_gate(x_ptr, seed_ptr, offset, position, mask, C: tl.constexpr, BLOCK: tl.constexpr, LAST: tl.constexpr):
    """A tile of dropout(pre_activation(x)), which the residual's gate multiplies."""
    return _dropped(value(load(x_ptr, offset, mask, C.wide, LAST), C.pre_activation), seed_ptr, position, C, BLOCK)


@triton.jit
def normalised(pointers, offsets, at, position, masks, C: tl.constexpr, BLOCK: tl.constexpr, LAST: tl.constexpr):
    """h of a tile, BLOCK columns wide, of x and the other row: `pointers`, the seed's the third."""
    x_ptr, other_ptr, seed_ptr, gate_ptr = pointers
    mask, col_mask = masks
    h = before_gate(x_ptr, seed_ptr, offsets[0], position, mask, C, BLOCK, LAST)
    if C.has_residual:
        if C.residual_gate is not None:
            h = h * load(gate_ptr, at, col_mask, C.wide)
        h = load(other_ptr, offsets[1], mask, C.wide, LAST) + h
        h = h.to(other_ptr.dtype.element_ty).to(C.acc)
    if C.first_factor:
        h = h * factor(load(other_ptr, offsets[1], mask, C.wide, LAST), C)
    return h


@triton.jit
def weight_and_bias(pointers, col, mask, C: tl.constexpr):
    """Weight and bias of some columns, as stored; nothing is read if they are absent."""
    weight = col
    bias = col
    if C.has_weight:
        weight = tl.load(pointers[0] + col, mask=mask, other=0.0)
    if C.has_bias:
        bias = tl.load(pointers[1] + col, mask=mask, other=0.0)
    return weight, bias


@triton.jit
def affine(n, parameters, C: tl.constexpr, ROW: tl.constexpr):
    """norm(h) of a tile, n, and the activation's argument; `parameters` are weight and bias.

    HF: n is rounded to ROW, the type of h or of x, the argument to the promoted type of that and the weight's.
    """
    weight, bias = parameters
    if C.rounding == "hf":
        n = n.to(ROW).to(n.dtype)
    z = n
    if C.has_weight:
        z = z * shifted(weight.to(z.dtype), C.offset)
    if C.has_bias:
        z = z + bias.to(z.dtype)
    if C.rounding == "hf" and C.has_weight and weight.dtype == ROW:
        z = z.to(ROW).to(z.dtype)
    return n, z


@triton.jit
def store_statistics(ptr, row, num_rows, row_mask, statistics, C: tl.constexpr):
    """Mean and rstd of rows, one after the other; for RMSNorm rstd alone."""
    mean, rstd = statistics
    if C.rms:
        store(ptr, row, rstd, row_mask)
    else:
        store(ptr, row, mean, row_mask)
        store(ptr, num_rows + row, rstd, row_mask)


@triton.jit
def statistics_of(stats_ptr, row, num_stats, row_mask, C: tl.constexpr):
    """Mean and rstd.

    Not in `rows_at`: Inductor takes what a function reads for written if a result leads to a store.
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
    """Rows of samples in a group: their numbers, beginnings in each tensor, and which exist."""
    num_rows, num_cols, middle, inner = lengths
    row_mask = sample < num_rows
    row = row_of(sample, group, steps, C)
    rows = ()
    for i in tl.static_range(len(strides)):
        rows = rows + (row_offset(row, (middle, inner), strides[i], C.unit, C.flat),)
    return row, rows + (row * num_cols,), row_mask


@triton.jit
def gradient(pointers, rows, start, at, statistics, mask, col_mask, C: tl.constexpr, LAST: tl.constexpr):
    """n, n as it is rounded, g, g * w and the gradient of a last factor's row, of columns `at`, from `start` on.

    `pointers`, here and below, are dy, h, the other row (x where forward stored h), dh, weight, bias, gate, seed, dx,
    dother and the statistics. Masked dy is read as zero, so g is zero there, and n finite.
    """
    dy_ptr, h_ptr, other_ptr, _, weight_ptr, bias_ptr, _, seed_ptr, _, _, _ = pointers
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
def write(pointers, rows, start, at, n, gw, means, rstd, masks, C: tl.constexpr, LAST: tl.constexpr):
    """dx, and the gradient of the residual or of a first factor's row, of a tile; returns what dgate sums up."""
    _, h_ptr, other_ptr, dh_ptr, _, _, gate_ptr, seed_ptr, dx_ptr, dother_ptr, _ = pointers
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
        u = before_gate(other_ptr, seed_ptr, other_offset, position, mask, C, C.block, LAST)
        of_gate = tl.where(mask, dh * u, 0.0)
    if C.dx:
        if C.residual_gate is not None:
            dh = dh * load(gate_ptr, at, col_mask, C.wide)
        dh = _dropped(dh, seed_ptr, position, C, C.block)
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
def store_partials(pointers, program, programs, at, sums, num_cols, width, C: tl.constexpr):
    """A program's partial rows of dweight, of dbias, which lie behind those of dweight, and of dgate, at columns `at`.

    A row of all groups is `width` long.
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
