"""Pointwise chains: the operators on the kernels, and their autograd."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kernel_fusion.backends.triton import autograd, plan
from kernel_fusion.backends.triton.kernels import pointwise as kernels
from kernel_fusion.backends.triton.kernels.constants import Pointwise as Constants
from kernel_fusion.backends.triton.launch import launch, tile
from kernel_fusion.backends.triton.layout import Rows, dense_strides, memory_order, merge, outer_rows, unit
from kernel_fusion.backends.triton.reduce import sum_partials
from kernel_fusion.core import checks, dropout
from kernel_fusion.core.activations import CODES
from kernel_fusion.core.arguments import floating, is_seed, require, shaped
from kernel_fusion.core.spec import compute_dtype

_COMBINES = ("first", "add", "mul", "gate")


@dataclass(frozen=True)
class _Walk:
    """How the kernels pass through the memory of y.

    Attributes:
        strides: of y and of gradients of its shape; is_contiguous: whether they are contiguous.
        a, b: the operands, copied if their dimensions cannot be described.
        rows: the outer dimensions; None if y is one row and the operands lie like it.
        steps: column strides of the operands.
    """

    strides: list[int]
    is_contiguous: bool
    a: Tensor
    b: Tensor
    rows: Rows | None
    cols: int
    steps: tuple[int, int]


def _walk(a: Tensor, b: Tensor | None) -> _Walk:
    shape = a.shape if b is None else torch.broadcast_shapes(a.shape, b.shape)
    operands = [a if b is None else a.expand(shape), a if b is None else b.expand(shape)]
    order = memory_order(shape, [t.stride() for t in (operands[:1] if b is None else operands)])
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
    contiguous = order == sorted(order)
    return _Walk(strides, contiguous, operands[0], operands[1], None if flat else rows, cols, last)


def _like(walk: _Walk, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    # torch.compile merges equal calls of `empty_strided` into one tensor and keeps forward's for backward.
    if walk.is_contiguous:
        return torch.empty(shape, dtype=dtype, device=device)
    return torch.empty_strided(shape, walk.strides, dtype=dtype, device=device)


def _numbers(walk: _Walk) -> tuple[list[int], dict[str, Any]]:
    """Lengths and strides in units, and the constants that explain them."""
    if walk.rows is None:
        return [1, walk.cols, 1, 1, 0, 0, 0, 1, 0, 0, 0, 1], {"flat": True, "unit": 1}
    rows = walk.rows
    first, second = rows.strides
    size = unit(walk.cols, *first, *second)
    numbers = [rows.count, walk.cols // size, rows.middle, rows.inner]
    numbers += [*(s // size for s in first), walk.steps[0], *(s // size for s in second), walk.steps[1]]
    return numbers, {"simple": rows.simple, "unit": size}


def _constants(
    combine: str, activation: str, scale: float, dropout_p: float, seed: Tensor | None, dtype: torch.dtype
) -> dict[str, Any]:
    return {
        "combine": combine,
        "activation": activation,
        "scale": scale * (dropout.scale(dropout_p) if seed is not None else 1.0),
        "threshold": dropout.threshold(dropout_p) if seed is not None else 0,
        "wide": compute_dtype(dtype) == torch.float64,
    }


def _plan_and_grid(walk: _Walk, device: torch.device) -> tuple[plan.Plan, tuple[int]]:
    layout = plan.chain(None if walk.rows is None else walk.cols, plan.device_of(device).warp_size)
    count = 1 if walk.rows is None else walk.rows.count
    return layout, (-(-walk.cols // layout.block) * -(-count // layout.rows),)


def _result_dtype(a: Tensor, b: Tensor | None) -> torch.dtype:
    return a.dtype if b is None else torch.result_type(a, b)


def _takes(a: Tensor, b: Tensor | None, combine: str, activation: str, dropout_p: float, seed: Tensor | None) -> bool:
    named = combine in _COMBINES and activation in CODES and (b is not None or combine == "first")
    known = floating(a, b) and is_seed(seed) and 0.0 <= dropout_p <= 1.0
    return named and known and a.numel() > 0 and (b is None or b.numel() > 0) and _broadcast(a, b)


@torch.library.triton_op("kernel_fusion::triton_pointwise_fwd", mutates_args={})
def forward(
    a: Tensor,
    b: Tensor | None,
    combine: str,
    activation: str,
    scale: float,
    dropout_p: float,
    seed: Tensor | None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """y, with the strides and, without `out_dtype`, the dtype that PyTorch's pointwise operations give it."""
    chain = combine, activation, dropout_p, seed
    known = out_dtype is None or out_dtype in checks.FLOATING
    require("triton_pointwise_fwd", [a, b, seed], known and _takes(a, b, *chain))
    dtype, walk = _result_dtype(a, b), _walk(a, b)
    shape = a.shape if b is None else torch.broadcast_shapes(a.shape, b.shape)
    y = _like(walk, shape, out_dtype or dtype, a.device)
    layout, grid = _plan_and_grid(walk, a.device)
    numbers, meaning = _numbers(walk)
    constants = Constants(**meaning, **tile(layout), **_constants(combine, activation, scale, dropout_p, seed, dtype))
    args = None, walk.a, walk.b, seed, y, None, *numbers
    launch(kernels.pointwise, grid, *args, constants=constants, warps=layout.warps)
    return y


