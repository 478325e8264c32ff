"""y = softmax(scale * x + mask) over rows, and its backward, dx = scale * (dy - sum(dy y)) y.

A program has C.rows whole rows, each in one block of columns. Longer rows (C.looped) are read twice: first for a
running maximum and the sum of exponentials relative to it (Milakov, Gimelshein 2018), then for the quotients. Elements
that a mask or the diagonal of `causal` leaves out are not read. They give zero, even beside NaN, and so does a fully
masked row.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernel_fusion.backends.triton.kernels.constants import kernel
from kernel_fusion.backends.triton.kernels.elementary import exp
from kernel_fusion.backends.triton.kernels.rows import load, row_offset, store, tile_of_rows


@triton.jit
def _logits(pointers, rows, mask_step, at, inside, C: tl.constexpr):
    """scale * x + mask of a tile, with -inf for what is left out; and the mask of the elements that are kept.

    `pointers` are those of x and of the mask. `rows` are the offsets of the rows in both, and the last column that
    causal rows keep. `mask_step` is the stride of the mask's columns, `at` are the columns of the tile, and `inside`
    says which of its elements exist.
    """
    x_ptr, mask_ptr = pointers
    x_row, mask_row, diagonal = rows
    read = inside
    if C.causal:
        read = read & (at <= diagonal)
    if C.mask == "bool":
        read = read & (tl.load(mask_ptr + mask_row + at * mask_step, mask=read, other=0) != 0)
    logits = load(x_ptr, x_row + at, read, C.wide) * C.scale
    if C.mask == "additive":
        logits += load(mask_ptr, mask_row + at * mask_step, read, C.wide)
    return tl.where(read, logits, -float("inf")), read


@triton.jit
def _maximum(logits):
    """The maximum of each row, which is NaN if the row has a NaN."""
    largest = tl.max(logits, axis=1)[:, None]
    has_nan = tl.max((logits != logits).to(tl.int32), axis=1)[:, None]
    return tl.where(has_nan > 0, float("nan"), largest)


@triton.jit
def _quotients(logits, kept, largest, total, C: tl.constexpr):
    """y of a tile, from the maximum of each row and the sum of its exponentials."""
    y = exp(logits - largest) / total
    if C.causal or C.mask != "none":
        # The maximum of a fully masked row is -inf. NaN compares unequal.
        y = tl.where(largest == -float("inf"), 0.0, y)
    if C.leaves_out:
        y = tl.where(kept, y, 0.0)
    return y


@triton.jit
def _long_rows(pointers, y_ptr, row, rows, mask_step, col, row_mask, num_cols, C: tl.constexpr):
    """Write y of rows that are read block by block, twice; `row` are their numbers, and `col` a block's columns."""
    ROWS: tl.constexpr = C.rows
    BLOCK: tl.constexpr = C.block
    largest = tl.full([ROWS, 1], -float("inf"), C.acc)
    total = tl.zeros([ROWS, 1], C.acc)
    for start in range(0, num_cols, BLOCK):
        at = start + col
        logits, _ = _logits(pointers, rows, mask_step, at, row_mask & (at < num_cols), C)
        found = _maximum(logits)
        # A NaN stays, because comparisons with it are false.
        larger = tl.where((found <= largest) | (largest != largest), largest, found)
        # If there was nothing but -inf so far, exp(-inf - -inf) would be NaN.
        shift = tl.where(larger == -float("inf"), 0.0, larger)
        total = total * exp(largest - shift) + tl.sum(exp(logits - shift), axis=1)[:, None]
        largest = larger
    for start in range(0, num_cols, BLOCK):
        at = start + col
        inside = row_mask & (at < num_cols)
        logits, kept = _logits(pointers, rows, mask_step, at, inside, C)
        y = _quotients(logits, kept, largest, total, C)
        store(y_ptr, row * num_cols + at, y, inside)


# fmt: off
@kernel("mask_step")
def softmax_fwd(
    x_ptr, mask_ptr, y_ptr,
    num_rows, col_units, matrix_rows, middle, inner, x0, x1, x2, m0, m1, m2, mask_step, C: tl.constexpr,
):
    # fmt: on
    """Write y. Causal matrices have `matrix_rows` rows each. The strides of the mask count elements, not units."""
    num_cols = col_units * C.unit
    row, row_mask, col = tile_of_rows(num_rows, C)
    x_row = row_offset(row, (middle, inner), (x0, x1, x2), C.unit, C.flat)
    mask_row = row_offset(row, (middle, inner), (m0, m1, m2), 1, C.flat)
    pointers = (x_ptr, mask_ptr)
    rows = (x_row, mask_row, row % matrix_rows)
    if C.looped:
        _long_rows(pointers, y_ptr, row, rows, mask_step, col, row_mask, num_cols, C)
    else:
        inside = row_mask & (col < num_cols)
        logits, kept = _logits(pointers, rows, mask_step, col, inside, C)
        largest = _maximum(logits)
        total = tl.sum(tl.where(inside, exp(logits - largest), 0.0), axis=1)[:, None]
        y = _quotients(logits, kept, largest, total, C)
        store(y_ptr, row * num_cols + col, y, inside)


@triton.jit
def _gradient(dy, y, total, C: tl.constexpr):
    """dx of a tile; `total` is the sum of dy * y over each row."""
    dx = (dy - total) * y * C.scale
    if C.leaves_out:
        dx = tl.where(y == 0, 0.0, dx)
    return dx


@kernel()
def softmax_bwd(dy_ptr, y_ptr, dx_ptr, num_rows, col_units, C: tl.constexpr):
    """Write dx from contiguous dy and y."""
    ROWS: tl.constexpr = C.rows
    BLOCK: tl.constexpr = C.block
    num_cols = col_units * C.unit
    row, row_mask, col = tile_of_rows(num_rows, C)
    at_row = row * num_cols
    if C.looped:
        sums = tl.zeros([ROWS, BLOCK], C.acc)
        for start in range(0, num_cols, BLOCK):
            at = start + col
            mask = row_mask & (at < num_cols)
            sums += load(dy_ptr, at_row + at, mask, C.wide) * load(y_ptr, at_row + at, mask, C.wide)
        total = tl.sum(sums, axis=1)[:, None]
        for start in range(0, num_cols, BLOCK):
            at = start + col
            mask = row_mask & (at < num_cols)
            y = load(y_ptr, at_row + at, mask, C.wide)
            dy = load(dy_ptr, at_row + at, mask, C.wide)
            store(dx_ptr, at_row + at, _gradient(dy, y, total, C), mask)
    else:
        mask = row_mask & (col < num_cols)
        dy = load(dy_ptr, at_row + col, mask, C.wide)
        y = load(y_ptr, at_row + col, mask, C.wide)
        total = tl.sum(dy * y, axis=1)[:, None]
        store(dx_ptr, at_row + col, _gradient(dy, y, total, C), mask)
