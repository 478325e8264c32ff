"""Opens the C++ extension and declares its C functions. `kernel_fusion.operators.loader` does so once per process."""

from __future__ import annotations

import ctypes
import os
import sys
from contextlib import ExitStack, suppress

from kernel_fusion.native.forks import no_fork


def open_extension() -> ctypes.CDLL:
    """The extension, built if need be.

    Raises:
        BuildError: it cannot be built or opened.
    """
    with no_fork:
        from kernel_fusion.native import build  # here, because it needs what only POSIX has

    opened = build.load_library(_dlopen, say)
    opened.kf_count.restype = ctypes.c_int64
    opened.kf_cpu_variant.restype = ctypes.c_char_p
    opened.kf_keep_memory.argtypes = [ctypes.c_int64]
    opened.kf_use_cpu_variant.restype = ctypes.c_bool
    opened.kf_set_planner.argtypes = [ctypes.c_void_p, ctypes.c_uint64]
    return opened


def say(line: str) -> None:
    """Tell the user how a build goes, where anybody can be told."""
    with suppress(OSError, ValueError):
        print(line, file=sys.stderr, flush=True)


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
