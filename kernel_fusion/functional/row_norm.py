"""The row norms, with the stages around them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from kernel_fusion.backends import eager
from kernel_fusion.backends.availability import is_dtensor, is_foreign
from kernel_fusion.config import check_backend_name, state
from kernel_fusion.core import checks
from kernel_fusion.core.quantize import Quantize
from kernel_fusion.functional import interop
from kernel_fusion.functional.results import NormOutput
from kernel_fusion.functional.staged_norm import (
    Norm,
    as_given,
    ends_with,
    explain_norm,
    num_normalized_dims,
    served,
    sizes,
    staged,
)
from kernel_fusion.operators import schemas
from kernel_fusion.operators.dispatch import operator
from kernel_fusion.operators.jagged import has_rows_of

# The operators, and the C++ functions behind them: calling those is faster, and only Dynamo needs the operators.
_LAYER_NORM, _RMS_NORM = (schemas.overload(name) for name in ("layer_norm", "rms_norm"))
_layer_norm: Callable[..., Tensor] = _LAYER_NORM._op
_rms_norm: Callable[..., Tensor] = _RMS_NORM._op


def layer_norm(
    input: Tensor,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    pre_activation: str | None = None,
    activation: str | None = None,
    weight_offset: float = 0.0,
    out_dtype: torch.dtype | Quantize | None = None,
    rounding: str = "once",
    group: Any = None,
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
        bias: b, of a shape and dtype that `weight` may have, or None for 0.
        eps: added to the variance.
        pre_activation: applied to x before it is normalised: one of `kernel_fusion.ACTIVATIONS`.
        activation: applied to the result: one of `kernel_fusion.ACTIVATIONS`.
        weight_offset: added to w in the compute type (1.0 for weights stored around zero); needs `weight`.
        out_dtype: dtype of the result. None: under CUDA autocast that of the installed PyTorch's norm (float32, but the
            input's for RMSNorm before 2.12), else the input's. With a :class:`Quantize` the result is a
            :class:`Quantized`, codes and scales.
        rounding: "once", where y is stored, or "hf", as Hugging Face's norms: the normalised value is rounded to the
            input's dtype, and that times weight plus bias, with a weight, to the promoted dtype of the two. Gradients
            pass straight through both.
        group: a `torch.distributed.ProcessGroup` whose ranks each have some of the columns: `input`, `weight`, `bias`
            and the result are a rank's own, and the statistics those of the whole rows, by one small all-reduce in
            forward and one in backward. None: the input has all columns.
        backend: "cuda", "triton", "cpu", "eager", or None for the automatic choice; see `kernel_fusion.explain`.

    Returns:
        Tensor of the input's shape, contiguous. Accumulated in float32 (float64 for float64 input); a row's result
        does not depend on the other rows.

    Raises:
        TypeError: an argument of another type than PyTorch's call takes.
        RuntimeError: shapes, devices or dtypes that don't fit, in PyTorch's words where it has some.
        ValueError: `weight_offset` without `weight`, an unknown activation, `rounding` or `backend`.
        BackendUnavailableError: `backend` was given and cannot serve this call; "triton" and "cpu" serve no `group`.

    Source: Ba, Kiros, Hinton: Layer Normalization, arXiv:1607.06450; `torch.nn.functional.layer_norm`.

    Example:
        >>> import torch, kernel_fusion as kf
        >>> x = torch.randn(4, 16)
        >>> y = kf.layer_norm(x, (16,), torch.ones(16), torch.zeros(16))
        >>> torch.allclose(y, torch.nn.functional.layer_norm(x, (16,)), atol=1e-6)
        True
    """
    norm = normalized_shape, weight, bias, eps, weight_offset, out_dtype
    plain = pre_activation is None and activation is None and rounding == "once" and group is None
    if not plain or type(out_dtype) is Quantize:
        options = {"pre_activation": pre_activation, "activation": activation, "rounding": rounding}
        return staged(layer_norm, {"input": input}, norm, options, backend, arrange=as_given, group=group)[0]
    try:
        if backend is None and state.backend is None:
            num_dims = num_normalized_dims(input, normalized_shape)
            if num_dims:
                norm_op = _LAYER_NORM if is_dynamo_compiling() else _layer_norm
                if weight_offset == 0.0 and out_dtype is None:  # two arguments fewer to convert, 0.1 µs
                    return norm_op(input, num_dims, weight, bias, eps)
                return norm_op(input, num_dims, weight, bias, eps, weight_offset, out_dtype)
        return _unusual(layer_norm, input, norm, backend)
    except checks.REFUSALS as error:
        explain_norm("layer_norm", error, {"input": input}, norm)
        raise


