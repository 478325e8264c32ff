"""The rotary embedding of query and key: the operators that launch the kernel, and their autograd.

`Rotary` of core/rotary.py has the arguments. The key may be None.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kernel_fusion.backends.triton import autograd, plan
from kernel_fusion.backends.triton.kernels import rotary as kernels
from kernel_fusion.backends.triton.kernels.constants import Rotary as Constants
from kernel_fusion.backends.triton.launch import launch, operator
from kernel_fusion.backends.triton.layout import unit
from kernel_fusion.backends.triton.reduce import sum_partials
from kernel_fusion.core.arguments import floating, require
from kernel_fusion.core.checks import shaped
from kernel_fusion.core.rotary import Rotary, result_like, served_by_kernels
from kernel_fusion.core.spec import compute_dtype
from kernel_fusion.core.symbols import known


def _takes(c: Rotary) -> bool:
    """Whether the kernels take this call."""
    pairs = c.key is not None or c.key_weight is None  # without a key nothing has looked at its weight
    return served_by_kernels(c) and pairs and c.query.shape[-1] <= plan.LONGEST_HEAD


def _with_columns(t: Any) -> Any:
    """The tensor, copied if its columns do not lie side by side, or None."""
    return t if t is None or t.stride(-1) == 1 or t.shape[-1] == 1 else t.contiguous()


def _readable(c: Rotary) -> Rotary:
    """The call with query and key as the kernels can read them."""
    query, key = _with_columns(c.query), _with_columns(c.key)
    return c if query is c.query and key is c.key else c._replace(query=query, key=key)


def _tables(c: Rotary) -> tuple[Tensor, Tensor, int, list[int]]:
    """cos and sin, which then lie alike, their unit, and the strides of examples and of rows in this unit."""
    cos, sin = c.cos, c.sin
    if cos.stride() != sin.stride() or cos.stride(-1) != 1:
        cos, sin = cos.contiguous(), sin.contiguous()
    strides = [0 if known(cos.shape[0] == 1) else cos.stride(0), cos.stride(1)]
    size = unit(*strides)
    return cos, sin, size, [stride // size for stride in strides]


def _position_strides(positions: Tensor | None) -> tuple[int, int]:
    """The strides of examples and of tokens in the tensor of positions."""
    if positions is None:
        return 0, 0
    return 0 if known(positions.shape[0] == 1) else positions.stride(0), positions.stride(1)


@operator("qk_norm_rope_fwd")
def forward(c: Rotary) -> tuple[Tensor, Tensor]:
    """Return the rotated query and key. Without a key the second result has no elements."""
    require("triton_qk_norm_rope_fwd", c[:7], _takes(c))
    c = _readable(c)
    results = result_like(c.query), None if c.key is None else result_like(c.key)
    _launch(c, (None, None), results, (), {"backward": False})
    return results[0], c.query.new_empty(0) if results[1] is None else results[1]


@operator("qk_norm_rope_bwd")
def backward(
    dy: Tensor | None, dy_key: Tensor | None, c: Rotary, wants: Sequence[bool]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of query, key and their weights; those that are not wanted have no elements.

    With a norm, query and key are those of forward, because the order of the sums of either's weight depends on the
    heads of both. Without a norm neither is read, and dy and dy_key stand in their places.
    """
    takes = _takes(c) and shaped(c.query.shape, dy) and floating(dy, dy_key) and len(wants) == 4
    takes = takes and (dy_key is None if c.key is None else shaped(c.key.shape, dy_key))
    takes = takes and (dy is not None or not any(wants[::2])) and (dy_key is not None or not any(wants[1::2]))
    require("triton_qk_norm_rope_bwd", [dy, dy_key, *c[:7]], takes)
    c = _readable(c)
    results = [None if t is None or not wanted else result_like(t) for t, wanted in zip(c[:2], wants[:2], strict=True)]
    rows = [
        None if w is None or not wanted else torch.empty_like(w, memory_format=torch.contiguous_format)
        for w, wanted in zip(c[2:4], wants[2:], strict=True)
    ]
    names = "dquery", "dkey", "dweight", "dkey_weight"
    found = {name: t is not None for name, t in zip(names, (*results, *rows), strict=True)}
    _launch(c, (_with_columns(dy), _with_columns(dy_key)), results, rows, {"backward": True, **found})
    return tuple(c.query.new_empty(0) if t is None else t for t in (*results, *rows))  # type: ignore[return-value]


