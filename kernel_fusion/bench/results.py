"""Results: every measured value with its unit in its name, and the files and tables made from them.

The list of measurements is the whole truth; speedups, shares of the floor, tables and plots are derived from it.
"""

from __future__ import annotations

import csv
import datetime
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from kernel_fusion.bench.machine import load_average, machine, versions
from kernel_fusion.bench.providers import DIRECTIONS, Direction
from kernel_fusion.bench.suites import Suite, Workload
from kernel_fusion.bench.timing import Timing
from kernel_fusion.core.spec import dtype_name
from kernel_fusion.testing.oracle import Comparison

Record = dict[str, str | int | float | None]
REFERENCE, FLOOR = "pytorch", "floor"


@dataclass(frozen=True)
class Measurement:
    """One contender in one cell. What was not measured for it (the floor has no results to check) is None or empty."""

    workload: Workload
    direction: Direction
    provider: str
    version: str
    timing: Timing
    training_bytes: int | None = None
    comparisons: Sequence[Comparison] = ()

    def error(self, name: str) -> float | None:
        """The largest absolute error of the result `name`."""
        return next((c.error for c in self.comparisons if c.name == name), None)


@dataclass(frozen=True)
class Failure:
    """A provider that was not timed, and why."""

    workload: Workload
    provider: str
    reason: str

    def __str__(self) -> str:
        return f"{self.provider}, {self.workload.name} ({self.workload.case}): {self.reason}"


@dataclass
class Results:
    """A run of one suite: where, how, and what came of it, also when it was interrupted."""

    suite: Suite
    device: torch.device
    command: str
    quick: bool
    method: dict[str, str]
    measurements: list[Measurement] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    interrupted: bool = False
    load_average: float = field(default_factory=load_average)
    date: str = field(
        default_factory=lambda: datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    )

    @property
    def stem(self) -> str:
        """The files' name without what follows. A quick run never overwrites a full one."""
        return self.suite.name + ("-quick" if self.quick else "")

    @property
    def dtypes(self) -> list[torch.dtype]:
        """The dtypes measured, in order."""
        return list(dict.fromkeys(m.workload.case.dtype for m in self.measurements))

    @property
    def providers(self) -> list[str]:
        """The providers measured, in order, without PyTorch and the floor."""
        return list(dict.fromkeys(m.provider for m in self.measurements if m.provider not in (REFERENCE, FLOOR)))

    def cells(self, dtype: torch.dtype, direction: Direction) -> dict[str, dict[str, Measurement]]:
        """Configuration to provider to measurement."""
        cells: dict[str, dict[str, Measurement]] = {}
        for m in self.measurements:
            if m.workload.case.dtype == dtype and m.direction == direction:
                cells.setdefault(m.workload.name, {})[m.provider] = m
        return cells

    def records(self) -> list[Record]:
        """One flat record per measurement, with what follows from its neighbours in the cell."""
        return [
            _record(cell, m)
            for dtype in self.dtypes
            for direction in DIRECTIONS
            for cell in self.cells(dtype, direction).values()
            for m in cell.values()
        ]


