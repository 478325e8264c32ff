"""The modulated LayerNorm of diffusion transformers: `forward(input, scale, shift)`."""

from typing import Any

import torch
from torch import Tensor, nn

from kernel_fusion.core.quantize import Quantize
from kernel_fusion.functional import modulated_layer_norm
from kernel_fusion.nn.stages import Shape, Stages, shape_of


class FusedModulatedLayerNorm(Stages, nn.LayerNorm):
    r"""Layer normalisation, scaled and shifted by other numbers for every sample or row.

    .. math:: y = n(x) \cdot (1 + s) + t, \qquad n(x) = \frac{x - \mathrm{E}[x]}{\sqrt{\mathrm{Var}[x] + \epsilon}}

    and with a weight and a bias, n(x) · (offset + w) + b in place of n(x).

    Args:
        normalized_shape, eps, bias, device, dtype: as in `torch.nn.LayerNorm`; DiT has 1e-6 for eps.
        elementwise_affine: as there, but False: scale and shift take the place of the parameters.
        hidden_size: another name of `normalized_shape`.
        pre_activation, activation, weight_offset, out_dtype: as in :class:`FusedLayerNorm`.

    Shape: input and output (\*, \*normalized_shape); scale and shift broadcast to that over the leading dimensions. See
    :func:`kernel_fusion.modulated_layer_norm` for dtypes and accumulation.

    Raises:
        ValueError: an unknown activation, or `weight_offset` without a weight.

    Source: Peebles, Xie: Scalable Diffusion Models with Transformers, arXiv:2212.09748.

    Example:
        >>> import torch, kernel_fusion as kf
        >>> norm = kf.FusedModulatedLayerNorm(64, eps=1e-6)
        >>> shift, scale = torch.randn(2, 1, 128).chunk(2, -1)
        >>> norm(torch.randn(2, 8, 64), scale, shift).shape
        torch.Size([2, 8, 64])
    """

    def __init__(
        self,
        normalized_shape: Shape | None = None,
        eps: float = 1e-5,
        elementwise_affine: bool = False,
        bias: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        hidden_size: Shape | None = None,
        pre_activation: str | None = None,
        activation: str | None = None,
        weight_offset: float = 0.0,
        out_dtype: torch.dtype | Quantize | None = None,
    ) -> None:
        shape = shape_of("FusedModulatedLayerNorm", normalized_shape, hidden_size)
        extras = weight_offset, pre_activation, activation, out_dtype, "once"
        super().__init__(shape, eps, elementwise_affine, bias, device, dtype, extras=extras)

    def forward(self, input: Tensor, scale: Tensor, shift: Tensor | None = None) -> Tensor:  # type: ignore[override]
        """Normalise `input`, scale and shift it; under CUDA autocast the dtype is that of PyTorch's norm."""
        parameters = self.weight, self.bias, self.eps
        return modulated_layer_norm(
            input,
            self.normalized_shape,
            scale,
            shift,
            *parameters,
            pre_activation=self.pre_activation,
            activation=self.activation,
            weight_offset=self.weight_offset,
            out_dtype=self.out_dtype,
        )
