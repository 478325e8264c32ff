"""Cases of softmax and attention scores."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import torch
from torch import Tensor

import kernel_fusion as kf
from kernel_fusion.backends import eager
from kernel_fusion.testing import unfused
from kernel_fusion.testing.budget import Array, Reference
from kernel_fusion.testing.case import DTYPES, Case, Draw, Results, Tensors, wide
from kernel_fusion.testing.long_double import sum_to


@dataclass(frozen=True)
class _MaskedCase(Case):
    """What cases of softmax and of attention scores share.

    Attributes:
        mask: The kind of mask: "boolean" (True with probability 3/4), "dead" (the same, but the first row is masked),
            "additive", or None.
        mask_shape: The shape of the mask; None for the shape of the scores.
        mask_dtype: The dtype of an additive mask; None for the dtype of the input.
    """

    mask: str | None = None
    mask_shape: tuple[int, ...] | None = None
    mask_dtype: torch.dtype | None = None
    causal: bool = False

    @property
    def scores_shape(self) -> tuple[int, ...]:
        """The shape of the masked tensor."""
        return self.shape

    @property
    def result_size(self) -> int:
        """The number of elements of an additive mask's gradient if there is such a mask, and else of the result."""
        return math.prod(self.mask_shape or self.scores_shape) if self.mask == "additive" else super().result_size

    def _make_mask(self, draw: Draw) -> Tensor | None:
        shape = self.mask_shape or self.scores_shape
        if self.mask is None:
            return None
        if self.mask == "additive":
            return draw.normal(shape, self.mask_dtype or self.dtype).requires_grad_()
        mask = draw.boolean(shape, 0.75)
        if self.mask == "dead":
            mask[..., 0, :] = False
        return mask

    def _masked_by_hand(self, scores: Array, mask: Tensor | None) -> Array:
        if mask is not None and mask.dtype == torch.bool:
            scores = np.where(mask.cpu().numpy(), scores, -np.inf)
        elif mask is not None:
            scores = scores + wide(mask)
        return np.where(np.tril(np.ones(scores.shape[-2:], dtype=bool)), scores, -np.inf) if self.causal else scores

    def _mask_gradient(self, dscores: Array, mask: Tensor | None) -> Reference:
        return {} if mask is None or mask.dtype == torch.bool else {"dmask": sum_to(dscores, mask.shape)}


def _weights(scores: Tensor, dim: int = -1, log: bool = False) -> Tensor:
    """PyTorch's softmax, with zeros for fully masked rows; or its logarithm, which is -inf where a score is."""
    masked = scores == -math.inf
    dead = masked.all(dim, keepdim=True)
    if log:
        return torch.log_softmax(scores.masked_fill(dead, 0.0), dim).masked_fill(masked, -math.inf)
    return torch.softmax(scores.masked_fill(dead, 0.0), dim).masked_fill(dead, 0.0)


def _weights_by_hand(scores: Array, dy: Array, axis: int = -1, log: bool = False) -> tuple[Array, Array]:
    """Softmax of the scores or its logarithm, and the gradient of the scores from `dy`, in NumPy's long double."""
    if scores.size == 0:
        return scores, scores
    largest = scores.max(axis, keepdims=True)
    exps = np.exp(scores - np.where(np.isinf(largest), 0, largest))
    total = exps.sum(axis, keepdims=True)
    y = exps / np.where(total == 0, 1, total)
    if log:
        dy = np.where(scores == -np.inf, 0, dy)
        logs = scores - np.where(np.isinf(largest), 0, largest) - np.log(np.where(total == 0, 1, total))
        return logs, dy - y * dy.sum(axis, keepdims=True)
    return y, (dy - (dy * y).sum(axis, keepdims=True)) * y