@dataclass(frozen=True)
class Table:
    """A table of strings, to be printed or written as Markdown."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def tables(results: Results) -> list[Table]:
    """One table per dtype, direction and provider: that provider beside PyTorch and the floor."""
    return [
        _table(results, dtype, direction, provider)
        for dtype in results.dtypes
        for provider in results.providers
        for direction in DIRECTIONS
        if any(provider in cell for cell in results.cells(dtype, direction).values())
    ]


def write(results: Results, folder: Path) -> list[Path]:
    """Write JSON, CSV and Markdown into `folder`; the paths."""
    folder.mkdir(parents=True, exist_ok=True)
    records = results.records()
    about = {
        "suite": results.suite.name,
        "title": results.suite.title,
        "command": results.command,
        "date": results.date,
        "quick": results.quick,
        "interrupted": results.interrupted,
        "machine": machine(results.device) | {"load_average_at_start": results.load_average},
        "versions": versions(),
        "method": results.method,
    }
    failures = [str(failure) for failure in results.failures]
    paths = [folder / f"{results.stem}.{suffix}" for suffix in ("json", "csv", "md")]
    paths[0].write_text(json.dumps(about | {"failures": failures, "measurements": records}, indent=1) + "\n")
    with paths[1].open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(dict.fromkeys(key for record in records for key in record)))
        writer.writeheader()
        writer.writerows(records)
    paths[2].write_text(_markdown(about, failures, tables(results)))
    return paths


def _record(cell: dict[str, Measurement], m: Measurement) -> Record:
    case, timing = m.workload.case, m.timing
    record: Record = {
        "configuration": m.workload.name,
        "verb": case.verb,
        "rows": math.prod(case.shape[: -case.num_dims]),
        "cols": math.prod(case.normalized_shape),
        "dtype": dtype_name(case.dtype),
        "weight_dtype": dtype_name(case.weight) if case.weight else None,
        "bias_dtype": dtype_name(case.bias) if case.bias else None,
        "layout": case.layout,
        "direction": m.direction,
        "provider": m.provider,
        "provider_version": m.version,
        "median_ms": timing.median_ms,
        "q1_ms": timing.q1_ms,
        "q3_ms": timing.q3_ms,
        "iterations": timing.iterations,
        "calls_per_iteration": timing.calls,
        "speedup_over_pytorch": _ratio(cell, REFERENCE, m),
        "percent_of_floor": None if (share := _ratio(cell, FLOOR, m)) is None else 100 * share,
        "training_memory_bytes": m.training_bytes,
    }
    for name in ("y", "dx", "dweight", "dbias"):
        comparison = next((c for c in m.comparisons if c.name == name), None)
        record[f"max_abs_error_{name}"] = comparison.error if comparison else None
        record[f"error_over_budget_{name}"] = comparison.excess if comparison else None
    return record


def _ratio(cell: dict[str, Measurement], other: str, m: Measurement) -> float | None:
    """How many times longer `other` takes than `m`."""
    return cell[other].timing.median_ms / m.timing.median_ms if other in cell else None


def _table(results: Results, dtype: torch.dtype, direction: Direction, provider: str) -> Table:
    # Each direction is judged by its own result; memory is that of a training step, so it stands there alone.
    judged = "y" if direction == "forward" else "dx"
    columns = ["configuration", "rows × N", "PyTorch ms", f"{provider} ms", "speedup", "floor ms", "% of floor"]
    columns += [f"PyTorch {judged} error", f"{provider} {judged} error"]
    with_memory = direction == "forward+backward"
    columns += ["PyTorch MB", f"{provider} MB"] if with_memory else []
    rows = []
    for name, cell in results.cells(dtype, direction).items():
        if provider not in cell:
            continue
        fused, reference = cell[provider], cell.get(REFERENCE)
        record = _record(cell, fused)
        row = [name, f"{record['rows']}×{record['cols']}", _ms(reference), _ms(fused)]
        row += [
            _text(record["speedup_over_pytorch"], ".2f"),
            _ms(cell.get(FLOOR)),
            _text(record["percent_of_floor"], ".0f"),
        ]
        errors = (None if m is None else m.error(judged) for m in (reference, fused))
        row += [_text(error, ".1e") for error in errors]
        row += [_megabytes(reference), _megabytes(fused)] if with_memory else []
        rows.append(tuple(row))
    title = f"{results.suite.title}: {direction}, {dtype_name(dtype)}, {provider}"
    return Table(title, tuple(columns), tuple(rows))


def _text(value: str | float | None, format: str) -> str:
    return "–" if value is None else f"{value:{format}}"


def _ms(m: Measurement | None) -> str:
    """Three significant digits, never an exponent."""
    if m is None:
        return _text(None, "")
    ms = m.timing.median_ms
    return f"{ms:.{max(0, 2 - math.floor(math.log10(ms)))}f}" if ms else "0"


def _megabytes(m: Measurement | None) -> str:
    return _text(None if m is None or m.training_bytes is None else m.training_bytes / 1e6, ".1f")


def _markdown(about: dict[str, object], failures: list[str], tables: list[Table]) -> str:
    lines = [f"# {about['title']}", "", f"`{about['command']}`, {about['date']}", ""]
    if about["interrupted"]:
        lines += ["Interrupted: what was measured until then.", ""]
    for heading in ("machine", "versions", "method"):
        facts = about[heading]
        assert isinstance(facts, dict)
        lines += [f"- {key}: {value}" for key, value in facts.items()]
    for table in tables:
        lines += ["", f"## {table.title}", "", _markdown_row(table.columns)]
        lines += [_markdown_row(["---", "---", *["---:"] * (len(table.columns) - 2)])]
        lines += [_markdown_row(row) for row in table.rows]
    lines += ["", "## Not timed", "", *(f"- {failure}" for failure in failures)] if failures else []
    return "\n".join(lines) + "\n"


def _markdown_row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"
