"""Stage rows that are factors, and their slopes."""

from __future__ import annotations

import triton
import triton.language as tl

from kernel_fusion.backends.triton.kernels.activations import times_slope, value


@triton.jit
def factor(row, C: tl.constexpr):
    """The factor for a tile of the row: gate_activation(gate)."""
    return value(row, C.gate_activation)


@triton.jit
def times_factor_slope(g, row, C: tl.constexpr):
    """The row's gradient, from the factor's."""
    return times_slope(g, row, C.gate_activation)
