"""Tables of results: a short one per verb and dtype for the terminal, all of them for files.

A single operation has a row per contender, everything else a row per cell. Noisy ratios are marked and left out of
means.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from kernel_fusion.cli.table import Table
from kernel_fusion.cli.units import Unit
from kernel_fusion_bench.results import (
    BASELINE,
    COMPILED,
    FLOOR,
    OURS,
    REFERENCE,
    Cell,
    Cells,
    Measurement,
    Results,
    is_of_operations,
    measured,
    only,
)
from kernel_fusion_bench.timing import Place
from kernel_fusion_bench.units import dtype_label, megabytes, number, shown, time_unit

MARKS = {"*": "less accurate than ours must be", "~": "quartiles wider than a quarter of the median, measured twice"}
INACCURATE, NOISY = MARKS
_MISSING = "–"
_BYTES = {"saved": "saved_bytes", "training": "training_memory_bytes"}  # fields of `Measurement`

# Numbers are ratios; the last row has their geometric mean.
Value = Callable[[Cell], "str | float | None"]
Columns = dict[str, Value]  # by title
Fact = Callable[[Measurement], "str | None"]


def tables(results: Results) -> list[Table]:
    """Every table of the files: times, bandwidths, spread and page faults by direction; errors; memory; losses."""
    made: list[Table | None] = []
    for group, dtype in results.groups:
        what = f"{group}, {dtype_label(dtype)}"
        for direction in results.directions(group, dtype):
            at = {place: results.cells(group, dtype, direction, place) for place in results.places}
            for place, cells in at.items():
                made += _tables_of_times(results, f"{what}, {direction}{_at(results, place)}", cells)
            made.append(_side_by_side(results, f"{what}, {direction}, side by side", at))
        devices = {place.device: place for place in results.places}  # threads change neither errors nor bytes
        for device, place in devices.items():
            cells = results.cells(group, dtype, None, place)
            about = what if len(devices) == 1 else f"{what}, {device}"
            made.append(_table(results, f"{about}, largest errors", cells, _error_columns(results, cells)))
            made.append(_table(results, f"{about}, memory", cells, _memory_columns(results, cells)))
            losses = _facts(results, cells, {"loss": _fact("loss", "{:.4f}".format)})
            made.append(_table(results, f"{about}, loss", cells, losses))
    return [table for table in made if table is not None]


def short_tables(results: Results) -> Iterator[Table]:
    """The terminal's tables: our times and speed-ups in all directions, or memory if nothing was timed."""
    for group, dtype in results.groups:
        for place in results.places:
            what = f"{group}, {dtype_label(dtype)}{_at(results, place)}"
            at = {d: results.cells(group, dtype, d, place) for d in results.directions(group, dtype)}
            if any(map(_is_single_operation, at.values())):
                yield from (_table_of_contenders(results, f"{what}, {d}", *c.values()) for d, c in at.items())
            elif table := _short_table(results, what, at):
                yield table


def _short_table(results: Results, what: str, at: dict[str, Cells]) -> Table | None:
    ours = [p for p in results.providers if p.startswith(OURS)]
    mine = [m for cells in at.values() for m in measured(cells) if m.provider in ours and m.timing]
    unit, columns = _unit_of(mine), Columns()
    for direction in at:
        for provider in ours:
            name = (f"{provider}\n" if len(ours) > 1 else "") + direction.replace("+", "+\n")
            own, theirs = f"{provider}, {direction}", f"{REFERENCE}, {direction}"
            if mine:
                columns[f"{name}\n{unit.name}"] = _time(own, unit)
                columns[f"{name}\n× PyTorch"] = _ratio([theirs], [own])
                continue
            for fact, field in _BYTES.items():
                columns[f"{fact}\nMB"] = _of(own, _fact(field, megabytes))
                columns[f"{fact}\n÷ PyTorch"] = _ratio_of_bytes(own, theirs, field)
    whole = _table(results, what, _merged(at), columns)
    if whole is None or len(whole.columns) == len(columns) + 1:
        return whole
    # The name implies the sizes, and 80 columns are few.
    return Table(whole.title, (whole.columns[0], *whole.columns[2:]), tuple((r[0], *r[2:]) for r in whole.rows))


