"""LayerNorm and RMSNorm with their stages: autograd of the operators, and the verb."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kernel_fusion.backends.triton import autograd
from kernel_fusion.backends.triton.row_norm import Backward
from kernel_fusion.core import checks
from kernel_fusion.core.activations import IDENTITY
from kernel_fusion.core.groups import groups_of
from kernel_fusion.core.stages import ARGUMENTS, FIRST, PLACES, TENSORS, Given, NormCall, norm_call, other_row, row_at


class StagedRowNorm(torch.autograd.Function):
    """Autograd of the operator."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[Tensor, Tensor]:
        """y, and h or nothing."""
        c = norm_call(*args)
        y, h, stats = torch.ops.kernel_fusion.triton_row_norm_fwd(True, *args)
        keep(ctx, c, h, stats)
        return y, h

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Gradients of input, the other row, weight and bias."""
        kernels = partial(kernel_backward, _backward)
        return gradients(ctx, grads, _differentiable_backward if torch.is_grad_enabled() else kernels)


def keep(ctx: Any, c: NormCall, h: Tensor, stats: Tensor) -> None:
    """The arguments and results of forward that backward needs."""
    s, input = c.stages, c.input
    stored = c.residual is not None
    if not stored:
        ctx.mark_non_differentiable(h)
    ctx.set_materialize_grads(False)
    # With h, backward needs the input only for the pre-activation's slope and for a gate.
    kept = input if not stored or s.pre_activation != IDENTITY or s.residual_gate is not None else None
    rows = kept, h if stored else None
    ctx.save_for_backward(*rows, c.weight, c.bias, stats, *(getattr(s, name) for name in TENSORS))
    nothing: Any = dict.fromkeys(("input", "residual", "weight", "bias"))
    ctx.call = c._replace(**nothing, stages=s._replace(**dict.fromkeys(TENSORS)))
    at = row_at(s)
    ctx.other = 1 if at is None else FIRST + at  # where the other row stands among the arguments
    ctx.stored, ctx.input_dtype = stored, input.dtype


def gradients(ctx: Any, grads: tuple[Any, ...], through: Callable[..., list[Tensor | None]]) -> tuple[Any, ...]:
    """Those of the operator's arguments; `through` computes those of input, the other row, weight, bias and gate."""
    dy, dh = grads
    places = 0, ctx.other, 3, 4, PLACES["residual_gate"]
    found: list[Tensor | None] = [None] * (FIRST + len(ARGUMENTS))
    if dy is not None or dh is not None:
        wants = [ctx.needs_input_grad[i] and (dy is not None or i not in (3, 4)) for i in places]
        for place, gradient in zip(places, through(ctx, dy, dh, wants), strict=True):
            found[place] = gradient
    return tuple(found)


def _saved(ctx: Any) -> tuple[NormCall, Any, Any]:
    """The call, without an input that was not kept; h, if stored; and the statistics."""
    x, h, weight, bias, stats, *others = ctx.saved_tensors
    stages = ctx.call.stages._replace(**dict(zip(TENSORS, others, strict=True)))
    return ctx.call._replace(input=x, weight=weight, bias=bias, stages=stages), h, stats


def of_h(c: NormCall, h: Tensor) -> NormCall:
    """The norm of h, and what follows."""
    bare = c.stages._replace(pre_activation=IDENTITY, dropout_p=0.0, seed=None, residual_gate=None)
    return c._replace(input=h, residual=None, stages=bare)


def _backward(
    input_dtype: torch.dtype, bias_dtype: torch.dtype | None, wants: list[bool], call: Backward
) -> tuple[Tensor, ...]:
    backward = torch.ops.kernel_fusion.triton_row_norm_bwd
    return backward(input_dtype, bias_dtype, wants, *call.arguments)  # type: ignore[no-any-return]


