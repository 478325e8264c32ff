"""Tables made of results: times beside the floor, PyTorch and the peers; errors and memory; and all as Markdown."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from kernel_fusion.bench.results import FLOOR, OURS, REFERENCE, Measurement, Results

_MISSING = "–"
_INACCURATE = "*"
# Where every time of a table is below this, they are written in microseconds.
_MICROSECONDS_BELOW_MS = 10.0

Cell = dict[str, Measurement]  # by provider
# What a column shows of a cell: a text, a ratio (the last row has their mean), or nothing.
Value = Callable[[Cell], "str | float | None"]


@dataclass(frozen=True)
class Table:
    """A table of strings, to be printed or written as Markdown."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def tables(results: Results) -> list[Table]:
    """Per verb and dtype a table of times for each direction, one of errors and one of memory."""
    made = []
    for verb, dtype in dict.fromkeys(group[:2] for group in results.groups):
        for direction in [d for v, t, d in results.groups if (v, t) == (verb, dtype)]:
            cells = results.cells(verb, dtype, direction)
            made.append(_table(results, f"{verb}, {dtype}, {direction}", cells, _time_columns(results, cells)))
        cells = results.cells(verb, dtype)
        made.append(_table(results, f"{verb}, {dtype}, largest errors", cells, _error_columns(results, cells)))
        made.append(_table(results, f"{verb}, {dtype}, memory", cells, _memory_columns(results, cells)))
    return [table for table in made if table is not None]


def write_markdown(results: Results, folder: Path) -> Path:
    """Write all tables, with where and how they came about and what was not measured; the path."""
    about = results.about
    lines = [f"# {results.title}", "", f"`{about['command']}`, {about['date']}", ""]
    if results.interrupted:
        lines += ["Interrupted: what was measured until then.", ""]
    for heading in ("machine", "versions", "peers", "method"):
        lines += [f"- {key}: {value}" for key, value in about[heading].items()]
    if any(m.inaccurate for m in results.measurements):
        lines += [f"- {_INACCURATE} after a time: less accurate than ours must be"]
    for table in tables(results):
        lines += ["", f"## {table.title}", "", _markdown_row(table.columns)]
        lines += [_markdown_row(["---", *["---:"] * (len(table.columns) - 1)])]
        lines += [_markdown_row(row) for row in table.rows]
    lines += ["", "## Not measured", "", *(f"- {failure}" for failure in results.failures)] if results.failures else []
    path = folder / f"{results.stem}.md"
    path.write_text("\n".join(lines) + "\n")
    return path


def _table(results: Results, what: str, cells: dict[str, Cell], columns: dict[str, Value]) -> Table | None:
    """One row per configuration and one with the geometric means of the ratios; None without columns."""
    if not columns:
        return None
    some = [next(iter(cell.values())) for cell in cells.values()]
    sizes = [f"{m.rows}×{m.cols}" for m in some]
    # A shape given by the user is its own name, and then needs no second column.
    own_name = all(name == size.replace("×", "x") for name, size in zip(cells, sizes, strict=True))
    heads = [(size,) if own_name else (name, size) for name, size in zip(cells, sizes, strict=True)]
    values = [[value(cell) for value in columns.values()] for cell in cells.values()]
    rows = [(*head, *map(_text, row)) for head, row in zip(heads, values, strict=True)]
    means = [_mean(column) for column in zip(*values, strict=True)]
    if len(rows) > 1 and any(means):
        rows.append(("geometric mean", *[""] * (len(heads[0]) - 1), *means))
    weights = some[0].weight_dtype
    title = f"{results.title}: {what}" + (f", weights {weights}" if weights not in (None, some[0].dtype) else "")
    return Table(title, (*(("rows × N",) if own_name else ("configuration", "rows × N")), *columns), tuple(rows))


