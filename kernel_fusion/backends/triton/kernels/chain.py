"""Programmatic dependent launch: a kernel starts while the one before it in the stream still runs, and waits here.

It needs an NVIDIA GPU from sm_90. A kernel that is not launched so (CHAINED) waits for nothing. A chained one touches
no memory before the wait, after which all earlier launches are done. Triton may lack NVIDIA's part.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def wait_for_previous_kernel(CHAINED: tl.constexpr):
    """Comes before the first access to memory."""
    if CHAINED:  # pragma: gpu
        tl.extra.cuda.gdc_wait()


@triton.jit
def let_next_kernel_start(RELEASES: tl.constexpr):
    """Once every program is here or ended, a chained next kernel may start."""
    if RELEASES:  # pragma: gpu
        tl.extra.cuda.gdc_launch_dependents()
