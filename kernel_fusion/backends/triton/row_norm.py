"""LayerNorm and RMSNorm with their stages: the operators on the kernels, and their autograd."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._prims_common import suggest_memory_format

from kernel_fusion.backends.triton import autograd, plan
from kernel_fusion.backends.triton.kernels import row_norm_bwd as bwd
from kernel_fusion.backends.triton.kernels.constants import RowNormBackward, RowNormForward, SumPartials
from kernel_fusion.backends.triton.kernels.row_norm_fwd import row_norm_fwd as fwd_kernel
from kernel_fusion.backends.triton.launch import launch, row_tile, tile
from kernel_fusion.backends.triton.layout import Rows, product, rows_of, unit
from kernel_fusion.core import checks, dropout
from kernel_fusion.core.activations import CODES, IDENTITY
from kernel_fusion.core.arguments import floating, is_seed, require, shaped
from kernel_fusion.core.spec import compute_dtype


def _flat(parameter: Tensor | None) -> Tensor | None:
    return None if parameter is None else parameter.contiguous()


def _stages(
    pre_activation: str, activation: str, dropout_p: float, seed: Tensor | None, rounding: str
) -> dict[str, Any]:
    """The constants of the stages."""
    active = seed is not None
    return {
        "pre_activation": pre_activation,
        "activation": activation,
        "hf": rounding == "hf",
        "threshold": dropout.threshold(dropout_p) if active else 0,
        "kept_scale": dropout.scale(dropout_p) if active else 1.0,
    }


def _in_units(rows: Rows, cols: int) -> tuple[int, list[int], list[int]]:
    """The unit, the lengths (rows, columns, middle, inner) and all strides in it."""
    strides = [stride for of in rows.strides for stride in of]
    size = unit(cols, *strides)
    return size, [rows.count, cols // size, rows.middle, rows.inner], [stride // size for stride in strides]


def _takes(
    input: Tensor,
    num_dims: int,
    parameters: Sequence[Tensor | None],
    others: Sequence[Tensor | None],
    stages: tuple[str, str, float, Tensor | None],
) -> bool:
    """Whether the kernels take these tensors, of which `others` have the input's shape."""
    pre_activation, activation, dropout_p, seed = stages
    if not (1 <= num_dims <= input.dim() and pre_activation in CODES and activation in CODES):
        return False
    shapes = shaped(input.shape[input.dim() - num_dims :], *parameters) and shaped(input.shape, *others)
    types = floating(input, *parameters, *others) and is_seed(seed)
    return shapes and types and input.numel() > 0 and 0.0 <= dropout_p <= 1.0


def _are_statistics(stats: Tensor, h: Tensor, num_dims: int, rms: bool) -> bool:
    rows = product(h.shape[: h.dim() - num_dims])
    known = stats.dtype == compute_dtype(h.dtype) and stats.is_contiguous()
    return known and shaped((1 if rms else 2, rows), stats)


