"""The steps with one tile that all passes of the norms share. row_norm_fwd.py and row_norm_bwd.py have the formulas.

A tile has C.rows rows and C.block columns. Its *position* is the number of column 0 of the tile in each row, counted
over the whole tensor, as dropout needs it. A *factor* is what a stage's row multiplies by: gate_activation(gate).
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernel_fusion.backends.triton.kernels.activations import times_slope, value
from kernel_fusion.backends.triton.kernels.dropout import kept
from kernel_fusion.backends.triton.kernels.rows import load, plus_offset, row_of, row_offset, store


@triton.jit
def factor(row, C: tl.constexpr):
    """The factor that a tile of a stage's row gives."""
    return value(row, C.gate_activation)


@triton.jit
def times_factor_slope(g, row, C: tl.constexpr):
    """The gradient of a tile of a stage's row, from `g`, the gradient of its factor."""
    return times_slope(g, row, C.gate_activation)


@triton.jit
def _dropped(v, seed_ptr, position, C: tl.constexpr):
    """A tile `v` after dropout."""
    if C.threshold > 0:
        v = tl.where(kept(seed_ptr, position, C.threshold, C.aligned, C.block), v * C.kept_scale, 0.0)
    return v


@triton.jit
def before_gate(x_ptr, seed_ptr, offset, position, mask, C: tl.constexpr):
    """A tile of dropout(pre_activation(x)), which the gate of a residual multiplies."""
    return _dropped(value(load(x_ptr, offset, mask, C.wide), C.pre_activation), seed_ptr, position, C)


@triton.jit
def normalised(pointers, offsets, at, position, masks, C: tl.constexpr):
    """The tile of h, which the norm normalises, in the compute type.

    `pointers` are those of x, the other row, the seed and the residual's gate. `offsets` are those of the tile in x and
    in the other row. `at` are the tile's columns, and `masks` say which elements and which columns exist.
    """
    x_ptr, other_ptr, seed_ptr, gate_ptr = pointers
    mask, col_mask = masks
    h = before_gate(x_ptr, seed_ptr, offsets[0], position, mask, C)
    if C.has_residual:
        if C.residual_gate is not None:
            h = h * load(gate_ptr, at, col_mask, C.wide)
        h = load(other_ptr, offsets[1], mask, C.wide) + h
        h = h.to(other_ptr.dtype.element_ty).to(C.acc)
    if C.first_factor:
        h = h * factor(load(other_ptr, offsets[1], mask, C.wide), C)
    return h


@triton.jit
def weight_and_bias(pointers, col, mask, C: tl.constexpr):
    """Weight and bias of some columns, as they are stored. Where one is absent nothing is read."""
    weight = col
    bias = col
    if C.has_weight:
        weight = tl.load(pointers[0] + col, mask=mask, other=0.0)
    if C.has_bias:
        bias = tl.load(pointers[1] + col, mask=mask, other=0.0)
    return weight, bias


@triton.jit
def affine(n, vectors, C: tl.constexpr, ROW: tl.constexpr):
    """The normalised tile as it is multiplied, and the argument of the activation.

    `n` is norm(h), and `vectors` are weight and bias. With the rounding "hf", n is rounded to ROW, the type of h or of
    x, and the argument to the promoted type of ROW and the weight's type.
    """
    weight, bias = vectors
    if C.rounding == "hf":
        n = n.to(ROW).to(n.dtype)
    z = n
    if C.has_weight:
        z = z * plus_offset(weight.to(z.dtype), C.offset)
    if C.has_bias:
        z = z + bias.to(z.dtype)
    if C.rounding == "hf" and C.has_weight and weight.dtype == ROW:
        z = z.to(ROW).to(z.dtype)
    return n, z


@triton.jit
def store_statistics(ptr, row, num_rows, row_mask, mean, rstd, C: tl.constexpr):
    """Store mean and rstd of rows; those of all rows lie behind the means of all. RMSNorm has rstd alone."""
    if C.rms:
        store(ptr, row, rstd, row_mask)
    else:
        store(ptr, row, mean, row_mask)
        store(ptr, num_rows + row, rstd, row_mask)


@triton.jit
def statistics_of(stats_ptr, row, num_rows, row_mask, C: tl.constexpr):
    """Mean and rstd of rows, as `store_statistics` wrote them.

    This is no part of `rows_at`, because Inductor takes a tensor that a function reads for one that the kernel writes
    if a result of that function leads to a store.
    """
    if C.rms:
        rstd = load(stats_ptr, row, row_mask, C.wide)
        mean = tl.zeros_like(rstd)
    else:
        mean = load(stats_ptr, row, row_mask, C.wide)
        rstd = load(stats_ptr, num_rows + row, row_mask, C.wide)
    return mean, rstd


