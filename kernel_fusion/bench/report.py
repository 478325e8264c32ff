"""A report of runs: one HTML file with their tables, plots, machine, versions, method and commands.

Pictures are in it as data, styles in its head, and nothing is fetched from anywhere, so that it can be sent and kept.
"""

from __future__ import annotations

import base64
import io
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import jinja2

import kernel_fusion as kf
from kernel_fusion.bench import plot
from kernel_fusion.bench.results import Results
from kernel_fusion.bench.table_columns import INACCURATE
from kernel_fusion.bench.tables import ABOUT, Table, tables


@dataclass(frozen=True)
class Picture:
    """A plot, as the address that an image element takes, and what it shows."""

    address: str
    title: str


@dataclass(frozen=True)
class Run:
    """A run as the template shows it."""

    anchor: str
    results: Results
    tables: Sequence[Table]
    pictures: Sequence[Picture]


def write(runs: Iterable[Results], path: Path) -> None:
    """Write one report of all runs. A file that was there is replaced at once or not at all."""
    shown = [
        Run(f"run-{index}", results, tables(results), list(_pictures(results))) for index, results in enumerate(runs, 1)
    ]
    loader = jinja2.PackageLoader("kernel_fusion.bench", package_path="")
    environment = jinja2.Environment(loader=loader, autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    facts = {"runs": shown, "about": ABOUT, "inaccurate": INACCURATE, "version": kf.__version__}
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.part")
    temporary.write_text(environment.get_template("report.html").render(facts), encoding="utf-8")
    os.replace(temporary, path)


def _pictures(results: Results) -> Iterator[Picture]:
    for _, figure in plot.pictures(results):
        drawn = io.BytesIO()
        figure.savefig(drawn, format="png")
        data = base64.b64encode(drawn.getvalue()).decode()
        yield Picture(f"data:image/png;base64,{data}", figure.get_suptitle().replace("\n", ", "))
