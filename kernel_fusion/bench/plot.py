"""Plots of results: how many times the floor each contender takes; of a single operation, bars of times.

Colours are those of Okabe and Ito, which every kind of colour vision tells apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle, product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kernel_fusion.bench.results import FLOOR, OURS, REFERENCE, Measurement, Results
from kernel_fusion.bench.timing import Place

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Cells = dict[str, dict[str, Measurement]]  # by label, then provider

_GREY, _ORANGE = "#999999", "#E69F00"
_OURS = ("#0072B2", "#56B4E9", "#000000")
_PEERS = ("#009E73", "#CC79A7", "#D55E00", "#F0E442", "#7F7F00")
_MARKERS = "sv^DPX"
# Beyond this ratio of the longest to the shortest time, the shortest could not be told apart on a linear axis.
_WIDE_RANGE = 8


def missing() -> str | None:
    """Why nothing can be plotted, or None."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        return "plots need matplotlib: pip install 'kernel-fusion[bench]'"
    return None


def plot(results: Results, folder: Path, suffix: str = "png") -> list[Path]:
    """Write a plot per verb (of operations: per shape) and direction into `folder`; the paths.

    A plot has a row of panels per dtype, and in it a panel per place. Memory without times is not plotted.
    """
    timed = [m for m in results.measurements if m.timing]
    figures = dict.fromkeys((m.group, m.direction) for m in timed)
    folder.mkdir(parents=True, exist_ok=True)
    return [_plot(results, group, direction, folder, suffix) for group, direction in figures]


def _plot(results: Results, group: str, direction: str, folder: Path, suffix: str) -> Path:
    # Not pyplot: a figure of one's own needs no display and leaves no global state.
    from matplotlib.figure import Figure

    panels = _panels(results, group, direction)
    dtypes, places = (list(dict.fromkeys(names)) for names in zip(*panels, strict=True))
    width, height = _size(list(panels.values()))
    figure = Figure(figsize=(width * len(places), 1.6 + height * len(dtypes)), layout="constrained", dpi=110)
    axes = figure.subplots(len(dtypes), len(places), squeeze=False)
    styles = _styles(results.providers)
    for (row, dtype), (column, place) in product(enumerate(dtypes), enumerate(places)):
        panel, cells = axes[row, column], panels.get((dtype, place), {})
        if _is_of_operations(cells) and len(cells) == 1:
            _plot_bars(panel, next(iter(cells.values())), styles)
        else:
            _plot_cells(panel, cells, styles)
            _label_cells(panel, cells)
        panel.set_title(dtype if len(places) == 1 else f"{dtype}, {place}", fontsize=10, loc="left")
    # By label, since not everybody is in every panel.
    labelled = [panel.get_legend_handles_labels() for panel in axes.flat]
    legend = {label: handle for handles, labels in labelled for handle, label in zip(handles, labels, strict=True)}
    if legend:
        figure.legend(handles=[*legend.values()], loc="outside lower center", ncols=len(legend), frameon=False)
    machine = results.about["machine"]
    title = f"{results.title}: {group}, {direction}, {machine.get('gpu', machine['cpu'])}"
    figure.suptitle(title, x=0.01, ha="left", fontweight="bold")
    path = folder / f"{results.stem}-{group}-{direction.replace(' ', '-')}.{suffix}"
    figure.savefig(path)
    return path


def _panels(results: Results, group: str, direction: str) -> dict[tuple[str, Place], Cells]:
    """By dtype and place, what was measured of a group in a direction."""
    dtypes = [dtype for name, dtype in results.groups if name == group]
    found = {(t, place): results.cells(group, t, direction, place) for t, place in product(dtypes, results.places)}
    return {key: cells for key, cells in found.items() if cells}


def _size(panels: Sequence[Cells]) -> tuple[float, float]:
    """Width and height of a panel in inches; operations are many, and their names are long."""
    count = max(map(len, panels))
    of_operations = any(map(_is_of_operations, panels))
    width, height = (0.4, 3.8) if of_operations and count > 1 else (0.7, 2.6)
    return max(9, 3 + width * count), height