def kernel_backward(
    backward: Callable[..., tuple[Tensor, ...]], ctx: Any, dy: Tensor | None, dh: Tensor | None, wants: list[bool]
) -> list[Tensor | None]:
    """The kernels' gradients; `backward` is as `row_norm.backward`."""
    c, h, stats = _saved(ctx)
    s, normalised = c.stages, h if ctx.stored else c.input
    if dy is None:
        dy = torch.zeros_like(normalised, dtype=c.out_dtype)
    # Without a stage between them, dx is dresidual.
    plain = s.pre_activation == IDENTITY and s.seed is None and s.residual_gate is None
    same = ctx.stored and plain and h.dtype == ctx.input_dtype and wants[0]
    asked = [False, True, *wants[2:]] if same else wants
    # The kernels take groups from the shape of a parameter.
    reads_bias = s.grouped or s.activation != IDENTITY or other_row(s, None) is not None
    rows = dy, dh, normalised, c.input if ctx.stored else None, stats
    affine = c.weight, c.bias if reads_bias else None, c.weight_offset
    call = Backward(*rows, c.num_dims, *affine, c.rms, ctx.stored, s)
    results = backward(ctx.input_dtype, None if c.bias is None else c.bias.dtype, asked, call)
    dx, dother, *sums = (t if wanted else None for t, wanted in zip(results, asked, strict=True))
    return [dother if same else dx, dother if wants[1] else None, *sums]


def _differentiable_backward(ctx: Any, dy: Tensor | None, dh: Tensor | None, wants: list[bool]) -> list[Tensor | None]:
    """The definition's gradients: through h, where it was stored, and from there to the input."""
    c, h, _ = _saved(ctx)
    reference, vectors = torch.ops.kernel_fusion.staged_row_norm_reference, [c.weight, c.bias]
    if not ctx.stored:
        y, _ = reference(*c.arguments)
        rows = [c.input, other_row(c.stages, None)]
        return [*autograd.differentiable([y], [dy], [*rows, *vectors], wants[:4]), None]
    total, dweight, dbias = None, None, None
    if dy is not None:
        # In the compute type, so that y of a narrow h is not rounded on the way.
        y, _ = reference(*of_h(c, h).arguments)
        total, dweight, dbias = autograd.differentiable([y], [dy], [h, *vectors], [True, *wants[2:4]])
    if dh is not None:
        total = dh if total is None else total + dh
    assert total is not None
    dx, dgate = _through_stages(total, c.input, c.stages, ctx.input_dtype, [wants[0], wants[4]])
    return [dx, total if wants[1] else None, dweight, dbias, dgate]


def _through_stages(
    dh: Tensor, x: Tensor | None, s: Given, dtype: torch.dtype, wants: list[bool]
) -> list[Tensor | None]:
    """The gradients of x and the residual's gate, where h = residual + gate * dropout(pre_activation(x))."""
    chain, dropout = torch.ops.kernel_fusion.pointwise_reference, (1.0, s.dropout_p, s.seed)
    if not any(wants):
        return [None, None]
    if x is None:  # not kept, because dropout alone needs no input
        return [(dh if s.seed is None else chain(dh.contiguous(), None, "first", IDENTITY, *dropout)).to(dtype), None]
    # Neither is looked for behind the other, which may depend on it.
    inputs = [None if t is None else t.view_as(t) for t in (x, s.residual_gate)]
    wide = [None if t is None else t.to(dh.dtype).contiguous() for t in inputs]
    added = chain(*wide, "first" if inputs[1] is None else "gate", s.pre_activation, *dropout)
    return autograd.differentiable([added], [dh], inputs, wants)


def staged_row_norm(*args: Any) -> tuple[Tensor, Tensor]:
    """`kernel_fusion::staged_row_norm` on the Triton kernels."""
    c = norm_call(*args)
    s, other = c.stages, other_row(c.stages, c.residual)
    shape = checks.parameter_shape(c.input, c.num_dims, s.grouped, *c.vectors)
    foreign = autograd.needs_definition([c.input, other, *c.vectors], [s.seed])
    apart = s.grouped and groups_of(c.input.shape, shape, c.num_dims) is None
    if foreign or apart or not checks.shaped(shape, *c.vectors):
        return torch.ops.kernel_fusion.staged_row_norm_reference(*args)  # type: ignore[no-any-return]
    checks.staged_row_norm(c)
    arguments = c._replace(out_dtype=c.out_dtype or c.input.dtype).arguments
    if autograd.requires_grad(c.input, other, *c.vectors):
        return StagedRowNorm.apply(*arguments)  # type: ignore[no-untyped-call,no-any-return]
    y, h, _ = torch.ops.kernel_fusion.triton_row_norm_fwd(False, *arguments)
    return y, h
