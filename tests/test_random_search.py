"""Hypothesis at random: elsewhere its examples are the same in each run, so that no run fails by chance."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from support import ROOT


@pytest.mark.slow
def test_other_examples_hold_too() -> None:
    """A new failing example is printed, and stays as an `@example` of its test."""
    command = [sys.executable, "-m", "pytest", "-q", "-m", "hypothesis", "--hypothesis-profile=random"]
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    ran = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout
