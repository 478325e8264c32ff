"""Plots of results: of which measurements each kind of plot is made, and the pictures as files.

`plot_kinds` draws each kind, `plot_panels` what all have in common. A kind draws what the results have of it, and
nothing where they have none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from kernel_fusion.bench import plot_kinds, plot_panels
from kernel_fusion.bench.plot_panels import Cells
from kernel_fusion.bench.results import FLOOR, REFERENCE, Measurement, Results, file_name
from kernel_fusion.bench.suites import PlotKind
from kernel_fusion.bench.table_columns import of_operations, shown

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# A name for the file, and the figure.
Picture = tuple[str, "Figure"]


def missing() -> str | None:
    """Why nothing can be plotted, or None."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        return "plots need matplotlib (pip install matplotlib)"
    return None


def plot(results: Results, folder: Path, kinds: Iterable[PlotKind] | None = None, suffix: str = "png") -> list[Path]:
    """Write the pictures of `kinds`, by default of all, into `folder`; the paths."""
    folder.mkdir(parents=True, exist_ok=True)
    paths: list[Path] = []
    for name, figure in pictures(results, kinds):
        path = folder / f"{results.stem}-{file_name(name)}.{suffix}"
        if path in paths:  # names that differ only in what no file name has
            path = path.with_stem(f"{path.stem}-{len(paths)}")
        figure.savefig(path)
        paths.append(path)
    return paths


def pictures(results: Results, kinds: Iterable[PlotKind] | None = None) -> Iterator[Picture]:
    """The pictures of `kinds`, by default of all: of each kind those that the results have something for."""
    for kind in KINDS if kinds is None else kinds:
        yield from KINDS[kind](results)


def _times(results: Results) -> Iterator[Picture]:
    """Per group and direction: rows of dtypes, columns of places."""
    yield from _by_direction(results, "", plot_kinds.times, lambda m: m.timing is not None)


def _speedups(results: Results) -> Iterator[Picture]:
    """The same panels, where PyTorch was timed beside others in several cells."""

    def compared(cells: Cells) -> bool:
        others = [cell for cell in cells.values() if REFERENCE in cell and cell.keys() - {FLOOR, REFERENCE}]
        return len(others) > 1

    yield from _by_direction(results, "-speedup", plot_kinds.speedup, lambda m: m.timing is not None, compared)


def _by_direction(
    results: Results,
    suffix: str,
    draw: Callable[..., None],
    wanted: Callable[[Measurement], bool],
    fits: Callable[[Cells], bool] = bool,
) -> Iterator[Picture]:
    for group, direction in dict.fromkeys((m.group, m.direction) for m in results.measurements if wanted(m)):
        found = {
            (dtype, _place(results, at)): _only(results.cells(group, dtype, direction, place), wanted)
            for dtype in _dtypes(results, group)
            for at, place in enumerate(results.places)
        }
        found = {key: cells for key, cells in found.items() if fits(cells)}
        if found:
            figure = plot_panels.draw(results, f"{group}, {direction}", found, draw, plot_panels.cell_size(found))
            yield f"{group}-{direction}{suffix}", figure


def _bandwidths(results: Results) -> Iterator[Picture]:
    """Per verb: rows of dtypes, columns of directions and places. Operations of one shape are no sizes to go over."""
    for group in _groups(results):
        found = {
            (dtype, _joined(direction, _place(results, at))): _only(
                results.cells(group, dtype, direction, place), lambda m: m.gigabytes_per_second is not None
            )
            for dtype in _dtypes(results, group)
            for direction in results.directions(group, dtype)
            for at, place in enumerate(results.places)
        }
        found = {key: cells for key, cells in found.items() if len(cells) > 1 and not of_operations(cells)}
        if found:
            figure = plot_panels.draw(results, f"{group}, bandwidth", found, plot_kinds.bandwidth, (6, 3.6))
            yield f"{group}-bandwidth", figure


def _floor_shares(results: Results) -> Iterator[Picture]:
    """Per group: a map of each contender, in rows of places."""
    for group in _groups(results):
        found = {}
        for at, place in enumerate(results.places):
            columns = {
                f"{dtype}\n{direction}": results.cells(group, dtype, direction, place)
                for dtype in _dtypes(results, group)
                for direction in results.directions(group, dtype)
            }
            columns = {name: cells for name, cells in columns.items() if any(FLOOR in cell for cell in cells.values())}
            for provider in results.providers:
                if provider != FLOOR and any(provider in cell for cells in columns.values() for cell in cells.values()):
                    found[_place(results, at), shown(provider)] = (provider, columns)
        rows = max((len(cells) for _, columns in found.values() for cells in columns.values()), default=0)
        if rows > 1:
            width = 2.2 + 0.85 * max(len(columns) for _, columns in found.values())
            size = (width, 0.7 + 0.24 * rows)
            what = f"{group}, % of the floor's speed"
            yield f"{group}-floor", plot_panels.draw(results, what, found, plot_kinds.floor_shares, size)


def _rooflines(results: Results) -> Iterator[Picture]:
    """Everything of a run, if of several sizes: rows of places, columns of directions."""
    found: dict[tuple[str, str], list[Measurement]] = {}
    for at, place in enumerate(results.places):
        for m in results.measurements:
            if m.place == place and m.gigabytes_per_second:
                found.setdefault((_place(results, at), m.direction), []).append(m)
    sizes = {key: {m.bytes_moved for m in several if m.provider == FLOOR} for key, several in found.items()}
    found = {key: several for key, several in found.items() if len(sizes[key]) > 1}
    if found:
        yield "roofline", plot_panels.draw(results, "bandwidth under the roof", found, plot_kinds.roofline, (6, 4.2))


def _memory(results: Results) -> Iterator[Picture]:
    """Per group: rows of dtypes, columns of devices. Neither the number of threads nor the direction changes them."""
    devices = {place.device: place for place in results.places}
    for group in _groups(results):
        found = {
            (dtype, device if len(devices) > 1 else ""): _only(
                results.cells(group, dtype, None, place), lambda m: m.training_memory_bytes is not None
            )
            for dtype in _dtypes(results, group)
            for device, place in devices.items()
        }
        found = {key: cells for key, cells in found.items() if cells}
        if found:
            size = plot_panels.cell_size(found)
            figure = plot_panels.draw(results, f"{group}, memory", found, plot_kinds.memory, size)
            yield f"{group}-memory", figure


KINDS: dict[PlotKind, Callable[[Results], Iterator[Picture]]] = {
    "time": _times,
    "bandwidth": _bandwidths,
    "speedup": _speedups,
    "floor": _floor_shares,
    "roofline": _rooflines,
    "memory": _memory,
}


def _groups(results: Results) -> list[str]:
    return list(dict.fromkeys(group for group, _ in results.groups))


def _dtypes(results: Results, group: str) -> list[str]:
    return [dtype for name, dtype in results.groups if name == group]


def _place(results: Results, index: int) -> str:
    """What a place is called in titles: nothing where there is only one."""
    return str(results.places[index]) if len(results.places) > 1 else ""


def _joined(*names: str) -> str:
    return ", ".join(name for name in names if name)


def _only(cells: Cells, wanted: Callable[[Measurement], bool]) -> Cells:
    """The cells with what is wanted of them, without those that are then empty."""
    left = {label: {p: m for p, m in cell.items() if wanted(m)} for label, cell in cells.items()}
    return {label: cell for label, cell in left.items() if cell}
