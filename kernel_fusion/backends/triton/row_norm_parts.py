"""LayerNorm and RMSNorm of rows whose other columns are on other ranks: operators that launch kernels, and autograd.

Either direction has two operators, and between them the caller adds up sums of rows over the ranks. LayerNorm of
float64 calls the first operator of forward twice. The means that the first call finds are the *shift*, which is
subtracted from each row from then on. So the sums are those of rows near zero, and no digit is lost that x has.
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
from kernel_fusion.backends.triton.row_norm_autograd import gradients, keep, sum_and_norm
from kernel_fusion.core import checks
from kernel_fusion.core.activations import IDENTITY
from kernel_fusion.core.arguments import require
from kernel_fusion.core.spec import compute_dtype
from kernel_fusion.core.stages import Given, NormCall, norm_call, other_row
from kernel_fusion.core.symbols import known, possible

# A function that adds up a tensor over all ranks, in place.
Join = Callable[[Tensor], None]


def _memory(like: Tensor, *shape: int, dtype: torch.dtype) -> Tensor:
    """Memory for a kernel to fill, or zeros if `like` has no elements, for which no kernel runs."""
    make = torch.empty if known(like.numel() > 0) else torch.zeros
    return make(shape, dtype=dtype, device=like.device)


def _sums(rows: Tensor, num_dims: int, rms: bool) -> Tensor:
    """Memory for the sums of rows of this tensor, and for the number of columns."""
    count = prod(rows.shape[: rows.dim() - num_dims])
    return _memory(rows, _num_sums(count, rms), dtype=torch.float64)


def _num_sums(count: int, rms: bool) -> int:
    """How many numbers the sums of `count` rows are, with the number of columns."""
    return (1 if rms else 2) * count + 1


def _is_shifted(rows: Tensor, rms: bool) -> bool:
    """Whether a shift is subtracted from the rows of this tensor."""
    return rows.dtype == torch.float64 and not rms


def _require_numbers(name: str, rows: Tensor, numbers: Tensor | None, expected: int | None) -> None:
    """Raise an error that names the operator `name` unless `numbers` fit.

    They must be `expected` contiguous numbers of float64 on the device of `rows`, or None if that is expected.
    """
    fits = numbers is None and expected is None
    if numbers is not None and expected is not None:
        fits = numbers.dtype == torch.float64 and checks.shaped((expected,), numbers) and numbers.is_contiguous()
    require(name, [rows, numbers], fits)


@operator("row_norm_moments")
def moments(
    shift: Tensor | None, input: Tensor, residual: Tensor | None, num_dims: int, rms: bool, stages: Given
) -> tuple[Tensor, Tensor]:
    """Return the sums of the rows' columns on this rank, and h, which is empty without a residual.

    The sums are those of squares, for LayerNorm then those of values, and last the number of columns. `stages` are
    those before the norm. The shift is subtracted from h. Only LayerNorm of float64 without a residual may have one.
    """
    call = NormCall(input, residual, num_dims, None, None, 0.0, 0.0, input.dtype, rms, stages)
    sums = _sums(input, num_dims, rms)
    h = input.new_empty(0) if residual is None else input.new_empty(input.shape, dtype=residual.dtype)
    if possible(input.numel() > 0):
        require_forward("triton_row_norm_moments", call)
        may_shift = shift is not None and residual is None and _is_shifted(input, rms)
        _require_numbers("triton_row_norm_moments", input, shift, sums.numel() // 2 if may_shift else None)
        launch_forward(call, [None, h, sums, shift], stats=True, part=True, shifted=shift is not None)
    return sums, h


@operator("row_norm_apply")
def apply(sums: Tensor, shift: Tensor | None, call: NormCall) -> tuple[Tensor, Tensor]:
    """Return y and the statistics, from sums over all ranks; LayerNorm of float64 has a shift, too.

    If there is a residual, the input is the h that `moments` wrote, and the stages are those after the norm.
    """
    h, num_dims, shifted = call.input, call.num_dims, _is_shifted(call.input, call.rms)
    count = prod(h.shape[: h.dim() - num_dims])
    y = torch.empty(h.shape, dtype=call.out_dtype, device=h.device)
    stats = _memory(h, (1 if call.rms else 2) + shifted, count, dtype=compute_dtype(h.dtype))
    if possible(h.numel() > 0):
        require_forward("triton_row_norm_apply", call)
        _require_numbers("triton_row_norm_apply", h, sums, _num_sums(count, call.rms))
        _require_numbers("triton_row_norm_apply", h, shift, count if shifted else None)
        layout = plan.norm_apply(prod(h.shape[h.dim() - num_dims :]), h.dtype.itemsize, warps=4)
        launch_forward(call, [y, sums, stats, shift], layout, stats=True, joined=True, shifted=shifted)
    return y, stats


@operator("row_norm_bwd_sums")
def backward_sums(
    bias_dtype: torch.dtype | None, wants: Sequence[bool], call: Backward
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the sums of the rows' columns on this rank, dweight and dbias.

    The sums are those of gwn, for LayerNorm then those of gw, and last the number of columns. `wants` says whether
    these, dweight and dbias are wanted.
    """
    h, weight = call.h, call.weight
    shape = checks.parameter_shape(h, call.num_dims, call.stages.grouped, weight, call.bias)
    sums = _sums(h, call.num_dims, call.rms)
    dtypes = h.dtype if weight is None else weight.dtype, bias_dtype or h.dtype
    dweight, dbias = (
        _memory(h, *(shape if wanted else [0]), dtype=dtype) for dtype, wanted in zip(dtypes, wants[1:], strict=True)
    )
    if possible(h.numel() > 0):
        asked, shifted = [wants[0], False, *wants[1:], False], _is_shifted(h, call.rms)
        call.require("triton_row_norm_bwd_sums", asked, *dtypes, shifted=shifted)
        call.launch((sums, h, dweight, dbias, h), asked, part=True, shifted=shifted)  # h is not written
    return sums, dweight, dbias


