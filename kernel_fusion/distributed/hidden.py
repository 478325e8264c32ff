"""Norms of rows that are spread over ranks: each has some of the columns.

Forward adds up the moments of the rows' parts, backward two sums of each row, with one small all-reduce each way; no
column leaves its rank, and the gradients of weight and bias are those of the rank's columns. Sums travel as float64:
then S = sum of n mean and Q = sum of (M2 + n mean^2) over the ranks give M2 = Q - S^2 / n, which is Chan's formula for
merging (count, mean, M2), without the loss of digits that it would have in float32; and sums of a few float32 numbers
are as a rule exact, in whatever order a collective adds them. LayerNorm of float64 would lose them, too. So there a
first all-reduce finds a number near the mean of each row, and everything else is done with what is left when that is
subtracted; a second one adds up the moments of that.

On an NVIDIA GPU the operator `spread_row_norm` serves the call: one kernel before and one after the all-reduce, in each
direction, with all stages in them. Elsewhere the local arithmetic is PyTorch operations in the compute type, except the
sum of squares.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.distributed_c10d import _resolve_process_group  # type: ignore[attr-defined]

from kernel_fusion.backends import eager
from kernel_fusion.backends.availability import constant, is_dtensor, why_not_cuda
from kernel_fusion.core import checks
from kernel_fusion.core.autocast import norm_dtype
from kernel_fusion.core.spec import Stages, cast, compute_dtype, summed
from kernel_fusion.core.stages import FIRST, Given, NormCall, compiled_in, norm_call, rows_in
from kernel_fusion.errors import BackendUnavailableError

Groups = tuple[dist.ProcessGroup, ...]


class _Norm(NamedTuple):
    """The arguments of a norm that are no tensors.

    Attributes:
        num_dims: How many of the last dimensions are normalised.
        eps: The number that is added to the variance.
        weight_offset: The number that is added to the weight.
        rms: Whether the norm is RMSNorm, and not LayerNorm.
        out_dtype: The type of the result.
        rounds_to: The type to which the rounding "hf" rounds the normalised value, or None for the rounding "once".
    """

    num_dims: int
    eps: float
    weight_offset: float
    rms: bool
    out_dtype: torch.dtype
    rounds_to: torch.dtype | None

    @property
    def dims(self) -> tuple[int, ...]:
        """The dimensions of a row, counted from the last one."""
        return tuple(range(-self.num_dims, 0))


def operator(name: str, backend: str | None, groups: Groups) -> Callable[..., Any]:
    """Return the operator `name` of a norm, for tensors whose normalised dimensions these groups share.

    Raises:
        BackendUnavailableError: A backend was asked for that has no kernels for this.
    """
    if backend is not None and (reason := checks.without_kernels("group", backend)):
        raise BackendUnavailableError(f"`{name}`: backend {backend!r} was requested, but {reason}")
    staged = partial(_staged_row_norm, backend, groups)
    return staged if name == "staged_row_norm" else partial(_row_norm, name == "rms_norm", staged)


def operator_of_columns(verb: str, backend: str | None, group: dist.ProcessGroup, input: Tensor) -> Callable[..., Any]:
    """Return the operator of a norm whose plain tensors are this rank's columns of a group's rows."""
    if is_dtensor(input):
        raise TypeError(f"`{verb}`: `group` goes with tensors that are a rank's columns; a DTensor knows its own mesh")
    return operator("staged_row_norm", backend, (group,))


def _row_norm(rms: bool, staged: Callable[..., tuple[Tensor, Tensor]], input: Tensor, *norm: Any) -> Tensor:
    num_dims, weight, bias, eps, *others = norm
    if eps is None:
        eps = torch.finfo(compute_dtype(input.dtype)).eps
    return staged(input, None, num_dims, weight, bias, eps, *others, rms)[0]


def _staged_row_norm(backend: str | None, groups: Groups, *args: Any) -> tuple[Tensor, Tensor]:
    """The results of the operator `staged_row_norm`, by the CUDA kernels or by the definition."""
    input, rms = args[0], args[FIRST - 1]
    if backend == "eager" or not input.is_cuda or not _has_kernels(input.device):
        return _definition(groups, norm_call(*args))
    names = " ".join(group.group_name for group in groups)
    if input.dtype == torch.float64 and not rms:
        return _less_a_shift(groups, names, _checked(norm_call(*args)))
    spread: Callable[..., tuple[Tensor, Tensor]] = torch.ops.kernel_fusion.spread_row_norm
    return spread(*args[:FIRST], names, *args[FIRST:])


@constant
def _has_kernels(device: torch.device) -> bool:
    return why_not_cuda(device) is None


def by_definition(*args: Any) -> tuple[Tensor, Tensor]:
    """Return what the operator `spread_row_norm` does, by PyTorch's operations; it has the same arguments."""
    groups = tuple(map(_resolve_process_group, args[FIRST].split()))
    return _definition(groups, norm_call(*args[:FIRST], *args[FIRST + 1 :]))


