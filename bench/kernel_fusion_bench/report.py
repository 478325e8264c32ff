"""A report of runs: one self-contained HTML file with a summary, tables, plots and facts."""

from __future__ import annotations

import base64
import io
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import jinja2

import kernel_fusion as kf
from kernel_fusion_bench import plot
from kernel_fusion_bench.results import ABOUT, Results
from kernel_fusion_bench.summary import sentences
from kernel_fusion_bench.tables import MARKS, tables


def write(runs: Iterable[Results], path: Path) -> None:
    """Write one report of all runs; an old file is replaced atomically."""
    shown = [_run(f"run-{index}", results) for index, results in enumerate(runs, 1)]
    loader = jinja2.PackageLoader("kernel_fusion_bench", package_path="")
    environment = jinja2.Environment(loader=loader, autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    facts = {"runs": shown, "about": ABOUT, "marks": MARKS, "version": kf.__version__}
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.part")
    temporary.write_text(environment.get_template("report.html").render(facts), encoding="utf-8")
    os.replace(temporary, path)


def is_ours(path: Path) -> bool:
    """Whether `write` wrote a file: its title says so."""
    return b"<title>kernel_fusion: " in path.read_bytes()


def _run(anchor: str, results: Results) -> dict[str, Any]:
    pictures = list(_pictures(results))
    return {
        "anchor": anchor,
        "results": results,
        "sentences": sentences(results),
        "tables": tables(results),
        "pictures": pictures,
    }


def _pictures(results: Results) -> Iterator[tuple[str, str]]:
    for _, figure in plot.pictures(results):
        drawn = io.BytesIO()
        figure.savefig(drawn, format="png")
        data = base64.b64encode(drawn.getvalue()).decode()
        yield f"data:image/png;base64,{data}", figure.get_suptitle().replace("\n", ", ")
