"""The specs and accesses of all operations except the row norms, which are in core/spec.py."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from kernel_fusion.core.activations import IDENTITY
from kernel_fusion.core.fields import Names, Several
from kernel_fusion.core.losses import Extra
from kernel_fusion.core.quantize import NO_CODES, Codes
from kernel_fusion.core.spec import VECTOR_BYTES, Activation, ByX, Dtype, most_precise

Combine = Annotated[str, Names("Combine", ("first", "add", "mul", "gate"))]
# How an operand is read: in order; by rows that are contiguous, that repeat one element or that have a stride; or
# element by element, which only plans decide.
Mode = Annotated[str, Names("Mode", ("linear", "vector", "broadcast", "strided", "gather"))]
# The function of an element that a reduction sums.
Map = Annotated[str, Names("Map", ("square", "abs", "none"))]


@dataclass(frozen=True)
class PointwiseSpec:
    """y = dropout(scale * f(a, b)), or the gradients of a and b.

    Attributes:
        a, b: dtypes. In backward, a may be `BITS` that say the slope, and b the row to which da is summed.
        da, db: the dtypes of the gradients, or None if they are not wanted.
        bits: whether forward writes bits that say the slope.
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
        """The compute type."""
        return "f64" if "f64" in (self.y, self.dy) else "f32"

    @property
    def result(self) -> str:
        """The most precise dtype of the results."""
        return most_precise(self.y, self.da, self.db)


@dataclass(frozen=True)
class Operand:
    """How an operand is addressed in the iteration, and its alignment in bytes."""

    mode: Mode = "linear"
    align: int = VECTOR_BYTES


Operands = Annotated[tuple[Operand, ...], Several(Operand, 5)]


@dataclass(frozen=True)
class PointwiseAccess:
    """How the operands of a pointwise chain lie in memory.

    Attributes:
        dims: the number of dimensions that are needed to address the operands.
        vec: the number of elements in the largest vector of the widest operand.
        operands: y or da; db or the bits that are written; dy; a or the bits that are read; b.
        lanes: the number of threads along a row of whole vectors, if db is a sum over rows, else 0.
        aligned_positions: whether the number that dropout gives to the first element of a vector is a multiple of vec.
        divisor: the largest power of two that divides rows, if they do not consist of whole vectors, else 0.
        repeats: whether all operands that are not read in order repeat elements, so that caches hold them.
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
    """out = factor * sum of map(in) over rows or columns."""

    map: Map
    input: Dtype
    out: Dtype
    acc: Dtype


@dataclass(frozen=True)
class ReduceAccess:
    """How a reduction reads its input.

    Attributes:
        vec, lanes, threads: for sums over columns, the elements of a vector, and a block's threads along the columns
            and in all. They are 0 for sums over rows.
        capacity: the number of vectors in a chunk of a row, rounded up to a power of two.
        nested: whether two coordinates are needed to address a row.
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
class SoftmaxSpec(ByX):
    """The weights of rows of x, or their logarithms.

    Attributes:
        mask: "b8" for a boolean one.
        scaled: whether there is a `scale` other than 1.
    """

    x: Dtype
    mask: Dtype | None = None
    causal: bool = False
    scaled: bool = False
    log: bool = False


@dataclass(frozen=True)
class SoftmaxBwdSpec:
    """Its gradient. With `leaves_out`, dx is 0 where y is that of an element that is left out: 0, or its logarithm."""

    dy: Dtype
    y: Dtype
    dx: Dtype
    leaves_out: bool = False
    log: bool = False

    @property
    def acc(self) -> str:
        """The compute type."""
        return "f64" if "f64" in (self.dy, self.y, self.dx) else "f32"


@dataclass(frozen=True)
class TokenLogprobSpec(ByX):
    """Log-probabilities of classes in rows of x, or in backward the gradient of x.

    Attributes:
        masked: whether a boolean mask leaves out classes.
        scaled: whether there are temperatures, or a `scale` other than 1.
        capped: whether there is a softcap.
        weighted: whether classes have weights.
        extra: what else is computed of each row; in backward "none" if no gradient is given for it.
        predicts: whether the class of the largest logit is wanted.
    """

    x: Dtype
    backward: bool = False
    masked: bool = False
    scaled: bool = False
    capped: bool = False
    weighted: bool = False
    extra: Extra = "none"
    predicts: bool = False