@operator("row_norm_bwd_apply")
def backward_apply(sums: Tensor, wants: Sequence[bool], call: Backward) -> tuple[Tensor, Tensor]:
    """Return dx and the other row's gradient, from sums over all ranks; `wants` says which of both are wanted."""
    h, other = call.h, other_row(call.stages, None)
    dtypes = h.dtype, (h if other is None else other).dtype
    dx, dother = (
        _memory(h, *(h.shape if wanted else [0]), dtype=dtype) for dtype, wanted in zip(dtypes, wants, strict=True)
    )
    if possible(h.numel() > 0):
        shifted = _is_shifted(h, call.rms)
        call.require("triton_row_norm_bwd_apply", [*wants, False, False, False], *dtypes, shifted=shifted)
        _require_numbers("triton_row_norm_bwd_apply", h, sums, _num_sums(call.stats.shape[1], call.rms))
        read = call.operands()
        layout = plan.norm_apply(read.cols, h.dtype.itemsize, warps=8)
        per_group = -(-read.numbers[0] // layout.rows) * -(-read.cols // layout.block)
        constants = {"joined": True, "dx": wants[0], "dother": wants[1], "dweight": False, "dbias": False}
        constants["shifted"] = shifted
        read.launch(row_norm_bwd, RowNormBackward, layout, [dx, dother, sums, None], per_group, **constants)
    return dx, dother


class NormOfParts(torch.autograd.Function):
    """Autograd of y as `RowNorm` has it; its last argument joins the ranks' sums."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, stats: Tensor, *args: Any) -> Tensor:
        """y."""
        *args_of_norm, join = args
        keep(ctx, norm_call(*args_of_norm), stats)
        ctx.join = join
        return y.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        """Gradients of input, the other row, weight and bias."""
        (dy,) = grads
        return gradients(ctx, dy, partial(_backward, ctx.join))


def _backward(
    join: Join, bias_dtype: torch.dtype | None, wants: list[bool], call: Backward
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of the input, the other row, weight and bias.

    `join` adds up the sums of rows over the ranks, if the gradient of a tensor of the input's shape is wanted.
    """
    ops, of_rows = torch.ops.kernel_fusion, any(wants[:2])
    sums, dweight, dbias = ops.triton_row_norm_bwd_sums(bias_dtype, [of_rows, *wants[2:]], *call.arguments)
    dx = dother = sums[:0]
    if of_rows:
        join(sums)
        dx, dother = ops.triton_row_norm_bwd_apply(sums, wants[:2], *call.arguments)
    return dx, dother, dweight, dbias


def _joined_moments(join: Join, shift: Tensor | None, c: NormCall) -> tuple[Tensor, Tensor]:
    """The sums of rows over all ranks, and h."""
    s = c.stages
    grouped = s.grouped and s.residual_gate is not None  # no other vector stands before the norm
    first = s.gate if s.gate_first else None
    before = s._replace(activation=IDENTITY, rounding="once", grouped=grouped, gate=first)
    moments = torch.ops.kernel_fusion.triton_row_norm_moments
    sums, h = moments(shift, c.input, c.residual, c.num_dims, c.rms, *before)
    join(sums)
    return sums, h


def staged_row_norm(join: Join, *args: Any) -> tuple[Tensor, Tensor]:
    """Return what `kernel_fusion::staged_row_norm` does, for rows of which this rank has some columns.

    `join` adds up the sums of rows over the ranks, and `args` are the operator's arguments on this rank.
    """
    c = norm_call(*args)
    checks.staged_row_norm(c)
    c = c._replace(out_dtype=c.out_dtype or c.input.dtype)
    with torch.no_grad():
        sums, h = _joined_moments(join, None, c)
    h, norm = sum_and_norm(c, h)
    with torch.no_grad():
        shift = None
        if _is_shifted(c.input, c.rms):
            count = sums.numel() // 2
            shift = sums[count:-1] / sums[-1]
            sums, _ = _joined_moments(join, shift, norm)
        y, stats = torch.ops.kernel_fusion.triton_row_norm_apply(sums, shift, *norm.arguments)
    apply_norm: Callable[..., Tensor] = NormOfParts.apply
    return apply_norm(y, stats, *norm.arguments, join), h