def _checked(c: NormCall) -> NormCall:
    """The call with the dtype of its result, after checks that raise before other ranks wait for this one."""
    input, affine = c.input, (c.weight, c.bias)
    shape = checks.parameter_shape(input, c.num_dims, c.stages.grouped, *c.vectors)
    if not checks.shaped(shape, *affine):
        eager.pytorch_row_norm(input, shape, *affine, c.eps, c.weight_offset, None, c.rms)
    if not checks.shaped(shape, c.stages.residual_gate):
        raise RuntimeError(f"kernel_fusion: the gate of a residual must have the shape {shape} of weight and bias")
    checks.staged_row_norm(c)
    return c._replace(out_dtype=c.out_dtype or norm_dtype(input, c.rms))


def _before_norm(c: NormCall) -> tuple[Tensor, Tensor, Stages]:
    """Return the rows that are normalised and the second result, as eager defines them, and the stages around."""
    input, residual = c.input, c.residual
    wide, around = compute_dtype(input.dtype), Stages(**compiled_in(c.stages._asdict()))
    s = rows_in(wide, c.stages)
    h, summed = input, input.new_empty(0)
    if around.changes_x or residual is not None:
        h = eager.before_norm(input.to(wide), s, lambda u: eager.dropout(u.contiguous(), s.dropout_p, s.seed))
    if residual is not None:
        h = summed = (h + residual.to(wide)).to(residual.dtype)
    return h, summed, around


def _less_a_shift(groups: Groups, names: str, c: NormCall) -> tuple[Tensor, Tensor]:
    """LayerNorm of float64 by the CUDA kernels, which get each row less a number near its mean."""
    h, summed, _ = _before_norm(c)
    sums, *_ = torch.ops.kernel_fusion.row_norm_fwd(
        h.detach(), c.num_dims, None, None, 0.0, 0.0, None, False, passes="first"
    )
    _all_reduce(groups, sums)
    rows = h.shape[: h.dim() - c.num_dims]
    shift = (sums[2::2] / sums[0]).view(*rows, *(1,) * c.num_dims)
    s = c.stages
    gate = {} if s.gate_first else {"gate": s.gate, "gate_activation": s.gate_activation}
    after = Given(activation=s.activation, rounding=s.rounding, grouped=s.grouped, **gate)
    c = c._replace(input=h - shift, residual=None, stages=after)
    return torch.ops.kernel_fusion.spread_row_norm(*c[:FIRST], names, *after)[0], summed


def _definition(groups: Groups, c: NormCall) -> tuple[Tensor, Tensor]:
    """The definition in backends/eager/row_norm.py, in which the norm is one over all ranks."""
    c = _checked(c)
    h, summed, around = _before_norm(c)
    input, residual, wide = c.input, c.residual, compute_dtype(c.input.dtype)
    s = rows_in(wide, c.stages)
    result = c.out_dtype or input.dtype
    rounds_to = (input if residual is None else residual).dtype if s.rounding == "hf" else None
    norm = _Norm(c.num_dims, c.eps, c.weight_offset, c.rms, wide if around.follows else result, rounds_to)
    apply: Callable[..., Tensor] = _JoinedNorm.apply
    y = apply(h, c.weight, c.bias, norm, groups)
    return eager.after_norm(y, s).to(result), summed


