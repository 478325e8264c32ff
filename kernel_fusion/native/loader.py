"""Loads the C++ extension, once per process and when something first needs it; says so if it cannot be had."""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import warnings
from collections.abc import Callable
from contextlib import ExitStack, suppress

from kernel_fusion.errors import BuildError

_lock = threading.RLock()
# A fork waits until this is free. A module that is half imported would keep the child waiting for ever; a compiler that
# is half started, whose pipe the child would have a copy of, the parent.
no_fork = threading.RLock()
_library: ctypes.CDLL | None = None
_error: str | None = None
_hooks: list[Callable[[ctypes.CDLL], None]] = []

# `Counter` of native/extension/counters.h.
_COUNTERS = ("cpu_forward", "cpu_backward", "cuda_launch")


def _in_forked_child() -> None:
    """The thread that loads the extension in the parent does not exist here and would never let go of the lock."""
    global _lock
    _lock = threading.RLock()
    no_fork.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=no_fork.acquire, after_in_parent=no_fork.release, after_in_child=_in_forked_child)


def on_load(hook: Callable[[ctypes.CDLL], None]) -> None:
    """Have `hook` called with the extension when it is loaded, before anything uses it."""
    _hooks.append(hook)


def is_loaded() -> bool:
    """Whether the extension is in this process; loads nothing."""
    return _library is not None


def load() -> bool:
    """Load the extension, building it if need be. False, with one warning per process, where that is impossible."""
    global _library, _error
    if _library is not None:
        return True
    with _lock:
        if _library is None and _error is None:
            try:
                _library = _open()
            except Exception as error:  # whatever a machine lacks, the definition serves the call
                _error = str(error) if isinstance(error, BuildError) else f"{type(error).__name__}: {error}"
                warnings.warn(
                    f"kernel_fusion works without its C++ extension, which could not be built: {_error}\n"
                    "CPU tensors take the plain PyTorch definition; CUDA kernels are launched from Python.",
                    stacklevel=2,
                )
        return _library is not None


def error() -> str | None:
    """Why the extension could not be loaded, or None."""
    return _error


def library() -> ctypes.CDLL:
    """The loaded extension, for its C functions.

    Raises:
        BuildError: it cannot be loaded.
    """
    if not load():
        raise BuildError(str(_error))
    assert _library is not None
    return _library


def launches(counter: str) -> int:
    """How often kernels ran in this process; `counter` is "cpu_forward", "cpu_backward" or "cuda_launch"."""
    return int(library().kf_count(_COUNTERS.index(counter)))


def cpu_variant() -> str:
    """The build of the CPU kernels that runs in this process: one of `build.cpu_variants`.

    Raises:
        BuildError: the extension cannot be loaded.
    """
    return str(library().kf_cpu_variant().decode())


def use_cpu_variant(name: str) -> None:
    """Make every thread run the build `name` of the CPU kernels from now on, to measure or to test it.

    Raises:
        ValueError: this machine cannot run it, or the library that is loaded is without it; `kernel-fusion warmup
            --any-cpu` builds one that has them all.
        BuildError: the extension cannot be loaded.
    """
    if not library().kf_use_cpu_variant(name.encode()):
        raise ValueError(
            "`name` must be a build of the CPU kernels that this machine can run and the extension has "
            f"(`kernel-fusion warmup --any-cpu` builds all of them), got {name!r}"
        )


def keep_memory(largest: int | None) -> None:
    """Keep what tensors on the CPU free and hand it out again, up to a size; larger ones are in new memory each time.

    For measurements only: nothing that is kept goes back to the system before the next call of this function.

    Args:
        largest: in bytes; None gives PyTorch its own allocator back.

    Raises:
        BuildError: the extension cannot be loaded.
    """
    library().kf_keep_memory(-1 if largest is None else largest)


def say(line: str) -> None:
    """Tell the user how a build goes, where anybody can be told."""
    with suppress(OSError, ValueError):
        print(line, file=sys.stderr, flush=True)


def _open() -> ctypes.CDLL:
    with no_fork:
        from kernel_fusion.native import build  # here, because it needs what only POSIX has

    opened = build.load_library(_dlopen, say)
    opened.kf_count.restype = ctypes.c_int64
    opened.kf_cpu_variant.restype = ctypes.c_char_p
    opened.kf_keep_memory.argtypes = [ctypes.c_int64]
    opened.kf_use_cpu_variant.restype = ctypes.c_bool
    opened.kf_set_planner.argtypes = [ctypes.c_void_p, ctypes.c_uint64]
    for hook in _hooks:
        hook(opened)
    return opened


def _dlopen(file: int) -> ctypes.CDLL:
    """Open the library that `file` is, rather than what a path leads to by now.

    The name has the number of this process in it, which no other library's has, and debuggers can follow it. `file`
    stays open, so that no other library gets the same name.
    """
    try:
        process = os.readlink("/proc/self")
    except OSError:  # no Linux
        from kernel_fusion.native import build

        with ExitStack() as stack:
            return ctypes.CDLL(str(build.copy_of(file, stack)))
    return ctypes.CDLL(f"/proc/{process}/fd/{file}")
