"""Finds out which CUDA kernels some calls need, perhaps without a GPU.

CPU tensors stand for CUDA tensors: the same code makes the keys, and asks a planner that notes them. Results are
meaningless. A GPU would ask for the same, unless PyTorch lays out its results differently there.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from kernel_fusion.backends.cuda import planner
from kernel_fusion.backends.cuda.device import Device
from kernel_fusion.backends.cuda.source import Launch

# They share a sum over columns.
_MULTIPROCESSORS = 132


@contextmanager
def rehearsal(library: ctypes.CDLL, device: Device) -> Iterator[dict[tuple[planner.Spec, Any], None]]:
    """Within, in every thread, CPU tensors stand for those of `device`.

    Args:
        library: the extension.
        device: that kernels are planned for.

    Yields:
        Spec and access of each kernel that calls have needed so far.
    """
    met: dict[tuple[planner.Spec, Any], None] = {}

    def note(_: int, spec: planner.Spec, access: Any) -> tuple[Launch, str, bytes]:
        met[spec, access] = None
        return planner.launch_of(planner.plan_for(spec, access, device), device), "", b""

    noting = planner.callback(note)  # C++ may call it
    library.kf_rehearse(ctypes.cast(noting, ctypes.c_void_p), _MULTIPROCESSORS)
    try:
        yield met
    finally:
        library.kf_rehearse(None, 0)