def _launch(
    c: Rotary,
    dy: Sequence[Tensor | None],
    results: Sequence[Tensor | None],
    rows: Sequence[Tensor | None],
    direction: dict[str, Any],
) -> None:
    """Launch the kernel.

    Args:
        c: The arguments of the operator.
        dy: The gradients of the rotated query and key; None in forward.
        results: The tensors for the results, or for the gradients of query and key.
        rows: The tensors for the gradients of their weights.
        direction: The constants that tell forward from backward, and say which gradients are wanted.
    """
    cos, sin, table_unit, table_strides = _tables(c)
    batch, tokens, heads, cols = c.query.shape
    key_heads = 0 if c.key is None else c.key.shape[2]
    strides = [stride for t in (*dy, *c[:2], *results) for stride in ((0, 0, 0) if t is None else t.stride()[:3])]
    size, device = unit(cols, *strides), plan.device_of(c.query.device)
    layout = plan.rotary(c.half, cols, (heads, key_heads), device.warp_size)
    wide = compute_dtype(c.query.dtype)
    constants = Constants.of(
        layout,
        wide=wide == torch.float64,
        exact=layout.block == int(c.half),
        cols=int(cols),
        half=int(c.half),
        interleaved=c.interleaved,
        norm=c.eps is not None,
        eps=c.eps or 0.0,
        offset=c.weight_offset,
        rounding=c.rounding,
        narrow_angles=c.cos.dtype == c.query.dtype,
        has_key=c.key is not None,
        has_weight=c.query_weight is not None,
        has_key_weight=c.key_weight is not None,
        has_positions=c.positions is not None,
        unit=size,
        table_unit=table_unit,
        **direction,
    )
    items = batch * tokens * layout.tiles
    wanted = [row for row in rows if row is not None]
    programs = device.programs(layout, items * layout.rows) if wanted else items
    partials = torch.empty(len(wanted) * programs * cols, dtype=wide, device=cos.device) if wanted else None
    weights = [None if weight is None else weight.contiguous() for weight in c[2:4]]
    tensors = *dy, *c[:2], *weights, cos, sin, c.positions, *results, partials
    lengths = batch * tokens, tokens, heads, key_heads, cos.shape[1]
    numbers = *lengths, *table_strides, *_position_strides(c.positions), *(stride // size for stride in strides)
    launch(kernels.rotary, (programs,), *tensors, *numbers, constants=constants, warps=layout.warps)
    if partials is not None:
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
        saved = ctx.saved_tensors  # read once, because a checkpoint gives them once
        x, tables = (*grads, None, None) if ctx.constants[0] is None else saved[:4], saved[4:]
        # If a gradient arrives at the key alone and there is no norm, the key stands in the place of the query.
        at = [1, 0, 3, 2] if x[0] is None else [0, 1, 2, 3]
        wants = [ctx.needs_input_grad[i] and grads[i % 2] is not None for i in at]
        gradient = _differentiable if torch.is_grad_enabled() else torch.ops.kernel_fusion.triton_qk_norm_rope_bwd
        results = gradient(*(grads[i] for i in at[:2]), *(x[i] for i in at), *tables, *ctx.constants, wants)
        for place, wanted, result in zip(at, wants, results, strict=True):
            if wanted:
                found[place] = result
        return tuple(found)


def _differentiable(*args: Any) -> list[Tensor | None]:
    """The gradients as results of a graph: a rotation the other way, or with a norm those of the definition."""
    dy, dy_key, query, key, query_weight, key_weight, cos, sin, positions, eps, *rest, wants = args
    if eps is None:
        turned = torch.ops.kernel_fusion.qk_norm_rope_reference(
            dy, dy_key, None, None, cos, -sin, positions, None, *rest
        )
        return [*turned, None, None]
    tensors = [query, key, query_weight, key_weight]
    reference = torch.ops.kernel_fusion.qk_norm_rope_reference
    return autograd.differentiable(
        lambda *tensors: reference(*tensors, cos, sin, positions, eps, *rest), [dy, dy_key], tensors, wants
    )


@autograd.verb
def qk_norm_rope(*args: Any) -> tuple[Tensor, Tensor]:
    """Return what `kernel_fusion::qk_norm_rope` does, by the Triton kernels if they take the call."""
    c = Rotary(*args)
    foreign = autograd.needs_definition([*c[:6]], [c.positions])
    # The kernels have no gradients of cos and sin.
    if foreign or autograd.requires_grad(c.cos, c.sin) or not _takes(c):
        return torch.ops.kernel_fusion.qk_norm_rope_reference(*args)  # type: ignore[no-any-return]
    if autograd.requires_grad(*c[:4]):
        return QKNormRope.apply(*args)  # type: ignore[no-untyped-call,no-any-return]
    return torch.ops.kernel_fusion.triton_qk_norm_rope_fwd(*args)  # type: ignore[no-any-return]
