"""Specs of pointwise chains, reductions and softmax: what is computed; and accesses: how the tensors lie in memory.

Like those of the row norms (spec.py), but for lengths: these families meet a new one at every step of decoding, so no
length is in a spec, and an access has at most a length rounded up.
"""

from __future__ import annotations

from dataclasses import dataclass, field

# The positions of these names are their codes in C++.
COMBINES = ("first", "add", "mul", "gate")  # act(a), act(a + b), act(a * b), act(a) * b
DROPOUTS = ("none", "aligned", "anywhere")  # kernels/pointwise_chain.cuh
MODES = ("linear", "vector", "broadcast", "strided", "gather")  # kernels/operands.cuh
MAPS = ("square", "abs", "none")

# Types by the digits that a result keeps.
_BY_PRECISION = ("bf16", "f16", "f32", "f64")

# The element type of bits, eight to a byte; its code in C++ follows those of `DTYPES`.
BITS = "b1"


@dataclass(frozen=True)
class PointwiseSpec:
    """y = dropout(scale * f(a, b)), or its gradients.

    Attributes:
        combine, activation: what f is.
        dropout: whether there is any.
        a, b: dtypes of the operands; b is None for "first" alone, in backward but for the row that a's gradient is
            summed to. In backward a may be `BITS`: of the slope, in place of the argument of the activation.
        y: dtype of the result, in forward; dy, da, db: dtypes in backward, None where a gradient is not wanted.
        bits: whether forward writes such bits.
    """

    combine: str
    activation: str
    dropout: bool
    a: str
    b: str | None
    y: str | None = None
    dy: str | None = None
    da: str | None = None
    db: str | None = None
    bits: bool = False

    @property
    def acc(self) -> str:
        """The compute type, which y, and dy with it, decides."""
        return "f64" if "f64" in (self.y, self.dy) else "f32"

    @property
    def result(self) -> str:
        """The most exact dtype that something is rounded to."""
        return max(filter(None, (self.y, self.da, self.db)), key=_BY_PRECISION.index)


@dataclass(frozen=True)
class Operand:
    """How an operand meets the iteration (one of `MODES`), and the alignment of its vectors in bytes."""

    mode: str = "linear"
    align: int = 16


@dataclass(frozen=True)
class PointwiseAccess:
    """How the operands of a pointwise call lie.

    Attributes:
        dims: dimensions of the iteration, as far as an operand is addressed by coordinates.
        vec: elements per vector.
        operands: y or da; db, or bits that are written; dy; a, or bits that are read; b.
        lanes: where db is summed over rows, the threads along the columns; else 0.
        aligned_positions: whether the positions of a vector, for dropout, are neighbours, the first a multiple of vec.
    """

    dims: int = 1
    vec: int = 4
    operands: tuple[Operand, ...] = field(default=(Operand(),) * 5)
    lanes: int = 0
    aligned_positions: bool = True


@dataclass(frozen=True)
class ReduceSpec:
    """out = factor * sum of map(in), summed in `acc`."""

    map: str
    input: str
    out: str
    acc: str


@dataclass(frozen=True)
class ReduceAccess:
    """How a reduction reads.

    Attributes:
        vec: elements per vector, along the row where rows are summed, else across the columns.
        lanes: where columns are summed, the threads along them; 0 where rows are.
        threads: of a block, where columns are summed.
        capacity: of rows: vectors per chunk of a row, rounded up to a power of two.
        contiguous: whether neighbours of a row are neighbours in memory.
        chunked: whether rows have several chunks.
        nested: whether rows are addressed by two coordinates.
        align, align_out: alignment of vectors in bytes.
    """

    vec: int
    lanes: int = 0
    threads: int = 0
    capacity: int = 0
    contiguous: bool = True
    chunked: bool = False
    nested: bool = False
    align: int = 16
    align_out: int = 16


@dataclass(frozen=True)
class SoftmaxSpec:
    """Softmax of rows of x, with a mask of dtype `mask` ("b8": boolean) or without, causal or not."""

    x: str
    mask: str | None = None
    causal: bool = False

    @property
    def acc(self) -> str:
        """The compute type."""
        return "f64" if self.x == "f64" else "f32"


@dataclass(frozen=True)
class SoftmaxBwdSpec:
    """The gradient of a softmax: dtypes of dy, y and dx; with `leaves_out`, dx is 0 where y is."""

    dy: str
    y: str
    dx: str
    leaves_out: bool = False

    @property
    def acc(self) -> str:
        """The compute type."""
        return "f64" if "f64" in (self.dy, self.y, self.dx) else "f32"


@dataclass(frozen=True)
class RowAccess:
    """The rows of one tensor: alignment in bytes, and whether they have several strides."""

    align: int = 16
    strided: bool = False


@dataclass(frozen=True)
class SoftmaxAccess:
    """How the tensors of a softmax lie.

    Attributes:
        vec: elements per vector, which divides the row.
        capacity: vectors per row, rounded up to 2^k or 3 * 2^k.
        x: rows of x, or of y in backward; other: those of the mask, or of dy.
        mask_repeats: whether a row of the mask is one element, repeated.
    """

    vec: int
    capacity: int
    x: RowAccess = RowAccess()
    other: RowAccess = RowAccess()
    mask_repeats: bool = False