@torch.library.triton_op("kernel_fusion::triton_pointwise_bwd", mutates_args={})
def backward(
    dy: Tensor,
    a: Tensor,
    b: Tensor | None,
    combine: str,
    activation: str,
    scale: float,
    dropout_p: float,
    seed: Tensor | None,
    wants: Sequence[bool],
) -> tuple[Tensor, Tensor]:
    """da and db of y's shape, but db of b's shape if b is one row; empty if unwanted."""
    takes = _takes(a, b, combine, activation, dropout_p, seed) and len(wants) == 2 and floating(dy)
    shape = a.shape if b is None or not takes else torch.broadcast_shapes(a.shape, b.shape)
    require("triton_pointwise_bwd", [dy, a, b, seed], takes and shaped(shape, dy))
    dtype, walk = _result_dtype(a, b), _walk(a, b)
    cotangent = dy if list(dy.stride()) == walk.strides else _like(walk, dy.shape, dy.dtype, dy.device).copy_(dy)
    constants = _constants(combine, activation, scale, dropout_p, seed, dtype)
    nothing = a.new_empty(0)
    if b is not None and wants[1] and _is_row(walk):
        da, db = _backward_columns(cotangent, walk, seed, wants[0], constants)
        return da, db.view(b.shape)
    # A broadcast operand gets the sum of this, in the result's dtype, as in PyTorch.
    a_dtype = a.dtype if a.shape == dy.shape else dtype
    da = _like(walk, dy.shape, a_dtype, dy.device) if wants[0] else nothing
    db = nothing
    if b is not None and wants[1]:
        db = _like(walk, dy.shape, b.dtype if b.shape == dy.shape else dtype, dy.device)
    layout, grid = _plan_and_grid(walk, a.device)
    numbers, meaning = _numbers(walk)
    constants |= {"backward": True, "da": wants[0], "db": b is not None and wants[1], **meaning, **tile(layout)}
    args = cotangent, walk.a, walk.b, seed, da, db, *numbers
    launch(kernels.pointwise, grid, *args, constants=Constants(**constants), warps=layout.warps)
    return da, db


def _is_row(walk: _Walk) -> bool:
    """Whether b is one row under every row of a dense a."""
    rows = walk.rows
    return rows is not None and rows.simple and rows.strides == ((walk.cols, 0, 0), (0, 0, 0)) and walk.steps == (1, 1)


def _backward_columns(
    dy: Tensor, walk: _Walk, seed: Tensor | None, wants_da: bool, constants: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    assert walk.rows is not None
    device = plan.device_of(dy.device)
    layout = plan.columns(walk.cols, device.warp_size)
    tiles = -(-walk.cols // layout.block)
    programs = device.programs(layout, walk.rows.count, tiles)
    wide = torch.float64 if constants["wide"] else torch.float32
    partials = torch.empty(programs * walk.cols, dtype=wide, device=dy.device)
    da = _like(walk, dy.shape, walk.a.dtype, dy.device) if wants_da else dy.new_empty(0, dtype=walk.a.dtype)
    db = torch.empty(walk.cols, dtype=walk.b.dtype, device=dy.device)
    size = unit(walk.cols)
    args = dy, walk.a, walk.b, seed, da, partials, walk.rows.count, walk.cols // size
    compiled = Constants(da=wants_da, unit=size, **tile(layout), **constants)
    launch(kernels.pointwise_bwd_columns, (tiles, programs), *args, constants=compiled, warps=layout.warps)
    sum_partials(partials, programs, [db])
    return da, db


class Chain(torch.autograd.Function):
    """Autograd of the operator."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Tensor:
        """y."""
        a, b, *rest, seed = args
        ctx.save_for_backward(a, b, seed)
        ctx.call = tuple(rest)
        return torch.ops.kernel_fusion.triton_pointwise_fwd(*args)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Gradients of a and b."""
        (dy,) = grads
        a, b, seed = ctx.saved_tensors
        wants = [*ctx.needs_input_grad[:2]]
        if torch.is_grad_enabled():
            y = torch.ops.kernel_fusion.pointwise_reference(a, b, *ctx.call, seed)
            found = autograd.differentiable([y], [dy], [a, b], wants)
        else:
            results = torch.ops.kernel_fusion.triton_pointwise_bwd(dy, a, b, *ctx.call, seed, wants)
            found = [
                t.sum_to_size(of.shape).to(of.dtype) if wanted else None
                for t, of, wanted in zip(results, (a, b), wants, strict=True)
            ]
        return found[0], found[1], *(None,) * 5


def pointwise(a: Tensor, b: Tensor | None, *rest: Any) -> Tensor:
    """`kernel_fusion::pointwise` on the Triton kernels."""
    args = (a, b, *rest)
    if autograd.needs_definition([a, b], [rest[-1]]) or not _broadcast(a, b):
        return torch.ops.kernel_fusion.pointwise_reference(*args)  # type: ignore[no-any-return]
    if autograd.requires_grad(a, b):
        return Chain.apply(*args)  # type: ignore[no-untyped-call,no-any-return]
    return torch.ops.kernel_fusion.triton_pointwise_fwd(*args)  # type: ignore[no-any-return]


def _broadcast(a: Tensor, b: Tensor | None) -> bool:
    """Whether the shapes broadcast; if not, the definition raises in PyTorch's words."""
    if b is None:
        return True
    pairs = zip(reversed(a.shape), reversed(b.shape), strict=False)
    return all(m == n or m == 1 or n == 1 for m, n in pairs)
