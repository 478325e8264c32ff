"""Codes and scales of rows, of a tensor or of activation(gate) * value, as in backends/eager/quantize.py.

A program has C.rows rows, one block of columns at a time. Rows that are longer than a block (C.looped) and have one
scale are read twice. Codes of float8 are made in integers, which every GPU has, or by an instruction (C.rounds).
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernel_fusion.backends.triton.kernels.activations import value
from kernel_fusion.backends.triton.kernels.constants import kernel
from kernel_fusion.backends.triton.kernels.elementary import fma
from kernel_fusion.backends.triton.kernels.rows import load, row_offset, store, tile_of_rows, within


@triton.jit
def magnitude(v):
    """|v| of float32 as an integer. These integers have the order of the numbers, with NaN above all."""
    return v.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def scale_of(largest, LARGEST: tl.constexpr):
    """The scale of a row or block from its largest magnitude; LARGEST is the largest code."""
    s = tl.div_rn(largest.to(tl.float32, bitcast=True), tl.full(largest.shape, LARGEST, tl.float32))
    return tl.where(s == 0.0, 1.0, s)


@triton.jit
def _float8(y, EXPONENT: tl.constexpr, MANTISSA: tl.constexpr):
    """The float8 code of y, which is NaN or at most the largest code in magnitude, by integer operations.

    A code below the smallest normal one has no leading 1. Such a y is rounded by adding a number whose last digit is
    the code's last digit.
    """
    BIAS: tl.constexpr = (1 << (EXPONENT - 1)) - 1
    SHIFT: tl.constexpr = 23 - MANTISSA
    LEAST_NORMAL: tl.constexpr = (127 - BIAS + 1) << 23
    SUM: tl.constexpr = (127 - BIAS + SHIFT + 1) << 23
    REBIAS: tl.constexpr = ((BIAS - 127) << 23) + (1 << (SHIFT - 1)) - 1
    bits = magnitude(y)
    digits = tl.full(bits.shape, SUM, tl.int32).to(tl.float32, bitcast=True)
    small = (bits.to(tl.float32, bitcast=True) + digits).to(tl.int32, bitcast=True) - SUM
    normal = (bits + REBIAS + ((bits >> SHIFT) & 1)) >> SHIFT
    code = tl.where(bits < LEAST_NORMAL, small, normal)
    code = tl.where(bits > 0x7F800000, 0x7F, code)
    return code | ((y.to(tl.int32, bitcast=True) >> 24) & 0x80)


@triton.jit
def divisor(s):
    """The numbers that `encode` needs of a scale s: -p, p s and -1 / (p s), the last one rounded correctly.

    The power of two p keeps the remainders of the division from underflow, and the reciprocal normal. If s is infinite,
    p s is 0.
    """
    size = tl.abs(s)
    power = tl.where(size < 2.0**-60, 2.0**96, tl.where(size > 2.0**100, 2.0**-64, 1.0))
    scaled = s * power
    reciprocal = tl.div_rn(tl.full(s.shape, -1.0, tl.float32), scaled)
    return power * -1.0, tl.where(size == float("inf"), 0.0, scaled), reciprocal


@triton.jit
def encode(v, scale, C: tl.constexpr):
    """The codes of v, as bytes; `scale` is the result of `divisor`.

    The quotient of v and the scale is rounded correctly without a division for each element (Markstein, 1990). With
    r = 1 / s and q = v r it is q + (v - q s) r; docs/quantized.md has the proof.
    """
    power, s, reciprocal = scale
    v = v * power
    q = v * reciprocal
    y = fma(fma(q, s, v), reciprocal, q)  # signs are turned, so that 0 keeps its own
    if C.given:
        # A given scale may be 0 or leave too large a quotient.
        y = tl.where((tl.abs(q) > 0.0) & (tl.abs(q) < float("inf")), y, q)
    if C.rounds:  # to at most the largest code
        code = y.to(tl.float8e4nv if C.codes == "float8_e4m3fn" else tl.float8e5).to(tl.uint8, bitcast=True)
    else:
        y = tl.clamp(y, -C.largest, C.largest, propagate_nan=tl.PropagateNan.ALL)
        if C.codes == "int8":
            # 1.5 * 2^23: the sum is whole, and its last byte is the code.
            code = tl.where(magnitude(y) > 0x7F800000, 0, (y + 12582912.0).to(tl.int32, bitcast=True))
        elif C.codes == "float8_e4m3fn":
            code = _float8(y, 4, 3)
        else:
            code = _float8(y, 5, 2)
        code = (code & 0xFF).to(tl.uint8)
    return code


@triton.jit
def given_scale(ptr, C: tl.constexpr):
    """The numbers that `encode` needs of a given scale. If none is given, nothing reads them."""
    s = tl.full([1, 1], 1.0, tl.float32)
    if C.given:
        s = s * tl.load(ptr)
    return divisor(s)


@triton.jit
def _row_scale(largest, ptr, row_mask, C: tl.constexpr):
    """Store the scale of each row for its largest magnitude, and return what `encode` needs of it."""
    s = scale_of(largest, C.largest)
    tl.store(ptr, s, mask=row_mask)
    return divisor(s)


@triton.jit
def store_codes(vs, scale, to, v_row, row_mask, start, col, num_cols, C: tl.constexpr, VECTOR: tl.constexpr = 16):
    """Store the codes of rows, and the scales that are found here.

    `vs` are tiles side by side, in float32 and 0 beyond the row; the first begins at column `start`, and `col` are its
    columns. `scale` is the result of `divisor`, and counts if it was given or the row is looped over. `to` are the
    pointers of codes and scales, the number of all rows, and the numbers of these; `v_row` are the rows' offsets.

    A thread stores VECTOR codes at a time. The compiler gives all tiles the columns of the longest vectors, so the
    order of a row's sums follows from VECTOR.
    """
    codes_ptr, scales_ptr, num_rows, row = to
    HEIGHT: tl.constexpr = vs[0].shape[0]
    WIDTH: tl.constexpr = vs[0].shape[1]
    SHARED: tl.constexpr = C.scale_cols if C.scale_cols > 0 else WIDTH
    BLOCKS: tl.constexpr = WIDTH // SHARED
    if C.scale_cols == 0 and not C.given and not C.looped:
        largest = magnitude(vs[0])
        for i in tl.static_range(1, len(vs)):
            largest = tl.maximum(largest, magnitude(vs[i]))
        scale = _row_scale(tl.max(largest, axis=1)[:, None], scales_ptr + row, row_mask, C)
    for i in tl.static_range(len(vs)):
        at = i * C.block + col
        if C.scale_cols > 0:
            parts = tl.reshape(vs[i], [HEIGHT, BLOCKS, SHARED])
            s = scale_of(tl.max(magnitude(parts), axis=2), C.largest)
            block = (i * C.block + start) // SHARED + tl.arange(0, BLOCKS)[None, :]
            tl.store(scales_ptr + block * num_rows + row, s, mask=row_mask & (block < tl.cdiv(num_cols, SHARED)))
            codes = tl.reshape(encode(parts, divisor(s[:, :, None]), C), [HEIGHT, WIDTH])
        else:
            codes = encode(vs[i], scale, C)
        offset = tl.max_contiguous(v_row + at, [1, VECTOR])
        tl.store(codes_ptr + offset, codes, mask=row_mask & within(at, num_cols, C.exact))


@triton.jit
def _tile(pointers, offsets, mask, C: tl.constexpr):
    """A tile of what is quantised: rounded to its type and widened to float32, and as it is in its type."""
    a_ptr, b_ptr = pointers
    v = load(a_ptr, offsets[0], mask, C.wide)
    if C.gated:
        v = value(v, C.activation) * load(b_ptr, offsets[1], mask, C.wide)
    v = v.to(a_ptr.dtype.element_ty)
    return v.to(tl.float32), v


# fmt: off
@kernel()
def quantize_rows(
    a_ptr, b_ptr, scale_ptr, y_ptr, values_ptr, scales_ptr,
    num_rows, col_units, middle, inner, a0, a1, a2, b0, b1, b2, C: tl.constexpr,
):
    # fmt: on
    """Write the codes of y, which is a, or activation(a) * b if C.gated. Write their scales, unless one is given.

    With C.keeps, y itself is written too.
    """
    ROWS: tl.constexpr = C.rows
    BLOCK: tl.constexpr = C.block
    num_cols = col_units * C.unit
    row, row_mask, col = tile_of_rows(num_rows, C)
    a_row = row_offset(row, (middle, inner), (a0, a1, a2), C.unit, C.flat)
    b_row = row_offset(row, (middle, inner), (b0, b1, b2), C.unit, C.flat)
    scale = given_scale(scale_ptr, C)
    if C.looped and not C.given and C.scale_cols == 0:
        largest = tl.zeros([ROWS, BLOCK], tl.int32)
        for start in range(0, num_cols, BLOCK):
            at = start + col
            mask = row_mask & within(at, num_cols, C.exact)
            v, _ = _tile((a_ptr, b_ptr), (a_row + at, b_row + at), mask, C)
            largest = tl.maximum(largest, magnitude(v))
        scale = _row_scale(tl.max(largest, axis=1)[:, None], scales_ptr + row, row_mask, C)
    for start in range(0, num_cols, BLOCK):
        at = start + col
        mask = row_mask & within(at, num_cols, C.exact)
        v, kept = _tile((a_ptr, b_ptr), (a_row + at, b_row + at), mask, C)
        if C.keeps:
            store(y_ptr, row * num_cols + at, kept, mask)
        to = (values_ptr, scales_ptr, num_rows, row)
        store_codes((v,), scale, to, row * num_cols, row_mask, start, at, num_cols, C)
