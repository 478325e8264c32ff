"""The norms: subclasses of `torch.nn.LayerNorm` and `torch.nn.RMSNorm`.

So the constructor, the state dict, `extra_repr`, `isinstance` checks and initialisation are PyTorch's own; only
`forward` is ours, and the keyword-only extras, which `Stages` holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from kernel_fusion.backends.availability import is_dtensor
from kernel_fusion.core import checks
from kernel_fusion.functional import NormOutput, add_layer_norm, add_rms_norm, layer_norm, rms_norm
from kernel_fusion.nn.fast_path import keep_out_of_fast_paths

_Shape = int | Sequence[int] | torch.Size


class Stages(nn.Module):
    """The keyword-only extras of the norms: their checks, how they start, how they print.

    The defaults are those of the class, so a module that became one of ours by `__class__`, or was saved before an
    extra existed, has them too.
    """

    weight: nn.Parameter
    normalized_shape: tuple[int, ...]
    weight_offset: float = 0.0
    pre_activation: str | None = None
    activation: str | None = None
    out_dtype: torch.dtype | None = None
    rounding: str = "once"

    def _set_stages(
        self,
        elementwise_affine: bool,
        weight_offset: float,
        pre_activation: str | None,
        activation: str | None,
        out_dtype: torch.dtype | None,
        rounding: str,
    ) -> None:
        """Check and keep the extras; called before the parent's constructor, which initialises the weight by them."""
        kind = type(self).__name__
        if weight_offset and not elementwise_affine:
            raise ValueError(f"{kind}(): `weight_offset` needs a `weight`, got {weight_offset} without affine")
        checks.activation(kind, "pre_activation", pre_activation)
        checks.activation(kind, "activation", activation)
        checks.out_dtype(kind, out_dtype)
        checks.rounding(kind, rounding)
        self.weight_offset = weight_offset
        self.pre_activation = pre_activation
        self.activation = activation
        self.out_dtype = out_dtype
        self.rounding = rounding

    def _stages(self) -> dict[str, Any]:
        """The extras by name; a false one is not set."""
        return {
            "pre_activation": self.pre_activation,
            "activation": self.activation,
            "weight_offset": self.weight_offset,
            "out_dtype": self.out_dtype,
            "rounding": self.rounding if self.rounding != "once" else None,
        }

    def _keep_out_of_fast_paths(self) -> None:
        """Have nobody read the parameters instead of calling the module, where that would miss an extra."""
        if any(self._stages().values()):
            keep_out_of_fast_paths(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._keep_out_of_fast_paths()

    def reset_parameters(self) -> None:
        """Initialise to the plain normalisation: weight 1 - weight_offset, bias 0."""
        super().reset_parameters()  # type: ignore[misc]
        if self.weight is not None and self.weight_offset:
            with torch.no_grad():
                self.weight.sub_(self.weight_offset)

    def extra_repr(self) -> str:
        """PyTorch's text, and the extras that are set."""
        extras = ", ".join(f"{name}={value!r}" for name, value in self._stages().items() if value)
        return ", ".join(filter(None, (super().extra_repr(), extras)))


class _AddStages(Stages):
    """The same of the norms that add to a residual, which have dropout too."""

    dropout: float = 0.0

    def _set_dropout(self, dropout: float) -> None:
        checks.dropout_p(type(self).__name__, "dropout", dropout)
        self.dropout = dropout

    def _stages(self) -> dict[str, Any]:
        return {"dropout": self.dropout} | super()._stages()

    def _keep_out_of_fast_paths(self) -> None:
        keep_out_of_fast_paths(self)

    def _stream(self, input: Tensor, residual: Tensor | None) -> Tensor:
        """The residual; where a stream begins, one row of negative zeros for all rows, which changes no bit of u."""
        if residual is not None:
            return residual
        refuse_lost(self, "residual", input)
        checks.tensor("add_layer_norm" if isinstance(self, nn.LayerNorm) else "add_rms_norm", "input", input)
        row = input.shape[input.dim() - len(self.normalized_shape) :]  # where it is another shape, the verb says so
        return input.new_full(row, -0.0).expand_as(input)


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
        activation: applied to the result, likewise.
        out_dtype: dtype of the result, as in :func:`kernel_fusion.layer_norm`.
        rounding: "once" or "hf", likewise.

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
        normalized_shape: _Shape | None = None,
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        hidden_size: _Shape | None = None,
        weight_offset: float = 0.0,
        pre_activation: str | None = None,
        activation: str | None = None,
        out_dtype: torch.dtype | None = None,
        rounding: str = "once",
    ) -> None:
        self._set_stages(elementwise_affine, weight_offset, pre_activation, activation, out_dtype, rounding)
        shape = _shape("FusedLayerNorm", normalized_shape, hidden_size)
        super().__init__(shape, eps, elementwise_affine, bias, device, dtype)
        self._keep_out_of_fast_paths()

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
        normalized_shape: _Shape | None = None,
        eps: float | None = None,
        elementwise_affine: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        hidden_size: _Shape | None = None,
        weight_offset: float = 0.0,
        pre_activation: str | None = None,
        activation: str | None = None,
        out_dtype: torch.dtype | None = None,
        rounding: str = "once",
    ) -> None:
        self._set_stages(elementwise_affine, weight_offset, pre_activation, activation, out_dtype, rounding)
        shape = _shape("FusedRMSNorm", normalized_shape, hidden_size)
        super().__init__(shape, eps, elementwise_affine, device, dtype)
        self._keep_out_of_fast_paths()

    def forward(self, x: Tensor) -> Tensor:
        """Normalise `x`; under CUDA autocast the result is float32."""
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


