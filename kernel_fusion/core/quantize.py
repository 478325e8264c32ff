"""`Quantize`, which asks a verb for a quantised result."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated

import torch
from torch import Tensor

from kernel_fusion.core.fields import Names

# int8 is symmetric: -128 is no code.
LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}
# The number of columns that share a scale.
BLOCK = 128

_CODES = Names("CodeType", tuple(str(dtype).removeprefix("torch.") for dtype in LARGEST), optional=True)
Scales = Annotated[str, Names("Scales", ("given", "row", "block"))]


@dataclass(frozen=True)
class Codes:
    """What a kernel that quantises v shall write: codes of this dtype, their scales and, if `keeps` is true, v too."""

    code: Annotated[str, _CODES] | None = None
    scales: Scales = "given"
    keeps: bool = False


NO_CODES = Codes()


@dataclass(frozen=True, eq=False)
class Quantize:
    r"""As the `out_dtype` of a norm, with any stages, or of :func:`gated_act`, asks for codes and scales.

    .. math:: \mathrm{code} = \mathrm{round}(\mathrm{clamp}(v / s)), \qquad s = \max |v| \,/\, \mathrm{largest\ code}

    v is the result that the verb has without this, in its own dtype; s is 1 where the quotient is 0, or is given. All
    is computed in float32, and ties round to even.

    Args:
        dtype: of the codes: `torch.int8` (largest code 127), `torch.float8_e4m3fn` (448) or `torch.float8_e5m2`
            (57344).
        scale: s, one float32 number on the input's device, for `per="tensor"`; None elsewhere.
        per: what has a scale, by keyword: "tensor", whose `scale` must be given; "row", the last dimension; or 128
            neighbouring columns.
        unquantized: whether the result holds v too, through which gradients pass.

    Raises:
        ValueError: another `dtype` or `per`, or a `scale` that is missing or goes with no `per`.
        TypeError: `scale` is no tensor.
        RuntimeError: `scale` is not one float32 number, or requires a gradient, which it would not get.

    Example:
        >>> import torch, kernel_fusion as kf
        >>> x = torch.randn(4, 256)
        >>> result = kf.rms_norm(x, 256, out_dtype=kf.Quantize(torch.int8, per="row"))
        >>> result.values.dtype, result.scale.shape
        (torch.int8, torch.Size([4, 1]))
    """

    dtype: torch.dtype
    scale: Tensor | None = None
    per: str | int = field(kw_only=True)
    unquantized: bool = False

    def __post_init__(self) -> None:
        """Raise if the arguments do not go together."""
        if self.dtype not in LARGEST:
            choices = " or ".join(map(str, LARGEST))
            raise ValueError(f"`Quantize`: `dtype` must be {choices}, got {self.dtype}")
        if isinstance(self.per, bool) or self.per not in ("tensor", "row", BLOCK):
            raise ValueError(f"`Quantize`: `per` must be 'tensor', 'row' or {BLOCK}, got {self.per!r}")
        if self.per != "tensor" and self.scale is not None:
            raise ValueError(f"`Quantize`: `scale` goes with per='tensor', got per={self.per!r}")
        if self.per == "tensor" and self.scale is None:
            raise ValueError(
                "`Quantize`: per='tensor' needs a `scale`, as the largest value of a tensor is known after it is "
                f"computed; 'row' and {BLOCK} need none"
            )
        if self.scale is not None:
            _check_scale(self.scale)

    @property
    def block(self) -> int:
        """The number of columns that share a scale; 0 if a row has one scale, or the scale is given."""
        return self.per if isinstance(self.per, int) else 0


def _check_scale(scale: Tensor) -> None:
    if not isinstance(scale, Tensor):
        raise TypeError(f"`Quantize`: `scale` must be a tensor, got {type(scale).__name__}")
    if scale.dtype != torch.float32 or scale.numel() != 1:
        raise RuntimeError(
            f"`Quantize`: `scale` must be one float32 number, got {scale.dtype} of shape {list(scale.shape)}"
        )
    if scale.requires_grad:
        raise RuntimeError("`Quantize`: `scale` must not require a gradient, since none is computed for it")


def num_scales(cols: int, block: int) -> int:
    """The number of scales of a row."""
    return -(-cols // block) if block else 1


def empty_scales(like: Tensor, block: int) -> Tensor:
    """Memory for the scales of rows: (*, 1), or (*, blocks) stored column by column, as matrix products read them."""
    leading: Sequence[int] = like.shape[:-1]
    if not block:
        return like.new_empty((*leading, 1), dtype=torch.float32)
    return like.new_empty((num_scales(like.shape[-1], block), *leading), dtype=torch.float32).movedim(0, -1)
