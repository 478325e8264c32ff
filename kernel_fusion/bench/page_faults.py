"""Page faults, and what a call on a CPU costs without them: the memory that results are written to.

Memory that is new to a process is given to it page by page, as it is first written: a fault each, in which the system
clears the page. A result pays for that whenever its memory was handed back in between, which glibc does with blocks
above a threshold. The threshold grows with what a program frees, and a hole in the heap may take a block of any size,
so that a time would depend on what was measured before. Here it is settled which results are in new memory.
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
    """Within, tensors on the CPU up to `largest` bytes are in memory that was freed before, larger ones in new memory.

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
