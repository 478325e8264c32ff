"""Specs: what is computed, and nothing about how. Immutable and hashable; a kernel's compile key and a test's id.

The row count is never part of a spec, so a new batch size compiles nothing and cannot change a row's bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from kernel_fusion.core.activations import IDENTITY

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
        residual: dtype of the residual and of h, their sum, or None.
        pre_activation, activation: names, "identity" for none.
        dropout: whether there is dropout between pre_activation and residual.
        dh: whether backward is given a gradient of h beside that of y.
        dresidual: whether backward computes the gradient of the residual.
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
    residual: str | None = None
    pre_activation: str = IDENTITY
    activation: str = IDENTITY
    dropout: bool = False
    dh: bool = False
    dresidual: bool = False

    @property
    def acc(self) -> str:
        """The type that sums are kept in."""
        return "f64" if self.x == "f64" else "f32"

    @property
    def changes_x(self) -> bool:
        """Whether a stage changes x before anything is added to it."""
        return self.dropout or self.pre_activation != IDENTITY

    @property
    def has_stages(self) -> bool:
        """Whether there is anything around the norm."""
        return self.residual is not None or self.changes_x or self.activation != IDENTITY

    @property
    def row(self) -> str:
        """The type of what is normalised: in forward as a thread holds it, in backward as memory does."""
        if self.residual is not None:
            return self.residual
        return self.acc if self.changes_x and not self.direction.startswith("backward") else self.x

    @property
    def pre_x(self) -> str | None:
        """The type of x where backward reads it beside h, to differentiate the pre-activation."""
        return self.x if self.residual and self.grads[0] and self.pre_activation != IDENTITY else None

    def __str__(self) -> str:
        norm = "rms_norm" if self.rms else "layer_norm"
        parameters = f"{self.weight or '-'},{self.bias or '-'}"
        text = f"{norm}.{self.direction}[N={self.cols}, x={self.x}, y={self.y}, weight,bias={parameters}"
        stages = [f"residual={self.residual}"] if self.residual else []
        stages += [f"pre_activation={self.pre_activation}"] if self.pre_activation != IDENTITY else []
        stages += [f"activation={self.activation}"] if self.activation != IDENTITY else []
        stages += [name for name in ("dropout", "dh", "dresidual") if getattr(self, name)]
        return ", ".join([text, *stages]) + "]"


@dataclass(frozen=True)
class Access:
    """How the tensors of one call lie in memory: alignment of rows in bytes (at most 16), and strided or contiguous.

    Attributes:
        x, y, weight: alignment of x; of y (forward) or dy (backward); of weight and bias.
        dx: alignment of dx.
        strided_x, strided_y: whether the rows of x, or of dy, need more than one stride.
        residual: alignment of the residual (forward) or of dh (backward).
        pre_x: alignment of x where backward reads it beside h, which is then called x.
        strided_residual, strided_pre_x: as strided_x.
    """

    x: int = 16
    y: int = 16
    weight: int = 16
    dx: int = 16
    strided_x: bool = False
    strided_y: bool = False
    residual: int = 16
    pre_x: int = 16
    strided_residual: bool = False
    strided_pre_x: bool = False


@dataclass(frozen=True)
class SumPartialsSpec:
    """The finish of the column sums: `cols` columns of `acc`, written as types `first` and `second`, or absent."""

    cols: int
    acc: str
    first: str | None
    second: str | None

    def __str__(self) -> str:
        return f"sum_partials[N={self.cols}, {self.acc} -> {self.first or '-'},{self.second or '-'}]"
