"""Jagged nested tensors. Our kernels read the rows of their `values()`; PyTorch serves calls that mix rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kernel_fusion.core.spec import ROWS
from kernel_fusion.core.stages import norm_call


def has_rows(value: Any) -> bool:
    """Whether the `values()` of a jagged tensor are exactly the rows of its examples, without gaps."""
    jagged = isinstance(value, Tensor) and value.is_nested and value.layout == torch.jagged
    return jagged and value.lengths() is None and value._ragged_idx == 1


def has_rows_of(value: Any, num_dims: int) -> bool:
    """Whether that holds, and the last `num_dims` dimensions lie within a row."""
    return has_rows(value) and num_dims <= value.dim() - 2


def serve(name: str, choose: Callable[..., Callable[..., Any]], tensors: tuple[Any, ...], *args: Any) -> Any:
    """Call the operator `name` on the values of jagged tensors, if it treats all rows alike.

    Args:
        choose: returns the callable that serves given plain tensors.
        tensors: all tensors that the call reads.
        args: the operator's arguments, tensors first.
    """
    jagged = [arg for arg in args if has_rows(arg)]
    given = _ROWWISE[name](*args) if _alike(jagged, tensors) else None
    if given is None:
        return choose(*tensors)(*args)
    values = [_values(arg) for arg in given]
    results = choose(*map(_values, tensors))(*values)
    rows = jagged[0].values().shape[0]

    def jagged_again(result: Tensor) -> Tensor:
        if result.dim() == 0 or result.shape[0] != rows:  # the empty result in place of an absent residual
            return result
        return torch.nested.nested_tensor_from_jagged(result, jagged[0].offsets())

    return jagged_again(results) if isinstance(results, Tensor) else tuple(map(jagged_again, results))


def _values(value: Any) -> Any:
    return value.values() if has_rows(value) else value


def _alike(jagged: list[Tensor], tensors: tuple[Any, ...]) -> bool:
    nested = [t for t in tensors if isinstance(t, Tensor) and t.is_nested]
    return len(nested) == len(jagged) and all(t.shape[:2] == jagged[0].shape[:2] for t in nested)


def _norm(input: Tensor, num_dims: int, *rest: Any) -> tuple[Any, ...] | None:
    return (input, num_dims, *rest) if has_rows_of(input, num_dims) else None


def _staged_norm(*args: Any) -> tuple[Any, ...] | None:
    c = norm_call(*args)
    rows = c.input, c.residual, *(getattr(c.stages, name) for name in ROWS)
    return args if all(t is None or has_rows_of(t, c.num_dims) for t in rows) else None


def _pointwise(a: Tensor, b: Tensor | None, *rest: Any) -> tuple[Any, ...] | None:
    plain = [t for t in (a, b) if t is not None and not has_rows(t)]
    dims = max(t.dim() for t in (a, b) if t is not None)
    return (a, b, *rest) if all(t.dim() <= dims - 2 for t in plain) else None  # such tensors do not vary over examples


def _reduce(input: Tensor, dim: list[int], *rest: Any) -> tuple[Any, ...] | None:
    dims = [d - input.dim() if d >= 0 else d for d in dim]
    return (input, dims, *rest) if dims and all(d > 1 - input.dim() for d in dims) else None


def _softmax(input: Tensor, mask: Tensor | None, scale: float, causal: bool) -> tuple[Any, ...] | None:
    return (input, mask, scale, causal) if mask is None and input.dim() > 2 + causal else None


_ROWWISE: dict[str, Callable[..., tuple[Any, ...] | None]] = {
    "layer_norm": _norm,
    "rms_norm": _norm,
    "staged_row_norm": _staged_norm,
    "pointwise": _pointwise,
    "reduce": _reduce,
    "softmax": _softmax,
    "qk_norm_rope": lambda *args: None,  # a token's position is its place, which values() do not show
}
