"""The operations of the suite `images`: GroupNorm with its neighbours, and PyTorch's chains beside them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

import kernel_fusion as kf
from kernel_fusion_bench.suite import Shape
from kernel_fusion_bench.workloads import EPS, Argument, Dropout, Operation

GROUPS = 32
# Batch, channels, height and width: three of the decoder of an autoencoder of images, and one of a diffusion model.
SIZES = ((1, 128, 1024, 1024), (1, 256, 512, 512), (1, 512, 128, 128), (2, 320, 128, 128))


def _arguments(shape: tuple[int, ...], dtype: torch.dtype) -> list[Argument]:
    affine = {"weight": 1.0, "bias": 0.5}
    return [
        Argument("x", shape, dtype, 0.5, 2.0),
        *(Argument(name, shape[1:2], dtype, mean, shared=True) for name, mean in affine.items()),
    ]


def _group_norm(name: str, activation: str | None) -> Operation:
    def pytorch(_: Dropout, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        y = F.group_norm(x, GROUPS, weight, bias, EPS)
        return y if activation is None else F.silu(y)

    def fused(x: Tensor, weight: Tensor, bias: Tensor, p: float, backend: str | None) -> Tensor:
        return kf.group_norm(x, GROUPS, weight, bias, EPS, activation=activation, backend=backend)

    return Operation(name, "group_norm", _arguments, pytorch, fused, row_dims=3)


OPERATIONS = (_group_norm("group_norm", None), _group_norm("group_norm+silu", "silu"))


def shapes(share: int) -> list[Shape]:
    """All sizes in both layouts, of one in `share` positions."""
    found = []
    for *outer, height, width in SIZES:
        sizes = (*outer, height // share, width)
        name = "x".join(map(str, sizes))
        found += [Shape(name, sizes), Shape(f"{name}, channels last", sizes, "channels-last")]
    return found
