"""Softmax over the last dimension: the operators that launch the kernels, and their autograd."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kernel_fusion.backends.triton import autograd, plan
from kernel_fusion.backends.triton.kernels import softmax as kernels
from kernel_fusion.backends.triton.kernels.constants import Softmax as Constants
from kernel_fusion.backends.triton.launch import launch, operator
from kernel_fusion.backends.triton.layout import RowLayout, merge, outer_rows, rows_of, unit
from kernel_fusion.core.arguments import floating, require
from kernel_fusion.core.checks import shaped
from kernel_fusion.core.spec import cast, compute_dtype
from kernel_fusion.core.symbols import known, possible


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
def forward(input: Tensor, mask: Tensor | None, scale: float, causal: bool) -> Tensor:
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
    lengths = rows.count, cols // size, input.shape[-2] if causal else 1, rows.middle, rows.inner
    strides = *(stride // size for stride in rows.strides[0]), *rows.strides[1], 0 if by is None else by.stride(-1)
    constants = Constants.of(layout, wide=wide, flat=rows.simple, unit=size, **asked)
    grid = (-(-rows.count // layout.rows),)
    launch(kernels.softmax_fwd, grid, x, by, y, *lengths, *strides, constants=constants, warps=layout.warps)
    return y


@operator("softmax_bwd")
def backward(dy: Tensor, y: Tensor, scale: float, leaves_out: bool) -> Tensor:
    """Return dx, which is contiguous.

    With `leaves_out`, the mask or the diagonal left out elements. dx is then 0 if y is, even in a row with NaN.
    """
    takes = y.dim() >= 1 and possible(y.numel() > 0) and floating(dy, y) and shaped(y.shape, dy)
    require("triton_softmax_bwd", [dy, y], takes)
    dy, y, cols = dy.contiguous(), y.contiguous(), y.shape[-1]
    dx = torch.empty(y.shape, dtype=y.dtype, device=y.device)
    wide = compute_dtype(y.dtype) == torch.float64
    layout = plan.softmax_backward(cols, wide)
    size, num_rows = unit(cols), y.numel() // cols
    constants = Constants.of(layout, scale=scale, leaves_out=leaves_out, wide=wide, unit=size)
    args, grid = (dy, y, dx, num_rows, cols // size), (-(-num_rows // layout.rows),)
    launch(kernels.softmax_bwd, grid, *args, constants=constants, warps=layout.warps)
    return dx


def _kept(args: Sequence[Any], y: Tensor, _: Sequence[bool]) -> Sequence[Any]:
    """Backward reads these: y, the scale, whether elements are left out, and the dtypes of input and mask."""
    input, mask, scale, causal = args
    leaves_out = causal or (mask is not None and mask.dtype == torch.bool)
    return y, scale, leaves_out, input.dtype, None if mask is None else mask.dtype


def _gradients(kept: Sequence[Any], grads: Sequence[Any], wants: Sequence[bool]) -> list[Tensor | None]:
    """Gradients of the input and of an additive mask."""
    y, scale, leaves_out, *dtypes = kept
    (dy,) = grads
    # y carries its history, so the formula, which is one of y, can be differentiated.
    gradient = _formula if torch.is_grad_enabled() else torch.ops.kernel_fusion.triton_softmax_bwd
    return [
        cast(gradient(dy, y, factor, leaves_out), dtype) if wanted else None
        for factor, dtype, wanted in zip((scale, 1.0), dtypes, wants, strict=False)
    ]


def _formula(dy: Tensor, y: Tensor, scale: float, leaves_out: bool) -> Tensor:
    """The result of `backward` by PyTorch's operations, through which gradients flow."""
    wide = compute_dtype(y.dtype)
    weights = cast(y, wide)
    product = cast(dy, wide) * weights
    dx = scale * (product - weights * product.sum(-1, keepdim=True))
    return dx.masked_fill(y == 0, 0.0) if leaves_out else dx


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
