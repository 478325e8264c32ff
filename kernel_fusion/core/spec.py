"""Specs say what is computed, and nothing about how. They are immutable, a kernel's compile key and a test's id.

Each has an access beside it: how a call's tensors lie in memory. A kernel is compiled for the two, and C++ derives its
structs from them (core/fields.py). The number of rows is in neither, so a new batch size compiles nothing and changes
no bits. Pointwise chains, reductions and softmax have no length either, because decoding brings a new one at every
step; their access has at most a rounded length.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Annotated, Literal, get_args

import torch

from kernel_fusion.core.activations import CODES, IDENTITY
from kernel_fusion.core.fields import Names, Several, marks

# Element types, with the same names in Python and CUDA. Kernels also have booleans, and bits, eight to a byte.
DTYPES = ("f16", "bf16", "f32", "f64")
BOOLEAN, BITS = "b8", "b1"
ITEMSIZE = {"f16": 2, "bf16": 2, "f32": 4, "f64": 8}
VECTOR_BYTES = 16  # the most that one instruction reads
_TORCH = {"f16": torch.float16, "bf16": torch.bfloat16, "f32": torch.float32, "f64": torch.float64}
_NAMES = {dtype: name for name, dtype in _TORCH.items()}
# Dtypes by precision.
_BY_PRECISION = ("bf16", "f16", "f32", "f64")

# The kinds of fields that are names.
_PYTORCH = ("Half", "BFloat16", "Float", "Double", "Bool", "Bit")
_DTYPES = Names("Dtype", (*DTYPES, BOOLEAN, BITS), enumerators=_PYTORCH, optional=True)
Dtype = Annotated[str, _DTYPES]
Activation = Annotated[str, Names(None, tuple(CODES))]
_Direction = Literal["inference", "forward", "backward", "backward_weight"]
Direction = Annotated[_Direction, Names("Direction", get_args(_Direction))]
# Where a norm rounds: once, at its store; or as in Hugging Face's norms, which round the normalised value to its own
# dtype and the product with the weight to the promoted one.
ROUNDINGS = ("once", "hf")
Rounding = Annotated[str, Names("Rounding", ROUNDINGS)]
# Dropout; for an operator two arguments, a probability and a seed.
Dropout = Annotated[bool, bool, "dropout"]
# A tensor of the input's shape; in a spec its dtype, for an operator an argument. Names that begin with its name are
# its options.
Row = Annotated[str, _DTYPES, "row"]
# A tensor of the shape of weight and bias; likewise.
Vector = Annotated[str, _DTYPES, "vector"]
# act(a), act(a + b), act(a * b), act(a) * b
Combine = Annotated[str, Names("Combine", ("first", "add", "mul", "gate"))]
# How an operand's elements meet a vector: in order; by rows (innermost dimension) that are contiguous, repeat one
# element or have a stride; or each looked up, which only plans say.
Mode = Annotated[str, Names("Mode", ("linear", "vector", "broadcast", "strided", "gather"))]
# The terms of a reduction's sum.
Map = Annotated[str, Names("Map", ("square", "abs", "none"))]


def dtype_name(dtype: torch.dtype) -> str:
    """ "bf16" for torch.bfloat16, and so on."""
    return _NAMES[dtype]


def torch_dtype(name: str) -> torch.dtype:
    """torch.bfloat16 for "bf16", and so on."""
    return _TORCH[name]


def rounding_for(rounding: str, dtype: torch.dtype) -> str:
    """The rounding, with "hf" replaced by "once" for compute types, which need none."""
    return rounding if dtype in (torch.float16, torch.bfloat16) else "once"


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type that every backend accumulates in: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


@dataclass(frozen=True, kw_only=True, repr=False)
class Stages:
    """What stands around a norm beside a residual: the one list of it. What is not there has its default.

    core/stages.py makes the arguments of operators of it, for Python and C++; backends/cuda/headers.py the structs.

    Attributes:
        pre_activation, activation: names, "identity" for none.
        dropout: whether there is dropout between pre_activation and residual.
        rounding: one of `ROUNDINGS`.
        gate: what multiplies; backward computes its gradient as that of the other row.
        gate_activation: what is applied to the gate before it multiplies.
        gate_first: whether it multiplies x, and not what comes of the norm.
        grouped: whether weight and bias are those of groups of rows, and no stage either (core/groups.py).
        residual_gate: what multiplies, after dropout, before a residual is added; of the groups of weight and bias.
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
        """Whether something stands around the norm; another rounding does not, nor do groups."""
        return any(getattr(self, f.name) != f.default for f in fields(Stages) if f.name not in ("rounding", "grouped"))

    @property
    def beside(self) -> str | None:
        """The dtype of the row that a stage reads beside x."""
        return next((dtype for name in ROWS if (dtype := getattr(self, name)) is not None), None)

    @property
    def changes_x(self) -> bool:
        """Whether a stage changes x before an addition."""
        gated = self.gate_first or self.residual_gate is not None
        return self.dropout or self.pre_activation != IDENTITY or gated

    @property
    def follows(self) -> bool:
        """Whether a stage follows norm(x) * weight + bias, so that backward recomputes this."""
        there = (name for name in FOLLOWING if getattr(self, name) not in (None, IDENTITY))
        return any((unless := FOLLOWING[name]) is None or not getattr(self, unless) for name in there)


