"""Shared by the commands: the console, the choice of device and backend, parsing of options."""

from __future__ import annotations

import functools
import re
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import ParamSpec

import torch
import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from kernel_fusion.cli import table as tables
from kernel_fusion.cli.units import size
from kernel_fusion.config import check_backend_name
from kernel_fusion.core.cache import CUBINS, EXTENSIONS, Cache
from kernel_fusion.core.spec import dtype_name
from kernel_fusion.errors import KernelFusionError
from kernel_fusion.operators.dispatch import unavailable_reason

# rich assumes 80 columns without a terminal, which would cut our tables.
_PIPE_WIDTH = 200

INTERRUPTED = 130  # the shell's code for a program ended by Ctrl-C

Parameters = ParamSpec("Parameters")

CACHES = (EXTENSIONS, CUBINS)


def console() -> Console:
    """A console on the current standard output, wide enough for our tables when piped.

    It reads no markup, because error texts have square brackets of their own.
    """
    return Console(width=None if sys.stdout.isatty() else _PIPE_WIDTH, highlight=False, markup=False)


def progress_console() -> Console:
    """A console for progress on standard error, so that standard output can be piped."""
    return Console(stderr=True)


def progress_bar() -> Progress:
    """A bar with count and remaining time first; a narrow terminal cuts the description."""
    columns = (MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("left"), BarColumn(20))
    return Progress(*columns, TextColumn("{task.description}"), console=progress_console())


def in_sentences(command: Callable[Parameters, None]) -> Callable[Parameters, None]:
    """Report errors of the machine or the user in a sentence and an exit code.

    These are errors of this library, unreadable or unwritable files, and Ctrl-C. All others are bugs and keep their
    traceback.
    """

    @functools.wraps(command)
    def run(*args: Parameters.args, **kwargs: Parameters.kwargs) -> None:
        try:
            command(*args, **kwargs)
        except KeyboardInterrupt as interrupt:
            typer.echo("Interrupted.", err=True)
            raise typer.Exit(INTERRUPTED) from interrupt
        except BrokenPipeError:  # the reader of our output is gone
            raise
        except (KernelFusionError, OSError) as error:
            typer.echo(f"{command.__name__}: {_sentence(error)}", err=True)
            raise typer.Exit(1) from error

    return run


def _sentence(error: Exception) -> str:
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return str(error)


def resolve_device(name: str | None) -> torch.device:
    """The device called `name`; None means the GPU if our kernels run on it, else the CPU."""
    if name is None:
        return torch.device("cpu" if unavailable_reason("cuda") else "cuda")
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).item()  # refused by devices without memory, such as meta
    except (RuntimeError, AssertionError, ImportError) as error:
        reason = str(error).splitlines()[0].split(". ")[0]  # without PyTorch's list of all backends
        raise typer.BadParameter(f"{name!r} is no device here: {reason}", param_hint="--device") from error
    return device


def resolve_backend(name: str | None, device: torch.device) -> str:
    """The backend called `name`, or the device's own; raises with the reason if it cannot run."""
    backend = name or (device.type if device.type in ("cpu", "cuda") else "eager")
    try:
        check_backend_name(backend)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    reason = unavailable_reason(backend, device)
    if reason:
        raise typer.BadParameter(f"backend {backend!r} cannot run on {device}: {reason}; 'eager' runs everywhere")
    return backend


# PyTorch's names and short ones; the first is printed.
_DTYPES = {
    torch.bfloat16: ("bf16", "bfloat16"),
    torch.float16: ("fp16", "float16", "half", "f16"),
    torch.float32: ("fp32", "float32", "float", "f32"),
    torch.float64: ("fp64", "float64", "double", "f64"),
}


def parse_dtypes(text: str) -> tuple[torch.dtype, ...]:
    """The dtypes of a list such as "bf16,float32"."""
    by_name = {name: dtype for dtype, several in _DTYPES.items() for name in several}
    names = [part.removeprefix("torch.") for part in split(text)]
    for name in names:
        if name not in by_name:
            raise typer.BadParameter(f"{name!r} is no dtype; there are bf16, fp16, fp32 and fp64, or PyTorch's names")
    return tuple(by_name[name] for name in names)


def dtype_names(text: str) -> tuple[str, ...]:
    """The library's names of the dtypes in a list: "bf16", "f32"."""
    return tuple(map(dtype_name, parse_dtypes(text)))


def shown_dtype(dtype: torch.dtype) -> str:
    """A dtype as commands print it."""
    return _DTYPES[dtype][0]


def parse_numbers(text: str, option: str) -> list[int]:
    """The numbers of a list such as "1024,4096"."""
    if not all(re.fullmatch(r"\d{1,9}", part, re.ASCII) and int(part) for part in split(text)):
        raise typer.BadParameter(f"expected numbers with commas, from 1 on, got {text!r}", param_hint=option)
    return list(dict.fromkeys(map(int, split(text))))


def split(text: str) -> list[str]:
    """The parts of a comma-separated list; there must be at least one."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts:
        raise typer.BadParameter(f"expected a list with commas, got {text!r}")
    return parts


def writable(folder: Path) -> Path:
    """The folder, created if missing; OSError before long work, not after, if it is not writable."""
    folder.mkdir(parents=True, exist_ok=True)
    tempfile.TemporaryFile(dir=folder).close()
    return folder


def path_of(text: str | Path) -> Path:
    """The file or folder that an option names; an empty name is none, while `Path("")` is the current folder."""
    if not str(text).strip():
        raise typer.BadParameter("expected the name of a file or folder, got an empty one")
    return Path(text)


def show(table: tables.Table, out: Console, of_numbers: bool = True) -> None:
    """Print a table; numbers are right-aligned in all columns but the first."""
    shown = Table(title=table.title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for index, column in enumerate(table.columns):
        shown.add_column(column, justify="right" if index and of_numbers else "left")
    for row in table.rows:
        shown.add_row(*row)
    out.print(shown)


def cache_facts(cache: Cache) -> tuple[str, str, str]:
    """The number of entries, their size and their folder."""
    return f"{len(cache.entries())} entries", size(cache.size()), str(cache.path("").parent)
