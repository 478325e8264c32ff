"""The oracle: every result is compared with a float64 evaluation of the eager definition.

Here a case is run and judged; what a case is, and the budget, are in the modules beside this one, whose names can all
be imported from here.
"""

from __future__ import annotations

from typing import Any

import torch

from kernel_fusion.testing.attention import ScoresCase, SoftmaxCase
from kernel_fusion.testing.budget import Array, Comparison, Reference, judge
from kernel_fusion.testing.case import Case, Results, Tensors, lay_out, with_gradients
from kernel_fusion.testing.pointwise import PointwiseCase
from kernel_fusion.testing.reductions import ReduceCase
from kernel_fusion.testing.row_norms import GatedNormCase, Inputs, RowNormCase, StagedNormCase, default_eps

__all__ = [
    "Array",
    "Case",
    "Comparison",
    "GatedNormCase",
    "Inputs",
    "PointwiseCase",
    "ReduceCase",
    "Reference",
    "RowNormCase",
    "ScoresCase",
    "SoftmaxCase",
    "StagedNormCase",
    "Tensors",
    "compare",
    "default_eps",
    "judge",
    "lay_out",
    "make_inputs",
    "pytorch",
    "reference",
    "run",
]


def make_inputs(case: Case, device: torch.device | str, seed: int = 0) -> Any:
    """Random tensors for `case`, the same values on every device."""
    return case.make_inputs(device, seed)


def run(case: Case, inputs: Any, backend: str | None) -> Results:
    """The results and the gradients, by our verb on `backend`."""
    return with_gradients(case.ours(inputs, backend), inputs)


def pytorch(case: Case, inputs: Any) -> Results:
    """The results and the gradients by PyTorch's own calls."""
    return with_gradients(case.pytorch(inputs), inputs)


def reference(case: Case, inputs: Any) -> Reference:
    """The results and the gradients in float64 by the eager definition, or in long double where a tensor is float64."""
    if any(t is not None and t.dtype == torch.float64 for t in vars(inputs).values()):
        return case.long_double(inputs)
    wide = inputs.widened()
    return {name: tensor.numpy() for name, tensor in with_gradients(case.definition(wide), wide).items()}


def compare(case: Case, device: torch.device | str, backend: str | None, seed: int = 0) -> list[Comparison]:
    """Run `case` on `backend` and judge every result and every gradient.

    The budget wants the largest error that PyTorch's call makes, and a draw shows no more than a sample of it. The
    errors of a sum grow with its partial sums, so few of its elements can have the largest error at all, and in one
    draw of 255 sums PyTorch's largest and ours, drawn from one distribution, differ by a factor of 2 once in 500
    times. So where a result is over budget, draws are added until the smallest result has 2048 elements, and all of
    them are judged together: an error that PyTorch's call does not make remains over budget, in the first draws too.
    """
    draws: list[tuple[Reference, Results, Results]] = []

    def judged(count: int) -> list[Comparison]:
        while len(draws) < count:
            inputs = make_inputs(case, device, seed + len(draws))
            draws.append((reference(case, inputs), pytorch(case, inputs), run(case, inputs, backend)))
        return [
            judge(name, [(ours[name], wide[name], theirs[name]) for wide, theirs, ours in draws])
            for name in draws[0][0]
        ]

    comparisons = judged(case.draws)
    if all(comparison.ok for comparison in comparisons):
        return comparisons
    smallest = min(expected.size for expected in draws[0][0].values())
    return judged(case.at_most(2048 // max(1, smallest)))
