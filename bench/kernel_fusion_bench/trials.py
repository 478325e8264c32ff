"""Trials: other ways to run a kernel, which `kernel-fusion tune` measures, and the user's table of the best ones.

A trial is planned as a row of the table would be. One that does not fit gives no plan, and none changes the order of
sums.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from kernel_fusion.backends.cuda import planner
from kernel_fusion.backends.cuda.device import Device
from kernel_fusion.backends.cuda.plan import Plan
from kernel_fusion.backends.cuda.row_norm_plan import planned
from kernel_fusion.backends.cuda.tuned import Facts
from kernel_fusion.backends.cuda.user_table import CONDITIONS, KNOBS, Row, Table, read_once, section
from kernel_fusion.core.cache import make_private_dir, replace_file
from kernel_fusion.core.spec import Access, RowNormSpec

Choice = dict[str, Any]  # the values of some knobs


class Kernel(NamedTuple):
    """A kernel to plan: its spec, access and device."""

    spec: RowNormSpec
    access: Access
    device: Device


def plans(kernels: Sequence[Kernel], choice: Choice) -> tuple[Plan, ...]:
    """The plans that the kernels have under a choice."""
    rows: Table = {knob: [(value, {}, "")] for knob, value in choice.items()}
    return tuple(planned(*kernel, rows)[0] for kernel in kernels)


def neighbours(kernels: Sequence[Kernel], choice: Choice) -> Iterator[Choice]:
    """The choices that differ from `choice` in one knob and give other plans."""
    seen = {plans(kernels, {}), plans(kernels, choice)}
    for knob, values in KNOBS[section(kernels[0].spec.direction)].items():
        for value in values:
            other = choice | {knob: value}
            if (its := plans(kernels, other)) not in seen:
                seen.add(its)
                yield other


def needed(kernels: Sequence[Kernel], choice: Choice) -> Choice:
    """`choice` without the knobs that change no plan."""
    for knob in choice:
        fewer = {name: value for name, value in choice.items() if name != knob}
        if plans(kernels, fewer) == plans(kernels, choice):
            return needed(kernels, fewer)
    return choice


def conditions(kernel: Kernel) -> dict[str, Any]:
    """The conditions of a table's row that holds for this kernel only."""
    known = Facts(*kernel, {}).known
    return {name: known[name] for name in CONDITIONS[section(kernel.spec.direction)]}


def with_rows(table: dict[str, Table], kernel: Kernel, choice: Choice, shown: str) -> dict[str, Table]:
    """The table with this kernel's rows replaced by those of `choice`; `shown` is their evidence."""
    own, when = section(kernel.spec.direction), conditions(kernel)
    kept: dict[str, list[Row]] = {
        knob: [row for row in listed if row[1] != when] for knob, listed in table.get(own, {}).items()
    }
    for knob, value in choice.items():
        kept.setdefault(knob, []).append((value, when, shown))
    return table | {own: kept}


def write(path: Path, device: str, table: dict[str, Table]) -> None:
    """Write a table atomically; this process then plans by it.

    Raises:
        OSError: it cannot be written.
    """
    parts = [f'  "device": {json.dumps(device)}']
    for part in KNOBS:
        knobs = [
            f'    "{knob}": [\n' + ",\n".join(f"      {json.dumps(row)}" for row in listed) + "\n    ]"
            for knob, listed in table.get(part, {}).items()
            if listed
        ]
        parts.append(f'  "{part}": {{\n' + ",\n".join(knobs) + ("\n" if knobs else "") + "  }")
    make_private_dir(path.parent)
    replace_file(path, ("{\n" + ",\n".join(parts) + "\n}\n").encode())
    read_once.cache_clear()


@contextmanager
def override_plan(change: Callable[[RowNormSpec, Plan], Plan]) -> Iterator[None]:
    """Within, in every thread, row norms run by `change(spec, plan)`, for tests and tuning."""
    own = planner.KERNELS[RowNormSpec]
    planner.KERNELS[RowNormSpec] = own._replace(plan=lambda spec, *others: change(spec, own.plan(spec, *others)))
    planner.forget_kernels()
    try:
        yield
    finally:
        planner.KERNELS[RowNormSpec] = own
        planner.forget_kernels()
