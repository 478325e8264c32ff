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
from kernel_fusion.core.spec import rounding_for
from kernel_fusion.functional import interop, quantized
from kernel_fusion.functional.norm_arguments import (
    Norm,
    ends_with,
    explain_norm,
    num_normalized_dims,
    resolved,
    served,
    sizes,
)
from kernel_fusion.functional.results import NormOutput
from kernel_fusion.operators import schemas
from kernel_fusion.operators.dispatch import operator
from kernel_fusion.operators.jagged import has_rows_of

# The operators, and the C++ functions behind them: calling those is faster, and only Dynamo needs the operators.
_LAYER_NORM, _RMS_NORM = (schemas.overload(name) for name in ("layer_norm", "rms_norm"))
_layer_norm: Callable[..., Tensor] = _LAYER_NORM._op
_rms_norm: Callable[..., Tensor] = _RMS_NORM._op

_Stages = tuple[str | None, str | None, float, str]  # pre_activation, activation, dropout_p, rounding


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
        bias: b, likewise, or None for 0.
        eps: added to the variance.
        pre_activation: applied to x before it is normalised: one of `kernel_fusion.ACTIVATIONS`.
        activation: applied to the result, likewise.
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
        BackendUnavailableError: `backend` was given and cannot serve this call; "cuda" and "cpu" serve no `group`.

    Source: Ba, Kiros, Hinton: Layer Normalization, arXiv:1607.06450; `torch.nn.functional.layer_norm`.

    Example:
        >>> import torch, kernel_fusion as kf
        >>> x = torch.randn(4, 16)
        >>> y = kf.layer_norm(x, (16,), torch.ones(16), torch.zeros(16))
        >>> torch.allclose(y, torch.nn.functional.layer_norm(x, (16,)), atol=1e-6)
        True
    """
    norm = normalized_shape, weight, bias, eps, weight_offset, out_dtype
    staged = pre_activation is not None or activation is not None or rounding != "once" or group is not None
    if staged or type(out_dtype) is Quantize:
        stages = pre_activation, activation, 0.0, rounding
        return _staged("layer_norm", input, None, norm, stages, backend, group).output
    try:
        if backend is None and state.backend is None:
            num_dims = num_normalized_dims(input, normalized_shape)
            if num_dims:
                norm_op = _LAYER_NORM if is_dynamo_compiling() else _layer_norm
                if weight_offset == 0.0 and out_dtype is None:  # two arguments fewer to convert, 0.1 µs
                    return norm_op(input, num_dims, weight, bias, eps)
                return norm_op(input, num_dims, weight, bias, eps, weight_offset, out_dtype)
        checks.of_kind("layer_norm", "eps", eps, checks.NUMBER)
        return _unusual("layer_norm", input, norm, backend)
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
    staged = pre_activation is not None or activation is not None or rounding != "once" or group is not None
    if staged or type(out_dtype) is Quantize:
        stages = pre_activation, activation, 0.0, rounding
        return _staged("rms_norm", input, None, norm, stages, backend, group).output
    try:
        if backend is None and state.backend is None:
            num_dims = num_normalized_dims(input, normalized_shape)
            if num_dims:
                norm_op = _RMS_NORM if is_dynamo_compiling() else _rms_norm
                if weight_offset == 0.0 and out_dtype is None:  # two arguments fewer to convert, 0.1 µs
                    return norm_op(input, num_dims, weight, bias, eps)
                return norm_op(input, num_dims, weight, bias, eps, weight_offset, out_dtype)
        return _unusual("rms_norm", input, norm, backend)
    except checks.REFUSALS as error:
        explain_norm("rms_norm", error, {"input": input}, norm)
        raise


def _unusual(verb: str, input: Tensor, norm: Norm, backend: str | None) -> Tensor:
    """A norm without stages, of an unusual tensor, by an explicit backend or with arguments that don't fit."""
    normalized_shape, weight, bias, eps, weight_offset, out_dtype = norm
    assert not isinstance(out_dtype, Quantize)  # which counts as a stage
    shape = sizes(normalized_shape)
    if not num_normalized_dims(input, shape):
        check_backend_name(backend)
        if not interop.is_tensor(input):
            if not interop.records(input) and not hasattr(input, "__dlpack__"):
                raise TypeError(f"{verb}(): argument 'input' (position 1) must be Tensor, not {type(input).__name__}")
            return served(globals()[verb], (input,), norm, backend=backend)  # type: ignore[no-any-return]
        ours = is_dtensor(input) or has_rows_of(input, len(shape))
        if (is_foreign(input) and not ours) or not ends_with(input, shape):
            rms = verb == "rms_norm"
            return eager.pytorch_row_norm(input, shape, weight, bias, eps, weight_offset, out_dtype, rms)
    serve = operator(verb, verb, backend, input)
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
        rounding: likewise; the dtype that the normalised value is rounded to is that of h, the residual's.

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
    stages = pre_activation, activation, dropout_p if training else 0.0, rounding
    return _staged("add_layer_norm", input, residual, norm, stages, backend, group)


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
    stages = pre_activation, activation, dropout_p if training else 0.0, rounding
    return _staged("add_rms_norm", input, residual, norm, stages, backend, group)


def _staged(
    verb: str, input: Tensor, residual: Tensor | None, norm: Norm, stages: _Stages, backend: str | None, group: Any
) -> NormOutput:
    """A norm with stages around it."""
    normalized_shape, weight, bias, eps, weight_offset, out_dtype = norm
    pre_activation, activation, dropout_p, rounding = stages
    out_dtype, quantize = quantized.apart(out_dtype)
    checks.rounding(verb, rounding)
    pre = checks.activation(verb, "pre_activation", pre_activation)
    post = checks.activation(verb, "activation", activation)
    if not interop.is_tensor(input):
        options: dict[str, Any] = {"pre_activation": pre_activation, "activation": activation, "rounding": rounding}
        options |= {"group": group, "backend": backend}
        if verb.startswith("add_"):
            return served(globals()[verb], (input, residual), norm, dropout_p=dropout_p, **options)  # type: ignore[no-any-return]
        return NormOutput(served(globals()[verb], (input,), norm, **options), input)
    if residual is None and verb.startswith("add_"):
        raise TypeError(f"`{verb}`: `residual` must be a tensor, got None; without one the verb is `{verb[4:]}`")
    try:
        rms = verb.endswith("rms_norm")
        num_dims = num_normalized_dims(input, normalized_shape)
        if not num_dims:
            shape, eps = resolved(verb, input, norm)
            num_dims = len(shape)
        elif eps is None and rms:
            eps = schemas.default_eps(input)
        seed = eager.draw_seed(input.device) if dropout_p > 0.0 else None
        serve = operator(verb, "staged_row_norm", backend, input, residual)
        if group is not None:
            from kernel_fusion.distributed import hidden

            serve = hidden.operator_of_columns(verb, backend or state.backend, group, input)
        affine = num_dims, weight, bias, eps, weight_offset, out_dtype, rms
        args: tuple[Any, ...] = (input, residual, *affine, pre, post, dropout_p, seed)
        if rounding_for(rounding, (input if residual is None else residual).dtype) != "once":
            args = *args, rounding  # the default costs less where it is left out
        if quantize is not None:
            if group is not None:
                raise checks.refusal(verb, "out_dtype", "group")
            return NormOutput(*quantized.norm(verb, quantize, backend, args, None, input.shape))  # type: ignore[arg-type]
        return NormOutput(*serve(*args))
    except checks.REFUSALS as error:
        explain_norm(verb, error, {"input": input, "residual": residual}, norm, group=group)
        raise
