"""Why a backend cannot run on a device, or read a tensor. Loads nothing."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.nn.parameter import Buffer, Parameter

from kernel_fusion.config import triton_is_interpreted
from kernel_fusion.core import checks

# Types that need no further check.
PLAIN_TENSORS = frozenset({Tensor, Parameter, Buffer})
# Subclasses that stand for a plain tensor during tracing.
_TRACING_TENSORS = (FakeTensor, FunctionalTensor)
_Function = TypeVar("_Function", bound=Callable[..., Any])


def constant(function: _Function) -> _Function:
    """Mark a function whose answer tracers take, instead of following into it.

    As torch.compiler.assume_constant_result, whose import is slow.
    """
    setattr(function, "_dynamo_marked_constant", True)  # noqa: B010
    return function


@cache  # the answer never changes once the extension is loaded
def why_not_cuda(device: torch.device | None) -> str | None:
    """Why the CUDA kernels cannot run on `device` (None: anywhere here), or None."""
    if device is not None and device.type != "cuda":
        return f"the input is on {device}"
    if importlib.util.find_spec("kernel_fusion.backends.cuda") is None:
        return "this build has the Triton kernels alone"
    if torch.version.hip is not None:
        return "this PyTorch is for ROCm"
    if not torch.cuda.is_available():
        return "PyTorch sees no CUDA device"
    major, minor = torch.cuda.get_device_capability(device)
    if major < 8:
        return f"the kernels need compute capability 8.0 or newer, and this device has {major}.{minor}"
    if importlib.util.find_spec("cuda") is None or importlib.util.find_spec("cuda.bindings") is None:
        return "the package cuda-bindings is not installed (pip install cuda-bindings)"
    return None


@constant
def why_not_triton(device: torch.device | None) -> str | None:
    """The same for the Triton kernels."""
    if not _has_triton():
        return "the package triton is not installed (it comes with PyTorch's GPU builds)"
    return None if triton_is_interpreted() else _no_device_for_triton(device)


@cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


@cache
def _no_device_for_triton(device: torch.device | None) -> str | None:
    types = [device.type] if device is not None else ["cuda", "xpu"]
    if not any(t in ("cuda", "xpu") for t in types):
        interpreted = ", and its kernels run there in the interpreter alone (TRITON_INTERPRET=1)"
        return f"the input is on {device}" + (interpreted if types == ["cpu"] else "")
    if not any(getattr(torch, t).is_available() for t in types if t in ("cuda", "xpu")):
        return f"PyTorch sees no {' or '.join(types)} device"
    return None


def refusal(input: Tensor) -> str | None:
    """Why our kernels cannot read `input`, or None."""
    if input.layout != torch.strided or (is_foreign(input) and not is_dtensor(input)):
        return f"the input is a {type(input).__name__} of layout {input.layout}"
    if input.dtype not in checks.FLOATING:
        return f"its kernels take float16, bfloat16, float32 and float64, and the input is {input.dtype}"
    return None


def is_dtensor(input: object) -> bool:
    """Whether `input` is a DTensor, without importing that slow module."""
    module = getattr(torch.distributed, "tensor", None)  # torch.compile reads all of `sys.modules`
    return module is not None and isinstance(input, module.DTensor)


def is_foreign(input: Tensor) -> bool:
    """Whether `input` has its own rules (DTensor, nested, overriding subclasses)."""
    if type(input) in PLAIN_TENSORS or input.is_nested:
        return input.is_nested
    if isinstance(input, _TRACING_TENSORS) or _is_on_its_way(input):
        return False
    kind = type(input)
    function = getattr(kind.__torch_function__, "__func__", None)  # None: disabled, as for Parameter
    overrides = function not in (None, getattr(Tensor.__torch_function__, "__func__", None))
    return overrides or kind.__torch_dispatch__ is not Tensor.__torch_dispatch__


def _is_on_its_way(input: Tensor) -> bool:
    """Whether a collective may still be writing `input`; PyTorch's operators wait for it."""
    module = getattr(torch.distributed, "_functional_collectives", None)
    return module is not None and isinstance(input, module.AsyncCollectiveTensor)
