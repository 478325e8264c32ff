"""Cases of the pointwise chains and of the reductions."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

import kernel_fusion as kf
from kernel_fusion.backends import eager
from kernel_fusion.core.activations import IDENTITY
from kernel_fusion.testing import long_double, unfused
from kernel_fusion.testing.budget import Array, Reference
from kernel_fusion.testing.case import Case, Draw, Results, Tensors, dropout_factors, dropout_seed, seeded, wide
from kernel_fusion.testing.long_double import sum_to

# How each function combines its operands, by the name that the operator has for it.
_COMBINES = {"add_act": "add", "bias_act": "add", "mul_act": "mul", "gated_act": "gate", "act_dropout": "first"}


@dataclass(frozen=True)
class PointwiseCase(Case):
    """One call of a pointwise function.

    Attributes:
        verb: The function: "add_act", "mul_act", "bias_act", "act_dropout" or "gated_act".
        shape: The shape of the first operand.
        dtype: The dtype of the first operand.
        other: The shape of the second operand; None for that of the first one.
        other_dtype: The dtype of the second operand; None for that of the first one.
        layout: The layout of the first operand, as in `lay_out`.
        other_layout: The layout of the second operand.
    """

    activation: str | None = "relu"
    other: tuple[int, ...] | None = None
    other_dtype: torch.dtype | None = None
    dropout_p: float = 0.0
    layout: str = "contiguous"
    other_layout: str = "contiguous"
    mean: float = 0.0
    std: float = 2.0

    @property
    def runs_kernels(self) -> bool:
        """Whether the result has elements."""
        other = self.shape if self.other is None else self.other
        return 0 not in tuple(torch.broadcast_shapes(self.shape, other))

    def make_inputs(self, device: torch.device | str, seed: int = 0) -> Tensors:
        """Draw the operands, and dy in the shape and dtype of PyTorch's sum."""
        draw = Draw(device, seed)
        a = draw.normal(self.shape, self.dtype, self.mean, self.std, self.layout)
        b = None
        if self.verb != "act_dropout":
            shape, dtype = self.shape if self.other is None else self.other, self.other_dtype or self.dtype
            b = draw.normal(shape, dtype, self.mean, self.std, self.other_layout)
        y = a if b is None else a + b
        dy = draw.normal(tuple(y.shape), y.dtype)
        seed_tensor = dropout_seed(device) if self.dropout_p else None
        return Tensors(a=a.requires_grad_(), b=None if b is None else b.requires_grad_(), dy=dy, seed=seed_tensor)

    def ours(self, inputs: Tensors, backend: str | None) -> Results:
        """y by the verb."""
        verb = getattr(kf, self.verb)
        with seeded(inputs.a.device):
            if self.verb == "act_dropout":
                return {"y": verb(inputs.a, self.activation, self.dropout_p, backend=backend)}
            options = {"dropout_p": self.dropout_p} if self.verb == "bias_act" else {}
            return {"y": verb(inputs.a, inputs.b, self.activation, backend=backend, **options)}

    def definition(self, inputs: Tensors) -> Results:
        """y by the operator's definition."""
        chain = _COMBINES[self.verb], self.activation or IDENTITY, 1.0, self.dropout_p, inputs.seed
        return {"y": eager.pointwise(inputs.a, inputs.b, *chain)}

    def pytorch(self, inputs: Tensors) -> Results:
        """Return y by PyTorch's operations, one by one."""

        def dropout(y: Tensor) -> Tensor:
            return y * dropout_factors(y.detach(), self.dropout_p, inputs.seed) if self.dropout_p else y * 1

        return {"y": unfused.pointwise(self.verb, inputs.a, inputs.b, self.activation, dropout)}

    def long_double(self, inputs: Tensors) -> Reference:
        """Return y and the gradients by value and slope of the activation."""
        act = long_double.ACTIVATIONS[self.activation or IDENTITY]
        a, b = wide(inputs.a), wide(torch.zeros(()) if inputs.b is None else inputs.b)
        laid_out = inputs.a.detach() if inputs.b is None else (inputs.a + inputs.b).detach()
        keep = wide(dropout_factors(laid_out, self.dropout_p, inputs.seed))
        dy = keep * wide(inputs.dy)
        y: Array
        da: Array
        db: Array
        if self.verb == "gated_act":
            y, da, db = act.value(a) * b, act.slope(a) * b * dy, act.value(a) * dy
        elif self.verb == "mul_act":
            slope = act.slope(a * b) * dy
            y, da, db = act.value(a * b), slope * b, slope * a
        else:
            y, da = act.value(a + b), act.slope(a + b) * dy
            db = da
        results = {"y": keep * y, "da": sum_to(da, inputs.a.shape)}
        return results if inputs.b is None else results | {"db": sum_to(db, inputs.b.shape)}


@dataclass(frozen=True)
class ReduceCase(Case):
    """One call of "sum_squared" or "mean_abs". `out_dtype` is its argument `dtype`, and `layout` that of the input."""

    dim: int | tuple[int, ...] | None = None
    keepdim: bool = False
    out_dtype: torch.dtype | None = None
    layout: str = "contiguous"
    mean: float = 0.0
    std: float = 0.25  # keeps the sum of 10^6 squares below fp16's largest number

    @property
    def dims(self) -> tuple[int, ...]:
        """The reduced dimensions, which are all of them for a `dim` of None."""
        given = range(len(self.shape)) if self.dim is None else (self.dim,) if isinstance(self.dim, int) else self.dim
        return tuple(d % max(1, len(self.shape)) for d in given)

    @property
    def result_size(self) -> int:
        """The number of elements of the result."""
        return math.prod(size for d, size in enumerate(self.shape) if d not in self.dims)

    def make_inputs(self, device: torch.device | str, seed: int = 0) -> Tensors:
        """x and dy."""
        draw = Draw(device, seed)
        x = draw.normal(self.shape, self.dtype, self.mean, self.std, self.layout)
        y = x.sum(self.dim, self.keepdim)
        return Tensors(x=x.requires_grad_(), dy=draw.normal(tuple(y.shape), self.out_dtype or self.dtype))

    def ours(self, inputs: Tensors, backend: str | None) -> Results:
        """y by the verb."""
        verb = getattr(kf, self.verb)
        return {"y": verb(inputs.x, self.dim, self.keepdim, dtype=self.out_dtype, backend=backend)}

    def definition(self, inputs: Tensors) -> Results:
        """y by the operator's definition."""
        dims = [] if self.dim is None else list(self.dims)
        return {"y": eager.reduce(inputs.x, dims, self.keepdim, self.verb, None)}

    def pytorch(self, inputs: Tensors) -> Results:
        """Return y by the pointwise function and the reduction, both in the dtype of the result."""
        x = inputs.x.to(self.out_dtype or self.dtype)
        return {"y": unfused.reduce(self.verb, x, self.dim, self.keepdim)}

    def long_double(self, inputs: Tensors) -> Reference:
        """Return y by NumPy's sum, and its gradient by its formula."""
        x, dims = wide(inputs.x), self.dims
        dy = wide(inputs.dy)
        dy = dy if self.keepdim or not self.shape else np.expand_dims(dy, dims)
        if self.verb == "sum_squared":
            return {"y": np.asarray((x * x).sum(dims, keepdims=self.keepdim)), "dx": 2 * x * dy}
        count = math.prod(self.shape[d] for d in dims) if self.shape else 1
        total = np.asarray(np.abs(x).sum(dims, keepdims=self.keepdim))
        return {"y": np.asarray(total / count if count else total * np.nan), "dx": np.sign(x) * dy / max(1, count)}
