"""Shared by the tables of results: look-up of measurements, figures, and Markdown rows."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from kernel_fusion_bench.tables import rows_of

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
H200, H100 = RESULTS / "nvidia-h200", RESULTS / "nvidia-h100"

Cell = dict[str, dict[str, Any]]  # what was measured, by provider


def cells_of(file: str, *keys: str, folder: Path = H200) -> dict[tuple[Any, ...], Cell]:
    """The measurements of a file, by these of their facts."""
    cells: dict[tuple[Any, ...], Cell] = {}
    for measured in json.loads((folder / file).read_text())["measurements"]:
        cells.setdefault(tuple(measured[key] for key in keys), {})[measured["provider"]] = measured
    return cells


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """A table in Markdown; what is no number is on the left."""
    left = {"shape here", "day", "machine", "command"}
    if head[0].startswith(("model", "call", "operation", "chain", "kernels", "run")) or "thread" in head[0]:
        left.add(head[0])
    yield from rows_of(head, rows, left)
    yield ""


def over_floor(cell: Cell, provider: str) -> str:
    """The time of a provider divided by the floor's; a dash where it was not measured."""
    return f"{cell[provider]['median_ms'] / cell['floor']['median_ms']:.2f}" if provider in cell else "–"


def digits(value: float) -> str:
    """Three of them."""
    return f"{value:.0f}" if value >= 99.95 else f"{value:.1f}" if value >= 9.995 else f"{value:.2f}"


def best_peer(cell: Cell) -> str | None:
    """The fastest of those that are neither ours nor PyTorch."""
    peers = [name for name in cell if name not in ("floor", "pytorch") and not name.startswith("kf-")]
    return min(peers, key=lambda name: float(cell[name]["median_ms"]), default=None)


def sources(*files: str, root: str = "../", folder: Path = H200) -> str:
    """Links to files, from a page below `root`, the machine, and the versions of the peers in them."""
    links = ", ".join(f"[`{file}`]({root}benchmarks/results/{folder.name}/{file})" for file in files)
    found = [json.loads((folder / file).read_text()) for file in files]
    peers = {name: version for each in found for name, version in each["peers"].items() if name != "pytorch"}
    named = "; " + ", ".join(f"{name} {version}" for name, version in peers.items()) if peers else ""
    return f"{links}: {found[0]['machine']['gpu']}, torch {found[0]['versions']['torch']}{named}."
