"""Elementary functions to a few units in the last place, and quotients that are rounded correctly.

Triton's own `exp` is the hardware's approximation, whose error grows with its argument, and it has no tanh, expm1 and
log1p. Compiled kernels therefore take them from the device's mathematical library. Triton's interpreter, in which the
tests run on the CPU, has no such library: there they are formulas over NumPy's exp and log, which are accurate.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import libdevice

INTERPRETED = bool(triton.knobs.runtime.interpret)

if INTERPRETED:

    @triton.jit
    def exp(x):
        """e^x."""
        return tl.exp(x)

    @triton.jit
    def expm1(x):
        """e^x - 1, by Kahan's quotient, in which the rounding of e^x cancels."""
        u = tl.exp(x)
        quotient = (u - 1.0) * (x / tl.log(u))
        return tl.where(u == 1.0, x, tl.where(tl.abs(x) > 40.0, u - 1.0, quotient))

    @triton.jit
    def log1p(x):
        """log(1 + x), by the same quotient."""
        u = 1.0 + x
        return tl.where(u == 1.0, x, tl.log(u) * (x / (u - 1.0)))

    @triton.jit
    def tanh(x):
        """tanh(x), from e^(2|x|) - 1; near 1 by its distance from 1, which has all digits."""
        e = expm1(2.0 * tl.abs(x))
        t = tl.where(tl.abs(x) > 0.5, 1.0 - 2.0 / (e + 2.0), e / (e + 2.0))
        return tl.where(x < 0.0, -t, t)

else:  # pragma: gpu

    @triton.jit
    def exp(x):
        """e^x."""
        return libdevice.exp(x)

    @triton.jit
    def expm1(x):
        """e^x - 1."""
        return libdevice.expm1(x)

    @triton.jit
    def log1p(x):
        """log(1 + x)."""
        return libdevice.log1p(x)

    @triton.jit
    def tanh(x):
        """tanh(x)."""
        return libdevice.tanh(x)


@triton.jit
def divide(a, b):
    """a / b, rounded correctly: for what a whole row is multiplied by."""
    if a.dtype == tl.float64:
        return a / b
    else:
        return tl.div_rn(a, b)


@triton.jit
def quotient(a, b, reciprocal):
    """a / b, given 1 / b: exact where it has no more digits than a, as the mean of equal numbers is.

    In the middle of a row's work a division would cost more than the row's sums. What comes of the last operations here
    is not fused with the next, which the compiler would do in one kernel and not in another.
    """
    estimate = a * reciprocal
    corrected = tl.fma(tl.fma(-estimate, b, a), reciprocal, estimate)
    return tl.where(tl.abs(estimate) < float("inf"), corrected, estimate)


@triton.jit
def reciprocal_sqrt(x):
    """1 / sqrt(x). In float32 the device's approximation and a step of Newton's: to a unit in the last place.

    What is rounded correctly is a call of a function on NVIDIA GPUs, around which the compiler has to save registers.
    """
    if x.dtype == tl.float64:
        return 1.0 / tl.sqrt(x)
    else:
        # The approximation takes numbers below 2^-126 for zero.
        tiny = x < 2.0**-64
        scaled = tl.where(tiny, x * 2.0**64, x)
        root = tl.rsqrt(scaled)
        better = root * (1.5 - 0.5 * scaled * root * root)
        root = tl.where((scaled > 0.0) & (scaled < float("inf")), better, root)
        return tl.where(tiny, root * 2.0**32, root)
