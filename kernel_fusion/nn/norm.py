"""The norms: subclasses of `torch.nn.LayerNorm` and `torch.nn.RMSNorm`.

So the constructor, the state dict, `extra_repr`, `isinstance` checks and initialisation are PyTorch's own; only
`forward` is ours, and the keyword-only extras, which `stages.Stages` holds.
"""

from typing import Any

import torch
from torch import Tensor, nn

from kernel_fusion.core.quantize import Quantize
from kernel_fusion.functional import NormOutput, add_layer_norm, add_rms_norm, layer_norm, rms_norm
from kernel_fusion.nn.stages import AddStages, Shape, Stages, shape_of


class FusedLayerNorm(Stages, nn.LayerNorm):
    r"""Drop-in for `torch.nn.LayerNorm`: same constructor, same state dict, fused kernels, forward and backward.

    .. math::
        y = \mathrm{activation}\left(\frac{u - \mathrm{E}[u]}{\sqrt{\mathrm{Var}[u] + \epsilon}}
        \cdot (\mathrm{offset} + w) + b\right), \qquad u = \mathrm{pre\_activation}(x)

    Args:
        normalized_shape: the sizes of the last dimensions to normalise over, or one int. `hidden_size=` is another
            name for it.
        eps, elementwise_affine, bias, device, dtype: as in `torch.nn.LayerNorm`.
        weight_offset: added to the weight in the compute type; the weight is then initialised to 1 - offset, so that
            a new module is the plain normalisation.
        pre_activation: applied to x before it is normalised: one of `kernel_fusion.ACTIVATIONS`, or None.
        activation: applied to the result: one of `kernel_fusion.ACTIVATIONS`, or None.
        out_dtype: as in :func:`kernel_fusion.layer_norm`; a `scale` stays on its device.
        rounding: as in :func:`kernel_fusion.layer_norm`.

    Shape: input and output (\*, \*normalized_shape). See :func:`kernel_fusion.layer_norm` for dtypes and accumulation.

    Raises:
        TypeError: `normalized_shape` and `hidden_size` are both given, or neither.
        ValueError: an unknown activation or `rounding`, or `weight_offset` without a weight.

    Example:
        >>> import torch, kernel_fusion as kf
        >>> norm = kf.FusedLayerNorm(hidden_size=64)
        >>> norm(torch.randn(2, 8, 64)).shape
        torch.Size([2, 8, 64])
    """

    def __init__(
        self,
        normalized_shape: Shape | None = None,
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        hidden_size: Shape | None = None,
        weight_offset: float = 0.0,
        pre_activation: str | None = None,
        activation: str | None = None,
        out_dtype: torch.dtype | Quantize | None = None,
        rounding: str = "once",
    ) -> None:
        shape = shape_of("FusedLayerNorm", normalized_shape, hidden_size)
        extras = weight_offset, pre_activation, activation, out_dtype, rounding
        super().__init__(shape, eps, elementwise_affine, bias, device, dtype, extras=extras)

    def forward(self, input: Tensor) -> Tensor:
        """Normalise `input`; under CUDA autocast the result is float32, as with `torch.nn.LayerNorm`."""
        return layer_norm(
            input,
            self.normalized_shape,
            self.weight,
            self.bias,
            self.eps,
            pre_activation=self.pre_activation,
            activation=self.activation,
            weight_offset=self.weight_offset,
            out_dtype=self.out_dtype,
            rounding=self.rounding,
        )


class FusedRMSNorm(Stages, nn.RMSNorm):
    r"""Drop-in for `torch.nn.RMSNorm`: same constructor, same state dict, fused kernels, forward and backward.

    .. math::
        y = \mathrm{activation}\left(\frac{u}{\sqrt{\mathrm{E}[u^2] + \epsilon}} \cdot (\mathrm{offset} + w)\right),
        \qquad u = \mathrm{pre\_activation}(x)

    Args:
        normalized_shape: the sizes of the last dimensions to normalise over, or one int. `hidden_size=` is another
            name for it.
        eps, elementwise_affine, device, dtype: as in `torch.nn.RMSNorm`.
        weight_offset, pre_activation, activation, out_dtype, rounding: as in :class:`FusedLayerNorm`.

    Shape: input and output (\*, \*normalized_shape). See :func:`kernel_fusion.rms_norm` for dtypes and accumulation.

    Raises:
        TypeError, ValueError: as :class:`FusedLayerNorm`.

    Example:
        >>> import torch, kernel_fusion as kf
        >>> kf.FusedRMSNorm(64)(torch.randn(2, 8, 64)).shape
        torch.Size([2, 8, 64])
    """

    def __init__(
        self,
        normalized_shape: Shape | None = None,
        eps: float | None = None,
        elementwise_affine: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        hidden_size: Shape | None = None,
        weight_offset: float = 0.0,
        pre_activation: str | None = None,
        activation: str | None = None,
        out_dtype: torch.dtype | Quantize | None = None,
        rounding: str = "once",
    ) -> None:
        shape = shape_of("FusedRMSNorm", normalized_shape, hidden_size)
        extras = weight_offset, pre_activation, activation, out_dtype, rounding
        super().__init__(shape, eps, elementwise_affine, device, dtype, extras=extras)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise `x`; under CUDA autocast the dtype is that of PyTorch's norm."""
        return rms_norm(
            x,
            self.normalized_shape,
            self.weight,
            self.eps,
            pre_activation=self.pre_activation,
            activation=self.activation,
            weight_offset=self.weight_offset,
            out_dtype=self.out_dtype,
            rounding=self.rounding,
        )


