"""Checks of the arguments of operators, which anybody may call with anything.

They refuse arguments that would crash PyTorch's operations, exhaust memory, or be misread. The operators in C++ make
the same checks.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from kernel_fusion.core import checks, signatures, stages
from kernel_fusion.core.quantize import LARGEST


def checked(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `function`, which implements the operator `name`, with checks of its arguments before the call."""
    names = [argument.name for argument in signatures.OPERATORS[name].arguments]

    def serve(*args: Any) -> Any:
        check(name, dict(zip(names, args, strict=False)))  # omitted arguments have defaults, which are right
        return function(*args)

    return serve


def check(operator: str, arguments: Mapping[str, Any]) -> None:
    """Raise unless the arguments make sense; `arguments` has them by their names in the schema."""
    for name, value in arguments.items():
        if isinstance(value, Tensor):
            memory(value)
        elif name in signatures.NAMES and value not in signatures.NAMES[name]:
            choices = ", ".join(map(repr, signatures.NAMES[name]))
            raise ValueError(f"kernel_fusion::{operator}: `{name}` must be one of {choices}, got {value!r}")
    if "num_dims" in arguments:
        _num_dims(operator, arguments["input"], arguments["num_dims"])
        _together(operator, arguments)  # only norms have `num_dims`
    if "dropout_p" in arguments:
        _dropout(operator, arguments["dropout_p"], arguments.get("seed"))
    if "block" in arguments:
        _codes(operator, **{name: arguments[name] for name in ("dtype", "scale", "block")}, rows=_first(arguments))
    if "combine" in arguments and (arguments["combine"] == "first") != (arguments["b"] is None):
        raise TypeError(
            f"kernel_fusion::{operator}: `b` must be None where `combine` is 'first', and a tensor elsewhere"
        )


def _num_dims(operator: str, input: Tensor, num_dims: int) -> None:
    if not 1 <= num_dims <= input.dim():
        raise RuntimeError(
            f"kernel_fusion::{operator}: `num_dims` must be at least 1 and at most the number of dimensions of "
            f"`input`, {input.dim()}, got {num_dims}"
        )


def _together(operator: str, arguments: Mapping[str, Any]) -> None:
    residual = arguments.get("residual", arguments.get("has_residual"))
    if stages.lacks_residual(arguments, residual):
        raise RuntimeError(f"kernel_fusion::{operator}: `residual_gate` needs a `residual`")
    if found := stages.conflict(arguments, residual):
        name = found[0] if found[0] in arguments else "has_residual"
        raise RuntimeError(f"kernel_fusion::{operator}: `{name}` does not go with a `{found[1]}`")


def _dropout(operator: str, p: float, seed: Tensor | None) -> None:
    if not 0.0 <= p <= 1.0:
        raise ValueError(f"kernel_fusion::{operator}: `dropout_p` must be a probability between 0 and 1, got {p}")
    if seed is not None and not is_seed(seed):
        raise RuntimeError(
            f"kernel_fusion::{operator}: `seed` must be one int64, of shape [1], got {seed.dtype} {list(seed.shape)}"
        )


def _first(arguments: Mapping[str, Any]) -> Tensor:
    return next(value for value in arguments.values() if isinstance(value, Tensor))


def _codes(operator: str, dtype: torch.dtype, scale: Tensor | None, block: int, rows: Tensor) -> None:
    """Raise unless rows can be quantised so."""
    if dtype not in LARGEST:
        choices = ", ".join(str(each).removeprefix("torch.") for each in LARGEST)
        raise ValueError(f"kernel_fusion::{operator}: `dtype` must be one of {choices}, got {dtype}")
    if block < 0:
        raise ValueError(f"kernel_fusion::{operator}: `block` must not be negative, got {block}")
    if scale is None:
        if rows.dim() == 0:
            raise RuntimeError(f"kernel_fusion::{operator}: a scale of rows needs a dimension, and the input has none")
        return
    if scale.dtype != torch.float32 or scale.numel() != 1 or scale.device != rows.device:
        raise RuntimeError(
            f"kernel_fusion::{operator}: `scale` must be one float32 number on {rows.device}, got {scale.dtype} of "
            f"shape {list(scale.shape)} on {scale.device}"
        )


def memory(t: Tensor) -> None:
    """Raise, in PyTorch's words, unless the storage of a plain tensor is as large as its sizes and strides say.

    Libraries free and refill storages, and PyTorch's elementwise operations do not check before they read them.
    """
    while torch._C._functorch.is_functorch_wrapped_tensor(t):
        t = torch._C._functorch.get_unwrapped(t)
    if not _has_memory(t) or t.numel() == 0:
        return
    last = sum((size - 1) * stride for size, stride in zip(t.shape, t.stride(), strict=True))
    needed, held = (t.storage_offset() + last + 1) * t.element_size(), t.untyped_storage().nbytes()
    if needed <= held:
        return
    if held == 0:
        raise RuntimeError("The tensor has a non-zero number of elements, but its data is not allocated yet.")
    raise RuntimeError(
        f"sizes {list(t.shape)}, strides {list(t.stride())}, storage offset {t.storage_offset()}, and itemsize "
        f"{t.element_size()} requiring a storage size of {needed} are out of bounds for storage of size {held}"
    )


def _has_memory(t: Tensor) -> bool:
    return (
        type(t) in (Tensor, Parameter)
        and t.layout == torch.strided
        and not (t.is_nested or t.is_meta or t._is_zerotensor())
        and not torch._is_functional_tensor(t)
    )


def one_device(operator: str, tensors: Collection[Any]) -> None:
    """Raise unless all tensors are on one device."""
    devices = {str(t.device): None for t in tensors if isinstance(t, Tensor)}
    if len(devices) > 1:
        raise RuntimeError(
            f"kernel_fusion::{operator}: expected all tensors to be on the same device, but found "
            f"{' and '.join(devices)}"
        )


def require(operator: str, tensors: Sequence[Tensor | None], takes: bool) -> None:
    """Raise unless the tensors are on one device, kernels can read them, and `takes` is true."""
    given = [t for t in tensors if t is not None]
    for t in given:
        memory(t)
    one_device(operator, given)
    if any(t.layout != torch.strided or t.is_nested for t in given) or not takes:
        raise RuntimeError(f"kernel_fusion::{operator}: arguments that its kernels do not take")


def floating(*tensors: Tensor | None) -> bool:
    """Whether kernels know the dtypes of all these tensors."""
    return all(t is None or t.dtype in checks.FLOATING for t in tensors)


def is_seed(seed: Tensor | None) -> bool:
    """Whether `seed` can be a seed of dropout: one int64, or None."""
    return seed is None or (seed.dtype == torch.int64 and list(seed.shape) == [1])
