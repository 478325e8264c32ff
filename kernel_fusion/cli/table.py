"""The tables of all commands, files and pages: strings with a title, which `common.show` prints."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Table:
    """A table of strings."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def rows_of(columns: Sequence[str], rows: Iterable[Sequence[str]], left: Collection[str]) -> list[str]:
    """The lines of a table in Markdown; the columns named in `left` are aligned there, others on the right."""
    marks = ["---" if name in left else "---:" for name in columns]
    return [_row(columns), _row(marks), *map(_row, rows)]


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"