@dataclass(frozen=True)
class SoftmaxCase(_MaskedCase):
    """One call of `softmax` or `log_softmax`.

    Attributes:
        dim, scale: The function's arguments.
        layout: The layout of the input.
    """

    dim: int = -1
    scale: float = 1.0
    layout: str = "contiguous"
    mean: float = 0.0
    std: float = 2.0

    @property
    def log(self) -> bool:
        """Whether the result is the logarithm."""
        return self.verb == "log_softmax"

    def make_inputs(self, device: torch.device | str, seed: int = 0) -> Tensors:
        """Draw x, mask and dy."""
        draw = Draw(device, seed)
        x = draw.normal(self.shape, self.dtype, self.mean, self.std, self.layout).requires_grad_()
        mask = self._make_mask(draw)
        return Tensors(x=x, mask=mask, dy=draw.normal(self.shape, self.dtype, layout=self.layout))

    def ours(self, inputs: Tensors, backend: str | None) -> Results:
        """y by the verb."""
        options: dict[str, Any] = {"scale": self.scale, "mask": inputs.mask, "causal": self.causal, "backend": backend}
        return {"y": getattr(kf, self.verb)(inputs.x, self.dim, **options)}

    def definition(self, inputs: Tensors) -> Results:
        """y by the operator's definition."""
        options = self.scale, self.causal, self.log
        if not self.shape:
            return {"y": eager.softmax(inputs.x[None], inputs.mask, *options)[0]}
        mask = None if inputs.mask is None else inputs.mask.expand(self.shape).movedim(self.dim, -1)
        return {"y": eager.softmax(inputs.x.movedim(self.dim, -1), mask, *options).movedim(-1, self.dim)}

    def pytorch(self, inputs: Tensors) -> Results:
        """The multiplication, the mask and the function, each by PyTorch."""
        scaled = inputs.x if self.scale == 1.0 else inputs.x * self.scale
        scores = unfused.masked(scaled, inputs.mask, self.causal)
        masked = inputs.mask is not None or self.causal
        y = _weights(scores, self.dim, self.log) if masked else getattr(torch, self.verb)(scores, self.dim)
        return {"y": y.to(self.dtype)}

    def long_double(self, inputs: Tensors) -> Reference:
        """Return results and gradients by formulas."""
        scores = self._masked_by_hand(self.scale * wide(inputs.x), inputs.mask)
        if not self.shape:
            return {"y": np.zeros(()) if self.log else np.ones(()), "dx": np.zeros(())}
        y, dscores = _weights_by_hand(scores, wide(inputs.dy), self.dim, self.log)
        results = {"y": y, "dx": self.scale * dscores}
        return results | self._mask_gradient(dscores, inputs.mask)


