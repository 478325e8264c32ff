"""Reports of what `patch` and `unpatch` changed in a model, and what they left."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import groupby
from typing import NamedTuple


class Line(NamedTuple):
    """One module: its class, a remark, and its name in the model."""

    kind: str
    text: str
    name: str


@dataclass(repr=False)
class Report:
    """A table of what was replaced in a model, and what was left and why; print it.

    Attributes:
        model: the class of the model.
        replaced: a line for each changed module, with what computes it now.
        left: a line for each other norm of rows, activation or gate, with the reason.
        already: how many modules had been changed before.
        seconds: how long it took.
        done: what was done to the modules of `replaced`, as it is printed.

    Example:
        >>> import torch, kernel_fusion as kf
        >>> report = kf.patch(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.LayerNorm(8)))
        >>> [(line.kind, line.text, line.name) for line in report.replaced]
        [('LayerNorm', 'layer_norm', '1')]
    """

    model: str
    replaced: list[Line] = field(default_factory=list)
    left: list[Line] = field(default_factory=list)
    already: int = 0
    seconds: float = 0.0
    done: str = "replaced"

    def __repr__(self) -> str:
        head = f"{self.model}: {len(self.replaced)} modules {self.done}, {len(self.left)} left"
        head += f", {self.already} had been replaced before" if self.already else ""
        return "\n".join([head, *_table(self.done, self.replaced), *_table("left", self.left)])


def _table(title: str, lines: Iterable[Line]) -> list[str]:
    """A row for each class and text, with the count and the first name."""
    rows = [(*key, list(group)) for key, group in groupby(sorted(lines), key=lambda line: line[:2])]
    return [
        f"  {title:8} {len(group):4} {kind}: {text} ({group[0].name or 'the model'}{', …' if len(group) > 1 else ''})"
        for kind, text, group in rows
    ]
