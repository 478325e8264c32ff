"""Correctness before speed: results at the shape that will be timed are compared with float64.

Comparing all elements of a large tensor would take longer than timing it. So rows spread evenly over the tensor are
compared, the first and the last among them, and dy is zero in the others: they add nothing to dweight and dbias.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from kernel_fusion.bench.providers import Provider
from kernel_fusion.bench.results import Results
from kernel_fusion.bench.suites import Workload
from kernel_fusion.bench.timing import Setup, reason
from kernel_fusion.testing import oracle
from kernel_fusion.testing.oracle import Comparison, Inputs, RowNormCase

# What is merely inaccurate, such as statistics kept in 16 bits, stays well below this share of the largest value.
_WRONG = 0.02


def describe(max_elements: int) -> str:
    """How results are judged, in words for the files."""
    return (
        "largest absolute error against float64; ours must stay within twice (PyTorch's error + one rounding); others "
        f"are timed while it is below {_WRONG:.0%} of the largest value, and marked where it is over our budget; "
        f"compared at the timed shape on evenly spread rows of at most {max_elements} elements, dy being 0 in the rest"
    )


def passing(results: Results, workload: Workload, setup: Setup, inputs: Inputs) -> dict[Provider, list[Comparison]]:
    """The providers whose results are right, with their errors; the others become failures in `results`."""
    passed = {}
    for provider, verdict in check(workload.case, setup.providers, inputs, setup.effort.max_checked).items():
        if isinstance(verdict, str):
            results.fail(provider.name, workload, verdict)
        else:
            passed[provider] = verdict
    return passed


def check(
    case: RowNormCase, providers: Sequence[Provider], inputs: Inputs, max_elements: int
) -> dict[Provider, list[Comparison] | str]:
    """For each provider its comparisons with float64, or why it must not be timed."""
    rows = spread_rows(case, max_elements).to(inputs.x.device)

    def picked(t: Tensor) -> Tensor:
        return t.detach().reshape(-1, *case.normalized_shape)[rows]

    part = replace(case, shape=(len(rows), *case.normalized_shape), layout="contiguous")
    few = replace(inputs, x=picked(inputs.x).requires_grad_(), dy=picked(inputs.dy))
    expected, theirs = oracle.reference(part, few), oracle.pytorch(part, few)
    dy = torch.zeros_like(inputs.dy)
    dy.view(-1, *case.normalized_shape)[rows] = few.dy
    masked = replace(inputs, dy=dy)

    def verdict(provider: Provider) -> list[Comparison] | str:
        try:
            got = provider.results(case, masked)
            got |= {name: picked(got[name]) for name in ("y", "dx")}
            if provider.backend is None:
                got = {name: tensor.to(theirs[name].dtype) for name, tensor in got.items()}
            comparisons = [oracle.judge(name, [(got[name], expected[name], theirs[name])]) for name in expected]
        except Exception as error:  # whatever it is, it speaks against this provider alone
            return reason(error)
        return _problem(provider, comparisons, expected) or comparisons

    return {provider: verdict(provider) for provider in providers}


def spread_rows(case: RowNormCase, max_elements: int) -> Tensor:
    """Indices of evenly spread rows that have at most `max_elements` elements; one row at least, all if they fit."""
    rows = math.prod(case.shape) // math.prod(case.normalized_shape)
    count = min(rows, max(1, max_elements // math.prod(case.normalized_shape)))
    return torch.linspace(0, rows - 1, count, dtype=torch.float64).round().long()


def _problem(provider: Provider, comparisons: list[Comparison], expected: oracle.Reference) -> str | None:
    if provider.backend is not None:
        wrong = [f"{c.name} is {c.excess:.3g} times its error budget off" for c in comparisons if not c.ok]
    else:
        scales = {name: float(np.abs(values).max()) for name, values in expected.items()}
        # Negated, so that an error that is NaN is wrong too.
        wrong = [f"{c.name} is off by {c.error:.3g}" for c in comparisons if not c.error <= _WRONG * scales[c.name]]
    return "; ".join(wrong) or None
