"""Launches a kernel: for real, traced by torch.compile, or in Triton's interpreter."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import fields, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import py_sym_types
from torch.fx.experimental.symbolic_shapes import guard_scalar

from kernel_fusion.backends.triton.kernels.constants import Constants
from kernel_fusion.backends.triton.kernels.elementary import INTERPRETED
from kernel_fusion.backends.triton.plan import Plan

launches: dict[str, int] = {}


def launch(
    kernel: Any, grid: tuple[Any, ...], *args: Any, constants: Constants, warps: int, registers: int | None = None
) -> None:
    """Launch `kernel` on its first tensor's device; None stands for an unused pointer.

    A `chained` kernel starts while the one before it runs; `registers` limits a thread. Traced launches have neither:
    Inductor cannot chain, and with Triton 3.6 the wait hides from it what a kernel writes.
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
    options: dict[str, Any] = {}  # options of NVIDIA devices
    if wrapped is not kernel:
        constants = _for_inductor(constants)
    else:
        options |= {"launch_pdl": True} if constants.chained else {}
        options |= {"maxnreg": registers} if registers else {}
    with _on(first.device):
        wrapped[grid](*pointers, C=constants, num_warps=warps, **options)


def _for_inductor(constants: Constants) -> Constants:
    """Not chained, and with numbers instead of symbols."""
    values = {field.name: getattr(constants, field.name) for field in fields(constants)}
    numbers = {name: guard_scalar(value) for name, value in values.items() if isinstance(value, py_sym_types)}
    changes: dict[str, Any] = numbers | {"chained": False}
    return replace(constants, **changes)


def tile(plan: Plan) -> dict[str, Any]:
    """The constants of a tile."""
    return {"rows": plan.rows, "block": plan.block}


def row_tile(plan: Plan, cols: int) -> dict[str, Any]:
    """The constants of a tile of rows."""
    return {**tile(plan), "exact": cols % plan.block == 0}


def _on(device: torch.device) -> AbstractContextManager[Any]:
    """Makes `device` current; tracing also works for an absent one."""
    if device.type == "xpu" and torch.xpu.is_available():  # pragma: gpu
        return torch.xpu.device(device)
    if device.type == "cuda" and torch.cuda.is_available():  # pragma: gpu
        return torch.cuda.device(device)
    return nullcontext()
