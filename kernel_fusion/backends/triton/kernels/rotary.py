"""The rotary embedding of heads, or of their RMSNorm, forward and backward.

With n = x * rstd * (offset + weight), or n = x without a norm, and pairs (n1, n2) of columns i and i + half, or of
columns 2 i and 2 i + 1:

    y1 = n1 cos[i] - n2 sin[i], y2 = n2 cos[i] + n1 sin[i], and the other columns of n as they are

Backward rotates the gradients the other way, which gives g. With m = x * rstd,

    dx = rstd * (g w - m E[g w m]), dweight = sum of g m over heads and tokens

A program has a tile of heads of one token, and a block for either element of the pairs, so that a thread has both
elements of its pairs. For the gradients of weights programs are persistent: each walks through tiles, keeps the sums of
both weights in registers, and writes one partial row of each; sum_partials adds those in order. Tiles without a wanted
gradient are passed over, so the sums of one weight do not depend on whether the other's are wanted. Bytes for each
element: x in, y out; in backward x and dy in, dx out, and without a norm dy in, dx out.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernel_fusion.backends.triton.kernels.constants import kernel
from kernel_fusion.backends.triton.kernels.elementary import reciprocal_sqrt
from kernel_fusion.backends.triton.kernels.rows import load, plus_offset, scalar, store, within


@triton.jit
def _load_columns(ptr, at, mask, ROWS: tl.constexpr, C: tl.constexpr):
    """The first and the second elements of all pairs, and the other columns, of ROWS heads.

    `at` are the offsets of the heads, and `mask` says which of them exist. The first column of a part is added to the
    pointer. LLVM may add it to the columns two at a time, as 16-bit integers, and the assemblers of CUDA 12.8 and 12.9
    lose the constant of such an addition if its lower half is not read.
    """
    HALF: tl.constexpr = C.half
    BLOCK: tl.constexpr = C.block
    REST: tl.constexpr = C.rest
    if C.interleaved:
        col = tl.arange(0, 2 * BLOCK)[None, :]
        pairs = load(ptr, at + col, mask & within(col, 2 * HALF, C.exact), C.wide)
        first, second = tl.split(tl.reshape(pairs, (ROWS, BLOCK, 2)))
    else:
        col = tl.arange(0, BLOCK)[None, :]
        there = mask & within(col, HALF, C.exact)
        first = load(ptr, at + col, there, C.wide)
        second = load(ptr + HALF, at + col, there, C.wide)
    rest = first
    if REST > 0:
        col = tl.arange(0, REST)[None, :]
        rest = load(ptr + 2 * HALF, at + col, mask & (col < C.cols - 2 * HALF), C.wide)
    return first, second, rest


@triton.jit
def _store_columns(ptr, at, mask, columns, ROWS: tl.constexpr, C: tl.constexpr):
    """Store the three parts of heads that `_load_columns` loads."""
    HALF: tl.constexpr = C.half
    BLOCK: tl.constexpr = C.block
    REST: tl.constexpr = C.rest
    first, second, rest = columns
    if C.interleaved:
        col = tl.arange(0, 2 * BLOCK)[None, :]
        pairs = tl.reshape(tl.join(first, second), (ROWS, 2 * BLOCK))
        store(ptr, at + col, pairs, mask & within(col, 2 * HALF, C.exact))
    else:
        col = tl.arange(0, BLOCK)[None, :]
        there = mask & within(col, HALF, C.exact)
        store(ptr, at + col, first, there)
        store(ptr + HALF, at + col, second, there)
    if REST > 0:
        col = tl.arange(0, REST)[None, :]
        store(ptr + 2 * HALF, at + col, rest, mask & (col < C.cols - 2 * HALF))


@triton.jit
def _weights(ptr, C: tl.constexpr, PRESENT: tl.constexpr):
    """offset + weight in three parts, or ones if no weight is PRESENT; each row of the tile loads its own."""
    ROWS: tl.constexpr = C.rows
    if PRESENT:
        w1, w2, rest = _load_columns(ptr, tl.zeros([ROWS, 1], tl.int32), tl.full([ROWS, 1], True, tl.int1), ROWS, C)
        w1 = plus_offset(w1, C.offset)
        w2 = plus_offset(w2, C.offset)
        rest = plus_offset(rest, C.offset)
    else:
        w1 = tl.full([1, 1], 1.0, C.acc)
        w2 = w1
        rest = w1
    return w1, w2, rest


@triton.jit
def _rounded(v, TYPE: tl.constexpr, ROUNDS: tl.constexpr):
    """A tile rounded to TYPE, if ROUNDS."""
    if ROUNDS:
        v = v.to(TYPE).to(v.dtype)
    return v


@triton.jit
def _angles(pointers, example, token, strides, table_rows, C: tl.constexpr):
    """The cosines and sines of a token, the same for each head of a tile; NaN for a position outside the table."""
    cos_ptr, sin_ptr, positions_ptr = pointers
    t0, t1, p0, p1 = strides
    ROWS: tl.constexpr = C.rows
    HALF: tl.constexpr = C.half
    BLOCK: tl.constexpr = C.block
    head = tl.zeros([ROWS, 1], tl.int32)
    col = tl.arange(0, BLOCK)[None, :]
    mask = within(head + col, HALF, C.exact)
    row = token
    inside = mask
    if C.has_positions:
        # A tile of one, because the interpreter makes a mask of it.
        row = tl.load(positions_ptr + example * p0 + token * p1 + tl.zeros([1, 1], tl.int32)).to(tl.int64)
        inside = (row >= 0) & (row < table_rows)
        mask = mask & inside
    at = (example * t0 + row * t1) * C.table_unit + head + col
    cos = load(cos_ptr, at, mask, C.wide)
    sin = load(sin_ptr, at, mask, C.wide)
    if C.has_positions:
        cos = tl.where(inside, cos, float("nan"))
        sin = tl.where(inside, sin, float("nan"))
    return cos, sin


@triton.jit
def _sum_of_row(columns, C: tl.constexpr):
    """The sum of each head over its three parts."""
    REST: tl.constexpr = C.rest
    first, second, rest = columns
    total = tl.sum(first + second, axis=1)[:, None]
    if REST > 0:
        total += tl.sum(rest, axis=1)[:, None]
    return total


@triton.jit
def _rstd(x1, x2, rest, C: tl.constexpr):
    """1 / sqrt(mean of squares + eps) of each head."""
    squares = _sum_of_row((x1 * x1, x2 * x2, rest * rest), C)
    return reciprocal_sqrt(squares * (1.0 / C.cols) + C.eps)


@triton.jit
def _times(columns, weights):
    """The product of three parts with three others."""
    return columns[0] * weights[0], columns[1] * weights[1], columns[2] * weights[2]


@triton.jit
def _all_rounded(columns, TYPE: tl.constexpr, ROUNDS: tl.constexpr):
    """The three parts rounded to TYPE, if ROUNDS."""
    return _rounded(columns[0], TYPE, ROUNDS), _rounded(columns[1], TYPE, ROUNDS), _rounded(columns[2], TYPE, ROUNDS)


@triton.jit
def _begin(place, head, strides, C: tl.constexpr):
    """The offsets of heads number `head` of a token in a tensor. `place` are its example, its number and a tile."""
    example, token, _ = place
    return (example * strides[0] + token * strides[1]) * C.unit + head * (strides[2] * C.unit)


@triton.jit
def _heads_fwd(pointers, strides, heads, place, angles, C: tl.constexpr, WEIGHT: tl.constexpr):
    """Write y of a tile of heads.

    `pointers`, here and below, are those of dy, x, weight and the result, and `strides` those of dy, x and the result.
    """
    _, x_ptr, weight_ptr, y_ptr = pointers
    ROWS: tl.constexpr = C.rows
    TYPE: tl.constexpr = x_ptr.dtype.element_ty
    head = place[2] * ROWS + tl.arange(0, ROWS)[:, None].to(tl.int64)
    mask = head < heads
    columns = _load_columns(x_ptr, _begin(place, head, strides[1], C), mask, ROWS, C)
    rounds: tl.constexpr = C.rounding == "hf"
    product: tl.constexpr = rounds and (not WEIGHT or weight_ptr.dtype.element_ty == TYPE)
    if C.norm:
        rstd = _rstd(columns[0], columns[1], columns[2], C)
        columns = _all_rounded(_times(columns, (rstd, rstd, rstd)), TYPE, rounds)
        if WEIGHT:
            columns = _all_rounded(_times(columns, _weights(weight_ptr, C, WEIGHT)), TYPE, product)
    n1, n2, rest = columns
    turns: tl.constexpr = product and C.narrow_angles
    cos, sin = angles
    y1 = _rounded(n1 * cos, TYPE, turns) - _rounded(n2 * sin, TYPE, turns)
    y2 = _rounded(n2 * cos, TYPE, turns) + _rounded(n1 * sin, TYPE, turns)
    _store_columns(y_ptr, _begin(place, head, strides[2], C), mask, (y1, y2, rest), ROWS, C)


@triton.jit
def _heads_bwd(pointers, strides, heads, place, angles, C: tl.constexpr, WEIGHT: tl.constexpr, DX: tl.constexpr):
    """Write dx of a tile of heads, if DX is wanted, and return the terms that the heads add to dweight."""
    dy_ptr, x_ptr, weight_ptr, dx_ptr = pointers
    ROWS: tl.constexpr = C.rows
    head = place[2] * ROWS + tl.arange(0, ROWS)[:, None].to(tl.int64)
    mask = head < heads
    dy1, dy2, rest = _load_columns(dy_ptr, _begin(place, head, strides[0], C), mask, ROWS, C)
    cos, sin = angles
    g = (dy1 * cos + dy2 * sin, dy2 * cos - dy1 * sin, rest)
    dx = g
    terms = g
    if C.norm:
        x = _load_columns(x_ptr, _begin(place, head, strides[1], C), mask, ROWS, C)
        rstd = _rstd(x[0], x[1], x[2], C)
        n = _times(x, (rstd, rstd, rstd))
        gw = _times(g, _weights(weight_ptr, C, WEIGHT))
        mean = _sum_of_row(_times(gw, n), C) * (1.0 / C.cols)
        dx = ((gw[0] - n[0] * mean) * rstd, (gw[1] - n[1] * mean) * rstd, (gw[2] - n[2] * mean) * rstd)
        terms = _times(g, _all_rounded(n, x_ptr.dtype.element_ty, C.rounding == "hf"))
    if DX:
        _store_columns(dx_ptr, _begin(place, head, strides[2], C), mask, dx, ROWS, C)
    # The n of a head that does not exist may be infinite.
    return tl.where(mask, terms[0], 0.0), tl.where(mask, terms[1], 0.0), tl.where(mask, terms[2], 0.0)


@triton.jit
def _place(item, tiles, tokens):
    """The example, the token and the tile of an item. The tiles of a token are neighbours, to share its angles."""
    number = item // tiles
    return number // tokens, number % tokens, item % tiles


@triton.jit
def _write_partial(ptr, sums, C: tl.constexpr):
    """Write one partial row of a weight's gradient from the sums of a program."""
    first, second, rest = sums
    columns = (tl.sum(first, axis=0)[None, :], tl.sum(second, axis=0)[None, :], tl.sum(rest, axis=0)[None, :])
    _store_columns(ptr, tl.zeros([1, 1], tl.int32), tl.full([1, 1], True, tl.int1), columns, 1, C)


