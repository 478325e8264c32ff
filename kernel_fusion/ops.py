"""Fused operations under fixed names: each a verb of `kernel_fusion` with its activation chosen.

The friendly layer: any layout, type promotion as in PyTorch, arrays of other libraries, autograd, and a fallback where
no kernel of ours can run. `kernel_fusion.kernels` is the direct one.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from kernel_fusion.core import checks
from kernel_fusion.functional import (
    act_dropout,
    add_act,
    attention_scores,
    bias_act,
    layer_norm,
    mean_abs,
    mul_act,
    sum_squared,
)
from kernel_fusion.functional.named import documented

__all__ = [
    "elementwise_add_relu",
    "elementwise_mul_tanh",
    "fused_attention_score",
    "fused_bias_gelu",
    "fused_gelu_dropout",
    "fused_layer_norm_relu",
    "fused_relu_layer_norm",
    "reduce_mean_abs",
    "reduce_sum_squared",
]

_AS = "Args, returns, raises: as :func:`kernel_fusion.{}`, which this is"


@documented("add_relu", "ReLU of a sum.", _AS.format("add_act") + ', with "relu".')
def elementwise_add_relu(a: Tensor, b: Tensor) -> Tensor:
    return add_act(a, b, "relu")


@documented("mul_tanh", "Hyperbolic tangent of a product.", _AS.format("mul_act") + ', with "tanh".')
def elementwise_mul_tanh(a: Tensor, b: Tensor) -> Tensor:
    return mul_act(a, b, "tanh")


@documented(
    "bias_gelu",
    "GELU, by the error function, of an input and its bias.",
    _AS.format("bias_act") + ', with "gelu", for a bias that is there.',
)
def fused_bias_gelu(input: Tensor, bias: Tensor) -> Tensor:
    checks.given("fused_bias_gelu", "bias", bias)
    return bias_act(input, bias, "gelu")


@documented("sum_squared", "The sum of squares.", _AS.format("sum_squared") + ".")
def reduce_sum_squared(input: Tensor, dim: int | Sequence[int] | None = None, keepdim: bool = False) -> Tensor:
    return sum_squared(input, dim, keepdim)


@documented("mean_abs", "The mean of absolute values.", _AS.format("mean_abs") + ".")
def reduce_mean_abs(input: Tensor, dim: int | Sequence[int] | None = None, keepdim: bool = False) -> Tensor:
    return mean_abs(input, dim, keepdim)


@documented(
    "layer_norm_relu", "ReLU of a layer normalisation.", _AS.format("layer_norm") + ', with `activation="relu"`.'
)
def fused_layer_norm_relu(
    input: Tensor,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    return layer_norm(input, normalized_shape, weight, bias, eps, activation="relu")


@documented(
    "relu_layer_norm", "Layer normalisation of a ReLU.", _AS.format("layer_norm") + ', with `pre_activation="relu"`.'
)
def fused_relu_layer_norm(
    input: Tensor,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    return layer_norm(input, normalized_shape, weight, bias, eps, pre_activation="relu")


@documented("gelu_dropout", "GELU, by the error function, and dropout.", _AS.format("act_dropout") + ', with "gelu".')
def fused_gelu_dropout(input: Tensor, p: float = 0.5, training: bool = True) -> Tensor:
    return act_dropout(input, "gelu", p, training)


@documented(
    "attention_score",
    "Scaled scores of attention, before any mask or normalisation.",
    _AS.format("attention_scores") + "; query and key have one dtype, as in\n`torch.matmul`.",
)
def fused_attention_score(query: Tensor, key: Tensor, scale: float | None = None) -> Tensor:
    return attention_scores(query, key, scale)
