"""The command line: one module per command, put together here. `main` is the console script `kernel-fusion`."""

from __future__ import annotations

import typer

from kernel_fusion.cli.bench import bench
from kernel_fusion.cli.compare import compare, plot, report
from kernel_fusion.cli.info import info
from kernel_fusion.cli.prepare import cache, warmup
from kernel_fusion.cli.profile import profile
from kernel_fusion.cli.verify import verify

app = typer.Typer(
    help="Fused normalisation kernels for PyTorch: see what runs here, check it, measure it.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
for command in (info, verify, bench, compare, plot, report, profile, warmup, cache):
    app.command()(command)


def main() -> None:
    """Run the command line."""
    app(prog_name="kernel-fusion")
