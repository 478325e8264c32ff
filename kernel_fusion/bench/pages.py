"""Page faults, and what a call on a CPU costs without them: the memory that results are written to.

Memory that is new to a process is given to it page by page, as it is first written: a fault each, in which the system
clears the page. A result pays for that whenever its memory was handed back in between, which glibc does with blocks
above a threshold. The threshold grows with what a program frees, so that a time would depend on which shapes were
measured before. Here results are in new memory, or all in memory that the process has had.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from kernel_fusion.native import loader

_M_MMAP_THRESHOLD = -3  # of <malloc.h>
_THRESHOLD = 128 << 10  # where glibc begins

METHOD = (
    f"results of {_THRESHOLD >> 10} KB and more are in memory that is new to the process where the heap has no hole "
    "for them, as in a program on Linux that has freed no larger tensor; reused_median_ms: the median where freed "
    "tensors are kept and handed out again, so that results of every size are in memory that the process has had"
)


def faults() -> int:
    """How many page faults of the process the system has served without a disk; 0 where it does not count them."""
    try:
        import resource
    except ImportError:
        return 0
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def renew() -> None:
    """From now on every large result is in new memory: glibc's threshold stays where it begins.

    Other systems' allocators are left as they are.
    """
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(_M_MMAP_THRESHOLD, _THRESHOLD)


@contextmanager
def reused() -> Iterator[None]:
    """Within, what tensors on the CPU free is kept and handed out again: a call repeated faults no more.

    Raises:
        BuildError: the extension, which keeps it, cannot be loaded.
    """
    loader.keep_memory(True)
    try:
        yield
    finally:
        loader.keep_memory(False)
