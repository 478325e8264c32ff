"""Opens the C++ extension and declares its C functions."""

from __future__ import annotations

import ctypes
import os
import sys
from contextlib import ExitStack, suppress
from typing import Any

from kernel_fusion.native.forks import no_fork

# `Opener` of extension/cpu/variant.cpp.
_OPENER = ctypes.CFUNCTYPE(None, ctypes.POINTER(ctypes.c_void_p), ctypes.POINTER(ctypes.c_char_p))
_errors: list[bytes] = []  # C++ points to these


def open_extension() -> ctypes.CDLL:
    """The extension, built if necessary, or BuildError."""
    with no_fork:
        from kernel_fusion.native import build  # it needs POSIX

    opened = build.load_library(_dlopen, say)
    opened.kf_count.restype = ctypes.c_int64
    opened.kf_cpu_variant.restype = ctypes.c_char_p
    opened.kf_keep_memory.argtypes = [ctypes.c_int64]
    opened.kf_use_cpu_variant.restype = ctypes.c_bool
    opened.kf_rehearse.argtypes = [ctypes.c_void_p, ctypes.c_int]
    opened.kf_set_planner.argtypes = [ctypes.c_void_p, ctypes.c_uint64]
    opened.kf_set_gradient_opener.argtypes = [ctypes.c_void_p]
    opened.kf_set_gradient_opener(ctypes.cast(_opener, ctypes.c_void_p))
    return opened


def _open_gradients(table: Any, error: Any) -> None:
    """Answer the gradients that the loaded library lacks, or an error."""
    try:
        from kernel_fusion.native import build

        opened = build.load_gradients(_dlopen, say)
        (variant,) = build.own_variants()
        table[0] = ctypes.cast(getattr(opened, f"kf_gradient_kernels_{variant}"), ctypes.c_void_p)
    except BaseException as raised:  # nothing may be raised through C
        _errors.append(f"{type(raised).__name__}: {raised}".encode())
        error[0] = _errors[-1]


_opener = _OPENER(_open_gradients)


def say(line: str) -> None:
    """Print a build's progress, if possible."""
    with suppress(OSError, ValueError):
        print(line, file=sys.stderr, flush=True)


def _dlopen(file: int) -> ctypes.CDLL:
    """Open the library behind `file`, whatever its path leads to by now.

    Its name, which debuggers follow while `file` is open, has this process's number, so no other library has it.
    """
    try:
        process = os.readlink("/proc/self")
    except OSError:  # no Linux
        from kernel_fusion.native import build

        with ExitStack() as stack:
            return ctypes.CDLL(str(build.copy_of(file, stack)))
    return ctypes.CDLL(f"/proc/{process}/fd/{file}")
