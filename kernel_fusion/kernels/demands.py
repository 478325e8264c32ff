"""The demands of the direct layer on its tensors, with the texts of its errors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kernel_fusion.backends import availability
from kernel_fusion.core import checks
from kernel_fusion.errors import BackendUnavailableError
from kernel_fusion.operators import dispatch

_FLOATING = ", ".join(str(dtype).removeprefix("torch.") for dtype in checks.FLOATING)
_DEVICES = ("cpu", "cuda")  # whose backends have the same names


def admit(kernel: str, optional: Sequence[str] = (), **tensors: Any) -> tuple[str, list[Any]]:
    """The backend whose kernels serve these tensors, and the tensors, detached; None stays None.

    Args:
        kernel: what the user called, below `kernel_fusion.kernels`.
        optional: the names of those that may be None.
        tensors: by the names of the arguments.

    Raises:
        TypeError, ValueError, BackendUnavailableError: a tensor that `kernel_fusion.kernels` does not take.
    """
    name = f"kernels.{kernel}"
    if torch._C._are_functorch_transforms_active():
        raise BackendUnavailableError(f"`{name}`: torch.func cannot see through kernels; kernel_fusion.ops can be used")
    given = {argument: tensor for argument, tensor in tensors.items() if tensor is not None or argument not in optional}
    for argument, tensor in given.items():
        _check_kind(name, argument, tensor)
        _check_memory(name, argument, tensor)
    _check_devices(name, given)
    return _backend(name, next(iter(given.values())).device), [
        None if tensor is None else tensor.detach() for tensor in tensors.values()
    ]


def _check_kind(name: str, argument: str, tensor: Any) -> None:
    if not isinstance(tensor, Tensor) or availability.is_foreign(tensor):
        raise TypeError(f"`{name}`: `{argument}` must be a torch.Tensor, got {type(tensor).__name__}")
    if tensor.dtype not in checks.FLOATING:
        raise TypeError(f"`{name}`: `{argument}` must be one of {_FLOATING}, got {tensor.dtype}")


def _check_memory(name: str, argument: str, tensor: Tensor) -> None:
    if tensor.layout != torch.strided:
        raise ValueError(f"`{name}`: `{argument}` must be a contiguous tensor, got layout {tensor.layout}")
    if not tensor.is_contiguous():
        raise ValueError(
            f"`{name}`: `{argument}` must be contiguous, got shape {tuple(tensor.shape)} with strides {tensor.stride()}"
        )
    # While a program is traced there is no memory yet.
    if not torch.compiler.is_compiling() and tensor.device.type != "meta" and tensor.data_ptr() % tensor.itemsize:
        raise ValueError(
            f"`{name}`: `{argument}` must be aligned to its element of {tensor.itemsize} bytes, got address "
            f"{tensor.data_ptr():#x}"
        )


def _check_devices(name: str, tensors: dict[str, Tensor]) -> None:
    places = {argument: tensor.device for argument, tensor in tensors.items()}
    if len(set(places.values())) > 1:
        found = ", ".join(f"`{argument}` on {device}" for argument, device in places.items())
        raise ValueError(f"`{name}`: all tensors must be on one device, got {found}")


def _backend(name: str, device: torch.device) -> str:
    """The backend with the kernels of `device`."""
    if device.type not in _DEVICES:
        known = " and ".join(_DEVICES)
        raise BackendUnavailableError(f"`{name}`: there are kernels for {known} tensors, and the input is on {device}")
    reason = dispatch.unavailable_reason(device.type, device)
    if reason:
        raise BackendUnavailableError(f"`{name}`: the kernels of {device} are not available, because {reason}")
    return device.type
