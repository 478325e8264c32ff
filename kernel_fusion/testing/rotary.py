"""Cases of the rotary embedding, alone and after the norm of each head."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

import kernel_fusion as kf
from kernel_fusion.backends import eager
from kernel_fusion.core.rotary import Rotary
from kernel_fusion.testing import unfused
from kernel_fusion.testing.budget import Array, Reference
from kernel_fusion.testing.case import Case, Draw, Results, Tensors, wide

EPS = 1e-6
# How many more rows than tokens the tables have if tokens have positions in them.
_MORE_ROWS = 3


@dataclass(frozen=True)
class RotaryCase(Case):
    """One call of `rope` or `qk_norm_rope`.

    Attributes:
        shape: The shape of the query, whose heads are its dimension `unsqueeze_dim`.
        dtype: The dtype of query and key.
        pairs: How many pairs of columns of a head are rotated.
        key_heads: How many heads the key of `qk_norm_rope` has.
        weight: The dtype of the weights, or None if there are none.
        angles: The dtype of cos and sin; None for that of the query.
        positions: Whether tokens have positions in a table.
        fused: Whether the heads are some of those that a wider projection has in memory, token by token.
    """

    pairs: int = 8
    key_heads: int = 1
    weight: torch.dtype | None = None
    angles: torch.dtype | None = None
    positions: bool = False
    fused: bool = False
    interleaved: bool = False
    unsqueeze_dim: int = 1
    weight_offset: float = 0.0
    rounding: str = "once"

    @property
    def _normed(self) -> bool:
        return self.verb == "qk_norm_rope"

    @property
    def result_size(self) -> int:
        """The number of elements of a weight's gradient if there is a weight, and else of the smallest result."""
        return super().result_size if self.weight is None else self.shape[-1]

    def make_inputs(self, device: torch.device | str, seed: int = 0) -> Tensors:
        """Draw heads, weights, positions and cotangents, and the cosines and sines of angles of any size."""
        draw = Draw(device, seed)
        batch, tokens = self.shape[0], self.shape[3 - self.unsqueeze_dim]
        key_shape = tuple(self.key_heads if d == self.unsqueeze_dim else n for d, n in enumerate(self.shape))
        query, dy = self._heads(draw, self.shape), self._heads(draw, self.shape)
        key, dy_key = (self._heads(draw, key_shape) if self._normed else None for _ in range(2))
        query_weight, key_weight = (
            None if self.weight is None else draw.normal(self.shape[-1:], self.weight, 1.0 - self.weight_offset)
            for _ in range(2)
        )
        rows = tokens + _MORE_ROWS if self.positions else tokens
        angles = draw.normal((rows, self.pairs), torch.float64, std=3.0)
        cos, sin = (t.to(self.angles or self.dtype) for t in (angles.cos(), angles.sin()))
        positions = None
        if self.positions:
            positions = draw.normal((batch, tokens), torch.float64, std=9.0).long() % rows
        leaves = {"query": query, "key": key, "query_weight": query_weight, "key_weight": key_weight}
        for leaf in leaves.values():
            if leaf is not None:
                leaf.requires_grad_()
        return Tensors(**leaves, cos=cos, sin=sin, positions=positions, dy=dy, dy_key=dy_key)

    def _heads(self, draw: Draw, shape: tuple[int, ...]) -> Tensor:
        x = draw.normal(shape, self.dtype, std=2.0)
        if not self.fused:
            return x
        of_tokens = x if self.unsqueeze_dim == 2 else x.transpose(1, 2)
        batch, tokens, heads, cols = of_tokens.shape
        wider = x.new_empty(batch, tokens, heads + 2, cols)[:, :, 1:-1].copy_(of_tokens)
        return wider if self.unsqueeze_dim == 2 else wider.transpose(1, 2)

    def ours(self, inputs: Tensors, backend: str | None) -> Results:
        """The results by the verb."""
        options: dict[str, Any] = {"interleaved": self.interleaved, "positions": inputs.positions}
        options |= {"unsqueeze_dim": self.unsqueeze_dim, "backend": backend}
        if not self._normed:
            return {"y": kf.rope(inputs.query, inputs.cos, inputs.sin, **options)}
        weights = inputs.query_weight, inputs.key_weight
        options |= {"weight_offset": self.weight_offset, "rounding": self.rounding}
        y, y_key = kf.qk_norm_rope(inputs.query, inputs.key, *weights, inputs.cos, inputs.sin, EPS, **options)
        return {"y": y, "y_key": y_key}

    def _in_order(self, x: Any) -> Any:
        return x if x is None or self.unsqueeze_dim == 2 else x.transpose(1, 2)

    def _arguments(self, inputs: Tensors) -> Rotary:
        query, key = self._in_order(inputs.query), self._in_order(inputs.key)
        tensors = query, key, inputs.query_weight, inputs.key_weight, inputs.cos[None], inputs.sin[None]
        eps = EPS if self._normed else None
        return Rotary(*tensors, inputs.positions, eps, self.weight_offset, self.interleaved, self.rounding)

    def _results(self, values: list[Any]) -> dict[str, Any]:
        """The results by name, with their dimensions in the order of the arguments'."""
        of_verb = [v if self.unsqueeze_dim == 2 else v.swapaxes(1, 2) for v in values]
        return dict(zip(("y", "y_key"), of_verb, strict=False))

    def definition(self, inputs: Tensors) -> Results:
        """Return the results of the operator's definition."""
        results = eager.qk_norm_rope(*self._arguments(inputs))
        return self._results(list(results[: 1 + self._normed]))

    def pytorch(self, inputs: Tensors) -> Results:
        """Return the results of a norm, two products and a sum, with PyTorch's ways to put pairs in their places."""
        c = self._arguments(inputs)
        cos, sin = (t[0][inputs.positions] if self.positions else t for t in (c.cos, c.sin))
        values = []
        for _, x, weight in c.heads:
            n = x
            if self._normed:
                offset = self.weight_offset if weight is not None else 0.0
                norm: dict[str, Any] = {"rms": True, "weight_offset": offset, "rounding": self.rounding}
                n = unfused.norm(x, x.shape[-1:], weight, None, EPS, **norm)
            values.append(unfused.rope(n, cos[:, :, None], sin[:, :, None], self.interleaved).to(x.dtype))
        return self._results(values)

    def long_double(self, inputs: Tensors) -> Reference:
        """Return results and gradients by formulas."""
        c, dys = self._arguments(inputs), [self._in_order(t) for t in (inputs.dy, inputs.dy_key)]
        cos, sin = (wide(t) for t in (c.cos, c.sin))
        if inputs.positions is not None:
            cos, sin = (t[0][inputs.positions.cpu().numpy()] for t in (cos, sin))
        cos, sin = cos[:, :, None], sin[:, :, None]
        values, gradients = [], {}
        for (name, x, weight), dy in zip(c.heads, dys, strict=False):
            y, dx, dweight = self._by_hand(wide(x), weight, wide(dy), cos, sin)
            values.append(y)
            name = "query" if name == "input" else name
            gradients[f"d{name}"] = dx if self.unsqueeze_dim == 2 else dx.swapaxes(1, 2)
            if weight is not None:
                gradients[f"d{name}_weight"] = dweight
        return self._results(values) | gradients

    def _by_hand(
        self, x: Array, weight: Tensor | None, dy: Array, cos: Array, sin: Array
    ) -> tuple[Array, Array, Array]:
        """y of the heads `x`, and the gradients of these heads and of their weight."""
        g = self._turned(dy, cos, -sin)
        if not self._normed:
            return self._turned(x, cos, sin), g, g
        w = np.longdouble(1) if weight is None else wide(weight) + self.weight_offset
        rstd = 1 / np.sqrt((x * x).mean(-1, keepdims=True) + np.longdouble(EPS))
        n = x * rstd
        dx = rstd * (g * w - n * (g * w * n).mean(-1, keepdims=True))
        return self._turned(n * w, cos, sin), dx, (g * n).sum((0, 1, 2))

    def _turned(self, x: Array, cos: Array, sin: Array) -> Array:
        y: Array = x.copy()
        half = self.pairs
        first = slice(0, 2 * half, 2) if self.interleaved else slice(0, half)
        second = slice(1, 2 * half, 2) if self.interleaved else slice(half, 2 * half)
        y[..., first] = x[..., first] * cos - x[..., second] * sin
        y[..., second] = x[..., second] * cos + x[..., first] * sin
        return y
