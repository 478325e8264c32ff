"""The definition of operators whose bodies launch kernels, and the launch of a kernel.

A launch runs the kernel on a GPU or in Triton's interpreter, or becomes a node of the graph that torch.compile traces.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import fields, replace
from functools import wraps
from itertools import islice
from typing import Any, get_type_hints

import numpy as np
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import py_sym_types
from torch.fx.experimental.symbolic_shapes import guard_scalar

from kernel_fusion.backends.triton import plan
from kernel_fusion.backends.triton.kernels.constants import Constants
from kernel_fusion.backends.triton.kernels.elementary import INTERPRETED
from kernel_fusion.core.stages import ARGUMENTS, Given

# How often each kernel was launched, by its name. Tests compare these counters before and after a call.
launches: dict[str, int] = {}
_STAGE_TYPES = {"str": str, "float": float, "bool": bool, "Tensor?": Tensor | None}


def operator(name: str) -> Callable[[Callable[..., Any]], Any]:
    """Return a decorator that defines the operator `kernel_fusion::triton_{name}` by the decorated function.

    A parameter whose type is a named tuple stands for one argument of the operator per field. The function gets the
    tuple again.
    """

    def define(function: Callable[..., Any]) -> Any:
        signature = inspect.signature(function, eval_str=True)
        own = signature.parameters.items()
        parts = [_part(parameter) for _, parameter in own]

        @wraps(function)
        def flat(*args: Any) -> Any:
            left = iter(args)
            return function(*[part(left) for part in parts])

        arguments = [
            argument for name, each in own for argument in _arguments(name, each.annotation, default=each.default)
        ]
        # PyTorch makes the schema from this.
        setattr(flat, "__signature__", signature.replace(parameters=arguments))  # noqa: B010
        return torch.library.triton_op(f"kernel_fusion::triton_{name}", flat, mutates_args={})

    return define


def _part(parameter: inspect.Parameter) -> Callable[[Iterator[Any]], Any]:
    """A function that takes as many of the operator's arguments as the parameter needs, and returns its value."""
    kind = parameter.annotation
    if parameter.default is not inspect.Parameter.empty:
        return lambda left: next(left, parameter.default)  # the dispatcher omits what has its default
    if kind is Given:
        return lambda left: Given(*left)  # the last parameter, of which the dispatcher omits what has its default
    if not hasattr(kind, "_fields"):
        return next
    count = len(kind._fields)
    if [*get_type_hints(kind).values()][-1] is Given:
        return lambda left: kind(*islice(left, count - 1), Given(*left))
    return lambda left: kind(*islice(left, count))


def _arguments(name: str, kind: Any, default: Any = inspect.Parameter.empty) -> list[inspect.Parameter]:
    """The operator's arguments for the parameter `name`, of type `kind`, with the default of a plain one."""
    usual = inspect.Parameter.POSITIONAL_OR_KEYWORD
    if kind is Given:
        return [
            inspect.Parameter(each.name, usual, default=each.default, annotation=_STAGE_TYPES[each.type])
            for each in ARGUMENTS
        ]
    if not hasattr(kind, "_fields"):
        return [inspect.Parameter(name, usual, annotation=kind, default=default)]
    return [argument for field in get_type_hints(kind).items() for argument in _arguments(*field)]


def launch(
    kernel: Any, grid: tuple[Any, ...], *args: Any, constants: Constants, warps: int, registers: int | None = None
) -> None:
    """Launch `kernel` on the device of its first tensor.

    Args:
        kernel: A function that `constants.kernel` has decorated.
        grid: The number of programs along each axis.
        args: The kernel's tensors and numbers; None stands for a pointer that the kernel does not use.
        constants: The constants that the kernel is compiled for.
        warps: The warps of a program, each counted as 32 threads.
        registers: The most registers of a thread, on NVIDIA devices; None for no bound. Inductor knows no such option,
            so a traced launch has no bound.
    """
    name = kernel.fn.__name__
    launches[name] = launches.get(name, 0) + 1
    first = next(arg for arg in args if isinstance(arg, Tensor))
    pointers = [first if arg is None else arg for arg in args]
    if INTERPRETED:
        with np.errstate(all="ignore"):  # infinities and NaN are allowed
            kernel[grid](*pointers, C=constants)
        return
    wrapped = torch.library.wrap_triton(kernel)
    traced = wrapped is not kernel
    if traced:
        constants = _without_symbols(constants)
    options = {"maxnreg": registers} if registers and not traced else {}
    with _on(first.device):
        wrapped[grid](*pointers, C=constants, num_warps=plan.device_of(first.device).warps(warps), **options)


def _without_symbols(constants: Constants) -> Constants:
    """The constants with numbers in place of symbols, as Inductor needs them."""
    values = {field.name: getattr(constants, field.name) for field in fields(constants)}
    numbers: dict[str, Any] = {
        name: guard_scalar(value) for name, value in values.items() if isinstance(value, py_sym_types)
    }
    return replace(constants, **numbers)


def _on(device: torch.device) -> AbstractContextManager[Any]:
    """A context in which `device` is current. Tracing also works for a device that is not there."""
    if device.type == "xpu" and torch.xpu.is_available():  # pragma: gpu
        return torch.xpu.device(device)
    if device.type == "cuda" and torch.cuda.is_available():  # pragma: gpu
        return torch.cuda.device(device)
    return nullcontext()
