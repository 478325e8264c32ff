"""Quantised results: what the verbs return where `out_dtype` is a `Quantize`.

If no gradient is recorded, one operator computes and quantises, and the result in its own dtype reaches memory only
if it is wanted. Else the differentiable operator of the verb comes first, and its result is quantised.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.compiler import is_dynamo_compiling

from kernel_fusion.backends import eager
from kernel_fusion.backends.availability import is_foreign
from kernel_fusion.config import check_backend_name, state
from kernel_fusion.core import checks
from kernel_fusion.core.autocast import norm_dtype
from kernel_fusion.core.quantize import Quantize
from kernel_fusion.core.stages import FIRST, Given
from kernel_fusion.core.symbols import alike
from kernel_fusion.errors import BackendUnavailableError
from kernel_fusion.functional.results import Quantized
from kernel_fusion.operators import schemas
from kernel_fusion.operators.dispatch import operator, unavailable_reason


def norm(
    verb: str, quantize: Quantize, backend: str | None, args: tuple[Any, ...], row: Tensor | None, shape: Sequence[int]
) -> tuple[Quantized, Tensor]:
    """The quantised result of a norm with its stages, and h.

    Args:
        args: those of the operator `staged_row_norm`; without an `out_dtype`, what is quantised has the input's dtype.
        row: what is read beside input and residual.
        shape: of the result; the operator's has groups of columns apart.
    """
    input, residual, num_dims, weight, bias = args[:5]
    if quantize.per != "tensor" and num_dims != 1:
        raise checks.refusal(verb, "out_dtype", "normalized_shape", f", got {num_dims}")
    out_dtype = args[7] or norm_dtype(input, args[8]) or input.dtype
    args = *args[:7], out_dtype, *args[8:]
    route = _route(verb, "staged_row_norm", backend, quantize, (input, residual, weight, bias, row))
    expected = checks.parameter_shape(input, num_dims, Given(*args[FIRST:]).grouped, weight, bias)
    if route.fused and checks.shaped(expected, weight, bias) and alike(input.shape, shape):
        values, scale, v, h = route.operator("quantized_row_norm")(*args[:2], *_options(quantize), *args[2:])
        return _result(quantize, values, scale, v), h
    y, h = route.serve(*args)
    if not alike(y.shape, shape):
        y = torch.ops.aten._unsafe_view(y.contiguous(), shape)  # nobody else has y
    return _of(quantize, route, y), h


def apart(out_dtype: torch.dtype | Quantize | None) -> tuple[torch.dtype | None, Quantize | None]:
    """The dtype of an operator's result, None for the default, and the `Quantize` that is applied to it, if any."""
    return (None, out_dtype) if isinstance(out_dtype, Quantize) else (out_dtype, None)


def gated(
    verb: str, quantize: Quantize, backend: str | None, gate: Tensor, value: Tensor, activation: str
) -> Quantized:
    """The quantised result of a gated activation."""
    checks.of_kind(verb, "out_dtype", quantize, checks.CODES)
    route = _route(verb, "pointwise", backend, quantize, (gate, value))
    if route.fused and gate.dim() > 0 and alike(gate.shape, value.shape) and gate.dtype == value.dtype:
        return _result(quantize, *route.operator("quantized_gate")(gate, value, activation, *_options(quantize)))
    y = route.serve(gate, value, "gate", activation, 1.0, 0.0, None)
    if y.dim() == 0 and quantize.per != "tensor":
        raise ValueError(f"`{verb}`: `out_dtype` with per={quantize.per!r} needs a dimension, and the result has none")
    return _of(quantize, route, y)


class _Route(NamedTuple):
    """How a call is served.

    Attributes:
        backend: the backend that was asked for or chosen; None is the device's own.
        serve: the operator of the verb, without quantisation.
        fused: whether one operator may compute and quantise, since no gradient is recorded.
    """

    backend: str | None
    serve: Callable[..., Any]
    fused: bool

    def operator(self, name: str) -> Callable[..., Any]:
        """The operator `name` of `schemas.QUANTIZED`, or its definition."""
        if self.backend == "eager":
            return eager.quantize
        overload = schemas.overload(f"triton_{name}" if self.backend == "triton" else name)
        return overload if is_dynamo_compiling() else overload._op  # type: ignore[no-any-return]


def _route(verb: str, name: str, backend: str | None, quantize: Quantize, tensors: tuple[Tensor | None, ...]) -> _Route:
    input, scale = tensors[0], quantize.scale
    assert input is not None
    for tensor in (*tensors, scale):
        if tensor is not None and is_foreign(tensor):
            raise TypeError(f"`{verb}`: quantised results need plain tensors, got {type(tensor).__name__}")
    if input.dtype not in checks.FLOATING:
        raise TypeError(f"`{verb}`: quantised results need floating-point tensors, got {input.dtype}")
    if scale is not None and scale.device != input.device:
        raise RuntimeError(
            f"`{verb}`: expected all tensors to be on the same device, but the `scale` of `out_dtype` is on "
            f"{scale.device} and the input is on {input.device}"
        )
    wanted = _backend(verb, backend, input)
    recorded = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
    fused = wanted != "eager" and not recorded and forward_ad._current_level < 0
    return _Route(wanted, operator(verb, name, wanted, *tensors), fused)


def _backend(verb: str, backend: str | None, input: Tensor) -> str | None:
    """The backend that was asked for, or the best that runs on a GPU; None for the device's own."""
    check_backend_name(backend)
    wanted = backend or state.backend
    if wanted is None and input.device.type in ("cuda", "xpu"):
        for name in ("cuda", "triton"):
            if unavailable_reason(name, input.device) is None:
                return name
        return "eager"
    if wanted == "cuda" and (reason := unavailable_reason(wanted, input.device)):
        raise BackendUnavailableError(f"`{verb}`: backend {wanted!r} was requested, but {reason}")
    return wanted


def _of(quantize: Quantize, route: _Route, y: Tensor) -> Quantized:
    """Quantise a result that is already there, by the operator that does only this."""
    values, scale = route.operator("quantize")(y.detach(), quantize.dtype, quantize.scale, quantize.block)
    return _result(quantize, values, scale, y)


def _options(quantize: Quantize) -> tuple[Any, ...]:
    """The arguments of the operators that a `Quantize` stands for."""
    return quantize.dtype, quantize.scale, quantize.block, quantize.unquantized


def _result(quantize: Quantize, values: Tensor, scale: Tensor, v: Tensor) -> Quantized:
    given = quantize.scale
    return Quantized(values, scale if given is None else given.reshape(()), v if quantize.unquantized else None)
