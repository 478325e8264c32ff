"""The sum of squares, and the mean of absolute values, over any dimensions."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from kernel_fusion.core.checks import FLOATING, not_float8
from kernel_fusion.core.spec import compute_dtype

# (x, dims, keepdim, dtype) -> result
_KINDS: dict[str, Callable[..., Tensor]] = {
    "sum_squared": lambda x, dim, keepdim, dtype: x.square().sum(dim, keepdim, dtype=dtype),
    "mean_abs": lambda x, dim, keepdim, dtype: x.abs().mean(dim, keepdim, dtype=dtype),
}


def reduce(input: Tensor, dim: Sequence[int], keepdim: bool, kind: str, dtype: torch.dtype | None) -> Tensor:
    """The definition; no `dim` means all, as in `torch.sum`."""
    reduction, result = _KINDS[kind], dtype or input.dtype
    if input.dtype not in FLOATING or result not in FLOATING:
        not_float8("reduce", input.dtype, result)
        return reduction(input, dim, keepdim, dtype)
    wide = compute_dtype(input.dtype if input.dtype == torch.float64 else result)
    return reduction(input.to(wide), dim, keepdim, None).to(result)
