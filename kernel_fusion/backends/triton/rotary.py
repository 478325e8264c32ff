"""The rotary embedding of query and key: the operators on the kernels, and their autograd."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kernel_fusion.backends.triton import autograd, plan
from kernel_fusion.backends.triton.kernels import rotary as kernels
from kernel_fusion.backends.triton.kernels.constants import Rotary as Constants
from kernel_fusion.backends.triton.launch import launch
from kernel_fusion.backends.triton.layout import unit
from kernel_fusion.backends.triton.reduce import sum_partials
from kernel_fusion.core.arguments import floating, require, shaped
from kernel_fusion.core.rotary import Rotary, result_like, served_by_kernels
from kernel_fusion.core.spec import compute_dtype


def _takes(c: Rotary) -> bool:
    pairs = c.key is not None or c.key_weight is None  # else nothing has looked at the weight
    return served_by_kernels(c) and pairs and c.query.shape[-1] <= plan.LONGEST_HEAD


def _readable(t: Tensor | None) -> Tensor | None:
    """With columns side by side."""
    return t if t is None or t.stride(-1) == 1 or t.shape[-1] == 1 else t.contiguous()


def _strides(t: Tensor | None) -> tuple[int, ...]:
    return (0, 0, 0) if t is None else t.stride()[:3]


def _tables(c: Rotary) -> tuple[Tensor, Tensor, int, list[int]]:
    """cos and sin, which lie alike; and the strides of examples (0 if they share a table) and rows, in this unit."""
    cos, sin = c.cos, c.sin
    if cos.stride() != sin.stride() or cos.stride(-1) != 1:
        cos, sin = cos.contiguous(), sin.contiguous()
    strides = [cos.stride(0) if cos.shape[0] > 1 else 0, cos.stride(1)]
    size = unit(*strides)
    return cos, sin, size, [stride // size for stride in strides]


def _position_strides(positions: Tensor | None) -> tuple[int, int]:
    if positions is None:
        return 0, 0
    return positions.stride(0) if positions.shape[0] > 1 else 0, positions.stride(1)


def _constants(c: Rotary, layout: plan.RotaryPlan, size: int, table_unit: int) -> dict[str, Any]:
    """The constants of both directions."""
    return {
        "wide": compute_dtype(c.query.dtype) == torch.float64,
        "rows": layout.rows,
        "block": layout.block,
        "rest": layout.rest,
        "exact": layout.block == int(c.half),
        "cols": int(c.query.shape[-1]),
        "half": int(c.half),
        "interleaved": c.interleaved,
        "norm": c.eps is not None,
        "eps": c.eps or 0.0,
        "offset": c.weight_offset,
        "rounding": c.rounding,
        "narrow_angles": c.cos.dtype == c.query.dtype,
        "has_key": c.key is not None,
        "has_weight": c.query_weight is not None,
        "has_key_weight": c.key_weight is not None,
        "has_positions": c.positions is not None,
        "unit": size,
        "table_unit": table_unit,
    }


def _layout(c: Rotary) -> plan.RotaryPlan:
    heads = c.query.shape[2], 0 if c.key is None else c.key.shape[2]
    return plan.rotary(c.half, c.query.shape[3], heads, plan.device_of(c.query.device).warp_size)


def _flat(weight: Tensor | None) -> Tensor | None:
    return None if weight is None else weight.contiguous()


@torch.library.triton_op("kernel_fusion::triton_qk_norm_rope_fwd", mutates_args={})
def forward(
    query: Tensor,
    key: Tensor | None,
    query_weight: Tensor | None,
    key_weight: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None,
    eps: float | None,
    weight_offset: float,
    interleaved: bool,
    rounding: str,
) -> tuple[Tensor, Tensor]:
    """Query and key turned; without a key the second has no elements."""
    c = Rotary(query, key, query_weight, key_weight, cos, sin, positions, eps, weight_offset, interleaved, rounding)
    require("triton_qk_norm_rope_fwd", c[:7], _takes(c))
    q, k = _readable(query), _readable(key)
    assert q is not None
    y, z = result_like(q), None if k is None else result_like(k)
    cos, sin, table_unit, table_strides = _tables(c)
    strides = [stride for t in (q, k, y, z) for stride in _strides(t)]
    size = unit(q.shape[-1], *strides)
    layout = _layout(c)
    tensors = q, k, _flat(query_weight), _flat(key_weight), cos, sin, positions, y, z
    lengths = q.shape[1], q.shape[2], 0 if k is None else k.shape[2], cos.shape[1]
    numbers = *lengths, *table_strides, *_position_strides(positions), *(stride // size for stride in strides)
    constants = Constants(**_constants(c, layout, size, table_unit))
    grid = (q.shape[0] * q.shape[1] * layout.tiles,)
    launch(kernels.rotary_fwd, grid, *tensors, *numbers, constants=constants, warps=layout.warps)
    return y, query.new_empty(0) if z is None else z


@torch.library.triton_op("kernel_fusion::triton_qk_norm_rope_bwd", mutates_args={})
def backward(
    dy: Tensor | None,
    dy_key: Tensor | None,
    query: Tensor | None,
    key: Tensor | None,
    query_weight: Tensor | None,
    key_weight: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None,
    eps: float | None,
    weight_offset: float,
    interleaved: bool,
    rounding: str,
    wants: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of query, key and their weights; unwanted ones have no elements.

    With a norm, query and key themselves are there, even one of which nothing is wanted: the sums of the other's
    weight depend on the heads of both. What arrives at that one may be None.
    """
    x, x_key = (dy, dy_key) if eps is None else (query, key)
    require("triton_qk_norm_rope_bwd", [dy, dy_key, x_key], x is not None)
    assert x is not None
    c = Rotary(x, x_key, query_weight, key_weight, cos, sin, positions, eps, weight_offset, interleaved, rounding)
    takes = _takes(c) and shaped(x.shape, dy) and floating(dy, dy_key) and len(wants) == 4
    takes = takes and (dy_key is None if x_key is None else shaped(x_key.shape, dy_key))
    takes = takes and (dy is not None or not any(wants[::2])) and (dy_key is not None or not any(wants[1::2]))
    require("triton_qk_norm_rope_bwd", [dy, dy_key, *c[:7]], takes)
    read = [_readable(t) for t in (dy, dy_key, x, x_key)]
    dx, dx_key = (
        None if t is None or not wanted else result_like(t) for t, wanted in zip(read[2:], wants[:2], strict=True)
    )
    rows = [
        None if w is None or not wanted else torch.empty_like(w, memory_format=torch.contiguous_format)
        for w, wanted in zip((query_weight, key_weight), wants[2:], strict=True)
    ]
    _launch_backward(c, read, dx, dx_key, rows)
    return tuple(x.new_empty(0) if t is None else t for t in (dx, dx_key, *rows))  # type: ignore[return-value]


