"""Specs say what is computed; a spec is a kernel's compile key.

An access beside it says how a call's tensors lie; C++ has both as structs (core/fields.py). Neither has the number of
rows, so a new batch size compiles nothing and changes no bits. Only norms have a length: elsewhere, decoding brings a
new one at every step.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Annotated, Literal, get_args

import torch

from kernel_fusion.core.activations import CODES, IDENTITY
from kernel_fusion.core.fields import Names, marks
from kernel_fusion.core.quantize import NO_CODES, Codes

# Kernels also have booleans, and bits, eight to a byte.
DTYPES = ("f16", "bf16", "f32", "f64")
BOOLEAN, BITS = "b8", "b1"
ITEMSIZE = {"f16": 2, "bf16": 2, "f32": 4, "f64": 8}
VECTOR_BYTES = 16
_TORCH = {"f16": torch.float16, "bf16": torch.bfloat16, "f32": torch.float32, "f64": torch.float64}
_NAMES = {dtype: name for name, dtype in _TORCH.items()}

_PYTORCH = ("Half", "BFloat16", "Float", "Double", "Bool", "Bit")
_DTYPES = Names("Dtype", (*DTYPES, BOOLEAN, BITS), enumerators=_PYTORCH, optional=True)
Dtype = Annotated[str, _DTYPES]
Activation = Annotated[str, Names(None, tuple(CODES))]
_Direction = Literal["inference", "forward", "backward", "backward_weight"]
Direction = Annotated[_Direction, Names("Direction", get_args(_Direction))]
# "hf" rounds as Hugging Face's norms: n to its own dtype, its product with the weight to the promoted one.
ROUNDINGS = ("once", "hf")
Rounding = Annotated[str, Names("Rounding", ROUNDINGS)]
Dropout = Annotated[bool, bool, "dropout"]
# A tensor of the input's shape; its options' names begin with its name.
Row = Annotated[str, _DTYPES, "row"]
# A tensor of the weight's shape.
Vector = Annotated[str, _DTYPES, "vector"]


def dtype_name(dtype: torch.dtype) -> str:
    """ "bf16" for torch.bfloat16."""
    return _NAMES[dtype]


def torch_dtype(name: str) -> torch.dtype:
    """torch.bfloat16 for "bf16"."""
    return _TORCH[name]


def rounding_for(rounding: str, dtype: torch.dtype) -> str:
    """ "once" instead of "hf" for compute types."""
    return rounding if dtype in (torch.float16, torch.bfloat16) else "once"


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


@dataclass(frozen=True, kw_only=True, repr=False)
class Stages:
    """The stages around a norm.

    Attributes:
        gate: a factor, whose gradient is computed as the other row's.
        gate_first: the factor of x, not of the norm.
        grouped: rows share weight and bias (core/groups.py).
        residual_gate: a factor after dropout, before a residual; grouped.
    """

    pre_activation: Activation = IDENTITY
    activation: Activation = IDENTITY
    dropout: Dropout = False
    rounding: Rounding = "once"
    gate: Row | None = None
    gate_activation: Activation = IDENTITY
    gate_first: bool = False
    grouped: bool = False
    residual_gate: Vector | None = None

    @property
    def any(self) -> bool:
        """Whether there is a stage; rounding and groups are none."""
        return any(getattr(self, f.name) != f.default for f in fields(Stages) if f.name not in ("rounding", "grouped"))

    @property
    def beside(self) -> str | None:
        """The dtype of a stage's row."""
        return next((dtype for name in ROWS if (dtype := getattr(self, name)) is not None), None)

    @property
    def changes_x(self) -> bool:
        """Whether a stage changes x before an addition."""
        gated = self.gate_first or self.residual_gate is not None
        return self.dropout or self.pre_activation != IDENTITY or gated

    @property
    def follows(self) -> bool:
        """Whether backward recomputes norm(x) * weight + bias."""
        there = (name for name in FOLLOWING if getattr(self, name) not in (None, IDENTITY))
        return any((unless := FOLLOWING[name]) is None or not getattr(self, unless) for name in there)


