"""Pointwise chains: the operators that launch the kernels, and their autograd.

A chain is y = dropout(scale * f(a, b)), in which f combines the operands and applies an activation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kernel_fusion.backends.triton import autograd, plan
from kernel_fusion.backends.triton.kernels import pointwise as kernels
from kernel_fusion.backends.triton.kernels.constants import Pointwise as Constants
from kernel_fusion.backends.triton.launch import launch, operator
from kernel_fusion.backends.triton.layout import RowLayout, dense_strides, memory_order, merge, outer_rows, unit
from kernel_fusion.backends.triton.reduce import sum_partials
from kernel_fusion.core import checks, dropout
from kernel_fusion.core.activations import CODES
from kernel_fusion.core.arguments import floating, is_seed, require
from kernel_fusion.core.spec import compute_dtype, summed
from kernel_fusion.core.symbols import broadcasts, known, possible, same

_COMBINES = ("first", "add", "mul", "gate")


class Chain(NamedTuple):
    """The operator's arguments.

    Attributes:
        a: The first operand.
        b: The second operand, or None for a chain of one.
        combine: How f combines them: "first", "add", "mul" or "gate".
        activation: The name of the activation.
        scale: The number that multiplies f(a, b).
        dropout_p: The probability that dropout drops an element.
        seed: The seed of dropout, a tensor of one number, or None without dropout.
    """

    a: Tensor
    b: Tensor | None
    combine: str
    activation: str
    scale: float
    dropout_p: float
    seed: Tensor | None

    @property
    def shape(self) -> torch.Size:
        """The shape of y."""
        return self.a.shape if self.b is None else torch.broadcast_shapes(self.a.shape, self.b.shape)

    @property
    def dtype(self) -> torch.dtype:
        """The type that PyTorch's pointwise operations give y."""
        return self.a.dtype if self.b is None else torch.result_type(self.a, self.b)

    @property
    def taken(self) -> bool:
        """Whether the kernels take these arguments."""
        a, b = self.a, self.b
        named = self.combine in _COMBINES and self.activation in CODES and (b is not None or self.combine == "first")
        right = floating(a, b) and is_seed(self.seed) and 0.0 <= self.dropout_p <= 1.0
        filled = all(possible(t.numel() > 0) for t in (a, b) if t is not None)
        return named and right and filled and _broadcast(a, b)

    def constants(self) -> dict[str, Any]:
        """Return the constants that kernels of both directions share."""
        drops = self.seed is not None
        return {
            "combine": self.combine,
            "activation": self.activation,
            "scale": self.scale * (dropout.scale(self.dropout_p) if drops else 1.0),
            "threshold": dropout.threshold(self.dropout_p) if drops else 0,
            "wide": compute_dtype(self.dtype) == torch.float64,
        }


