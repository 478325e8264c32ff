"""Settles which results of a CPU are in memory that is new to the process, and counts page faults.

The system clears each new page at its first write, which a result pays for. Left alone, glibc decides by what was
freed before which results are new, so that a time would depend on the measurements before it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

from kernel_fusion.operators import loader

# The largest threshold that glibc chooses by itself, on freeing a block of that size.
_THRESHOLD = 32 << 20

METHOD = (
    f"as by glibc in a program that has freed a tensor of {_THRESHOLD >> 20} MB: larger tensors are in memory that is "
    "new to the process, others in memory of before, once one of their size was freed; reused_median_ms: the median "
    "where tensors of every size are in memory of before"
)


def faults() -> int:
    """How many page faults of the process the system has served without a disk; 0 where it does not count them."""
    try:
        import resource
    except ImportError:
        return 0
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


@contextmanager
def settled(largest: int = _THRESHOLD) -> Iterator[None]:
    """Within, tensors up to `largest` bytes are in memory freed before, larger ones in new memory.

    Raises:
        BuildError: the extension, which sees to it, cannot be loaded.
    """
    loader.keep_memory(largest)
    try:
        yield
    finally:
        loader.keep_memory(None)


def reused() -> AbstractContextManager[None]:
    """As `settled`, whatever the size: a call repeated faults no more."""
    return settled(sys.maxsize)
