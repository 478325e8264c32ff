"""The columns of tables: what each shows of a cell, by its title.

Times beside the floor, PyTorch and the peers; bandwidths; how single calls vary, and their page faults; errors and
memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from kernel_fusion.bench.results import BASELINE, COMPILED, FLOOR, OURS, REFERENCE, Measurement, Results

# After a time.
INACCURATE = "*"
# Where every time of a table is below this, they are written in microseconds.
_MICROSECONDS_BELOW_MS = 10.0

Cell = dict[str, Measurement]  # by provider
# What a column shows of a cell: a text, a ratio (the last row has their mean), or nothing.
Value = Callable[[Cell], "str | float | None"]


def time_columns(results: Results, cells: dict[str, Cell]) -> dict[str, Value]:
    """Floor, ours, PyTorch and peers, as far as they were timed, and how they compare."""
    timed = [m for m in all_of(cells) if m.timing]
    scale, unit = time_unit(timed)
    providers = [p for p in results.providers if any(m.provider == p for m in timed)]
    mine = [p for p in providers if p.startswith(OURS)]
    peers = [p for p in providers if p not in (FLOOR, BASELINE, *mine)]
    columns: dict[str, Value] = {}

    def add_time(provider: str) -> None:
        columns[f"{shown(provider)} {unit}"] = lambda cell: median(cell.get(provider), scale)

    def add_ratio(title: str, over: Sequence[str], under: Sequence[str]) -> None:
        columns[title] = lambda cell: time_ratio(cell, over, under)

    if FLOOR in providers:
        add_time(FLOOR)
    for provider in mine:
        add_time(provider)
        if FLOOR in providers:
            add_ratio(f"{provider} ÷ floor", [provider], [FLOOR])
    for peer in peers:
        add_time(peer)
        if peer == REFERENCE:
            for provider in mine:
                add_ratio("speedup" if len(mine) == 1 else f"{provider} speedup", [REFERENCE], [provider])
        if peer == COMPILED and of_operations(cells):
            for provider in mine:
                add_ratio(f"{provider} over {COMPILED}", [COMPILED], [provider])
    if BASELINE in providers:
        add_time(BASELINE)
        for provider in mine:
            columns[f"{provider}, improvement on it"] = improvement(BASELINE, provider)
    if len(peers) > 1 and mine:
        columns["best peer"] = lambda cell: shown(best) if (best := _best(cell, peers)) else None
        for provider in mine:
            add_ratio(f"{provider} ÷ best peer", [provider], peers)
    return columns


def improvement(over: str, provider: str) -> Value:
    """The share of the time of `over` that `provider` saves, in per cent."""

    def value(cell: Cell) -> str | None:
        ratio = time_ratio(cell, [provider], [over])
        return None if ratio is None else f"{1 - ratio:.0%}"

    return value


def time_unit(measurements: Sequence[Measurement]) -> tuple[float, str]:
    """What milliseconds are multiplied by, and what they are then."""
    short = all(m.timing.median_ms < _MICROSECONDS_BELOW_MS for m in measurements if m.timing)
    return (1e3, "µs") if short else (1.0, "ms")


def spread_columns(results: Results, cells: dict[str, Cell]) -> dict[str, Value]:
    """Of single calls, which vary: the inter-quartile range, where it lies, and how many calls it is of."""
    timed = [m for m in all_of(cells) if m.timing and m.timing.page_faults is not None]
    if not timed:
        return {}
    scale, unit = time_unit(timed)

    def spread(m: Measurement) -> str | None:
        if m.timing is None:
            return None
        q1, q3 = m.timing.q1_ms * scale, m.timing.q3_ms * scale
        return f"{number(q3 - q1)} ({number(q1)}–{number(q3)})"

    def iterations(m: Measurement) -> str | None:
        return str(m.timing.iterations) if m.timing else None

    return _fact_columns(results, cells, {f"IQR {unit}": spread, "iterations": iterations})


def page_columns(results: Results, cells: dict[str, Cell]) -> dict[str, Value]:
    """Page faults per call, and the time without them; nothing where that was not measured."""
    timed = [m for m in all_of(cells) if m.timing and m.timing.reused_median_ms is not None]
    if not timed:
        return {}
    scale, unit = time_unit(timed)

    def faults(m: Measurement) -> str | None:
        return f"{m.timing.page_faults:.0f}" if m.timing and m.timing.page_faults is not None else None

    def new(m: Measurement) -> str | None:
        return median(m, scale)

    def reused(m: Measurement) -> str | None:
        ms = m.timing.reused_median_ms if m.timing else None
        return None if ms is None else number(ms * scale)

    return _fact_columns(results, cells, {"faults": faults, unit: new, f"{unit}, reused memory": reused})


def bandwidth_columns(results: Results, cells: dict[str, Cell]) -> dict[str, Value]:
    """What moves, how fast each moves it, and which share of the floor's speed ours reaches; nothing without bytes."""
    if not any(m.gigabytes_per_second for m in all_of(cells)):
        return {}

    def bandwidth(m: Measurement) -> str | None:
        return None if m.gigabytes_per_second is None else number(m.gigabytes_per_second)

    def share(provider: str) -> Value:
        def value(cell: Cell) -> str | None:
            ratio = time_ratio(cell, [FLOOR], [provider])
            return None if ratio is None else f"{ratio:.0%}"

        return value

    def moved(cell: Cell) -> str | None:
        num_bytes = next(iter(cell.values())).bytes_moved
        return None if num_bytes is None else megabytes(num_bytes)

    columns: dict[str, Value] = {"MB moved": moved} | _fact_columns(results, cells, {"GB/s": bandwidth})
    if FLOOR in results.providers:
        columns |= {f"{p} % of floor": share(p) for p in results.providers if p.startswith(OURS)}
    return columns