def _at(results: Results, place: Place) -> str:
    return f", {place}" if len(results.places) > 1 else ""


def _is_single_operation(cells: Cells) -> bool:
    return len(cells) == 1 and is_of_operations(cells) and any(m.timing for m in measured(cells))


def _tables_of_times(results: Results, what: str, cells: Cells) -> list[Table | None]:
    if _is_single_operation(cells):
        return [_table_of_contenders(results, what, *cells.values())]
    return [
        _table(results, what, cells, _time_columns(results, cells)),
        _table(results, f"{what}, bandwidth", cells, _bandwidth_columns(results, cells)),
        _table(results, f"{what}, spread", cells, _spread_columns(results, cells)),
        _table(results, f"{what}, page faults", cells, _page_columns(results, cells)),
    ]


def _side_by_side(results: Results, what: str, at: dict[Place, Cells]) -> Table | None:
    """PyTorch's and our times in every place, and the improvement; None for a single place."""

    def compared(m: Measurement) -> bool:
        return m.timing is not None and (m.provider == REFERENCE or m.provider.startswith(OURS))

    merged = _merged({place: only(cells, compared) for place, cells in at.items()})
    found = {(m.place, m.provider): key for cell in merged.values() for key, m in cell.items()}
    if len({place for place, _ in found}) < 2:
        return None
    unit, columns = _unit_of(measured(merged)), Columns()
    order = list(at)
    for (place, provider), key in sorted(found.items(), key=lambda f: (order.index(f[0][0]), f[0][1] != REFERENCE)):
        columns[f"{shown(provider)} {unit.name}, {place}"] = _time(key, unit)
        if provider != REFERENCE:
            columns[f"{provider}, improvement, {place}"] = _percent(key, f"{REFERENCE}, {place}", less=True)
    return _table(results, what, merged, columns)


def _merged(at: Mapping[Any, Cells]) -> Cells:
    """The cells of several directions or places as one; contenders carry these in their names."""
    merged: Cells = {}
    for where, cells in at.items():
        for label, cell in cells.items():
            merged.setdefault(label, {}).update({f"{p}, {where}": m for p, m in cell.items()})
    return merged


def _time_columns(results: Results, cells: Cells) -> Columns:
    providers = [p for p in results.providers if any(m.provider == p and m.timing for m in measured(cells))]
    mine = [p for p in providers if p.startswith(OURS)]
    peers = [p for p in providers if p not in (FLOOR, BASELINE, *mine)]
    floor, unit, columns = results.name_of_floor, _unit_of(measured(cells)), Columns()
    for provider in [p for p in providers if p not in peers and p != BASELINE] + peers:
        columns[f"{floor if provider == FLOOR else shown(provider)} {unit.name}"] = _time(provider, unit)
        if provider in mine and FLOOR in providers:
            columns[f"{provider} ÷ {floor}"] = _ratio([provider], [FLOOR])
        for ours in mine if provider == REFERENCE else ():
            columns["speedup" if len(mine) == 1 else f"{ours} speedup"] = _ratio([REFERENCE], [ours])
        for ours in mine if provider == COMPILED and is_of_operations(cells) else ():
            columns[f"{ours} over {COMPILED}"] = _ratio([COMPILED], [ours])
    if BASELINE in providers:
        columns[f"{BASELINE} {unit.name}"] = _time(BASELINE, unit)
        columns |= {f"{ours}, improvement on it": _percent(ours, BASELINE, less=True) for ours in mine}
    if len(peers) > 1 and mine:
        columns["best peer"] = lambda cell: shown(best) if (best := _best(cell, peers)) else None
        columns |= {f"{ours} ÷ best peer": _ratio([ours], peers) for ours in mine}
    return columns


def _spread_columns(results: Results, cells: Cells) -> Columns:
    if not any(m.timing and (m.timing.page_faults is not None or m.loss is not None) for m in measured(cells)):
        return {}
    unit = _unit_of(measured(cells))

    def spread(m: Measurement) -> str | None:
        if m.timing is None:
            return None
        q1, q3 = m.timing.q1_ms * unit.factor, m.timing.q3_ms * unit.factor
        return f"{number(q3 - q1)} ({number(q1)}–{number(q3)})"

    return _facts(results, cells, {f"IQR {unit.name}": spread, "iterations": _fact("iterations", str)})


