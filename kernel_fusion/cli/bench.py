"""`bench`: runs suites, shows their tables, and writes the files. Ctrl-C keeps what was measured."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from kernel_fusion.bench import machine, plot, providers, results, runner, tables
from kernel_fusion.bench.peers import PEERS, find
from kernel_fusion.bench.providers import Provider
from kernel_fusion.bench.results import Results
from kernel_fusion.bench.row_norms import VERBS as NORMS
from kernel_fusion.bench.suites import SUITES, VERBS, Suite
from kernel_fusion.bench.timing import FULL, QUICK, Setup
from kernel_fusion.bench.workloads import DIRECTIONS, Direction, Workload
from kernel_fusion.cli.common import (
    console,
    names,
    parse_dtypes,
    progress_console,
    resolve_backend,
    resolve_device,
    split,
)
from kernel_fusion.core.spec import dtype_name

_BUSY_LOAD = 0.5  # one other program at work half of the time: the threads of a kernel then wait for each other
_INTERRUPTED = 130  # what a shell reports for a program ended by Ctrl-C


def bench(
    suites: Annotated[list[str], typer.Argument(metavar="SUITE...", help=f"One or more of: {', '.join(SUITES)}.")],
    quick: Annotated[
        bool,
        typer.Option(
            "--quick", help="Fewer repetitions, dtypes, verbs and shapes, no peers: about a minute for a suite."
        ),
    ] = False,
    device: Annotated[str | None, typer.Option(help="cpu or cuda. Default: the GPU if there is one.")] = None,
    dtypes: Annotated[str | None, typer.Option(help="Such as bf16,fp32. Default: the suite's.")] = None,
    verbs: Annotated[str | None, typer.Option(help=f"Some of {', '.join(VERBS)}. Default: the suite's.")] = None,
    directions: Annotated[
        str | None, typer.Option(help=f"Some of {','.join(DIRECTIONS)}. Default: the suite's, where it times kernels.")
    ] = None,
    weights: Annotated[
        str | None, typer.Option(help="The dtype of weight and bias of bare norms. Default: the input's.")
    ] = None,
    backends: Annotated[str | None, typer.Option(help="Such as cpu,eager. Default: the device's own.")] = None,
    peers: Annotated[
        str | None, typer.Option(help=f"all, none, or some of {','.join(PEERS)}. Default: the suite's.")
    ] = None,
    shape: Annotated[list[str] | None, typer.Option(help="RxN, repeatable: measured in place of the suite's.")] = None,
    output_dir: Annotated[Path | None, typer.Option(help="Default: benchmarks/results/ and the device's name.")] = None,
) -> None:
    """Measure our kernels beside PyTorch, its peers and the floor, after checking that results are right."""
    chosen = [SUITES[name] for name in names(",".join(suites), SUITES, "suite")]
    target = resolve_device(device)
    if target.type not in ("cpu", "cuda"):
        raise typer.BadParameter(f"cpu and cuda devices can be measured, not {target}", param_hint="--device")
    selection = _Selection(
        quick=quick,
        dtypes=parse_dtypes(dtypes) if dtypes else None,
        verbs=names(verbs, VERBS, "verb") if verbs else None,
        directions=names(directions, DIRECTIONS, "direction") if directions else None,
        weights=parse_dtypes(weights)[0] if weights else None,
        shapes=[_parse_shape(text) for text in shape or []],
        peers=_parse_peers(peers),
    )
    for suite in chosen:
        _check_selection(suite, selection)
    # Resolving a backend builds the extension, so that no build falls into a measurement.
    ours = [resolve_backend(name, target) for name in (split(backends) if backends else [None])]
    contenders = [providers.pytorch(), *map(providers.ours, ours)]
    folder = output_dir or Path("benchmarks", "results", machine.device_slug(target))
    out = console()
    if reason := plot.missing():
        out.print(f"No plots will be drawn: {reason}")
    if target.type == "cpu" and machine.load_average() > _BUSY_LOAD:
        out.print(f"This machine is busy (load {machine.load_average():.1f}): expect times that are too long and vary.")
    exit_code = 0
    for suite in chosen:
        result = _measure(suite, selection, contenders, target, folder, out)
        failed = {failure.provider for failure in result.failures} - set(PEERS)
        exit_code = _INTERRUPTED if result.interrupted else 1 if failed else exit_code
        if result.interrupted:
            break
    raise typer.Exit(exit_code)


@dataclass(frozen=True)
class _Selection:
    """What of a suite is measured; None, and no shapes, stand for the suite's own."""

    quick: bool
    dtypes: Sequence[torch.dtype] | None
    verbs: Sequence[str] | None
    directions: Sequence[Direction] | None
    weights: torch.dtype | None  # None: the input's
    shapes: Sequence[tuple[int, int]]
    peers: Sequence[str] | None

    def verbs_of(self, suite: Suite) -> list[str]:
        """Those measured of a suite."""
        own = (suite.quick_verbs if self.quick else None) or suite.verbs
        return [verb for verb in suite.verbs if verb in (own if self.verbs is None else self.verbs)]


