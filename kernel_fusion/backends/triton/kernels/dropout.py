"""Which elements of a tile dropout keeps, by seed and position, as in backends/eager/dropout.py.

If rows begin with a block of random bits (ALIGNED), each is drawn once for its eight elements; else every element draws
its own.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _words(seed, block):
    """The four words of a block of random bits."""
    low = (block & 0xFFFFFFFF).to(tl.uint32)
    high = (block >> 32).to(tl.uint32)
    zero = tl.zeros_like(low)
    seed_low = (seed & 0xFFFFFFFF).to(tl.uint32)
    seed_high = ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32)
    return tl.philox(0, low, high, zero + seed_low, zero + seed_high, n_rounds=7)


@triton.jit
def _exchange_halves(words):
    """Exchange the halves of each word."""
    return (words << 16) | (words >> 16)


@triton.jit
def kept(seed_ptr, first, THRESHOLD: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr):
    """`first` (int64, (rows, 1)) is the position of column 0."""
    seed = tl.load(seed_ptr)
    if ALIGNED:
        w0, w1, w2, w3 = _words(seed, first // 8 + tl.arange(0, BLOCK // 8)[None, :])
        words = tl.interleave(tl.interleave(w0, w2), tl.interleave(w1, w3))
        bits = tl.interleave(_exchange_halves(words), words)
    else:
        position = first + tl.arange(0, BLOCK)[None, :]
        w0, w1, w2, w3 = _words(seed, position // 8)
        word = (position // 2) % 4
        drawn = tl.where(word < 2, tl.where(word == 0, w0, w1), tl.where(word == 2, w2, w3))
        bits = tl.where(position % 2 == 1, drawn, _exchange_halves(drawn))
    return bits > THRESHOLD - 1  # THRESHOLD itself may need 33 bits
