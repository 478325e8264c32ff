"""The decorator of kernels, and the constants that they are compiled for, all in one object `C`.

A constant in a shape or a range, or one that is passed on, needs a name: `BLOCK: tl.constexpr = C.block`. Pointers and
numbers come one by one, because Inductor (PyTorch 2.11 and 2.13) raises for numbers in a tuple, and drops a kernel that
writes to a pointer in one.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import triton
import triton.language as tl

from kernel_fusion.backends.triton.plan import Plan
from kernel_fusion.core.spec import Stages


def kernel(*specialised: str) -> Callable[[Callable[..., Any]], Any]:
    """Return a decorator of kernels, which are compiled once for all values of their numbers.

    Args:
        specialised: The names of numbers of which a 1 is compiled in.
    """

    def of(function: Callable[..., Any]) -> Any:
        numbers = [name for name in inspect.signature(function).parameters if name != "C" and not name.endswith("_ptr")]
        return triton.jit(function, do_not_specialize=[name for name in numbers if name not in specialised])

    return of


@dataclass(frozen=True, kw_only=True, repr=False)
class Constants:
    """The constants of every kernel.

    Attributes:
        wide: Whether the kernel computes in float64, and not in float32.
        rows: The rows of a tile.
        block: The columns of a tile.

    Several subclasses have these attributes, with one meaning:
        unit: A power of two that divides lengths and outer strides. Kernels get these in units, so that the compiler
            knows the divisor and can load vectors.
        flat: Whether rows have one stride.
        exact: Whether blocks divide rows, so that no column needs a mask.
        looped: Whether rows are longer than a program keeps, and are read block by block.
        pieces: How many blocks side by side hold a row.
    """

    wide: bool
    rows: int
    block: int

    @classmethod
    def of(cls, layout: Plan, **values: Any) -> Any:
        """Return constants with these values, and for other fields the values of the plan `layout`."""
        laid = {name: value for name, value in vars(layout).items() if name in cls.__dataclass_fields__}
        return cls(**laid, **values)

    def __post_init__(self) -> None:
        """Wrap strings, because Triton 3.6 passes no plain str on to a function."""
        for name, value in vars(self).items():
            if isinstance(value, str):
                vars(self)[name] = tl.constexpr(value)

    @property
    def acc(self) -> tl.dtype:
        """The type that the kernel computes in."""
        return tl.float64 if self.wide else tl.float32

    def __repr__(self) -> str:
        """Return an expression that needs no import, because Inductor writes it into the code that it generates."""
        plain = {field.name: getattr(self, field.name) for field in fields(self)}
        values = ", ".join(f"{name}={getattr(value, 'value', value)!r}" for name, value in plain.items())
        return f"__import__({type(self).__module__!r}, fromlist=['_']).{type(self).__name__}({values})"


@dataclass(frozen=True, kw_only=True, repr=False)
class RowNorm(Constants, Stages):
    """The constants of the norms in both directions; `Stages` has those of the stages around them.

    Attributes:
        rms: Whether the norm is RMSNorm, and not LayerNorm.
        offset: The number that is added to the weight.
        threshold: Dropout drops an element whose 32 random bits are below this number.
        kept_scale: The number by which dropout multiplies the elements that it keeps.
        has_weight: Whether there is a weight.
        has_bias: Whether there is a bias.
        has_residual: Whether a residual is added before the norm.
    """

    rms: bool
    offset: float
    threshold: int
    kept_scale: float
    has_weight: bool
    has_bias: bool
    flat: bool
    unit: int
    exact: bool
    has_residual: bool = False
    looped: bool = False
    pieces: int = 1

    @property
    def first_factor(self) -> bool:
        """Whether a stage's row is a factor of the tensor that is normalised."""
        return self.beside is not None and not self.follows

    @property
    def last_factor(self) -> bool:
        """Whether a stage's row is a factor of the result."""
        return self.beside is not None and self.follows

    @property
    def aligned(self) -> bool:
        """Whether every row begins with a block of random bits, which serves eight elements."""
        return self.unit % 8 == 0


