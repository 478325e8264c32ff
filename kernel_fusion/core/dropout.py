"""The numbers of dropout, the same for every backend; its random bits are defined in backends/eager/dropout.py."""

from __future__ import annotations


def threshold(p: float) -> int:
    """How many of the 65536 values of an element's bits drop it."""
    return round(p * 65536)


def scale(p: float) -> float:
    """What the elements that are kept are multiplied by; 0 where none is."""
    dropped = threshold(p)
    return 65536 / (65536 - dropped) if dropped < 65536 else 0.0
