"""Pictures of results, as files. Each says which way is better, and on what machine, versions and date.

Cells with noisy times stay empty and say so. Lines join points over row lengths, never categories.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kernel_fusion.cli.units import bytes_unit
from kernel_fusion_bench.results import (
    FLOOR,
    OURS,
    REFERENCE,
    Cell,
    Cells,
    Measurement,
    Results,
    file_name,
    is_of_operations,
    measured,
    only,
)
from kernel_fusion_bench.suite import PlotKind
from kernel_fusion_bench.units import dtype_label, shown, time_unit

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Picture = tuple[str, "Figure"]  # a name for the file, and the figure
Panels = dict[tuple[str, str], Cells]  # by the titles of row and column
Draw = Callable[["Axes", Cells, "Styles"], None]
Values = Callable[[Cell, str], float | None]  # of a contender in a cell

# Okabe and Ito's colours, which colour-blind readers can tell apart. Markers and hatches help in black and white.
_GREY, _ORANGE = "#999999", "#E69F00"
_OURS = ("#0072B2", "#56B4E9", "#000000")
_PEERS = ("#009E73", "#CC79A7", "#D55E00", "#7F7F00", "#F0E442")
_MARKERS = "sv^DPX<>*h"
_HATCHES = ("", "///", "...", "\\\\\\", "xxx", "ooo", "|||", "---", "+++", "***")
_DRAWN_BY = "kernel-fusion, with Matplotlib"
_SAVED = "saved for backward"
_MANY = 16  # with more cells than this, bars would be too thin
_WIDE_RANGE = 8  # beyond this ratio of the largest to the smallest value, an axis is logarithmic
_MAX_WIDTH, _MAX_HEIGHT = 24.0, 40.0


def missing() -> str | None:
    """Why nothing can be plotted, or None."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        return "plots need matplotlib (pip install matplotlib)"
    return None


def plot(results: Results, folder: Path, kinds: Iterable[PlotKind] | None = None, suffix: str = "png") -> list[Path]:
    """Write the pictures of `kinds` (default: all) into `folder`; returns the paths.

    Raises:
        FileExistsError: a picture of one of the names is there that this function did not draw.
    """
    folder.mkdir(parents=True, exist_ok=True)
    paths: list[Path] = []
    for name, figure in pictures(results, kinds):
        path = folder / f"{results.stem}-{file_name(name)}.{suffix}"
        if path in paths:  # two names can become one file name
            path = path.with_stem(f"{path.stem}-{len(paths)}")
        if path.exists() and not is_ours(path):
            raise FileExistsError(
                errno.EEXIST, "this picture is not of kernel-fusion, which does not overwrite it", str(path)
            )
        figure.savefig(path, metadata={"Creator" if suffix == "svg" else "Software": _DRAWN_BY})
        paths.append(path)
    return paths


def is_ours(path: Path) -> bool:
    """Whether `plot` drew a picture: its metadata say so."""
    return _DRAWN_BY.encode() in path.read_bytes()


def pictures(results: Results, kinds: Iterable[PlotKind] | None = None) -> Iterator[Picture]:
    """The pictures of `kinds` (default: all) that the results have data for."""
    for kind in KINDS if kinds is None else kinds:
        yield from KINDS[kind](results)


def _speedups(results: Results) -> Iterator[Picture]:
    """Per group and dtype: PyTorch's time divided by that of every other contender."""
    beside = {FLOOR, REFERENCE}

    def ratio(cell: Cell, provider: str) -> float | None:
        reference, timing = cell[REFERENCE].steady, cell[provider].steady
        return reference.median_ms / timing.median_ms if reference and timing and provider != REFERENCE else None

    def draw(axes: Axes, cells: Cells, look: Styles) -> None:
        _across(axes, cells, {p: style for p, style in look.items() if p not in beside}, ratio, "{:.2f}×")
        _mark_pytorch(axes, look[REFERENCE])

    def comparable(group: str, dtype: str) -> Panels:
        timed = _timed(results, group, dtype)
        return {
            key: {label: cell for label, cell in cells.items() if REFERENCE in cell and cell.keys() - beside}
            for key, cells in timed.items()
        }

    return _figures(results, "speedup", "speed-up over PyTorch", comparable, draw)


