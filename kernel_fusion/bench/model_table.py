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
        "Others are activations, softmaxes, modulations, rotary embeddings and what makes their angles. The page "
        "[Your model in one line](models.md#how-it-was-checked) says what the checks are. Each model passed those "
        "above its table, except where it says otherwise: `no` is a check that the unpatched model fails, or has no "
        "method for. Only a sample was compiled.",
        "",
    ]
    if failed := [outcome for outcome in made if not outcome.agrees]:
        lines += ["## Failed", ""]
        lines += [f"- {o.name}, {name}: {reason}" for o in failed for name, reason in o.checks.items() if reason]
        lines.append("")
    for library, task in dict.fromkeys((outcome.library, outcome.task) for outcome in made):
        same = [outcome for outcome in made if (outcome.library, outcome.task) == (library, task)]
        lines += [f"## Checked: {library}, {task}", "", *_section(same), ""]
    lines += ["## Left as they are", "", *_left(made), ""]
    lines += ["## Not made", "", "These fail unpatched, with the small sizes that were tried.", ""]
    lines += [f"- {o.name}: `{o.not_made.replace('`', '')}`" for o in found if o.not_made is not None]
    lines.append("")
    return "\n".join(lines)


def _versions() -> str:
    wanted = machine.versions() | {name: machine.installed(name) for name in ("transformers", "diffusers", "timm")}
    names = ("python", "torch", "transformers", "diffusers", "timm")
    return ", ".join(f"{name} {wanted[name]}" for name in names if wanted.get(name))


def _section(outcomes: list[Outcome]) -> list[str]:
    """The checks of a task's models, and a row for each model."""
    checks = [name for name in CHECKS[:-1] if any(name in o.checks for o in outcomes)]
    compiled = [o.name for o in outcomes if CHECKS[-1] in o.checks]
    rows = [", ".join(checks) + (f"; {CHECKS[-1]}: {', '.join(compiled)}" if compiled else ""), ""]
    rows += [f"| {' | '.join(('model', *_COUNTS, 'except'))} |", f"| --- |{' ---: |' * len(_COUNTS)} --- |"]
    for o in outcomes:
        counts = [str(o.replaced.get(name) or "") for name in _COUNTS]
        exceptions = [f"no {name}" for name in checks if name not in o.checks]
        exceptions += [f"fails {name}" for name, reason in o.checks.items() if reason]
        rows.append(f"| {' | '.join((o.name, *counts, ', '.join(exceptions)))} |")
    return rows


def _left(outcomes: list[Outcome]) -> list[str]:
    """Each reason, with the classes of modules that were not patched because of it."""
    by_reason: dict[str, set[str]] = defaultdict(set)
    for outcome in outcomes:
        for line in outcome.left:
            kind, _, reason = line.partition(": ")
            by_reason[reason].add(kind)
    return [f"- {reason}: {', '.join(sorted(kinds))}" for reason, kinds in sorted(by_reason.items())]
