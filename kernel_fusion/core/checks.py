"""Argument checks of the verbs.

Shapes that don't fit are PyTorch's to complain about, so that the error is in its words; what PyTorch does not know
(our mixes of dtypes, `weight_offset`, `out_dtype`) is refused here, and the texts stand here alone. The C++ operators
only decide whether they can serve a call: one that they can't serve goes to the eager definition, which runs these.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kernel_fusion.core.activations import ACTIVATIONS, IDENTITY

FLOATING = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def parameters_fit(shape: Sequence[int], weight: Tensor | None, bias: Tensor | None) -> bool:
    """Whether weight and bias have the normalised shape."""
    return all(list(p.shape) == list(shape) for p in (weight, bias) if p is not None)


def row_norm(
    verb: str,
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    weight_offset: float,
    out_dtype: torch.dtype | None,
) -> None:
    """Raise unless devices and dtypes go together and `weight_offset` has a weight to go with."""
    for name, parameter in (("weight", weight), ("bias", bias)):
        if parameter is None:
            continue
        if parameter.device != input.device:
            raise RuntimeError(
                f"`{verb}`: expected all tensors to be on the same device, but `{name}` is on {parameter.device} and "
                f"`input` is on {input.device}"
            )
        _check_mix(verb, name, parameter.dtype, input.dtype)
    _check_mix(verb, "out_dtype", out_dtype, input.dtype)
    if weight is None and weight_offset != 0.0:
        raise ValueError(f"`{verb}`: `weight_offset` needs a `weight`, got weight_offset={weight_offset} without one")


def residual(verb: str, input: Tensor, residual: Tensor | None) -> None:
    """Raise unless the residual stream has the input's shape and device, and a dtype that goes with the input's."""
    if residual is None:
        return
    if residual.shape != input.shape:
        raise RuntimeError(
            f"`{verb}`: `residual` must have the shape of `input`, {list(input.shape)}, got {list(residual.shape)}"
        )
    if residual.device != input.device:
        raise RuntimeError(
            f"`{verb}`: expected all tensors to be on the same device, but `residual` is on {residual.device} and "
            f"`input` is on {input.device}"
        )
    _check_mix(verb, "residual", residual.dtype, input.dtype)


def activation(verb: str, argument: str, name: str | None) -> str:
    """The activation's name, or that of its absence; raise where there is no such activation."""
    if name is None or name == IDENTITY:
        return IDENTITY
    if name not in ACTIVATIONS:
        choices = ", ".join(repr(choice) for choice in ACTIVATIONS)
        raise ValueError(f"`{verb}`: `{argument}` must be one of {choices}, got {name!r}")
    return name


def dropout_p(verb: str, argument: str, p: float) -> None:
    """Raise unless `p` is a probability."""
    if not 0.0 <= p <= 1.0:
        raise ValueError(f"`{verb}`: `{argument}` must be a probability between 0 and 1, got {p}")


def _check_mix(verb: str, name: str, dtype: torch.dtype | None, input_dtype: torch.dtype) -> None:
    expected = FLOATING[:3] if input_dtype in FLOATING[:3] else (input_dtype,)
    if dtype is not None and dtype not in expected:
        choices = " or ".join(map(_short, expected))
        raise RuntimeError(
            f"`{verb}`: `{name}` must be {choices} or None for {_short(input_dtype)} input, got {_short(dtype)}"
        )


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
