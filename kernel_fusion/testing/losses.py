"""Cases of losses over classes."""

from __future__ import annotations

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


@dataclass(frozen=True)
class CrossEntropyCase(Case):
    """One call of `cross_entropy` of (N, C) logits; every third row is ignored, from the second one on.

    Attributes:
        reduction, label_smoothing, z_loss, softcap, scale: the function's arguments.
        weighted: whether classes have weights.
        layout: the layout of the input.
        mean, std: of the logits.
    """

    reduction: str = "none"
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    softcap: float | None = None
    scale: float = 1.0
    weighted: bool = False
    layout: str = "contiguous"
    mean: float = 0.0
    std: float = 2.0

    @property
    def result_size(self) -> int:
        """The number of elements of the loss."""
        return self.shape[0] if self.reduction == "none" else 1

    def make_inputs(self, device: torch.device | str, seed: int = 0) -> Tensors:
        """Draw x, weights and dy; the targets are the same in each draw."""
        draw = Draw(device, seed)
        rows, classes = self.shape
        x = draw.normal(self.shape, self.dtype, self.mean, self.std, self.layout).requires_grad_()
        target = torch.arange(rows, device=device) * 7919 % classes
        target[1::3] = -100
        weight = draw.normal((classes,), self.dtype).abs() if self.weighted else None
        result = torch.float64 if self.dtype == torch.float64 else torch.float32
        dy = draw.normal((rows,) if self.reduction == "none" else (), result)
        return Tensors(x=x, target=target, weight=weight, dy=dy)

    def ours(self, inputs: Tensors, backend: str | None) -> Results:
        """The loss by the verb."""
        loss = kf.cross_entropy(inputs.x, inputs.target, inputs.weight, backend=backend, **self._options())
        assert isinstance(loss, Tensor)
        return {"y": loss}

    def _options(self) -> dict[str, Any]:
        names = ("reduction", "label_smoothing", "z_loss", "softcap", "scale")
        return {name: getattr(self, name) for name in names}

    def definition(self, inputs: Tensors) -> Results:
        """The loss by the definition, as by the verb."""
        return self.ours(inputs, "eager")

    def pytorch(self, inputs: Tensors) -> Results:
        """Each step by PyTorch, on logits that are widened first."""
        weight = None if inputs.weight is None else eager.logits(inputs.weight, 1.0, 0.0)
        x = eager.logits(inputs.x, 1.0, 0.0)
        z = eager.logits(unfused.scaled(x, self.scale), 1.0, self.softcap or 0.0)
        options: dict[str, Any] = {"reduction": "none", "label_smoothing": self.label_smoothing}
        loss = torch.nn.functional.cross_entropy(z, inputs.target, weight, **options)
        kept = inputs.target != -100
        loss = loss + (self.z_loss * torch.logsumexp(z, -1).square()).where(kept, 0.0)
        if self.reduction == "none":
            return {"y": loss}
        if self.reduction == "sum":
            return {"y": loss.sum()}
        count = kept.sum() if weight is None else weight[inputs.target[kept]].sum()
        return {"y": loss.sum() / count}

    def long_double(self, inputs: Tensors) -> Reference:
        """Return loss and gradient by formulas."""
        return self._of_logits(wide(inputs.x), inputs)

    def _of_logits(self, logits: Array, inputs: Tensors) -> Reference:
        x = self.scale * logits
        t = np.tanh(x / self.softcap) if self.softcap else np.zeros_like(x)
        z = self.softcap * t if self.softcap else x
        kept = inputs.target.cpu().numpy() >= 0
        weight = np.ones(self.shape[1], np.longdouble) if inputs.weight is None else wide(inputs.weight)
        losses, dz, weights = self._rows(z, inputs.target.cpu().numpy(), kept, weight)
        dy = wide(inputs.dy)
        if self.reduction == "mean":
            dy = dy / weights.sum()
        dx = dz * (dy if self.reduction != "none" else dy[:, None]) * self.scale * (1 - t * t)
        y = losses if self.reduction == "none" else losses.sum()
        return {"y": np.asarray(y / weights.sum() if self.reduction == "mean" else y), "dx": dx}

    def _rows(self, z: Array, target: Array, kept: Array, weight: Array) -> tuple[Array, Array, Array]:
        """Losses, the gradients of the logits, and the weights of the targets; all 0 in rows that are ignored."""
        classes, alpha = self.shape[1], self.label_smoothing
        hit = np.arange(classes) == target[:, None]
        largest = z.max(-1, keepdims=True) if z.size else z
        exps = np.exp(z - largest)
        lse = largest + np.log(exps.sum(-1, keepdims=True))
        p = exps / exps.sum(-1, keepdims=True)
        own = (hit * weight).sum(-1)
        losses = (1 - alpha) * own * ((lse - z) * hit).sum(-1)
        losses = losses + alpha / classes * ((lse - z) * weight).sum(-1) + self.z_loss * (lse * lse)[:, 0]
        dz = (1 - alpha) * own[:, None] * (p - hit) + alpha / classes * (p * weight.sum() - weight)
        dz = dz + 2 * self.z_loss * lse * p
        return losses * kept, dz * kept[:, None], own


