"""y = softmax(scale * x + mask) over rows, and its backward, dx = scale * (dy - sum(dy y)) y.

A program has C.rows whole rows, each in one block of columns. Longer rows (C.looped) are read twice: first for a
running maximum and the sum of exponentials relative to it (Milakov, Gimelshein 2018), then for the quotients. Elements
that a mask or the diagonal of `causal` leaves out are not read. They give zero, even beside NaN, and so does a fully
masked row. With C.log, y is the logarithm of all this, and backward is dx = scale * (dy - sum(dy) exp(y)).

Behind the kernels are the operators that launch them, and the autograd of these.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernel_fusion.backends.triton import autograd, plan
from kernel_fusion.backends.triton.kernels.constants import Constants, kernel
from kernel_fusion.backends.triton.kernels.elementary import exp, log1p
from kernel_fusion.backends.triton.kernels.rows import load, row_offset, store, tile_of_rows
from kernel_fusion.backends.triton.launch import launch, operator
from kernel_fusion.backends.triton.layout import RowLayout, merge, outer_rows, rows_of, unit
from kernel_fusion.core.arguments import floating, require
from kernel_fusion.core.checks import shaped
from kernel_fusion.core.spec import cast, compute_dtype
from kernel_fusion.core.symbols import known, possible


@dataclass(frozen=True, kw_only=True, repr=False)
class Softmax(Constants):
    """The constants of softmax.

    Attributes:
        scale: The number that multiplies the input.
        leaves_out: Whether the mask or the diagonal leaves elements out, which are then zero.
        mask: The kind of mask: "none", "bool" or "additive".
        causal: Whether elements beyond the diagonal are left out.
        log: Whether y is the logarithm.
    """

    scale: float
    unit: int
    looped: bool
    leaves_out: bool
    mask: str = "none"
    causal: bool = False
    log: bool = False
    flat: bool = True

    @property
    def nothing(self) -> float:
        """y of an element that is left out."""
        return -float("inf") if self.log else 0.0


@triton.jit
def _logits(pointers, rows, mask_step, at, inside, C: tl.constexpr):
    """scale * x + mask of a tile, with -inf for what is left out; and the mask of the elements that are kept.

    `pointers` are those of x and of the mask. `rows` are the offsets of the rows in both, and the last column that
    causal rows keep. `mask_step` is the stride of the mask's columns, `at` are the columns of the tile, and `inside`
    says which of its elements exist.
    """
    x_ptr, mask_ptr = pointers
    x_row, mask_row, diagonal = rows
    read = inside
    if C.causal:
        read = read & (at <= diagonal)
    if C.mask == "bool":
        read = read & (tl.load(mask_ptr + mask_row + at * mask_step, mask=read, other=0) != 0)
    logits = load(x_ptr, x_row + at, read, C.wide) * C.scale
    if C.mask == "additive":
        logits += load(mask_ptr, mask_row + at * mask_step, read, C.wide)
    return tl.where(read, logits, -float("inf")), read


@triton.jit
def _maximum(logits):
    """The maximum of each row, which is NaN if the row has a NaN."""
    largest = tl.max(logits, axis=1)[:, None]
    has_nan = tl.max((logits != logits).to(tl.int32), axis=1)[:, None]
    return tl.where(has_nan > 0, float("nan"), largest)


@triton.jit
def _quotients(logits, kept, largest, total, C: tl.constexpr):
    """y of a tile, from the maximum of each row and the sum of its exponentials."""
    if C.log:
        y = (logits - largest) - log1p(total - 1.0)  # the sum is at least 1; Triton's own log is less exact
    else:
        y = exp(logits - largest) / total
    if C.causal or C.mask != "none":
        # The maximum of a fully masked row is -inf. NaN compares unequal.
        y = tl.where(largest == -float("inf"), C.nothing, y)
    if C.leaves_out:
        y = tl.where(kept, y, C.nothing)
    return y


@triton.jit
def _long_rows(pointers, y_ptr, row, rows, mask_step, col, row_mask, num_cols, C: tl.constexpr):
    """Write y of rows that are read block by block, twice; `row` are their numbers, and `col` a block's columns."""
    ROWS: tl.constexpr = C.rows
    BLOCK: tl.constexpr = C.block
    largest = tl.full([ROWS, 1], -float("inf"), C.acc)
    total = tl.zeros([ROWS, 1], C.acc)
    for start in range(0, num_cols, BLOCK):
        at = start + col
        logits, _ = _logits(pointers, rows, mask_step, at, row_mask & (at < num_cols), C)
        found = _maximum(logits)
        # A NaN stays, because comparisons with it are false.
        larger = tl.where((found <= largest) | (largest != largest), largest, found)
        # If there was nothing but -inf so far, exp(-inf - -inf) would be NaN.
        shift = tl.where(larger == -float("inf"), 0.0, larger)
        total = total * exp(largest - shift) + tl.sum(exp(logits - shift), axis=1)[:, None]
        largest = larger
    for start in range(0, num_cols, BLOCK):
        at = start + col
        inside = row_mask & (at < num_cols)
        logits, kept = _logits(pointers, rows, mask_step, at, inside, C)
        y = _quotients(logits, kept, largest, total, C)
        store(y_ptr, row * num_cols + at, y, inside)


