"""Specs: what is computed, and nothing about how. Immutable and hashable; a kernel's compile key and a test's id.

The row count is never part of a spec, so a new batch size compiles nothing and cannot change a row's bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

# The names of element types, the same in Python, C++ and CUDA; the position is the code that crosses to C++.
DTYPES = ("f16", "bf16", "f32", "f64")
ITEMSIZE = {"f16": 2, "bf16": 2, "f32": 4, "f64": 8}
_TORCH = {"f16": torch.float16, "bf16": torch.bfloat16, "f32": torch.float32, "f64": torch.float64}
_NAMES = {dtype: name for name, dtype in _TORCH.items()}

Direction = Literal["inference", "forward", "backward", "backward_weight"]


def dtype_name(dtype: torch.dtype) -> str:
    """ "bf16" for torch.bfloat16, and so on."""
    return _NAMES[dtype]


def torch_dtype(name: str) -> torch.dtype:
    """torch.bfloat16 for "bf16", and so on."""
    return _TORCH[name]


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type that every backend accumulates in: float64 for float64, float32 for the rest."""
    return torch.float64 if dtype == torch.float64 else torch.float32


@dataclass(frozen=True)
class RowNormSpec:
    """One row-norm kernel: LayerNorm or RMSNorm, in one direction, for one row length and set of dtypes.

    Attributes:
        direction: "inference" (y), "forward" (y, mean, rstd), "backward" (dx and sums), "backward_weight" (sums alone).
        rms: RMSNorm instead of LayerNorm.
        cols: N, the row length.
        x: dtype of x and dx.
        y: dtype of y, and of dy.
        weight, bias: their dtypes, or None.
        offset: whether a weight_offset is added.
        grads: which of (dx, dweight, dbias) backward computes.
    """

    direction: Direction
    rms: bool
    cols: int
    x: str
    y: str
    weight: str | None = None
    bias: str | None = None
    offset: bool = False
    grads: tuple[bool, bool, bool] = (True, True, True)

    @property
    def acc(self) -> str:
        """The type that sums are kept in."""
        return "f64" if self.x == "f64" else "f32"

    def __str__(self) -> str:
        norm = "rms_norm" if self.rms else "layer_norm"
        parameters = f"{self.weight or '-'},{self.bias or '-'}"
        return f"{norm}.{self.direction}[N={self.cols}, x={self.x}, y={self.y}, weight,bias={parameters}]"


@dataclass(frozen=True)
class Access:
    """How the tensors of one call lie in memory: alignment of rows in bytes (at most 16), and strided or contiguous.

    Attributes:
        x, y, weight: alignment of x; of y (forward) or dy (backward); of weight and bias.
        dx: alignment of dx.
        strided_x, strided_y: whether the rows of x, or of dy, need more than one stride.
    """

    x: int = 16
    y: int = 16
    weight: int = 16
    dx: int = 16
    strided_x: bool = False
    strided_y: bool = False


@dataclass(frozen=True)
class SumPartialsSpec:
    """The finish of the column sums: `cols` columns of `acc`, written as types `first` and `second`, or absent."""

    cols: int
    acc: str
    first: str | None
    second: str | None

    def __str__(self) -> str:
        return f"sum_partials[N={self.cols}, {self.acc} -> {self.first or '-'},{self.second or '-'}]"
