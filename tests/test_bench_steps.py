"""Training steps as a benchmark: contenders train the same parameters, and who computes something else is not timed."""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch
from support import ROOT, run_script
from torch import nn
from typer.testing import CliRunner

import kernel_fusion as kf
from kernel_fusion.cli.app import app
from kernel_fusion_bench import providers, results, run_suite, steps
from kernel_fusion_bench.step_models import ARCHITECTURES, Step
from kernel_fusion_bench.steps import Trainee, Training
from kernel_fusion_bench.suites import SUITES
from kernel_fusion_bench.timing import Effort, Setup

_EFFORT = Effort(min_rounds=2, max_rounds=2, max_seconds=0.0, replays=1, host_rounds=1, max_checked=1)


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> None:
    """No graph of another test is reused."""
    torch._dynamo.reset()


def _setup() -> Setup:
    return Setup([providers.pytorch(), providers.ours("cpu")], torch.device("cpu"), (), _EFFORT)


def _training(name: str = "llama-3-8b") -> Training:
    return Training(Step(ARCHITECTURES[name], torch.float32, small=True), torch.device("cpu"))


_SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ARCHITECTURES if name not in ("llama-3-8b", "dit-xl")]


@pytest.mark.parametrize("name", ["llama-3-8b", "dit-xl", *_SLOW])
def test_every_model_is_measured(name: str, tmp_path: Path) -> None:
    """Time, memory and loss of PyTorch and ours, in files that read back as they were written."""
    found, paths = run_suite(SUITES["steps"].quick(), [_setup()], tmp_path, verbs=[name], quick=True)
    assert not found.failures
    measured = {m.provider: m for m in found.measurements}
    assert measured.keys() == {"pytorch", "kf-patch", "kf-graph"}
    for m in measured.values():
        assert m.timing is not None
        assert m.timing.iterations == 2
        assert m.saved_bytes
        assert m.loss == pytest.approx(measured["pytorch"].loss, rel=0.02)
    assert measured["kf-graph"].saved_bytes <= measured["pytorch"].saved_bytes
    read = {m.provider: m.loss for m in results.read(paths[0]).measurements}
    assert read == {name: pytest.approx(m.loss, rel=1e-4) for name, m in measured.items()}
    assert "loss" in (tmp_path / "steps-quick.md").read_text()


def test_contenders_share_parameters() -> None:
    """A copy has the tensors of the model, and its step changes them."""
    training = _training()
    model = training.shared_copy()
    assert [id(p) for p in model.parameters()] == [id(p) for p in training.model.parameters()]
    before = [p.detach().clone() for p in training.model.parameters()]
    training.train(Trainee("copy", "", model))
    assert all(not torch.equal(p, old) for p, old in zip(training.model.parameters(), before, strict=True))


def test_first_loss_changes_nothing() -> None:
    """It leaves no gradient and no update, so that all contenders start from the same."""
    training = _training("bert-large")
    trainee = Trainee("pytorch", "", training.model)
    assert training.first_loss(trainee) == training.first_loss(trainee)
    assert all(p.grad is None for p in training.model.parameters())


def test_counting_what_is_saved_frees_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The graph of the counted step is gone, or its memory would be part of every later peak."""
    hooks, kept = torch.autograd.graph.saved_tensors_hooks, list[weakref.ref[torch.Tensor]]()

    def watched(pack: Callable[[torch.Tensor], object], unpack: Callable[[object], torch.Tensor]) -> object:
        def note(t: torch.Tensor) -> object:
            if t.grad_fn is not None:
                kept.append(weakref.ref(t))
            return pack(t)

        return hooks(note, unpack)

    training = _training()
    monkeypatch.setattr(torch.autograd.graph, "saved_tensors_hooks", watched)
    assert training.saved_bytes(Trainee("pytorch", "", training.model))
    assert kept
    assert all(ref() is None for ref in kept)


def test_wrong_contender_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model whose loss is off by three per cent becomes a failure, and the others are measured."""

    class Wrong(nn.Module):
        def __init__(self, model: nn.Module) -> None:
            super().__init__()
            self.model = model

        def forward(self, **inputs: torch.Tensor) -> object:
            output = self.model(**inputs)
            output.loss = output.loss * 1.03
            return output

    def both(training: Training, names: object) -> dict[str, Callable[[], Trainee]]:
        models = {"pytorch": training.model, "wrong": Wrong(training.model)}
        return {name: partial(Trainee, name, "", model) for name, model in models.items()}

    monkeypatch.setattr(steps, "trainees", both)
    found = results.Results("steps", "Training steps", True, results.describe([torch.device("cpu")], "", {}, {}))
    step = Step(ARCHITECTURES["llama-3-8b"], torch.float32, small=True)
    list(steps.measure(found, step, _setup()))  # type: ignore[arg-type]
    assert [m.provider for m in found.measurements] == ["pytorch"]
    assert [(f.provider, f.reason.split(",")[0][:11]) for f in found.failures] == [("wrong", "its loss is")]


