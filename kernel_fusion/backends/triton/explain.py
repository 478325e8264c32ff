"""The lines of `kernel_fusion.explain` for the Triton backend. They need no Triton, only its plans."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from kernel_fusion.backends.triton import plan
from kernel_fusion.core.spec import Stages, compute_dtype
from kernel_fusion.core.stages import compiled_in, of_verb


def plan_lines(verb: str, arguments: dict[str, Any]) -> tuple[str, ...]:
    """Return the plans of the function `verb` for these arguments, one line for each direction."""
    first: Tensor = next(value for value in arguments.values() if isinstance(value, Tensor))
    device = plan.device_of(first.device)
    wide = compute_dtype(first.dtype) == torch.float64
    if verb.endswith("norm"):
        shape = arguments["normalized_shape"]
        return _norm_lines(shape if isinstance(shape, int) else math.prod(shape), arguments, device)
    if "causal" in arguments:  # the weights of attention
        cols = first.shape[arguments["dim"]] if "dim" in arguments else arguments["key"].shape[-2]
        layouts = plan.row_plan(cols, wide), plan.row_plan(cols, wide, kept=2)
        return f"forward: {_shown(layouts[0], device)}", f"backward: {_shown(layouts[1], device)}"
    if verb in ("rope", "qk_norm_rope"):
        return _rotary_lines(first, arguments, device)
    if verb in ("sum_squared", "mean_abs"):
        return (f"sections of {plan.ROW_SECTION} in a row, of {plan.COLUMN_SECTION} down the columns",)
    return (f"forward, backward: {_shown(plan.pointwise(None), device)}, or rows where operands are broadcast",)


def _shown(layout: plan.Plan, device: plan.DeviceLimits) -> str:
    """The plan with warps of the device's size."""
    return str(replace(layout, warps=device.warps(layout.warps)))


def _rotary_lines(x: Tensor, arguments: dict[str, Any], device: plan.DeviceLimits) -> tuple[str, ...]:
    """The plans of the rotary embedding of `x`."""
    heads = arguments["unsqueeze_dim"]
    key = arguments.get("key")
    counts = x.shape[heads], 0 if key is None else key.shape[heads]
    layout = plan.rotary(arguments["cos"].shape[-1], x.shape[-1], counts, device.warp_size)
    if key is None:
        return (f"forward, backward: {_shown(layout, device)}",)
    tokens = x.numel() // max(1, x.shape[heads] * x.shape[-1])
    programs = device.programs(layout, tokens * layout.tiles * layout.rows)
    shown = _shown(layout, device)
    return f"forward: {shown}", f"backward: {shown}, shared by {programs} programs where weights have gradients"


def _norm_lines(cols: int, arguments: dict[str, Any], device: plan.DeviceLimits) -> tuple[str, ...]:
    """The plans of a norm of rows of `cols` elements."""
    x: Tensor = arguments["input"]
    residual = arguments.get("residual")
    group = arguments.get("group_size")
    cols, groups = (cols, arguments.get("groups", 1)) if group is None else (group, cols // group)
    itemsize = (x if residual is None else residual).dtype.itemsize
    backward = plan.norm_backward(cols, itemsize, Stages(**compiled_in(of_verb(arguments))).any)
    forward = plan.norm_forward(cols, x.dtype.itemsize)
    lines = f"forward: {_shown(forward, device)}", f"backward: {_shown(backward, device)}"
    samples = x.numel() // max(1, cols * groups)
    of_groups = "" if groups == 1 else f" for each of {groups} groups"
    if backward.resident > 0:
        return *lines[:1], f"{lines[1]}, {device.programs(backward, samples, groups)} programs{of_groups}"
    columns = plan.norm_columns(itemsize)
    beside = -(-cols // columns.block)
    programs = device.programs(columns, samples, beside * groups)
    return *lines, f"dweight, dbias: {_shown(columns, device)}, {programs} by {beside} programs{of_groups}"
