"""Plots of results. Colours are those of Okabe and Ito, which every kind of colour vision tells apart."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from kernel_fusion.bench.providers import DIRECTIONS, Direction
from kernel_fusion.bench.results import FLOOR, REFERENCE, Measurement, Results
from kernel_fusion.core.spec import dtype_name

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_GREY, _ORANGE = "#999999", "#E69F00"
_OURS = ("#0072B2", "#009E73", "#CC79A7", "#56B4E9")
# Beyond this ratio of the longest to the shortest time, the shortest bars could not be seen on a linear axis.
_WIDE_RANGE = 20
_LABELS = {FLOOR: "floor", REFERENCE: "PyTorch"}


def missing() -> str | None:
    """Why nothing can be plotted, or None."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        return "plots need matplotlib: pip install 'kernel-fusion[bench]'"
    return None


def plot(results: Results, folder: Path) -> list[Path]:
    """Write one PNG per dtype into `folder`, times and speedups for each direction; the paths."""
    return [_plot_dtype(results, dtype, folder) for dtype in results.dtypes]


def _plot_dtype(results: Results, dtype: torch.dtype, folder: Path) -> Path:
    # Not pyplot: a figure of one's own needs no display and leaves no global state.
    from matplotlib.figure import Figure

    directions = [direction for direction in DIRECTIONS if results.cells(dtype, direction)]
    count = max(len(results.cells(dtype, direction)) for direction in directions)
    width = max(11, 4 + 1.1 * count)
    figure = Figure(figsize=(width, 1.2 + 2.7 * len(directions)), layout="constrained", dpi=110)
    grid = figure.subplots(len(directions), 2, squeeze=False, sharex="col", width_ratios=(3, 2))
    colors = {FLOOR: _GREY, REFERENCE: _ORANGE} | dict(zip(results.providers, _OURS, strict=False))
    for direction, (times, speedups) in zip(directions, grid, strict=True):
        cells = results.cells(dtype, direction)
        _plot_times(times, direction, cells, colors)
        _plot_speedups(speedups, direction, cells, {p: colors[p] for p in results.providers})
    handles, labels = grid[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
    device = torch.cuda.get_device_name(results.device) if results.device.type == "cuda" else "CPU"
    figure.suptitle(f"{results.suite.title}, {dtype_name(dtype)}, {device}", x=0.01, ha="left", fontweight="bold")
    path = folder / f"{results.stem}-{dtype_name(dtype)}.png"
    figure.savefig(path)
    return path


def _plot_times(
    axes: Axes, direction: Direction, cells: dict[str, dict[str, Measurement]], colors: dict[str, str]
) -> None:
    """Grouped bars of median times with their quartiles."""
    from matplotlib.ticker import LogLocator

    providers = [provider for provider in colors if any(provider in cell for cell in cells.values())]
    width = 0.8 / len(providers)
    for index, provider in enumerate(providers):
        positions = [at + (index - (len(providers) - 1) / 2) * width for at in range(len(cells))]
        timings = [cell[provider].timing if provider in cell else None for cell in cells.values()]
        axes.bar(
            positions,
            [t.median_ms if t else 0.0 for t in timings],
            width,
            yerr=[
                [t.median_ms - t.q1_ms if t else 0.0 for t in timings],
                [t.q3_ms - t.median_ms if t else 0.0 for t in timings],
            ],
            error_kw={"linewidth": 0.8, "ecolor": "#333333"},
            label=_LABELS.get(provider, provider),
            color=colors[provider],
        )
    medians = [m.timing.median_ms for cell in cells.values() for m in cell.values()]
    wide = max(medians) > _WIDE_RANGE * min(medians)
    if wide:
        axes.set_yscale("log", subs=[])
        axes.set_ylim(bottom=min(medians) / 2)
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter("{x:g}")
    axes.set_ylabel("time (ms, log scale)" if wide else "time (ms)")
    _style(axes, direction, cells)


def _plot_speedups(
    axes: Axes, direction: Direction, cells: dict[str, dict[str, Measurement]], colors: dict[str, str]
) -> None:
    """Bars of PyTorch's time over each provider's, with their values."""
    width = 0.8 / max(1, len(colors))
    for index, (provider, color) in enumerate(colors.items()):
        for at, cell in enumerate(cells.values()):
            if provider not in cell or REFERENCE not in cell:
                continue
            speedup = cell[REFERENCE].timing.median_ms / cell[provider].timing.median_ms
            position = at + (index - (len(colors) - 1) / 2) * width
            bar = axes.bar(position, speedup, width, color=color)
            axes.bar_label(bar, fmt="%.2f", fontsize=7.5, padding=2, rotation=0 if len(colors) == 1 else 90)
    axes.axhline(1.0, color=_ORANGE, linewidth=1.5)
    axes.margins(y=0.15)
    axes.set_ylim(bottom=0)
    axes.set_ylabel("speedup over PyTorch (×)")
    _style(axes, direction, cells)


def _style(axes: Axes, direction: Direction, cells: dict[str, dict[str, Measurement]]) -> None:
    cases = [next(iter(cell.values())).workload.case for cell in cells.values()]
    sizes = [f"{math.prod(case.shape[: -case.num_dims])}×{math.prod(case.normalized_shape)}" for case in cases]
    # A shape given by the user is its own name.
    names = ["" if name == size.replace("×", "x") else f"{name}\n" for name, size in zip(cells, sizes, strict=True)]
    labels = [name + size for name, size in zip(names, sizes, strict=True)]
    axes.set_xticks(range(len(cells)), labels, rotation=45, ha="right", rotation_mode="anchor", fontsize=8)
    axes.set_title(direction, fontsize=10, loc="left")
    axes.grid(axis="y", linewidth=0.4, alpha=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
