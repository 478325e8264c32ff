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
from kernel_fusion.bench.providers import DIRECTIONS
from kernel_fusion.bench.results import Results
from kernel_fusion.bench.suites import SUITES, VERBS, Suite, Workload
from kernel_fusion.bench.timing import FULL, QUICK, Setup
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
        bool, typer.Option("--quick", help="Fewer repetitions and dtypes, LayerNorm only: about a minute.")
    ] = False,
    device: Annotated[str | None, typer.Option(help="cpu or cuda. Default: the GPU if there is one.")] = None,
    dtypes: Annotated[str | None, typer.Option(help="Such as bf16,fp32. Default: the suite's.")] = None,
    verbs: Annotated[str | None, typer.Option(help=f"Default: {','.join(VERBS)}; layer_norm if quick.")] = None,
    directions: Annotated[str, typer.Option(help="Of the suites of kernels.")] = ",".join(DIRECTIONS),
    weights: Annotated[str | None, typer.Option(help="The dtype of weight and bias. Default: the input's.")] = None,
    backends: Annotated[str | None, typer.Option(help="Such as cpu,eager. Default: the device's own.")] = None,
    peers: Annotated[
        str | None, typer.Option(help=f"all, or some of {','.join(PEERS)}. Default: none but PyTorch.")
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
        verbs=names(verbs or (VERBS[0] if quick else ",".join(VERBS)), VERBS, "verb"),
        weights=parse_dtypes(weights)[0] if weights else None,
        shapes=[_parse_shape(text) for text in shape or []],
    )
    chosen_directions = names(directions, DIRECTIONS, "direction")
    chosen_peers = list(PEERS) if peers == "all" else names(peers or "", PEERS, "peer")
    # Resolving a backend builds the extension, so that no build falls into a measurement.
    ours = [resolve_backend(name, target) for name in (split(backends) if backends else [None])]
    others, states = find(chosen_peers, target)
    setup = Setup(
        [providers.pytorch(), *map(providers.ours, ours), *others], target, chosen_directions, QUICK if quick else FULL
    )
    folder = output_dir or Path("benchmarks", "results", machine.device_slug(target))
    out = console()
    if reason := plot.missing():
        out.print(f"No plots will be drawn: {reason}")
    if target.type == "cpu" and machine.load_average() > _BUSY_LOAD:
        out.print(f"This machine is busy (load {machine.load_average():.1f}): expect times that are too long and vary.")
    for name, state in states.items():
        out.print(f"{name}: {state}")
    exit_code = 0
    for suite in chosen:
        result = _measure(suite, selection, setup, states, folder, out)
        failed = {failure.provider for failure in result.failures} - set(chosen_peers)
        exit_code = _INTERRUPTED if result.interrupted else 1 if failed else exit_code
        if result.interrupted:
            break
    raise typer.Exit(exit_code)


@dataclass(frozen=True)
class _Selection:
    """Which workloads of a suite are measured."""

    quick: bool
    dtypes: Sequence[torch.dtype] | None  # None: the suite's own
    verbs: Sequence[str]
    weights: torch.dtype | None  # None: the input's
    shapes: Sequence[tuple[int, int]]  # none: the suite's own


def _measure(
    suite: Suite, selection: _Selection, setup: Setup, peers: dict[str, str], folder: Path, out: Console
) -> Results:
    """Measure one suite, write its files and show its tables."""
    suite = suite.with_shapes(selection.shapes) if selection.shapes else suite
    dtypes = selection.dtypes or (suite.quick_dtypes if selection.quick else suite.dtypes)[setup.device.type]
    workloads = suite.workloads(setup.device.type, dtypes, selection.verbs, selection.weights)
    command = _command(suite, selection, setup, dtypes, list(peers))
    method = runner.describe_method(suite.kind, setup)
    result = results.start(suite, setup.device, command, selection.quick, method, peers)
    try:
        _run(result, suite, workloads, setup, folder)
    finally:
        _write_and_show(result, folder, out)
    return result


def _command(
    suite: Suite, selection: _Selection, setup: Setup, dtypes: Sequence[torch.dtype], peers: Sequence[str]
) -> str:
    """The command that measures the same again, every default written out."""
    options = {
        "--device": [str(setup.device)],
        "--dtypes": [dtype_name(dtype) for dtype in dtypes],
        "--verbs": selection.verbs,
        "--directions": setup.directions if suite.kind == "kernels" else [],
        "--weights": [dtype_name(selection.weights)] if selection.weights else [],
        "--backends": [provider.backend for provider in setup.providers if provider.backend],
        "--peers": peers,
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
                about = f"{workload.case.verb} {dtype_name(workload.case.dtype)}"
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


def _parse_shape(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d+)x(\d+)", text)
    if not match or not all(map(int, match.groups())):
        raise typer.BadParameter(f"expected rows x columns such as 512x3000, got {text!r}", param_hint="--shape")
    return int(match[1]), int(match[2])
