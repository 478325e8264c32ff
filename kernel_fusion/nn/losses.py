"""Losses as modules."""

from __future__ import annotations

from torch import Tensor, nn

from kernel_fusion.functional import cross_entropy
from kernel_fusion.functional.results import CrossEntropyOutput


class FusedCrossEntropyLoss(nn.CrossEntropyLoss):
    r"""Cross entropy of logits and targets, in one read of the logits; a drop-in for `torch.nn.CrossEntropyLoss`.

    Args:
        weight, ignore_index, reduction, label_smoothing: as in `torch.nn.CrossEntropyLoss`.
        z_loss, softcap, scale, stats: as in :func:`kernel_fusion.cross_entropy`.

    Shape: input (C), (N, C) or (N, C, d1, ...); target as in :func:`kernel_fusion.cross_entropy`. The loss is float32
    (float64 for float64), also for fp16 and bf16 logits.

    Example:
        >>> import torch, kernel_fusion as kf
        >>> logits, target = torch.randn(4, 10), torch.tensor([1, 9, -100, 0])
        >>> torch.allclose(kf.FusedCrossEntropyLoss()(logits, target), torch.nn.CrossEntropyLoss()(logits, target))
        True
    """

    # Also of a `torch.nn.CrossEntropyLoss` that became one of these by `__class__`.
    z_loss: float = 0.0
    softcap: float | None = None
    scale: float = 1.0
    stats: bool = False

    def __init__(
        self,
        weight: Tensor | None = None,
        ignore_index: int = -100,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        *,
        z_loss: float = 0.0,
        softcap: float | None = None,
        scale: float = 1.0,
        stats: bool = False,
    ) -> None:
        super().__init__(weight, ignore_index=ignore_index, reduction=reduction, label_smoothing=label_smoothing)
        self.z_loss, self.softcap, self.scale, self.stats = z_loss, softcap, scale, stats

    def forward(  # type: ignore[override]
        self, input: Tensor, target: Tensor, divisor: float | Tensor | None = None
    ) -> Tensor | CrossEntropyOutput:
        """The loss; `divisor` replaces the number of rows that count."""
        return cross_entropy(
            input,
            target,
            self.weight,
            self.ignore_index,
            self.reduction,
            self.label_smoothing,
            z_loss=self.z_loss,
            softcap=self.softcap,
            scale=self.scale,
            divisor=divisor,
            stats=self.stats,
        )
