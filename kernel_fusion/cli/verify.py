"""`verify`: every verb, dtype and direction against float64, beside PyTorch's own error, on this machine.

The budget is the oracle's: twice (PyTorch's error + one rounding). A line per verb and dtype shows the largest used
share of a budget; above 1 fails. Failures are shown one by one, with `--verbose` all comparisons. A case that raises is
a failure, and the others still run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Annotated, TypeVar

import numpy as np
import torch
import typer
from rich.console import Console
from torch import Tensor

import kernel_fusion as kf
from kernel_fusion.cli.common import console, progress_bar, resolve_backend, resolve_device, show, shown_dtype
from kernel_fusion.cli.table import Table
from kernel_fusion.core import checks
from kernel_fusion.testing import oracle
from kernel_fusion.testing.cases import cases, training_cases
from kernel_fusion.testing.launches import kernels_must_run
from kernel_fusion.testing.oracle import Case, Comparison, RowNormCase, Tensors

_Case = TypeVar("_Case", bound=Case)
_STEP = ("forward", "loss", "dx", "dweight", "dbias")


@dataclass(frozen=True)
class _Verdict:
    """A case's comparisons, or the text of the error that it raised."""

    case: Case
    comparisons: Sequence[Comparison]
    error: str | None = None

    @property
    def passed(self) -> int:
        """How many of its tensors are within budget."""
        return sum(c.ok for c in self.comparisons)

    @property
    def failed(self) -> int:
        """How many tensors are over budget; an error counts as one."""
        return len(self.comparisons) - self.passed + (self.error is not None)


def verify(
    device: Annotated[str | None, typer.Option(help="Default: the GPU if there is one, else the CPU.")] = None,
    backend: Annotated[str | None, typer.Option(help="Default: the device's own.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer shapes, every dtype.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", help="Show every comparison, not only failures.")] = False,
) -> None:
    """Check every verb, dtype and direction against float64; exits non-zero on any failure."""
    target = resolve_device(device)
    name = resolve_backend(backend, target)
    out = console()
    out.print(f"backend {name!r} on {target}, PyTorch {torch.__version__}")
    # Apple's GPUs have no float64.
    grid = [case for case in cases(quick) if target.type != "mps" or case.dtype != torch.float64]
    grid = [case for case in grid if not checks.without_kernels(case.verb, name)]
    verdicts = list(_attempts(grid, partial(_compare, device=target, backend=name), "forward and backward"))
    compare = partial(_compare_step, device=target, backend=name)
    steps = list(_attempts(training_cases(quick), compare, "training steps"))
    if verdicts:
        show(_by_verb(verdicts), out)
    show(_by_result(steps), out)
    _show_in_full([verdict for verdict in verdicts + steps if verbose or verdict.failed], out)
    failed = sum(verdict.failed for verdict in verdicts + steps)
    out.print(f"{sum(verdict.passed for verdict in verdicts + steps)} passed, {failed} failed")
    raise typer.Exit(1 if failed else 0)


def _by_verb(verdicts: Sequence[_Verdict]) -> Table:
    """A line per verb and dtype: the number of compared tensors, the error closest to its budget, and whose."""
    verbs, dtypes = (dict.fromkeys(getattr(v.case, name) for v in verdicts) for name in ("verb", "dtype"))
    rows = []
    for verb, dtype in product(verbs, dtypes):
        own = [verdict for verdict in verdicts if (verdict.case.verb, verdict.case.dtype) == (verb, dtype)]
        if not own:
            continue
        found = [c for verdict in own for c in verdict.comparisons]
        worst = max(found, key=lambda c: c.excess, default=None)
        share = ("–", "") if worst is None else (f"{worst.excess:.3f}", worst.name)
        failed = sum(verdict.failed for verdict in own)
        rows.append((verb, shown_dtype(dtype), str(len(found)), *share, f"{failed} FAIL" if failed else "pass"))
    columns = ("verb", "dtype", "tensors", "error ÷ budget", "worst", "")
    return Table("Forward and backward against float64", columns, tuple(rows))


def _by_result(steps: Sequence[_Verdict]) -> Table:
    """A line per LayerNorm and training step, with pass or fail for each of its results."""
    rows = []
    for step in steps:
        marks = ["pass" if c.ok else "FAIL" for c in step.comparisons] or ["FAIL"] * len(_STEP)
        rows.append((str(step.case), *marks))
    return Table("LayerNorm training step against PyTorch", ("case", *_STEP), tuple(rows))


def _show_in_full(verdicts: Sequence[_Verdict], out: Console) -> None:
    for verdict in verdicts:
        if verdict.error is not None:
            out.print(f"FAIL {verdict.case}: {verdict.error}", style="red", soft_wrap=True)
        for c in verdict.comparisons:
            numbers = f"error {c.error:.2e}, PyTorch's {c.pytorch_error:.2e}, {c.excess:.3f} of its budget"
            style = None if c.ok else "red"
            out.print(f"{'pass' if c.ok else 'FAIL'} {verdict.case} {c.name}: {numbers}", style=style, soft_wrap=True)


def _attempts(
    grid: Sequence[_Case], compare: Callable[[_Case], list[Comparison]], description: str
) -> Iterator[_Verdict]:
    with progress_bar() as progress:
        for case in progress.track(grid, description=description):
            try:
                yield _Verdict(case, compare(case))
            except Exception as error:  # any error is a failure of this case only
                yield _Verdict(case, (), f"{type(error).__name__}: {error}")


def _compare(case: Case, device: torch.device, backend: str) -> list[Comparison]:
    with kernels_must_run(backend if case.runs_kernels else None):
        return oracle.compare(case, device, backend)


def _compare_step(case: RowNormCase, device: torch.device, backend: str) -> list[Comparison]:
    """A norm, a mean squared error and the gradients of this loss: ours, PyTorch's and float64."""
    inputs = oracle.make_inputs(case, device)
    with kernels_must_run(backend):
        ours = _step(partial(kf.layer_norm, backend=backend), inputs)
    theirs = _step(torch.nn.functional.layer_norm, inputs)
    exact = _step(partial(kf.layer_norm, backend="eager"), inputs.widened())
    expected = {name: tensor.numpy().astype(np.longdouble) for name, tensor in exact.items()}
    return [oracle.judge(name, [(ours[name], expected[name], theirs[name])]) for name in expected]


def _step(norm: Callable[..., Tensor], inputs: Tensors) -> dict[str, Tensor]:
    x, weight, bias, target = inputs.x, inputs.weight, inputs.bias, inputs.dy
    y = norm(x, weight.shape, weight, bias)
    # Summed in float64 and rounded once, so that the loss judges y, not PyTorch's order of summation.
    loss = torch.nn.functional.mse_loss(y.cpu().double(), target.cpu().double()).float()
    gradients = torch.autograd.grad(loss, (x, weight, bias))
    return dict(zip(_STEP, (y.detach(), loss.detach(), *gradients), strict=True))