def _mark_pytorch(axes: Axes, style: Style) -> None:
    axes.axvline(1.0, color=style.color, linewidth=1.5, linestyle="dashed", label=style.label, zorder=2.5)
    axes.set_xlabel("times as fast as PyTorch (higher is better)")


def speedup_picture(title: str, note: str, rows: Mapping[str, Mapping[str, float]]) -> Figure:
    """A figure of speed-ups over PyTorch that were chosen by hand, as the documentation has them.

    Args:
        title: a line above the bars.
        note: a line below the title, such as where it was measured.
        rows: by their names, the speed-up in each direction, or of each other kind; all have the same kinds.
    """
    from matplotlib.figure import Figure

    kinds = list(next(iter(rows.values())))
    look = {kind: Style(color, "o", hatch, kind) for kind, color, hatch in zip(kinds, _OURS, _HATCHES, strict=False)}
    figure = Figure(figsize=(6.6, 1.6 + 0.42 * len(rows)), layout="constrained", dpi=110)
    axes = figure.subplots()
    values = {kind: {name: speedups[kind] for name, speedups in rows.items()} for kind in kinds}
    _bars(axes, dict(zip(rows, rows, strict=True)), values, look, "{:.1f}×")
    _mark_pytorch(axes, Style(_ORANGE, "", "", "PyTorch"))
    axes.set_xlim(left=0)
    figure.legend(loc="outside lower center", ncols=len(kinds) + 1, frameon=False)
    figure.suptitle(f"{title}\n{note}", x=0.01, ha="left", fontsize=9, fontweight="bold")
    return figure


def _times(results: Results) -> Iterator[Picture]:
    """Per group and dtype: times over the floor, if there is one; for a single operation, times and bandwidths."""
    return _figures(results, "time", "time", partial(_timed, results), _draw_times)


def _draw_times(axes: Axes, cells: Cells, look: Styles) -> None:
    if len(cells) == 1 and is_of_operations(cells):
        _time_bars(axes, next(iter(cells.values())), look)
        return
    unit = time_unit([m.steady.median_ms for cell in cells.values() for m in cell.values() if m.steady])
    over_floor = any(FLOOR in cell for cell in cells.values())

    def value(cell: Cell, provider: str) -> float | None:
        floor, timing = (cell[p].steady if p in cell else None for p in (FLOOR, provider))
        if timing is None or (over_floor and (floor is None or provider == FLOOR)):
            return None
        return timing.median_ms / floor.median_ms if over_floor and floor else timing.median_ms * unit.factor

    _across(axes, cells, look, value, "{:.2f}" if over_floor else "{:.3g}")
    if over_floor:
        axes.axvline(1.0, color=_GREY, linewidth=2, label=look[FLOOR].label, zorder=0.5)
    axes.set_xlabel(f"time {f'÷ {look[FLOOR].label}' if over_floor else f'in {unit.name}'} (lower is better)")


def _time_bars(axes: Axes, cell: Cell, look: Styles) -> None:
    timed = [(look[p], m, m.timing) for p in look if (m := cell.get(p)) and m.timing]
    unit = time_unit([timing.median_ms for *_, timing in timed])
    for at, (style, m, timing) in enumerate(reversed(timed)):
        bars = axes.barh(at, timing.median_ms * unit.factor, color=style.color, hatch=style.hatch, edgecolor="white")
        speed = f", {m.gigabytes_per_second:.0f} GB/s" if m.gigabytes_per_second else ""
        noisy = " (noisy)" if timing.noisy else ""
        text = f"{timing.median_ms * unit.factor:.3g} {unit.name}{speed}{noisy}"
        axes.bar_label(bars, [text], padding=3, fontsize=9)
    axes.set_yticks(range(len(timed)), [style.label for style, *_ in reversed(timed)])
    axes.margins(x=0.3)
    axes.set_xlabel(f"time in {unit.name} (lower is better)")
    _tidy(axes)


