"""The tables of all commands, files and pages: strings with a title, which `common.show` prints."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Table:
    """A table of strings."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def markdown(table: Table) -> list[str]:
    """The lines of a table under its title."""
    lines = ["", f"## {table.title}", "", _row(table.columns)]
    lines += [_row(["---", *["---:"] * (len(table.columns) - 1)])]
    return lines + [_row(row) for row in table.rows]


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"
