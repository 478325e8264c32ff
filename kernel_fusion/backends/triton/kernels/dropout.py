"""The elements of a tile that dropout keeps, by the seed and their positions, as in backends/eager/dropout.py.

A block of random bits serves eight elements that follow each other. If every row begins with a block (ALIGNED), each
block is drawn once. Otherwise every element draws the block that it lies in.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _words(seed, block):
    """The four words of the block of random bits number `block`."""
    low = (block & 0xFFFFFFFF).to(tl.uint32)
    high = (block >> 32).to(tl.uint32)
    zero = tl.zeros_like(low)
    seed_low = (seed & 0xFFFFFFFF).to(tl.uint32)
    seed_high = ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32)
    return tl.philox(0, low, high, zero + seed_low, zero + seed_high, n_rounds=7)


@triton.jit
def _exchange_halves(words):
    """The words with their upper and lower halves exchanged."""
    return (words << 16) | (words >> 16)


@triton.jit
def kept(seed_ptr, first, THRESHOLD: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr):
    """The mask of the elements that are kept.

    `first` (int64, one number below the other) are the positions of column 0 of a tile of BLOCK columns. An element is
    dropped if its 32 random bits are below THRESHOLD.
    """
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
