"""Norms, dropout and scores. `kernel_fusion.kernels` says what all tensors must be, and what is raised."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from kernel_fusion.functional import act_dropout, attention_scores, layer_norm
from kernel_fusion.kernels.demands import admit


def layer_norm_relu(
    input: Tensor,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float = 1e-5,
) -> Tensor:
    r"""relu(layer_norm(input)), for contiguous floating-point tensors of one device.

    .. math:: y = \max\left(\frac{x - \mathrm{E}[x]}{\sqrt{\mathrm{Var}[x] + \epsilon}} \cdot w + b, 0\right)

    Args:
        input: x, of shape (\*, \*normalized_shape).
        normalized_shape: the sizes of the dimensions to normalise over, or one int for the last dimension alone.
        weight, bias: of shape `normalized_shape`, float64 for float64 input and any other dtype for others; or None.
        eps: added to the variance.

    Returns:
        Tensor of the input's shape and dtype, detached.

    Example:
        >>> import torch, kernel_fusion as kf
        >>> x, w, b = torch.randn(4, 16), torch.ones(16), torch.zeros(16)
        >>> expected = torch.relu(torch.nn.functional.layer_norm(x, (16,), w, b))
        >>> torch.allclose(kf.kernels.fusion.layer_norm_relu(x, 16, w, b), expected, atol=1e-6)
        True
    """
    given = {"input": input, "weight": weight, "bias": bias}
    backend, (input, weight, bias) = admit("fusion.layer_norm_relu", ("weight", "bias"), **given)
    return layer_norm(input, normalized_shape, weight, bias, eps, activation="relu", backend=backend)


def relu_layer_norm(
    input: Tensor,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float = 1e-5,
) -> Tensor:
    r"""layer_norm(relu(input)), for contiguous floating-point tensors of one device.

    .. math:: y = \frac{u - \mathrm{E}[u]}{\sqrt{\mathrm{Var}[u] + \epsilon}} \cdot w + b, \qquad u = \max(x, 0)

    Args, returns: as :func:`layer_norm_relu`.

    Example:
        >>> import torch, kernel_fusion as kf
        >>> x, w, b = torch.randn(4, 16), torch.ones(16), torch.zeros(16)
        >>> expected = torch.nn.functional.layer_norm(torch.relu(x), (16,), w, b)
        >>> torch.allclose(kf.kernels.fusion.relu_layer_norm(x, 16, w, b), expected, atol=1e-6)
        True
    """
    given = {"input": input, "weight": weight, "bias": bias}
    backend, (input, weight, bias) = admit("fusion.relu_layer_norm", ("weight", "bias"), **given)
    return layer_norm(input, normalized_shape, weight, bias, eps, pre_activation="relu", backend=backend)


def gelu_dropout(input: Tensor, p: float, training: bool = True) -> Tensor:
    r"""dropout(gelu(input)), for a contiguous floating-point tensor.

    .. math:: y = \mathrm{dropout}_p(\mathrm{gelu}(x))

    Args:
        input: x.
        p: probability of an element to be zeroed, rounded to a multiple of 2^-32; the seed comes from the device's
            generator.
        training: without it no dropout is applied.

    Returns:
        Tensor of the input's shape and dtype, detached.

    Raises:
        ValueError: `p` is no probability; else as `kernel_fusion.kernels` says.

    Example:
        >>> import torch, kernel_fusion as kf
        >>> x = torch.randn(4, 8)
        >>> y = kf.kernels.fusion.gelu_dropout(x, 0.1, training=False)
        >>> torch.allclose(y, torch.nn.functional.gelu(x), atol=1e-6)
        True
    """
    backend, (input,) = admit("fusion.gelu_dropout", input=input)
    return act_dropout(input, "gelu", p, training, backend=backend)


def attention_score(query: Tensor, key: Tensor, scale: float) -> Tensor:
    r"""scale * query @ key^T, for contiguous floating-point tensors of one device and dtype: the vendor's product.

    .. math:: S = \mathrm{scale} \cdot Q K^T

    Args:
        query: Q, of shape (\*, L, D).
        key: K, of shape (\*, S, D), with the same leading dimensions: broadcasting them would be a copy.
        scale: a number, folded into the product.

    Returns:
        Tensor of shape (\*, L, S) and the dtype of both, detached.

    Raises:
        TypeError: query and key of different dtypes, or no `scale`; else as `kernel_fusion.kernels` says.
        ValueError: shapes that don't fit; else as `kernel_fusion.kernels` says.

    Example:
        >>> import torch, kernel_fusion as kf
        >>> q, k = torch.randn(2, 3, 8, 16)
        >>> torch.allclose(kf.kernels.fusion.attention_score(q, k, 0.25), q @ k.mT / 4, atol=1e-5)
        True
    """
    name = "fusion.attention_score"
    backend, (query, key) = admit(name, query=query, key=key)
    if query.dtype != key.dtype:
        raise TypeError(f"`kernels.{name}`: `key` must be of the dtype of `query`, {query.dtype}, got {key.dtype}")
    if not isinstance(scale, (int, float)):
        raise TypeError(f"`kernels.{name}`: `scale` must be a number, got {scale!r}")
    if query.dim() < 2 or query.shape[:-2] != key.shape[:-2] or query.shape[-1:] != key.shape[-1:]:
        raise ValueError(
            f"`kernels.{name}`: `query` and `key` must have shapes (*, L, D) and (*, S, D), got {tuple(query.shape)} "
            f"and {tuple(key.shape)}"
        )
    return attention_scores(query, key, scale, backend=backend)
