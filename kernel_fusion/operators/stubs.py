"""The Python stubs of the operators. They load the extension when it is needed, and serve calls that have no kernel.

They are registered for the catch-all dispatch keys `Autograd` and `CompositeExplicitAutograd`. The extension's kernels
have specific keys and take precedence, so nothing is overridden.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kernel_fusion.backends import eager
from kernel_fusion.core import arguments
from kernel_fusion.errors import BuildError
from kernel_fusion.operators import fallback, loader, schemas

# The device types that have kernels in the extension. "meta" serves tracing.
_NATIVE_DEVICES = ("cpu", "cuda", "meta")
_Codes = tuple[torch.dtype, Tensor | None, int]


# The stubs look their operators up when they are called, since import would take longer otherwise.
def _verb_stub(name: str) -> Callable[..., Any]:
    def stub(*args: Any, **kwargs: Any) -> Any:
        operator = schemas.overload(name)
        device, is_strided = args[0].device.type, args[0].layout == torch.strided
        is_native, was_loaded = device in _NATIVE_DEVICES, loader.is_loaded()
        if is_native and is_strided and not was_loaded and loader.load():
            return operator(*args, **kwargs)
        given = schemas.bind(operator, args, kwargs)
        if is_native and (was_loaded or not is_strided):  # the extension has no kernel for such tensors
            return arguments.checked(name, partial(schemas.reference_call, name))(*given)
        serve = schemas.reference_call if name in schemas.SPREAD else fallback.serve
        return arguments.checked(name, partial(serve, name))(*given)

    return stub


def _part_stub(name: str) -> Callable[..., Any]:
    def stub(*args: Any) -> Any:
        if loader.is_loaded():
            raise RuntimeError(
                f"kernel_fusion::{name} takes dense tensors of one device, {', '.join(_NATIVE_DEVICES[:-1])} or "
                f"{_NATIVE_DEVICES[-1]}; got {', '.join(_kind(t) for t in args if isinstance(t, Tensor))}"
            )
        if loader.load():
            return schemas.overload(name)(*args)
        raise BuildError(f"kernel_fusion::{name} needs the C++ extension: {loader.error()}")

    return stub


def _quantized_stub(name: str) -> Callable[..., Any]:
    def stub(*args: Any) -> Any:
        unloaded = args[0].device.type in ("cpu", "cuda") and not loader.is_loaded()
        if unloaded and args[0].layout == torch.strided and loader.load():
            return schemas.overload(name)(*args)
        return arguments.checked(name, _QUANTIZED[name])(*args)

    return stub


def _row_norm(
    input: Tensor,
    residual: Tensor | None,
    dtype: torch.dtype,
    scale: Tensor | None,
    block: int,
    keeps: bool,
    *norm: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute a norm with its stages, then quantise the result."""
    y, h = schemas.overload("staged_row_norm")(input, residual, *norm)
    return *_quantized(y, (dtype, scale, block), keeps), h


def _gate(
    gate: Tensor, value: Tensor, activation: str, dtype: torch.dtype, scale: Tensor | None, block: int, keeps: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute a gated activation, then quantise the result."""
    y = schemas.overload("pointwise")(gate, value, "gate", activation, 1.0, 0.0, None)
    return _quantized(y, (dtype, scale, block), keeps)


def _quantized(y: Tensor, codes: _Codes, keeps: bool) -> tuple[Tensor, Tensor, Tensor]:
    values, scale = schemas.overload("quantize")(y, *codes)
    return values, scale, y if keeps else y.new_empty(0)


# These serve quantised results on devices without kernels for them.
_QUANTIZED: dict[str, Callable[..., Any]] = {
    "quantize": eager.quantize,
    "quantized_row_norm": _row_norm,
    "quantized_gate": _gate,
}


def _kind(t: Tensor) -> str:
    return f"{'nested ' if t.is_nested else ''}{t.layout} on {t.device}".removeprefix("torch.")


for _name in schemas.VERBS | schemas.SPREAD:
    for _key in ("Autograd", "CompositeExplicitAutograd"):
        schemas.library.impl(_name, _verb_stub(_name), _key)
for _name in schemas.QUANTIZED:
    schemas.library.impl(_name, _quantized_stub(_name), "CompositeExplicitAutograd")
for _name in schemas.PARTS:
    schemas.library.impl(_name, _part_stub(_name), "CompositeExplicitAutograd")
schemas.library.define(f"qk_norm_rope_on_gpu{schemas.VERBS['qk_norm_rope']}", tags=torch.Tag.pt2_compliant_tag)
schemas.library.impl("qk_norm_rope_on_gpu", partial(fallback.serve_on_gpu, "qk_norm_rope"), "CompositeImplicitAutograd")
