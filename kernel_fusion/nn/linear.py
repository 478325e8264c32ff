"""A linear layer whose bias and activation are one pass over the product."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kernel_fusion.core import checks
from kernel_fusion.functional import bias_act


class FusedLinearAct(nn.Module):
    r"""A linear layer and its activation: the product without bias, then bias, activation and dropout in one pass.

    .. math:: y = \mathrm{dropout}(\mathrm{activation}(x W^T + b))

    It is no `torch.nn.Linear`, although parameters, state dict and initialisation are the same: what replaces or wraps
    linear layers, for adapters or quantisation, would leave the activation out or apply it too early.

    Args:
        in_features, out_features, bias, device, dtype: as in `torch.nn.Linear`.
        activation: one of `kernel_fusion.ACTIVATIONS`, or None.
        dropout: probability of an element to be zeroed, in training mode; in evaluation mode there is no dropout.

    Shape: input (\*, in_features), output (\*, out_features). The product is the vendor library's, rounded to its dtype
    before the bias is added; under autocast that is the dtype of autocast.

    Attributes:
        weight: W, of shape (out_features, in_features).
        bias: b, of shape (out_features,), or None.

    Raises:
        ValueError: an unknown activation, or `dropout` is no probability.

    Example:
        >>> import torch, kernel_fusion as kf
        >>> linear = torch.nn.Linear(16, 64)
        >>> module = kf.FusedLinearAct(16, 64, activation="gelu")
        >>> module.load_state_dict(linear.state_dict())
        <All keys matched successfully>
        >>> x = torch.randn(2, 8, 16)
        >>> torch.allclose(module(x), torch.nn.functional.gelu(linear(x)), atol=1e-6)
        True
    """

    bias: nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        activation: str | None,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        checks.activation("FusedLinearAct", "activation", activation)
        checks.dropout_p("FusedLinearAct", "dropout", dropout)
        self.in_features = in_features
        self.out_features = out_features
        self.activation = activation
        self.dropout = dropout
        self.weight = nn.Parameter(torch.empty(out_features, in_features, device=device, dtype=dtype))
        parameter = nn.Parameter(torch.empty(out_features, device=device, dtype=dtype)) if bias else None
        self.register_parameter("bias", parameter)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise as `torch.nn.Linear` does."""
        nn.Linear.reset_parameters(self)  # type: ignore[arg-type]  # which reads weight and bias alone

    def forward(self, input: Tensor) -> Tensor:
        """Multiply, then apply bias, activation and, in training mode, dropout."""
        y = F.linear(input, self.weight)
        bias: Tensor | None = self.bias
        if bias is not None and isinstance(y, Tensor) and torch.is_autocast_enabled(y.device.type):
            bias = bias.to(y.dtype)  # as the bias of a linear layer; else the result would have the bias's dtype
        return bias_act(y, bias, self.activation, dropout_p=self.dropout, training=self.training)

    def extra_repr(self) -> str:
        """The arguments of the constructor."""
        dropout = f", dropout={self.dropout}" if self.dropout else ""
        sizes = f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"
        return f"{sizes}, activation={self.activation!r}{dropout}"