def error_columns(results: Results, cells: dict[str, Cell]) -> dict[str, Value]:
    """The largest absolute errors against float64: of y and dx, or of operations the largest beside its budget."""

    def error_of(name: str) -> Callable[[Measurement], str | None]:
        return lambda m: f"{m.errors[name]:.1e}" if name in m.errors else None

    def excess(m: Measurement) -> str | None:
        return f"{max(m.excesses.values()):.2f}" if m.excesses else None

    if of_operations(cells):
        return _fact_columns(results, cells, {"y": error_of("y"), "largest error ÷ budget": excess})
    return _fact_columns(results, cells, {"y": error_of("y"), "dx": error_of("dx")})


def memory_columns(results: Results, cells: dict[str, Cell]) -> dict[str, Value]:
    """What autograd saves and what a training step takes, in MB, and how ours compares where both take something."""

    def known(num_bytes: int | None) -> str | None:
        return None if num_bytes is None else megabytes(num_bytes)

    facts: dict[str, Callable[[Measurement], str | None]] = {
        "saved MB": lambda m: known(m.saved_bytes),
        "training MB": lambda m: known(m.training_memory_bytes),
    }
    columns = _fact_columns(results, cells, facts)

    def compared(provider: str, field: str) -> Value:
        def value(cell: Cell) -> float | None:
            mine, theirs = (getattr(cell[p], field) if p in cell else None for p in (provider, REFERENCE))
            return mine / theirs if mine and theirs else None

        return value

    for name, field in (("saved", "saved_bytes"), ("training", "training_memory_bytes")):
        if any(getattr(m, field) is not None for m in all_of(cells)):
            mine = [p for p in results.providers if p.startswith(OURS)]
            columns |= {f"{p} ÷ PyTorch, {name}": compared(p, field) for p in mine}
    return columns


def _fact_columns(
    results: Results, cells: dict[str, Cell], facts: dict[str, Callable[[Measurement], str | None]]
) -> dict[str, Value]:
    """Columns of what measurements say, by title, for every provider of which it is known."""

    def value_of(provider: str, fact: Callable[[Measurement], str | None]) -> Value:
        return lambda cell: fact(cell[provider]) if provider in cell else None

    columns = {
        f"{shown(provider)} {title}": value_of(provider, fact)
        for title, fact in facts.items()
        for provider in results.providers
    }
    return {title: value for title, value in columns.items() if any(value(cell) is not None for cell in cells.values())}


def _best(cell: Cell, providers: Sequence[str]) -> str | None:
    """The fastest of `providers` in the cell."""
    times = {p: timing.median_ms for p in providers if p in cell and (timing := cell[p].timing)}
    return min(times, key=times.__getitem__, default=None)


def time_ratio(cell: Cell, over: Sequence[str], under: Sequence[str]) -> float | None:
    """The time of the fastest of `over` divided by that of the fastest of `under`."""
    times = [cell[p].timing for p in (_best(cell, over), _best(cell, under)) if p is not None]
    a, b = times if len(times) == 2 else (None, None)
    return a.median_ms / b.median_ms if a and b else None


def median(m: Measurement | None, scale: float) -> str | None:
    """The median, marked where results are inaccurate."""
    if m is None or m.timing is None:
        return None
    return number(m.timing.median_ms * scale) + (INACCURATE if m.inaccurate else "")


def number(value: float) -> str:
    """Three significant digits, and all those before the point; never an exponent."""
    digits = 2 - math.floor(math.log10(value)) if value > 0 else 2
    return f"{value:.{max(0, digits)}f}"


def megabytes(num_bytes: int) -> str:
    """A number of bytes, in MB."""
    return f"{num_bytes / 1e6:.2f}"


def shown(provider: str) -> str:
    """What tables call a provider."""
    return "PyTorch" if provider == REFERENCE else provider


def all_of(cells: dict[str, Cell]) -> list[Measurement]:
    """What the cells hold."""
    return [m for cell in cells.values() for m in cell.values()]


def of_operations(cells: dict[str, Cell]) -> bool:
    """Whether the cells are operations of one shape."""
    return any(m.operation for m in all_of(cells))