# fmt: off
@kernel("mask_step")
def softmax_fwd(
    x_ptr, mask_ptr, y_ptr,
    num_rows, col_units, matrix_rows, middle, inner, x0, x1, x2, m0, m1, m2, mask_step, C: tl.constexpr,
):
    # fmt: on
    """Write y. Causal matrices have `matrix_rows` rows each. The strides of the mask count elements, not units."""
    num_cols = col_units * C.unit
    row, row_mask, col = tile_of_rows(num_rows, C)
    x_row = row_offset(row, (middle, inner), (x0, x1, x2), C.unit, C.flat)
    mask_row = row_offset(row, (middle, inner), (m0, m1, m2), 1, C.flat)
    pointers = (x_ptr, mask_ptr)
    rows = (x_row, mask_row, row % matrix_rows)
    if C.looped:
        _long_rows(pointers, y_ptr, row, rows, mask_step, col, row_mask, num_cols, C)
    else:
        inside = row_mask & (col < num_cols)
        logits, kept = _logits(pointers, rows, mask_step, col, inside, C)
        largest = _maximum(logits)
        total = tl.sum(tl.where(inside, exp(logits - largest), 0.0), axis=1)[:, None]
        y = _quotients(logits, kept, largest, total, C)
        store(y_ptr, row * num_cols + col, y, inside)


@triton.jit
def _terms(dy, y, C: tl.constexpr):
    """Return the terms of backward's sum over a row: dy * y or, for the logarithm, dy of what is not left out."""
    if not C.log:
        return dy * y
    return tl.where(y == C.nothing, 0.0, dy) if C.leaves_out else dy


@triton.jit
def _gradient(dy, y, total, C: tl.constexpr):
    """dx of a tile; `total` is the sum of the terms over each row."""
    if C.log:
        dx = (dy - total * exp(y)) * C.scale
    else:
        dx = (dy - total) * y * C.scale
    if C.leaves_out:
        dx = tl.where(y == C.nothing, 0.0, dx)
    return dx


@kernel()
def softmax_bwd(dy_ptr, y_ptr, dx_ptr, num_rows, col_units, C: tl.constexpr):
    """Write dx from contiguous dy and y."""
    ROWS: tl.constexpr = C.rows
    BLOCK: tl.constexpr = C.block
    num_cols = col_units * C.unit
    row, row_mask, col = tile_of_rows(num_rows, C)
    at_row = row * num_cols
    if C.looped:
        sums = tl.zeros([ROWS, BLOCK], C.acc)
        for start in range(0, num_cols, BLOCK):
            at = start + col
            mask = row_mask & (at < num_cols)
            dy = load(dy_ptr, at_row + at, mask, C.wide)
            sums += _terms(dy, load(y_ptr, at_row + at, mask, C.wide), C)
        total = tl.sum(sums, axis=1)[:, None]
        for start in range(0, num_cols, BLOCK):
            at = start + col
            mask = row_mask & (at < num_cols)
            y = load(y_ptr, at_row + at, mask, C.wide)
            dy = load(dy_ptr, at_row + at, mask, C.wide)
            store(dx_ptr, at_row + at, _gradient(dy, y, total, C), mask)
    else:
        mask = row_mask & (col < num_cols)
        dy = load(dy_ptr, at_row + col, mask, C.wide)
        y = load(y_ptr, at_row + col, mask, C.wide)
        total = tl.sum(_terms(dy, y, C), axis=1)[:, None]
        store(dx_ptr, at_row + col, _gradient(dy, y, total, C), mask)


def _layout(input: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor | None, RowLayout]:
    """Input and mask as kernels read them, and the layout of the rows of both.

    The columns of the mask may have any stride, so that a broadcast mask is not copied.
    """
    if mask is None:
        tensors, rows = rows_of([input], 1)
        return tensors[0], None, RowLayout(rows.count, rows.middle, rows.inner, (*rows.strides, (0, 0, 0)))
    x = input if input.stride(-1) == 1 or input.shape[-1] == 1 else input.contiguous()
    for given, by in ((x, mask), (x.contiguous(), mask), (x.contiguous(), mask.contiguous())):
        found = outer_rows(*merge(given.shape[:-1], [given.stride()[:-1], by.stride()[:-1]]))
        if found is not None:
            return given, by, found
    raise AssertionError("contiguous tensors are rows of one stride")


def _takes_forward(input: Tensor, mask: Tensor | None, causal: bool) -> bool:
    """Whether the kernel of forward takes this call."""
    if input.dim() < 1 + causal or known(input.numel() == 0) or not floating(input):
        return False
    return mask is None or _is_mask(mask, input)