ROWS = tuple(name for name, mark in marks(Stages).items() if mark == "row")
VECTORS = tuple(name for name, mark in marks(Stages).items() if mark == "vector")
# Stages after norm(x) * weight + bias, and an option that moves one to x.
FOLLOWING: dict[str, str | None] = {"activation": None, "gate": "gate_first"}
# A row that goes with no residual and no stage, except these and its options.
ALONE = {"gate": ("rounding", "grouped")}
# Verbs' prefixes.
VERBS = {"residual": "add_", "gate": "gated_"}


class ByX:
    """A spec whose `x` decides what it computes in."""

    x: Dtype

    @property
    def acc(self) -> str:
        """The type of sums."""
        return "f64" if self.x == "f64" else "f32"


@dataclass(frozen=True)
class RowNormSpec(Stages, ByX):
    """One kernel of a norm.

    Attributes:
        direction: "inference" (y), "forward" (y, mean, rstd), "backward" (dx and sums), "backward_weight" (sums).
        cols: N, the row length.
        x, y, weight, bias: dtypes, of gradients too.
        grads: whether dx, dweight and dbias are wanted.
        residual: dtype of the residual and h, their sum.
        dh: whether h has a gradient beside y's.
        dresidual: whether the residual's or the gate's gradient is wanted.
        dgate: the residual's gate's; needs dresidual, which a pass for sums reads.
        one_row: whether a group is one row, so that its sums are the gradients.
        codes: those that inference writes.
    """

    direction: Direction
    rms: bool
    cols: int
    x: Dtype
    y: Dtype
    weight: Dtype | None = None
    bias: Dtype | None = None
    offset: bool = False
    grads: tuple[bool, bool, bool] = (True, True, True)
    residual: Dtype | None = None
    dh: bool = False
    dresidual: bool = False
    dgate: bool = False
    one_row: bool = False
    codes: Codes = NO_CODES

    @property
    def has_stages(self) -> bool:
        """Whether there is a stage or residual."""
        return self.residual is not None or self.any

    @property
    def row(self) -> str:
        """The normalised row's type, in registers forward, in memory backward."""
        if self.residual is not None:
            return self.residual
        return self.acc if self.changes_x and not self.direction.startswith("backward") else self.x

    @property
    def pre_x(self) -> str | None:
        """The type of what backward reads beside it: a stage's row, or x for a slope or dgate."""
        if self.beside is not None:
            return self.beside
        slope = self.grads[0] and self.pre_activation != IDENTITY
        return self.x if self.residual and (slope or self.dgate) else None

    @property
    def column_sums(self) -> tuple[bool, bool, bool]:
        """Whether dweight, dbias, dgate are wanted."""
        return self.grads[1], self.grads[2], self.dgate

    def __str__(self) -> str:
        norm = "rms_norm" if self.rms else "layer_norm"
        parameters = f"{self.weight or '-'},{self.bias or '-'}"
        text = f"{norm}.{self.direction}[N={self.cols}, x={self.x}, y={self.y}, weight,bias={parameters}"
        defaults = {field.name: field.default for field in fields(self)}
        stages = (field.name for field in fields(Stages))
        for name in ("residual", *stages, "dh", "dresidual", "dgate", "one_row", "codes"):
            value = getattr(self, name)
            if value != defaults[name]:
                text += f", {name}" if value is True else f", {name}={value}"
        return text + "]"


@dataclass(frozen=True)
class Access:
    """Rows' alignment in bytes, at most 16, and whether they need several strides.

    Attributes:
        y: in backward dy's.
        weight: bias's and the residual gate's, too.
        residual: a stage's row's; in backward dh's.
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
    """The finish of column sums; `cols` is 0 for all groups', whose number the kernel is told."""

    cols: int
    acc: Dtype
    first: Dtype | None
    second: Dtype | None

    def __str__(self) -> str:
        return f"sum_partials[N={self.cols or 'any'}, {self.acc} -> {self.first or '-'},{self.second or '-'}]"
