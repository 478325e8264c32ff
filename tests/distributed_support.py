"""Shared by the tests of distributed tensors: tensors spread over ranks. conftest.py has the pools of ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ranks import mesh
from support import Target
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, distribute_tensor

# PyTorch's interleaved shards, and second derivatives of its `to_local` and `from_local`, are not older.
since_2_13 = pytest.mark.skipif(torch.__version__ < "2.13", reason="PyTorch 2.13 brings what it needs")


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