@dataclass(frozen=True, kw_only=True, repr=False)
class Codes(Constants):
    """The constants of quantised results.

    Attributes:
        codes: PyTorch's name of the codes' type, or nothing if the result is not quantised.
        largest: The largest code.
        scale_cols: How many columns share a scale, or 0 if a whole row shares one or the scale is given.
        given: Whether the scale is given.
        rounds: Whether an instruction makes the codes from float32.
        keeps: Whether the result before quantisation is written, too.
    """

    codes: str = ""
    largest: float = 0.0
    scale_cols: int = 0
    given: bool = False
    rounds: bool = False
    keeps: bool = True
    looped: bool = False


@dataclass(frozen=True, kw_only=True, repr=False)
class RowNormForward(RowNorm, Codes):
    """The constants of the norms' forward pass.

    Attributes:
        eps: The number that is added to the variance.
        stats: Whether the statistics are written.
    """

    eps: float
    stats: bool


@dataclass(frozen=True, kw_only=True, repr=False)
class RowNormBackward(RowNorm):
    """The constants of the norms' backward pass. Names of gradients say whether they are wanted.

    Attributes:
        stored: Whether forward stored h, so that it is read and not made from x.
        has_dh: Whether a gradient arrives at h.
        dother: Whether the gradient of the other row is wanted: of the residual, or of a gate.
        columns: Whether the kernel sums columns and does nothing else.
    """

    stored: bool
    dweight: bool
    dbias: bool
    dgate: bool = False
    has_dh: bool = False
    dx: bool = False
    dother: bool = False
    columns: bool = False


@dataclass(frozen=True, kw_only=True, repr=False)
class SumPartials(Constants):
    """The constants of the kernel that adds up partial rows.

    Attributes:
        pair: Whether there are the partial rows of two sums.
        many: Whether there may be more columns than 32 bits count.
    """

    pair: bool
    many: bool


@dataclass(frozen=True, kw_only=True, repr=False)
class Pointwise(Constants):
    """The constants of pointwise chains.

    Attributes:
        combine: How the operands are combined: "first", "add", "mul" or "gate".
        activation: The name of the activation.
        scale: The number that multiplies the result: that of the chain, times that of dropout.
        threshold: Dropout drops an element whose 32 random bits are below this number.
        flat: Whether the result is one long row, and operands lie like it.
        simple: Whether the rows of all tensors have one stride.
        backward: Whether gradients are computed; da and db say of which operands.
    """

    combine: str
    activation: str
    scale: float
    threshold: int
    unit: int
    flat: bool = False
    simple: bool = True
    backward: bool = False
    da: bool = False
    db: bool = False

    @property
    def aligned(self) -> bool:
        """Whether every tile begins with a block of random bits, which serves eight elements."""
        return self.flat or self.unit % 8 == 0


@dataclass(frozen=True, kw_only=True, repr=False)
class Reduction(Constants):
    """The constants of reductions.

    Attributes:
        map: The function of each element: "square", "abs" or "none".
        mean: Whether the sum is divided by the number of elements.
    """

    map: str
    mean: bool


@dataclass(frozen=True, kw_only=True, repr=False)
class Rotary(Constants):
    """The constants of the rotary embedding, whose tile has C.rows heads and C.block pairs of columns.

    Attributes:
        cols: The columns of a head.
        half: How many pairs of columns are rotated.
        rest: The columns of a tile for what is not rotated.
        interleaved: Whether the elements of a pair are neighbours, and not half a head apart.
        norm: Whether heads are normalised before they are rotated.
        eps: The number that is added to the mean of squares.
        offset: The number that is added to the weights.
        rounding: "once" or "hf", as for the norms.
        narrow_angles: Whether cosines have the type of the heads.
        table_unit: As `unit`, for the tables of cosines and sines.
        backward: Whether gradients are computed. dquery, dkey, dweight and dkey_weight say which.
    """

    cols: int
    half: int
    rest: int
    exact: bool
    interleaved: bool
    norm: bool
    eps: float
    offset: float
    rounding: str
    narrow_angles: bool
    has_key: bool
    has_weight: bool
    has_key_weight: bool
    has_positions: bool
    unit: int
    table_unit: int
    backward: bool
    dquery: bool = False
    dkey: bool = False
    dweight: bool = False
    dkey_weight: bool = False


@dataclass(frozen=True, kw_only=True, repr=False)
class Quantization(Codes):
    """The constants of the kernel that quantises a tensor.

    Attributes:
        gated: Whether activation(a) * b is quantised, and not a.
        activation: The name of the activation.
    """

    unit: int
    flat: bool
    exact: bool
    gated: bool = False
    activation: str = "identity"
