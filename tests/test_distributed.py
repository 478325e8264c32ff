"""Operators on DTensors: each rank runs our kernels on its part, and nothing is sent that need not be.

The ranks are processes with gloo, two of them for the quick tests; marked `cuda`, the same runs on all GPUs with NCCL.
"""

from __future__ import annotations

import pytest
import torch
from distributed_support import cotangents_like, ranks, spread, target, whole
from ranks import Ranks
from support import Draw, Target, assert_draws_as_accurate
from torch import Tensor
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode
from verbs import VERBS, Verb, gradients, results

__all__ = ["ranks"]

_ROWS, _COLS = 5, 16  # an uneven number of rows for any even number of ranks
_DRAWS = 8  # PyTorch's largest error among a few elements says little


def _row_dims(verb: Verb) -> list[int | None]:
    """For each argument, the dimension that has as many elements as there are rows."""
    shapes = [(shape(_ROWS, _COLS), shape(_ROWS + 1, _COLS)) for shape in verb.arguments.values()]
    return [next((d for d, (m, n) in enumerate(zip(a, b, strict=True)) if m != n), None) for a, b in shapes]


def _check_rows(device: str, name: str) -> None:
    assert_draws_as_accurate([_draw(VERBS[name], target(device)) for _ in range(_DRAWS)])


def _draw(verb: Verb, kernels: Target) -> Draw:
    """One call of random arguments, whose rows are spread: results and gradients, and what they are compared with."""
    plain = verb.leaves(kernels, _ROWS, _COLS)
    dims = _row_dims(verb)
    spreads = [spread(t, Replicate() if d is None else Shard(d)) for t, d in zip(plain, dims, strict=True)]
    expected = results(verb.on(kernels)(*plain))
    dys = [torch.randn_like(y) for y in expected]
    with CommDebugMode() as collectives:
        with verb.ran(kernels, 1, 1):
            ys = results(verb.ours(*spreads))
            grads = gradients(ys, list(spreads), cotangents_like(ys, dys))
    assert collectives.get_total_counts() == 0, collectives.get_comm_counts()
    assert [grad.placements for grad in grads] == [(Partial() if dim is None else Shard(dim),) for dim in dims]
    for y, same in zip(ys, expected, strict=True):
        if y.placements[0].is_shard() and verb.exact:
            assert torch.equal(whole(y), same)

    def pytorch(*tensors: Tensor) -> list[Tensor]:
        outputs = verb.pytorch(*tensors)
        return [*results(outputs), *gradients(outputs, list(tensors), dys)]

    return [*map(whole, ys), *map(whole, grads)], pytorch, tuple(plain)


@pytest.mark.parametrize("name", VERBS)
def test_rows_stay_where_they_are(ranks: Ranks, name: str) -> None:
    """Ranks with some of the rows run the kernels of their device and send nothing; what they share gets partial sums."""
    ranks(_check_rows, name)