def _time_columns(results: Results, cells: dict[str, Cell]) -> dict[str, Value]:
    """Floor, ours, PyTorch and peers, as far as they were timed, and how they compare."""
    timed = [m for cell in cells.values() for m in cell.values() if m.timing]
    short = all(m.timing.median_ms < _MICROSECONDS_BELOW_MS for m in timed if m.timing)
    scale, unit = (1e3, "µs") if short else (1.0, "ms")
    providers = [p for p in results.providers if any(m.provider == p for m in timed)]
    mine = [p for p in providers if p.startswith(OURS)]
    peers = [p for p in providers if p != FLOOR and p not in mine]
    columns: dict[str, Value] = {}

    def add_time(provider: str) -> None:
        columns[f"{_label(provider)} {unit}"] = lambda cell: _time(cell.get(provider), scale)

    def add_ratio(title: str, over: Sequence[str], under: Sequence[str]) -> None:
        columns[title] = lambda cell: _ratio(cell, over, under)

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
    if len(peers) > 1 and mine:
        columns["best peer"] = lambda cell: _label(best) if (best := _best(cell, peers)) else None
        for provider in mine:
            add_ratio(f"{provider} ÷ best peer", [provider], peers)
    return columns


def _error_columns(results: Results, cells: dict[str, Cell]) -> dict[str, Value]:
    """The largest absolute errors of y and dx, against float64."""
    return _fact_columns(results, cells, {"y": "max_abs_error_y", "dx": "max_abs_error_dx"}, "{:.1e}".format)


def _memory_columns(results: Results, cells: dict[str, Cell]) -> dict[str, Value]:
    """What autograd saves and what a training step takes, in MB, and how ours compares."""
    facts = {"saved MB": "saved_bytes", "training MB": "training_memory_bytes"}
    columns = _fact_columns(results, cells, facts, lambda num_bytes: f"{num_bytes / 1e6:.2f}")

    def compared(provider: str) -> Value:
        def value(cell: Cell) -> float | None:
            mine, theirs = (cell[p].training_memory_bytes if p in cell else None for p in (provider, REFERENCE))
            return mine / theirs if mine and theirs else None

        return value

    mine = [p for p in results.providers if p.startswith(OURS)]
    return columns | ({f"{p} ÷ PyTorch, training": compared(p) for p in mine} if columns else {})


def _fact_columns(
    results: Results, cells: dict[str, Cell], facts: dict[str, str], format: Callable[[float], str]
) -> dict[str, Value]:
    """Columns of fields of `Measurement`, by title, for every provider of which they are known."""

    def value_of(provider: str, field: str) -> Value:
        def value(cell: Cell) -> str | None:
            found = getattr(cell[provider], field) if provider in cell else None
            return None if found is None else format(found)

        return value

    columns = {
        f"{_label(provider)} {title}": value_of(provider, field)
        for title, field in facts.items()
        for provider in results.providers
    }
    return {title: value for title, value in columns.items() if any(value(cell) is not None for cell in cells.values())}


def _best(cell: Cell, providers: Sequence[str]) -> str | None:
    """The fastest of `providers` in the cell."""
    times = {p: timing.median_ms for p in providers if p in cell and (timing := cell[p].timing)}
    return min(times, key=times.__getitem__, default=None)


def _ratio(cell: Cell, over: Sequence[str], under: Sequence[str]) -> float | None:
    """The time of the fastest of `over` divided by that of the fastest of `under`."""
    times = [cell[p].timing for p in (_best(cell, over), _best(cell, under)) if p is not None]
    a, b = times if len(times) == 2 else (None, None)
    return a.median_ms / b.median_ms if a and b else None


def _mean(values: Sequence[str | float | None]) -> str:
    """The geometric mean of a column of ratios, or nothing for any other column."""
    ratios = [value for value in values if isinstance(value, float)]
    return _text(statistics.geometric_mean(ratios)) if ratios else ""


def _text(value: str | float | None) -> str:
    return _MISSING if value is None else value if isinstance(value, str) else f"{value:.2f}"


def _time(m: Measurement | None, scale: float) -> str | None:
    """At least three significant digits, never an exponent."""
    if m is None or m.timing is None:
        return None
    time = m.timing.median_ms * scale
    digits = 2 if time < 10 else 1 if time < 100 else 0
    return f"{time:.{digits}f}" + (_INACCURATE if m.inaccurate else "")


def _label(provider: str) -> str:
    return "PyTorch" if provider == REFERENCE else provider


def _markdown_row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"
