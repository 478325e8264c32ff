"""Programmatic dependent launch: a kernel starts while the one before it in the stream still runs, and waits here.

On NVIDIA GPUs from sm_90. CHAINED says whether a kernel is launched so; launched in the ordinary way it waits for
nothing. A chained kernel touches no memory before it has waited: then all that was launched before it is done. The
instructions are looked up only where they are compiled in: Triton may come without NVIDIA's part.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def wait_for_previous_kernel(CHAINED: tl.constexpr):
    """What comes before the first access to memory."""
    if CHAINED:  # pragma: gpu
        tl.extra.cuda.gdc_wait()


@triton.jit
def let_next_kernel_start(RELEASES: tl.constexpr):
    """Once every program has been here, or has ended, the next kernel may start, if that is chained."""
    if RELEASES:  # pragma: gpu
        tl.extra.cuda.gdc_launch_dependents()
