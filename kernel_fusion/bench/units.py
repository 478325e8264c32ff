"""How values are written: units that fit, three significant digits, names that readers know."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

_MICROSECONDS_BELOW_MS = 10.0  # times that are all below this are written in microseconds
_BYTES = {"GB": 1e9, "MB": 1e6, "kB": 1e3, "B": 1.0}


class Unit(NamedTuple):
    """A unit, and what a value in milliseconds or bytes is multiplied by."""

    name: str
    factor: float


def time_unit(times_ms: Sequence[float]) -> Unit:
    """Microseconds where all times are short, else milliseconds."""
    return Unit("µs", 1e3) if all(ms < _MICROSECONDS_BELOW_MS for ms in times_ms) else Unit("ms", 1.0)


def bytes_unit(counts: Sequence[int]) -> Unit:
    """The largest unit of which the largest count has one at least."""
    largest = max(counts, default=0)
    name = next((name for name, size in _BYTES.items() if largest >= size), "B")
    return Unit(name, 1 / _BYTES[name])


def size(num_bytes: int) -> str:
    """A number of bytes in the unit that fits, such as "2.75 GB"."""
    unit = bytes_unit([num_bytes])
    return f"{num_bytes * unit.factor:.3g} {unit.name}"


def megabytes(num_bytes: int) -> str:
    """A number of bytes, in MB."""
    return f"{num_bytes / 1e6:.2f}"


def number(value: float) -> str:
    """Three significant digits, and all those before the point; never an exponent."""
    digits = 2 - math.floor(math.log10(value)) if value > 0 else 2
    return f"{value:.{max(0, digits)}f}"


def shown(provider: str) -> str:
    """What readers call a contender."""
    return {"pytorch": "PyTorch"}.get(provider, provider)


def dtype_label(name: str) -> str:
    """What readers call a dtype of the files: "fp32" for "f32"."""
    return name.replace("f", "fp") if name[:1] == "f" else name
