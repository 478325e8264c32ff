"""The oracle: compares every result with a float64 evaluation of the eager definition.

It also exports the names of the modules beside it, which define cases and the budget.
"""

from __future__ import annotations

import torch

from kernel_fusion.testing.attention import ScoresCase as ScoresCase
from kernel_fusion.testing.attention import SoftmaxCase as SoftmaxCase
from kernel_fusion.testing.budget import Array as Array
from kernel_fusion.testing.budget import Comparison as Comparison
from kernel_fusion.testing.budget import Reference as Reference
from kernel_fusion.testing.budget import judge as judge
from kernel_fusion.testing.case import Case as Case
from kernel_fusion.testing.case import Results, with_gradients
from kernel_fusion.testing.case import Tensors as Tensors
from kernel_fusion.testing.case import lay_out as lay_out
from kernel_fusion.testing.group_norms import GroupNormCase as GroupNormCase
from kernel_fusion.testing.losses import CrossEntropyCase as CrossEntropyCase
from kernel_fusion.testing.losses import LinearCrossEntropyCase as LinearCrossEntropyCase
from kernel_fusion.testing.losses import TokenLogprobCase as TokenLogprobCase
from kernel_fusion.testing.pointwise import PointwiseCase as PointwiseCase
from kernel_fusion.testing.pointwise import ReduceCase as ReduceCase
from kernel_fusion.testing.rotary import RotaryCase as RotaryCase
from kernel_fusion.testing.row_norms import GatedNormCase as GatedNormCase
from kernel_fusion.testing.row_norms import ModulatedNormCase as ModulatedNormCase
from kernel_fusion.testing.row_norms import RowNormCase as RowNormCase
from kernel_fusion.testing.row_norms import StagedNormCase as StagedNormCase
from kernel_fusion.testing.row_norms import default_eps as default_eps
from kernel_fusion.testing.row_norms import tensors as tensors


def make_inputs(case: Case, device: torch.device | str, seed: int = 0) -> Tensors:
    """Return random tensors for `case`, with the same values on every device."""
    return case.make_inputs(device, seed)


def run(case: Case, inputs: Tensors, backend: str | None) -> Results:
    """Return the results and the gradients of our function on `backend`, by name."""
    return with_gradients(case.ours(inputs, backend), inputs)


def pytorch(case: Case, inputs: Tensors) -> Results:
    """Return the results and the gradients of PyTorch's own calls, by name."""
    return with_gradients(case.pytorch(inputs), inputs)


def reference(case: Case, inputs: Tensors) -> Reference:
    """Return the results and the gradients of the eager definition in float64, or for float64 in long double."""
    if any(t is not None and t.dtype == torch.float64 for t in vars(inputs).values()):
        return case.long_double(inputs)
    wide = inputs.widened()
    return {name: tensor.numpy() for name, tensor in with_gradients(case.definition(wide), wide).items()}


def compare(case: Case, device: torch.device | str, backend: str | None, seed: int = 0) -> list[Comparison]:
    """Run `case` on `backend` and judge every result and every gradient.

    The budget needs PyTorch's largest error, but a draw shows only a sample of it. If a result is over budget, more
    draws are added until the smallest result has 2048 elements, and all are judged together. An error that PyTorch's
    call never makes stays over budget.
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