# Stages that are tensors.
ROWS = tuple(name for name, mark in marks(Stages).items() if mark == "row")
VECTORS = tuple(name for name, mark in marks(Stages).items() if mark == "vector")
# Stages that follow norm(x) * weight + bias, and the option that moves one to x.
FOLLOWING: dict[str, str | None] = {"activation": None, "gate": "gate_first"}
# A row that goes with no residual and no stage but its own options and these.
ALONE = {"gate": ("rounding", "grouped")}
# The prefix of a verb's name, by the row that it takes.
VERBS = {"residual": "add_", "gate": "gated_"}


@dataclass(frozen=True)
class RowNormSpec(Stages):
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
        dh: whether backward is given a gradient of h beside that of y.
        dresidual: whether backward computes the gradient of the residual, or of the gate.
        dgate: whether it computes that of the residual's gate, and dresidual, which a pass for sums reads.
        one_row: whether a group is one row, so that its sums are the gradients.
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

    @property
    def acc(self) -> str:
        """The type of the sums."""
        return "f64" if self.x == "f64" else "f32"

    @property
    def has_stages(self) -> bool:
        """Whether anything stands around the norm."""
        return self.residual is not None or self.any

    @property
    def row(self) -> str:
        """The type of the normalised row: in a thread's registers for forward, in memory for backward."""
        if self.residual is not None:
            return self.residual
        return self.acc if self.changes_x and not self.direction.startswith("backward") else self.x

    @property
    def pre_x(self) -> str | None:
        """The type of what backward reads beside the normalised row: a stage's row, or x for a slope or dgate."""
        if self.beside is not None:
            return self.beside
        slope = self.grads[0] and self.pre_activation != IDENTITY
        return self.x if self.residual and (slope or self.dgate) else None

    @property
    def column_sums(self) -> tuple[bool, bool, bool]:
        """Which of (dweight, dbias, dgate) backward computes."""
        return self.grads[1], self.grads[2], self.dgate

    def __str__(self) -> str:
        norm = "rms_norm" if self.rms else "layer_norm"
        parameters = f"{self.weight or '-'},{self.bias or '-'}"
        text = f"{norm}.{self.direction}[N={self.cols}, x={self.x}, y={self.y}, weight,bias={parameters}"
        defaults = {field.name: field.default for field in fields(self)}
        for name in ("residual", *(field.name for field in fields(Stages)), "dh", "dresidual", "dgate", "one_row"):
            value = getattr(self, name)
            if value != defaults[name]:
                text += f", {name}" if value is True else f", {name}={value}"
        return text + "]"