@triton.jit
def rows_at(sample, group, lengths, strides, steps, C: tl.constexpr):
    """The rows of samples of a group: their numbers, their offsets in each tensor, and which of them exist.

    `strides` has three strides for each tensor that is read. Behind those tensors' offsets comes the one in contiguous
    tensors, which are the results.
    """
    num_rows, num_cols, middle, inner = lengths
    row_mask = sample < num_rows
    row = row_of(sample, group, steps, C)
    rows = ()
    for i in tl.static_range(len(strides)):
        rows = rows + (row_offset(row, (middle, inner), strides[i], C.unit, C.flat),)
    return row, rows + (row * num_cols,), row_mask


@triton.jit
def gradient(pointers, rows, start, at, statistics, masks, C: tl.constexpr):
    """n, n as it is multiplied, g, g * w, and the gradient of a last factor's row, all of the tile of columns `at`.

    `pointers`, here and below, are those of dy, h, the other row (x if forward stored h), dh, weight, bias, gate, seed,
    dx, dother and the statistics. `rows` are the offsets of the rows, and `start` is the tile's first column. Outside
    the mask dy is read as zero, so g is zero there, and n is finite.
    """
    dy_ptr, h_ptr, other_ptr, _, weight_ptr, bias_ptr, _, seed_ptr, _, _, _ = pointers
    dy_row, h_row, other_row, out_row = rows
    mean, rstd = statistics
    mask, col_mask = masks
    if C.stored:
        h = load(h_ptr, h_row + at, mask, C.wide)
    else:
        of_forward = (h_ptr, other_ptr, seed_ptr, weight_ptr)  # without a residual no gate is read
        h = normalised(of_forward, (h_row + at, other_row + at), at, out_row + start, masks, C)
    n = (h - mean) * rstd
    g = load(dy_ptr, dy_row + at, mask, C.wide)
    weight, bias = weight_and_bias((weight_ptr, bias_ptr), at, col_mask, C)
    rounded, z = affine(n, (weight, bias), C, h_ptr.dtype.element_ty)
    if C.rounding == "hf":  # outside the mask they may have become infinite
        rounded = tl.where(mask, rounded, 0.0)
        z = tl.where(mask, z, 0.0)
    if C.activation != "identity":
        g = times_slope(g, z, C.activation)
    dfactor = g
    if C.last_factor:
        row = load(other_ptr, other_row + at, mask, C.wide)
        dfactor = times_factor_slope(g * z, row, C)
        g = g * factor(row, C)
    if C.has_weight:
        gw = g * plus_offset(weight.to(g.dtype), C.offset)
    else:
        gw = g
    return n, rounded, g, gw, dfactor


@triton.jit
def write(pointers, rows, start, at, n, gw, means, rstd, masks, C: tl.constexpr):
    """Write a tile of dx, and of the gradient of the residual or of a first factor's row.

    `means` are E[g w n] and E[g w] of the rows. The result is the tile that dgate adds up over the rows.
    """
    _, h_ptr, other_ptr, dh_ptr, _, _, gate_ptr, seed_ptr, dx_ptr, dother_ptr, _ = pointers
    mask, col_mask = masks
    _, h_row, other_row, out_row = rows
    mean_gwn, mean_gw = means
    other_offset = other_row + at
    out_offset = out_row + at
    position = out_row + start
    dh = rstd * (gw - n * mean_gwn - mean_gw)
    if C.has_dh:
        dh += load(dh_ptr, out_offset, mask, C.wide)
    if C.first_factor:
        row = load(other_ptr, other_offset, mask, C.wide)
        if C.dother:
            x = load(h_ptr, h_row + at, mask, C.wide)
            store(dother_ptr, out_offset, times_factor_slope(dh * x, row, C), mask)
        dh = dh * factor(row, C)
    elif C.dother and not C.last_factor:
        store(dother_ptr, out_offset, dh, mask)
    of_gate = dh
    if C.dgate:
        of_gate = tl.where(mask, dh * before_gate(other_ptr, seed_ptr, other_offset, position, mask, C), 0.0)
    if C.dx:
        if C.residual_gate is not None:
            dh = dh * load(gate_ptr, at, col_mask, C.wide)
        dh = _dropped(dh, seed_ptr, position, C)
        if C.pre_activation != "identity":
            dh = times_slope(dh, load(other_ptr, other_offset, mask, C.wide), C.pre_activation)
        store(dx_ptr, out_offset, dh, mask)
    return of_gate


@triton.jit
def write_factor(pointers, rows, at, dfactor, mask, C: tl.constexpr):
    """Write a tile of the gradient of a last factor's row, if it is wanted."""
    if C.last_factor and C.dother:
        store(pointers[9], rows[3] + at, dfactor, mask)


@triton.jit
def store_partials(pointers, program, programs, at, sums, num_cols, width, C: tl.constexpr):
    """Store a program's partial rows of dweight, dbias and dgate at columns `at`.

    `pointers` are those of the partial rows of dweight, behind which those of dbias lie, and of dgate. `program` is one
    of `programs`, and a partial row of all groups is `width` long.
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
    """The sums of the columns of a tile; a row stays as it is."""
    if len(sums.shape) == 2:
        sums = tl.sum(sums, axis=0)
    return sums
