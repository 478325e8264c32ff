"""Reductions: the operator that launches the kernels, and its autograd.

Reduced dimensions that are neighbours form a *run*. Each run is one reduction: the first one applies the function to
the elements, and later ones add up sums. Long runs are cut into sections, whose sums are reduced in turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from kernel_fusion.backends.triton import autograd, plan
from kernel_fusion.backends.triton.kernels import reduce as kernels
from kernel_fusion.backends.triton.kernels.constants import Reduction, SumPartials
from kernel_fusion.backends.triton.launch import launch, operator
from kernel_fusion.core import checks
from kernel_fusion.core.activations import IDENTITY
from kernel_fusion.core.arguments import floating, require
from kernel_fusion.core.spec import cast, compute_dtype
from kernel_fusion.core.symbols import follows_from_data, possible

# The function of the elements, for each kind of reduction.
_MAPS = {"sum_squared": "square", "mean_abs": "abs"}


def _canonical(dim: Sequence[int], ndim: int) -> list[int]:
    """The reduced dimensions in order and not negative; none given means all of the `ndim` dimensions."""
    return sorted(d % ndim for d in dim) if len(dim) else list(range(ndim))


def _runs(dims: Sequence[int]) -> list[tuple[int, int]]:
    """The runs of these dimensions, each as (first, one past the last), the innermost one first."""
    runs: list[tuple[int, int]] = []
    for dim in dims:
        if runs and runs[-1][1] == dim:
            runs[-1] = (runs[-1][0], dim + 1)
        else:
            runs.append((dim, dim + 1))
    return runs[::-1]


def _takes(input: Tensor, dim: Sequence[int], kind: str, dtype: torch.dtype) -> bool:
    """Whether the kernels take this call."""
    ndim = input.dim()
    valid = ndim > 0 and all(-ndim <= d < ndim for d in dim) and len({d % ndim for d in dim}) == len(dim)
    return valid and possible(input.numel() > 0) and kind in _MAPS and floating(input) and dtype in checks.FLOATING


@operator("reduce_fwd")
def forward(input: Tensor, dim: Sequence[int], keepdim: bool, kind: str, dtype: torch.dtype) -> Tensor:
    """Return the reduction `kind`, "sum_squared" or "mean_abs", of the input over the dimensions `dim`, in `dtype`."""
    require("triton_reduce_fwd", [input], _takes(input, dim, kind, dtype))
    dims = _canonical(dim, input.dim())
    wide = compute_dtype(input.dtype if input.dtype == torch.float64 else dtype)
    count = prod([input.shape[d] for d in dims])
    runs = _runs(dims)
    values, map = input, _MAPS[kind]
    for i, (first, end) in enumerate(runs):
        last = i == len(runs) - 1
        shape = [*values.shape[:first], *(1,) * (end - first), *values.shape[end:]]
        finished = (dtype, count if kind == "mean_abs" else None) if last else (wide, None)
        sizes = [prod(values.shape[:first]), prod(values.shape[first:end]), prod(values.shape[end:])]
        matrix = values.reshape(sizes[:2] if sizes[2] == 1 else sizes)
        values = _reduce(matrix, map, wide, *finished).view(shape)
        map = "none"
    kept = [n for d, n in enumerate(values.shape) if keepdim or d not in dims]
    return values.view(kept)


def _reduce(x: Tensor, map: str, wide: torch.dtype, dtype: torch.dtype, count: int | None) -> Tensor:
    """The reduction of a matrix along its rows, or of a tensor of three dimensions along the middle one.

    Args:
        x: The tensor.
        map: The function of its elements.
        wide: The type that the kernel computes in.
        dtype: The type of the result.
        count: The number that divides the sum, or None for a sum.
    """
    x = x if x.stride(-1) == 1 else x.contiguous()
    outer, length, *inner = x.shape
    section = plan.COLUMN_SECTION if inner else plan.ROW_SECTION
    sections = -(-length // section)
    final = sections == 1
    out = torch.empty((outer, sections, *inner), dtype=dtype if final else wide, device=x.device)
    is_wide, divisor = wide == torch.float64, 1 if count is None else count
    constants = {"map": map, "mean": final and count is not None, "wide": is_wide}
    args: tuple[Any, ...]
    if inner:
        layout = plan.columns(*inner)
        blocks, kernel = -(-inner[0] // layout.block) * outer, kernels.reduce_columns
        args = x, out, length, section, *inner, *x.stride()[:2], divisor
    else:
        # Rows are added up block by block, so only the shortest ones have plans of their own.
        layout = plan.row_plan(min(length, plan.CHUNK), is_wide)
        blocks, kernel = -(-outer // layout.rows), kernels.reduce_rows
        args = x, out, outer, length, section, x.stride(0), divisor
    launch(kernel, (blocks, sections), *args, constants=Reduction.of(layout, **constants), warps=layout.warps)
    return out if final else _reduce(out, "none", wide, dtype, count)


def sum_partials(partials: Tensor, programs: int, outputs: Sequence[Tensor], many: bool = False) -> None:
    """Add up partial rows into one or two outputs.

    Args:
        partials: The partial rows in a flat tensor, those of the first output before those of the second. It has no
            dimension of programs, because Inductor would copy a tensor with a size that it cannot know.
        programs: How many partial rows there are for each output.
        outputs: The results, which have the size of a partial row each.
        many: Whether there may be more columns than 32 bits count.
    """
    cols, pair = outputs[0].numel(), len(outputs) == 2
    layout = plan.partial_sums()
    constants = SumPartials.of(layout, pair=pair, many=many, wide=partials.dtype == torch.float64)
    grid = -(-cols // layout.block), len(outputs)
    args = partials, outputs[0], outputs[1] if pair else None, programs, cols
    launch(kernels.sum_partials, grid, *args, constants=constants, warps=layout.warps)


def _gradients(kept: Sequence[Any], grads: Sequence[Any], wants: Sequence[bool]) -> autograd.Gradients:
    """The gradient of the input, a pointwise chain: 2 x dy, or sign(x) dy / count."""
    if torch.is_grad_enabled():
        return autograd.by_definition("reduce", kept, grads, wants)
    x, dim, keepdim, kind, _ = kept
    (dy,) = grads
    dims = _canonical(dim, x.dim())
    if not keepdim:
        for d in dims:
            dy = dy.unsqueeze(d)
    # dy is divided, which is small, because a chain's scale is compiled in and the count may be that of rows.
    if kind == "sum_squared":
        chain = "mul", IDENTITY, 2.0
    else:
        chain = "gate", "sign", 1.0
        dy = cast(dy, compute_dtype(torch.promote_types(dy.dtype, x.dtype))) / prod([x.shape[d] for d in dims])
    return [torch.ops.kernel_fusion.triton_pointwise_fwd(x, dy, *chain, 0.0, None, x.dtype)]


def _serves(input: Tensor, dim: Sequence[int], _: bool, kind: str, dtype: torch.dtype | None) -> bool:
    """Whether the kernels take the call, and somebody knows how many launches add up the sums."""
    if not _takes(input, dim, kind, dtype or input.dtype):
        return False
    return not any(follows_from_data(input.shape[d]) for d in _canonical(dim, input.dim()))


autograd.define(
    "reduce",
    takes=_serves,
    forward=lambda input, *rest: torch.ops.kernel_fusion.triton_reduce_fwd(input, *rest[:-1], rest[-1] or input.dtype),
    backward=_gradients,
)
