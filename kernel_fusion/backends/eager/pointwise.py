"""Pointwise chains: dropout(scale * f(a, b))."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kernel_fusion.backends.eager.dropout import dropout
from kernel_fusion.core.activations import formula
from kernel_fusion.core.checks import FLOATING, not_float8
from kernel_fusion.core.spec import compute_dtype

_Act = Callable[[Tensor], Tensor]

COMBINES: dict[str, Callable[[_Act, Tensor, Tensor], Tensor]] = {
    "first": lambda act, a, b: act(a),
    "add": lambda act, a, b: act(a + b),
    "mul": lambda act, a, b: act(a * b),
    "gate": lambda act, a, b: act(a) * b,
}


def pointwise(
    a: Tensor, b: Tensor | None, combine: str, activation: str, scale: float, dropout_p: float, seed: Tensor | None
) -> Tensor:
    """The definition. Absent, `b` and `seed` are None."""
    if a.dim() == 0 and (b is None or (b.dim() == 0 and b.device == a.device)):
        # torch.func.jvp would widen the tangent of a 0-d tensor that meets a float.
        chain = combine, activation, scale, dropout_p, seed
        return pointwise(a[None], None if b is None else b[None], *chain)[0]
    dtype = a.dtype if b is None else _promoted(a, b)
    act = formula(activation)
    if dtype not in FLOATING:  # PyTorch's
        not_float8("pointwise", dtype)
        y = COMBINES[combine](act, a, a if b is None else b)
        y = y if scale == 1.0 else y * scale
        return y if seed is None else torch.nn.functional.dropout(y, dropout_p)
    wide = compute_dtype(dtype)
    first = a.to(wide)
    y = COMBINES[combine](act, first, first if b is None else b.to(wide))
    return dropout(y if scale == 1.0 else y * scale, dropout_p, seed).to(dtype)


def _promoted(a: Tensor, b: Tensor) -> torch.dtype:
    if (a.dim() == 0) == (b.dim() == 0):
        return torch.promote_types(a.dtype, b.dtype)
    return torch.result_type(a, b)  # for Dynamo
