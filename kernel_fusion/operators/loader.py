"""Loads the C++ extension once per process."""

from __future__ import annotations

import ctypes
import os
import threading
import warnings

import torch

from kernel_fusion.backends import availability
from kernel_fusion.core.fields import COUNTERS
from kernel_fusion.errors import BuildError
from kernel_fusion.native.library import open_extension
from kernel_fusion.operators import schemas
from kernel_fusion.operators.fallback import take_over

_lock = threading.RLock()
_library: ctypes.CDLL | None = None
_error: str | None = None


def _in_forked_child() -> None:
    """Make a new lock: a thread of the parent may hold the old one, and does not exist here."""
    global _lock
    _lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_forked_child)


def is_loaded() -> bool:
    """Whether the extension is loaded."""
    return _library is not None


def load() -> bool:
    """Load the extension, building it if need be. If that fails, warn once and return False."""
    global _library, _error
    if _library is not None:
        return True
    with _lock:
        if _library is None and _error is None:
            try:
                _library = _open()
            except Exception as error:  # whatever failed, the definition can serve the call
                _error = str(error) if isinstance(error, BuildError) else f"{type(error).__name__}: {error}"
                warnings.warn(
                    f"kernel_fusion works without its C++ extension, which could not be built: {_error}\n"
                    "CPU tensors take the plain PyTorch definition; CUDA kernels are launched from Python.",
                    stacklevel=2,
                )
        return _library is not None


def error() -> str | None:
    """The reason that loading failed, or None."""
    return _error


def library() -> ctypes.CDLL:
    """The loaded extension. Raises BuildError if it cannot be loaded."""
    if not load():
        raise BuildError(str(_error))
    assert _library is not None
    return _library


def launches(counter: str) -> int:
    """How often kernels of a kind, one of `COUNTERS`, ran in this process."""
    return int(library().kf_count(COUNTERS.code(counter)))


def cpu_variant() -> str:
    """The name of the build of the CPU kernels that is in use. Raises BuildError without the extension."""
    return str(library().kf_cpu_variant().decode())


def use_cpu_variant(name: str) -> None:
    """Make all threads run one build of the CPU kernels, for measurements and tests.

    Raises:
        ValueError: the machine or the library lacks it (`kernel-fusion warmup --any-cpu` builds all).
        BuildError: there is no extension.
    """
    if not library().kf_use_cpu_variant(name.encode()):
        raise ValueError(
            "`name` must be a build of the CPU kernels that this machine can run and the extension has "
            f"(`kernel-fusion warmup --any-cpu` builds all of them), got {name!r}"
        )


def keep_memory(largest: int | None) -> None:
    """Reuse the freed memory of CPU tensors of up to `largest` bytes; None restores PyTorch's allocator.

    This is for measurements only: the system gets no memory back before the next call of this function. Raises
    BuildError without the extension.
    """
    library().kf_keep_memory(-1 if largest is None else largest)


def _open() -> ctypes.CDLL:
    opened = open_extension()
    _forget_stubs()
    _enable_cuda(opened)
    return opened


def _forget_stubs() -> None:
    """Make the operators look for new kernels, because Python's dispatchers remember the stubs."""
    for name in schemas.ALL:
        schemas.overload(name)._dispatch_cache.clear()


def _enable_cuda(library: ctypes.CDLL) -> None:
    """Give the extension its planner, if CUDA kernels can run here. Otherwise the definition serves CUDA tensors."""
    devices = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    able = [device.index for device in devices if availability.why_not_cuda(device) is None]
    if able:
        from kernel_fusion.backends.cuda import planner

        planner.install(library, able)
    elif devices and availability.why_not_triton(devices[0]) is None:
        take_over("CUDA")