@dataclass(frozen=True, kw_only=True)
class RotarySpec(ByX):
    """The rotation of heads of `cols` columns, of which `half` pairs are rotated.

    `rounds` says whether products are rounded, `backward` whether the angles are negative. If `norm` is set, heads are
    normalised before, with weights and perhaps an `offset`; `sums` says whether backward sums the weights' gradients.
    """

    x: Dtype = "f32"
    angles: Dtype = "f32"
    cols: int = 0
    half: int = 0
    interleaved: bool = False
    rounds: bool = False
    backward: bool = False
    norm: bool = False
    query_weight: Dtype | None = None
    key_weight: Dtype | None = None
    offset: bool = False
    sums: bool = False


@dataclass(frozen=True)
class RotaryAccess:
    """How the tensors lie, the number of threads for a token, and the bytes of a position (0 without positions)."""

    vec: int = 1
    threads: int = 32
    positions: int = 0
    align: int = VECTOR_BYTES
    align_out: int = VECTOR_BYTES
    align_angles: int = VECTOR_BYTES
    align_weights: int = VECTOR_BYTES


@dataclass(frozen=True)
class RowAccess:
    """As in `Access`."""

    align: int = VECTOR_BYTES
    strided: bool = False


@dataclass(frozen=True)
class SoftmaxAccess:
    """How the tensors lie of which weights or log-probabilities are made.

    Attributes:
        vec: divides the row.
        capacity: vectors per row, rounded up to 2^k or 3 * 2^k.
        x, other: x and mask; in backward y and dy.
        mask_repeats: whether a mask's row repeats one element.
    """

    vec: int
    capacity: int
    x: RowAccess = RowAccess()
    other: RowAccess = RowAccess()
    mask_repeats: bool = False


# What a kernel of a group norm makes: all of a short row; or moments of pieces, statistics, y. Then the same of
# backward: all of a short row; or sums of pieces, the gradients of parameters, dx.
GroupStep = Annotated[
    str, Names("GroupStep", ("row", "moments", "finish", "apply", "row_bwd", "sums", "finish_bwd", "dx"))
]


@dataclass(frozen=True)
class GroupNormSpec(ByX):
    """A step of a group norm. Absent fields are those that it does not need.

    Attributes:
        y: in backward the dtype of dy.
        channels_last: whether a position's channels lie together, not a channel's positions.
        sums_x: whether backward needs the sums of the normalised input, for the gradient of `add`.
    """

    step: GroupStep
    x: Dtype
    y: Dtype | None = None
    weight: Dtype | None = None
    bias: Dtype | None = None
    add: Dtype | None = None
    scale: Dtype | None = None
    shift: Dtype | None = None
    activation: Activation = IDENTITY
    channels_last: bool = False
    sums_x: bool = False

    @property
    def finest(self) -> str:
        """The most precise dtype of the gradients."""
        return most_precise(self.x, self.weight, self.bias, self.add, self.scale, self.shift)


@dataclass(frozen=True)
class GroupNormAccess:
    """How the tensors of a group norm lie, and who reads them.

    Attributes:
        vec: divides the positions of a channel or, with channels last, the channels.
        lanes: the threads of a line (kernels/group_norm.cuh).
        align: of x and dx.
        align_out: of y and dy.
    """

    vec: int = 1
    lanes: int = 32
    threads: int = 256
    align: int = VECTOR_BYTES
    align_out: int = VECTOR_BYTES


@dataclass(frozen=True)
class QuantizeSpec(ByX):
    """The codes of x, or of activation(x) * other."""

    cols: int
    x: Dtype
    other: Dtype | None = None
    activation: Activation = IDENTITY
    codes: Codes = NO_CODES


@dataclass(frozen=True)
class QuantizeAccess:
    """How x and `other` lie."""

    x: RowAccess = RowAccess()
    other: RowAccess = RowAccess()