def _bandwidths(results: Results) -> Iterator[Picture]:
    """Per group: bytes per second over row length. Operations at one shape have only one length."""
    for group in dict.fromkeys(group for group, _ in results.groups):
        panels: Panels = {}
        for dtype in (dtype for name, dtype in results.groups if name == group):
            known = _by_direction(results, group, dtype, lambda m: m.steady is not None and bool(m.bytes_moved))
            for (place, direction), cells in known.items():
                if len({(m.rows, m.cols) for m in measured(cells)}) > 1 and not is_of_operations(cells):
                    panels[dtype_label(dtype), ", ".join(filter(None, (direction, place)))] = cells
        yield from _figure(results, f"{group}-bandwidth", f"{group}: bandwidth", panels, _draw_bandwidth, height=3.4)


def _draw_bandwidth(axes: Axes, cells: Cells, look: Styles) -> None:
    some = [next(iter(cell.values())) for cell in cells.values()]
    by_length = len({m.cols for m in some}) == len(some)
    for provider, style in look.items():
        mine = [cell[provider] for cell in cells.values() if provider in cell]
        points = sorted((m.cols if by_length else (m.bytes_moved or 0) / 1e6, m.gigabytes_per_second) for m in mine)
        if points:
            distinct = len({x for x, _ in points}) == len(points)
            line = "none" if not distinct else "dashed" if provider == FLOOR else "solid"
            shape: dict[str, Any] = {"linestyle": line, "linewidth": 1.2, "marker": style.marker, "markersize": 5}
            axes.plot(*zip(*points, strict=True), color=style.color, label=style.label, **shape)
    axes.set_xscale("log", base=2)
    if by_length:
        powers = [m.cols for m in some if m.cols & (m.cols - 1) == 0]
        axes.set_xticks(powers if len(powers) > 1 else [m.cols for m in some])
    axes.xaxis.set_major_formatter("{x:g}")
    axes.minorticks_off()
    axes.tick_params(axis="x", labelrotation=45, labelsize=8)
    rows = {m.rows for m in some}
    axes.set_xlabel("row length N" + (f", {rows.pop()} rows" if len(rows) == 1 else "") if by_length else "MB per call")
    axes.set_ylim(bottom=0)
    axes.set_ylabel("GB/s (higher is better)")
    _tidy(axes, "y")


def _memory(results: Results) -> Iterator[Picture]:
    """Per group and dtype: bars for the peak of a training step, diamonds for what autograd saved."""
    devices = {place.device: place for place in results.places}  # threads change no bytes

    def counted(group: str, dtype: str) -> Panels:
        return {
            (device if len(devices) > 1 else "", ""): only(
                results.cells(group, dtype, None, place), lambda m: m.training_memory_bytes is not None
            )
            for device, place in devices.items()
        }

    return _figures(results, "memory", "memory of a training step", counted, _draw_memory)


def _draw_memory(axes: Axes, cells: Cells, look: Styles) -> None:
    unit = bytes_unit([m.training_memory_bytes or 0 for cell in cells.values() for m in cell.values()])

    def peak(cell: Cell, provider: str) -> float | None:
        num_bytes = cell[provider].training_memory_bytes if provider in cell else None
        return None if num_bytes is None else num_bytes * unit.factor

    where = _across(axes, cells, look, peak, "{:.3g} " + unit.name)
    for (label, provider), at in where.items():
        if (num_bytes := cells[label][provider].saved_bytes) is not None:
            shape: dict[str, Any] = {"marker": "D", "markersize": 4, "linestyle": "none", "zorder": 3, "color": "white"}
            edge = look[provider].color if len(cells) > _MANY else "black"
            saved = axes.plot(num_bytes * unit.factor, at, markeredgecolor=edge, **shape)
            if axes.get_legend_handles_labels()[1].count(_SAVED) == 0:
                saved[0].set_label(_SAVED)
    axes.set_xlabel(f"peak of a training step in {unit.name} (lower is better)")


