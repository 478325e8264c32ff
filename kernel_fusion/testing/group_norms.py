"""Cases of group norms."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

import kernel_fusion as kf
from kernel_fusion.backends import eager
from kernel_fusion.core.activations import IDENTITY, formula
from kernel_fusion.core.group_norm import per_channel, spread
from kernel_fusion.testing.budget import Array, Reference
from kernel_fusion.testing.case import DTYPES, Case, Draw, Results, Tensors, wide
from kernel_fusion.testing.long_double import ACTIVATIONS

EPS = 1e-5


@dataclass(frozen=True)
class GroupNormCase(Case):
    """One call of `group_norm`.

    Attributes:
        groups: The number of groups.
        weight: The dtype of weight and bias; None without them.
        around: The dtype of `add`, `scale` and `shift`; None without them.
        full: Whether these have the shape of the input, and not one number per sample and channel.
        layout: The layout of the input and of dy, as in `lay_out`.
    """

    groups: int = 2
    weight: torch.dtype | None = None
    around: torch.dtype | None = None
    full: bool = False
    scale_offset: float = 1.0
    activation: str = IDENTITY
    layout: str = "contiguous"
    mean: float = 0.0
    std: float = 1.0

    @property
    def runs_kernels(self) -> bool:
        """The definition serves what has the shape of the input."""
        return not self.full and super().runs_kernels

    def make_inputs(self, device: torch.device | str, seed: int = 0) -> Tensors:
        """Draw the input, what stands around it, and dy."""
        draw = Draw(device, seed)
        x = draw.normal(self.shape, self.dtype, self.mean, self.std, self.layout)
        weight, bias = (
            None if self.weight is None else draw.normal(self.shape[1:2], self.weight, mean) for mean in (1.0, 0.0)
        )
        shape = self.shape if self.full else self.shape[:2]
        add, scale, shift = (None if self.around is None else draw.normal(shape, self.around) for _ in range(3))
        leaves = {"x": x, "weight": weight, "bias": bias, "add": add, "scale": scale, "shift": shift}
        for leaf in leaves.values():
            if leaf is not None:
                leaf.requires_grad_()
        return Tensors(**leaves, dy=draw.normal(self.shape, self.dtype, layout=self.layout))

    def ours(self, inputs: Tensors, backend: str | None) -> Results:
        """The result of the verb."""
        options: dict[str, Any] = {name: getattr(inputs, name) for name in ("add", "scale", "shift")}
        options |= {"scale_offset": self.scale_offset, "activation": self.activation, "backend": backend}
        return {"y": kf.group_norm(inputs.x, self.groups, inputs.weight, inputs.bias, EPS, **options)}

    def definition(self, inputs: Tensors) -> Results:
        """The result of the operator's definition."""
        around = [per_channel("group_norm", n, getattr(inputs, n), inputs.x) for n in ("add", "scale", "shift")]
        norm = inputs.x, self.groups, inputs.weight, inputs.bias
        return {"y": eager.group_norm(*norm, *around, EPS, self.scale_offset, self.activation, None)}

    def _spread(self, t: Tensor) -> Tensor:
        return spread(t, len(self.shape))

    def pytorch(self, inputs: Tensors) -> Results:
        """The sum, `F.group_norm`, the modulation and the activation, each by PyTorch."""
        mixed = self.weight not in (None, self.dtype) or self.around not in (None, self.dtype)
        wide_x = inputs.x.to(torch.float32) if mixed else inputs.x
        around = [
            None if t is None else self._spread(t.to(wide_x.dtype)) for t in (inputs.add, inputs.scale, inputs.shift)
        ]
        add, scale, shift = around
        weight, bias = (None if t is None else t.to(wide_x.dtype) for t in (inputs.weight, inputs.bias))
        y = F.group_norm(wide_x if add is None else wide_x + add, self.groups, weight, bias, EPS)
        y = y if scale is None else y * (self.scale_offset + scale)
        y = y if shift is None else y + shift
        return {"y": formula(self.activation)(y).to(self.dtype)}

    def long_double(self, inputs: Tensors) -> Reference:
        """Return results and gradients by formulas."""
        one, none = np.longdouble(1), np.longdouble(0)
        x, dy = wide(inputs.x), wide(inputs.dy)
        samples, channels = x.shape[:2]
        grouped = (samples, self.groups, -1)

        def everywhere(t: Tensor | None, otherwise: np.longdouble) -> Array:
            value = otherwise if t is None else wide(self._spread(t))
            return np.broadcast_to(value, x.shape)

        def of_channels(t: Tensor | None, otherwise: np.longdouble) -> Array:
            value = np.full(channels, otherwise) if t is None else wide(t)
            return value.reshape(-1, *[1] * (x.ndim - 2))

        def mean(t: Array) -> Array:
            return np.broadcast_to(t.reshape(grouped).mean(-1, keepdims=True), t.reshape(grouped).shape).reshape(
                x.shape
            )

        u = x + everywhere(inputs.add, none)
        centred = u - mean(u)
        rstd = 1 / np.sqrt(mean(centred**2) + np.longdouble(EPS))
        xhat = centred * rstd
        weight, bias = of_channels(inputs.weight, one), of_channels(inputs.bias, none)
        offset = none if inputs.scale is None else np.longdouble(self.scale_offset)
        factor = everywhere(inputs.scale, one) + offset
        z = (xhat * weight + bias) * factor + everywhere(inputs.shift, none)
        act = ACTIVATIONS[self.activation]
        g = dy * act.slope(z)
        v = g * weight * factor
        dx = rstd * (v - mean(v) - xhat * mean(v * xhat))
        positions = tuple(range(2, x.ndim))
        over = positions if not self.full else ()
        results = {"y": act.value(z), "dx": dx}
        if inputs.weight is not None:
            results |= {
                "dweight": (g * factor * xhat).sum((0, *positions)),
                "dbias": (g * factor).sum((0, *positions)),
            }
        if self.around is not None:
            results |= {
                "dadd": dx.sum(over),
                "dscale": (g * (xhat * weight + bias)).sum(over),
                "dshift": g.sum(over),
            }
        return results


