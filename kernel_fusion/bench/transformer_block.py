"""The elementwise part of a pre-norm transformer block, for the suite `memory`.

    h = residual + dropout(x);   n = layer_norm(h);    x = attention(n)
    h = h + dropout(x);          n = layer_norm(h);    x = down(silu(gate(n)) * value(n))

Copies, which keep nothing for backward, replace attention and matrix products. Widths are Llama 3 8B's.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

import kernel_fusion as kf
from kernel_fusion.bench.workloads import DROPOUT_P, Argument, Dropout, Operation

_EPS = 1e-5
# Gate and value together, in hidden sizes.
_UP = 7


def _arguments(shape: tuple[int, ...], dtype: torch.dtype) -> list[Argument]:
    tensors = [Argument(name, shape, dtype) for name in ("x", "residual")]
    parameters = (("weight1", 1.0), ("bias1", 0.5), ("weight2", 1.0), ("bias2", 0.5))
    return tensors + [Argument(name, shape[-1:], dtype, mean, shared=True) for name, mean in parameters]


def _up(n: Tensor) -> tuple[Tensor, Tensor]:
    # An odd width leaves a column over. Split, not slices: backward of each slice would fill a tensor of the whole
    # width.
    gate, value, *_ = n.repeat(1, _UP).split(_UP * n.shape[-1] // 2, -1)
    return gate, value


def _down(m: Tensor, cols: int) -> Tensor:
    return m[:, :cols].clone()


def _pytorch(
    dropout: Dropout, x: Tensor, residual: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor
) -> tuple[Tensor, Tensor]:
    shape = x.shape[-1:]
    h = residual + dropout(x)
    attended = F.layer_norm(h, shape, w1, b1, _EPS).clone()
    h = h + dropout(attended)
    gate, value = _up(F.layer_norm(h, shape, w2, b2, _EPS))
    return _down(F.silu(gate) * value, shape[0]), h


def _fused(
    x: Tensor, residual: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor, p: float, backend: str | None
) -> tuple[Tensor, Tensor]:
    shape = x.shape[-1:]
    n, h = kf.add_layer_norm(x, residual, shape, w1, b1, _EPS, dropout_p=p, backend=backend)
    n, h = kf.add_layer_norm(n.clone(), h, shape, w2, b2, _EPS, dropout_p=p, backend=backend)
    gate, value = _up(n)
    return _down(kf.gated_act(gate, value, "silu", backend=backend), shape[0]), h


BLOCK = Operation("pre-norm block", "block", _arguments, _pytorch, _fused, results=("y", "h"))
BLOCK_WITH_DROPOUT = Operation(
    "pre-norm block, dropout", "block_dropout", _arguments, _pytorch, _fused, results=("y", "h"), dropout_p=DROPOUT_P
)
