"""`verify`: every verb, dtype and direction against float64, beside PyTorch's own error, on the machine it runs on.

The budget is the oracle's, so a row says how much of twice (PyTorch's error + one rounding) was used; above 1 fails. A
case that raises is a failed row, and the others still run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Annotated, TypeVar

import numpy as np
import torch
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table
from rich.text import Text
from torch import Tensor

import kernel_fusion as kf
from kernel_fusion.bench.providers import kernels_must_run
from kernel_fusion.cli.common import console, progress_console, resolve_backend, resolve_device
from kernel_fusion.testing import oracle
from kernel_fusion.testing.cases import cases, training_cases
from kernel_fusion.testing.oracle import Case, Comparison, RowNormCase

_Case = TypeVar("_Case", bound=Case)
_PASS, _FAIL = Text("pass", style="green"), Text("FAIL", style="red")


def verify(
    device: Annotated[str | None, typer.Option(help="Default: the GPU if there is one, else the CPU.")] = None,
    backend: Annotated[str | None, typer.Option(help="Default: the device's own.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer shapes, every dtype.")] = False,
) -> None:
    """Check every verb, dtype and direction against float64; exits non-zero on any failure."""
    target = resolve_device(device)
    name = resolve_backend(backend, target)
    out = console()
    out.print(f"backend {name!r} on {target}, PyTorch {torch.__version__}")
    # Apple's GPUs have no float64.
    grid = [case for case in cases(quick) if target.type != "mps" or case.dtype != torch.float64]
    verdicts = _verify_grid(grid, target, name, out)
    verdicts += _verify_training(training_cases(quick), target, name, out)
    passed = sum(verdicts)
    out.print(f"{passed} passed, {len(verdicts) - passed} failed")
    raise typer.Exit(0 if all(verdicts) else 1)


def _verify_grid(grid: list[Case], device: torch.device, backend: str, out: Console) -> list[bool]:
    """Compare every case, forward and backward, and print a table; a verdict per row."""
    table = Table("case", "tensor", "our error", "PyTorch's error", "error / budget", "")
    verdicts = []
    for case, outcome in _attempts(grid, partial(_compare, device=device, backend=backend), "forward and backward"):
        if isinstance(outcome, str):
            table.add_row(str(case), "–", Text(outcome, style="red"), "", "", _FAIL)
            verdicts.append(False)
            continue
        for c in outcome:
            numbers = (f"{c.error:.2e}", f"{c.pytorch_error:.2e}", f"{c.excess:.3f}")
            table.add_row(str(case), c.name, *numbers, _PASS if c.ok else _FAIL)
            verdicts.append(c.ok)
    out.print(table)
    return verdicts


def _verify_training(grid: list[RowNormCase], device: torch.device, backend: str, out: Console) -> list[bool]:
    """Compare a training step of every case and print pass or fail for each of its results."""
    names = ("forward", "loss", "dx", "dweight", "dbias")
    table = Table("LayerNorm training step against PyTorch", *names)
    verdicts = []
    for case, outcome in _attempts(grid, partial(_compare_step, device=device, backend=backend), "training steps"):
        oks = [False] * len(names) if isinstance(outcome, str) else [c.ok for c in outcome]
        note = (" ", (outcome, "red")) if isinstance(outcome, str) else ()
        table.add_row(Text.assemble(str(case), *note), *(_PASS if ok else _FAIL for ok in oks))
        verdicts += oks
    out.print(table)
    return verdicts


def _attempts(
    grid: Sequence[_Case], compare: Callable[[_Case], list[Comparison]], description: str
) -> Iterator[tuple[_Case, list[Comparison] | str]]:
    """Each case with its comparisons, or with the words of the error that it raised."""
    for case in track(grid, description, console=progress_console()):
        try:
            yield case, compare(case)
        except Exception as error:  # whatever it is, it is a failure of this case alone
            yield case, f"{type(error).__name__}: {error}"


def _compare(case: Case, device: torch.device, backend: str) -> list[Comparison]:
    with kernels_must_run(backend if case.runs_kernels else None):
        return oracle.compare(case, device, backend)


def _compare_step(case: RowNormCase, device: torch.device, backend: str) -> list[Comparison]:
    """Norm, mean squared error against a random target, and gradients of the loss: ours, PyTorch's, float64."""
    inputs = oracle.make_inputs(case, device)
    assert inputs.weight is not None
    assert inputs.bias is not None
    tensors = [inputs.x, inputs.weight, inputs.bias, inputs.dy]
    wide = [t.detach().cpu().double().requires_grad_(t.requires_grad) for t in tensors]
    with kernels_must_run(backend):
        ours = _step(partial(kf.layer_norm, backend=backend), tensors)
    theirs = _step(torch.nn.functional.layer_norm, tensors)
    exact = _step(partial(kf.layer_norm, backend="eager"), wide)
    expected = {name: tensor.numpy().astype(np.longdouble) for name, tensor in exact.items()}
    return [oracle.judge(name, [(ours[name], expected[name], theirs[name])]) for name in expected]


def _step(norm: Callable[..., Tensor], tensors: list[Tensor]) -> dict[str, Tensor]:
    x, weight, bias, target = tensors
    y = norm(x, weight.shape, weight, bias)
    # Summed in float64 and rounded once, so that the loss judges y and not the order of PyTorch's own sum.
    loss = torch.nn.functional.mse_loss(y.cpu().double(), target.cpu().double()).float()
    gradients = torch.autograd.grad(loss, (x, weight, bias))
    return dict(
        zip(("forward", "loss", "dx", "dweight", "dbias"), (y.detach(), loss.detach(), *gradients), strict=True)
    )
