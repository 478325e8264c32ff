"""Dropout's numbers; native/extension/stages.h repeats them."""

from __future__ import annotations


def threshold(p: float) -> int:
    """How many of 2^32 values drop an element."""
    return round(p * 2**32)


def scale(p: float) -> float:
    """The factor of kept elements: 1 / (1 - p) for the rounded p, or 0."""
    kept = 1 - threshold(p) / 2**32
    return 1 / kept if kept else 0.0
