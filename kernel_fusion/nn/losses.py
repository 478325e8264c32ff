"""Losses as modules."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from kernel_fusion.functional import cross_entropy, linear_cross_entropy
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


class FusedLinearCrossEntropyLoss(nn.Module):
    r"""A linear layer and the cross entropy of its results, which never exist all at once.

    Args:
        linear: the layer that makes the logits, such as a model's head: a module with a `weight` (V, H), and perhaps a
            `bias` (V,). It becomes a submodule, so its parameters keep their identity, and a tied weight stays tied.
            Only its parameters are read; hooks and the forward of a module that adds to them do not run.
        weight, ignore_index, reduction, label_smoothing: as in `torch.nn.CrossEntropyLoss`.
        options: keyword arguments of :func:`kernel_fusion.linear_cross_entropy`: z_loss, softcap, scale, stats,
            logits_dtype, accumulate, chunk_rows.

    Raises:
        TypeError: `linear` has no weight; an option that the function does not have.

    Example:
        >>> import torch, kernel_fusion as kf
        >>> head, hidden, target = torch.nn.Linear(16, 100), torch.randn(5, 16), torch.randint(100, (5,))
        >>> loss = kf.FusedLinearCrossEntropyLoss(head, label_smoothing=0.1)
        >>> plain = torch.nn.CrossEntropyLoss(label_smoothing=0.1)
        >>> torch.allclose(loss(hidden, target), plain(head(hidden), target))
        True
    """

    weight: Tensor | None
    _OPTIONS = frozenset({"z_loss", "softcap", "scale", "stats", "logits_dtype", "accumulate", "chunk_rows"})

    def __init__(
        self,
        linear: nn.Module,
        weight: Tensor | None = None,
        ignore_index: int = -100,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        **options: Any,
    ) -> None:
        super().__init__()
        if not isinstance(getattr(linear, "weight", None), Tensor):
            raise TypeError(f"`FusedLinearCrossEntropyLoss`: `linear` must be a layer with a weight, got {linear!r}")
        if unknown := sorted(options.keys() - self._OPTIONS):
            raise TypeError(f"`FusedLinearCrossEntropyLoss`: got an unexpected option `{unknown[0]}`")
        self.linear = linear
        self.register_buffer("weight", weight)
        self.ignore_index, self.reduction, self.label_smoothing = ignore_index, reduction, label_smoothing
        self.options = options

    def forward(
        self, input: Tensor, target: Tensor, divisor: float | Tensor | None = None
    ) -> Tensor | CrossEntropyOutput:
        """The loss of `input`, (..., H); `divisor` replaces the number of rows that count."""
        return linear_cross_entropy(
            input,
            self.linear.weight,  # type: ignore[arg-type]
            target,
            linear_bias=getattr(self.linear, "bias", None),
            weight=self.weight,
            ignore_index=self.ignore_index,
            reduction=self.reduction,
            label_smoothing=self.label_smoothing,
            divisor=divisor,
            **self.options,
        )