@dataclass(frozen=True)
class Access:
    """How a call's tensors lie in memory: alignment of rows in bytes (at most 16), and strided or contiguous.

    Attributes:
        x, y, weight: alignment of x; of y (forward) or dy (backward); of weight, bias and the residual's gate.
        dx: alignment of dx.
        strided_x, strided_y: whether the rows of x, or of dy, need more than one stride.
        residual: alignment of the residual or a stage's row (forward), or of dh (backward).
        pre_x: alignment of what backward reads beside the normalised row: a stage's row, or x beside h.
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
    """The finish of the column sums: `cols` columns of `acc`, written as types `first` and `second`, or absent.

    With 0 the kernel is told how many: those of all groups of rows, whose number is none of a kernel's.
    """

    cols: int
    acc: Dtype
    first: Dtype | None
    second: Dtype | None

    def __str__(self) -> str:
        return f"sum_partials[N={self.cols or 'any'}, {self.acc} -> {self.first or '-'},{self.second or '-'}]"


@dataclass(frozen=True)
class PointwiseSpec:
    """y = dropout(scale * f(a, b)), or its gradients.

    Attributes:
        combine, activation: define f.
        dropout: whether there is any.
        a, b: dtypes of the operands. b is None for "first", except in backward for the row that a's gradient is summed
            to. In backward, a may be `BITS` of the slope instead of the activation's argument.
        y: dtype of forward's result. dy, da, db: dtypes in backward, None for unwanted gradients.
        bits: whether forward writes such bits.
    """

    combine: Combine
    activation: Activation
    dropout: bool
    a: Dtype
    b: Dtype | None
    y: Dtype | None = None
    dy: Dtype | None = None
    da: Dtype | None = None
    db: Dtype | None = None
    bits: bool = False

    @property
    def acc(self) -> str:
        """The compute type, decided by y or dy."""
        return "f64" if "f64" in (self.y, self.dy) else "f32"

    @property
    def result(self) -> str:
        """The most precise dtype among the results."""
        return max(filter(None, (self.y, self.da, self.db)), key=_BY_PRECISION.index)


@dataclass(frozen=True)
class Operand:
    """How an operand meets the iteration, and its alignment in bytes."""

    mode: Mode = "linear"
    align: int = VECTOR_BYTES


Operands = Annotated[tuple[Operand, ...], Several(Operand, 5)]


@dataclass(frozen=True)
class PointwiseAccess:
    """How the operands of a pointwise call lie.

    Attributes:
        dims: dimensions of the iteration that some operand is addressed by.
        vec: elements in the largest vector of the widest operand read by vectors.
        operands: y or da; db, or written bits; dy; a, or read bits; b.
        lanes: threads along a row, if db is summed over rows of whole vectors; else 0.
        aligned_positions: whether a vector's positions, for dropout, are consecutive from a multiple of vec.
        divisor: the largest power of two that divides rows without whole vectors; else 0.
        repeats: whether then all non-linear operands repeat elements, so that caches hold them.
    """

    dims: int = 1
    vec: int = 4
    operands: Operands = (Operand(),) * 5
    lanes: int = 0
    aligned_positions: bool = True
    divisor: int = 0
    repeats: bool = False


@dataclass(frozen=True)
class ReduceSpec:
    """out = factor * sum of map(in), summed in `acc`."""

    map: Map
    input: Dtype
    out: Dtype
    acc: Dtype


@dataclass(frozen=True)
class ReduceAccess:
    """How a reduction reads.

    Attributes:
        vec, lanes, threads: for sums over columns: elements per vector across, threads along, and threads of a block
            (`ReduceRule` in backends/cuda/reduce.py). 0 for rows.
        capacity: for rows: vectors per chunk, rounded up to a power of two.
        contiguous: whether neighbours in a row are neighbours in memory.
        chunked: whether rows have several chunks.
        nested: whether two coordinates address a row.
        align, align_out: alignment of vectors in bytes.
    """

    vec: int = 0
    lanes: int = 0
    threads: int = 0
    capacity: int = 0
    contiguous: bool = True
    chunked: bool = False
    nested: bool = False
    align: int = VECTOR_BYTES
    align_out: int = VECTOR_BYTES


@dataclass(frozen=True)
class SoftmaxSpec:
    """Softmax of rows of x, with or without a mask of dtype `mask` ("b8": boolean), causal or not."""

    x: Dtype
    mask: Dtype | None = None
    causal: bool = False

    @property
    def acc(self) -> str:
        """The compute type."""
        return "f64" if self.x == "f64" else "f32"


@dataclass(frozen=True)
class SoftmaxBwdSpec:
    """The gradient of a softmax: dtypes of dy, y and dx. With `leaves_out`, dx is 0 where y is."""

    dy: Dtype
    y: Dtype
    dx: Dtype
    leaves_out: bool = False

    @property
    def acc(self) -> str:
        """The compute type."""
        return "f64" if "f64" in (self.dy, self.y, self.dx) else "f32"


@dataclass(frozen=True)
class RowAccess:
    """The rows of one tensor: alignment in bytes, and whether they have several strides."""

    align: int = VECTOR_BYTES
    strided: bool = False


@dataclass(frozen=True)
class SoftmaxAccess:
    """How the tensors of a softmax lie.

    Attributes:
        vec: elements per vector; it divides the row.
        capacity: vectors per row, rounded up to 2^k or 3 * 2^k.
        x: rows of x, or of y in backward; other: those of the mask, or of dy.
        mask_repeats: whether a row of the mask repeats one element.
    """

    vec: int
    capacity: int
    x: RowAccess = RowAccess()
    other: RowAccess = RowAccess()
    mask_repeats: bool = False