# fmt: off
@kernel()
def rotary(
    dy_ptr, dy_key_ptr, query_ptr, key_ptr, query_weight_ptr, key_weight_ptr, cos_ptr, sin_ptr, positions_ptr,
    query_out_ptr, key_out_ptr, partials_ptr,
    num_tokens, tokens, query_heads, key_heads, table_rows, t0, t1, p0, p1,
    g0, g1, g2, h0, h1, h2, q0, q1, q2, k0, k1, k2, y0, y1, y2, z0, z1, z2, C: tl.constexpr,
):
    # fmt: on
    """Write the rotated query and key; or with C.backward their gradients, and partial sums of their weights' ones.

    `num_tokens` counts those of all examples, and `tokens` those of one. The strides are those of the tables (t), the
    positions (p), dy of query and key (g, h), query and key (q, k) and both results (y, z).
    """
    ROWS: tl.constexpr = C.rows
    BLOCK: tl.constexpr = C.block
    REST: tl.constexpr = C.rest if C.rest > 0 else C.block
    query_tiles = tl.cdiv(query_heads, ROWS)
    tiles = query_tiles
    if C.has_key:
        tiles += tl.cdiv(key_heads, ROWS)
    program = tl.program_id(0).to(tl.int64)
    tables = (cos_ptr, sin_ptr, positions_ptr)
    of_tables = (t0, t1, p0, p1)
    query = (dy_ptr, query_ptr, query_weight_ptr, query_out_ptr)
    of_query = ((g0, g1, g2), (q0, q1, q2), (y0, y1, y2))
    key = (dy_key_ptr, key_ptr, key_weight_ptr, key_out_ptr)
    of_key = ((h0, h1, h2), (k0, k1, k2), (z0, z1, z2))
    if C.backward:
        a1 = tl.zeros([ROWS, BLOCK], C.acc)
        a2 = tl.zeros([ROWS, BLOCK], C.acc)
        a3 = tl.zeros([ROWS, REST], C.acc)
        b1 = tl.zeros([ROWS, BLOCK], C.acc)
        b2 = tl.zeros([ROWS, BLOCK], C.acc)
        b3 = tl.zeros([ROWS, REST], C.acc)
        for item in range(program, scalar(num_tokens, tl.int64) * tiles, tl.num_programs(0)):
            example, token, tile = _place(item, tiles, tokens)
            angles = _angles(tables, example, token, of_tables, table_rows, C)
            if tile < query_tiles:
                if C.dquery or C.dweight:
                    at = (example, token, tile)
                    d1, d2, d3 = _heads_bwd(query, of_query, query_heads, at, angles, C, C.has_weight, C.dquery)
                    if C.dweight:
                        a1 += d1
                        a2 += d2
                        if C.rest > 0:
                            a3 += d3
            elif C.dkey or C.dkey_weight:
                at = (example, token, tile - query_tiles)
                d1, d2, d3 = _heads_bwd(key, of_key, key_heads, at, angles, C, C.has_key_weight, C.dkey)
                if C.dkey_weight:
                    b1 += d1
                    b2 += d2
                    if C.rest > 0:
                        b3 += d3
        # The partial rows of the query's weight, one for each program, come before those of the key's.
        if C.dweight:
            _write_partial(partials_ptr + program * C.cols, (a1, a2, a3), C)
        if C.dkey_weight:
            first = tl.num_programs(0) if C.dweight else 0
            _write_partial(partials_ptr + (first + program) * C.cols, (b1, b2, b3), C)
    else:
        example, token, tile = _place(program, tiles, tokens)
        angles = _angles(tables, example, token, of_tables, table_rows, C)
        if tile < query_tiles:
            _heads_fwd(query, of_query, query_heads, (example, token, tile), angles, C, C.has_weight)
        elif C.has_key:
            _heads_fwd(key, of_key, key_heads, (example, token, tile - query_tiles), angles, C, C.has_key_weight)
