"""Whole training steps of models (forward, backward, fused AdamW) by PyTorch, us and others.

All contenders train the same parameters with the same optimizer state, so that all fit into memory and can take turns.
Each is a copy of the model that shares its tensors. Their losses on one batch are compared before any update.

    pytorch         the model as it is
    kf-patch        after `kf.patch(model)`
    kf-graph        after `kf.compiler.fuse`, run operation by operation: fusion without a compiler
    kf-compile      torch.compile with `kf.compiler.backend()`
    torch.compile   without us
    liger           Liger-Kernel's norms, gated MLPs and rotary embedding; for models it has no patch for, its LayerNorm
    liger-full      its whole patch: also the loss fused with the head
"""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from typing import Any, cast
from unittest import mock

import torch
from torch import Tensor, nn

import kernel_fusion as kf
from kernel_fusion.testing.oracle import Comparison
from kernel_fusion_bench import memory, timing
from kernel_fusion_bench.providers import Contender
from kernel_fusion_bench.results import COMPILED, OURS, REFERENCE, Results
from kernel_fusion_bench.step_models import Step
from kernel_fusion_bench.timing import Setup
from kernel_fusion_bench.workloads import Call, Workload

LIGER = "liger"
# A contender whose first loss differs by more computes something else.
_WRONG = 0.02
_WARM_UP = 2
METHOD = {
    "time": f"wall time of a whole step, waited for: forward, backward, fused AdamW; after {_WARM_UP} steps; "
    "contenders take turns, in an order drawn for each round, on the same parameters, batch and optimizer state; "
    "median and quartiles",
    "training_memory": "on a GPU the peak of torch.cuda.max_memory_allocated in a step, with weights, gradients and "
    "optimizer state; saved: bytes of the tensors that autograd keeps between forward and backward, parameters apart",
    "loss": f"of the first step, before any update; who is off PyTorch's by more than {_WRONG:.0%} is not timed",
}


@dataclass(frozen=True)
class Trainee(Contender):
    """A contender with its copy of the model, and a context to run it in."""

    model: nn.Module
    during: Callable[[], Any] = nullcontext


class Training:
    """One set of parameters, its optimizer and a batch, shared by all contenders."""

    def __init__(self, step: Step, device: torch.device) -> None:
        torch.manual_seed(0)
        self.step = step
        with torch.device(device):
            self.model = step.architecture.make(step.small).to(step.dtype).train()
            inputs = step.architecture.inputs(step.architecture, step.small)
        self.inputs = {name: t.to(step.dtype) if t.is_floating_point() else t for name, t in inputs.items()}
        self.device = device
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5, fused=True)

    def shared_copy(self) -> nn.Module:
        """A copy of the model with the same parameters and buffers."""
        tensors = (*self.model.parameters(), *self.model.buffers())
        return copy.deepcopy(self.model, {id(t): t for t in tensors})

    def loss(self, trainee: Trainee) -> Tensor:
        """The loss on the batch."""
        return self.step.architecture.loss(trainee.model(**self.inputs))

    def first_loss(self, trainee: Trainee) -> float:
        """The loss with the same random numbers for all; runs backward too, without an update."""
        torch.manual_seed(1)
        with trainee.during():
            loss = self.loss(trainee)
            loss.backward()
        self.optimizer.zero_grad()
        return loss.item()

    def train(self, trainee: Trainee) -> None:
        """A step."""
        with trainee.during():
            self.loss(trainee).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def peak_bytes(self, trainee: Trainee) -> int | None:
        """The most memory allocated in a step, if the device reports it."""
        return memory.peak_bytes(partial(self.train, trainee), self.device) if self.device.type == "cuda" else None

    def saved_bytes(self, trainee: Trainee) -> int:
        """Bytes that autograd keeps between forward and backward, without parameters and inputs."""
        known = memory.storages((*self.model.parameters(), *self.model.buffers(), *self.inputs.values()))
        with trainee.during():
            _loss, saved = memory.saving(partial(self.loss, trainee))
        return sum(saved[at] for at in saved.keys() - known)


