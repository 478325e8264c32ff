"""`tune`: measures other plans of the norms on this machine's GPU and keeps faster ones in a table."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.progress import track

from kernel_fusion.backends.cuda import user_table
from kernel_fusion.cli import machine
from kernel_fusion.cli.common import (
    console,
    dtype_names,
    parse_numbers,
    path_of,
    progress_console,
    show,
    writable,
)
from kernel_fusion.cli.table import Table
from kernel_fusion.core.cache import make_private_dir, trusted
from kernel_fusion.core.spec import dtype_name, torch_dtype
from kernel_fusion.errors import BackendUnavailableError
from kernel_fusion.operators.dispatch import unavailable_reason
from kernel_fusion_bench import trials
from kernel_fusion_bench import tune as tuning
from kernel_fusion_bench.commands.options import names, replaceable
from kernel_fusion_bench.timing import reason

_COLUMNS = ("verb", "N", "dtype", "direction", "rows", "present µs", "best µs", "ratio", "trials", "changes")


def tune(
    hidden: Annotated[
        str | None, typer.Option(help="Row lengths, such as 1024,4096. Default: those of the suite `models`.")
    ] = None,
    verbs: Annotated[str, typer.Option(help="Which norms.")] = ",".join(tuning.VERBS),
    directions: Annotated[str, typer.Option(help="forward, backward, or both.")] = ",".join(tuning.DIRECTIONS),
    dtypes: Annotated[str, typer.Option(help="Such as bf16,fp32; weights have the same.")] = "bf16",
    output: Annotated[
        Path | None,
        typer.Option(
            help="Write the table there; nothing reads it. Default: the cache folder.", parser=path_of, metavar="PATH"
        ),
    ] = None,
) -> None:
    """Measure other plans of the norms' CUDA kernels on this GPU; from then on, those that are 2 % faster are used."""
    chosen = names(verbs, tuning.VERBS, "norm"), names(directions, tuning.DIRECTIONS, "direction")
    lengths = None if hidden is None else parse_numbers(hidden, "--hidden")
    wanted = [cell for dtype in dtype_names(dtypes) for cell in tuning.cells(*chosen, lengths, torch_dtype(dtype))]
    if obstacle := unavailable_reason("cuda"):
        raise BackendUnavailableError(f"it measures CUDA kernels, which cannot run here: {obstacle}")
    _tune(wanted, output)


def _tune(wanted: list[tuning.Cell], output: Path | None) -> None:
    """Tune, and write the table after every cell, so that an interrupt loses at most one."""
    device = torch.device("cuda", torch.cuda.current_device())
    name = torch.cuda.get_device_name(device)
    path, table = _begun(name, output)
    versions = machine.versions() | {"driver": machine.gpu_driver() or "unknown"}
    parts = ("kernel_fusion", "torch", "nvrtc", "driver")
    where = ", ".join([name, *(f"{part} {versions[part]}" for part in parts if part in versions)])
    rows: list[tuple[str, ...]] = []
    failed: list[str] = []
    progress = progress_console()
    try:
        for cell in track(wanted, f"tuning on {name}", console=progress):
            try:
                outcome = tuning.tune(cell, device)
            except RuntimeError as error:  # out of memory, for example
                failed.append(f"{cell}: {reason(error)}")
                continue
            table = trials.with_rows(table, outcome.kernel, outcome.choice, outcome.evidence(where))
            trials.write(path, name, table)
            rows.append(_row(cell, outcome))
            progress.print(f"{cell}: {outcome.ratio:.3f} {rows[-1][-1]}")
            torch.cuda.empty_cache()
    finally:
        out = console()
        show(Table(f"Plans on {name}", _COLUMNS, tuple(rows)), out)
        out.print(f"{sum(row[-1] != '' for row in rows)} of {len(rows)} are faster by other plans: {path}")
        for line in failed:
            out.print(f"not tuned: {line}")
    if failed:
        raise typer.Exit(1)


def _begun(name: str, output: Path | None) -> tuple[Path, dict[str, user_table.Table]]:
    """The table's path and its present rows; OSError, before long work, if it cannot be read or written."""
    if output is not None:
        writable(output.parent)
        replaceable(output, lambda path: bool(user_table.read(path, name)))
        return output, {}
    path = user_table.path_of(name)
    make_private_dir(path.parent)
    trusted(path.parent)
    try:
        return path, user_table.read(path, name)
    except (FileNotFoundError, ValueError):  # a broken table is replaced
        return path, {}


def _row(cell: tuning.Cell, outcome: tuning.Outcome) -> tuple[str, ...]:
    def times(measured: tuning.Times) -> str:
        return " / ".join(f"{each.median_ms * 1e3:.2f}" for each in measured)

    shape = " / ".join(map(str, outcome.rows))
    changes = ", ".join(f"{knob} = {value}" for knob, value in outcome.choice.items())
    measured = times(outcome.present), times(outcome.best), f"{outcome.ratio:.3f}", str(outcome.trials)
    return cell.verb, str(cell.cols), dtype_name(cell.dtype), cell.direction, shape, *measured, changes
