"""The Triton backend: every function of the library by kernels that run on any GPU that Triton knows.

This file does not import Triton, so that the package can be imported without it. `operators` does. It is imported when
`kernel_fusion.operators.fallback` first needs it, and defines `torch.ops.kernel_fusion.triton_*`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernel_fusion.core.autocast import norm_dtype
from kernel_fusion.core.spec import compute_dtype


def serve(name: str, *args: Any) -> Any:
    """Return the results of the operator `name`, computed by Triton kernels from the operator's arguments `args`."""
    if name == "staged_row_norm":
        return _staged_row_norm(*args)
    if name not in ("layer_norm", "rms_norm"):
        return getattr(torch.ops.kernel_fusion, f"triton_{name}").default(*args)
    input, num_dims, weight, bias, eps, offset, out_dtype = args
    if eps is None:
        eps = torch.finfo(compute_dtype(input.dtype)).eps
    norm = num_dims, weight, bias, eps, offset, out_dtype, name == "rms_norm"
    return _staged_row_norm(input, None, *norm)[0]


def _staged_row_norm(*args: Any) -> tuple[Tensor, Tensor]:
    """The operator of the norms, with the output dtype that autocast asks for if the caller chose none."""
    out_dtype, rms = args[7:9]
    args = *args[:7], out_dtype or norm_dtype(args[0], rms), *args[8:]
    return torch.ops.kernel_fusion.triton_staged_row_norm.default(*args)  # type: ignore[no-any-return]
