"""What all plots share: contenders' colours, markers and hatches, a grid of panels with one legend, labelled cells.

Colours are those of Okabe and Ito, which every kind of colour vision tells apart. Markers and hatches say the same once
more, for print without colours.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import cycle, product
from typing import TYPE_CHECKING, Any, TypeVar

from kernel_fusion.bench.results import FLOOR, OURS, REFERENCE, Measurement, Results
from kernel_fusion.bench.table_columns import of_operations, shown

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Cells = dict[str, dict[str, Measurement]]  # by label, then provider
Shown = TypeVar("Shown")  # what a panel shows: cells, or measurements

GREY = "#999999"
_ORANGE = "#E69F00"
_OURS = ("#0072B2", "#56B4E9", "#000000")
_PEERS = ("#009E73", "#CC79A7", "#D55E00", "#7F7F00", "#F0E442")
_MARKERS = "sv^DPX<>*h"
_HATCHES = ("", "///", "...", "\\\\\\", "xxx", "ooo", "|||", "---", "+++", "***")
# Wider than this, a picture on a page could not be read.
_MAX_WIDTH, _MAX_HEIGHT = 24.0, 40.0
# More cells than this leave no room for a number at each.
MANY = 16


@dataclass(frozen=True)
class Style:
    """How a contender is drawn, and what the legend calls it."""

    color: str
    marker: str
    hatch: str
    label: str


Styles = Mapping[str, Style]  # by provider


def styles(results: Results) -> dict[str, Style]:
    """Of every contender, the same in all plots of a run; the floor, which is a line, is grey."""
    mine, peers = iter(_OURS), iter(_PEERS)
    found = {FLOOR: Style(GREY, ".", "", FLOOR)} if FLOOR in results.providers else {}
    contenders = (provider for provider in results.providers if provider != FLOOR)
    for marker, hatch, provider in zip(cycle(_MARKERS), cycle(_HATCHES), contenders, strict=False):
        colors = mine if provider.startswith(OURS) else peers
        color = _ORANGE if provider == REFERENCE else next(colors, GREY)
        found[provider] = Style(color, marker, hatch, shown(provider))
    return found


@contextmanager
def _without_formulas() -> Iterator[None]:
    """Within, texts are made whose dollar signs are dollar signs: a name is no formula."""
    from matplotlib import rc_context

    with rc_context({"text.parse_math": False}):
        yield


@_without_formulas()
def draw(
    results: Results,
    what: str,
    panels: Mapping[tuple[str, str], Shown],
    draw_panel: Callable[[Axes, Shown, Styles], None],
    size: tuple[float, float],
) -> Figure:
    """A figure about `what`: panels by row and column, each of `size` inches, with one legend for all."""
    # Not pyplot: a figure of one's own needs no display and leaves no global state.
    from matplotlib.figure import Figure

    rows, columns = (list(dict.fromkeys(names)) for names in zip(*panels, strict=True))
    width, height = min(_MAX_WIDTH, size[0] * len(columns)), min(_MAX_HEIGHT, 1.3 + size[1] * len(rows))
    figure = Figure(figsize=(width, height), layout="constrained", dpi=110)
    axes = figure.subplots(len(rows), len(columns), squeeze=False)
    look = styles(results)
    for (at, row), (beside, column) in product(enumerate(rows), enumerate(columns)):
        panel = axes[at, beside]
        if (row, column) in panels:
            draw_panel(panel, panels[row, column], look)
            panel.set_title(", ".join(name for name in (row, column) if name), fontsize=10, loc="left")
        else:
            panel.set_visible(False)
    # By label, since not everybody is in every panel.
    labelled = [panel.get_legend_handles_labels() for panel in axes.flat]
    legend = {label: handle for handles, labels in labelled for handle, label in zip(handles, labels, strict=True)}
    if legend:
        figure.legend(handles=[*legend.values()], loc="outside lower center", ncols=len(legend), frameon=False)
    figure.suptitle(f"{results.title}: {what}\n{results.hardware}", x=0.01, ha="left", fontweight="bold", fontsize=11)
    return figure


def cell_size(panels: Mapping[tuple[str, str], Cells]) -> tuple[float, float]:
    """Width and height of a panel in which cells stand side by side."""
    count = max(map(len, panels.values()))
    operations = count > 1 and any(map(of_operations, panels.values()))
    width, height = (0.4, 3.8) if operations else (0.7, 2.6)
    return max(9, 3 + width * count), height


def names(cells: Cells) -> list[str]:
    """What the cells are called, with their sizes where those are not the name."""
    some = [next(iter(cell.values())) for cell in cells.values()]
    sizes = [f"{m.rows}×{m.cols}" for m in some]
    # A shape given by the user is its own name, and that of an operation stands in the title.
    labels = ["" if name == size.replace("×", "x") else f"{name}\n" for name, size in zip(cells, sizes, strict=True)]
    sizes = ["" if m.operation else size for m, size in zip(some, sizes, strict=True)]
    return [(name + size).strip() for name, size in zip(labels, sizes, strict=True)]


def label_cells(axes: Axes, cells: Cells) -> None:
    """Put the cells' names under a panel in which they stand side by side."""
    axes.set_xticks(range(len(cells)), names(cells), rotation=45, ha="right", rotation_mode="anchor", fontsize=8)
    axes.set_xlim(-0.6, len(cells) - 0.4)
    tidy(axes)


def tidy(axes: Axes) -> None:
    """Faint lines behind what is shown, and no frame."""
    axes.grid(axis="y", linewidth=0.4, alpha=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def bars(axes: Axes, values: Mapping[str, Sequence[float | None]], look: Styles, texts: str) -> None:
    """Groups of bars, a bar per contender and cell, with its value in the format `texts` where there is room."""
    width = 0.8 / len(values)
    for index, (provider, heights) in enumerate(values.items()):
        style = look[provider]
        known = [(at + (index - (len(values) - 1) / 2) * width, height) for at, height in enumerate(heights) if height]
        shape: dict[str, Any] = {
            "width": width,
            "color": style.color,
            "hatch": style.hatch,
            "edgecolor": "white",
            "linewidth": 0.3,
        }
        drawn = axes.bar([at for at, _ in known], [height for _, height in known], label=style.label, **shape)
        if len(heights) <= MANY:
            # Legible where a line crosses them, too.
            behind = {"facecolor": "white", "edgecolor": "none", "pad": 0.5}
            axes.bar_label(drawn, fmt=texts, padding=2, fontsize=7, rotation=90, bbox=behind, zorder=3)
    axes.margins(y=0.22)
