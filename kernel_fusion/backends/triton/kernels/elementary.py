"""Elementary functions to a few units in the last place, and correctly rounded quotients.

The error of Triton's `exp` grows with its argument, and Triton has no tanh, expm1 and log1p. So compiled kernels use
the mathematical library of the device. The interpreter uses NumPy's exp and log and the formulas below.
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
    def fma(a, b, c):
        """a b + c in float32, rounded once. The interpreter of Triton 3.6 rounds twice.

        If the sum in float64 is not exact, its last digit is made odd, so that the rounding to float32 meets no tie.
        """
        product, c = a.to(tl.float64) * b.to(tl.float64), c.to(tl.float64)
        total = product + c
        part = total - product
        error = (product - (total - part)) + (c - part)
        bits = total.to(tl.int64, bitcast=True)
        odd = tl.where((error > 0.0) == (total > 0.0), bits + 1, bits - 1)
        inexact = (error != 0.0) & (bits & 1 == 0)
        return tl.where(inexact, odd, bits).to(tl.float64, bitcast=True).to(tl.float32)

    @triton.jit
    def expm1(x):
        """e^x - 1 by Kahan's quotient, in which the rounding error of e^x cancels."""
        u = tl.exp(x)
        quotient = (u - 1.0) * (x / tl.log(u))
        return tl.where(u == 1.0, x, tl.where(tl.abs(x) > 40.0, u - 1.0, quotient))

    @triton.jit
    def log1p(x):
        """log(1 + x) by the same quotient."""
        u = 1.0 + x
        return tl.where(u == 1.0, x, tl.log(u) * (x / (u - 1.0)))

    @triton.jit
    def tanh(x):
        """tanh(x) from e = e^(2|x|) - 1. Values near 1 are computed by their distance from 1."""
        e = expm1(2.0 * tl.abs(x))
        t = tl.where(tl.abs(x) > 0.5, 1.0 - 2.0 / (e + 2.0), e / (e + 2.0))
        return tl.where(x < 0.0, -t, t)

else:  # pragma: gpu
    exp, expm1, log1p, tanh = libdevice.exp, libdevice.expm1, libdevice.log1p, libdevice.tanh
    fma = tl.fma


@triton.jit
def divide(a, b):
    """a / b, rounded correctly. It is meant for a number per row, because it is slow."""
    if a.dtype == tl.float64:
        return a / b
    else:
        return tl.div_rn(a, b)


@triton.jit
def quotient(a, b, reciprocal):
    """a / b from the reciprocal of b, corrected by the remainder.

    It is exact if the quotient has no more digits than a, as the mean of equal numbers has. The last operations are
    fma, so that the compiler fuses none of them with later ones.
    """
    estimate = a * reciprocal
    corrected = tl.fma(tl.fma(-estimate, b, a), reciprocal, estimate)
    return tl.where(tl.abs(estimate) < float("inf"), corrected, estimate)


@triton.jit
def reciprocal_sqrt(x):
    """1 / sqrt(x). In float32 it is an approximation and a Newton step, which is right to one unit in the last place.

    The correctly rounded function is a call, around which a program would have to save its registers.
    """
    if x.dtype == tl.float64:
        return 1.0 / tl.sqrt(x)
    else:
        # The approximation treats numbers below 2^-126 as zero, so small numbers are scaled.
        tiny = x < 2.0**-64
        scaled = tl.where(tiny, x * 2.0**64, x)
        root = tl.rsqrt(scaled)
        better = root * (1.5 - 0.5 * scaled * root * root)
        root = tl.where((scaled > 0.0) & (scaled < float("inf")), better, root)
        return tl.where(tiny, root * 2.0**32, root)
