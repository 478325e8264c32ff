"""The examples besides train_gpt, run briefly: they show what they promise, with our kernels, and notice what is wrong.

They run in this process, so that patches reach them and the launch counters see which kernels did the work.
"""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from support import CPU, ROOT, Target, python, run_example

import kernel_fusion as kf
from kernel_fusion_bench import results

pytestmark = pytest.mark.slow

EXAMPLES = ROOT / "examples"


def test_basic_usage(target: Target, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Everything agrees with PyTorch; the kernels of the device served the calls, the direct layer's among them."""
    run_example(monkeypatch, "basic_usage", "--device", target.device)
    output = capsys.readouterr().out
    assert "EXTENSION_LOADED is True" in output
    assert f"backend: {target.backend}" in output
    assert "WRONG" not in output
    assert "none on this machine" not in output


def test_dit_block(target: Target, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The block with modulated norms agrees with that of diffusers, and keeps less for backward."""
    sizes = ("--tokens", "24", "--heads", "2", "--head-size", "32")
    with pytest.raises(SystemExit) as stopped, target.ran(forward=None, backward=None):
        run_example(monkeypatch, "dit_block", "--device", target.device, *sizes)
    output = capsys.readouterr().out
    assert stopped.value.code == 0, output
    theirs, ours = (float(kept) for kept in re.findall(r"([\d.]+) MiB kept", output))
    assert ours < theirs


def test_basic_usage_shows_every_name() -> None:
    """Every verb, module and activation, and every name of `kf.ops` and `kf.kernels`, is called."""
    source = (EXAMPLES / "basic_usage.py").read_text()
    wanted = [f"kf.{name}" for name in (*kf.functional.__all__, *kf.nn.__all__) if name != "NormOutput"]
    wanted += [f"ops.{name}" for name in kf.ops.__all__]
    for module in (kf.kernels.elementwise, kf.kernels.reduction, kf.kernels.fusion):
        own = [f for f in vars(module).values() if inspect.isfunction(f) and f.__module__ == module.__name__]
        wanted += [f"{module.__name__.rpartition('.')[2]}.{f.__name__}" for f in own if not f.__name__.startswith("_")]
    assert not [name for name in wanted if f"{name}(" not in source]
    assert "in kf.ACTIVATIONS" in source


def test_basic_usage_notices_a_wrong_result(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One verb that is off by a hundredth of a per cent makes it fail, and is named."""
    right = kf.gated_act
    monkeypatch.setattr(kf, "gated_act", lambda *args: right(*args) * 1.0001)
    with pytest.raises(SystemExit, match="FAILED: 1 differ from PyTorch"):
        run_example(monkeypatch, "basic_usage", "--device", "cpu")
    assert re.search(r"^  gated_act +WRONG: ", capsys.readouterr().out, re.MULTILINE)


_RUN = """
    import runpy, sys, warnings
    warnings.simplefilter("ignore")  # one says that there is no compiler
    example, sys.argv[1:] = sys.argv[1], ["--device", "cpu"]
    runpy.run_path(example, run_name="__main__")
"""


def test_basic_usage_without_a_compiler(tmp_path: Path) -> None:
    """It runs on the definition, and says that there are no kernels to be called directly."""
    env = {"CXX": "/nonexistent", "KERNEL_FUSION_CACHE_DIR": str(tmp_path)}
    output = python(_RUN, EXAMPLES / "basic_usage.py", env=env).stdout
    assert "EXTENSION_LOADED is False" in output
    assert "backend: eager" in output
    assert "none on this machine: `kernels.elementwise.add_relu`: the kernels of cpu are not available" in output


@pytest.mark.parametrize("norm", ["layer", "rms"])
def test_transformer_integration(
    target: Target, norm: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Three curves that agree and fall; norms and gates ran our kernels; what is fused keeps less for backward."""
    steps = 30
    # The drop-in has two norms per block and the last one; the fused model as many, and a gate per block.
    kernels = (2 * 2 + 1) + (2 * 2 + 1 + 2)
    # Measuring memory takes a forward pass more, on a GPU a whole step.
    measured = 1 if target.device == "cuda" else 0
    with target.ran(forward=kernels * (steps + 1), backward=kernels * (steps + measured)):
        run_example(
            *(monkeypatch, "transformer_integration", "--device", target.device, "--dtype", "fp32"),
            *("--norm", norm, "--steps", str(steps)),
        )
    output = capsys.readouterr().out
    table = re.findall(r"^ +(\d+)((?: +[\d.]+){3}) +[\d.e+-]+$", output, re.MULTILINE)
    losses = [[float(loss) for loss in row.split()] for _, row in table]
    assert int(table[-1][0]) == steps
    assert all(max(row) - min(row) <= 1e-4 for row in losses)
    assert losses[-1][-1] < 0.7 * losses[0][-1]
    assert re.search(r"median step, ms(?: +[\d.]+){3}\n", output)
    found = re.search(r"(?:saved for backward|peak of a step), MB +([\d.]+) +([\d.]+) +([\d.]+)\n", output)
    assert found
    assert float(found[3]) < float(found[1])


def test_transformer_integration_notices_a_wrong_gate(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gate that is off by one per cent is told from the unfused one by its curve."""

    class WrongGate(kf.FusedGatedAct):
        def forward(self, *tensors: torch.Tensor) -> torch.Tensor:
            return super().forward(*tensors) * 1.01

    monkeypatch.setattr(kf, "FusedGatedAct", WrongGate)
    with pytest.raises(SystemExit, match="FAILED: the curves differ by more than 1e-04"):
        run_example(monkeypatch, "transformer_integration", "--device", "cpu", "--dtype", "fp32", "--steps", "3")


def test_benchmarks(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ours, PyTorch and the floor are timed in both directions at every shape; tables and plots are written."""
    shapes = ("8x64", "16x128")
    options = [word for shape in shapes for word in ("--shape", shape)]
    run_example(monkeypatch, "benchmarks", "--device", target.device, "--output-dir", tmp_path, *options)
    found = results.read(tmp_path / "own-operation.json")
    timed = {(m.configuration, m.direction, m.provider) for m in found.measurements if m.timing}
    assert timed == {
        (shape, direction, provider)
        for shape in shapes
        for direction in ("forward", "backward")
        for provider in ("floor", "pytorch", f"kf-{target.backend}")
    }
    assert (tmp_path / "own-operation.md").read_text() in capsys.readouterr().out
    assert {path.name for path in tmp_path.glob("*.png")} == {
        f"own-operation-add_rms_norm-fp32-{kind}.png" for kind in ("speedup", "time")
    }


def test_benchmarks_does_not_time_a_wrong_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An operation of ours that computes something else than the chain is not timed, and the example fails."""
    right = kf.add_rms_norm

    def wrong(*args: Any, **options: Any) -> kf.NormOutput:
        y, h = right(*args, **options)
        return kf.NormOutput(y * 1.01, h)

    monkeypatch.setattr(kf, "add_rms_norm", wrong)
    with pytest.raises(SystemExit, match=r"FAILED: kf-cpu, 8x64 .*y is .* times its error budget off"):
        run_example(monkeypatch, "benchmarks", "--device", "cpu", "--output-dir", tmp_path, "--shape", "8x64")


def test_qwen3_block(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The block with our call agrees with that of Transformers in bf16, gradients included; both are timed."""
    sizes = ["--tokens", "24", "--hidden", "64", "--heads", "4", "--key-heads", "2", "--head-dim", "32"]
    with CPU.ran(forward=None, backward=None):
        run_example(monkeypatch, "qwen3_block", "--device", "cpu", *sizes, "--repeats", "1")
    output = capsys.readouterr().out
    largest = re.search(r"largest relative distance (\S+)", output)
    assert largest is not None
    assert float(largest[1]) < 1e-2
    assert {"transformers", "kernel_fusion"} <= {line.split()[0] for line in output.splitlines()}
