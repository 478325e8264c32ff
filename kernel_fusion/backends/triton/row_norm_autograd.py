"""LayerNorm and RMSNorm with their stages: autograd of the operators, and the operator that users reach.

One launch computes y and the sum before the norm, h. Each of the two has an autograd function of its own here, so that
PyTorch itself adds up the gradients that arrive at h, and hooks, `retain_grad` and `autograd.grad` see all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kernel_fusion.backends.triton import autograd, pointwise
from kernel_fusion.backends.triton.row_norm import Backward
from kernel_fusion.core import checks
from kernel_fusion.core.activations import IDENTITY
from kernel_fusion.core.groups import groups_of
from kernel_fusion.core.spec import compute_dtype
from kernel_fusion.core.stages import FIRST, TENSORS, NormCall, norm_call, other_row, row_at


class Sum(torch.autograd.Function):
    """Autograd of h = residual + gate * dropout(pre_activation(x)), which is given."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, x: Tensor, residual: Tensor, gate: Tensor | None, *others: Any) -> Tensor:
        """h."""
        activation, dropout_p, seed = others
        needs_x = activation != IDENTITY or gate is not None
        wants_x, wants_gate = ctx.needs_input_grad[1], ctx.needs_input_grad[3]
        kept = x if activation != IDENTITY or wants_gate else autograd.unread(x)
        ctx.save_for_backward(kept if needs_x else None, gate if wants_x else autograd.unread(gate), seed)
        ctx.activation, ctx.dropout_p, ctx.dtype = activation, dropout_p, x.dtype
        return h.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Gradients of x, the residual and its gate."""
        (dh,) = grads
        x, gate, seed = ctx.saved_tensors
        _, wants_x, wants_residual, wants_gate, *_ = ctx.needs_input_grad
        dx = dgate = None
        if x is not None:
            dx, dgate = _of_chain(ctx, dh, x, gate, seed, [wants_x, wants_gate])
        elif wants_x:  # dropout is its own gradient
            dropout = "first", IDENTITY, 1.0, ctx.dropout_p, seed
            dx = dh if seed is None else autograd.VERBS["pointwise"](dh.contiguous(), None, *dropout)
            dx = dx.to(ctx.dtype)
        return None, dx, dh if wants_residual else None, dgate, None, None, None


def _of_chain(
    ctx: Any, dh: Tensor, x: Tensor, gate: Tensor | None, seed: Tensor | None, wants: list[bool]
) -> list[Tensor | None]:
    """The gradients of x and the gate of the residual, from `dh`; `wants` says which are wanted."""
    chain = "first" if gate is None else "gate", ctx.activation, 1.0, ctx.dropout_p, seed
    if not any(wants):
        return [None, None]
    # The terms of a gate's gradient are not rounded before they are summed.
    wide = dh.dtype if gate is None else compute_dtype(dh.dtype)
    if torch.is_grad_enabled():
        reference = torch.ops.kernel_fusion.pointwise_reference

        def added(*tensors: Tensor | None) -> list[Tensor]:
            """The term that is added to the residual."""
            return [reference(*(None if t is None else t.to(wide).contiguous() for t in tensors), *chain)]

        return autograd.differentiable(added, [dh.to(wide)], [x, gate], wants)
    a = x.contiguous() if gate is None else x.to(wide).contiguous()
    b = None if gate is None else gate.contiguous()  # an expanded row would be summed to the row
    found = pointwise.backward(dh, a, b, *chain, wants)
    return [
        t.sum_to_size(of.shape).to(of.dtype) if wanted and of is not None else None
        for t, of, wanted in zip(found, (x, gate), wants, strict=True)
    ]


def sum_and_norm(c: NormCall, h: Tensor) -> tuple[Tensor, NormCall]:
    """Return h with its history, and the call that is left to do: the norm of h, if there is a residual."""
    if c.residual is None:
        return h, c
    s = c.stages
    apply: Callable[..., Tensor] = Sum.apply
    h = apply(h, c.input, c.residual, s.residual_gate, s.pre_activation, s.dropout_p, s.seed)
    bare = s._replace(pre_activation=IDENTITY, dropout_p=0.0, seed=None, residual_gate=None)
    return h, c._replace(input=h, residual=None, stages=bare)


class RowNorm(torch.autograd.Function):
    """Autograd of y, which is given, as are the statistics; nothing is added before this norm."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, stats: Tensor, *args: Any) -> Tensor:
        """y."""
        keep(ctx, norm_call(*args), stats)
        return y.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Gradients of input, the other row, weight and bias."""
        (dy,) = grads
        return gradients(ctx, dy)


def keep(ctx: Any, c: NormCall, stats: Tensor) -> None:
    """Keep in `ctx` the arguments and the statistics of forward that `gradients` needs."""
    reads_bias = c.stages.activation != IDENTITY or row_at(c.stages) is not None
    bias = c.bias if reads_bias else autograd.unread(c.bias)
    ctx.save_for_backward(stats, c.input, c.weight, bias, *(getattr(c.stages, name) for name in TENSORS))
    nothing: Any = dict.fromkeys(("input", "weight", "bias"))
    ctx.call = c._replace(**nothing, stages=c.stages._replace(**dict.fromkeys(TENSORS)))
    at = row_at(c.stages)
    ctx.other = 1 if at is None else FIRST + at  # where the other row stands among the arguments


def gradients(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
    """Return the gradients of all arguments of `RowNorm`, whose `ctx` has what `keep` kept.

    They come from the kernels or, where they are to be differentiated, from the definition.
    """
    stats, x, weight, bias, *others = ctx.saved_tensors
    stages = ctx.call.stages._replace(**dict(zip(TENSORS, others, strict=True)))
    c = ctx.call._replace(input=x, weight=weight, bias=bias, stages=stages)
    places = [2 + place for place in (0, ctx.other, 3, 4)]  # after y and the statistics
    wants = [ctx.needs_input_grad[place] for place in places]
    results = _differentiable(c, dy, wants) if torch.is_grad_enabled() else _of_kernels(c, dy, stats, wants)
    found: list[Tensor | None] = [None] * len(ctx.needs_input_grad)
    for place, wanted, result in zip(places, wants, results, strict=True):
        found[place] = result if wanted else None
    return tuple(found)


def _of_kernels(c: NormCall, dy: Tensor, stats: Tensor, wants: list[bool]) -> tuple[Tensor, ...]:
    """The gradients of input, the other row, weight and bias, by kernels."""
    s = c.stages
    # The kernels need the bias for their formulas, or to take the groups of rows from its shape.
    reads_bias = s.grouped or s.activation != IDENTITY or other_row(s, None) is not None
    affine = c.weight, c.bias if reads_bias else None, c.weight_offset
    call = Backward(dy, None, c.input, None, stats, c.num_dims, *affine, c.rms, False, s)
    bias_dtype = None if c.bias is None else c.bias.dtype
    results = torch.ops.kernel_fusion.triton_row_norm_bwd(call.h.dtype, bias_dtype, [*wants, False], *call.arguments)
    return tuple(results[:4])


def _differentiable(c: NormCall, dy: Tensor, wants: list[bool]) -> list[Tensor | None]:
    """The gradients of input, the other row, weight and bias, by the definition."""
    at = row_at(c.stages)

    def norm(x: Tensor, other: Tensor | None, weight: Tensor | None, bias: Tensor | None) -> list[Tensor]:
        stages = c.stages if at is None else c.stages._replace(**{c.stages._fields[at]: other})
        call = c._replace(input=x, weight=weight, bias=bias, stages=stages)
        return [torch.ops.kernel_fusion.staged_row_norm_reference(*call.arguments)[0]]

    return autograd.differentiable(norm, [dy], [c.input, other_row(c.stages, None), c.weight, c.bias], wants)


@autograd.verb
def staged_row_norm(*args: Any) -> tuple[Tensor, Tensor]:
    """Return what `kernel_fusion::staged_row_norm` does, by the Triton kernels if they take the call."""
    c = norm_call(*args)
    s, other = c.stages, other_row(c.stages, c.residual)
    shape = checks.parameter_shape(c.input, c.num_dims, s.grouped, *c.vectors)
    foreign = autograd.needs_definition([c.input, other, *c.vectors], [s.seed])
    apart = s.grouped and groups_of(c.input.shape, shape, c.num_dims) is None
    if foreign or apart or not checks.shaped(shape, *c.vectors):
        return torch.ops.kernel_fusion.staged_row_norm_reference(*args)  # type: ignore[no-any-return]
    checks.staged_row_norm(c)
    c = c._replace(out_dtype=c.out_dtype or c.input.dtype)
    records = autograd.requires_grad(c.input, other, *c.vectors)
    with torch.no_grad():
        y, h, stats = torch.ops.kernel_fusion.triton_row_norm_fwd(records, *c.arguments)
    if records:
        h, norm = sum_and_norm(c, h)
        y = RowNorm.apply(y, stats, *norm.arguments)  # type: ignore[no-untyped-call]
    return y, h
