"""How values are written: fitting units, three significant digits, familiar names."""

from __future__ import annotations

import math
from collections.abc import Sequence

from kernel_fusion.cli.units import Unit

_MICROSECONDS_BELOW_MS = 10.0  # times that are all below this are written in microseconds


def time_unit(times_ms: Sequence[float]) -> Unit:
    """Microseconds if all times are short, else milliseconds."""
    return Unit("µs", 1e3) if all(ms < _MICROSECONDS_BELOW_MS for ms in times_ms) else Unit("ms", 1.0)


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
