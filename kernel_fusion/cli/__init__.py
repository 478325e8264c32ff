"""The command line, one module per command. `main` is the console script `kernel-fusion`."""

from __future__ import annotations

import io
import sys
from typing import Annotated

import typer

import kernel_fusion as kf
from kernel_fusion.cli.bench import bench
from kernel_fusion.cli.common import in_sentences
from kernel_fusion.cli.compare import compare, plot, report
from kernel_fusion.cli.info import info
from kernel_fusion.cli.models import models
from kernel_fusion.cli.prepare import cache, hf_kernel, warmup
from kernel_fusion.cli.profile import profile
from kernel_fusion.cli.tune import tune
from kernel_fusion.cli.verify import verify

_HELP = {"help_option_names": ["-h", "--help"]}

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, context_settings=_HELP)
for command in (info, verify, models, bench, compare, plot, report, profile, tune, warmup, cache, hf_kernel):
    app.command(context_settings=_HELP)(in_sentences(command))


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