KINDS: dict[PlotKind, Callable[[Results], Iterator[Picture]]] = {
    "speedup": _speedups,
    "time": _times,
    "bandwidth": _bandwidths,
    "memory": _memory,
}


@dataclass(frozen=True)
class Style:
    """How a contender is drawn, and what the legend calls it."""

    color: str
    marker: str
    hatch: str
    label: str


Styles = Mapping[str, Style]  # by provider


def styles(results: Results) -> dict[str, Style]:
    """One style per contender, the same in all pictures of a run."""
    mine, peers = iter(_OURS), iter(_PEERS)
    floor = results.name_of_floor
    found = {FLOOR: Style(_GREY, ".", "", floor)} if FLOOR in results.providers else {}
    contenders = (provider for provider in results.providers if provider != FLOOR)
    for marker, hatch, provider in zip(cycle(_MARKERS), cycle(_HATCHES), contenders, strict=False):
        colors = mine if provider.startswith(OURS) else peers
        color = _ORANGE if provider == REFERENCE else next(colors, _GREY)
        found[provider] = Style(color, marker, hatch, shown(provider))
    return found


def _draw(results: Results, what: str, panels: Panels, draw: Draw, height: float | None) -> Figure:
    # Unlike a pyplot figure, this one needs no display and leaves no global state.
    from matplotlib.figure import Figure

    rows, columns = (list(dict.fromkeys(names)) for names in zip(*panels, strict=True))
    longest = max(map(len, panels.values()))
    tall = height or 0.9 + (0.24 if longest > _MANY else 0.42) * longest
    size = min(_MAX_WIDTH, max(8, 2.5 + 3.6 * len(columns))), min(_MAX_HEIGHT, 1.3 + tall * len(rows))
    figure = Figure(figsize=size, layout="constrained", dpi=110)
    # All panels share one scale, so that lengths can be compared.
    axes = figure.subplots(len(rows), len(columns), squeeze=False, sharex=height is None, sharey=height is None)
    look = styles(results)
    for (row, column), cells in panels.items():
        panel = axes[rows.index(row), columns.index(column)]
        draw(panel, cells, look)
        panel.set_title(", ".join(filter(None, (row, column))), fontsize=10, loc="left")
    for at, panel in enumerate(axes.flat):
        panel.set_visible((rows[at // len(columns)], columns[at % len(columns)]) in panels)
    labelled = [panel.get_legend_handles_labels() for panel in axes.flat]
    legend = {label: handle for handles, labels in labelled for handle, label in zip(handles, labels, strict=True)}
    if legend:
        figure.legend(handles=[*legend.values()], loc="outside lower center", ncols=min(6, len(legend)), frameon=False)
    noted = f"{results.title}: {what}\n{results.provenance}"
    figure.suptitle(noted, x=0.01, ha="left", fontsize=10, fontweight="bold")
    return figure


def _figure(
    results: Results, name: str, what: str, panels: Panels, draw: Draw, height: float | None = None
) -> Iterator[Picture]:
    """A figure of all panels with data, with one legend; `height` is for panels without categories."""
    from matplotlib import rc_context

    panels = {key: cells for key, cells in panels.items() if cells}
    if panels:
        with rc_context({"text.parse_math": False}):  # a dollar sign begins no formula
            figure = _draw(results, what, panels, draw, height)
        yield name, figure


def _figures(
    results: Results, kind: str, what: str, panels: Callable[[str, str], Panels], draw: Draw
) -> Iterator[Picture]:
    for group, dtype in results.groups:
        name = dtype_label(dtype)
        yield from _figure(results, f"{group}-{name}-{kind}", f"{group}, {name}: {what}", panels(group, dtype), draw)


def _timed(results: Results, group: str, dtype: str) -> Panels:
    return _by_direction(results, group, dtype, lambda m: m.timing is not None)


def _by_direction(results: Results, group: str, dtype: str, wanted: Callable[[Measurement], bool]) -> Panels:
    """The measured cells by place and direction, which become rows and columns; a single place has no title."""
    found: Panels = {}
    for place in results.places:
        for direction in results.directions(group, dtype):
            title = str(place) if len(results.places) > 1 else ""
            found[title, direction] = only(results.cells(group, dtype, direction, place), wanted)
    return found


def _across(axes: Axes, cells: Cells, look: Styles, value: Values, text: str) -> dict[tuple[str, str], float]:
    """Draw a row per cell, with a bar or dot for the value of each contender; returns the heights."""
    found = {p: {label: value(cell, p) for label, cell in cells.items() if p in cell} for p in look}
    return _bars(axes, dict(zip(cells, row_names(cells), strict=True)), found, look, text)


def _bars(
    axes: Axes, rows: Mapping[str, str], values_of: Mapping[str, Mapping[str, float | None]], look: Styles, text: str
) -> dict[tuple[str, str], float]:
    """Draw a row per label with a bar for each of several series, or dots if there are many rows.

    Args:
        axes: where to draw.
        rows: the names of the rows, by label.
        values_of: by series, the values by label; None is a noisy one.
        look: how each series is drawn.
        text: the format of a bar's number.

    Returns:
        the heights, by label and series.
    """
    dots = len(rows) > _MANY
    found = {p: values for p, values in values_of.items() if any(x is not None for x in values.values())}
    thickness, middle = 0.8 / max(1, len(found)), (len(found) - 1) / 2
    where: dict[tuple[str, str], float] = {}
    for index, (provider, values) in enumerate(found.items()):
        heights = {label: at + (0 if dots else (index - middle) * thickness) for at, label in enumerate(rows)}
        points = [(heights[label], x) for label, x in values.items() if x is not None]
        where |= {(label, provider): heights[label] for label, x in values.items() if x is not None}
        ys, xs = zip(*points, strict=True)
        style = look[provider]
        if dots:
            shape: dict[str, Any] = {"linestyle": "none", "marker": style.marker, "markersize": 5}
            shape["zorder"] = 3 if provider.startswith(OURS) else 2
            axes.plot(xs, ys, color=style.color, label=style.label, **shape)
        else:
            shape = {"height": thickness, "hatch": style.hatch, "edgecolor": "white", "linewidth": 0.3}
            bars = axes.barh(ys, xs, color=style.color, label=style.label, **shape)
            axes.bar_label(bars, [text.format(x) for x in xs], padding=3, fontsize=7)
            _note(axes, [heights[label] for label, x in values.items() if x is None])
    drawn = {label for label, _ in where}
    _note(axes, [at for at, label in enumerate(rows) if label not in drawn and (dots or not found)])
    numbers = [x for values in found.values() for x in values.values() if x is not None]
    if dots and numbers and min(numbers) > 0 and max(numbers) > _WIDE_RANGE * min(numbers):
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter("{x:g}")
    else:
        axes.margins(x=0.16)
    axes.set_yticks(range(len(rows)), [*rows.values()], fontsize=8)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.label_outer()
    _tidy(axes)
    return where


def _note(axes: Axes, rows: Iterable[float]) -> None:
    """Write at these heights that nothing is drawn because times vary too much."""
    for at in rows:
        axes.text(0.01, at, "noisy", transform=axes.get_yaxis_transform(), va="center", fontsize=7, color="#555555")


def row_names(cells: Cells) -> list[str]:
    """The names of the cells, with sizes unless the size is the name."""
    names = []
    for label, cell in cells.items():
        m = next(iter(cell.values()))
        size = f"{m.rows}×{m.cols}"
        # A shape given by the user is its own name, and an operation's shape is in the title.
        names.append(label if m.operation else size if label == size.replace("×", "x") else f"{label}, {size}")
    return names


def _tidy(axes: Axes, axis: Any = "x") -> None:
    """Draw faint lines behind what is shown, and no frame."""
    axes.grid(axis=axis, linewidth=0.4, alpha=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
