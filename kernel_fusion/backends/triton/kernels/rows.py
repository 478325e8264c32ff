"""Where rows lie, and the type that a kernel computes in."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def row_offset(row, middle, inner, stride0, stride1, stride2, FLAT: tl.constexpr):
    """The offset of row number `row` (int64) of a tensor whose rows are indexed (outer, middle, inner).

    FLAT: both `middle` and `inner` are 1, which saves the divisions.
    """
    if FLAT:
        return row * stride0
    plane = row // inner
    return (plane // middle) * stride0 + (plane % middle) * stride1 + (row % inner) * stride2


@triton.jit
def load(ptr, offset, mask, WIDE: tl.constexpr):
    """A tile, widened to the type that is computed in: float64 if WIDE, else float32. Zero where masked."""
    if mask is None:
        values = tl.load(ptr + offset)
    else:
        values = tl.load(ptr + offset, mask=mask, other=0.0)
    if WIDE:
        return values.to(tl.float64)
    else:
        return values.to(tl.float32)


@triton.jit
def store(ptr, offset, values, mask):
    """A tile, rounded to the type of the tensor."""
    tl.store(ptr + offset, values.to(ptr.dtype.element_ty), mask=mask)
