"""Writes the page on the models that were patched, how they were checked, and what failed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch

from kernel_fusion.bench import machine
from kernel_fusion.bench.model_coverage import CHECKS, Outcome

_COUNTS = ("norms", "gates", "additions", "others")


def page(outcomes: Iterable[Outcome], command: str) -> str:
    """The whole page as Markdown."""
    found = list(outcomes)
    made = [outcome for outcome in found if outcome.not_made is None]
    agreeing = [outcome for outcome in made if outcome.agrees]
    facts = machine.machine(torch.device("cpu"))
    lines = [
        "# Models that were patched",
        "",
        f"`{command}` wrote this page on {facts['cpu']} ({facts['os']}), with {_versions()}.",
        "",
        f"Small models of {len(found)} classes were tried; {len(made)} could be made and trained without a download, "
        f"and {len(agreeing)} of these ({100 * len(agreeing) / max(1, len(made)):.1f} %) passed every check when "
        "patched.",
        "",
        "The page [Your model in one line](models.md#how-it-was-checked) says what the columns check. An empty cell "
        "is a check that does not apply: the unpatched model fails it, or has no such method.",
        "",
    ]
    if failed := [outcome for outcome in made if not outcome.agrees]:
        lines += ["## Failed", ""]
        lines += [f"- {o.name}, {name}: {reason}" for o in failed for name, reason in o.checks.items() if reason]
        lines.append("")
    lines += ["## Checked", "", *_rows(made), "", "## Left as they are", "", *_left(made), ""]
    lines += ["## Not made", "", *_not_made(found), ""]
    return "\n".join(lines)


def _versions() -> str:
    wanted = machine.versions() | {name: machine.installed(name) for name in ("transformers", "diffusers", "timm")}
    names = ("python", "torch", "transformers", "diffusers", "timm")
    return ", ".join(f"{name} {wanted[name]}" for name in names if wanted.get(name))


def _rows(outcomes: list[Outcome]) -> list[str]:
    """A row for each model."""
    columns = ("model", "library", "task", *_COUNTS, *CHECKS)
    rows = [f"| {' | '.join(columns)} |", f"| --- | --- | --- |{' ---: |' * len(_COUNTS)}{' --- |' * len(CHECKS)}"]
    for o in outcomes:
        counts = [str(o.replaced.get(name) or "") for name in _COUNTS]
        checks = ["" if name not in o.checks else "no" if o.checks[name] else "yes" for name in CHECKS]
        rows.append(f"| {' | '.join((o.name, o.library, o.task, *counts, *checks))} |")
    return rows


def _left(outcomes: list[Outcome]) -> list[str]:
    """Each reason, with the classes of modules that were not patched because of it."""
    by_reason: dict[str, set[str]] = defaultdict(set)
    for outcome in outcomes:
        for line in outcome.left:
            kind, _, reason = line.partition(": ")
            by_reason[reason].add(kind)
    return [f"- {reason}: {', '.join(sorted(kinds))}" for reason, kinds in sorted(by_reason.items())]


def _not_made(outcomes: list[Outcome]) -> list[str]:
    """Each model that could not be made or trained, with the error."""
    return [f"- {o.name}: `{o.not_made.replace('`', '')}`" for o in outcomes if o.not_made is not None]