@dataclass(frozen=True)
class _Walk:
    """The way of the kernels through the memory of y and of gradients of its shape.

    Attributes:
        strides: The strides of y.
        is_contiguous: Whether y is contiguous.
        a: The first operand, copied if kernels cannot describe its dimensions.
        b: The second operand, likewise; the first one again if there is only one.
        rows: The layout of the outer dimensions; None if y is one row and the operands lie like it.
        cols: The length of the innermost dimension.
        steps: The strides of the operands' columns.
    """

    strides: list[int]
    is_contiguous: bool
    a: Tensor
    b: Tensor
    rows: RowLayout | None
    cols: int
    steps: tuple[int, int]

    def like(self, of: Tensor, dtype: torch.dtype) -> Tensor:
        """Return memory of type `dtype` that lies like y, with the shape of `of`."""
        # torch.compile would merge equal calls of `empty_strided` into one tensor, and keep forward's for backward.
        if self.is_contiguous:
            return torch.empty(of.shape, dtype=dtype, device=of.device)
        return torch.empty_strided(of.shape, self.strides, dtype=dtype, device=of.device)

    def launch(self, seed: Tensor | None, dy: Tensor | None, *results: Tensor | None, **constants: Any) -> None:
        """Launch the kernel that fills `results`: y, or with dy the gradients of a and b."""
        if self.rows is None:
            count, numbers = 1, [1, self.cols, 1, 1, *(0,) * 6]
            constants |= {"flat": True, "unit": 1}
        else:
            size, numbers = self.rows.in_units(self.cols)
            count = self.rows.count
            constants |= {"simple": self.rows.simple, "unit": size}
        layout = plan.pointwise(None if self.rows is None else self.cols)
        grid = (-(-self.cols // layout.block) * -(-count // layout.rows),)
        args = dy, self.a, self.b, seed, *results, *numbers, *self.steps
        launch(kernels.pointwise, grid, *args, constants=Constants.of(layout, **constants), warps=layout.warps)


def _walk(c: Chain) -> _Walk:
    """The way through the memory of a chain's result."""
    shape = c.shape
    a = c.a.expand(shape)
    operands = [a, a if c.b is None else c.b.expand(shape)]
    order = memory_order(shape, [t.stride() for t in operands])
    strides = dense_strides(shape, order)
    for _ in range(2):
        sizes, steps = merge([shape[dim] for dim in order], [[of.stride()[dim] for dim in order] for of in operands])
        rows = outer_rows(sizes[:-1], [of[:-1] for of in steps])
        if rows is not None:
            break
        operands = [torch.empty_strided(shape, strides, dtype=t.dtype, device=t.device).copy_(t) for t in operands]
    assert rows is not None
    cols = sizes[-1] if sizes else 1
    last = (steps[0][-1], steps[1][-1]) if sizes else (1, 1)
    flat = len(sizes) <= 1 and last == (1, 1)
    return _Walk(strides, order == sorted(order), operands[0], operands[1], None if flat else rows, cols, last)


@operator("pointwise_fwd")
def forward(c: Chain, out_dtype: torch.dtype | None) -> Tensor:
    """Return y with the strides that PyTorch gives it, and with PyTorch's dtype unless `out_dtype` says another."""
    require("triton_pointwise_fwd", [c.a, c.b, c.seed], (out_dtype is None or out_dtype in checks.FLOATING) and c.taken)
    walk = _walk(c)
    y = walk.like(walk.a, out_dtype or c.dtype)
    walk.launch(c.seed, None, y, None, **c.constants())
    return y


@operator("pointwise_bwd")
def backward(dy: Tensor, c: Chain, wants: Sequence[bool]) -> tuple[Tensor, Tensor]:
    """Return the gradients of a and b, empty if they are not wanted.

    They have the shape of y. If b is one row under all rows of a, its gradient has the shape of b.
    """
    takes = c.taken and len(wants) == 2 and floating(dy) and checks.shaped(c.shape, dy)
    require("triton_pointwise_bwd", [dy, c.a, c.b, c.seed], takes)
    walk = _walk(c)
    cotangent = dy if same(dy.stride(), walk.strides) else walk.like(dy, dy.dtype).copy_(dy)
    if c.b is not None and wants[1] and _is_row(walk):
        da, db = _backward_columns(cotangent, walk, c.seed, wants[0], c.constants())
        return da, db.view(c.b.shape)

    def gradient(t: Tensor | None, wanted: bool) -> Tensor:
        if t is None or not wanted:
            return c.a.new_empty(0)
        # The gradient of a broadcast operand is summed later. Until then it has the result's type, as in PyTorch.
        return walk.like(dy, t.dtype if same(t.shape, dy.shape) else c.dtype)

    da, db = gradient(c.a, wants[0]), gradient(c.b, wants[1])
    asked = {"da": wants[0], "db": c.b is not None and wants[1]}
    walk.launch(c.seed, cotangent, da, db, backward=True, **asked, **c.constants())
    return da, db


def _is_row(walk: _Walk) -> bool:
    """Whether b is one row under every row of a dense a."""
    rows = walk.rows
    return rows is not None and rows.simple and rows.strides == ((walk.cols, 0, 0), (0, 0, 0)) and walk.steps == (1, 1)


def _backward_columns(
    dy: Tensor, walk: _Walk, seed: Tensor | None, wants_da: bool, constants: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """The gradients of a and of a b that is one row, whose sum over rows the same kernel begins."""
    assert walk.rows is not None
    device = plan.device_of(dy.device)
    layout = plan.columns(walk.cols)
    tiles = -(-walk.cols // layout.block)
    programs = device.programs(layout, walk.rows.count, tiles)
    wide = torch.float64 if constants["wide"] else torch.float32
    partials = torch.empty(programs * walk.cols, dtype=wide, device=dy.device)
    da = walk.like(dy, walk.a.dtype) if wants_da else dy.new_empty(0, dtype=walk.a.dtype)
    db = torch.empty(walk.cols, dtype=walk.b.dtype, device=dy.device)
    size = unit(walk.cols)
    args = dy, walk.a, walk.b, seed, da, partials, walk.rows.count, walk.cols // size
    compiled = Constants.of(layout, da=wants_da, unit=size, **constants)
    launch(kernels.pointwise_bwd_columns, (tiles, programs), *args, constants=compiled, warps=layout.warps)
    sum_partials(partials, programs, [db])
    return da, db


def _kept(args: Sequence[Any], _: Tensor, wants: Sequence[bool]) -> Sequence[Any]:
    """The arguments of backward that forward keeps."""
    a, b, combine, *rest = args
    reads_b = combine != "gate" or wants[0]  # the value's gradient does not depend on the value
    return a, b if reads_b else autograd.unread(b), combine, *rest


def _gradients(kept: Sequence[Any], grads: Sequence[Any], wants: Sequence[bool]) -> autograd.Gradients:
    """Gradients of a and b."""
    if torch.is_grad_enabled():
        return autograd.by_definition("pointwise", kept, grads, wants)
    found = torch.ops.kernel_fusion.triton_pointwise_bwd(*grads, *kept, [*wants[:2]])
    return [summed(t, of) if wanted else None for t, of, wanted in zip(found, kept, wants, strict=False)]


def _broadcast(a: Tensor, b: Tensor | None) -> bool:
    """Whether the shapes broadcast; if not, the definition raises in PyTorch's words."""
    if b is None:
        return True
    pairs = zip(reversed(a.shape), reversed(b.shape), strict=False)
    return all(broadcasts(m, n) or known(n == 1) for m, n in pairs)


autograd.define(
    "pointwise",
    takes=lambda a, b, *_: _broadcast(a, b),
    forward=lambda *args: torch.ops.kernel_fusion.triton_pointwise_fwd(*args, None),
    backward=_gradients,
    keep=_kept,
)
