"""Codes and scales of a last dimension, and their gradient."""

from __future__ import annotations

import torch
from torch import Tensor

from kernel_fusion.core.quantize import LARGEST, num_scales


def quantize(input: Tensor, dtype: torch.dtype, scale: Tensor | None, block: int) -> tuple[Tensor, Tensor]:
    """Contiguous codes, and scales of rows or blocks of columns; empty if `scale` is given.

    NaN has the code NaN, or 0 if codes are integers; its row or block has the scale NaN, an infinity's infinity.
    """
    v = input.to(torch.float32)
    if scale is not None:
        return _codes(v, scale.reshape(()), dtype).contiguous(), v.new_empty(0)
    cols = input.shape[-1]
    blocks = num_scales(cols, block)
    # A block may be longer than a row, which is then one block: padding to any number would exhaust the memory.
    width = torch.sym_min(block, torch.sym_max(cols, 1)) if block else max(cols, 1)
    v = torch.nn.functional.pad(v, (0, blocks * width - cols)).unflatten(-1, (blocks, width))
    s = _scales(v.abs().amax(-1), dtype)
    codes = _codes(v, s[..., None], dtype).flatten(-2)[..., :cols]
    return codes.contiguous(), _by_columns(s) if block else s


def _by_columns(s: Tensor) -> Tensor:
    return s.movedim(-1, 0).clone(memory_format=torch.contiguous_format).movedim(0, -1)


def _scales(amax: Tensor, dtype: torch.dtype) -> Tensor:
    # PyTorch would multiply by a number's reciprocal on GPUs.
    s = amax / torch.full_like(amax, LARGEST[dtype])
    return torch.where(s == 0.0, 1.0, s)


def _codes(v: Tensor, s: Tensor, dtype: torch.dtype) -> Tensor:
    clamped = (v / s).clamp(-LARGEST[dtype], LARGEST[dtype])
    if dtype == torch.int8:
        clamped = clamped.round().nan_to_num(0.0)
    return clamped.to(dtype)
