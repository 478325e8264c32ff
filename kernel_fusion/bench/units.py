"""How values are written: fitting units, three significant digits, familiar names."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

_MICROSECONDS_BELOW_MS = 10.0  # times that are all below this are written in microseconds
_BYTES = {"GB": 1e9, "MB": 1e6, "kB": 1e3, "B": 1.0}


class Unit(NamedTuple):
    """A unit, and the factor from milliseconds or bytes to it."""

    name: str
    factor: float


def time_unit(times_ms: Sequence[float]) -> Unit:
    """Microseconds if all times are short, else milliseconds."""
    return Unit("µs", 1e3) if all(ms < _MICROSECONDS_BELOW_MS for ms in times_ms) else Unit("ms", 1.0)


def bytes_unit(counts: Sequence[int]) -> Unit:
    """The largest unit in which the largest count is at least 1."""
    largest = max(counts, default=0)
    name = next((name for name, size in _BYTES.items() if largest >= size), "B")
    return Unit(name, 1 / _BYTES[name])


def size(num_bytes: int) -> str:
    """A number of bytes in a fitting unit, such as "2.75 GB"."""
    unit = bytes_unit([num_bytes])
    return f"{num_bytes * unit.factor:.3g} {unit.name}"


def megabytes(num_bytes: int) -> str:
    """A number of bytes, in MB."""
    return f"{num_bytes / 1e6:.2f}"


def number(value: float) -> str:
    """Three significant digits, and all before the point; never an exponent."""
    digits = 2 - math.floor(math.log10(value)) if value > 0 else 2
    return f"{value:.{max(0, digits)}f}"


def shown(provider: str) -> str:
    """A contender's name for readers."""
    return {"pytorch": "PyTorch"}.get(provider, provider)


def dtype_label(name: str) -> str:
    """A dtype's name for readers: "fp32" for "f32"."""
    return name.replace("f", "fp") if name[:1] == "f" else name
