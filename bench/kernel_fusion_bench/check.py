"""Correctness before speed: results are compared with float64 at the shape that will be timed.

Only evenly spread rows are compared, to save time, the same of every sample. Cotangents are zero elsewhere, so that
other rows add nothing to the gradients of parameters.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from kernel_fusion.testing import oracle
from kernel_fusion.testing.oracle import Comparison, Reference
from kernel_fusion_bench.providers import Provider, pytorch
from kernel_fusion_bench.results import REFERENCE, Results
from kernel_fusion_bench.timing import Setup, reason
from kernel_fusion_bench.workloads import Inputs, Workload

# Merely inaccurate results, such as those from statistics in fp16, stay below this share of the largest value.
_WRONG = 0.02
# A correct dropout is further from its expected share once in 500 million checks.
_DEVIATIONS = 6


def describe(max_elements: int) -> str:
    """How results are judged, in words for the files."""
    return (
        "largest absolute error against float64; ours must stay within twice (PyTorch's error + one rounding); others "
        f"are timed while it is below {_WRONG:.0%} and one rounding of the largest value (PyTorch below all of it), "
        "and marked where it is over our budget; "
        f"compared at the timed shape on evenly spread rows of at most {max_elements} elements, dy being 0 in the "
        "rest; with dropout, everybody by the masks of its own results, and without it where they do not show them"
    )


def passing(results: Results, workload: Workload, setup: Setup, inputs: Inputs) -> dict[Provider, list[Comparison]]:
    """The providers whose results are right, with their errors; others become failures in `results`."""
    passed = {}
    providers = [provider for provider in setup.providers if provider.measures(workload)]
    for provider, verdict in check(workload, providers, inputs, setup.effort.max_checked).items():
        if isinstance(verdict, str):
            results.fail(setup, provider.name, workload, verdict)
        else:
            passed[provider] = verdict
    return passed


def check(
    workload: Workload, providers: Sequence[Provider], inputs: Inputs, max_elements: int
) -> dict[Provider, list[Comparison] | str]:
    """For each provider its comparisons with float64, or why it must not be timed."""
    judge = _Judge.of(workload.without_dropout(), inputs, max_elements)

    def verdict(provider: Provider) -> list[Comparison] | str:
        try:
            return judge.verdict(provider)
        except Exception as error:  # any failure counts against this provider only
            return reason(error)

    return {provider: verdict(provider) for provider in providers}


def spread_rows(num_rows: int, elements_per_row: int, max_elements: int) -> Tensor:
    """Indices of evenly spread rows with at most `max_elements` elements, but at least one row."""
    count = min(num_rows, max(1, max_elements // elements_per_row))
    return torch.linspace(0, num_rows - 1, count, dtype=torch.float64).round().long()


@dataclass(frozen=True)
class _Judge:
    """The references for providers of one workload.

    Attributes:
        rows: the rows that are compared.
        masked: the inputs, with zero cotangents in all other rows.
        few: the compared rows of the inputs, or all of them if results have no rows.
        reference, pytorch: results and gradients in float64, and PyTorch's.
    """

    workload: Workload
    rows: Tensor
    masked: Inputs
    few: Inputs
    reference: Reference
    pytorch: dict[str, Tensor]

    @classmethod
    def of(cls, workload: Workload, inputs: Inputs, max_elements: int) -> _Judge:
        """Make the judge of `workload`; its references are without dropout."""
        count = workload.shape[workload.row_dim]
        per_row = max(t.numel() for t in inputs.tensors) // count
        rows = spread_rows(count, max(1, per_row), max_elements).to(inputs.cotangents[0].device)
        picked = partial(_picked, workload, rows)

        def masked(cotangent: Tensor) -> Tensor:
            return torch.zeros_like(cotangent).index_copy_(workload.row_dim, rows, picked(cotangent))

        if workload.what.reduces_rows:
            few = inputs
        else:
            few = inputs.map(lambda name, t: t if name in workload.shared else picked(t))
            few = replace(few, cotangents=tuple(map(picked, inputs.cotangents)))
            inputs = replace(inputs, cotangents=tuple(map(masked, inputs.cotangents)))
        judge = cls(workload, rows, inputs, few, *workload.references(few, None))
        if workload.products("forward", inputs):
            # The vendor's library chooses kernels by size, so a smaller product has other errors.
            theirs = pytorch().results(workload, inputs)
            judge = replace(judge, pytorch={name: judge._rows_of(name, t) for name, t in theirs.items()})
        return judge

    def verdict(self, provider: Provider) -> list[Comparison] | str:
        """The comparisons with float64, or what is wrong."""
        got = provider.results(self.workload, self.masked)
        got = {name: self._rows_of(name, t) for name, t in got.items()}
        expected, theirs = self.reference, self.pytorch
        kept = self.workload.kept(got, self.few)
        if kept is not None:
            if problem := self._wrong_rate(kept):
                return problem
            expected, theirs = self.workload.references(self.few, kept)
        if self.workload.what.reduces_rows:
            index = self.rows.cpu().numpy()
            expected = {name: values if self._whole(name) else values[index] for name, values in expected.items()}
            theirs = {name: self._rows_of(name, t) for name, t in theirs.items()}
        if provider.backend is None:
            got = {name: tensor.to(theirs[name].dtype) for name, tensor in got.items()}
        names = [name for name in expected if name in got or provider.differentiable]
        comparisons = [oracle.judge(name, [(got[name], expected[name], theirs[name])]) for name in names]
        roundings = {name: torch.finfo(tensor.dtype).eps / 2 for name, tensor in got.items()}
        return _problem(provider, comparisons, expected, roundings) or comparisons

    def _whole(self, name: str) -> bool:
        """Whether a result or gradient has no rows and is compared as a whole."""
        return name[1:] in self.workload.shared or (
            self.workload.what.reduces_rows and name in self.workload.what.results
        )

    def _rows_of(self, name: str, t: Tensor) -> Tensor:
        return t.detach() if self._whole(name) else _picked(self.workload, self.rows, t.detach())

    def _wrong_rate(self, kept: Tensor) -> str | None:
        """Say if dropout kept too many or too few of the elements where that shows."""
        visible = self.workload.kept(self.pytorch, self.few)
        assert visible is not None
        count, expected = int(visible.sum()), 1 - self.workload.what.dropout_p
        share = float((kept & visible).sum()) / count
        if abs(share - expected) <= _DEVIATIONS * math.sqrt(expected * (1 - expected) / count):
            return None
        return f"dropout kept {share:.4f} of {count} elements, not {expected:.4f}"


def _picked(workload: Workload, rows: Tensor, t: Tensor) -> Tensor:
    """These rows of every sample; what the rows of a sample share stays as it is."""
    dim = workload.row_dim
    return t.index_select(dim, rows) if t.shape[dim] == workload.shape[dim] else t


def _problem(
    provider: Provider,
    comparisons: list[Comparison],
    expected: Mapping[str, oracle.Array],
    roundings: Mapping[str, float],
) -> str | None:
    if provider.backend is not None:
        wrong = [f"{c.name} is {c.excess:.3g} times its error budget off" for c in comparisons if not c.ok]
    else:
        # PyTorch defines the budgets and is never wrong by them; on a CPU it sums bf16 weight gradients in bf16.
        share = _WRONG if provider.name != REFERENCE else 1.0
        limits = {name: (share + roundings[name]) * float(np.abs(expected[name]).max()) for name in roundings}
        # Negated, so that a NaN error is wrong too.
        wrong = [f"{c.name} is off by {c.error:.3g}" for c in comparisons if not c.error <= limits[c.name]]
    return "; ".join(wrong) or None
