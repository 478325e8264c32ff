"""Tables of results: which there are, what their rows are, and all as Markdown; `table_columns` has what is in them.

A single operation makes a table of its contenders, several cells one of cells. Where places differ, each has tables of
its own, and times stand side by side in one more.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kernel_fusion.bench.results import FLOOR, OURS, REFERENCE, Measurement, Results
from kernel_fusion.bench.table_columns import (
    INACCURATE,
    Cell,
    Value,
    all_of,
    bandwidth_columns,
    error_columns,
    improvement,
    median,
    megabytes,
    memory_columns,
    of_operations,
    page_columns,
    shown,
    spread_columns,
    time_columns,
    time_ratio,
    time_unit,
)
from kernel_fusion.bench.timing import Place

_MISSING = "–"
# The parts of `Results.about` that have facts by name.
ABOUT = ("machine", "versions", "peers", "method")


@dataclass(frozen=True)
class Table:
    """A table of strings, to be printed or written as Markdown."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def tables(results: Results) -> list[Table]:
    """Per verb (of operations: per shape) and dtype tables of times for each direction, and of errors and memory."""
    made: list[Table | None] = []
    for group, dtype in results.groups:
        what = f"{group}, {dtype}"
        for direction in results.directions(group, dtype):
            at = {place: results.cells(group, dtype, direction, place) for place in results.places}
            made += [
                table
                for place, cells in at.items()
                if cells
                for table in _time_tables(results, f"{what}, {direction}{_at(results, place)}", cells)
            ]
            made.append(_side_by_side(results, f"{what}, {direction}, side by side", at))
        # Neither depends on the number of threads.
        devices = {place.device: place for place in results.places}
        for device, place in devices.items():
            cells = results.cells(group, dtype, None, place)
            about = what if len(devices) == 1 else f"{what}, {device}"
            made.append(_table(results, f"{about}, largest errors", cells, error_columns(results, cells)))
            made.append(_table(results, f"{about}, memory", cells, memory_columns(results, cells)))
    return [table for table in made if table is not None]


def _at(results: Results, place: Place) -> str:
    """The place for a title, where there are several."""
    return f", {place}" if len(results.places) > 1 else ""


def _time_tables(results: Results, what: str, cells: dict[str, Cell]) -> list[Table | None]:
    """Those of one group, dtype, direction and place."""
    if len(cells) == 1 and of_operations(cells) and any(m.timing for m in all_of(cells)):
        return [_contender_table(results, what, *cells.values())]
    return [
        _table(results, what, cells, time_columns(results, cells)),
        _table(results, f"{what}, bandwidth", cells, bandwidth_columns(results, cells)),
        _table(results, f"{what}, spread", cells, spread_columns(results, cells)),
        _table(results, f"{what}, page faults", cells, page_columns(results, cells)),
    ]


def _side_by_side(results: Results, what: str, at: dict[Place, dict[str, Cell]]) -> Table | None:
    """PyTorch's and our times in every place, and the improvement on PyTorch there; None for a single place."""
    compared = [p for p in results.providers if p == REFERENCE or p.startswith(OURS)]
    merged: dict[str, Cell] = {}
    columns: dict[str, Value] = {}
    for place, cells in at.items():
        for label, cell in cells.items():
            times = {_key(p, place): cell[p] for p in compared if p in cell and cell[p].timing}
            merged.setdefault(label, {}).update(times)
    merged = {label: cell for label, cell in merged.items() if cell}
    if len({m.place for m in all_of(merged)}) < 2:
        return None
    scale, unit = time_unit(all_of(merged))

    def add_time(provider: str, key: str, place: Place) -> None:
        columns[f"{shown(provider)} {unit}, {place}"] = lambda cell: median(cell.get(key), scale)

    for place in at:
        here = [p for p in compared if any(_key(p, place) in cell for cell in merged.values())]
        for provider in sorted(here, key=lambda p: p != REFERENCE):
            add_time(provider, _key(provider, place), place)
            if provider != REFERENCE:
                title = f"{provider}, improvement, {place}"
                columns[title] = improvement(_key(REFERENCE, place), _key(provider, place))
    return _table(results, what, merged, columns)


def _key(provider: str, place: Place) -> str:
    """What a provider is called in a cell of several places."""
    return f"{provider}, {place}"


def write_markdown(results: Results, folder: Path) -> Path:
    """Write all tables, with where and how they came about and what was not measured; the path."""
    lines = heading(results.title, results.about, results.interrupted)
    if any(m.inaccurate for m in results.measurements):
        lines += [f"- {INACCURATE} after a time: less accurate than ours must be"]
    for table in tables(results):
        lines += markdown(table)
    lines += ["", "## Not measured", "", *(f"- {failure}" for failure in results.failures)] if results.failures else []
    path = folder / f"{results.stem}.md"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def heading(title: str, about: Mapping[str, Any], interrupted: bool = False) -> list[str]:
    """The lines that say what follows, and where and how it came about."""
    lines = [f"# {title}", "", f"`{about['command']}`, {about['date']}", ""]
    if interrupted:
        lines += ["Interrupted: what was measured until then.", ""]
    return lines + [f"- {key}: {value}" for part in ABOUT for key, value in about[part].items()]


def markdown(table: Table) -> list[str]:
    """The lines of a table under its title."""
    lines = ["", f"## {table.title}", "", _markdown_row(table.columns)]
    lines += [_markdown_row(["---", *["---:"] * (len(table.columns) - 1)])]
    return lines + [_markdown_row(row) for row in table.rows]


def _table(results: Results, what: str, cells: dict[str, Cell], columns: dict[str, Value]) -> Table | None:
    """One row per configuration and one with the geometric means of the ratios; None without columns or rows."""
    if not columns or not cells:
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
                shown(provider),
                _text(median(m, 1e3)),
                _text(None if m.bytes_moved is None else megabytes(m.bytes_moved)),
                _text(None if bandwidth is None else f"{bandwidth:.0f}"),
                _text(time_ratio(cell, [REFERENCE], [provider])),
                _text(time_ratio(cell, [provider], [FLOOR])),
                _text(None if error is None else f"{error:.1e}"),
                _text(excess),
            )
        )
    operation = next(iter(cell.values())).operation
    return Table(f"{results.title}: {operation}, {what}", columns, tuple(rows))


def _mean(values: Sequence[str | float | None]) -> str:
    """The geometric mean of a column of ratios, or nothing for any other column."""
    ratios = [value for value in values if isinstance(value, float)]
    return _text(statistics.geometric_mean(ratios)) if ratios else ""


def _text(value: str | float | None) -> str:
    return _MISSING if value is None else value if isinstance(value, str) else f"{value:.2f}"


def _markdown_row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"
