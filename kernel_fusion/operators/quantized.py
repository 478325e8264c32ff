"""Quantised results where no kernel serves them: compositions of the verbs' operators."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kernel_fusion.backends import eager
from kernel_fusion.operators import schemas

Codes = tuple[torch.dtype, Tensor | None, int]


def row_norm(
    input: Tensor,
    residual: Tensor | None,
    dtype: torch.dtype,
    scale: Tensor | None,
    block: int,
    keeps: bool,
    *norm: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """A norm with its stages, and then its codes."""
    y, h = schemas.overload("staged_row_norm")(input, residual, *norm)
    return *_quantized(y, (dtype, scale, block), keeps), h


def gate(
    gate: Tensor, value: Tensor, activation: str, dtype: torch.dtype, scale: Tensor | None, block: int, keeps: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """A gated activation, and then its codes."""
    y = schemas.overload("pointwise")(gate, value, "gate", activation, 1.0, 0.0, None)
    return _quantized(y, (dtype, scale, block), keeps)


def _quantized(y: Tensor, codes: Codes, keeps: bool) -> tuple[Tensor, Tensor, Tensor]:
    values, scale = schemas.overload("quantize")(y, *codes)
    return values, scale, y if keeps else y.new_empty(0)


DEFINITIONS: dict[str, Callable[..., Any]] = {
    "quantize": eager.quantize,
    "quantized_row_norm": row_norm,
    "quantized_gate": gate,
}
