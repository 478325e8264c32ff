"""GroupNorm as a module."""

from typing import Any

import torch
from torch import Tensor, nn

from kernel_fusion.core import checks
from kernel_fusion.functional import group_norm
from kernel_fusion.nn.stages import Fused


class FusedGroupNorm(Fused, nn.GroupNorm):
    r"""Drop-in for `torch.nn.GroupNorm`: same constructor, same state dict, with an activation after it.

    .. math::
        y = \mathrm{activation}\left(\frac{x - \mathrm{E}[x]}{\sqrt{\mathrm{Var}[x] + \epsilon}} \cdot w + b\right)

    Args:
        num_groups, num_channels, eps, affine, bias, device, dtype: as in `torch.nn.GroupNorm`; `bias` is an argument of
            PyTorch 2.12 and newer.
        activation: applied to the result: one of `kernel_fusion.ACTIVATIONS`, or None.

    Shape: input and output (N, num_channels, \*). `forward` also takes `add`, `scale` and `shift`, of shape
    (N, num_channels); see :func:`kernel_fusion.group_norm`, also for dtypes, memory formats and accumulation.

    Raises:
        ValueError: an unknown activation, or `num_groups` that do not divide `num_channels`.

    Example:
        >>> import torch, kernel_fusion as kf
        >>> norm = kf.FusedGroupNorm(4, 64, activation="silu")
        >>> norm(torch.randn(2, 64, 8, 8)).shape
        torch.Size([2, 64, 8, 8])
    """

    # A `torch.nn.GroupNorm` that became one of these by `__class__` has this value, too.
    activation: str | None = None

    def __init__(
        self,
        num_groups: int,
        num_channels: int,
        eps: float = 1e-5,
        affine: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        activation: str | None = None,
        **others: Any,
    ) -> None:
        checks.activation("FusedGroupNorm", "activation", activation)
        super().__init__(num_groups, num_channels, eps, affine, device, dtype, **others)
        self.activation = activation

    def forward(
        self, input: Tensor, add: Tensor | None = None, scale: Tensor | None = None, shift: Tensor | None = None
    ) -> Tensor:
        """Normalise `input`; under CUDA autocast the result is float32, as with `torch.nn.GroupNorm`."""
        return group_norm(
            input,
            self.num_groups,
            self.weight,
            self.bias,
            self.eps,
            add=add,
            scale=scale,
            shift=shift,
            activation=self.activation,
        )

    def extra_repr(self) -> str:
        """PyTorch's text, and the activation."""
        return self._repr(super().extra_repr(), options=("activation",))
