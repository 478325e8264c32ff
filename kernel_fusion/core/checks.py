"""Argument checks of the verbs, in PyTorch's words where PyTorch has some.

These texts stand here alone. The C++ operators only decide whether they can serve a call; one that they can't serve
goes to the eager definition, which runs these checks first and so either raises or serves it in PyTorch.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

FLOATING = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def normalized_shape(verb: str, input: Tensor, shape: Sequence[int]) -> None:
    """Raise unless `shape` is not empty and equals the last dimensions of `input`."""
    dims = list(shape)
    if not dims:
        raise RuntimeError(
            "Expected normalized_shape to be at least 1-dimensional, i.e., containing at least one element, "
            f"but got normalized_shape = {dims}"
        )
    sizes = list(input.shape)
    if sizes[-len(dims) :] != dims:
        expected = ", ".join(["*", *map(str, dims)])
        raise RuntimeError(
            f"Given normalized_shape={dims}, expected input with shape [{expected}], but got input of size{sizes}"
        )


def row_norm(
    verb: str, input: Tensor, num_dims: int, weight: Tensor | None, bias: Tensor | None, weight_offset: float
) -> None:
    """Raise unless weight and bias fit the last `num_dims` dimensions of `input`."""
    dims = list(input.shape[input.dim() - num_dims :])
    for name, parameter in (("weight", weight), ("bias", bias)):
        if parameter is None:
            continue
        if list(parameter.shape) != dims:
            raise RuntimeError(
                f"Expected {name} to be of same shape as normalized_shape, but got {name} of shape "
                f"{list(parameter.shape)} and normalized_shape = {dims}"
            )
        if parameter.device != input.device:
            raise RuntimeError(
                f"`{verb}`: expected all tensors to be on the same device, but `{name}` is on {parameter.device} and "
                f"`input` is on {input.device}"
            )
        if input.is_floating_point():
            _parameter_dtype(verb, name, parameter.dtype, input.dtype)
    if weight is None and weight_offset != 0.0:
        raise ValueError(f"`{verb}`: `weight_offset` needs a `weight`, got weight_offset={weight_offset} without one")


def _parameter_dtype(verb: str, name: str, dtype: torch.dtype, input_dtype: torch.dtype) -> None:
    expected = FLOATING[:3] if input_dtype in FLOATING[:3] else (input_dtype,)
    if dtype not in expected:
        choices = " or ".join(map(_short, expected))
        raise RuntimeError(f"`{verb}`: `{name}` must be {choices} for {_short(input_dtype)} input, got {_short(dtype)}")


def out_dtype(verb: str, dtype: torch.dtype | None, input_dtype: torch.dtype) -> None:
    """Raise unless the result of `input_dtype` may be written as `dtype`."""
    if dtype is None or dtype == input_dtype:
        return
    expected = FLOATING[:3] if input_dtype in FLOATING[:3] else (input_dtype,)
    if dtype not in expected:
        choices = " or ".join(map(_short, expected))
        raise RuntimeError(
            f"`{verb}`: `out_dtype` must be {choices} or None for {_short(input_dtype)} input, got {_short(dtype)}"
        )


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
