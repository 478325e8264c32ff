"""The Triton backend: every verb on kernels that run wherever Triton does.

This file imports no Triton. `operators` does, when first needed (`kernel_fusion.operators.fallback`), and defines
`torch.ops.kernel_fusion.triton_*`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernel_fusion.core.spec import compute_dtype


def serve(name: str, *args: Any) -> Any:
    """The verb `name` on the Triton kernels, with an operator's arguments."""
    if name not in ("layer_norm", "rms_norm"):
        return getattr(torch.ops.kernel_fusion, f"triton_{name}").default(*args)
    input, num_dims, weight, bias, eps, offset, out_dtype = args
    if eps is None:
        eps = torch.finfo(compute_dtype(input.dtype)).eps
    if out_dtype is None and under_autocast(input):
        out_dtype = torch.float32
    staged = torch.ops.kernel_fusion.triton_staged_row_norm.default
    rms = name == "rms_norm"
    norm = num_dims, weight, bias, eps, offset, out_dtype, rms
    return staged(input, None, *norm)[0]


def under_autocast(input: Tensor) -> bool:
    """Whether a norm returns float32, as PyTorch's do under autocast on a GPU."""
    device = input.device.type
    narrow = input.dtype in (torch.float16, torch.bfloat16)
    return narrow and device != "cpu" and torch.is_autocast_enabled(device)
