"""`models`: patches small models of transformers, diffusers and timm and compares them with unpatched ones."""

from __future__ import annotations

import multiprocessing
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import track

from kernel_fusion.bench import model_coverage, tiny_models, tiny_others
from kernel_fusion.cli.common import console, path_of, progress_console, replaceable, writable


def models(
    names: Annotated[list[str] | None, typer.Argument(help="Classes, such as LlamaForCausalLM. Default: all.")] = None,
    jobs: Annotated[int, typer.Option(min=1, help="How many processes share the work.")] = 1,
    output: Annotated[
        Path | None,
        typer.Option(help="Write the page of results there, as Markdown.", parser=path_of, metavar="PATH"),
    ] = None,
) -> None:
    """Patch small models of installed libraries, and check that each computes the same and works as before."""
    found = [*tiny_models.architectures(), *tiny_others.architectures()]
    if unknown := set(names or ()) - {architecture.name for architecture in found}:
        raise typer.BadParameter(f"no such model: {', '.join(sorted(unknown))}")
    chosen = [architecture for architecture in found if not names or architecture.name in names]
    if output is not None:
        writable(output.absolute().parent)
        replaceable(output, lambda path: path.read_text().startswith(model_coverage.TITLE))
    outcomes = list(
        track(_examined(chosen, jobs), "models", len(chosen), console=progress_console(), disable=len(chosen) == 1)
    )
    for outcome in outcomes:
        state = f"not made: {outcome.not_made}" if outcome.not_made else "agrees" if outcome.agrees else "FAILS"
        counts = ", ".join(f"{count} {name}" for name, count in outcome.replaced.items() if count)
        console().print(f"{outcome.name}: {state}" + (f" ({counts})" if counts else ""))
        for name, reason in outcome.checks.items():
            if reason:
                console().print(f"    {name}: {reason}")
    if output is not None:
        options = [*(names or ()), *(["--jobs", str(jobs)] if jobs > 1 else [])]
        command = shlex.join(["kernel-fusion", "models", *options, "--output", output.name])
        output.write_text(model_coverage.page(outcomes, command))
    if not all(outcome.agrees for outcome in outcomes):
        raise typer.Exit(1)


def _examined(chosen: list[tiny_models.Architecture], jobs: int) -> Iterator[model_coverage.Outcome]:
    """The outcomes, in order. The processes are forks, because model factories cannot be pickled."""
    global _chosen
    if jobs == 1:
        yield from (model_coverage.examine(architecture, compile=True) for architecture in chosen)
        return
    _chosen = chosen
    with multiprocessing.get_context("fork").Pool(jobs) as pool:
        yield from pool.imap(_examine, range(len(chosen)))


_chosen: list[tiny_models.Architecture] = []


def _examine(index: int) -> model_coverage.Outcome:
    return model_coverage.examine(_chosen[index], compile=True)
