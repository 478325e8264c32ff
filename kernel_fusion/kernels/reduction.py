"""Row reductions. `kernel_fusion.kernels` says what all tensors must be, and what is raised."""

from __future__ import annotations

from torch import Tensor

from kernel_fusion.functional import mean_abs as _mean_abs
from kernel_fusion.functional import sum_squared as _sum_squared
from kernel_fusion.functional.named import documented
from kernel_fusion.kernels.demands import admit

_OVER = " over one dimension of a contiguous floating-point tensor."
_ARGUMENTS = """Args:
    input: x.
    dim: the dimension, an int; it is not kept.

Returns:
    Tensor without dimension `dim`, of the input's dtype, detached.

Raises:
    TypeError: `dim` is not an int; else as `kernel_fusion.kernels` says."""


@documented("sum_squared", "The sum of squares" + _OVER, _ARGUMENTS)
def sum_squared(input: Tensor, dim: int = -1) -> Tensor:
    backend, (input,) = admit("reduction.sum_squared", input=input)
    return _sum_squared(input, _checked_dim("sum_squared", dim), backend=backend)


@documented("mean_abs", "The mean of absolute values" + _OVER, "Args, returns, raises: as :func:`sum_squared`.")
def mean_abs(input: Tensor, dim: int = -1) -> Tensor:
    backend, (input,) = admit("reduction.mean_abs", input=input)
    return _mean_abs(input, _checked_dim("mean_abs", dim), backend=backend)


def _checked_dim(kernel: str, dim: object) -> int:
    # Several dimensions can lie apart, and would be brought together by a copy.
    if not isinstance(dim, int):
        raise TypeError(f"`kernels.reduction.{kernel}`: `dim` must be one dimension, an int, got {dim!r}")
    return dim
