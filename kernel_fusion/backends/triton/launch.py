"""Launches a kernel, in whatever mode: for real, traced by torch.compile, or in Triton's interpreter."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kernel_fusion.backends.triton.kernels.elementary import INTERPRETED
from kernel_fusion.backends.triton.plan import Plan

# How many kernels this process has launched or traced, by the kernel's name; the tests compare it before and after.
launches: dict[str, int] = {}


def launch(
    kernel: Any, grid: tuple[Any, ...], *args: Any, warps: int, registers: int | None = None, **constants: Any
) -> None:
    """Launch `kernel` on the device of its first tensor; None stands for a pointer that is not followed.

    A kernel with the constant CHAINED is launched while the one before it still runs. A thread gets `registers` at
    most, if that is given. Neither is so where the launch is traced: Inductor launches in the ordinary way, and with
    Triton 3.6 the wait keeps it from finding out what a kernel writes.
    """
    name = kernel.fn.__name__
    launches[name] = launches.get(name, 0) + 1
    first = next(arg for arg in args if isinstance(arg, Tensor))
    pointers = [first if arg is None else arg for arg in args]
    if INTERPRETED:
        with np.errstate(all="ignore"):  # infinities and NaN are as welcome here as on a device
            kernel[grid](*pointers, **constants)
        return
    wrapped = torch.library.wrap_triton(kernel)
    options: dict[str, Any] = {}  # those of NVIDIA's devices
    if wrapped is not kernel:
        constants |= dict.fromkeys(constants.keys() & {"CHAINED", "RELEASES"}, False)
    else:
        options |= {"launch_pdl": True} if constants.get("CHAINED") else {}
        options |= {"maxnreg": registers} if registers else {}
    with _on(first.device):
        wrapped[grid](*pointers, **constants, num_warps=warps, **options)


def tile(plan: Plan) -> dict[str, int]:
    """The constants of a tile."""
    return {"ROWS": plan.rows, "BLOCK": plan.block}


def row_tile(plan: Plan, cols: int) -> dict[str, int]:
    """The constants of a tile of rows of so many columns."""
    return {**tile(plan), "EXACT": cols % plan.block == 0}


def _on(device: torch.device) -> AbstractContextManager[Any]:
    """Makes `device` current, which is where Triton launches; a program can be traced for one that is not there."""
    if device.type == "xpu" and torch.xpu.is_available():  # pragma: gpu
        return torch.xpu.device(device)
    if device.type == "cuda" and torch.cuda.is_available():  # pragma: gpu
        return torch.cuda.device(device)
    return nullcontext()