class FusedAddLayerNorm(_AddStages, nn.LayerNorm):
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

    Where a stream begins there is nothing to add: without a residual h is u, in the input's dtype and a tensor of its
    own, and y the norm of it. Beside a DTensor a residual must be given, since a parallel style may have lost it.

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
        normalized_shape: _Shape | None = None,
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        hidden_size: _Shape | None = None,
        dropout: float = 0.0,
        weight_offset: float = 0.0,
        pre_activation: str | None = None,
        activation: str | None = None,
        out_dtype: torch.dtype | None = None,
        rounding: str = "once",
    ) -> None:
        self._set_dropout(dropout)
        self._set_stages(elementwise_affine, weight_offset, pre_activation, activation, out_dtype, rounding)
        shape = _shape("FusedAddLayerNorm", normalized_shape, hidden_size)
        super().__init__(shape, eps, elementwise_affine, bias, device, dtype)
        self._keep_out_of_fast_paths()

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


class FusedAddRMSNorm(_AddStages, nn.RMSNorm):
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
        normalized_shape: _Shape | None = None,
        eps: float | None = None,
        elementwise_affine: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        hidden_size: _Shape | None = None,
        dropout: float = 0.0,
        weight_offset: float = 0.0,
        pre_activation: str | None = None,
        activation: str | None = None,
        out_dtype: torch.dtype | None = None,
        rounding: str = "once",
    ) -> None:
        self._set_dropout(dropout)
        self._set_stages(elementwise_affine, weight_offset, pre_activation, activation, out_dtype, rounding)
        shape = _shape("FusedAddRMSNorm", normalized_shape, hidden_size)
        super().__init__(shape, eps, elementwise_affine, device, dtype)
        self._keep_out_of_fast_paths()

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


def refuse_lost(module: nn.Module, argument: str, input: Tensor) -> None:
    """Raise of a DTensor without the second argument: `SequenceParallel` hands on the first, and this one is lost."""
    if is_dtensor(input):
        raise TypeError(
            f"{type(module).__name__}: `{argument}` must be given beside a DTensor, got None; `SequenceParallel` hands "
            "on the first input alone: use `kernel_fusion.distributed.ResidualSequenceParallel`"
        )


def _shape(module: str, normalized_shape: _Shape | None, hidden_size: _Shape | None) -> _Shape:
    if (normalized_shape is None) == (hidden_size is None):
        raise TypeError(f"{module}() takes exactly one of `normalized_shape` and its other name `hidden_size`")
    return hidden_size if normalized_shape is None else normalized_shape  # type: ignore[return-value]
