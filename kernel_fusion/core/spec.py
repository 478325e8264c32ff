"""Specs say what is computed; a spec is a kernel's compile key.

Beside a spec, an access says how the tensors of a call lie in memory. C++ has both as structs (core/fields.py). Neither
holds the number of rows, so a new batch size compiles nothing and changes no bits. Only the specs of norms hold the
length of rows: other operations meet a new length at every step of decoding.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Annotated, Literal, get_args

import torch
from torch import Tensor

from kernel_fusion.core.activations import CODES, IDENTITY
from kernel_fusion.core.fields import Names, marks
from kernel_fusion.core.quantize import NO_CODES, Codes
from kernel_fusion.core.symbols import same

# Kernels also read booleans, and bits of which a byte holds eight.
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
# "hf" rounds as the norms of Hugging Face do: the normalised value to its own dtype, then its product with the weight
# to the promoted dtype of both.
ROUNDINGS = ("once", "hf")
Rounding = Annotated[str, Names("Rounding", ROUNDINGS)]
# The passes over a row that a kernel makes. A row may lie in pieces, each on another rank. Then "first" reduces a piece
# and leaves its sums, and "second" applies the sums of all pieces; in between the caller adds them up.
PASSES = ("both", "first", "second")
Passes = Annotated[str, Names("Passes", PASSES)]
Dropout = Annotated[bool, bool, "dropout"]
# A row: a tensor of the input's shape. The names of a row's options begin with its own name.
Row = Annotated[str, _DTYPES, "row"]
# A vector: a tensor of the weight's shape.
Vector = Annotated[str, _DTYPES, "vector"]


def dtype_name(dtype: torch.dtype) -> str:
    """The short name of a dtype, such as "bf16" for torch.bfloat16."""
    return _NAMES[dtype]


def torch_dtype(name: str) -> torch.dtype:
    """The dtype that has this short name."""
    return _TORCH[name]


def most_precise(*names: str | None) -> str:
    """ "f32" for "bf16", "f32" and None."""
    return max(filter(None, names), key=("bf16", "f16", "f32", "f64").index)


def rounding_for(rounding: str, dtype: torch.dtype) -> str:
    """The rounding that matters for a dtype: "hf" is the same as "once" for the dtypes that norms compute in."""
    return rounding if dtype in (torch.float16, torch.bfloat16) else "once"


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype that kernels compute in: float64 for float64, otherwise float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def cast(t: Tensor, dtype: torch.dtype) -> Tensor:
    """The tensor in this dtype, itself if it has it.

    Within a `torch.autograd.Function`, PyTorch 2.11's Dynamo makes zeros of the gradient behind a `t.to(dtype)` that
    changes nothing. So none may be called there.
    """
    return t if t.dtype == dtype else t.to(dtype)


def summed(t: Tensor, like: Tensor) -> Tensor:
    """A broadcast operand's gradient, in its shape and dtype; as `cast`, without operations that change nothing."""
    return cast(t if same(t.shape, like.shape) else t.sum_to_size(like.shape), like.dtype)