def rms_norm(
    input: Tensor,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    bias: Tensor | None = None,
    pre_activation: str | None = None,
    activation: str | None = None,
    weight_offset: float = 0.0,
    out_dtype: torch.dtype | Quantize | None = None,
    rounding: str = "once",
    group: Any = None,
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
        pre_activation, activation: as for :func:`layer_norm`.
        weight_offset: added to w in the compute type (1.0 as in Gemma); needs `weight`.
        out_dtype: as for :func:`layer_norm`.
        rounding: as for :func:`layer_norm`; "hf" is what Llama, Mistral and Qwen of Hugging Face do.
        group: as for :func:`layer_norm`.
        backend: "cuda", "triton", "cpu", "eager", or None for the automatic choice.

    Returns:
        Tensor of the input's shape, contiguous or, as in PyTorch, channels-last where the input is. Accumulated in
        float32 (float64 for float64 input).

    Raises:
        RuntimeError, ValueError, BackendUnavailableError: as for :func:`layer_norm`.

    Source: Zhang, Sennrich: Root Mean Square Layer Normalization, arXiv:1910.07467; `torch.nn.functional.rms_norm`.

    Example:
        >>> import torch, kernel_fusion as kf
        >>> x = torch.randn(4, 16)
        >>> torch.allclose(kf.rms_norm(x, 16), torch.nn.functional.rms_norm(x, (16,)), atol=1e-6)
        True
    """
    norm = normalized_shape, weight, bias, eps, weight_offset, out_dtype
    plain = pre_activation is None and activation is None and rounding == "once" and group is None
    if not plain or type(out_dtype) is Quantize:
        options = {"pre_activation": pre_activation, "activation": activation, "rounding": rounding}
        return staged(rms_norm, {"input": input}, norm, options, backend, arrange=as_given, group=group)[0]
    try:
        if backend is None and state.backend is None:
            num_dims = num_normalized_dims(input, normalized_shape)
            if num_dims:
                norm_op = _RMS_NORM if is_dynamo_compiling() else _rms_norm
                if weight_offset == 0.0 and out_dtype is None:  # two arguments fewer to convert, 0.1 µs
                    return norm_op(input, num_dims, weight, bias, eps)
                return norm_op(input, num_dims, weight, bias, eps, weight_offset, out_dtype)
        return _unusual(rms_norm, input, norm, backend)
    except checks.REFUSALS as error:
        explain_norm("rms_norm", error, {"input": input}, norm)
        raise


def _unusual(verb: Callable[..., Tensor], input: Tensor, norm: Norm, backend: str | None) -> Tensor:
    """A norm without stages, of an unusual tensor, by an explicit backend or with arguments that don't fit."""
    normalized_shape, weight, bias, eps, weight_offset, out_dtype = norm
    assert not isinstance(out_dtype, Quantize)  # which counts as a stage
    name, rms = verb.__name__, verb is rms_norm
    if not rms:
        checks.of_kind(name, "eps", eps, checks.NUMBER)
    shape = sizes(normalized_shape)
    if not num_normalized_dims(input, shape):
        check_backend_name(backend)
        if not interop.is_tensor(input):
            if not interop.records(input) and not hasattr(input, "__dlpack__"):
                raise TypeError(f"{name}(): argument 'input' (position 1) must be Tensor, not {type(input).__name__}")
            return served(verb, (input,), norm, backend=backend)  # type: ignore[no-any-return]
        ours = is_dtensor(input) or has_rows_of(input, len(shape))
        if (is_foreign(input) and not ours) or not ends_with(input, shape):
            return eager.pytorch_row_norm(input, shape, weight, bias, eps, weight_offset, out_dtype, rms)
    serve = operator(name, name, backend, input)
    return serve(input, len(shape), weight, bias, eps, weight_offset, out_dtype)  # type: ignore[no-any-return]


def add_layer_norm(
    input: Tensor,
    residual: Tensor,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    dropout_p: float = 0.0,
    training: bool = True,
    pre_activation: str | None = None,
    activation: str | None = None,
    weight_offset: float = 0.0,
    out_dtype: torch.dtype | Quantize | None = None,
    rounding: str = "once",
    group: Any = None,
    backend: str | None = None,
) -> NormOutput:
    r"""Dropout, residual addition and layer normalisation, in one pass.

    .. math::
        u = \mathrm{dropout}(\mathrm{pre\_activation}(x)), \qquad h = r + u, \qquad
        y = \mathrm{activation}\left(\frac{h - \mathrm{E}[h]}{\sqrt{\mathrm{Var}[h] + \epsilon}}
        \cdot (\mathrm{offset} + w) + b\right)

    Args:
        input: x, shape (\*, \*normalized_shape), as for :func:`layer_norm`.
        residual: r, of the input's shape, in a dtype of its own: a float32 stream beside bfloat16 activations is a
            normal case. h is rounded to it before the statistics, so that backward sees the same h.
        normalized_shape, weight, bias, eps: as for :func:`layer_norm`.
        dropout_p: probability of an element of u to be zeroed; the others are scaled by 1 / (1 - p). Rounded to a
            multiple of 2^-32.
        training: without it no dropout is applied.
        pre_activation, activation, weight_offset, out_dtype, group, backend: as for :func:`layer_norm`.
        rounding: as for :func:`layer_norm`; the dtype that the normalised value is rounded to is that of h, the
            residual's.

    Returns:
        :class:`NormOutput`: y and h.

    Raises:
        RuntimeError, ValueError, BackendUnavailableError: as for :func:`layer_norm`; RuntimeError where `residual` has
            another shape than `input`; ValueError where `dropout_p` is no probability.

    Backward is one pass as well: the gradient that arrives at `residual` is added inside it, and dropout and
    pre-activation are computed again.

    Example:
        >>> import torch, kernel_fusion as kf
        >>> x, r = torch.randn(2, 4, 16)
        >>> y, h = kf.add_layer_norm(x, r, 16)
        >>> torch.equal(h, r + x)
        True
    """
    checks.dropout_p("add_layer_norm", "dropout_p", dropout_p)
    norm = normalized_shape, weight, bias, eps, weight_offset, out_dtype
    rows = {"input": input, "residual": residual}
    options = {"pre_activation": pre_activation, "activation": activation, "rounding": rounding}
    p = dropout_p if training else 0.0
    return staged(add_layer_norm, rows, norm, options, backend, arrange=as_given, dropout_p=p, group=group)  # type: ignore[return-value]


def add_rms_norm(
    input: Tensor,
    residual: Tensor,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    bias: Tensor | None = None,
    dropout_p: float = 0.0,
    training: bool = True,
    pre_activation: str | None = None,
    activation: str | None = None,
    weight_offset: float = 0.0,
    out_dtype: torch.dtype | Quantize | None = None,
    rounding: str = "once",
    group: Any = None,
    backend: str | None = None,
) -> NormOutput:
    r"""Dropout, residual addition and root-mean-square normalisation, in one pass.

    .. math::
        u = \mathrm{dropout}(\mathrm{pre\_activation}(x)), \qquad h = r + u, \qquad
        y = \mathrm{activation}\left(\frac{h}{\sqrt{\mathrm{E}[h^2] + \epsilon}} \cdot (\mathrm{offset} + w) + b\right)

    Args, returns, raises: as for :func:`add_layer_norm`, with `eps` and `bias` as for :func:`rms_norm`.

    Example:
        >>> import torch, kernel_fusion as kf
        >>> x, r = torch.randn(2, 4, 16)
        >>> y, h = kf.add_rms_norm(x, r, 16)
        >>> torch.allclose(y, kf.rms_norm(r + x, 16))
        True
    """
    checks.dropout_p("add_rms_norm", "dropout_p", dropout_p)
    norm = normalized_shape, weight, bias, eps, weight_offset, out_dtype
    rows = {"input": input, "residual": residual}
    options = {"pre_activation": pre_activation, "activation": activation, "rounding": rounding}
    p = dropout_p if training else 0.0
    return staged(add_rms_norm, rows, norm, options, backend, arrange=as_given, dropout_p=p, group=group)  # type: ignore[return-value]
