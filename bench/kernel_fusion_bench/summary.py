"""A run as text: a sentence or two on our speed-up over PyTorch, and everything as Markdown."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kernel_fusion_bench.results import ABOUT, OURS, REFERENCE, Cells, Measurement, Results
from kernel_fusion_bench.tables import MARKS, markdown, tables
from kernel_fusion_bench.units import dtype_label

Pair = tuple[Measurement, Measurement]  # ours and PyTorch's


def sentences(results: Results) -> list[str]:
    """Geometric means over all steady cells, per verb (or shape of operations), dtype, place and backend."""
    said = []
    ours = [p for p in results.providers if p.startswith(OURS)]
    for group, dtype in results.groups:
        for place in results.places:
            at = {d: results.cells(group, dtype, d, place) for d in results.directions(group, dtype)}
            for provider in ours:
                if claims := _claims({direction: _pairs(cells, provider) for direction, cells in at.items()}):
                    name = f"{group} {dtype_label(dtype)}" + (f" on {place}" if len(results.places) > 1 else "")
                    said.append(f"{name}{f' by {provider}' if len(ours) > 1 else ''}: {claims}")
    return said


def _pairs(cells: Cells, provider: str) -> list[Pair]:
    return [(cell[provider], cell[REFERENCE]) for cell in cells.values() if {provider, REFERENCE} <= cell.keys()]


def _claims(pairs: dict[str, list[Pair]]) -> str:
    """The ratios of times by direction, or of bytes if nothing was timed."""
    claims, counted = [], 0
    for direction, found in pairs.items():
        steady = [(mine.steady, theirs.steady) for mine, theirs in found]
        if ratios := [theirs.median_ms / mine.median_ms for mine, theirs in steady if mine and theirs]:
            claims.append(f"{direction} {_mean(ratios)}")
            counted = max(counted, len(ratios))
    if claims:
        over = f" (geometric mean of {counted})" if counted > 1 else ""
        return f"{', '.join(claims)} as fast as PyTorch{over}"
    if any(mine.timing for found in pairs.values() for mine, _ in found):
        return "the times vary too much for a verdict"
    for name, field in (("saved for backward", "saved_bytes"), ("peak", "training_memory_bytes")):
        sizes = [(getattr(mine, field), getattr(theirs, field)) for found in pairs.values() for mine, theirs in found]
        if ratios := [mine / theirs for mine, theirs in sizes if mine and theirs]:
            claims.append(f"{name} {_mean(ratios)}")
    return f"{', '.join(claims)} of PyTorch's memory" if claims else ""


def _mean(ratios: list[float]) -> str:
    return f"{statistics.geometric_mean(ratios):.2f}×"


def write_markdown(results: Results, folder: Path) -> Path:
    """Write sentences, tables, provenance and failures; returns the path."""
    lines = heading(results.title, results.about, results.interrupted, sentences(results))
    lines += [f"- {mark} after a time: {meaning}" for mark, meaning in MARKS.items()]
    for table in tables(results):
        lines += markdown(table)
    lines += ["", "## Not measured", "", *(f"- {failure}" for failure in results.failures)] if results.failures else []
    path = folder / f"{results.stem}.md"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def heading(
    title: str, about: Mapping[str, Any], interrupted: bool = False, sentences: Sequence[str] = ()
) -> list[str]:
    """The lines that introduce a run and say where and how it was measured."""
    lines = [f"# {title}", "", *(f"**{sentence}**\n" for sentence in sentences)]
    lines += [f"`{about['command']}`, {about['date']}", ""]
    if interrupted:
        lines += ["Interrupted: what was measured until then.", ""]
    return lines + [f"- {key}: {value}" for part in ABOUT for key, value in about[part].items()]
