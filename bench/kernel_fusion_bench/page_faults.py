"""Decides which results on a CPU lie in new memory, and counts page faults.

The system clears each new page at its first write, and the call pays for that. glibc gives out new memory
depending on what was freed before, so a time would depend on earlier measurements.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

from kernel_fusion.operators import loader

# The largest threshold that glibc chooses by itself.
_THRESHOLD = 32 << 20

METHOD = (
    f"as by glibc in a program that has freed a tensor of {_THRESHOLD >> 20} MB: larger tensors are in memory that is "
    "new to the process, others in memory of before, once one of their size was freed; reused_median_ms: the median "
    "where tensors of every size are in memory of before"
)


def faults() -> int:
    """Page faults that the process had served without a disk; 0 if the system does not count them."""
    try:
        import resource
    except ImportError:
        return 0
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


@contextmanager
def settled(largest: int = _THRESHOLD) -> Iterator[None]:
    """Within, tensors up to `largest` bytes reuse freed memory; larger ones get new memory. The extension sets this."""
    loader.keep_memory(largest)
    try:
        yield
    finally:
        loader.keep_memory(None)


def reused() -> AbstractContextManager[None]:
    """Reuse freed memory as `settled` does, for tensors of any size, so that repeated calls cause no faults."""
    return settled(sys.maxsize)
