"""The norm and rotary embedding of query and key, as a module."""

from typing import Any

import torch
from torch import Tensor, nn

from kernel_fusion.core import checks
from kernel_fusion.functional import qk_norm_rope
from kernel_fusion.nn.stages import Fused

_OPTIONS = ("interleaved", "unsqueeze_dim", "weight_offset", "rounding")


class FusedQKNormRope(Fused):
    r"""RMSNorm of each head of query and key, then the rotary embedding, of both in one pass.

    .. math:: \mathrm{rope}\left(\frac{x}{\sqrt{\mathrm{E}[x^2] + \epsilon}} \cdot (\mathrm{offset} + w)\right)

    Args:
        head_dim: D, the columns of a head.
        eps: as in `torch.nn.RMSNorm`; 1e-6 where it is not given.
        interleaved, unsqueeze_dim, weight_offset, rounding: as in :func:`kernel_fusion.qk_norm_rope`.
        device, dtype: of the weights.

    The state dict has `query_weight` and `key_weight`, of shape (D,), which Transformers calls `q_norm.weight` and
    `k_norm.weight`. They begin as 1 - weight_offset.

    Shape: query, key and the two results (B, H, L, D) or (B, L, H, D). See :func:`kernel_fusion.qk_norm_rope` for
    dtypes and accumulation.

    Raises:
        ValueError: an unknown `rounding`.

    Source: as for :func:`kernel_fusion.qk_norm_rope`.

    Example:
        >>> import torch, kernel_fusion as kf
        >>> angles = torch.arange(5)[:, None] * 10000 ** -(torch.arange(0, 8, 2) / 8)
        >>> q, k = torch.randn(2, 4, 5, 8), torch.randn(2, 1, 5, 8)  # four heads of queries, one of keys
        >>> q, k = kf.FusedQKNormRope(8)(q, k, angles.cos(), angles.sin())
    """

    interleaved: bool = False
    unsqueeze_dim: int = 1
    weight_offset: float = 0.0
    rounding: str = "once"

    def __init__(
        self,
        head_dim: int,
        eps: float | None = 1e-6,
        *,
        interleaved: bool = False,
        unsqueeze_dim: int = 1,
        weight_offset: float = 0.0,
        rounding: str = "once",
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        checks.rounding("FusedQKNormRope", rounding)
        self.head_dim, self.eps = head_dim, eps
        self.interleaved, self.unsqueeze_dim = interleaved, unsqueeze_dim
        self.weight_offset, self.rounding = weight_offset, rounding
        self.query_weight = nn.Parameter(torch.empty(head_dim, device=device, dtype=dtype))
        self.key_weight = nn.Parameter(torch.empty(head_dim, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise to the plain normalisation."""
        for weight in (self.query_weight, self.key_weight):
            nn.init.constant_(weight, 1.0 - self.weight_offset)

    def forward(
        self, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Query and key, normalised and rotated by the angles of their tokens."""
        weights = self.query_weight, self.key_weight
        options = {name: getattr(self, name) for name in _OPTIONS}
        return qk_norm_rope(query, key, *weights, cos, sin, self.eps, positions=positions, **options)

    def extra_repr(self) -> str:
        """The arguments of the constructor."""
        return self._repr(f"{self.head_dim}, eps={self.eps}", options=_OPTIONS)
