"""`bench`: runs suites, shows their tables, and writes the files. Ctrl-C keeps what was measured."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from kernel_fusion.bench import machine, plot, providers, results, runner
from kernel_fusion.bench.suites import SUITES, Workload
from kernel_fusion.bench.timing import FULL, QUICK
from kernel_fusion.cli.common import console, parse_dtypes, progress_console, resolve_backend, resolve_device, split
from kernel_fusion.core.spec import dtype_name

_BUSY_LOAD = 0.5  # one other program at work half of the time: the threads of a kernel then wait for each other
_INTERRUPTED = 130  # what a shell reports for a program ended by Ctrl-C


def bench(
    suites: Annotated[list[str], typer.Argument(metavar="SUITE...", help=f"One or more of: {', '.join(SUITES)}.")],
    quick: Annotated[bool, typer.Option("--quick", help="Fewer repetitions and dtypes: about a minute.")] = False,
    device: Annotated[str | None, typer.Option(help="cpu or cuda. Default: the GPU if there is one.")] = None,
    dtypes: Annotated[str | None, typer.Option(help="Such as bf16,fp32. Default: the suite's.")] = None,
    backends: Annotated[str | None, typer.Option(help="Such as cpu,eager. Default: the device's own.")] = None,
    shape: Annotated[list[str] | None, typer.Option(help="RxN, repeatable: measured in place of the suite's.")] = None,
    output_dir: Annotated[Path | None, typer.Option(help="Default: benchmarks/results/ and the device's name.")] = None,
) -> None:
    """Measure our kernels beside PyTorch and the floor, after checking that their results are right."""
    unknown = [name for name in suites if name not in SUITES]
    if unknown:
        raise typer.BadParameter(f"no suite is called {', '.join(unknown)}; there are: {', '.join(SUITES)}")
    target = resolve_device(device)
    if target.type not in ("cpu", "cuda"):
        raise typer.BadParameter(f"cpu and cuda devices can be measured, not {target}", param_hint="--device")
    # Resolving a backend builds the extension, so that no build falls into a measurement.
    ours = [resolve_backend(name, target) for name in (split(backends) if backends else [None])]
    chosen = parse_dtypes(dtypes) if dtypes else None
    shapes = [_parse_shape(text) for text in shape or []]
    folder = output_dir or Path("benchmarks", "results", machine.device_slug(target))
    out = console()
    if reason := plot.missing():
        out.print(f"No plots will be drawn: {reason}")
    exit_code = 0
    if target.type == "cpu" and machine.load_average() > _BUSY_LOAD:
        out.print(f"This machine is busy (load {machine.load_average():.1f}): expect times that are too long and vary.")
    for name in suites:
        suite = SUITES[name].with_shapes(shapes) if shapes else SUITES[name]
        measured = chosen or (suite.quick_dtypes if quick else suite.dtypes)[target.type]
        command = _command(suite.name, quick, target, measured, ours, shapes)
        method = runner.describe_method(target, QUICK if quick else FULL)
        result = results.Results(suite, target, command, quick, method)
        _run(result, suite.workloads(measured), [providers.pytorch(), *map(providers.ours, ours)])
        _write_and_show(result, folder, out)
        exit_code = _INTERRUPTED if result.interrupted else 1 if result.failures else exit_code
        if result.interrupted:
            break
    raise typer.Exit(exit_code)


def _command(
    suite: str,
    quick: bool,
    device: torch.device,
    dtypes: Sequence[torch.dtype],
    backends: Sequence[str],
    shapes: Sequence[tuple[int, int]],
) -> str:
    """The command that measures the same again, every default written out."""
    words = ["kernel-fusion", "bench", suite, *(["--quick"] if quick else []), "--device", str(device)]
    words += ["--dtypes", ",".join(map(dtype_name, dtypes)), "--backends", ",".join(backends)]
    words += [word for rows, cols in shapes for word in ("--shape", f"{rows}x{cols}")]
    return shlex.join(words)


def _run(result: results.Results, workloads: Sequence[Workload], contenders: Sequence[providers.Provider]) -> None:
    """Measure every workload into `result`, showing progress, until done or interrupted."""
    effort = QUICK if result.quick else FULL
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), "left:")
    with Progress(*columns, TimeRemainingColumn(), console=progress_console()) as progress:
        task = progress.add_task(result.suite.name, total=len(workloads) * runner.STEPS)
        try:
            for workload in workloads:
                for done in runner.measure(workload, contenders, result.device, effort, result):
                    progress.update(task, advance=1, description=f"{dtype_name(workload.case.dtype)} {done}")
        except KeyboardInterrupt:
            result.interrupted = True


def _write_and_show(result: results.Results, folder: Path, out: Console) -> None:
    # Files first: whatever happens to the output, what was measured is kept.
    paths = results.write(result, folder)
    paths += [] if plot.missing() else plot.plot(result, folder)
    for data in results.tables(result):
        table = Table(title=data.title, title_justify="left")
        for index, column in enumerate(data.columns):
            table.add_column(column, justify="left" if index < 2 else "right")
        for row in data.rows:
            table.add_row(*row)
        out.print(table)
    for failure in result.failures:
        out.print(f"NOT TIMED: {failure}", style="red")
    if result.interrupted:
        out.print("Interrupted: this is what was measured until then.")
    for path in paths:
        out.print(f"wrote {path}", soft_wrap=True)


def _parse_shape(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d+)x(\d+)", text)
    if not match or not all(map(int, match.groups())):
        raise typer.BadParameter(f"expected rows x columns such as 512x3000, got {text!r}", param_hint="--shape")
    return int(match[1]), int(match[2])
