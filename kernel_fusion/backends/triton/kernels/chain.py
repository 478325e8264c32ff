"""Programmatic dependent launch: a kernel starts while the one before it still runs, and waits here.

A chained kernel touches no memory before the wait, after which all earlier launches are done.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def wait_for_previous_kernel(CHAINED: tl.constexpr):
    """Before memory is touched; a kernel that is not chained waits for nothing."""
    if CHAINED:  # pragma: gpu
        tl.extra.cuda.gdc_wait()


@triton.jit
def let_next_kernel_start(RELEASES: tl.constexpr):
    """Once every program is here or ended, a chained next kernel may start."""
    if RELEASES:  # pragma: gpu
        tl.extra.cuda.gdc_launch_dependents()
