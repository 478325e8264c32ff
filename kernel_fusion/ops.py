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
    interop,
    layer_norm,
    mean_abs,
    mul_act,
    sum_squared,
)

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


def elementwise_add_relu(a: Tensor, b: Tensor) -> Tensor:
    r"""ReLU of a sum.

    .. math:: y = \max(a + b, 0)

    Args, returns, raises: as :func:`kernel_fusion.add_act`, which this is, with "relu".

    Example:
        >>> import torch, kernel_fusion as kf
        >>> a, b = torch.randn(2, 4, 8)
        >>> torch.allclose(kf.ops.elementwise_add_relu(a, b), torch.relu(a + b))
        True
    """
    return add_act(a, b, "relu")


def elementwise_mul_tanh(a: Tensor, b: Tensor) -> Tensor:
    r"""Hyperbolic tangent of a product.

    .. math:: y = \tanh(a \cdot b)

    Args, returns, raises: as :func:`kernel_fusion.mul_act`, which this is, with "tanh".

    Example:
        >>> import torch, kernel_fusion as kf
        >>> a, b = torch.randn(2, 4, 8)
        >>> torch.allclose(kf.ops.elementwise_mul_tanh(a, b), torch.tanh(a * b), atol=1e-6)
        True
    """
    return mul_act(a, b, "tanh")


def fused_bias_gelu(input: Tensor, bias: Tensor) -> Tensor:
    r"""GELU, by the error function, of an input and its bias.

    .. math:: y = \mathrm{gelu}(x + b)

    Args, returns, raises: as :func:`kernel_fusion.bias_act`, which this is, with "gelu", for a bias that is there.

    Example:
        >>> import torch, kernel_fusion as kf
        >>> x, b = torch.randn(4, 8), torch.randn(8)
        >>> torch.allclose(kf.ops.fused_bias_gelu(x, b), torch.nn.functional.gelu(x + b), atol=1e-6)
        True
    """
    checks.given("fused_bias_gelu", "bias", bias)
    return bias_act(input, bias, "gelu")


def reduce_sum_squared(input: Tensor, dim: int | Sequence[int] | None = None, keepdim: bool = False) -> Tensor:
    r"""The sum of squares.

    .. math:: y = \sum_i x_i^2

    Args, returns, raises: as :func:`kernel_fusion.sum_squared`, which this is.

    Example:
        >>> import torch, kernel_fusion as kf
        >>> x = torch.randn(4, 8)
        >>> torch.allclose(kf.ops.reduce_sum_squared(x, dim=-1), x.square().sum(-1))
        True
    """
    return sum_squared(input, dim, keepdim)


def reduce_mean_abs(input: Tensor, dim: int | Sequence[int] | None = None, keepdim: bool = False) -> Tensor:
    r"""The mean of absolute values.

    .. math:: y = \frac{1}{n} \sum_i |x_i|

    Args, returns, raises: as :func:`kernel_fusion.mean_abs`, which this is.

    Example:
        >>> import torch, kernel_fusion as kf
        >>> x = torch.randn(4, 8)
        >>> torch.allclose(kf.ops.reduce_mean_abs(x), x.abs().mean())
        True
    """
    return mean_abs(input, dim, keepdim)


def fused_layer_norm_relu(
    input: Tensor,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    r"""ReLU of a layer normalisation.

    .. math:: y = \max(\mathrm{layer\_norm}(x), 0)

    Args, returns, raises: as :func:`kernel_fusion.layer_norm`, which this is, with `activation="relu"`.

    Example:
        >>> import torch, kernel_fusion as kf
        >>> x = torch.randn(4, 16)
        >>> expected = torch.relu(torch.nn.functional.layer_norm(x, (16,)))
        >>> torch.allclose(kf.ops.fused_layer_norm_relu(x, 16), expected, atol=1e-6)
        True
    """
    return layer_norm(input, normalized_shape, weight, bias, eps, activation="relu")


def fused_relu_layer_norm(
    input: Tensor,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    r"""Layer normalisation of a ReLU.

    .. math:: y = \mathrm{layer\_norm}(\max(x, 0))

    Args, returns, raises: as :func:`kernel_fusion.layer_norm`, which this is, with `pre_activation="relu"`.

    Example:
        >>> import torch, kernel_fusion as kf
        >>> x = torch.randn(4, 16)
        >>> expected = torch.nn.functional.layer_norm(torch.relu(x), (16,))
        >>> torch.allclose(kf.ops.fused_relu_layer_norm(x, 16), expected, atol=1e-6)
        True
    """
    return layer_norm(input, normalized_shape, weight, bias, eps, pre_activation="relu")


def fused_gelu_dropout(input: Tensor, p: float = 0.5, training: bool = True) -> Tensor:
    r"""GELU, by the error function, and dropout.

    .. math:: y = \mathrm{dropout}_p(\mathrm{gelu}(x))

    Args, returns, raises: as :func:`kernel_fusion.act_dropout`, which this is, with "gelu".

    Example:
        >>> import torch, kernel_fusion as kf
        >>> x = torch.randn(4, 8)
        >>> y = kf.ops.fused_gelu_dropout(x, 0.1, training=False)
        >>> torch.allclose(y, torch.nn.functional.gelu(x), atol=1e-6)
        True
    """
    return act_dropout(input, "gelu", p, training)


def fused_attention_score(query: Tensor, key: Tensor, scale: float | None = None) -> Tensor:
    r"""Scaled scores of attention, before any mask or softmax.

    .. math:: S = \mathrm{scale} \cdot Q K^T

    Args, returns, raises: as :func:`kernel_fusion.attention_scores`, which this is; query and key have one dtype, as in
    `torch.matmul`.

    Example:
        >>> import torch, kernel_fusion as kf
        >>> q, k = torch.randn(2, 3, 8, 16)
        >>> torch.allclose(kf.ops.fused_attention_score(q, k), q @ k.mT / 4, atol=1e-5)
        True
    """
    return attention_scores(query, key, scale)


interop.keep_from_scripts(globals())
