"""The decorator of kernels, and their constants, all in one object `C`.

Triton wants names in shapes, ranges and constants that are passed on: `BLOCK: tl.constexpr = C.block`.

Pointers and numbers come one by one: Inductor (PyTorch 2.11 and 2.13) raises for numbers in a tuple, and drops a kernel
that writes to a pointer in one.
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
    """A decorator of kernels, which are compiled once for any numbers, except those `specialised`."""

    def of(function: Callable[..., Any]) -> Any:
        numbers = [name for name in inspect.signature(function).parameters if name != "C" and not name.endswith("_ptr")]
        return triton.jit(function, do_not_specialize=[name for name in numbers if name not in specialised])

    return of


@dataclass(frozen=True, kw_only=True, repr=False)
class Constants:
    """The constants of every kernel.

    Attributes:
        wide: computed in float64, else in float32.
        chained: launched while the kernel before it runs.

    Several subclasses have these:
        unit: elements that lengths and outer strides count; a divisor that the compiler knows.
        flat: whether rows have one stride.
        exact: whether blocks divide rows, so that no column needs a mask.
    """

    wide: bool
    rows: int
    block: int
    chained: bool = False

    @classmethod
    def of(cls, layout: Plan, **values: Any) -> Any:
        """These values, and the layout's of the same names."""
        laid = {name: value for name, value in vars(layout).items() if name in cls.__dataclass_fields__}
        return cls(**laid, **values)

    def __post_init__(self) -> None:
        """Triton 3.6 passes no plain str on."""
        for name, value in vars(self).items():
            if isinstance(value, str):
                vars(self)[name] = tl.constexpr(value)

    @property
    def acc(self) -> tl.dtype:
        """The compute type."""
        return tl.float64 if self.wide else tl.float32

    def __repr__(self) -> str:
        """An expression without imports, for Inductor."""
        plain = {field.name: getattr(self, field.name) for field in fields(self)}
        values = ", ".join(f"{name}={getattr(value, 'value', value)!r}" for name, value in plain.items())
        return f"__import__({__name__!r}, fromlist=['_']).{type(self).__name__}({values})"


@dataclass(frozen=True, kw_only=True, repr=False)
class RowNorm(Constants, Stages):
    """The norms, with their stages.

    Attributes:
        has_weight, ...: whether there is one.
        part: whether other ranks have other columns, and rows' sums are wanted; joined: these are given, of all ranks.
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
    part: bool = False
    joined: bool = False

    @property
    def first_factor(self) -> bool:
        """Whether a stage's row is a factor of what is normalised."""
        return self.beside is not None and not self.follows

    @property
    def last_factor(self) -> bool:
        """Whether it is one of the result."""
        return self.beside is not None and self.follows

    @property
    def aligned(self) -> bool:
        """Whether rows begin with a block of random bits."""
        return self.unit % 8 == 0


@dataclass(frozen=True, kw_only=True, repr=False)
class Codes(Constants):
    """Quantised results.

    Attributes:
        codes: PyTorch's name of their type; none without quantisation.
        group: columns that share a scale; 0: a row, or it is given.
        rounds: whether an instruction makes them from float32.
        keeps: whether the result before quantisation is written, too.
    """

    codes: str = ""
    largest: float = 0.0
    group: int = 0
    given: bool = False
    rounds: bool = False
    keeps: bool = True
    looped: bool
    slices: int


@dataclass(frozen=True, kw_only=True, repr=False)
class RowNormForward(RowNorm, Codes):
    """Forward of the norms; other names as in plan.py."""

    eps: float
    stats: bool
    pieces: int
    early: bool
    releases: bool


@dataclass(frozen=True, kw_only=True, repr=False)
class RowNormBackward(RowNorm):
    """Backward of the norms; other names as in plan.py.

    Attributes:
        stored: whether h is read, not made from x.
        columns: whether only columns are summed.
    """

    stored: bool
    dweight: bool
    dbias: bool
    dgate: bool = False
    has_dh: bool = False
    dx: bool = False
    dother: bool = False
    pieces: int = 1
    again: bool = False
    looped: bool = False
    stages: int = 1
    columns: bool = False


@dataclass(frozen=True, kw_only=True, repr=False)
class SumPartials(Constants):
    """The finish of the column sums.

    Attributes:
        pair: of two.
        many: perhaps more columns than 32 bits count.
    """

    pair: bool
    many: bool


@dataclass(frozen=True, kw_only=True, repr=False)
class Pointwise(Constants):
    """Pointwise chains.

    Attributes:
        scale: multiplies the chain, and dropout's.
        flat: whether everything is one long row.
        simple: whether there is a single outer dimension.
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
        """As for norms."""
        return self.flat or self.unit % 8 == 0


@dataclass(frozen=True, kw_only=True, repr=False)
class Reduction(Constants):
    """Reductions: an element's function, and whether the sum is divided."""

    map: str
    mean: bool


@dataclass(frozen=True, kw_only=True, repr=False)
class Softmax(Constants):
    """Softmax.

    Attributes:
        mask: "none", "bool" or "additive"; causal: whether there is a diagonal.
        leaves_out: whether elements are left out, which are then zero.
    """

    scale: float
    unit: int
    looped: bool
    leaves_out: bool
    mask: str = "none"
    causal: bool = False
    flat: bool = True


@dataclass(frozen=True, kw_only=True, repr=False)
class Rotary(Constants):
    """The rotary embedding; a tile has `rows` heads and `block` pairs.

    Attributes:
        cols, half: columns of a head, and rotated pairs of them.
        narrow_angles: cosines have their type.
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
    """Codes of a tensor, or if `gated` of activation(a) * b."""

    unit: int
    flat: bool
    exact: bool
    gated: bool = False
    activation: str = "identity"
