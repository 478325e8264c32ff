"""Opens the C++ extension and declares its C functions."""

from __future__ import annotations

import ctypes
import os
import sys
from contextlib import ExitStack, suppress
from pathlib import Path

from kernel_fusion.native.forks import no_fork

_replaceable = 0  # the length of the last line of `say`, if the next one takes its place


def open_prebuilt() -> ctypes.CDLL | None:
    """The extension that this package's wheel brings, or None.

    Raises:
        OSError: there is one, but it cannot be used.
    """
    with no_fork:
        from kernel_fusion.native import prebuilt  # it needs POSIX

    opened = prebuilt.load(_dlopen)
    return opened and _declared(opened)


def open_built(because: str | None) -> ctypes.CDLL:
    """The extension from the cache, or built, or BuildError. Before it builds, it says `because`, if that is given."""
    with no_fork:
        from kernel_fusion.native import build

    reasons = [f"kernel_fusion: {because}"] if because else []

    def say_why(line: str) -> None:
        while reasons:
            say(reasons.pop())
        say(line)

    return _declared(build.load_library(_dlopen, say_why))


def ready_library(every_variant: bool = False) -> Path:
    """The library that a process opens here, that of the wheel or a built one, built if missing; or BuildError.

    `every_variant` builds it with other machines' CPU kernels too, which the wheel's has anyway.
    """
    from kernel_fusion.native import build, prebuilt

    return prebuilt.usable_library()[0] or build.built_library(say, every_variant=every_variant)


def _declared(opened: ctypes.CDLL) -> ctypes.CDLL:
    opened.kf_count.restype = ctypes.c_int64
    opened.kf_cpu_variant.restype = ctypes.c_char_p
    opened.kf_keep_memory.argtypes = [ctypes.c_int64]
    opened.kf_use_cpu_variant.restype = ctypes.c_bool
    opened.kf_rehearse.argtypes = [ctypes.c_void_p, ctypes.c_int]
    opened.kf_set_planner.argtypes = [ctypes.c_void_p, ctypes.c_uint64]
    return opened


def say(line: str) -> None:
    r"""Print a build's progress, if possible.

    A line that begins with "\r" says how far the build is. In a terminal or a notebook the next line takes its place.
    """
    global _replaceable
    text = line.removeprefix("\r")
    with suppress(OSError, ValueError):
        is_live = sys.stderr.isatty() or type(sys.stderr).__module__.startswith("ipykernel")
        end = "" if is_live and text != line else "\n"
        begin, width = ("\r", _replaceable) if _replaceable else ("", 0)
        print(begin + text.ljust(width), end=end, file=sys.stderr, flush=True)
        _replaceable = 0 if end else max(len(text), width)


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
