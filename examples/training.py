"""Shared by the training examples: models that train in turns on the same batches, and are then compared.

They take turns step by step, so that a disturbance of the machine disturbs all of them.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from rich.progress import track
from torch import Tensor, nn
from torch.nn import functional as F

MAX_DIFFERENCE = 1e-4
MIN_FALL = 0.30

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}

# A model's input and target classes: (batch, time) each, as int64.
Batch = tuple[Tensor, Tensor]


@dataclass
class Run:
    """One model in training, and what was measured of it."""

    name: str
    model: nn.Module
    optimizer: torch.optim.Optimizer
    dtype: torch.dtype
    losses: list[float] = field(default_factory=list)
    step_ms: list[float] = field(default_factory=list)

    @classmethod
    def of(cls, name: str, model: nn.Module, dtype: torch.dtype) -> Run:
        """A model that begins; a `dtype` other than float32 means autocast."""
        return cls(name, model, torch.optim.AdamW(model.parameters(), lr=1e-3), dtype)

    def loss(self, batch: Batch) -> Tensor:
        """Mean cross-entropy, in nats."""
        given, target = batch
        with torch.autocast(given.device.type, self.dtype, enabled=self.dtype != torch.float32):
            logits = self.model(given)
        return F.cross_entropy(logits.float().flatten(0, 1), target.flatten())

    def step(self, batch: Batch) -> None:
        """One timed training step. Reading the loss waits for the GPU, and synchronising does so for the update."""
        start = time.perf_counter()
        loss = self.loss(batch)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses.append(loss.item())
        if loss.is_cuda:
            torch.cuda.synchronize()
        self.step_ms.append(1e3 * (time.perf_counter() - start))


def train(runs: Sequence[Run], batches: Iterable[Batch]) -> None:
    """A step of each on every batch."""
    for batch in track(batches, "training", transient=True):
        for run in runs:
            run.step(batch)


def step_memory(run: Run, batch: Batch) -> int:
    """Bytes that forward and backward need on top of weights and optimizer state.

    On a GPU the peak that PyTorch's allocator saw; elsewhere what autograd keeps between forward and backward, each
    storage counted once and the weights left out.
    """
    if batch[0].is_cuda:
        resting = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        run.loss(batch).backward()
        peak = torch.cuda.max_memory_allocated() - resting
        run.optimizer.zero_grad()
        return peak
    weights = {parameter.untyped_storage().data_ptr() for parameter in run.model.parameters()}
    saved: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor.detach()  # a result would hold what saved it, and both would stay for ever

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        loss = run.loss(batch)
    # The graph behind `loss` holds the tensors until here: no address was given out twice.
    del loss
    return sum(saved.values())


def difference(runs: Sequence[Run]) -> list[float]:
    """Step by step, how far the losses lie apart."""
    return [max(losses) - min(losses) for losses in zip(*(run.losses for run in runs), strict=True)]


def report(runs: Sequence[Run], batch: Batch) -> None:
    """Print the curves side by side, step times and memory; `batch` is one more, to measure memory with."""
    differences, steps = difference(runs), len(runs[0].losses)
    names = "".join(f"{run.name:>20}" for run in runs)
    print(f"\n{'step':>6}{names}{'difference':>14}")
    for i in sorted({*range(0, steps, math.ceil(steps / 12)), steps - 1}):
        losses = "".join(f"{run.losses[i]:>20.5f}" for run in runs)
        print(f"{i + 1:>6}{losses}{differences[i]:>14.1e}")
    memory_kind = "peak of a step, MB" if batch[0].is_cuda else "saved for backward, MB"
    print(f"\n{'':24}{names}")
    print(f"{'median step, ms':24}" + "".join(f"{statistics.median(run.step_ms):>20.2f}" for run in runs))
    print(f"{memory_kind:24}" + "".join(f"{step_memory(run, batch) / 1e6:>20.2f}" for run in runs))


def judge(runs: Sequence[Run]) -> None:
    """Exit with an error if the loss of the last run hardly fell, or in fp32 if the curves differ."""
    apart = max(difference(runs))
    losses = runs[-1].losses
    fall = 1 - losses[-1] / losses[0]
    print(f"\nlargest difference of the curves: {apart:.1e}; the loss fell by {fall:.0%}")
    # Negated comparisons: a NaN must fail too.
    if runs[0].dtype == torch.float32 and not apart <= MAX_DIFFERENCE:
        sys.exit(f"FAILED: the curves differ by more than {MAX_DIFFERENCE:.0e}")
    if not fall >= MIN_FALL:
        sys.exit(f"FAILED: the loss fell by less than {MIN_FALL:.0%}")


def parser(description: str, norms: Iterable[str]) -> argparse.ArgumentParser:
    """The arguments that all have."""
    best = "cuda" if torch.cuda.is_available() else "cpu"
    made = argparse.ArgumentParser(description=description)
    made.add_argument("--steps", type=_steps, default=60, help="training steps of each model (default 60)")
    made.add_argument("--device", default=best, type=torch.device, help=f"a PyTorch device (here by default {best})")
    made.add_argument("--dtype", choices=DTYPES, help="bf16 means autocast (default: bf16 on a GPU, fp32 on a CPU)")
    made.add_argument("--norm", choices=norms, default="layer", help="LayerNorm (default) or RMSNorm")
    made.add_argument("--seed", type=int, default=0, help="of the weights and the batches (default 0)")
    return made


def chosen_dtype(arguments: argparse.Namespace) -> torch.dtype:
    """The dtype that was asked for, or the one that fits the device."""
    return DTYPES[arguments.dtype or ("bf16" if arguments.device.type == "cuda" else "fp32")]


def _steps(text: str) -> int:
    steps = int(text)
    if steps < 2:
        raise argparse.ArgumentTypeError("must be at least 2")
    return steps
