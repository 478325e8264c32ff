"""Patch small models of transformers, diffusers and timm, and compare them with unpatched ones.

    python tests/check_models.py LlamaForCausalLM                            one class, or several
    python tests/check_models.py --jobs 2 --output docs/models_checked.md    all of them, and the page of results

Exits with 1 if a patched model fails a check. The slow tests of test_patch_models.py run the same checks.
"""

from __future__ import annotations

import argparse
import multiprocessing
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import model_checks
import model_classes
import model_classes_others
from model_checks import Outcome
from model_classes import Architecture

MODELS = {model.name: model for model in (*model_classes.architectures(), *model_classes_others.architectures())}


def main() -> int:
    """Check the models that are named, or all."""
    parser = argparse.ArgumentParser(description="Patch small models, and check that each computes the same.")
    parser.add_argument("names", nargs="*", metavar="CLASS", help="such as LlamaForCausalLM; default: all")
    parser.add_argument("--jobs", type=int, default=1, help="how many processes share the work")
    parser.add_argument("--output", type=Path, help="write the page of results there, as Markdown")
    arguments = parser.parse_args()
    if unknown := set(arguments.names) - {*MODELS}:
        parser.error(f"no such model: {', '.join(sorted(unknown))}")
    output = arguments.output
    if output is not None and output.exists() and not output.read_text().startswith(model_checks.TITLE):
        parser.error(f"{output} is no page of this command, which does not overwrite it")
    outcomes = []
    for outcome in _examined(arguments.names or [*MODELS], arguments.jobs):
        outcomes.append(outcome)
        state = f"not made: {outcome.not_made}" if outcome.not_made else "agrees" if outcome.agrees else "FAILS"
        counts = ", ".join(f"{count} {name}" for name, count in outcome.replaced.items() if count)
        print(f"{outcome.name}: {state}" + (f" ({counts})" if counts else ""), flush=True)
        for name, reason in outcome.checks.items():
            if reason:
                print(f"    {name}: {reason}", flush=True)
    if output is not None:
        command = shlex.join(["python", "tests/check_models.py", *sys.argv[1:]])
        output.write_text(model_checks.page(outcomes, command))
    return int(not all(outcome.agrees for outcome in outcomes))


def _examined(names: list[str], jobs: int) -> Iterator[Outcome]:
    """The outcomes, in order."""
    if jobs == 1:
        yield from map(_examine, names)
        return
    with multiprocessing.get_context("fork").Pool(jobs) as pool:
        yield from pool.imap(_examine, names)


def _examine(name: str) -> Outcome:
    architecture: Architecture = MODELS[name]
    return model_checks.examine(architecture, compile=True)


if __name__ == "__main__":
    sys.exit(main())
