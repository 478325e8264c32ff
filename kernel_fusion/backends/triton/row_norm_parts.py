"""LayerNorm and RMSNorm of rows whose other columns are on other ranks: the operators on the kernels, and autograd.

Either direction has two operators, between which the caller adds up sums of rows over the ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from kernel_fusion.backends.triton import plan
from kernel_fusion.backends.triton.kernels.constants import RowNormBackward
from kernel_fusion.backends.triton.kernels.row_norm_bwd import row_norm_bwd
from kernel_fusion.backends.triton.launch import operator
from kernel_fusion.backends.triton.row_norm import Backward, launch_forward, require_forward
from kernel_fusion.backends.triton.row_norm_autograd import gradients, keep, kernel_backward, of_h
from kernel_fusion.core import checks
from kernel_fusion.core.activations import IDENTITY
from kernel_fusion.core.moments import merged
from kernel_fusion.core.spec import compute_dtype
from kernel_fusion.core.stages import Given, NormCall, norm_call, other_row

# Adds up a tensor over all ranks, in place.
Join = Callable[[Tensor], None]


def _memory(like: Tensor, *shape: int, dtype: torch.dtype) -> Tensor:
    """Memory for a kernel to fill, or zeros where none runs."""
    make = torch.empty if like.numel() > 0 else torch.zeros
    return make(shape, dtype=dtype, device=like.device)


def _sums(rows: Tensor, num_dims: int, rms: bool) -> Tensor:
    count = prod(rows.shape[: rows.dim() - num_dims])
    return _memory(rows, (1 if rms else 2) * count + 1, dtype=torch.float64)


@operator("row_norm_moments")
def moments(input: Tensor, residual: Tensor | None, num_dims: int, rms: bool, stages: Given) -> tuple[Tensor, Tensor]:
    """The sums of rows' squares, for LayerNorm those of values, and the number of columns; and h, as in forward.

    LayerNorm of float64 has squared deviations from the part's mean, and this, as `core.moments.merged` takes them.

    The stages are those before the norm.
    """
    call = NormCall(input, residual, num_dims, None, None, 0.0, 0.0, input.dtype, rms, stages)
    sums = _sums(input, num_dims, rms)
    h = input.new_empty(0) if residual is None else input.new_empty(input.shape, dtype=residual.dtype)
    if input.numel() > 0:
        require_forward("triton_row_norm_moments", call)
        launch_forward(call, [None, h, sums, None], stats=True, part=True)
    return sums, h


@operator("row_norm_apply")
def apply(sums: Tensor, call: NormCall) -> tuple[Tensor, Tensor]:
    """y and the statistics, from sums over all ranks.

    The input is what `moments` wrote where there is a residual, and then the stages are those after the norm.
    """
    h, num_dims = call.input, call.num_dims
    count = prod(h.shape[: h.dim() - num_dims])
    y = torch.empty(h.shape, dtype=call.out_dtype, device=h.device)
    stats = _memory(h, 1 if call.rms else 2, count, dtype=compute_dtype(h.dtype))
    if h.numel() > 0:
        require_forward("triton_row_norm_apply", call)
        layout = plan.norm_apply(prod(h.shape[h.dim() - num_dims :]), h.dtype.itemsize, warps=4)
        launch_forward(call, [y, sums, stats, None], layout, stats=True, joined=True)
    return y, stats


@operator("row_norm_bwd_sums")
def backward_sums(
    bias_dtype: torch.dtype | None, wants: Sequence[bool], call: Backward
) -> tuple[Tensor, Tensor, Tensor]:
    """Rows' sums of gwn, for LayerNorm those of gw, and the number of columns; dweight and dbias."""
    h, weight = call.h, call.weight
    shape = checks.parameter_shape(h, call.num_dims, call.stages.grouped, weight, call.bias)
    sums = _sums(h, call.num_dims, call.rms)
    dtypes = h.dtype if weight is None else weight.dtype, bias_dtype or h.dtype
    dweight, dbias = (
        _memory(h, *(shape if wanted else [0]), dtype=dtype) for dtype, wanted in zip(dtypes, wants[1:], strict=True)
    )
    if h.numel() > 0:
        asked = [wants[0], False, *wants[1:], False]
        call.require("triton_row_norm_bwd_sums", asked, *dtypes)
        call.launch((sums, h, dweight, dbias, h), asked, part=True)  # h is not written
    return sums, dweight, dbias


