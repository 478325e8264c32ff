"""The kinds of plots, each as what goes into a panel and how a panel is drawn: times, bandwidth, speedup, share of the
floor, roofline, memory.

Kernels that wait for memory have next to no arithmetic to speak of: a norm computes a few operations per element,
however large it is, so all of its cells would stand above one and the same arithmetic intensity. The roofline
therefore has bytes per call where others have operations per byte. Its roof is measured: nothing takes less time than
the shortest floor of the run, which is the slope, and nothing moves more bytes per second than the fastest, which is
the flat part.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from kernel_fusion.bench.plot_panels import (
    GREY,
    Cells,
    Styles,
    bars,
    label_cells,
    names,
    tidy,
)
from kernel_fusion.bench.results import FLOOR, OURS, REFERENCE, Measurement
from kernel_fusion.bench.table_columns import of_operations

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis

# Beyond this ratio of the longest to the shortest time, the shortest could not be told apart on a linear axis.
_WIDE_RANGE = 8
# Below this share of the floor, the map is so dark that numbers on it are white.
_DARK = 55


def times(axes: Axes, cells: Cells, look: Styles) -> None:
    """Medians with their quartiles, over the floor's median where there is a floor; of a single operation, bars."""
    if of_operations(cells) and len(cells) == 1:
        _time_bars(axes, next(iter(cells.values())), look)
        return
    over_floor = any(FLOOR in cell for cell in cells.values())
    shown = []
    for provider in (p for p in look if p != FLOOR):

        def values(cell: dict[str, Measurement], m: Measurement) -> list[float] | None:
            floor = cell[FLOOR].timing if FLOOR in cell else None
            unit = 1e3 if not over_floor else 1 / floor.median_ms if floor else None
            timing = m.timing
            return [unit * ms for ms in (timing.median_ms, timing.q1_ms, timing.q3_ms)] if timing and unit else None

        # Operations are no series, so no line joins them.
        line = "none" if of_operations(cells) else "solid"
        shown += _points(axes, range(len(cells)), cells, provider, look, values, line)
    if over_floor:
        axes.axhline(1.0, color=GREY, linewidth=2, label=FLOOR)
    if shown and max(shown) > _WIDE_RANGE * min(shown):
        axes.set_yscale("log")
        _plain_ticks(axes.yaxis)
    else:
        axes.set_ylim(bottom=0)
    axes.set_ylabel("time ÷ floor" if over_floor else "time (µs)")
    label_cells(axes, cells)


def _points(
    axes: Axes,
    positions: Sequence[float],
    cells: Cells,
    provider: str,
    look: Styles,
    values: Callable[[dict[str, Measurement], Measurement], list[float] | None],
    line: str,
) -> list[float]:
    """Draw what `values` makes of a contender in each cell, a value and its quartiles; the values."""
    found = [
        (at, *three)
        for at, cell in zip(positions, cells.values(), strict=True)
        if provider in cell and (three := values(cell, cell[provider]))
    ]
    if not found:
        return []
    where, medians, *quartiles = map(list, zip(*sorted(found), strict=True))
    low, high = map(min, zip(*quartiles, strict=True)), map(max, zip(*quartiles, strict=True))
    below = [max(0, median - q) for median, q in zip(medians, low, strict=True)]
    above = [max(0, q - median) for median, q in zip(medians, high, strict=True)]
    style = look[provider]
    axes.errorbar(
        *(where, medians, [below, above]),
        linestyle=line,
        linewidth=1.2,
        marker=style.marker,
        markersize=6,
        color=style.color,
        label=style.label,
        zorder=3 if provider.startswith(OURS) else 2,
    )
    return medians


def _plain_ticks(*several: Axis) -> None:
    """Give logarithmic axes plain numbers."""
    from matplotlib.ticker import LogLocator, NullFormatter

    for axis in several:
        axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.set_major_formatter("{x:g}")
        axis.set_minor_formatter(NullFormatter())


def _time_bars(axes: Axes, cell: dict[str, Measurement], look: Styles) -> None:
    """A bar of the median per contender, the floor among them, with its time and bandwidth."""
    timed = [(look[p], m.timing.median_ms * 1e3, m) for p in look if (m := cell.get(p)) and m.timing]
    labels = [style.label for style, _, _ in timed]
    colors, hatches = [style.color for style, _, _ in timed], [style.hatch for style, _, _ in timed]
    shape: dict[str, Any] = {"color": colors, "hatch": hatches, "edgecolor": "white", "linewidth": 0.3, "width": 0.6}
    drawn = axes.bar(range(len(timed)), [time for _, time, _ in timed], **shape)
    axes.set_xticks(range(len(timed)), labels)
    texts = [
        f"{time:.3g} µs" + (f"\n{m.gigabytes_per_second:.0f} GB/s" if m.bytes_moved else "") for _, time, m in timed
    ]
    axes.bar_label(drawn, texts, padding=2, fontsize=9)
    axes.margins(y=0.25)
    axes.set_ylabel("time (µs)")
    tidy(axes)


