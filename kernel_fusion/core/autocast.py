"""What PyTorch's norms return under autocast on a GPU.

The installed PyTorch is asked, by norm and kind of device: 2.12 began to run `F.rms_norm` in float32 under CUDA's
autocast.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

_KEYS = {"cuda": "AutocastCUDA", "xpu": "AutocastXPU"}


@cache
def widens(name: str, device: str) -> bool:
    """Whether autocast on this kind of device runs PyTorch's function of this name in float32."""
    key = _KEYS.get(device)
    return key is not None and torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", key)


def widened(input: Tensor, name: str) -> torch.dtype | None:
    """float32 where autocast is on and makes PyTorch's function `name` of this input return that; else None."""
    device = input.device.type
    narrow = input.dtype in (torch.float16, torch.bfloat16)
    if narrow and device in _KEYS and torch.is_autocast_enabled(device):
        return torch.float32 if widens(name, device) else None
    return None


def norm_dtype(input: Tensor, rms: bool) -> torch.dtype | None:
    """float32 where autocast makes PyTorch's row norm of this input return that; else None."""
    return widened(input, "rms_norm" if rms else "layer_norm")