@operator("row_norm_bwd_apply")
def backward_apply(
    sums: Tensor, input_dtype: torch.dtype, wants: Sequence[bool], call: Backward
) -> tuple[Tensor, Tensor, Tensor]:
    """dx, the other row's gradient and dgate, from sums over all ranks."""
    s, h = call.stages, call.h
    other, gate = other_row(s, None), s.residual_gate
    shape = checks.parameter_shape(h, call.num_dims, s.grouped, *call.vectors)
    dtypes = input_dtype, (h if other is None else other).dtype, input_dtype if gate is None else gate.dtype
    made = [wants[0], wants[1] or wants[2], wants[2]]
    dx, dother, dgate = (
        _memory(h, *(of if wanted else [0]), dtype=dtype)
        for of, dtype, wanted in zip((h.shape, h.shape, shape), dtypes, made, strict=True)
    )
    if h.numel() > 0:
        asked = [*made[:2], False, False, made[2]]
        call.require("triton_row_norm_bwd_apply", asked, *dtypes)
        read = call.operands()
        layout = plan.norm_apply(read.cols, h.dtype.itemsize, warps=8)
        per_group = -(-read.numbers[0] // layout.rows) * -(-read.cols // layout.block)
        constants = {"joined": True, "dx": made[0], "dother": made[1], "dweight": False, "dbias": False}
        read.launch(row_norm_bwd, RowNormBackward, layout, [dx, dother, sums, None], per_group, **constants)
        if wants[2]:
            call.sum_columns(read, (dx, dother, h, h, dgate), asked)  # h is not written
    return dx, dother, dgate


class NormOfParts(torch.autograd.Function):
    """Autograd of the norm; its last argument joins the ranks' sums."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[Tensor, Tensor]:
        """y, and h or nothing."""
        *args_of_norm, join = args
        c = norm_call(*args_of_norm)
        s = c.stages
        grouped = s.grouped and s.residual_gate is not None  # no other vector stands before the norm
        first = s.gate if s.gate_first else None
        before = s._replace(activation=IDENTITY, rounding="once", grouped=grouped, gate=first)
        sums, h = torch.ops.kernel_fusion.triton_row_norm_moments(c.input, c.residual, c.num_dims, c.rms, *before)
        if c.input.dtype == torch.float64 and not c.rms:
            sums, _ = merged(join, sums)
        else:
            join(sums)
        after = c if c.residual is None else of_h(c, h)
        y, stats = torch.ops.kernel_fusion.triton_row_norm_apply(sums, *after.arguments)
        keep(ctx, c, h, stats)
        ctx.join = join
        return y, h

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        """Gradients of input, the other row, weight, bias and the residual's gate."""
        dy, dh = grads
        of_results = dy, dh if ctx.stored else None  # Dynamo has a gradient for an h that is nothing
        return *gradients(ctx, of_results, partial(kernel_backward, partial(_backward, ctx.join))), None


def _backward(
    join: Join, input_dtype: torch.dtype, bias_dtype: torch.dtype | None, wants: list[bool], call: Backward
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """As `row_norm.backward`; sums are joined if the gradient of a row is wanted."""
    ops, of_rows = torch.ops.kernel_fusion, any([*wants[:2], wants[4]])
    after_h = call._replace(dh=None, x=None, stages=call.stages._replace(residual_gate=None))  # whose product is in h
    sums, dweight, dbias = ops.triton_row_norm_bwd_sums(bias_dtype, [of_rows, *wants[2:4]], *after_h.arguments)
    dx = dother = dgate = sums[:0]
    if of_rows:
        join(sums)
        asked = [*wants[:2], wants[4]]
        dx, dother, dgate = ops.triton_row_norm_bwd_apply(sums, input_dtype, asked, *call.arguments)
    return dx, dother, dweight, dbias, dgate


def staged_row_norm(join: Join, *args: Any) -> tuple[Tensor, Tensor]:
    """`kernel_fusion::staged_row_norm` of a rank's columns."""
    c = norm_call(*args)
    checks.staged_row_norm(c)
    apply_norm: Callable[..., tuple[Tensor, Tensor]] = NormOfParts.apply
    return apply_norm(*c._replace(out_dtype=c.out_dtype or c.input.dtype).arguments, join)