def test_names_that_a_patch_changes_hold_only_while_it_runs() -> None:
    """A patch's changes to a module's names exist within the context only."""
    import math as module

    sqrt = module.sqrt
    changed = steps._changed(module, lambda: setattr(module, "sqrt", abs))
    assert module.sqrt is sqrt
    assert changed == {"sqrt": abs}
    with mock.patch.dict(vars(module), changed):
        assert module.sqrt is abs
    assert module.sqrt is sqrt


def test_shapes_are_refused() -> None:
    """A model has its shapes; the command line says so."""
    result = CliRunner().invoke(app, ["bench", "steps", "--shape", "8x8"])
    assert result.exit_code == 2
    assert "--shape: steps measures models" in result.output


@pytest.mark.slow
def test_profile_counts_kinds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The profile of a step finds products, attention, the optimizer and operators of ours, and writes its files."""
    run_script(monkeypatch, ROOT / "benchmarks", "step_profile", "--quick", "--device", "cpu", "--output-dir", tmp_path)
    kernels = json.loads((tmp_path / "step-profile-llama-3-8b.json").read_text())["kernels"]
    kinds = {
        contender: {k["kind"] for k in kernels if k["contender"] == contender} for contender in ("pytorch", "kf-graph")
    }
    assert kinds["pytorch"] >= {"matrix products", "attention", "optimizer", "other"}
    assert "fused" in kinds["kf-graph"] - kinds["pytorch"]


@pytest.mark.slow
def test_training_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Both variants learn and repeat themselves, and their curves lie closer together than those of two seeds."""
    _training_run(monkeypatch, tmp_path, "--repeat")
    runs = json.loads((tmp_path / "training-run.json").read_text())["runs"]
    assert len(runs) == 4
    assert all(run["curve"][-1] < 0.8 * run["curve"][0] for run in runs)
    output = capsys.readouterr().out
    assert "curves with and without us lie at most" in output
    assert output.count("losses and weights equal") == 4


@pytest.mark.slow
def test_training_run_notices_another_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second run that differs in one bit makes it fail."""
    monkeypatch.setattr(torch, "equal", lambda a, b: a.dim() == 1)
    with pytest.raises(SystemExit, match="FAILED: a run does not repeat itself"):
        _training_run(monkeypatch, tmp_path, "--repeat", "--variants", "patched", "--steps", "2")


@pytest.mark.slow
def test_training_run_notices_a_wrong_norm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A variant whose curve is elsewhere makes it fail."""
    monkeypatch.setattr(kf.compiler, "backend", lambda inner: _without_weights)
    with pytest.raises(SystemExit, match="FAILED: the curves with and without us"):
        _training_run(monkeypatch, tmp_path, "--variants", "unpatched", "graph")


def _without_weights(gm: torch.fx.GraphModule, example_inputs: object) -> object:
    """A backend that halves every number that is added to a variance, a thousandfold mistake in eps."""
    for node in gm.graph.find_nodes(op="call_function", target=torch.rsqrt):
        with gm.graph.inserting_before(node):
            node.args = (gm.graph.call_function(torch.add, (node.args[0], 10.0)),)
    gm.recompile()
    return gm.forward


def _training_run(monkeypatch: pytest.MonkeyPatch, folder: Path, *arguments: str) -> None:
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    try:
        run_script(
            *(monkeypatch, ROOT / "benchmarks", "training_run", "--quick", "--device", "cpu"),
            *("--output-dir", folder, *arguments),
        )
    finally:
        torch.use_deterministic_algorithms(False)