def cases(quick: bool) -> Iterator[Case]:
    """Return cases of group norms, contiguous and with channels last, with and without what may stand around them.

    The shapes are short rows, of one block on a GPU; long rows, of pieces, the last of them shorter; groups of one
    channel; one group; an odd number of positions, which has no whole vectors; and one position.
    """
    quick_grid: tuple[dict[str, Any], ...] = (
        {"shape": (2, 12, 5, 6), "groups": 3, "activation": "silu"},
        {"shape": (2, 32, 33, 35), "groups": 1, "layout": "channels-last"},
        {"shape": (3, 8, 7), "groups": 4, "layout": "channels-last", "activation": "silu"},
    )
    more: tuple[dict[str, Any], ...] = (
        {"shape": (1, 8, 90, 102), "groups": 2, "activation": "gelu"},
        {"shape": (2, 6, 3, 4, 5), "groups": 3, "activation": "leaky_relu"},
        {"shape": (9, 24, 1, 1), "groups": 2},
        {"shape": (2, 12, 8, 8), "groups": 3, "mean": 1e3},
        {"shape": (2, 12, 8, 8), "groups": 3, "layout": "transposed"},
    )
    mixes = (*((dtype, dtype) for dtype in DTYPES), (torch.bfloat16, torch.float32))
    for dtype, parameters in mixes:
        for options in quick_grid if quick else quick_grid + more:
            yield GroupNormCase("group_norm", dtype=dtype, **options)
            yield GroupNormCase("group_norm", dtype=dtype, weight=parameters, around=parameters, **options)
        yield GroupNormCase("group_norm", (2, 6, 3, 5), dtype, 6, weight=parameters)
        yield GroupNormCase("group_norm", (2, 6, 3, 4), dtype, around=dtype, full=True, scale_offset=0.0)
