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
def reciprocal_sqrt(x):
    """1 / sqrt(x), both rounded correctly."""
    if x.dtype == tl.float64:
        return 1.0 / tl.sqrt(x)
    else:
        return tl.div_rn(1.0, tl.sqrt_rn(x))
