"""Quantised results: the operators that launch the kernels. They have no gradients.

`scale` is a given scale for the whole tensor, or None for scales that the kernel finds. `block` is the number of
columns that share such a scale, or 0 if a row shares one. `keeps` says that the result before quantisation is returned,
too.
"""

from __future__ import annotations

from typing import Any, NamedTuple, get_type_hints

import torch
from torch import Tensor

from kernel_fusion.backends.triton import plan
from kernel_fusion.backends.triton.kernels.constants import Quantization
from kernel_fusion.backends.triton.kernels.quantize import quantize_rows
from kernel_fusion.backends.triton.launch import launch, operator
from kernel_fusion.backends.triton.layout import rows_of
from kernel_fusion.backends.triton.row_norm import forward, forward_plan, launch_forward, require_forward
from kernel_fusion.core import checks
from kernel_fusion.core.activations import CODES as ACTIVATIONS
from kernel_fusion.core.arguments import floating, require
from kernel_fusion.core.quantize import BLOCK, LARGEST, empty_scales
from kernel_fusion.core.stages import NormCall
from kernel_fusion.core.symbols import alike, known

_named: Any = NamedTuple  # type checkers cannot follow derived names


class _Norm(_named("_Norm", [*get_type_hints(NormCall).items()][2:])):  # type: ignore[misc]
    """The arguments of a norm behind the input and the residual."""


@operator("quantize")
def quantize(input: Tensor, dtype: torch.dtype, scale: Tensor | None, block: int) -> tuple[Tensor, Tensor]:
    """Return the codes and the scales of a tensor; `dtype` is that of the codes."""
    require("triton_quantize", [input, scale], floating(input) and _fits(input, dtype, scale, block))
    if input.dim() == 0:
        values, scales = quantize(input[None], dtype, scale, block)
        return values.reshape(()), scales
    values, scales, _ = _launch([input], {}, (dtype, scale, block, False))
    return values, scales


@operator("quantized_gate")
def quantized_gate(
    gate: Tensor, value: Tensor, activation: str, dtype: torch.dtype, scale: Tensor | None, block: int, keeps: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the codes and the scales of activation(gate) * value, and this product, which is empty unless kept."""
    same_kind = alike(gate.shape, value.shape) and gate.dtype == value.dtype and gate.dim() > 0
    takes = same_kind and activation in ACTIVATIONS and floating(gate) and _fits(gate, dtype, scale, block)
    require("triton_quantized_gate", [gate, value, scale], takes)
    return _launch([gate, value], {"gated": True, "activation": activation}, (dtype, scale, block, keeps))


@operator("quantized_row_norm")
def quantized_row_norm(
    input: Tensor,
    residual: Tensor | None,
    dtype: torch.dtype,
    scale: Tensor | None,
    block: int,
    keeps: bool,
    norm: _Norm,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the codes and the scales of a norm's y, and y and h.

    y is empty unless it is kept, and h is empty without a residual.
    """
    call = NormCall(input, residual, *norm)
    checks.staged_row_norm(call)
    fits = _fits(input, dtype, scale, block) and (call.num_dims == 1 or scale is not None)
    require("triton_quantized_row_norm", [input, scale], fits)
    if known(input.numel() == 0):
        y, h = torch.ops.kernel_fusion.staged_row_norm_reference(*call.arguments)
        return *quantize(y, dtype, scale, block), y if keeps else y.new_empty(0), h
    require_forward("triton_quantized_row_norm", call)
    cols = int(input.shape[-1])
    scale_cols = block if scale is None and cols > block else 0  # a row of one block has one scale
    layout = forward_plan(call)
    if layout.looped or (scale_cols and layout.block % scale_cols):
        y, h, _ = forward(False, *call.arguments)
        return *quantize(y, dtype, scale, block), y if keeps else y.new_empty(0), h
    values, scales = _empty(input, dtype, scale, block)
    y = torch.empty(input.shape if keeps else (0,), dtype=call.out_dtype, device=input.device)
    h = input.new_empty(0) if residual is None else input.new_empty(input.shape, dtype=residual.dtype)
    results = y, h, scales if scale is None else scale, values.view(torch.uint8)
    codes = _codes(input, dtype, scale, scale_cols)
    launch_forward(call, results, stats=False, keeps=keeps, **codes)
    return values, scales, y, h


def _codes(input: Tensor, dtype: torch.dtype, scale: Tensor | None, scale_cols: int) -> dict[str, Any]:
    """The constants of `Codes` for codes of this type, of which `scale_cols` columns share a scale."""
    rounds = dtype.is_floating_point and plan.device_of(input.device).rounds_float8
    name = str(dtype).removeprefix("torch.")
    return {
        "codes": name,
        "largest": LARGEST[dtype],
        "scale_cols": scale_cols,
        "given": scale is not None,
        "rounds": rounds,
    }


def _empty(like: Tensor, dtype: torch.dtype, scale: Tensor | None, block: int) -> tuple[Tensor, Tensor]:
    """Memory for codes of a tensor, and for the scales that a kernel finds."""
    values = torch.empty(like.shape, dtype=dtype, device=like.device)
    return values, empty_scales(like, block) if scale is None else like.new_empty(0, dtype=torch.float32)


def _fits(input: Tensor, dtype: torch.dtype, scale: Tensor | None, block: int) -> bool:
    """Whether the kernels can make these codes of the input."""
    if scale is not None and (scale.dtype != torch.float32 or scale.numel() != 1):
        return False
    return dtype in LARGEST and block in (0, BLOCK) and (input.dim() > 0 or scale is not None)


def _launch(
    tensors: list[Tensor], source: dict[str, Any], codes: tuple[torch.dtype, Tensor | None, int, bool]
) -> tuple[Tensor, Tensor, Tensor]:
    """Launch the kernel for one or two operands, and return the codes, the scales and the result before quantisation.

    Args:
        tensors: The operands, of one shape.
        source: The constants that say what is computed of them.
        codes: The type of the codes, the given scale, the block that shares a scale, and whether the result is kept.
    """
    dtype, scale, block, keeps = codes
    first = tensors[0]
    values, scales = _empty(first, dtype, scale, block)
    y = first.new_empty(first.shape if keeps else 0)
    if known(first.numel() == 0):
        return values, scales.fill_(1.0), y
    tensors, rows = rows_of(tensors, 1)
    cols = first.shape[-1]
    scale_cols = block if scale is None else 0
    layout = plan.quantize(int(cols), first.dtype.itemsize, scale_cols > 0 or scale is not None)
    size, numbers = rows.in_units(cols)
    source |= {"keeps": keeps, "wide": first.dtype == torch.float64, "exact": cols % layout.block == 0}
    source |= {"unit": size, "flat": rows.simple} | _codes(first, dtype, scale, scale_cols)
    args = tensors[0], tensors[-1], scale, y, values.view(torch.uint8), scales, *numbers
    grid, constants = (-(-rows.count // layout.rows),), Quantization.of(layout, **source)
    launch(quantize_rows, grid, *args, constants=constants, warps=layout.warps)
    return values, scales, y
