"""Shared by the tests of distributed tensors: pools of ranks as fixtures, and tensors spread over them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from ranks import Ranks, mesh
from support import Target
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, distribute_tensor

# PyTorch's interleaved shards, and second derivatives of its `to_local` and `from_local`, are not older.
since_2_13 = pytest.mark.skipif(torch.__version__ < "2.13", reason="PyTorch 2.13 brings what it needs")

_DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]


@pytest.fixture(scope="module", params=_DEVICES)
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    """Two processes, or one on each GPU."""
    yield from _pool(2 if request.param == "cpu" else torch.cuda.device_count(), request.param)


@pytest.fixture(scope="module", params=_DEVICES)
def four_ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    """Four processes, or GPUs."""
    if request.param == "cuda" and torch.cuda.device_count() < 4:
        pytest.skip("needs four GPUs")
    yield from _pool(4, request.param)


def _pool(world: int, device: str) -> Iterator[Ranks]:
    pool = Ranks(world, device)
    yield pool
    pool.stop()


def target(device: str) -> Target:
    """The kernels of the device."""
    return Target(device, device)


def spread(tensor: Tensor, *placements: Placement, of: DeviceMesh | None = None) -> DTensor:
    """A leaf of the same values, which all ranks have, spread over a mesh (default: all ranks in one dimension)."""
    result = distribute_tensor(tensor.detach(), of or mesh(tensor.device.type), placements, src_data_rank=None)
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
