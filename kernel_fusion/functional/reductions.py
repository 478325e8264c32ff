"""Reductions of a pointwise function, in one read."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kernel_fusion.core import checks
from kernel_fusion.functional import interop
from kernel_fusion.operators.dispatch import operator

_Dims = int | Sequence[int] | None


def sum_squared(
    input: Tensor,
    dim: _Dims = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
    backend: str | None = None,
) -> Tensor:
    r"""The sum of squares over some dimensions, in one read.

    .. math:: y = \sum_i x_i^2

    Args:
        input: x, any shape and strides; float16, bfloat16, float32 or float64.
        dim: a dimension, several, or None for all.
        keepdim: keep the reduced dimensions, with size 1.
        dtype: of the result; None means the input's. Results in fp16 and bf16 overflow or lose digits sooner than the
            float32 in which they are summed.
        backend: "cuda", "triton", "cpu", "eager", or None for the automatic choice.

    Returns:
        Tensor; summed in float32 (float64 for float64 inputs) in an order that the shape alone decides.

    Raises:
        IndexError, RuntimeError: dimensions that don't exist or occur twice, in PyTorch's words.
        ValueError, BackendUnavailableError: as for :func:`kernel_fusion.add_act`.

    Example:
        >>> import torch, kernel_fusion as kf
        >>> x = torch.randn(4, 8)
        >>> torch.allclose(kf.sum_squared(x, dim=-1), x.square().sum(-1))
        True
    """
    return _reduce("sum_squared", input, dim, keepdim, dtype, backend)


def mean_abs(
    input: Tensor,
    dim: _Dims = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
    backend: str | None = None,
) -> Tensor:
    r"""The mean of absolute values over some dimensions, in one read.

    .. math:: y = \frac{1}{n} \sum_i |x_i|

    Args, returns, raises: as for :func:`sum_squared`. Over no elements the mean is NaN, as in `torch.mean`.

    Example:
        >>> import torch, kernel_fusion as kf
        >>> x = torch.randn(4, 8)
        >>> torch.allclose(kf.mean_abs(x, dim=0), x.abs().mean(0))
        True
    """
    return _reduce("mean_abs", input, dim, keepdim, dtype, backend)


def _reduce(
    verb: str, input: Tensor, dim: _Dims, keepdim: bool, dtype: torch.dtype | None, backend: str | None
) -> Tensor:
    if not interop.is_tensor(input):
        options = {"keepdim": keepdim, "dtype": dtype, "backend": backend}
        return interop.served(globals()[verb], input, dim, **options)  # type: ignore[no-any-return]
    try:
        dims = [] if dim is None else [dim] if isinstance(dim, int) else list(dim)
        result: Tensor = operator(verb, "reduce", backend, input)(input, dims, keepdim, verb, dtype)
    except checks.REFUSALS as error:
        checks.explain(verb, error, {"input": input}, dim=dim, keepdim=keepdim, dtype=dtype)
        raise
    return result
