"""Cases of the reductions."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

import kernel_fusion as kf
from kernel_fusion.backends import eager
from kernel_fusion.testing import unfused
from kernel_fusion.testing.budget import Reference
from kernel_fusion.testing.case import Case, Draw, Results, Tensors, wide


@dataclass
class Reduced(Tensors):
    """Input and cotangent of a reduction."""

    x: Tensor
    dy: Tensor


@dataclass(frozen=True)
class ReduceCase(Case):
    """One call of a reduction.

    Attributes:
        verb: "sum_squared" or "mean_abs".
        shape, dtype: of the input.
        dim, keepdim, out_dtype: `dim`, `keepdim` and `dtype` of the verb.
        layout: of the input, as in `lay_out`.
        mean, std: of the input's values.
    """

    dim: int | tuple[int, ...] | None = None
    keepdim: bool = False
    out_dtype: torch.dtype | None = None
    layout: str = "contiguous"
    mean: float = 0.0
    std: float = 0.25  # keeps the sum of 10^6 squares below fp16's largest number

    @property
    def dims(self) -> tuple[int, ...]:
        """The reduced dimensions; all for None."""
        given = range(len(self.shape)) if self.dim is None else (self.dim,) if isinstance(self.dim, int) else self.dim
        return tuple(d % max(1, len(self.shape)) for d in given)

    @property
    def result_size(self) -> int:
        """The product of the kept sizes."""
        return math.prod(size for d, size in enumerate(self.shape) if d not in self.dims)

    def make_inputs(self, device: torch.device | str, seed: int = 0) -> Reduced:
        """x and dy."""
        draw = Draw(device, seed)
        x = draw.normal(self.shape, self.dtype, self.mean, self.std, self.layout)
        y = x.sum(self.dim, self.keepdim)
        return Reduced(x.requires_grad_(), draw.normal(tuple(y.shape), self.out_dtype or self.dtype))

    def ours(self, inputs: Reduced, backend: str | None) -> Results:
        """y by the verb."""
        verb = getattr(kf, self.verb)
        return {"y": verb(inputs.x, self.dim, self.keepdim, dtype=self.out_dtype, backend=backend)}

    def definition(self, inputs: Reduced) -> Results:
        """y by the operator's definition."""
        dims = [] if self.dim is None else list(self.dims)
        return {"y": eager.reduce(inputs.x, dims, self.keepdim, self.verb, None)}

    def pytorch(self, inputs: Reduced) -> Results:
        """The pointwise function and the reduction, both in the result's dtype."""
        x = inputs.x.to(self.out_dtype or self.dtype)
        return {"y": unfused.reduce(self.verb, x, self.dim, self.keepdim)}

    def long_double(self, inputs: Reduced) -> Reference:
        """Sums by NumPy, and their gradients."""
        x, dims = wide(inputs.x), self.dims
        dy = wide(inputs.dy)
        dy = dy if self.keepdim or not self.shape else np.expand_dims(dy, dims)
        if self.verb == "sum_squared":
            return {"y": np.asarray((x * x).sum(dims, keepdims=self.keepdim)), "dx": 2 * x * dy}
        count = math.prod(self.shape[d] for d in dims) if self.shape else 1
        total = np.asarray(np.abs(x).sum(dims, keepdims=self.keepdim))
        return {"y": np.asarray(total / count if count else total * np.nan), "dx": np.sign(x) * dy / max(1, count)}
