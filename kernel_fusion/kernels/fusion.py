"""Norms, dropout and scores. `kernel_fusion.kernels` says what all tensors must be, and what is raised."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from kernel_fusion.functional import act_dropout, attention_scores, layer_norm
from kernel_fusion.functional.named import documented
from kernel_fusion.kernels.demands import admit

_ONE_DEVICE = ", for contiguous floating-point tensors of one device."
_DETACHED = "Returns:\n    Tensor of the input's shape and dtype, detached."


@documented(
    "layer_norm_relu",
    "relu(layer_norm(input))" + _ONE_DEVICE,
    r"""Args:
    input: x, of shape (\*, \*normalized_shape).
    normalized_shape: the sizes of the dimensions to normalise over, or one int for the last dimension alone.
    weight, bias: of shape `normalized_shape`, float64 for float64 input and any other dtype for others; or None.
    eps: added to the variance.

"""
    + _DETACHED,
)
def layer_norm_relu(
    input: Tensor,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float = 1e-5,
) -> Tensor:
    given = {"input": input, "weight": weight, "bias": bias}
    backend, (input, weight, bias) = admit("fusion.layer_norm_relu", ("weight", "bias"), **given)
    return layer_norm(input, normalized_shape, weight, bias, eps, activation="relu", backend=backend)


@documented("relu_layer_norm", "layer_norm(relu(input))" + _ONE_DEVICE, "Args, returns: as :func:`layer_norm_relu`.")
def relu_layer_norm(
    input: Tensor,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float = 1e-5,
) -> Tensor:
    given = {"input": input, "weight": weight, "bias": bias}
    backend, (input, weight, bias) = admit("fusion.relu_layer_norm", ("weight", "bias"), **given)
    return layer_norm(input, normalized_shape, weight, bias, eps, pre_activation="relu", backend=backend)


@documented(
    "gelu_dropout",
    "dropout(gelu(input)), for a contiguous floating-point tensor.",
    f"""Args:
    input: x.
    p: probability of an element to be zeroed, rounded to a multiple of 2^-32; the seed comes from the device's
        generator.
    training: without it no dropout is applied.

{_DETACHED}

Raises:
    ValueError: `p` is no probability; else as `kernel_fusion.kernels` says.""",
)
def gelu_dropout(input: Tensor, p: float, training: bool = True) -> Tensor:
    backend, (input,) = admit("fusion.gelu_dropout", input=input)
    return act_dropout(input, "gelu", p, training, backend=backend)


@documented(
    "attention_score",
    "scale * query @ key^T, for contiguous floating-point tensors of one device and dtype: the vendor's product.",
    r"""Args:
    query: Q, of shape (\*, L, D).
    key: K, of shape (\*, S, D), with the same leading dimensions: broadcasting them would be a copy.
    scale: a number, folded into the product.

Returns:
    Tensor of shape (\*, L, S) and the dtype of both, detached.

Raises:
    TypeError: query and key of different dtypes, or no `scale`; else as `kernel_fusion.kernels` says.
    ValueError: shapes that don't fit; else as `kernel_fusion.kernels` says.""",
)
def attention_score(query: Tensor, key: Tensor, scale: float) -> Tensor:
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
