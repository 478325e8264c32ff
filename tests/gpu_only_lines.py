"""The statements marked `# pragma: gpu`, which coverage leaves out: where they are, and how many.

A mark stands on the first line of a function or block, and covers all of it. `python tests/gpu_only_lines.py` lists
them; after a run under coverage it also fails where something that is marked ran although there is no GPU: it is then
to be counted like the rest.
"""

from __future__ import annotations

import ast
import sys
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import coverage
import torch

ROOT = Path(__file__).parents[1]
MARK = "# pragma: gpu"


@dataclass(frozen=True)
class File:
    """A file of the package.

    Attributes:
        path: of the file.
        statements: the lines on which statements begin.
        marked: those of them that a mark covers.
    """

    path: Path
    statements: frozenset[int]
    marked: frozenset[int]

    @cached_property
    def lines(self) -> list[str]:
        """The text."""
        return self.path.read_text().splitlines()

    @property
    def marks(self) -> list[int]:
        """The lines with a mark."""
        return [number for number, line in enumerate(self.lines, 1) if MARK in line]

    def refuted(self, ran: set[int]) -> list[int]:
        """The marked lines among those that `ran`; a block's head decides, and definitions run on import."""
        functions = [n for n in ast.walk(ast.parse("\n".join(self.lines))) if isinstance(n, ast.FunctionDef)]
        heads = {line for f in functions for line in range(f.lineno - len(f.decorator_list), f.body[0].lineno)}
        return sorted(self.marked & ran - heads - set(self.marks))

    def __str__(self) -> str:
        return str(self.path.relative_to(ROOT))


def files(measured: coverage.Coverage) -> list[File]:
    """Every file of the package, as coverage parses it."""
    paths = sorted(path for folder in ("kernel_fusion", "bench") for path in (ROOT / folder).rglob("*.py"))

    def statements(path: Path) -> frozenset[int]:
        return frozenset(measured.analysis2(str(path))[1])

    measured.clear_exclude()
    whole = {path: statements(path) for path in paths}
    measured.exclude(MARK)
    marked = {path: all - statements(path) for path, all in whole.items() if MARK in path.read_text()}
    return [File(path, all, marked.get(path, frozenset())) for path, all in whole.items()]


def main() -> None:
    """List the marks; an error where one is refuted."""
    measured = coverage.Coverage(config_file=str(ROOT / "pyproject.toml"))
    measured.load()
    found, data = files(measured), measured.get_data()
    for file in found:
        for mark in file.marks:
            print(f"{file}:{mark}: {file.lines[mark - 1].partition(MARK)[0].strip()}")
    marked, total = (sum(map(len, counts)) for counts in zip(*((f.marked, f.statements) for f in found), strict=True))
    print(f"{marked} of {total} statements, {marked / total:.1%}, need a GPU")
    refuted = [f"{file}:{line}" for file in found for line in file.refuted(set(data.lines(str(file.path)) or ()))]
    if refuted and not torch.cuda.is_available():
        sys.exit(f"FAILED: marked, but ran without a GPU: {', '.join(refuted)}")


if __name__ == "__main__":
    main()