def bandwidth(axes: Axes, cells: Cells, look: Styles) -> None:
    """Bytes per second over the length of a row, or over the bytes of a call where lengths come more than once."""
    some = [next(iter(cell.values())) for cell in cells.values()]
    lengths = [m.cols for m in some]
    by_length = len(set(lengths)) == len(lengths)
    sizes: list[float] = [*lengths] if by_length else [(m.bytes_moved or 0) / 1e6 for m in some]

    def values(cell: dict[str, Measurement], m: Measurement) -> list[float] | None:
        timing = m.timing
        if not m.bytes_moved or timing is None:
            return None
        return [m.bytes_moved / ms / 1e6 for ms in (timing.median_ms, timing.q1_ms, timing.q3_ms)]

    # Where a size comes twice, there is no way from one point to the next; a ceiling is one all the same.
    joined = "solid" if len(set(sizes)) == len(sizes) else "none"
    for provider in look:
        _points(axes, sizes, cells, provider, look, values, "dashed" if provider == FLOOR else joined)
    axes.set_xscale("log", base=2)
    if by_length:
        powers = [length for length in lengths if length & (length - 1) == 0]
        axes.set_xticks(powers if len(powers) > 1 else lengths)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.minorticks_off()
    axes.tick_params(axis="x", labelrotation=45, labelsize=8)
    rows = {m.rows for m in some}
    axes.set_xlabel("row length N" + (f", {rows.pop()} rows" if len(rows) == 1 else "") if by_length else "MB per call")
    axes.set_ylim(bottom=0)
    axes.set_ylabel("GB/s")
    tidy(axes)


def speedup(axes: Axes, cells: Cells, look: Styles) -> None:
    """PyTorch's median over that of every other contender."""

    def over_pytorch(cell: dict[str, Measurement], provider: str) -> float | None:
        reference, timing = (cell[p].timing if p in cell else None for p in (REFERENCE, provider))
        return reference.median_ms / timing.median_ms if reference and timing else None

    ratios = {p: [over_pytorch(cell, p) for cell in cells.values()] for p in look if p not in (FLOOR, REFERENCE)}
    bars(axes, {p: several for p, several in ratios.items() if any(several)}, look, "%.2f")
    axes.axhline(1.0, color=look[REFERENCE].color, linewidth=1.5, linestyle="dashed", label=look[REFERENCE].label)
    axes.set_ylabel("times as fast as PyTorch")
    label_cells(axes, cells)


def memory(axes: Axes, cells: Cells, look: Styles) -> None:
    """Peak bytes of a training step as bars, and what of them autograd saved as diamonds."""

    def megabytes(name: str) -> dict[str, list[float | None]]:
        known = {p: [getattr(cell[p], name) if p in cell else None for cell in cells.values()] for p in look}
        scaled = {p: [None if b is None else b / 1e6 for b in several] for p, several in known.items()}
        return {p: several for p, several in scaled.items() if any(b is not None for b in several)}

    peaks, saved = megabytes("training_memory_bytes"), megabytes("saved_bytes")
    bars(axes, peaks, look, "%.3g")
    for index, (provider, several) in enumerate((p, saved[p]) for p in peaks if p in saved):
        offset = (index - (len(peaks) - 1) / 2) * 0.8 / len(peaks)
        known = [(at + offset, b) for at, b in enumerate(several) if b is not None]
        shape: dict[str, Any] = {
            "marker": "D",
            "markersize": 5,
            "linestyle": "none",
            "markeredgecolor": "black",
            "zorder": 3,
            "clip_on": False,
        }
        label = "saved for backward" if provider == next(iter(saved)) else None
        where, heights = zip(*known, strict=True)
        axes.plot(where, heights, color="white", label=label, **shape)
    axes.set_ylabel("peak of a training step (MB)")
    label_cells(axes, cells)


def floor_shares(axes: Axes, shown: tuple[str, dict[str, Cells]], look: Styles) -> None:
    """A map of the share of the floor's speed that a contender reaches, by column: shapes or operations downwards."""
    provider, columns = shown
    rows = {label: name for cells in columns.values() for label, name in zip(cells, names(cells), strict=True)}

    def share(cell: dict[str, Measurement]) -> float:
        floor, timing = (cell[p].timing if p in cell else None for p in (FLOOR, provider))
        return 100 * floor.median_ms / timing.median_ms if floor and timing else math.nan

    shares = [[share(cells.get(label, {})) for cells in columns.values()] for label in rows]
    axes.imshow(shares, cmap="cividis", vmin=0, vmax=100, aspect="auto")
    for at, line in enumerate(shares):
        for beside, percent in enumerate(line):
            if not math.isnan(percent):
                color = "white" if percent < _DARK else "black"
                axes.text(beside, at, f"{percent:.0f}", ha="center", va="center", color=color, fontsize=8)
    axes.set_xticks(range(len(columns)), columns, fontsize=8)
    axes.set_yticks(range(len(rows)), [name.replace("\n", ", ") for name in rows.values()], fontsize=8)
    axes.label_outer()
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)


def roofline(axes: Axes, measurements: Sequence[Measurement], look: Styles) -> None:
    """Bandwidth over the bytes of a call under the measured roof."""
    floors = [m for m in measurements if m.provider == FLOOR and m.timing and m.timing.iterations]
    for provider, style in look.items():
        mine = [m for m in measurements if m.provider == provider]
        speeds = [(m.bytes_moved / 1e6, m.gigabytes_per_second) for m in mine if m.bytes_moved and m.timing]
        if speeds and provider != FLOOR:
            shape: dict[str, Any] = {"linestyle": "none", "marker": style.marker, "markersize": 5, "alpha": 0.75}
            axes.plot(*zip(*speeds, strict=True), color=style.color, label=style.label, markeredgewidth=0, **shape)
    if floors:
        shortest = min(m.timing.median_ms for m in floors if m.timing)
        fastest = max(m.gigabytes_per_second or 0 for m in floors)
        sizes = sorted({m.bytes_moved / 1e6 for m in measurements if m.bytes_moved} | {fastest * shortest})
        roof = [min(fastest, size / shortest) for size in sizes]
        axes.plot(sizes, roof, color=GREY, linestyle="dashed", label="roof: shortest and fastest floor")
    axes.loglog()
    _plain_ticks(axes.xaxis, axes.yaxis)
    axes.set_xlabel("MB per call")
    axes.set_ylabel("GB/s")
    tidy(axes)
