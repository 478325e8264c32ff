"""Sizes in memory, in fitting units."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

_BYTES = {"GB": 1e9, "MB": 1e6, "kB": 1e3, "B": 1.0}


class Unit(NamedTuple):
    """A unit, and the factor from milliseconds or bytes to it."""

    name: str
    factor: float


def bytes_unit(counts: Sequence[int]) -> Unit:
    """The largest unit in which the largest count is at least 1."""
    largest = max(counts, default=0)
    name = next((name for name, size in _BYTES.items() if largest >= size), "B")
    return Unit(name, 1 / _BYTES[name])


def size(num_bytes: int) -> str:
    """A number of bytes in a fitting unit, such as "2.75 GB"."""
    unit = bytes_unit([num_bytes])
    return f"{num_bytes * unit.factor:.3g} {unit.name}"