def measure(results: Results, workload: Workload, setup: Setup) -> Iterator[str]:
    """Compare all losses, then measure memory, then time steps in turns; yields what was done."""
    step = cast("Step", workload)
    torch.compiler.reset()  # the recompilation limit counts all copies of a class
    training = Training(step, setup.device)
    losses: dict[Trainee, float] = {}
    for name, make in trainees(training, [provider.name for provider in setup.providers]).items():
        try:
            trainee = make()
            losses[trainee] = training.first_loss(trainee)
        except Exception as error:  # any failure counts against this contender only
            results.fail(setup, name, workload, timing.reason(error))
        yield f"{name}, loss"
    right = _right(results, workload, setup, losses)
    taken = {}
    for trainee in right:
        for _ in range(_WARM_UP):
            training.train(trainee)
        saved, peak = training.saved_bytes(trainee), training.peak_bytes(trainee)
        taken[trainee] = {"saved_bytes": saved, "training_memory_bytes": peak}
    yield "memory"
    calls: Mapping[str, Callable[[], Call]] = {t.name: partial(partial, training.train, t) for t in right}
    outcomes = timing.time_calls(calls, setup.effort, setup.device)
    for trainee, comparison in right.items():
        outcome = outcomes[trainee.name]
        if isinstance(outcome, str):
            results.fail(setup, trainee.name, workload, outcome)
            continue
        measured: dict[str, Any] = {"timing": outcome, "loss": losses[trainee], **taken[trainee]}
        results.add(setup, workload, "step", trainee, [comparison], **measured)
    yield "time"


def _right(
    results: Results, workload: Workload, setup: Setup, losses: Mapping[Trainee, float]
) -> dict[Trainee, Comparison]:
    """The contenders whose loss agrees with PyTorch's, and by how much; others become failures."""
    expected = next(loss for trainee, loss in losses.items() if trainee.name == REFERENCE)
    right = {}
    for trainee, loss in losses.items():
        comparison = Comparison("loss", abs(loss - expected), 0.0, abs(loss - expected) / abs(_WRONG * expected))
        if comparison.ok:
            right[trainee] = comparison
        else:
            results.fail(setup, trainee.name, workload, f"its loss is {loss:.5g}, PyTorch's is {expected:.5g}")
    return right


def trainees(training: Training, names: Sequence[str]) -> dict[str, Callable[[], Trainee]]:
    """Factories of the contenders for the providers `names`, by name, PyTorch first."""
    ours, theirs = kf.__version__, torch.__version__

    def compiled(name: str, version: str, **options: Any) -> Trainee:
        return Trainee(name, version, cast("nn.Module", torch.compile(training.shared_copy(), **options)))

    def patched() -> Trainee:
        model = training.shared_copy()
        kf.patch(model)
        return Trainee(f"{OURS}patch", ours, model)

    made: dict[str, Callable[[], Trainee]] = {REFERENCE: lambda: Trainee(REFERENCE, theirs, training.model)}
    if any(name.startswith(OURS) for name in names):
        made[f"{OURS}patch"] = patched
        made[f"{OURS}graph"] = partial(compiled, f"{OURS}graph", ours, backend=kf.compiler.backend("eager"))
    if COMPILED in names:
        made[COMPILED] = partial(compiled, COMPILED, theirs)
        made[f"{OURS}compile"] = partial(compiled, f"{OURS}compile", ours, backend=kf.compiler.backend())
    return made | (_ligers(training) if LIGER in names else {})


def _ligers(training: Training) -> dict[str, Callable[[], Trainee]]:
    if training.step.architecture.liger is not None:
        left_out = {LIGER: {"fused_linear_cross_entropy": False}, f"{LIGER}-full": {}}
        return {name: partial(_patched_by_liger, training, name, options) for name, options in left_out.items()}
    model = training.shared_copy()
    version = metadata.version("liger-kernel")
    return {LIGER: lambda: Trainee(LIGER, version, model)} if _with_liger_layer_norms(model) else {}


def _patched_by_liger(training: Training, name: str, options: Mapping[str, bool]) -> Trainee:
    family = training.step.architecture.liger
    apply = getattr(importlib.import_module("liger_kernel.transformers"), f"apply_liger_kernel_to_{family}")
    folder = str(family).removesuffix("_text")
    modeling = importlib.import_module(f"transformers.models.{folder}.modeling_{folder}")
    model = training.shared_copy()
    names = _changed(modeling, partial(apply, model=model, **options))
    return Trainee(name, metadata.version("liger-kernel"), model, partial(mock.patch.dict, vars(modeling), names))


def _with_liger_layer_norms(model: nn.Module) -> int:
    """Make a model's LayerNorms with weight and bias call Liger's; returns how many."""
    function = importlib.import_module("liger_kernel.ops.layer_norm").LigerLayerNormFunction
    norms = [m for m in model.modules() if isinstance(m, nn.LayerNorm) and m.weight is not None and m.bias is not None]
    for norm in norms:
        norm.forward = lambda x, m=norm: function.apply(x, m.weight, m.bias, m.eps)  # type: ignore[method-assign, misc]
    return len(norms)


def _changed(module: Any, change: Callable[[], object]) -> dict[str, Any]:
    """The names in a module that `change` gives other values, with these; the module is restored."""
    before = dict(vars(module))
    change()
    after = dict(vars(module))
    vars(module).update(before)
    return {name: value for name, value in after.items() if value is not before.get(name)}
