"""Dropout's numbers, the same for every backend; backends/eager/dropout.py defines the random bits.

native/extension/stages.h repeats them for C++.
"""

from __future__ import annotations


def threshold(p: float) -> int:
    """How many of the 2^32 values of an element's bits drop it."""
    return round(p * 2**32)


def scale(p: float) -> float:
    """The factor of kept elements, 1 / (1 - p) with p as `threshold` rounds it; 0 if none is kept."""
    kept = 1 - threshold(p) / 2**32
    return 1 / kept if kept else 0.0