class FusedAddLayerNorm(AddStages, nn.LayerNorm):
    r"""Dropout, residual addition and layer normalisation: what stands between two sublayers of a transformer.

    .. math::
        u = \mathrm{dropout}(\mathrm{pre\_activation}(x)), \qquad h = r + u, \qquad
        y = \mathrm{activation}\left(\frac{h - \mathrm{E}[h]}{\sqrt{\mathrm{Var}[h] + \epsilon}}
        \cdot (\mathrm{offset} + w) + b\right)

    Args:
        normalized_shape, eps, elementwise_affine, bias, device, dtype, hidden_size: as in :class:`FusedLayerNorm`, and
            the state dict is that of `torch.nn.LayerNorm`.
        dropout: probability of an element of u to be zeroed, in training mode; in evaluation mode there is no dropout.
        weight_offset, pre_activation, activation, out_dtype, rounding: as in :class:`FusedLayerNorm`.

    Shape: input, residual and both results (\*, \*normalized_shape). The result is a
    :class:`kernel_fusion.NormOutput`: y, and h to go on with as the next residual. See
    :func:`kernel_fusion.add_layer_norm` for dtypes and accumulation.

    A stream begins without a residual: h is then u, a new tensor in the input's dtype, and y the norm of it. Beside a
    DTensor a residual must be given, since a parallel style may have lost it.

    Raises:
        TypeError, ValueError: as :class:`FusedLayerNorm`; ValueError where `dropout` is no probability; TypeError,
            when called, of a DTensor without a residual.

    Example:
        >>> import torch, kernel_fusion as kf
        >>> norm = kf.FusedAddLayerNorm(64, dropout=0.1)
        >>> y, h = norm(torch.randn(2, 8, 64), torch.randn(2, 8, 64))
        >>> y.shape
        torch.Size([2, 8, 64])
        >>> y, h = norm(torch.randn(2, 8, 64))  # the first of a stack
    """

    def __init__(
        self,
        normalized_shape: Shape | None = None,
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        hidden_size: Shape | None = None,
        dropout: float = 0.0,
        weight_offset: float = 0.0,
        pre_activation: str | None = None,
        activation: str | None = None,
        out_dtype: torch.dtype | Quantize | None = None,
        rounding: str = "once",
    ) -> None:
        self._set_dropout(dropout)
        shape = shape_of("FusedAddLayerNorm", normalized_shape, hidden_size)
        extras = weight_offset, pre_activation, activation, out_dtype, rounding
        super().__init__(shape, eps, elementwise_affine, bias, device, dtype, extras=extras)

    def forward(self, input: Tensor, residual: Tensor | None = None) -> NormOutput:  # type: ignore[override]
        """Add `input`, after pre-activation and dropout, to `residual` if there is one, and normalise the sum."""
        return add_layer_norm(
            input,
            self._stream(input, residual),
            self.normalized_shape,
            self.weight,
            self.bias,
            self.eps,
            dropout_p=self.dropout,
            training=self.training,
            pre_activation=self.pre_activation,
            activation=self.activation,
            weight_offset=self.weight_offset,
            out_dtype=self.out_dtype,
            rounding=self.rounding,
        )


class FusedAddRMSNorm(AddStages, nn.RMSNorm):
    r"""Dropout, residual addition and root-mean-square normalisation.

    .. math::
        u = \mathrm{dropout}(\mathrm{pre\_activation}(x)), \qquad h = r + u, \qquad
        y = \mathrm{activation}\left(\frac{h}{\sqrt{\mathrm{E}[h^2] + \epsilon}} \cdot (\mathrm{offset} + w)\right)

    Args:
        normalized_shape, eps, elementwise_affine, device, dtype, hidden_size: as in :class:`FusedRMSNorm`, and the
            state dict is that of `torch.nn.RMSNorm`.
        dropout, weight_offset, pre_activation, activation, out_dtype, rounding: as in :class:`FusedAddLayerNorm`.

    Shape, raises: as :class:`FusedAddLayerNorm`; see :func:`kernel_fusion.add_rms_norm` for dtypes and accumulation.

    Example:
        >>> import torch, kernel_fusion as kf
        >>> y, h = kf.FusedAddRMSNorm(64)(torch.randn(2, 8, 64), torch.randn(2, 8, 64))
        >>> h.shape
        torch.Size([2, 8, 64])
    """

    def __init__(
        self,
        normalized_shape: Shape | None = None,
        eps: float | None = None,
        elementwise_affine: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        hidden_size: Shape | None = None,
        dropout: float = 0.0,
        weight_offset: float = 0.0,
        pre_activation: str | None = None,
        activation: str | None = None,
        out_dtype: torch.dtype | Quantize | None = None,
        rounding: str = "once",
    ) -> None:
        self._set_dropout(dropout)
        shape = shape_of("FusedAddRMSNorm", normalized_shape, hidden_size)
        extras = weight_offset, pre_activation, activation, out_dtype, rounding
        super().__init__(shape, eps, elementwise_affine, device, dtype, extras=extras)

    def forward(self, x: Tensor, residual: Tensor | None = None) -> NormOutput:  # type: ignore[override]
        """Add `x`, after pre-activation and dropout, to `residual` if there is one, and normalise the sum."""
        return add_rms_norm(
            x,
            self._stream(x, residual),
            self.normalized_shape,
            self.weight,
            self.eps,
            dropout_p=self.dropout,
            training=self.training,
            pre_activation=self.pre_activation,
            activation=self.activation,
            weight_offset=self.weight_offset,
            out_dtype=self.out_dtype,
            rounding=self.rounding,
        )
