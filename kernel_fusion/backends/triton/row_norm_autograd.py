"""LayerNorm and RMSNorm with their stages or a gate: autograd of the operators, and the verb."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernel_fusion.backends.triton import autograd
from kernel_fusion.core import checks
from kernel_fusion.core.activations import IDENTITY

# The most programs along an axis of the grid but the first.
_MOST_GROUPS = 65535


class StagedRowNorm(torch.autograd.Function):
    """Autograd of the operator; arguments as for `kernel_fusion::staged_row_norm`."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[Tensor, Tensor]:
        """y, and h or nothing."""
        input, residual, num_dims, weight, bias, eps, offset, out_dtype, rms, *stages = args
        pre, act, p, seed, rounding, gate, *gating = stages
        y, h, stats = _forward(*args, wants_stats=True)
        if residual is None:
            ctx.mark_non_differentiable(h)
        ctx.set_materialize_grads(False)
        stored = residual is not None
        # With h at hand, backward needs the input for the slope of the pre-activation alone.
        kept = input if not stored or pre != IDENTITY else None
        ctx.save_for_backward(kept, h if stored else None, weight, bias, seed, stats, gate)
        ctx.call = num_dims, eps, offset, out_dtype or input.dtype, rms, pre, act, p, rounding
        ctx.gating = gating
        ctx.stored, ctx.input_dtype = stored, input.dtype
        return y, h

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Gradients of input, residual, weight, bias and gate."""
        dy, dh = grads
        gated = ctx.saved_tensors[-1] is not None
        wants = [ctx.needs_input_grad[i] for i in (0, 14 if gated else 1, 3, 4)]
        if dy is None and dh is None:
            return (None,) * 17
        if torch.is_grad_enabled():
            found = _differentiable_backward(ctx, dy, dh, wants)
        else:
            found = _kernel_backward(ctx, dy, dh, wants)
        dx, dother, dweight, dbias = found
        dresidual, dgate = (None, dother) if gated else (dother, None)
        return dx, dresidual, None, dweight, dbias, *(None,) * 9, dgate, None, None


def _forward(*args: Any, wants_stats: bool) -> tuple[Tensor, Tensor, Tensor]:
    input, residual, num_dims, weight, bias, eps, offset, out_dtype, rms, *stages = args
    affine = num_dims, weight, bias, eps, offset, out_dtype or input.dtype, rms
    result: tuple[Tensor, Tensor, Tensor] = torch.ops.kernel_fusion.triton_row_norm_fwd(
        input, residual, *affine, *stages[:4], wants_stats, *stages[4:]
    )
    return result


def _kernel_backward(ctx: Any, dy: Tensor | None, dh: Tensor | None, wants: list[bool]) -> list[Tensor | None]:
    x, h, weight, bias, seed, stats, gate = ctx.saved_tensors
    num_dims, _, offset, out_dtype, rms, pre, act, p, rounding = ctx.call
    normalised = h if ctx.stored else x
    if dy is None:
        dy = torch.zeros_like(normalised, dtype=out_dtype)
    # Without a stage between them, dx is dresidual.
    same = ctx.stored and pre == IDENTITY and seed is None and h.dtype == ctx.input_dtype and wants[0]
    asked = [False, True, *wants[2:]] if same else wants
    # The kernels take groups from the shape of a parameter.
    reads_bias = act != IDENTITY or gate is not None
    results = torch.ops.kernel_fusion.triton_row_norm_bwd(
        dy, dh, normalised, x if ctx.stored else None, stats, num_dims, weight, bias if reads_bias else None,
        ctx.input_dtype, None if bias is None else bias.dtype, offset, rms, pre, act, p, seed, ctx.stored, asked,
        rounding, gate, *ctx.gating,
    )  # fmt: skip
    dx, dresidual, dweight, dbias = (t if wanted else None for t, wanted in zip(results, asked, strict=True))
    return [dresidual if same else dx, dresidual if wants[1] else None, dweight, dbias]


def _differentiable_backward(ctx: Any, dy: Tensor | None, dh: Tensor | None, wants: list[bool]) -> list[Tensor | None]:
    """The definition's gradients: through h, where it was stored, and from there to the input."""
    x, h, weight, bias, seed, _, gate = ctx.saved_tensors
    num_dims, eps, offset, out_dtype, rms, pre, act, p, rounding = ctx.call
    reference = torch.ops.kernel_fusion.staged_row_norm_reference
    affine = weight, bias, eps, offset, out_dtype, rms
    if not ctx.stored:
        y, _ = reference(x, None, num_dims, *affine, pre, act, p, seed, rounding, gate, *ctx.gating)
        return autograd.differentiable([y], [dy], [x, gate, weight, bias], wants)
    total, dweight, dbias = None, None, None
    if dy is not None:
        # In the compute type, so that y of a narrow h is not rounded on the way.
        y, _ = reference(h, None, num_dims, *affine, IDENTITY, act, 0.0, None, rounding)
        total, dweight, dbias = autograd.differentiable([y], [dy], [h, weight, bias], [True, *wants[2:]])
    if dh is not None:
        total = dh if total is None else total + dh
    assert total is not None
    dx = None
    if wants[0]:
        dx = _through_stages(total, x, pre, p, seed, ctx.input_dtype)
    return [dx, total if wants[1] else None, dweight, dbias]


def _through_stages(
    du: Tensor, x: Tensor | None, pre: str, p: float, seed: Tensor | None, dtype: torch.dtype
) -> Tensor | None:
    """The gradient of x, where u = dropout(pre_activation(x)) and `du` is that of u."""
    chain = torch.ops.kernel_fusion.pointwise_reference
    if pre != IDENTITY:
        assert x is not None
        u = chain(x.to(du.dtype).contiguous(), None, "first", pre, 1.0, p, seed)
        return autograd.differentiable([u], [du], [x], [True])[0]
    return (du if seed is None else chain(du.contiguous(), None, "first", IDENTITY, 1.0, p, seed)).to(dtype)


def staged_row_norm(
    input: Tensor,
    residual: Tensor | None,
    num_dims: int,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    weight_offset: float,
    out_dtype: torch.dtype | None,
    rms: bool,
    pre_activation: str,
    activation: str,
    dropout_p: float,
    seed: Tensor | None,
    rounding: str = "once",
    gate: Tensor | None = None,
    gate_activation: str = IDENTITY,
    gate_first: bool = False,
) -> tuple[Tensor, Tensor]:
    """`kernel_fusion::staged_row_norm` on the Triton kernels."""
    stages = pre_activation, activation, dropout_p, seed, rounding, gate, gate_activation, gate_first
    args = (input, residual, num_dims, weight, bias, eps, weight_offset, out_dtype, rms, *stages)
    shape = checks.parameter_shape(input, num_dims, gate is not None, weight, bias)
    foreign = autograd.needs_definition([input, residual, gate, weight, bias], [seed])
    groups = shape[0] if len(shape) > num_dims else 1
    if foreign or groups > _MOST_GROUPS or not checks.parameters_fit(shape, weight, bias):
        return torch.ops.kernel_fusion.staged_row_norm_reference(*args)  # type: ignore[no-any-return]
    checks.staged_row_norm(input, residual, gate, weight, bias, weight_offset, out_dtype, rms)
    if autograd.requires_grad(input, residual, gate, weight, bias):
        return StagedRowNorm.apply(*args)  # type: ignore[no-untyped-call,no-any-return]
    y, h, _ = _forward(*args, wants_stats=False)
    return y, h
