"""All commands: the library's own, and those that other distributions add.

A distribution adds commands by entry points of the group `kernel_fusion.commands`. kernel-fusion-bench has those of
`BENCH`; a checkout of it on the path has no entry points, so they are looked for there, too.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import EntryPoint, entry_points
from typing import Annotated, Any

import typer

import kernel_fusion as kf
from kernel_fusion.cli.common import in_sentences
from kernel_fusion.cli.info import info
from kernel_fusion.cli.prepare import cache, hf_kernel, warmup
from kernel_fusion.cli.verify import verify

_HELP = {"help_option_names": ["-h", "--help"]}

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, context_settings=_HELP)
_ANYTHING = {"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []}
_GROUP = "kernel_fusion.commands"
BENCH = ("bench", "compare", "plot", "report", "profile", "tune")


_Commands = Iterator[tuple[str, Callable[..., None], dict[str, Any]]]  # name, function, settings


def _own(commands: dict[str, Callable[..., None]]) -> _Commands:
    return ((name, command, _HELP) for name, command in commands.items())


def _added() -> _Commands:
    """The commands of other distributions; those of `BENCH` that are missing say how to get them."""
    points = {name: EntryPoint(name, f"kernel_fusion_bench.commands:{name}", _GROUP) for name in BENCH}
    for name, point in (points | {point.name: point for point in entry_points(group=_GROUP)}).items():
        try:
            yield name, point.load(), _HELP
        except ModuleNotFoundError as error:
            ours = "kernel-fusion-bench (in a checkout: pip install ./bench)"
            yield name, _missing(name, ours if error.name == "kernel_fusion_bench" else str(error.name)), _ANYTHING


def _missing(name: str, package: str) -> Callable[..., None]:
    def command(context: typer.Context) -> None:
        typer.echo(f"`kernel-fusion {name}` needs {package}", err=True)
        raise typer.Exit(1)

    command.__doc__ = f"Needs {package}."
    return command


_first: dict[str, Callable[..., None]] = {"info": info, "verify": verify}
_last: dict[str, Callable[..., None]] = {"warmup": warmup, "cache": cache, "hf-kernel": hf_kernel}
for name, command, settings in (*_own(_first), *_added(), *_own(_last)):
    app.command(name, context_settings=settings)(in_sentences(command))


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"kernel-fusion {kf.__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    """Fused kernels for PyTorch: see what runs here, check it, measure it."""


def main() -> None:
    """Run the command line, even if standard streams are closed or their encoding lacks our characters."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, io.StringIO())
        else:
            stream.reconfigure(errors="replace")
    app(prog_name="kernel-fusion")