def _styles(providers: list[str]) -> dict[str, dict[str, Any]]:
    """Colour, marker and label of every provider but the floor, which is the line at 1."""
    mine, peers = iter(_OURS), iter(_PEERS)
    styles: dict[str, dict[str, Any]] = {}
    for marker, provider in zip(cycle(_MARKERS), (p for p in providers if p != FLOOR), strict=False):
        if provider == REFERENCE:
            styles[provider] = {"color": _ORANGE, "marker": marker, "label": "PyTorch"}
        else:
            color = next(mine if provider.startswith(OURS) else peers, _GREY)
            styles[provider] = {"color": color, "marker": marker, "label": provider}
    return styles


def _plot_cells(axes: Axes, cells: Cells, styles: dict[str, dict[str, Any]]) -> None:
    """Medians with their quartiles, over the floor's median where there is a floor, else in microseconds."""
    from matplotlib.ticker import LogLocator

    over_floor = any(FLOOR in cell for cell in cells.values())
    shown: list[float] = []
    for provider, style in styles.items():
        points = [
            (at, *(scale * ms for ms in (timing.median_ms, timing.q1_ms, timing.q3_ms)))
            for at, cell in enumerate(cells.values())
            if provider in cell and (timing := cell[provider].timing) and (scale := _scale(cell, over_floor))
        ]
        if points:
            positions, medians, q1, q3 = map(list, zip(*points, strict=True))
            below = [median - q for median, q in zip(medians, q1, strict=True)]
            above = [q - median for median, q in zip(medians, q3, strict=True)]
            # Operations are no series, so no line joins them.
            line = "none" if _is_of_operations(cells) else "solid"
            axes.errorbar(positions, medians, yerr=[below, above], linestyle=line, linewidth=1, markersize=7, **style)
            shown += medians
    if over_floor:
        axes.axhline(1.0, color=_GREY, linewidth=2, label="floor")
    if shown and max(shown) > _WIDE_RANGE * min(shown):
        axes.set_yscale("log", subs=[])
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter("{x:g}")
    else:
        axes.set_ylim(bottom=0)
    axes.set_ylabel("time ÷ floor" if over_floor else "time (µs)")


def _is_of_operations(cells: Cells) -> bool:
    return any(m.operation for cell in cells.values() for m in cell.values())


def _plot_bars(axes: Axes, cell: dict[str, Measurement], styles: dict[str, dict[str, Any]]) -> None:
    """A bar of the median per contender, the floor among them, with its time and bandwidth."""
    styles = {FLOOR: {"color": _GREY, "label": FLOOR}} | styles
    shown = [(styles[p], m.timing.median_ms * 1e3, m) for p, m in cell.items() if m.timing]
    names = [style["label"] for style, _, _ in shown]
    bars = axes.bar(names, [time for _, time, _ in shown], color=[style["color"] for style, _, _ in shown], width=0.6)
    texts = [
        f"{time:.3g} µs" + (f"\n{m.gigabytes_per_second:.0f} GB/s" if m.bytes_moved else "") for _, time, m in shown
    ]
    axes.bar_label(bars, texts, padding=2, fontsize=9)
    axes.margins(y=0.25)
    axes.set_ylabel("time (µs)")
    _tidy(axes)


def _scale(cell: dict[str, Measurement], over_floor: bool) -> float | None:
    """What turns milliseconds into what is shown; None where the floor is missing."""
    if not over_floor:
        return 1e3
    floor = cell[FLOOR].timing if FLOOR in cell else None
    return 1 / floor.median_ms if floor else None


def _label_cells(axes: Axes, cells: Cells) -> None:
    some = [next(iter(cell.values())) for cell in cells.values()]
    sizes = [f"{m.rows}×{m.cols}" for m in some]
    # A shape given by the user is its own name, and that of an operation stands in the title.
    names = ["" if name == size.replace("×", "x") else f"{name}\n" for name, size in zip(cells, sizes, strict=True)]
    sizes = ["" if m.operation else size for m, size in zip(some, sizes, strict=True)]
    labels = [name + size for name, size in zip(names, sizes, strict=True)]
    axes.set_xticks(range(len(cells)), labels, rotation=45, ha="right", rotation_mode="anchor", fontsize=8)
    _tidy(axes)


def _tidy(axes: Axes) -> None:
    axes.grid(axis="y", linewidth=0.4, alpha=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