class _JoinedNorm(torch.autograd.Function):
    """The norm of h over all ranks of the groups, times weight plus bias."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, weight: Tensor | None, bias: Tensor | None, norm: _Norm, groups: Groups) -> Tensor:
        """One all-reduce, two for LayerNorm of float64: of the count and each row's one number (RMSNorm) or two."""
        if h.dtype == torch.float64 and not norm.rms:
            h = h - _near_the_mean(h, norm, groups)
        mean, rstd, count = _statistics(h, norm, groups)
        ctx.norm, ctx.groups = norm, groups
        ctx.save_for_backward(h, weight, bias, mean, rstd, count)
        return cast(_affine(_normalized(h, mean, rstd), weight, bias, norm), norm.out_dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        """One all-reduce, where dh is wanted: for each row of one number or two."""
        h, weight, bias, mean, rstd, count = ctx.saved_tensors
        norm: _Norm = ctx.norm
        dy, n = cast(dy, rstd.dtype), _normalized(h, mean, rstd)
        wants_dh, wants_dweight, wants_dbias, *_ = ctx.needs_input_grad
        dh = dweight = dbias = None
        if wants_dh:
            g = dy if weight is None else dy * (cast(weight, dy.dtype) + norm.weight_offset)
            sums = [(g * n).sum(norm.dims, keepdim=True)]
            if not norm.rms:
                sums.append(g.sum(norm.dims, keepdim=True))
            along_n, *level = (s / count for s in _all_reduced(sums, ctx.groups))
            g = g - n * cast(along_n, dy.dtype)
            dh = cast(rstd * (g if norm.rms else g - cast(level[0], dy.dtype)), h.dtype)
        if wants_dweight:
            dweight = summed(dy * _rounded(n, norm.rounds_to), weight)
        if wants_dbias:
            dbias = summed(dy, bias)
        return dh, dweight, dbias, None, None


def _statistics(h: Tensor, norm: _Norm, groups: Groups) -> tuple[Tensor | None, Tensor, Tensor]:
    """The mean and rstd of the rows in the compute type, and how many columns all ranks have; RMSNorm has no mean."""
    count, columns = _columns(h, norm)
    dtype = compute_dtype(h.dtype)
    if norm.rms:
        squares = torch.ops.kernel_fusion.reduce(h, norm.dims, True, "sum_squared", dtype)
        squares, total = _all_reduced([squares], groups, count)
        return None, cast(torch.rsqrt(squares / total + norm.eps), dtype), total
    wide = cast(h, dtype)
    center = wide.sum(norm.dims, keepdim=True) / max(columns, 1)
    m2 = cast((wide - center).square().sum(norm.dims, keepdim=True), torch.float64)
    center = cast(center, torch.float64)
    sums, squares, total = _all_reduced([center * count, m2 + count * center.square()], groups, count)
    mean = sums / total
    variance = (squares / total - mean.square()).clamp_min(0.0)
    return cast(mean, dtype), cast(torch.rsqrt(variance + norm.eps), dtype), total


def _near_the_mean(h: Tensor, norm: _Norm, groups: Groups) -> Tensor:
    """A number for each row that differs from its mean by rounding errors alone, and is the same on all ranks."""
    sums, total = _all_reduced([h.sum(norm.dims, keepdim=True)], groups, _columns(h, norm)[0])
    return sums / total


def _columns(h: Tensor, norm: _Norm) -> tuple[Tensor, int]:
    """How many columns of a row this rank has, as a number and as a tensor."""
    columns = math.prod(h.shape[h.dim() - norm.num_dims :])
    return torch.full((), columns, dtype=torch.float64, device=h.device), columns


def _all_reduced(sums: Sequence[Tensor], groups: Groups, *others: Tensor) -> list[Tensor]:
    """The sums over all ranks of tensors of one shape, and of single numbers, in float64, by one collective.

    Args:
        sums: The tensors.
        groups: The process groups, over each of which is summed.
        others: The tensors of one number.
    """
    parts = [cast(t, torch.float64).flatten() for t in (*sums, *others)]
    packed = torch.cat(parts)
    _all_reduce(groups, packed)
    unpacked = packed.split([part.numel() for part in parts])
    return [part.view(t.shape) for part, t in zip(unpacked, (*sums, *others), strict=True)]


def _all_reduce(groups: Groups, packed: Tensor) -> None:
    """Add up a tensor over the ranks of each group, in place."""
    for group in groups:
        dist.all_reduce(packed, group=group)


def _normalized(h: Tensor, mean: Tensor | None, rstd: Tensor) -> Tensor:
    wide = cast(h, rstd.dtype)
    return (wide if mean is None else wide - mean) * rstd


def _affine(n: Tensor, weight: Tensor | None, bias: Tensor | None, norm: _Norm) -> Tensor:
    """n times weight plus bias, in the compute type.

    With the rounding "hf" it is rounded as Hugging Face's norms round. Gradients pass straight through roundings.
    """
    y = _rounded(n, norm.rounds_to)
    if weight is not None:
        y = y * (cast(weight, n.dtype) + norm.weight_offset)
    if bias is not None:
        y = y + cast(bias, n.dtype)
    if norm.rounds_to is not None and weight is not None:
        y = _rounded(y, torch.promote_types(norm.rounds_to, weight.dtype))
    return y


def _rounded(t: Tensor, dtype: torch.dtype | None) -> Tensor:
    """t rounded to `dtype` and back in its own dtype, or t itself if there is no `dtype`."""
    return t if dtype is None else cast(cast(t, dtype), t.dtype)