@dataclass(frozen=True, kw_only=True, repr=False)
class Stages:
    """The stages around a norm.

    Attributes:
        gate: a row whose activation multiplies the norm. Its gradient takes the place of the residual's.
        gate_first: whether the gate multiplies x instead of the norm.
        grouped: whether groups of rows have weights and biases of their own (core/groups.py).
        residual_gate: a vector that multiplies what is added to the residual; it has the groups of the weight.
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
        """Whether there is a stage. Another rounding is no stage, and neither are groups."""
        return any(getattr(self, f.name) != f.default for f in fields(Stages) if f.name not in ("rounding", "grouped"))

    @property
    def beside(self) -> str | None:
        """The dtype of the row that a stage reads, or None."""
        return next((dtype for name in ROWS if (dtype := getattr(self, name)) is not None), None)

    @property
    def changes_x(self) -> bool:
        """Whether a stage changes x before the residual is added."""
        gated = self.gate_first or self.residual_gate is not None
        return self.dropout or self.pre_activation != IDENTITY or gated

    @property
    def follows(self) -> bool:
        """Whether a stage follows norm(x) * weight + bias, so that backward computes that again."""
        there = (name for name in FOLLOWING if getattr(self, name) not in (None, IDENTITY))
        return any((unless := FOLLOWING[name]) is None or not getattr(self, unless) for name in there)


ROWS = tuple(name for name, mark in marks(Stages).items() if mark == "row")
VECTORS = tuple(name for name, mark in marks(Stages).items() if mark == "vector")
# The stages that follow norm(x) * weight + bias, and the option that moves one of them before the norm.
FOLLOWING: dict[str, str | None] = {"activation": None, "gate": "gate_first"}
# Rows that go with no residual and no other stage, except the stages named here and their own options.
ALONE = {"gate": ("rounding", "grouped")}
# The prefixes of the functions that have a stage.
VERBS = {"residual": "add_", "gate": "gated_"}


class ByX:
    """A spec whose field `x`, the dtype of the input, decides what the kernel computes in."""

    x: Dtype

    @property
    def acc(self) -> str:
        """The dtype of sums, as a short name."""
        return "f64" if self.x == "f64" else "f32"


@dataclass(frozen=True)
class RowNormSpec(Stages, ByX):
    """What one kernel of a norm computes.

    Attributes:
        direction: "inference" (y), "forward" (y, mean, rstd), "backward" (dx and sums), "backward_weight" (sums).
        cols: N, the length of a row.
        x, y, weight, bias: the dtypes of these tensors and of their gradients.
        grads: whether dx, dweight and dbias are wanted.
        residual: dtype of the residual and h, their sum.
        dh: whether h has a gradient of its own beside that of y.
        dresidual: whether the residual's or the gate's gradient is wanted.
        dgate: whether the gradient of the residual's gate is wanted. It needs dresidual, which a pass for sums reads.
        one_row: whether a group is one row, so that its sums are the gradients.
        codes: the codes that inference writes instead of y, or None.
        passes: the passes that the kernel makes.
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
    passes: Passes = "both"

    @property
    def has_stages(self) -> bool:
        """Whether there is a stage or a residual."""
        return self.residual is not None or self.any

    @property
    def row(self) -> str:
        """The dtype of the row to normalise: of registers in forward, of memory in backward."""
        if self.residual is not None:
            return self.residual
        return self.acc if self.changes_x and not self.direction.startswith("backward") else self.x

    @property
    def finest(self) -> str:
        """The most precise dtype of results that share what stages compute; forward and backward agree on it.

        It names each tensor that may have a gradient, wanted or not: dx must not depend on others that are. A bias
        counts only where its gradient passes a stage.
        """
        bias = self.bias if self.follows else None
        return most_precise(self.x, self.y, self.weight, bias, self.residual, self.beside, self.residual_gate)

    @property
    def pre_x(self) -> str | None:
        """The dtype of the row that backward reads beside it: a stage's row, or x for a slope or for dgate."""
        if self.beside is not None:
            return self.beside
        slope = self.grads[0] and self.pre_activation != IDENTITY
        return self.x if self.residual and (slope or self.dgate) else None

    @property
    def column_sums(self) -> tuple[bool, bool, bool]:
        """Whether dweight, dbias and dgate are wanted."""
        return self.grads[1], self.grads[2], self.dgate

    def __str__(self) -> str:
        norm = "rms_norm" if self.rms else "layer_norm"
        parameters = f"{self.weight or '-'},{self.bias or '-'}"
        text = f"{norm}.{self.direction}[N={self.cols}, x={self.x}, y={self.y}, weight,bias={parameters}"
        defaults = {field.name: field.default for field in fields(self)}
        stages = (field.name for field in fields(Stages))
        for name in ("residual", *stages, "dh", "dresidual", "dgate", "one_row", "codes", "passes"):
            value = getattr(self, name)
            if value != defaults[name]:
                text += f", {name}" if value is True else f", {name}={value}"
        return text + "]"


@dataclass(frozen=True)
class Access:
    """How the rows of each tensor lie: their alignment in bytes, at most 16, and whether they need several strides.

    Attributes:
        y: that of y, in backward that of dy.
        weight: that of weight, bias and the residual's gate.
        residual: that of the residual or a stage's row; in backward that of dh.
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
    """The kernel that adds partial rows of column sums. If `cols` is 0, it is told their number at run time."""

    cols: int
    acc: Dtype
    first: Dtype | None
    second: Dtype | None

    def __str__(self) -> str:
        return f"sum_partials[N={self.cols or 'any'}, {self.acc} -> {self.first or '-'},{self.second or '-'}]"
