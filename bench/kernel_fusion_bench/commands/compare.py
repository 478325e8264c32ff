"""`compare`, `plot` and `report`: work on the JSON files of `bench`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.progress import track

from kernel_fusion.cli.common import console, path_of, progress_console, show, writable
from kernel_fusion.cli.table import Table
from kernel_fusion_bench import changes, results
from kernel_fusion_bench import plot as plotting
from kernel_fusion_bench import report as reporting
from kernel_fusion_bench.commands.options import names, replaceable


def compare(
    before: Annotated[Path, typer.Argument(metavar="A.json", help="Results of `bench`.")],
    after: Annotated[Path, typer.Argument(metavar="B.json", help="Later results of the same suite.")],
    fail_on_slower: Annotated[bool, typer.Option("--fail-on-slower", help="Exit with 1 if a cell got slower.")] = False,
) -> None:
    """Show where our kernels got faster or slower from A to B beyond noise."""
    old, new = _read(before), _read(after)
    comparison = changes.compare(old, new)
    if not comparison.cells:
        raise typer.BadParameter(f"{before} and {after} have no cell of ours in common")
    out = console()
    for name in ("gpu", "cpu"):
        machines = [str(r.about["machine"].get(name)) for r in (old, new)]
        if machines[0] != machines[1]:
            out.print(f"Not the same {name}: {machines[0]} and {machines[1]}.")
    for title, found in (("Faster", comparison.faster), ("Slower", comparison.slower)):
        if found:
            show(_table(title, found), out)
    counts = f"{len(comparison.faster)} faster, {len(comparison.slower)} slower"
    floor = "" if comparison.floor is None else f"; floor after ÷ before: {comparison.floor:.3f}"
    out.print(f"{comparison.cells} cells, {counts}{floor}")
    raise typer.Exit(1 if fail_on_slower and comparison.slower else 0)


def plot(
    files: Annotated[list[Path], typer.Argument(metavar="RESULTS.json...", help="Results of `bench`.")],
    format: Annotated[Literal["png", "svg"], typer.Option(help="Of the pictures.")] = "png",
    kind: Annotated[
        str | None, typer.Option(help=f"Some of {','.join(plotting.KINDS)}. Default: all that the results have.")
    ] = None,
    output_dir: Annotated[
        Path | None, typer.Option(help="Default: beside each file.", parser=path_of, metavar="PATH")
    ] = None,
) -> None:
    """Draw results: speed-ups over PyTorch, times, bandwidth, memory."""
    kinds = names(kind, plotting.KINDS, "kind of plot") if kind else None
    if reason := plotting.missing():
        raise typer.BadParameter(reason)
    runs = {file: _read(file) for file in files}
    for folder in dict.fromkeys(output_dir or file.parent for file in files):
        writable(folder)
    for file, run in track(runs.items(), "plots", console=progress_console()):
        paths = plotting.plot(run, output_dir or file.parent, kinds, format)
        if not paths:
            console().print(f"{file} has nothing to plot{f' of {kind}' if kind else ''}", soft_wrap=True)
        for path in paths:
            console().print(f"wrote {path}", soft_wrap=True)


def report(
    files: Annotated[list[Path], typer.Argument(metavar="RESULTS.json...", help="Results of `bench`.")],
    output: Annotated[
        Path, typer.Option("--output", "-o", help="The file to write.", parser=path_of, metavar="PATH")
    ] = Path("report.html"),
) -> None:
    """Put results into one HTML file: tables, plots, machine, versions, method, commands. It needs no other file."""
    if reason := plotting.missing():
        raise typer.BadParameter(reason)
    if output.is_dir():
        raise typer.BadParameter(f"{output} is a folder; name a file", param_hint="--output")
    runs = [_read(file) for file in files]
    writable(output.parent)
    replaceable(output, reporting.is_ours)
    reporting.write(track(runs, "report", console=progress_console()), output)
    console().print(f"wrote {output}", soft_wrap=True)


def _read(path: Path) -> results.Results:
    try:
        return results.read(path)
    except (OSError, ValueError) as error:
        raise typer.BadParameter(str(error)) from error


def _table(title: str, found: list[changes.Change]) -> Table:
    rows = []
    for change in found:
        cell = ", ".join(part for part in change.measurement.cell if part)
        times = (f"{1e3 * timing.median_ms:.2f}" for timing in (change.before, change.after))
        rows.append((cell, change.measurement.provider, *times, f"{change.ratio:.3f}"))
    return Table(title, ("cell", "provider", "before µs", "after µs", "after ÷ before"), tuple(rows))