def _page_columns(results: Results, cells: Cells) -> Columns:
    if not any(m.timing and m.timing.reused_median_ms is not None for m in measured(cells)):
        return {}
    unit = _unit_of(measured(cells))
    facts = {
        "faults": _fact("page_faults", "{:.0f}".format),
        unit.name: lambda m: _time_text(m, unit),
        f"{unit.name}, reused memory": _fact("reused_median_ms", lambda ms: number(ms * unit.factor)),
    }
    return _facts(results, cells, facts)


def _bandwidth_columns(results: Results, cells: Cells) -> Columns:
    """Bytes moved, everyone's bandwidth, and our share of the floor's; nothing if bytes are unknown."""
    if not any(m.gigabytes_per_second for m in measured(cells)):
        return {}

    moved = _fact("bytes_moved", megabytes)
    columns: Columns = {"MB moved": lambda cell: moved(next(iter(cell.values())))}
    columns |= _facts(results, cells, {"GB/s": _fact("gigabytes_per_second", number)})
    if FLOOR in results.providers:
        mine = (p for p in results.providers if p.startswith(OURS))
        columns |= {f"{p} % of {results.name_of_floor}": _percent(FLOOR, p) for p in mine}
    return columns


def _error_columns(results: Results, cells: Cells) -> Columns:
    """The largest absolute errors against float64: of y and dx, or the largest of an operation beside its budget."""

    def error_of(name: str) -> Fact:
        return lambda m: f"{m.errors[name]:.1e}" if name in m.errors else None

    def excess(m: Measurement) -> str | None:
        return f"{max(m.excesses.values()):.2f}" if m.excesses else None

    second = {"largest error ÷ budget": excess} if is_of_operations(cells) else {"dx": error_of("dx")}
    return _facts(results, cells, {"y": error_of("y")} | second)


def _memory_columns(results: Results, cells: Cells) -> Columns:
    known = {name: f for name, f in _BYTES.items() if any(getattr(m, f) is not None for m in measured(cells))}
    columns = _facts(results, cells, {f"{name} MB": _fact(field, megabytes) for name, field in known.items()})
    present = {p for cell in cells.values() for p in cell}
    mine = [p for p in results.providers if p.startswith(OURS) and p in present]
    ratios = {f"{p} ÷ PyTorch, {name}": _ratio_of_bytes(p, REFERENCE, f) for name, f in known.items() for p in mine}
    return columns | ratios


def _ratio_of_bytes(provider: str, over: str, field: str) -> Value:
    def value(cell: Cell) -> float | None:
        mine, theirs = (getattr(cell[p], field) if p in cell else None for p in (provider, over))
        return mine / theirs if mine and theirs else None

    return value


def _fact(name: str, write: Callable[[Any], str]) -> Fact:
    """A field of a measurement or of its time, as `write` writes it; None if unknown."""

    def fact(m: Measurement) -> str | None:
        value = getattr(m, name, getattr(m.timing, name, None))
        return None if value is None else write(value)

    return fact


def _of(provider: str, fact: Fact) -> Value:
    return lambda cell: fact(cell[provider]) if provider in cell else None


def _facts(results: Results, cells: Cells, facts: Mapping[str, Fact]) -> Columns:
    """Columns of facts by title, for every provider that has them."""
    columns = {
        f"{results.name_of_floor if p == FLOOR else shown(p)} {title}": _of(p, fact)
        for title, fact in facts.items()
        for p in results.providers
    }
    return {title: value for title, value in columns.items() if any(value(cell) is not None for cell in cells.values())}


def _table(results: Results, what: str, cells: Cells, columns: Columns) -> Table | None:
    """One row per cell, and one with the geometric means of ratios; None without columns or rows."""
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
    title = f"{results.title}: {what}"
    title += f", weights {dtype_label(weights)}" if weights not in (None, some[0].dtype) else ""
    return Table(title, (*titles, *columns), tuple(rows))