@torch.library.triton_op("kernel_fusion::triton_row_norm_fwd", mutates_args={})
def forward(
    input: Tensor,
    residual: Tensor | None,
    num_dims: int,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    weight_offset: float,
    out_dtype: torch.dtype,
    rms: bool,
    pre_activation: str,
    activation: str,
    dropout_p: float,
    seed: Tensor | None,
    wants_stats: bool,
    rounding: str = "once",
) -> tuple[Tensor, Tensor, Tensor]:
    """y, h and the statistics; h is without elements where there is no residual, the statistics where not wanted."""
    stages = pre_activation, activation, dropout_p, seed
    takes = out_dtype in checks.FLOATING and _takes(input, num_dims, [weight, bias], [residual], stages)
    require("triton_row_norm_fwd", [input, residual, weight, bias, seed], takes)
    given = [input] if residual is None else [input, residual]
    tensors, rows = rows_of(given, num_dims)
    x, r = tensors[0], tensors[-1]
    cols = product(input.shape[input.dim() - num_dims :])
    wide = compute_dtype(input.dtype)
    y = torch.empty(input.shape, dtype=out_dtype, device=input.device)
    h = torch.empty(input.shape if residual is not None else (0,), dtype=r.dtype, device=input.device)
    kinds = 0 if not wants_stats else 1 if rms else 2
    stats = torch.empty((kinds, rows.count), dtype=wide, device=input.device)
    device = plan.device_of(input.device)
    layout = plan.norm_forward(cols, input.dtype.itemsize, device.warp_size, rms)
    size, lengths, strides = _in_units(Rows(rows.count, rows.middle, rows.inner, (rows.strides * 2)[:2]), cols)
    constants = RowNormForward(
        eps=eps, offset=weight_offset, **_stages(pre_activation, activation, dropout_p, seed, rounding), rms=rms,
        has_residual=residual is not None, has_weight=weight is not None, has_bias=bias is not None, stats=wants_stats,
        wide=wide == torch.float64, flat=rows.simple, unit=size, **row_tile(layout, cols), pieces=layout.pieces,
        looped=layout.looped, slices=layout.slices, early=layout.early, chained=device.chained,
        releases=layout.releases,
    )  # fmt: skip
    launch(
        fwd_kernel, (-(-rows.count // layout.rows),),
        x, r, _flat(weight), _flat(bias), seed, y, h, stats, *lengths, *strides, constants=constants,
        warps=layout.warps,
    )  # fmt: skip
    bare = residual is None and seed is None and pre_activation == activation == IDENTITY
    if rms and bare and input.dim() > 3:  # as in PyTorch, whose LayerNorm gives a contiguous result
        y = y.contiguous(memory_format=suggest_memory_format(input))
    return y, h, stats


@torch.library.triton_op("kernel_fusion::triton_row_norm_bwd", mutates_args={})
def backward(
    dy: Tensor,
    dh: Tensor | None,
    h: Tensor,
    x: Tensor | None,
    stats: Tensor,
    num_dims: int,
    weight: Tensor | None,
    bias: Tensor | None,
    input_dtype: torch.dtype,
    bias_dtype: torch.dtype | None,
    weight_offset: float,
    rms: bool,
    pre_activation: str,
    activation: str,
    dropout_p: float,
    seed: Tensor | None,
    stored: bool,
    wants: Sequence[bool],
    rounding: str = "once",
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dx, dresidual, dweight, dbias; those that are not wanted have no elements.

    Args:
        dy, dh: what arrives at y and at h.
        h: what was normalised, if it was `stored`; else the input, of which it is computed again.
        x: the input, where h was stored and there is a pre-activation.
        bias: where there is an activation.
    """
    takes = _takes(h, num_dims, [weight, bias], [dy, dh, x], (pre_activation, activation, dropout_p, seed))
    kinds = (input_dtype in checks.FLOATING, bias_dtype in (*checks.FLOATING, None), len(wants) == 4)
    takes = takes and all(kinds) and _are_statistics(stats, h, num_dims, rms)
    require("triton_row_norm_bwd", [dy, dh, h, x, stats, weight, bias, seed], takes)
    results = _gradients(h, num_dims, weight, input_dtype, bias_dtype, wants)
    tensors, rows = rows_of([dy, h, h if x is None else x], num_dims)
    cols = product(h.shape[h.dim() - num_dims :])
    size, *numbers = _in_units(rows, cols)
    fetched = sum(t.dtype.itemsize for t in (dy, dh, h, x, weight, bias) if t is not None)
    constants = {
        "offset": weight_offset, **_stages(pre_activation, activation, dropout_p, seed, rounding), "stored": stored,
        "has_weight": weight is not None, "has_bias": bias is not None, "rms": rms, "flat": rows.simple, "unit": size,
        "wide": stats.dtype == torch.float64,
    }  # fmt: skip
    given = [*tensors, None if dh is None else dh.contiguous(), _flat(weight), _flat(bias), seed, stats]
    _launch_backward(given, results, rows.count, cols, numbers, fetched, wants, constants)
    return results


def _gradients(
    h: Tensor,
    num_dims: int,
    weight: Tensor | None,
    input_dtype: torch.dtype,
    bias_dtype: torch.dtype | None,
    wants: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Memory for dx, dresidual, dweight and dbias."""
    shape = h.shape[h.dim() - num_dims :]
    dtypes = (input_dtype, h.dtype, input_dtype if weight is None else weight.dtype, bias_dtype or input_dtype)
    shapes = (h.shape, h.shape, shape, shape)
    dx, dresidual, dweight, dbias = (
        torch.empty(of if wanted else (0,), dtype=dtype, device=h.device)
        for of, dtype, wanted in zip(shapes, dtypes, wants, strict=True)
    )
    return dx, dresidual, dweight, dbias


def _launch_backward(
    given: Sequence[Tensor | None],
    results: Sequence[Tensor],
    count: int,
    cols: int,
    numbers: Sequence[Sequence[int]],
    fetched: int,
    wants: Sequence[bool],
    constants: dict[str, Any],
) -> None:
    """Fill the gradients that are wanted, of `count` rows, from dy, h, x, dh, weight, bias, seed and the statistics."""
    dy, h, *_, seed, stats = given
    assert dy is not None
    assert h is not None
    assert stats is not None
    device = plan.device_of(h.device)
    dx, dresidual, dweight, dbias = results
    staged = constants["pre_activation"] != IDENTITY or constants["activation"] != IDENTITY or seed is not None
    sizes = fetched, device.shared_bytes
    layout = plan.norm_backward(cols, h.dtype.itemsize, device.warp_size, constants["rms"], staged, *sizes)
    # Whether the kernel of the rows has registers for the sums; those of long rows are left to a kernel of columns.
    sums = wants[2] or wants[3]
    whole = sums and layout.resident > 0
    columns = plan.norm_columns(h.dtype.itemsize, device.warp_size)
    beside = 1 if whole else -(-cols // columns.block)
    programs = device.programs(layout if whole else columns, count, beside)
    partials = torch.empty((wants[2] + wants[3]) * programs * cols, dtype=stats.dtype, device=h.device)
    lengths, strides = numbers
    if wants[0] or wants[1] or whole:
        of_rows = RowNormBackward(
            has_dh=given[3] is not None, dx=wants[0], dresidual=wants[1], dweight=wants[2] and whole,
            dbias=wants[3] and whole, **row_tile(layout, cols), pieces=layout.pieces, again=layout.again,
            looped=layout.looped, stages=layout.stages, chained=device.chained and whole and layout.chained,
            **constants,
        )  # fmt: skip
        launch(
            bwd.row_norm_bwd, (programs if whole else -(-count // layout.rows),),
            *given, dx, dresidual, partials, *lengths, *strides, constants=of_rows, warps=layout.warps,
            registers=None if staged else device.registers_of(layout),
        )  # fmt: skip
    if sums and not whole:
        launch(
            bwd.row_norm_bwd_columns, (beside, programs),
            dy, h, *given[4:], partials, *lengths, *strides[:-3], warps=columns.warps,
            constants=RowNormBackward(dweight=wants[2], dbias=wants[3], **row_tile(columns, cols), **constants),
        )  # fmt: skip
    if sums:
        sum_partials(partials, programs, [t for t, wanted in ((dweight, wants[2]), (dbias, wants[3])) if wanted])


def sum_partials(partials: Tensor, programs: int, outputs: Sequence[Tensor]) -> None:
    """Add partial rows, those of the first sum before those of the second, into one or two outputs of a row each.

    They lie in a flat tensor: of one with a dimension of programs, whose number depends on that of the rows, Inductor
    would make a copy, as it cannot know the strides.
    """
    cols, pair = outputs[0].numel(), len(outputs) == 2
    device = plan.device_of(partials.device)
    layout = plan.partial_sums(device.warp_size)
    constants = SumPartials(**tile(layout), pair=pair, wide=partials.dtype == torch.float64, chained=device.chained)
    launch(
        bwd.sum_partials, (-(-cols // layout.block), len(outputs)),
        partials, outputs[0], outputs[1] if pair else None, programs, cols, constants=constants, warps=layout.warps,
    )  # fmt: skip


class StagedRowNorm(torch.autograd.Function):
    """Autograd of the operator; arguments as for `kernel_fusion::staged_row_norm`."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[Tensor, Tensor]:
        """y, and h or nothing."""
        input, residual, num_dims, weight, bias, eps, offset, out_dtype, rms, pre, act, p, seed, rounding = args
        y, h, stats = _forward(*args, wants_stats=True)
        if residual is None:
            ctx.mark_non_differentiable(h)
        ctx.set_materialize_grads(False)
        stored = residual is not None
        # With h at hand, backward needs the input for the slope of the pre-activation alone.
        kept = input if not stored or pre != IDENTITY else None
        ctx.save_for_backward(kept, h if stored else None, weight, bias, seed, stats)
        ctx.call = num_dims, eps, offset, out_dtype or input.dtype, rms, pre, act, p, rounding
        ctx.stored, ctx.input_dtype = stored, input.dtype
        return y, h

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Gradients of input, residual, weight and bias."""
        dy, dh = grads
        wants = [ctx.needs_input_grad[i] for i in (0, 1, 3, 4)]
        if dy is None and dh is None:
            return (None,) * 14
        if torch.is_grad_enabled():
            found = _differentiable_backward(ctx, dy, dh, wants)
        else:
            found = _kernel_backward(ctx, dy, dh, wants)
        return found[0], found[1], None, found[2], found[3], *(None,) * 9


def _forward(*args: Any, wants_stats: bool) -> tuple[Tensor, Tensor, Tensor]:
    input, residual, num_dims, weight, bias, eps, offset, out_dtype, *stages, rounding = args
    result: tuple[Tensor, Tensor, Tensor] = torch.ops.kernel_fusion.triton_row_norm_fwd(
        input, residual, num_dims, weight, bias, eps, offset, out_dtype or input.dtype, *stages, wants_stats, rounding
    )
    return result


def _kernel_backward(ctx: Any, dy: Tensor | None, dh: Tensor | None, wants: list[bool]) -> list[Tensor | None]:
    x, h, weight, bias, seed, stats = ctx.saved_tensors
    num_dims, _, offset, out_dtype, rms, pre, act, p, rounding = ctx.call
    normalised = h if ctx.stored else x
    if dy is None:
        dy = torch.zeros_like(normalised, dtype=out_dtype)
    # Without a stage between them, dx is dresidual.
    same = ctx.stored and pre == IDENTITY and seed is None and h.dtype == ctx.input_dtype and wants[0]
    asked = [False, True, *wants[2:]] if same else wants
    results = torch.ops.kernel_fusion.triton_row_norm_bwd(
        dy, dh, normalised, x if ctx.stored else None, stats, num_dims, weight, bias if act != IDENTITY else None,
        ctx.input_dtype, None if bias is None else bias.dtype, offset, rms, pre, act, p, seed, ctx.stored, asked,
        rounding,
    )  # fmt: skip
    dx, dresidual, dweight, dbias = (t if wanted else None for t, wanted in zip(results, asked, strict=True))
    return [dresidual if same else dx, dresidual if wants[1] else None, dweight, dbias]


def _differentiable_backward(ctx: Any, dy: Tensor | None, dh: Tensor | None, wants: list[bool]) -> list[Tensor | None]:
    """The definition's gradients: through h, where it was stored, and from there to the input."""
    x, h, weight, bias, seed, _ = ctx.saved_tensors
    num_dims, eps, offset, out_dtype, rms, pre, act, p, rounding = ctx.call
    reference = torch.ops.kernel_fusion.staged_row_norm_reference
    affine = weight, bias, eps, offset, out_dtype, rms
    if not ctx.stored:
        y, _ = reference(x, None, num_dims, *affine, pre, act, p, seed, rounding)
        dx, dweight, dbias = autograd.differentiable([y], [dy], [x, weight, bias], [wants[0], *wants[2:]])
        return [dx, None, dweight, dbias]
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
) -> tuple[Tensor, Tensor]:
    """`kernel_fusion::staged_row_norm` on the Triton kernels."""
    stages = pre_activation, activation, dropout_p, seed, rounding
    args = (input, residual, num_dims, weight, bias, eps, weight_offset, out_dtype, rms, *stages)
    shape = input.shape[input.dim() - num_dims :]
    if autograd.needs_definition([input, residual, weight, bias], [seed]) or not checks.parameters_fit(
        shape, weight, bias
    ):
        return torch.ops.kernel_fusion.staged_row_norm_reference(*args)  # type: ignore[no-any-return]
    verb = ("" if residual is None else "add_") + ("rms_norm" if rms else "layer_norm")
    checks.row_norm(verb, input, weight, bias, weight_offset, out_dtype)
    checks.residual(verb, input, residual)
    if autograd.requires_grad(input, residual, weight, bias):
        return StagedRowNorm.apply(*args)  # type: ignore[no-untyped-call,no-any-return]
    y, h, _ = _forward(*args, wants_stats=False)
    return y, h