def _launch_backward(
    c: Rotary, read: Sequence[Tensor | None], dx: Tensor | None, dx_key: Tensor | None, rows: Sequence[Tensor | None]
) -> None:
    """Fill the gradients, from dy and x of query and key, which are `read`."""
    cos, sin, table_unit, table_strides = _tables(c)
    strides = [stride for t in (*read, dx, dx_key) for stride in _strides(t)]
    batch, tokens, heads, cols = c.query.shape
    size = unit(cols, *strides)
    layout, device = _layout(c), plan.device_of(c.query.device)
    items = batch * tokens * layout.tiles
    wanted = [row for row in rows if row is not None]
    programs = device.programs(layout.persistent, items) if wanted else items
    partials = torch.empty(len(wanted) * programs * cols, dtype=compute_dtype(c.query.dtype), device=c.query.device)
    results = {"dquery": dx, "dkey": dx_key, "dweight": rows[0], "dkey_weight": rows[1]}
    compiled = _constants(c, layout, size, table_unit) | {name: t is not None for name, t in results.items()}
    tensors = *read, _flat(c.query_weight), _flat(c.key_weight), cos, sin, c.positions, dx, dx_key, partials
    lengths = batch * tokens, tokens, heads, 0 if c.key is None else c.key.shape[2], cos.shape[1]
    numbers = *lengths, *table_strides, *_position_strides(c.positions), *(stride // size for stride in strides)
    launch(kernels.rotary_bwd, (programs,), *tensors, *numbers, constants=Constants(**compiled), warps=layout.warps)
    if wanted:
        sum_partials(partials, programs, wanted)


class QKNormRope(torch.autograd.Function):
    """Autograd of the operator."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[Tensor, Tensor]:
        """Query, and key or nothing."""
        c = Rotary(*args)
        query, key = torch.ops.kernel_fusion.triton_qk_norm_rope_fwd(*args)
        wants = ctx.needs_input_grad
        ctx.mark_non_differentiable(
            *(y for y, wanted in ((query, wants[0] or wants[2]), (key, wants[1] or wants[3])) if not wanted)
        )
        ctx.set_materialize_grads(False)
        kept = c[:4] if c.eps is not None else (None,) * 4
        ctx.save_for_backward(*kept, c.cos, c.sin, c.positions)
        ctx.constants = c[7:]
        return query, key

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Gradients of query, key and their weights."""
        found: list[Tensor | None] = [None] * len(Rotary._fields)
        if grads[0] is None and grads[1] is None:
            return tuple(found)
        saved = ctx.saved_tensors  # read once, since a checkpoint gives them once
        x, tables = saved[:4], saved[4:]
        # A key without a norm, at which alone something arrives, stands in the place of the query.
        at = [1, 0, 3, 2] if x[0] is None and grads[0] is None else [0, 1, 2, 3]
        wants = [ctx.needs_input_grad[i] and grads[i % 2] is not None for i in at]
        gradient = _differentiable if torch.is_grad_enabled() else torch.ops.kernel_fusion.triton_qk_norm_rope_bwd
        results = gradient(*(grads[i] for i in at[:2]), *(x[i] for i in at), *tables, *ctx.constants, wants)
        for place, wanted, result in zip(at, wants, results, strict=True):
            if wanted:
                found[place] = result
        return tuple(found)


def _differentiable(*args: Any) -> list[Tensor | None]:
    """The gradients as functions that can be differentiated: a rotation the other way, or those of the definition."""
    dy, dy_key, query, key, query_weight, key_weight, cos, sin, positions, eps, *rest, wants = args
    if eps is None:
        turned = torch.ops.kernel_fusion.qk_norm_rope_reference(
            dy, dy_key, None, None, cos, -sin, positions, None, *rest
        )
        return [*turned, None, None]
    tensors = [query, key, query_weight, key_weight]
    # Aliases, so that no gradient is also looked for behind them.
    tensors = [None if t is None else t.view_as(t) for t in tensors]
    results = torch.ops.kernel_fusion.qk_norm_rope_reference(*tensors, cos, sin, positions, eps, *rest)
    return autograd.differentiable(results, [dy, dy_key], tensors, wants)


def qk_norm_rope(*args: Any) -> tuple[Tensor, Tensor]:
    """`kernel_fusion::qk_norm_rope` on the Triton kernels."""
    c = Rotary(*args)
    foreign = autograd.needs_definition([*c[:6]], [c.positions])
    # The kernels have no gradients of cos and sin.
    if foreign or autograd.requires_grad(c.cos, c.sin) or not _takes(c):
        return torch.ops.kernel_fusion.qk_norm_rope_reference(*args)  # type: ignore[no-any-return]
    if autograd.requires_grad(*c[:4]):
        return QKNormRope.apply(*args)  # type: ignore[no-untyped-call,no-any-return]
    return torch.ops.kernel_fusion.triton_qk_norm_rope_fwd(*args)  # type: ignore[no-any-return]