@dataclass(frozen=True)
class ScoresCase(_MaskedCase):
    """One call of `attention_scores`.

    Attributes:
        shape: The shape of the query, (..., L, D).
        dtype: The dtype of query and key.
        key_shape: The shape of the key, (..., S, D); None for that of the query.
        layout: The layout of query and key, as in `lay_out`.
    """

    key_shape: tuple[int, ...] | None = None
    scale: float | None = None
    normalize: bool = False
    layout: str = "contiguous"

    @property
    def scores_shape(self) -> tuple[int, ...]:
        """The shape of the scores, (..., L, S)."""
        key = self.key_shape or self.shape
        return (*torch.broadcast_shapes(self.shape[:-2], key[:-2]), self.shape[-2], key[-2])

    @property
    def runs_kernels(self) -> bool:
        """Whether kernels must run: only normalised scores need them, and plain ones are PyTorch's product."""
        return self.normalize and super().runs_kernels

    @property
    def factor(self) -> float:
        """The number that multiplies the product of query and key."""
        return self.shape[-1] ** -0.5 if self.scale is None else self.scale

    def make_inputs(self, device: torch.device | str, seed: int = 0) -> Tensors:
        """Draw query, key, mask and dy."""
        draw = Draw(device, seed)
        query, key = (
            draw.normal(shape, self.dtype, layout=self.layout).requires_grad_()
            for shape in (self.shape, self.key_shape or self.shape)
        )
        mask = self._make_mask(draw)
        return Tensors(query=query, key=key, mask=mask, dy=draw.normal(self.scores_shape, self.dtype))

    def ours(self, inputs: Tensors, backend: str | None) -> Results:
        """The scores or their softmax by the verb."""
        options: dict[str, Any] = {"causal": self.causal, "normalize": self.normalize, "backend": backend}
        return {"y": kf.attention_scores(inputs.query, inputs.key, self.scale, mask=inputs.mask, **options)}

    def definition(self, inputs: Tensors) -> Results:
        """The scores by a product, the scale and PyTorch's masking, and their softmax by the definition."""
        scores = inputs.query @ inputs.key.mT * self.factor
        if not self.normalize:
            return {"y": unfused.masked(scores, inputs.mask, self.causal)}
        mask = None if inputs.mask is None else inputs.mask.expand(scores.shape)
        return {"y": eager.softmax(scores, mask, 1.0, self.causal)}

    def pytorch(self, inputs: Tensors) -> Results:
        """The product, a multiplication, the mask and, if wanted, softmax, each by PyTorch."""
        scores = unfused.attention_scores(inputs.query, inputs.key, self.scale)
        scores = unfused.masked(scores, inputs.mask, self.causal)
        return {"y": (_weights(scores) if self.normalize else scores).to(self.dtype)}

    def long_double(self, inputs: Tensors) -> Reference:
        """Return results and gradients by formulas."""
        query, key, dscores = wide(inputs.query), wide(inputs.key), wide(inputs.dy)
        y = self._masked_by_hand(self.factor * (query @ np.swapaxes(key, -1, -2)), inputs.mask)
        if self.normalize:
            y, dscores = _weights_by_hand(y, dscores)
        else:
            kept = self._masked_by_hand(np.zeros(y.shape, np.longdouble), inputs.mask) != -np.inf
            dscores = dscores * kept
        results = {
            "y": y,
            "dquery": self.factor * sum_to(dscores @ key, query.shape),
            "dkey": self.factor * sum_to(np.swapaxes(dscores, -1, -2) @ query, key.shape),
        }
        return results | self._mask_gradient(dscores, inputs.mask)


def cases(quick: bool) -> Iterator[Case]:
    """Return the cases of `verify`, as in testing/cases.py."""
    yield from _softmaxes(quick)
    yield from _scores(quick)


def _softmaxes(quick: bool) -> Iterator[Case]:
    """Return cases of softmax and its logarithm.

    They have each kind of mask, `causal`, and another than the last dimension.
    """
    places: tuple[dict[str, Any], ...] = (
        {"shape": (64, 255)},
        {"shape": (5, 4099), "scale": 0.125},
        {"shape": (3, 17, 40), "mask": "dead"},
        {"shape": (3, 17, 40), "mask": "additive", "mask_shape": (17, 40)},
        {"shape": (3, 33, 33), "causal": True, "scale": 0.5},
        {"shape": (0, 8)},
    )
    more: tuple[dict[str, Any], ...] = (
        {"shape": (4, 64, 3), "dim": 1},
        {"shape": (2, 3, 9, 40), "mask": "boolean", "mask_shape": (2, 1, 1, 40), "causal": True},
        {"shape": (16, 100), "layout": "padded"},
        {"shape": (2, 70001)},
    )
    for verb, dtype in product(("softmax", "log_softmax"), DTYPES):
        for options in places if quick else places + more:
            yield SoftmaxCase(verb, dtype=dtype, **options)


def _scores(quick: bool) -> Iterator[Case]:
    """Return cases of attention scores, plain, masked and normalised."""
    places: tuple[dict[str, Any], ...] = (
        {"shape": (2, 3, 9, 16)},
        {"shape": (2, 3, 9, 16), "key_shape": (2, 1, 12, 16), "normalize": True, "causal": True},
    )
    more: tuple[dict[str, Any], ...] = (
        {"shape": (2, 9, 16), "mask": "additive", "mask_shape": (9, 9), "normalize": True, "scale": 0.5},
        {"shape": (2, 9, 16), "mask": "dead", "normalize": True},
        {"shape": (2, 9, 16), "mask": "boolean"},
    )
    for dtype in DTYPES:
        for options in places if quick else places + more:
            yield ScoresCase("attention_scores", dtype=dtype, **options)
