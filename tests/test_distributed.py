"""Operators on DTensors: each rank runs our kernels on its part, and nothing is sent that need not be.

The ranks are processes with gloo, two of them for the quick tests; marked `cuda`, the same runs on all GPUs with NCCL.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import Ranks, mesh
from support import Draw, Target, assert_draws_as_accurate
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from verbs import VERBS, Verb, gradients, results

import kernel_fusion as kf

_ROWS, _COLS = 5, 16  # an uneven number of rows for any even number of ranks
_DRAWS = 8  # PyTorch's largest error among a few elements says little


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    """Two processes, or one on each GPU."""
    pool = Ranks(2 if request.param == "cpu" else torch.cuda.device_count(), request.param)
    yield pool
    pool.stop()


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def four_ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    """Four processes, or GPUs."""
    if request.param == "cuda" and torch.cuda.device_count() < 4:
        pytest.skip("needs four GPUs")
    pool = Ranks(4, request.param)
    yield pool
    pool.stop()


def target(device: str) -> Target:
    """The kernels of the device."""
    return Target(device, device)


def spread(tensor: Tensor, *placements: Placement, of: Any = None) -> DTensor:
    """A leaf of the same values, the same on all ranks, spread over a mesh (default: all ranks)."""
    of = of or mesh(tensor.device.type)
    result = distribute_tensor(tensor.detach(), of, placements, src_data_rank=None)
    return result.requires_grad_(tensor.requires_grad)


def whole(tensor: Any) -> Tensor:
    """All of a DTensor."""
    assert isinstance(tensor, DTensor), tensor
    return tensor.full_tensor()


def cotangents_like(ys: list[Any], dys: list[Tensor]) -> list[DTensor]:
    """The cotangents spread as the results are; what is to be added up is the same on all ranks."""
    return [
        spread(dy, *(Replicate() if p.is_partial() else p for p in y.placements), of=y.device_mesh)
        for y, dy in zip(ys, dys, strict=True)
    ]


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
