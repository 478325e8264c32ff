"""The verbs: what a user calls. Each checks the shape, then hands over to one operator of `torch.ops.kernel_fusion`.

The automatic choice of backend costs nothing here: PyTorch's dispatcher makes it, by the tensor's device. Only an
explicit `backend=` (or `use_backend`), and inputs that are not plain tensors, leave the straight line.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling
from torch.nn import Buffer, Parameter

from kernel_fusion.backends.select import call
from kernel_fusion.config import state
from kernel_fusion.native import schemas

_PLAIN_TENSORS = frozenset({Tensor, Parameter, Buffer})

# The operators as C++ functions. Calling them through their Python object costs 0.3 µs more, and only Dynamo needs it.
_layer_norm: Callable[..., Tensor] = torch.ops.kernel_fusion.layer_norm.default._op
_rms_norm: Callable[..., Tensor] = torch.ops.kernel_fusion.rms_norm.default._op


def layer_norm(
    input: Tensor,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    weight_offset: float = 0.0,
    out_dtype: torch.dtype | None = None,
    backend: str | None = None,
) -> Tensor:
    r"""Layer normalisation over the last dimensions, in one read and one write.

    .. math:: y = \frac{x - \mathrm{E}[x]}{\sqrt{\mathrm{Var}[x] + \epsilon}} \cdot (\mathrm{offset} + w) + b

    with mean and (biased) variance of each row, a row being the last ``len(normalized_shape)`` dimensions.

    Args:
        input: shape (\*, \*normalized_shape); float16, bfloat16, float32 or float64; any strides (no copy where the
            normalised dimensions are contiguous and the others have at most three different strides).
        normalized_shape: the sizes of the dimensions to normalise over, or one int for the last dimension alone.
        weight: w, shape `normalized_shape`, any of fp16/bf16/fp32 for such inputs (float64 for float64), or None for 1.
        bias: b, likewise, or None for 0.
        eps: added to the variance.
        weight_offset: added to w in the compute type (1.0 for weights stored around zero); needs `weight`.
        out_dtype: dtype of the result. None: float32 under CUDA autocast, else the input's.
        backend: "cuda", "cpu", "eager", or None for the automatic choice; see `kernel_fusion.explain`.

    Returns:
        Tensor of the input's shape, contiguous. Accumulated in float32 (float64 for float64 input); a row's result
        does not depend on the other rows.

    Raises:
        RuntimeError: shapes, devices or dtypes that don't fit, in PyTorch's words where it has some.
        ValueError: `weight_offset` without `weight`, or an unknown `backend`.
        BackendUnavailableError: `backend` was given and cannot serve this call.

    Source: Ba, Kiros, Hinton: Layer Normalization, arXiv:1607.06450; `torch.nn.functional.layer_norm`.

    Example:
        >>> import torch, kernel_fusion as kf
        >>> x = torch.randn(4, 16)
        >>> y = kf.layer_norm(x, (16,), torch.ones(16), torch.zeros(16))
        >>> torch.allclose(y, torch.nn.functional.layer_norm(x, (16,)), atol=1e-6)
        True
    """
    if backend is None and state.backend is None:
        num_dims = _num_normalized_dims(input, normalized_shape)
        if num_dims:
            operator = schemas.layer_norm if is_dynamo_compiling() else _layer_norm
            if weight_offset == 0.0 and out_dtype is None:  # two arguments fewer to convert, 0.1 µs
                return operator(input, num_dims, weight, bias, eps)
            return operator(input, num_dims, weight, bias, eps, weight_offset, out_dtype)
    return call("layer_norm", backend, input, normalized_shape, weight, bias, eps, weight_offset, out_dtype)


def rms_norm(
    input: Tensor,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    bias: Tensor | None = None,
    weight_offset: float = 0.0,
    out_dtype: torch.dtype | None = None,
    backend: str | None = None,
) -> Tensor:
    r"""Root-mean-square normalisation over the last dimensions, in one read and one write.

    .. math:: y = \frac{x}{\sqrt{\mathrm{E}[x^2] + \epsilon}} \cdot (\mathrm{offset} + w) + b

    Args:
        input: shape (\*, \*normalized_shape), as for :func:`layer_norm`.
        normalized_shape: the sizes of the dimensions to normalise over, or one int for the last dimension alone.
        weight: w, shape `normalized_shape`, as for :func:`layer_norm`, or None for 1.
        eps: added to the mean square; None means the machine epsilon of the compute type (float32, or float64 for
            float64 input), as in PyTorch.
        bias: b, shape `normalized_shape`, or None for 0.
        weight_offset: added to w in the compute type (1.0 as in Gemma); needs `weight`.
        out_dtype: dtype of the result. None: float32 under CUDA autocast, else the input's.
        backend: "cuda", "cpu", "eager", or None for the automatic choice.

    Returns:
        Tensor of the input's shape, contiguous. Accumulated in float32 (float64 for float64 input).

    Raises:
        RuntimeError, ValueError, BackendUnavailableError: as for :func:`layer_norm`.

    Source: Zhang, Sennrich: Root Mean Square Layer Normalization, arXiv:1910.07467; `torch.nn.functional.rms_norm`.

    Example:
        >>> import torch, kernel_fusion as kf
        >>> x = torch.randn(4, 16)
        >>> torch.allclose(kf.rms_norm(x, 16), torch.nn.functional.rms_norm(x, (16,)), atol=1e-6)
        True
    """
    if backend is None and state.backend is None:
        num_dims = _num_normalized_dims(input, normalized_shape)
        if num_dims:
            operator = schemas.rms_norm if is_dynamo_compiling() else _rms_norm
            if weight_offset == 0.0 and out_dtype is None:  # two arguments fewer to convert, 0.1 µs
                return operator(input, num_dims, weight, bias, eps)
            return operator(input, num_dims, weight, bias, eps, weight_offset, out_dtype)
    return call("rms_norm", backend, input, normalized_shape, weight, bias, eps, weight_offset, out_dtype)


def _num_normalized_dims(input: Tensor, normalized_shape: int | Sequence[int]) -> int:
    """How many dimensions `normalized_shape` has, or 0 where anything about the call needs a closer look."""
    if type(input) not in _PLAIN_TENSORS or input.is_nested:
        return 0
    shape = input.shape
    expected = (normalized_shape,) if isinstance(normalized_shape, int) else normalized_shape
    # One dimension, the usual case, without slicing the shape: that costs 0.2 µs.
    if len(expected) == 1:
        return 1 if shape and isinstance(expected[0], int) and shape[-1] == expected[0] else 0
    return len(expected) if shape[len(shape) - len(expected) :] == tuple(expected) else 0