@dataclass(frozen=True)
class LinearCrossEntropyCase(CrossEntropyCase):
    """One call of `linear_cross_entropy`, for which a linear layer makes the (N, C) logits of (N, `hidden`) inputs.

    Attributes:
        hidden: the number of columns of the input.
        chunk_rows: the function's argument.
    """

    hidden: int = 32
    chunk_rows: int | None = None

    def make_inputs(self, device: torch.device | str, seed: int = 0) -> Tensors:
        """Draw what `cross_entropy` takes, and in the place of the logits x, the layer's weight and its bias."""
        draw, (rows, classes) = Draw(device, seed), self.shape
        x = draw.normal((rows, self.hidden), self.dtype).requires_grad_()
        linear = draw.normal((classes, self.hidden), self.dtype, 0.0, self.std / self.hidden**0.5).requires_grad_()
        bias = draw.normal((classes,), self.dtype).requires_grad_()
        return Tensors(**vars(super().make_inputs(device, seed)) | {"x": x, "linear": linear, "bias": bias})

    def ours(self, inputs: Tensors, backend: str | None) -> Results:
        """The loss by the verb."""
        options: dict[str, Any] = {"weight": inputs.weight, "chunk_rows": self.chunk_rows, **self._options()}
        layer = {"linear_bias": inputs.bias, "backend": backend}
        loss = kf.linear_cross_entropy(inputs.x, inputs.linear, inputs.target, **layer, **options)
        assert isinstance(loss, Tensor)
        return {"y": loss}

    def pytorch(self, inputs: Tensors) -> Results:
        """The layer's logits, and the loss of these."""
        logits = torch.nn.functional.linear(inputs.x, inputs.linear, inputs.bias)
        return super().pytorch(Tensors(**vars(inputs) | {"x": logits}))

    def long_double(self, inputs: Tensors) -> Reference:
        """Return loss and gradients by formulas."""
        x, linear, bias = map(wide, (inputs.x, inputs.linear, inputs.bias))
        found = self._of_logits(x @ linear.T + bias, inputs)
        dz = found["dx"]
        return {"y": found["y"], "dx": dz @ linear, "dlinear": dz.T @ x, "dbias": dz.sum(0)}


