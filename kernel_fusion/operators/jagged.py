"""Jagged nested tensors. Our kernels read the rows of their `values()`; PyTorch serves calls that mix rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from kernel_fusion.core import signatures


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
    given = _by_rows(signatures.OPERATORS[name], args) if _alike(jagged, tensors) else None
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


def _by_rows(operator: signatures.Operator, args: Sequence[Any]) -> list[Any] | None:
    """The arguments for the values of jagged tensors, or None if a row of the result reads more than its own row."""
    dims = None if operator.row_dims is None else operator.row_dims(operator.by_name(args))
    if dims is None or operator.of_kind("mask", args):
        return None
    tensors = operator.of_kind("rows", args)
    most = max(t.dim() for t in tensors)
    for t in tensors:
        shared = dims == 0 and not has_rows(t) and t.dim() <= most - 2  # such a tensor does not vary over examples
        if not shared and not has_rows_of(t, dims):
            return None
    pairs = zip(operator.arguments, args, strict=False)
    return [[d - most if d >= 0 else d for d in each] if a.kind == "dims" else each for a, each in pairs]
