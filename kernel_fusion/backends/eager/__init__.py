"""The definition of every operation in plain PyTorch.

It is also differentiated, so it composes differentiable operations.
"""

from __future__ import annotations

from kernel_fusion.backends.eager import attention
from kernel_fusion.backends.eager.attention import *  # noqa: F403 - its `__all__` says what
from kernel_fusion.backends.eager.dropout import draw_seed, dropout
from kernel_fusion.backends.eager.group_norm import group_norm
from kernel_fusion.backends.eager.losses import logits, token_logprob
from kernel_fusion.backends.eager.pointwise import pointwise
from kernel_fusion.backends.eager.quantize import quantize
from kernel_fusion.backends.eager.reduce import reduce
from kernel_fusion.backends.eager.rotary import qk_norm_rope
from kernel_fusion.backends.eager.row_norm import after_norm, before_norm, pytorch_row_norm, row_norm, staged_row_norm

__all__ = [
    "after_norm",
    "before_norm",
    "draw_seed",
    "dropout",
    "group_norm",
    "logits",
    "pointwise",
    "pytorch_row_norm",
    "qk_norm_rope",
    "quantize",
    "reduce",
    "row_norm",
    "staged_row_norm",
    "token_logprob",
]
__all__ += attention.__all__