@operator("softmax_fwd")
def forward(input: Tensor, mask: Tensor | None, scale: float, causal: bool, log: bool = False) -> Tensor:
    """Return y, which is contiguous. `mask` has the input's shape and any strides."""
    require("triton_softmax_fwd", [input, mask], _takes_forward(input, mask, causal))
    cols = input.shape[-1]
    x, by, rows = _layout(input, mask)
    y = torch.empty(input.shape, dtype=input.dtype, device=input.device)
    wide = compute_dtype(input.dtype) == torch.float64
    layout = plan.row_plan(cols, wide)
    size = unit(cols, *rows.strides[0])
    kind = "none" if by is None else "bool" if by.dtype == torch.bool else "additive"
    asked: dict[str, Any] = {"scale": scale, "mask": kind, "causal": causal, "leaves_out": causal or kind == "bool"}
    asked["log"] = log
    lengths = rows.count, cols // size, input.shape[-2] if causal else 1, rows.middle, rows.inner
    strides = *(stride // size for stride in rows.strides[0]), *rows.strides[1], 0 if by is None else by.stride(-1)
    constants = Softmax.of(layout, wide=wide, flat=rows.simple, unit=size, **asked)
    grid = (-(-rows.count // layout.rows),)
    launch(softmax_fwd, grid, x, by, y, *lengths, *strides, constants=constants, warps=layout.warps)
    return y


@operator("softmax_bwd")
def backward(dy: Tensor, y: Tensor, scale: float, leaves_out: bool, log: bool = False) -> Tensor:
    """Return dx, which is contiguous.

    With `leaves_out`, the mask or the diagonal left out elements. dx is then 0 if y is, even in a row with NaN; with
    `log`, if y is -inf.
    """
    takes = y.dim() >= 1 and possible(y.numel() > 0) and floating(dy, y) and shaped(y.shape, dy)
    require("triton_softmax_bwd", [dy, y], takes)
    dy, y, cols = dy.contiguous(), y.contiguous(), y.shape[-1]
    dx = torch.empty(y.shape, dtype=y.dtype, device=y.device)
    wide = compute_dtype(y.dtype) == torch.float64
    layout = plan.row_plan(cols, wide, kept=2)
    size, num_rows = unit(cols), y.numel() // cols
    constants = Softmax.of(layout, scale=scale, leaves_out=leaves_out, log=log, wide=wide, unit=size)
    args, grid = (dy, y, dx, num_rows, cols // size), (-(-num_rows // layout.rows),)
    launch(softmax_bwd, grid, *args, constants=constants, warps=layout.warps)
    return dx


def _kept(args: Sequence[Any], y: Tensor, _: Sequence[bool]) -> Sequence[Any]:
    """Backward reads these: y, the scale, whether elements are left out, `log`, and the dtypes of input and mask."""
    input, mask, scale, causal, *options = args
    log = any(options)
    leaves_out = causal or (mask is not None and (log or mask.dtype == torch.bool))
    return y, scale, leaves_out, log, input.dtype, None if mask is None else mask.dtype


def _gradients(kept: Sequence[Any], grads: Sequence[Any], wants: Sequence[bool]) -> list[Tensor | None]:
    """Gradients of the input and of an additive mask."""
    y, scale, leaves_out, log, *dtypes = kept
    (dy,) = grads
    # y carries its history, so the formula, which is one of y, can be differentiated.
    gradient = _formula if torch.is_grad_enabled() else torch.ops.kernel_fusion.triton_softmax_bwd
    return [
        cast(gradient(dy, y, factor, leaves_out, log), dtype) if wanted else None
        for factor, dtype, wanted in zip((scale, 1.0), dtypes, wants, strict=False)
    ]


def _formula(dy: Tensor, y: Tensor, scale: float, leaves_out: bool, log: bool) -> Tensor:
    """The result of `backward` by PyTorch's operations, through which gradients flow."""
    wide = compute_dtype(y.dtype)
    nothing = y == (-torch.inf if log else 0.0)
    weights, terms = cast(y, wide), cast(dy, wide)
    if log:
        weights = weights.exp()
        terms = terms.masked_fill(nothing, 0.0) if leaves_out else terms
    else:
        terms = terms * weights
    dx = scale * (terms - weights * terms.sum(-1, keepdim=True))
    return dx.masked_fill(nothing, 0.0) if leaves_out else dx


def _is_mask(mask: Tensor, input: Tensor) -> bool:
    """Whether the kernels take this mask of the input."""
    return shaped(input.shape, mask) and (mask.dtype == torch.bool or floating(mask))


autograd.define(
    "softmax",
    takes=lambda input, mask, *_: mask is None or _is_mask(mask, input),
    forward=torch.ops.kernel_fusion.triton_softmax_fwd,
    backward=_gradients,
    keep=_kept,
)
