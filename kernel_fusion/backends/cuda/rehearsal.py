"""Finds out which CUDA kernels some calls need, on a machine that need not have a GPU.

In a rehearsal the extension takes a call with CPU tensors also for the call with CUDA tensors that it stands for: the
same code makes the key, and asks a planner, which notes it and loads nothing. What is computed is of no use. What is
noted is what a GPU would ask for, unless PyTorch's own operators lay out their results differently there.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from kernel_fusion.backends.cuda import planner
from kernel_fusion.backends.cuda.device import Device
from kernel_fusion.backends.cuda.launch import Launch

# How many multiprocessors a GPU is taken to have; a sum over columns is divided among them.
_MULTIPROCESSORS = 132


@contextmanager
def rehearsal(library: ctypes.CDLL, device: Device) -> Iterator[dict[tuple[planner.Spec, Any], None]]:
    """Within this context, in every thread, CPU tensors stand for those of a device.

    Args:
        library: the extension.
        device: that kernels are planned for.

    Yields:
        The spec and access of each kernel that calls have needed so far, once, in this order.
    """
    met: dict[tuple[planner.Spec, Any], None] = {}

    def note(_: int, spec: planner.Spec, access: Any) -> tuple[Launch, str, bytes]:
        met[spec, access] = None
        return planner.launch_of(planner.plan_for(spec, access, device), device), "", b""

    noting = planner.callback(note)  # which must live as long as C++ may call it
    library.kf_rehearse(ctypes.cast(noting, ctypes.c_void_p), _MULTIPROCESSORS)
    try:
        yield met
    finally:
        library.kf_rehearse(None, 0)
