"""The marks on lines that only a GPU can run: few, each in effect, and refuted by a run without a GPU."""

from __future__ import annotations

from pathlib import Path

import coverage
import gpu_only_lines
import pytest
from gpu_only_lines import MARK, File

MOST = 0.05


@pytest.fixture(scope="module")
def found() -> list[File]:
    """The files of the package."""
    return gpu_only_lines.files(coverage.Coverage(data_file=None))


def test_marks_are_few(found: list[File]) -> None:
    """At most a twentieth of the package is not counted."""
    marked = sum(len(file.marked) for file in found)
    assert 0 < marked <= MOST * sum(len(file.statements) for file in found)


def test_every_mark_covers_something(found: list[File]) -> None:
    """A mark stands where coverage sees it: on a statement, or on an `else` before one."""
    for file in found:
        for mark in file.marks:
            assert min(line for line in file.statements if line >= mark) in file.marked, f"{file}:{mark}"


def test_a_mark_on_what_runs_anywhere_is_refuted(tmp_path: Path) -> None:
    """Lines within a mark that ran are named, but not its head, nor definitions."""
    path = tmp_path / "a.py"
    path.write_text(f"@cache\ndef f(  {MARK}\n    x,\n):\n    return x\n\nif cuda:  {MARK}\n    y = 1\n    z = 2\n")
    file = File(path, frozenset({1, 2, 5, 7, 8, 9}), frozenset({1, 2, 5, 7, 8, 9}))
    assert file.marks == [2, 7]
    assert file.refuted({1, 2, 7}) == []
    assert file.refuted({1, 2, 5, 7, 8}) == [5, 8]
