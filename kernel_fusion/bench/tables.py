"""Tables made of results: times beside the floor, PyTorch and the peers; errors and memory; and all as Markdown.

A single operation makes a table of its contenders, several cells one of cells.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from kernel_fusion.bench.results import COMPILED, FLOOR, OURS, REFERENCE, Measurement, Results

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
    """Per verb (of operations: per shape) and dtype a table of times for each direction, and of errors and memory."""
    made: list[Table | None] = []
    for group, dtype in dict.fromkeys(group[:2] for group in results.groups):
        for direction in [d for g, t, d in results.groups if (g, t) == (group, dtype)]:
            cells = results.cells(group, dtype, direction)
            what = f"{group}, {dtype}, {direction}"
            if len(cells) == 1 and _of_operations(cells) and any(m.timing for m in _measurements(cells)):
                made.append(_contender_table(results, what, *cells.values()))
            else:
                made.append(_table(results, what, cells, _time_columns(results, cells)))
        cells = results.cells(group, dtype)
        made.append(_table(results, f"{group}, {dtype}, largest errors", cells, _error_columns(results, cells)))
        made.append(_table(results, f"{group}, {dtype}, memory", cells, _memory_columns(results, cells)))
    return [table for table in made if table is not None]


def _measurements(cells: dict[str, Cell]) -> list[Measurement]:
    return [m for cell in cells.values() for m in cell.values()]


def _of_operations(cells: dict[str, Cell]) -> bool:
    return any(m.operation for m in _measurements(cells))


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
    titles, heads = _heads(list(cells), some)
    values = [[value(cell) for value in columns.values()] for cell in cells.values()]
    rows = [(*head, *map(_text, row)) for head, row in zip(heads, values, strict=True)]
    means = [_mean(column) for column in zip(*values, strict=True)]
    if len(rows) > 1 and any(means):
        rows.append(("geometric mean", *[""] * (len(heads[0]) - 1), *means))
    weights = some[0].weight_dtype
    title = f"{results.title}: {what}" + (f", weights {weights}" if weights not in (None, some[0].dtype) else "")
    return Table(title, (*titles, *columns), tuple(rows))


def _heads(labels: list[str], some: list[Measurement]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """The titles of the columns that say what a row is about, and what they hold in each row."""
    if some[0].operation:
        return ("operation",), [(label,) for label in labels]  # of one shape, which stands in the table's title
    sizes = [f"{m.rows}×{m.cols}" for m in some]
    # A shape given by the user is its own name, and then needs no second column.
    if all(label == size.replace("×", "x") for label, size in zip(labels, sizes, strict=True)):
        return ("rows × N",), [(size,) for size in sizes]
    return ("configuration", "rows × N"), list(zip(labels, sizes, strict=True))


def _contender_table(results: Results, what: str, cell: Cell) -> Table:
    """One row per contender of the only cell of its group: time, bytes, bandwidth, speedup and correctness."""
    columns = ("contender", "µs", "MB moved", "GB/s", "speedup", "÷ floor", "largest error of y", "error ÷ budget")
    rows = []
    for provider in (p for p in results.providers if p in cell):
        m = cell[provider]
        bandwidth, error, excess = m.gigabytes_per_second, m.errors.get("y"), max(m.excesses.values(), default=None)
        rows.append(
            (
                _label(provider),
                _text(_time(m, 1e3)),
                _text(None if m.bytes_moved is None else _megabytes(m.bytes_moved)),
                _text(None if bandwidth is None else f"{bandwidth:.0f}"),
                _text(_ratio(cell, [REFERENCE], [provider])),
                _text(_ratio(cell, [provider], [FLOOR])),
                _text(None if error is None else f"{error:.1e}"),
                _text(excess),
            )
        )
    operation = next(iter(cell.values())).operation
    return Table(f"{results.title}: {operation}, {what}", columns, tuple(rows))


def _time_columns(results: Results, cells: dict[str, Cell]) -> dict[str, Value]:
    """Floor, ours, PyTorch and peers, as far as they were timed, and how they compare."""
    timed = [m for m in _measurements(cells) if m.timing]
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
        if _of_operations(cells):
            columns |= _bandwidth_columns(provider)
        if FLOOR in providers:
            add_ratio(f"{provider} ÷ floor", [provider], [FLOOR])
    for peer in peers:
        add_time(peer)
        if peer == REFERENCE:
            for provider in mine:
                add_ratio("speedup" if len(mine) == 1 else f"{provider} speedup", [REFERENCE], [provider])
        if peer == COMPILED and _of_operations(cells):
            for provider in mine:
                add_ratio(f"{provider} over {COMPILED}", [COMPILED], [provider])
    if len(peers) > 1 and mine:
        columns["best peer"] = lambda cell: _label(best) if (best := _best(cell, peers)) else None
        for provider in mine:
            add_ratio(f"{provider} ÷ best peer", [provider], peers)
    return columns


def _bandwidth_columns(provider: str) -> dict[str, Value]:
    """What moves, how fast `provider` moves it, and which share of the floor's speed that is."""

    def of(format: Callable[[Cell, Measurement], str | None]) -> Value:
        return lambda cell: format(cell, cell[provider]) if provider in cell else None

    def moved(cell: Cell, m: Measurement) -> str | None:
        return None if m.bytes_moved is None else _megabytes(m.bytes_moved)

    def bandwidth(cell: Cell, m: Measurement) -> str | None:
        return None if m.gigabytes_per_second is None else f"{m.gigabytes_per_second:.0f}"

    def share(cell: Cell, m: Measurement) -> str | None:
        ratio = _ratio(cell, [FLOOR], [provider])
        return None if ratio is None else f"{ratio:.0%}"

    return {"MB moved": of(moved), f"{provider} GB/s": of(bandwidth), f"{provider} % of floor": of(share)}


