"""The numbers of dropout. native/extension/stages.h computes the same in C++."""

from __future__ import annotations


def threshold(p: float) -> int:
    """The number of values of an element's random bits, out of all, that drop the element."""
    return round(p * 2**32)


def scale(p: float) -> float:
    """The factor of kept elements: 1 / (1 - p), where p is rounded to what `threshold` can express; 0 for p = 1."""
    kept = 1 - threshold(p) / 2**32
    return 1 / kept if kept else 0.0
