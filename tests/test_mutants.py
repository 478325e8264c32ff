"""The list of planted faults fits the sources, and a sample of them is caught."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from mutant_list import MUTANTS
from mutants import Mutant
from support import ROOT

_SAMPLE = {"eager: a mask is inverted", "triton: a row ends one column late", "cache: the trailer is not checked"}


def _results() -> dict[str, str | None]:
    """Who caught each fault, by its name, in the files of results."""
    files = (ROOT / "benchmarks" / "results").glob("*/mutants.json")
    return {result["name"]: result["test"] for file in files for result in json.loads(file.read_text())["mutants"]}


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_fault_can_be_planted(mutant: Mutant) -> None:
    """The replaced text stands in its file exactly once, and the tests that must catch it exist."""
    text = (ROOT / mutant.file).read_text()
    assert mutant.planted(text) != text
    file, name = re.fullmatch(r"(tests/\w+\.py)::(\w+)(?: -k \w+)?", mutant.tests).groups()
    assert f"\ndef {name}(" in (ROOT / file).read_text()


def test_a_fault_that_fits_nowhere_is_refused() -> None:
    """A text that is not there, or there twice, is an error that names the fault and the file."""
    mutant = Mutant("cpu: x", "a.h", "b", "c", "")
    for text, count in (("a", 0), ("bb", 2)):
        with pytest.raises(ValueError, match=rf"cpu: x: 'b' must stand in a\.h exactly once, it does {count} times"):
            mutant.planted(text)


def test_names_are_unique() -> None:
    """A fault is asked for by its name."""
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS) >= 40


def test_every_fault_was_caught() -> None:
    """The results that are committed are those of this list: `python tests/mutants.py --output` wrote them."""
    results = _results()
    assert results.keys() <= {mutant.name for mutant in MUTANTS}
    assert {mutant.name for mutant in MUTANTS if not mutant.cuda} <= results.keys()
    assert None not in results.values()


@pytest.mark.slow
def test_a_sample_is_caught(tmp_path: Path) -> None:
    """Three faults that are cheap to plant, by the command."""
    only = [word for name in _SAMPLE for word in ("--only", name)]
    command = [sys.executable, str(ROOT / "tests" / "mutants.py"), *only, "--output", str(tmp_path / "results.json")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads((tmp_path / "results.json").read_text())["mutants"]
    assert {result["name"] for result in results} == _SAMPLE  # they end in any order
    assert all(result["test"] for result in results)