def _heads(labels: list[str], some: list[Measurement]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Titles and cells of the columns that name the rows."""
    if some[0].operation:
        return ("operation",), [(label,) for label in labels]  # the shape is in the table's title
    sizes = [f"{m.rows}×{m.cols}" for m in some]
    # A shape given by the user is its own name and needs no second column.
    if all(label == size.replace("×", "x") for label, size in zip(labels, sizes, strict=True)):
        return ("rows × N",), [(size,) for size in sizes]
    return ("configuration", "rows × N"), list(zip(labels, sizes, strict=True))


def _table_of_contenders(results: Results, what: str, cell: Cell) -> Table:
    """One row per contender of the only cell of its group: time, bytes, bandwidth, speedup and correctness."""
    floor = results.name_of_floor
    columns = ("contender", "µs", "MB moved", "GB/s", "speedup", f"÷ {floor}", "largest error of y", "error ÷ budget")
    rows = []
    for provider in (p for p in results.providers if p in cell):
        m = cell[provider]
        values = (
            floor if provider == FLOOR else shown(provider),
            _time_text(m, Unit("µs", 1e3)),
            _fact("bytes_moved", megabytes)(m),
            _fact("gigabytes_per_second", "{:.0f}".format)(m),
            _ratio([REFERENCE], [provider])(cell),
            _ratio([provider], [FLOOR])(cell),
            f"{m.errors['y']:.1e}" if "y" in m.errors else None,
            max(m.excesses.values(), default=None),
        )
        rows.append(tuple(map(_text, values)))
    operation = next(iter(cell.values())).operation
    return Table(f"{results.title}: {operation}, {what}", columns, tuple(rows))


def _unit_of(measurements: Sequence[Measurement]) -> Unit:
    return time_unit([m.timing.median_ms for m in measurements if m.timing])


def _time(provider: str, unit: Unit) -> Value:
    return _of(provider, lambda m: _time_text(m, unit))


def _time_text(m: Measurement, unit: Unit) -> str | None:
    """The median, marked if results are inaccurate or times noisy."""
    if m.timing is None:
        return None
    marks = INACCURATE * m.inaccurate + NOISY * m.timing.noisy
    return number(m.timing.median_ms * unit.factor) + marks


def _ratio(over: Sequence[str], under: Sequence[str]) -> Value:
    """Their ratio; a marked text if a time is noisy."""

    def value(cell: Cell) -> str | float | None:
        ratio = _time_ratio(cell, over, under)
        noisy = any((p := _best(cell, several)) and cell[p].steady is None for several in (over, under))
        return ratio if ratio is None or not noisy else f"{ratio:.2f}{NOISY}"

    return value


def _percent(over: str, under: str, less: bool = False) -> Value:
    """The time of `over` in percent of that of `under`, or how much less it is."""

    def value(cell: Cell) -> str | None:
        ratio = _time_ratio(cell, [over], [under])
        return None if ratio is None else f"{1 - ratio if less else ratio:.0%}"

    return value


def _best(cell: Cell, providers: Sequence[str]) -> str | None:
    times = {p: timing.median_ms for p in providers if p in cell and (timing := cell[p].timing)}
    return min(times, key=times.__getitem__, default=None)


def _time_ratio(cell: Cell, over: Sequence[str], under: Sequence[str]) -> float | None:
    """The fastest time of `over` divided by that of `under`."""
    times = [cell[p].timing for p in (_best(cell, over), _best(cell, under)) if p is not None]
    a, b = times if len(times) == 2 else (None, None)
    return a.median_ms / b.median_ms if a and b else None


def _mean(values: Sequence[str | float | None]) -> str:
    """The geometric mean of a column of ratios; empty for other columns."""
    ratios = [value for value in values if isinstance(value, float)]
    return _text(statistics.geometric_mean(ratios)) if ratios else ""


def _text(value: str | float | None) -> str:
    return _MISSING if value is None else value if isinstance(value, str) else f"{value:.2f}"


def markdown(table: Table) -> list[str]:
    """The lines of a table under its title; columns after the first hold numbers."""
    return ["", f"## {table.title}", "", *rows_of(table.columns, table.rows, table.columns[:1])]


def rows_of(columns: Sequence[str], rows: Iterable[Sequence[str]], left: Collection[str]) -> list[str]:
    """The lines of a table in Markdown; the columns named in `left` are aligned there, others on the right."""
    marks = ["---" if name in left else "---:" for name in columns]
    return [_row(columns), _row(marks), *map(_row, rows)]


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"