@dataclass(frozen=True)
class TokenLogprobCase(Case):
    """One call of `token_logprob` of (N, C) logits, with the entropy.

    Attributes:
        num_ids: the number of classes per row; 0 stands for one, without a dimension.
        softcap, scale: the function's arguments.
        warm: whether each row has a temperature.
        masked: whether a mask leaves out classes, none of them those of `ids`.
        layout: the layout of the input.
    """

    num_ids: int = 0
    softcap: float | None = None
    scale: float = 1.0
    warm: bool = False
    masked: bool = False
    layout: str = "contiguous"

    @property
    def result_size(self) -> int:
        """The number of rows."""
        return self.shape[0]

    def make_inputs(self, device: torch.device | str, seed: int = 0) -> Tensors:
        """Draw x, temperatures, mask and cotangents; the ids are the same in each draw."""
        draw = Draw(device, seed)
        rows, classes = self.shape
        x = draw.normal(self.shape, self.dtype, std=2.0, layout=self.layout).requires_grad_()
        each = torch.arange(max(self.num_ids, 1), device=device) * 31
        ids = (torch.arange(rows, device=device)[:, None] * 7919 + each) % classes
        mask = draw.boolean(self.shape, 0.7).scatter(-1, ids, True) if self.masked else None
        ids = ids if self.num_ids else ids[:, 0]
        result = torch.float64 if self.dtype == torch.float64 else torch.float32
        temperature = draw.normal((rows,), result).abs() + 0.5 if self.warm else None
        dlogprob, dentropy = draw.normal(tuple(ids.shape), result), draw.normal((rows,), result)
        return Tensors(x=x, ids=ids, temperature=temperature, mask=mask, dlogprob=dlogprob, dentropy=dentropy)

    def ours(self, inputs: Tensors, backend: str | None) -> Results:
        """Log-probabilities and entropy by the verb."""
        options: dict[str, Any] = {"softcap": self.softcap, "scale": self.scale, "mask": inputs.mask, "entropy": True}
        options["temperature"] = inputs.temperature if self.warm else 1.0
        found = kf.token_logprob(inputs.x, inputs.ids, **options, backend=backend)
        assert not isinstance(found, Tensor)
        return found._asdict()

    def definition(self, inputs: Tensors) -> Results:
        """The same by the definition."""
        return self.ours(inputs, "eager")

    def pytorch(self, inputs: Tensors) -> Results:
        """Each step by PyTorch, on logits that are widened first."""
        x = eager.logits(inputs.x, 1.0, 0.0)
        z = eager.logits(unfused.scaled(x, self.scale), 1.0, self.softcap or 0.0, inputs.temperature)
        gone = torch.zeros_like(z, dtype=torch.bool) if inputs.mask is None else ~inputs.mask
        logs = torch.log_softmax(z.masked_fill(gone, -torch.inf), -1)
        entropy = -(logs.exp() * logs.masked_fill(gone, 0.0)).sum(-1)
        return {"logprob": logs.gather(-1, self._many(inputs.ids)).view(inputs.ids.shape), "entropy": entropy}

    def long_double(self, inputs: Tensors) -> Reference:
        """Return log-probabilities, entropy and gradient by formulas."""
        x, ids = self.scale * wide(inputs.x), self._many(inputs.ids).cpu().numpy()
        by = wide(inputs.temperature)[:, None] if self.warm else np.longdouble(1)
        t = np.tanh(x / self.softcap) if self.softcap else np.zeros_like(x)
        z = (self.softcap * t if self.softcap else x) / by
        kept = np.ones(self.shape, bool) if inputs.mask is None else inputs.mask.cpu().numpy()
        z = np.where(kept, z, -np.inf)
        largest = z.max(-1, keepdims=True) if z.size else z
        sums = np.exp(z - largest).sum(-1, keepdims=True)
        logs = np.where(kept, z - largest - np.log(sums), 0)
        p = np.where(kept, np.exp(logs), 0)
        entropy = -(p * logs).sum(-1)
        given = wide(inputs.dlogprob).reshape(ids.shape)
        dz = -p * (given.sum(-1) + wide(inputs.dentropy) * entropy)[:, None] - p * logs * wide(inputs.dentropy)[:, None]
        np.add.at(dz, (np.arange(len(ids))[:, None], ids), given)
        chosen = np.take_along_axis(logs, ids, -1).reshape(tuple(inputs.ids.shape))
        return {"logprob": chosen, "entropy": entropy, "dx": dz * self.scale * (1 - t * t) / by}

    def _many(self, ids: Tensor) -> Tensor:
        return ids if self.num_ids else ids[:, None]


def cases(quick: bool) -> Iterator[Case]:
    """Return the cases of `verify`: short and long rows, each option, strided rows, and no rows."""
    places: tuple[dict[str, Any], ...] = (
        {"shape": (64, 255)},
        {"shape": (5, 4099), "reduction": "mean", "scale": 0.5},
        {"shape": (16, 100), "label_smoothing": 0.1, "weighted": True, "z_loss": 1e-2, "softcap": 3.0},
        {"shape": (0, 8)},
    )
    more: tuple[dict[str, Any], ...] = (
        {"shape": (33, 1000), "layout": "padded", "reduction": "sum"},
        {"shape": (3, 131073), "weighted": True, "reduction": "mean"},
    )
    for dtype, options in product(DTYPES, places if quick else places + more):
        yield CrossEntropyCase("cross_entropy", dtype=dtype, **options)
    chunks: tuple[dict[str, Any], ...] = (
        {"shape": (64, 255), "chunk_rows": 24, "reduction": "mean"},
        {"shape": (16, 100), "label_smoothing": 0.1, "weighted": True, "z_loss": 1e-2, "softcap": 3.0},
        {"shape": (0, 8)},
    )
    for dtype, options in product(DTYPES, chunks):
        yield LinearCrossEntropyCase("linear_cross_entropy", dtype=dtype, **options)
    chosen: tuple[dict[str, Any], ...] = (
        {"shape": (64, 255), "warm": True},
        {"shape": (7, 4099), "num_ids": 3, "masked": True, "softcap": 3.0, "scale": 0.5, "warm": True},
    )
    if not quick:
        chosen += ({"shape": (33, 1000), "layout": "padded"}, {"shape": (3, 131073), "num_ids": 2}, {"shape": (0, 8)})
    for dtype, options in product(DTYPES, chosen):
        yield TokenLogprobCase("token_logprob", dtype=dtype, **options)