def _check_selection(suite: Suite, selection: _Selection) -> None:
    """An error where a suite has nothing of what is wanted."""
    if not selection.verbs_of(suite):
        raise typer.BadParameter(f"{suite.name} measures {', '.join(suite.verbs)}", param_hint="--verbs")
    if selection.weights and not set(suite.verbs) <= set(NORMS):
        raise typer.BadParameter(f"{suite.name} is no suite of bare norms", param_hint="--weights")


def _measure(
    suite: Suite,
    selection: _Selection,
    contenders: Sequence[Provider],
    device: torch.device,
    folder: Path,
    out: Console,
) -> Results:
    """Measure one suite, write its files and show its tables."""
    suite = suite.quick() if selection.quick else suite
    peers, states = find(suite.peers if selection.peers is None else selection.peers, device)
    for name, state in states.items():
        out.print(f"{name}: {state}")
    directions = selection.directions or suite.directions
    setup = Setup([*contenders, *peers], device, directions, QUICK if selection.quick else FULL)
    suite = suite.with_shapes(selection.shapes) if selection.shapes else suite
    dtypes = selection.dtypes or suite.dtypes[device.type]
    verbs = selection.verbs_of(suite)
    workloads = suite.workloads(device.type, dtypes, verbs, selection.weights)
    command = _command(suite, selection, setup, dtypes, verbs, list(states))
    method = runner.describe_method(suite.kind, setup)
    result = results.start(suite, device, command, selection.quick, method, states)
    try:
        _run(result, suite, workloads, setup, folder)
    finally:
        _write_and_show(result, folder, out)
    return result


def _command(
    suite: Suite,
    selection: _Selection,
    setup: Setup,
    dtypes: Sequence[torch.dtype],
    verbs: Sequence[str],
    peers: Sequence[str],
) -> str:
    """The command that measures the same again, every default written out, but for all verbs."""
    options: dict[str, Sequence[str]] = {
        "--device": [str(setup.device)],
        "--dtypes": [dtype_name(dtype) for dtype in dtypes],
        "--verbs": [] if len(verbs) == len(suite.verbs) > len(NORMS) else verbs,
        "--directions": setup.directions if suite.kind == "kernels" else [],
        "--weights": [dtype_name(selection.weights)] if selection.weights else [],
        "--backends": [provider.backend for provider in setup.providers if provider.backend],
        "--peers": peers or (["none"] if suite.peers else []),
    }
    words = ["kernel-fusion", "bench", suite.name, *(["--quick"] if selection.quick else [])]
    words += [word for option, values in options.items() if values for word in (option, ",".join(values))]
    words += [word for rows, cols in selection.shapes for word in ("--shape", f"{rows}x{cols}")]
    return shlex.join(words)


def _run(result: Results, suite: Suite, workloads: Sequence[Workload], setup: Setup, folder: Path) -> None:
    """Measure every workload into `result`, showing progress, until done or interrupted."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), "left:")
    with Progress(*columns, TimeRemainingColumn(), console=progress_console()) as progress:
        task = progress.add_task(suite.name, total=len(workloads))
        try:
            for workload in workloads:
                about = f"{workload.verb} {dtype_name(workload.dtype)}"
                for done in runner.run(result, suite.kind, workload, setup):
                    progress.update(task, description=f"{about} {done}")
                progress.advance(task)
                # Again after each one, so that even a killed run leaves what it measured.
                result.write_json(folder)
        except KeyboardInterrupt:
            result.interrupted = True


def _write_and_show(result: Results, folder: Path, out: Console) -> None:
    # Files first: whatever happens to the output, what was measured is kept.
    paths = [*result.write(folder), tables.write_markdown(result, folder)]
    paths += [] if plot.missing() else plot.plot(result, folder)
    for data in tables.tables(result):
        table = Table(title=data.title, title_justify="left")
        for index, column in enumerate(data.columns):
            table.add_column(column, justify="right" if index else "left")
        for row in data.rows:
            table.add_row(*row)
        out.print(table)
    for failure in result.failures:
        out.print(f"NOT MEASURED: {failure}", style="red")
    if result.interrupted:
        out.print("Interrupted: this is what was measured until then.")
    for path in paths:
        out.print(f"wrote {path}", soft_wrap=True)


def _parse_peers(text: str | None) -> list[str] | None:
    """The peers that are named; None where the suite is to decide."""
    if text is None:
        return None
    return list(PEERS) if text == "all" else [] if text == "none" else names(text, PEERS, "peer")


def _parse_shape(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d+)x(\d+)", text)
    if not match or not all(map(int, match.groups())):
        raise typer.BadParameter(f"expected rows x columns such as 512x3000, got {text!r}", param_hint="--shape")
    return int(match[1]), int(match[2])
