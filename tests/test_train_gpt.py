"""The training example, run briefly: its claims hold with our kernels, and it fails when they would not.

It runs in this process, so that the launch counters see which kernels did the work.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import support
import torch
from support import Target

import kernel_fusion as kf

pytestmark = pytest.mark.slow

STEPS = 10
# Two per block and the last one.
NORMS = 9


def run_example(monkeypatch: pytest.MonkeyPatch, *arguments: str | Path) -> None:
    """Run the example for a few steps; SystemExit where it fails."""
    support.run_example(monkeypatch, "train_gpt", "--steps", str(STEPS), *arguments)


def curves(output: str) -> list[tuple[int, float, float]]:
    """The printed table: step, PyTorch's loss, ours."""
    rows = re.findall(r"^ +(\d+) +([\d.]+) +([\d.]+) +[\d.e+-]+$", output, re.MULTILINE)
    return [(int(step), float(theirs), float(ours)) for step, theirs, ours in rows]


@pytest.mark.parametrize("norm", ["layer", "rms"])
def test_fp32_curves_agree(
    target: Target,
    norm: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Both curves are printed, fall and agree; every norm of ours ran its kernel; the plot is there."""
    # Measuring memory takes a forward pass more, on a GPU a whole step.
    measured = 1 if target.device == "cuda" else 0
    with target.ran(forward=NORMS * (STEPS + 1), backward=NORMS * (STEPS + measured)):
        run_example(monkeypatch, "--device", target.device, "--dtype", "fp32", "--norm", norm, "--output-dir", tmp_path)
    output = capsys.readouterr().out
    table = curves(output)
    assert [step for step, *_ in table] == list(range(1, STEPS + 1))
    assert all(abs(theirs - ours) <= 1e-4 for _, theirs, ours in table)
    assert table[-1][2] < 0.7 * table[0][2]
    assert f"on the backend {target.backend!r}" in output
    assert re.search(r"median step, ms +[\d.]+ +[\d.]+\n", output)
    assert (tmp_path / "train_gpt.png").stat().st_size > 10_000


def test_bf16_autocast(target: Target, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Under autocast the loss falls all the same."""
    with target.ran(forward=None, backward=None):
        # Few steps: CPUs without bf16 instructions take seconds for each.
        steps = "10" if target.device == "cpu" else "20"
        run_example(monkeypatch, "--device", target.device, "--dtype", "bf16", "--steps", steps)
    assert "torch.bfloat16" in capsys.readouterr().out


def test_saved_memory_is_not_more_than_pytorchs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a CPU the fused model keeps no more for backward than PyTorch's."""
    run_example(monkeypatch, "--device", "cpu", "--dtype", "fp32")
    found = re.search(r"saved for backward, MB +([\d.]+) +([\d.]+)\n", capsys.readouterr().out)
    assert found
    assert float(found[2]) <= float(found[1])


class WrongNorm(kf.FusedLayerNorm):
    """A layer norm that is off by a tenth of a per cent."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """The norm, scaled."""
        return super().forward(input) * 1.001


def test_wrong_kernel_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slightly wrong norm makes the example fail."""
    monkeypatch.setattr(kf, "FusedLayerNorm", WrongNorm)
    with pytest.raises(SystemExit, match="FAILED: the curves differ by more than 1e-04"):
        run_example(monkeypatch, "--device", "cpu", "--dtype", "fp32")


def test_model_that_does_not_learn_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Curves that agree but hardly fall make the example fail: two steps are not enough to learn anything."""
    with pytest.raises(SystemExit, match="FAILED: the loss fell by less than 30%"):
        run_example(monkeypatch, "--device", "cpu", "--dtype", "fp32", "--steps", "2")