def _error_columns(results: Results, cells: dict[str, Cell]) -> dict[str, Value]:
    """The largest absolute errors against float64: of y and dx, or of operations the largest beside its budget."""

    def error_of(name: str) -> Callable[[Measurement], str | None]:
        return lambda m: f"{m.errors[name]:.1e}" if name in m.errors else None

    def excess(m: Measurement) -> str | None:
        return f"{max(m.excesses.values()):.2f}" if m.excesses else None

    if _of_operations(cells):
        return _fact_columns(results, cells, {"y": error_of("y"), "largest error ÷ budget": excess})
    return _fact_columns(results, cells, {"y": error_of("y"), "dx": error_of("dx")})


def _memory_columns(results: Results, cells: dict[str, Cell]) -> dict[str, Value]:
    """What autograd saves and what a training step takes, in MB, and how ours compares where both take something."""

    def megabytes(num_bytes: int | None) -> str | None:
        return None if num_bytes is None else _megabytes(num_bytes)

    facts: dict[str, Callable[[Measurement], str | None]] = {
        "saved MB": lambda m: megabytes(m.saved_bytes),
        "training MB": lambda m: megabytes(m.training_memory_bytes),
    }
    columns = _fact_columns(results, cells, facts)

    def compared(provider: str, field: str) -> Value:
        def value(cell: Cell) -> float | None:
            mine, theirs = (getattr(cell[p], field) if p in cell else None for p in (provider, REFERENCE))
            return mine / theirs if mine and theirs else None

        return value

    for name, field in (("saved", "saved_bytes"), ("training", "training_memory_bytes")):
        if any(getattr(m, field) is not None for m in _measurements(cells)):
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
        f"{_label(provider)} {title}": value_of(provider, fact)
        for title, fact in facts.items()
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


def _megabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:.2f}"


def _label(provider: str) -> str:
    return "PyTorch" if provider == REFERENCE else provider


def _markdown_row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"
