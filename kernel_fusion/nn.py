"""Modules: drop-ins for `torch.nn.LayerNorm` and `torch.nn.RMSNorm`, as subclasses of them.

So the constructor, the state dict, `extra_repr`, `isinstance` checks and initialisation are PyTorch's own; only
`forward` is ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from kernel_fusion.functional import layer_norm, rms_norm

_Shape = int | Sequence[int] | torch.Size


class FusedLayerNorm(nn.LayerNorm):
    r"""Drop-in for `torch.nn.LayerNorm`: same constructor, same state dict, fused kernels, forward and backward.

    .. math:: y = \frac{x - \mathrm{E}[x]}{\sqrt{\mathrm{Var}[x] + \epsilon}} \cdot (\mathrm{offset} + w) + b

    Args:
        normalized_shape: the sizes of the last dimensions to normalise over, or one int. `hidden_size=` is another
            name for it.
        eps, elementwise_affine, bias, device, dtype: as in `torch.nn.LayerNorm`.
        weight_offset: added to the weight in the compute type; the weight is then initialised to 1 - offset, so that
            a new module is the plain normalisation.

    Shape: input and output (\*, \*normalized_shape). See :func:`kernel_fusion.layer_norm` for dtypes and accumulation.

    Example:
        >>> import torch, kernel_fusion as kf
        >>> norm = kf.FusedLayerNorm(hidden_size=64)
        >>> norm(torch.randn(2, 8, 64)).shape
        torch.Size([2, 8, 64])
    """

    def __init__(
        self,
        normalized_shape: _Shape | None = None,
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        hidden_size: _Shape | None = None,
        weight_offset: float = 0.0,
    ) -> None:
        self.weight_offset = _checked_offset("FusedLayerNorm", weight_offset, elementwise_affine)
        shape = _shape("FusedLayerNorm", normalized_shape, hidden_size)
        super().__init__(shape, eps, elementwise_affine, bias, device, dtype)
        _keep_out_of_fast_paths(self)

    def reset_parameters(self) -> None:
        """Initialise to the plain normalisation: weight 1 - weight_offset, bias 0."""
        super().reset_parameters()
        _subtract_offset(self.weight, self.weight_offset)

    def forward(self, input: Tensor) -> Tensor:
        """Normalise `input`; under CUDA autocast the result is float32, as with `torch.nn.LayerNorm`."""
        return layer_norm(
            input, self.normalized_shape, self.weight, self.bias, self.eps, weight_offset=self.weight_offset
        )

    def extra_repr(self) -> str:
        """PyTorch's text, and the extras that are set."""
        return super().extra_repr() + _offset_repr(self.weight_offset)


class FusedRMSNorm(nn.RMSNorm):
    r"""Drop-in for `torch.nn.RMSNorm`: same constructor, same state dict, fused kernels, forward and backward.

    .. math:: y = \frac{x}{\sqrt{\mathrm{E}[x^2] + \epsilon}} \cdot (\mathrm{offset} + w)

    Args:
        normalized_shape: the sizes of the last dimensions to normalise over, or one int. `hidden_size=` is another
            name for it.
        eps, elementwise_affine, device, dtype: as in `torch.nn.RMSNorm`.
        weight_offset: as in :class:`FusedLayerNorm`.

    Shape: input and output (\*, \*normalized_shape). See :func:`kernel_fusion.rms_norm` for dtypes and accumulation.

    Example:
        >>> import torch, kernel_fusion as kf
        >>> kf.FusedRMSNorm(64)(torch.randn(2, 8, 64)).shape
        torch.Size([2, 8, 64])
    """

    def __init__(
        self,
        normalized_shape: _Shape | None = None,
        eps: float | None = None,
        elementwise_affine: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        hidden_size: _Shape | None = None,
        weight_offset: float = 0.0,
    ) -> None:
        self.weight_offset = _checked_offset("FusedRMSNorm", weight_offset, elementwise_affine)
        shape = _shape("FusedRMSNorm", normalized_shape, hidden_size)
        super().__init__(shape, eps, elementwise_affine, device, dtype)

    def reset_parameters(self) -> None:
        """Initialise to the plain normalisation: weight 1 - weight_offset."""
        super().reset_parameters()
        _subtract_offset(self.weight, self.weight_offset)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise `x`; under CUDA autocast the result is float32."""
        return rms_norm(x, self.normalized_shape, self.weight, self.eps, weight_offset=self.weight_offset)

    def extra_repr(self) -> str:
        """PyTorch's text, and the extras that are set."""
        return super().extra_repr() + _offset_repr(self.weight_offset)


def _shape(module: str, normalized_shape: _Shape | None, hidden_size: _Shape | None) -> _Shape:
    if (normalized_shape is None) == (hidden_size is None):
        raise TypeError(f"{module}() takes exactly one of `normalized_shape` and its other name `hidden_size`")
    return hidden_size if normalized_shape is None else normalized_shape  # type: ignore[return-value]


def _checked_offset(module: str, weight_offset: float, elementwise_affine: bool) -> float:
    if weight_offset and not elementwise_affine:
        raise ValueError(f"{module}(): `weight_offset` needs a `weight`, got {weight_offset} without affine")
    return weight_offset


def _keep_out_of_fast_paths(module: FusedLayerNorm) -> None:
    """Have `nn.TransformerEncoderLayer` call a module with extras, instead of reading its weight and bias in inference.

    Its fused inference path knows the plain LayerNorm alone, and steps aside for modules that have hooks.
    """
    if module.weight_offset:
        module.register_forward_pre_hook(_no_change)


def _no_change(module: nn.Module, args: Any) -> None:
    """A hook that changes nothing."""


def _subtract_offset(weight: Tensor | None, offset: float) -> None:
    if weight is not None and offset:
        with torch.no_grad():
            weight.sub_(offset)


def _offset_repr(offset: float) -> str:
    return f", weight_offset={offset}" if offset else ""
