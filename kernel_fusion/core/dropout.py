"""The numbers of dropout, the same for every backend; its random bits are defined in backends/eager/dropout.py.

native/extension/stages.h is the same, for C++.
"""

from __future__ import annotations


def threshold(p: float) -> int:
    """How many of the 2^32 values of an element's bits drop it: from 0, none, to 2^32, all."""
    return round(p * 2**32)


def scale(p: float) -> float:
    """What kept elements are multiplied by: 1 / (1 - p) of the p that `threshold` stands for; 0 where none is kept."""
    kept = 1 - threshold(p) / 2**32
    return 1 / kept if kept else 0.0
