"""CUDA's autocast, imitated for examinations and followed in calls."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from kernel_fusion.core.autocast import widens

HALF = (torch.bfloat16, torch.float16)


class CudaAutocast(TorchFunctionMode):
    """Applies CUDA autocast's rules for the functions that norms use to CPU tensors."""

    WIDENED = frozenset(
        {"pow", "__pow__", "__rpow__", "square", "sum", "prod", "cumsum", "norm", "vector_norm", "rsqrt", "reciprocal"}
        | {"__rtruediv__", "exp", "log", "softplus", "softmax", "layer_norm", "group_norm"}
        | ({"rms_norm"} if widens("rms_norm", "cuda") else set())
    )

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function, with its tensors in fp32 if autocast would widen them."""
        if getattr(func, "__name__", "") in self.WIDENED:
            args = tuple(_widened(value) for value in args)
            kwargs = {name: _widened(value) for name, value in (kwargs or {}).items()}
        return func(*args, **(kwargs or {}))


def _widened(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.dtype in HALF else value


def widened(x: Tensor) -> Tensor:
    """The tensor in fp32 under CUDA's autocast."""
    return x.float() if x.is_cuda and torch.is_autocast_enabled("cuda") else x
