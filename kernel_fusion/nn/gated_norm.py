"""The gated RMSNorm of Mamba-2 and gated delta nets, as models have it: `forward(input, gate)`."""

from typing import Any

import torch
from torch import Tensor, nn

from kernel_fusion.core import checks
from kernel_fusion.core.quantize import Quantize
from kernel_fusion.functional import gated_rms_norm, rms_norm
from kernel_fusion.nn.stages import Stages, refuse_lost

_GATING = ("gate_activation", "gate_first", "group_size")


class FusedGatedRMSNorm(Stages, nn.RMSNorm):
    r"""Root-mean-square normalisation and a gate, with the state dict of other libraries' `RMSNormGated`: a `weight`.

    .. math::
        y = n(x) \cdot (\mathrm{offset} + w) \cdot \mathrm{act}(g), \qquad
        n(u) = \frac{u}{\sqrt{\mathrm{E}[u^2] + \epsilon}}

    and with `gate_first`

    .. math:: y = n(x \cdot \mathrm{act}(g)) \cdot (\mathrm{offset} + w)

    Args:
        hidden_size: the length of a row.
        eps: as in `torch.nn.RMSNorm`; 1e-5 where it is not given.
        gate_activation, gate_first, group_size, rounding: as in :func:`kernel_fusion.gated_rms_norm`.
        weight_offset, out_dtype: as in :class:`FusedLayerNorm`.
        device, dtype: as in `torch.nn.RMSNorm`.

    Shape: input, gate and output (\*, hidden_size). Without a gate the result is the plain norm, of groups where there
    are any. See :func:`kernel_fusion.gated_rms_norm` for dtypes and accumulation.

    Raises:
        ValueError: an unknown activation or `rounding`, or `group_size` does not divide `hidden_size`.
        TypeError: when called, a DTensor without a gate, which a parallel style may have lost.

    Source: Dao, Gu: Transformers are SSMs, arXiv:2405.21060 (Mamba-2); Yang, Kautz, Hatamizadeh: Gated Delta Networks,
    arXiv:2412.06464.

    Example:
        >>> import torch, kernel_fusion as kf
        >>> norm = kf.FusedGatedRMSNorm(64, gate_first=True, group_size=16)
        >>> norm(torch.randn(2, 8, 64), torch.randn(2, 8, 64)).shape
        torch.Size([2, 8, 64])
    """

    gate_activation: str | None = "silu"
    gate_first: bool = False
    group_size: int | None = None

    def __init__(
        self,
        hidden_size: int,
        eps: float | None = 1e-5,
        *,
        gate_activation: str | None = "silu",
        gate_first: bool = False,
        group_size: int | None = None,
        weight_offset: float = 0.0,
        out_dtype: torch.dtype | Quantize | None = None,
        rounding: str = "once",
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        checks.activation("FusedGatedRMSNorm", "gate_activation", gate_activation)
        if group_size is not None:
            checks.group_size("FusedGatedRMSNorm", (hidden_size,), group_size)
        self.gate_activation, self.gate_first, self.group_size = gate_activation, gate_first, group_size
        extras = weight_offset, None, None, out_dtype, rounding
        super().__init__(hidden_size, eps, True, device, dtype, extras=extras)

    def _stages(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in _GATING} | super()._stages()

    def forward(self, input: Tensor, gate: Tensor | None = None) -> Tensor:
        """Normalise `input` and multiply by the gate, if there is one; autocast is followed as by PyTorch's norm."""
        if gate is None:
            refuse_lost(self, "gate", input)
        norm = self.normalized_shape, self.weight, self.eps
        options: dict[str, Any] = {name: getattr(self, name) for name in ("weight_offset", "out_dtype", "rounding")}
        if gate is None and self.group_size is None:
            return rms_norm(input, *norm, **options)
        options |= {name: getattr(self, name) for name in _GATING}
        if gate is None:  # groups are a matter of the gated norm: one row of ones for all rows changes no bit
            checks.tensor("gated_rms_norm", "input", input)
            gate = input.new_ones(input.shape[-1:]).expand_as(input)
            options |= {"gate_activation": None, "gate_first": False}
        return gated_rms_norm(input, gate, *norm, **options)
