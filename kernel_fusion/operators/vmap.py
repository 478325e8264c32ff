"""The rules of the operators for `torch.vmap`.

If only the input is batched, one call with more rows serves all examples. In all other cases (a batched weight or mask,
dropout) there is a call per example.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kernel_fusion.core import signatures
from kernel_fusion.operators import schemas


def _batched(dim: Any) -> bool:
    """Whether an entry of `in_dims` means a batched argument. For a list of numbers it is a list of None."""
    return isinstance(dim, int)


def _one_by_one(operator: Any, info: Any, in_dims: tuple[Any, ...], args: list[Any]) -> tuple[Any, Any]:
    def example(index: int) -> Any:
        dims = (*in_dims, *[None] * (len(args) - len(in_dims)))
        return operator(*(arg.select(d, index) if _batched(d) else arg for arg, d in zip(args, dims, strict=True)))

    examples = [example(index) for index in range(info.batch_size)]
    if isinstance(examples[0], Tensor):
        return torch.stack(examples), 0
    return tuple(torch.stack(parts) for parts in zip(*examples, strict=True)), (0,) * len(examples[0])


def register(name: str, prefix: str = "") -> None:
    """Give a rule to the operator `name`, or to the operator `prefix` + `name` of a backend."""
    signature = signatures.OPERATORS[name]
    operator = schemas.overload(prefix + name)

    def rule(info: Any, in_dims: tuple[Any, ...], *given: Any) -> Any:
        args = schemas.bind(operator, given, {})
        if in_dims[0] is not None and not any(map(_batched, in_dims[1:])):
            batched = _more_rows(signature, args[0].movedim(in_dims[0], 0), args[1:])
            if batched is not None:
                return operator(*batched), 0
        return _one_by_one(operator, info, in_dims, args)

    torch.library.register_vmap(f"kernel_fusion::{prefix}{name}", rule, lib=schemas.library)


def _more_rows(operator: signatures.Operator, input: Tensor, args: Sequence[Any]) -> list[Any] | None:
    """The arguments of one call with more rows, or None if that would compute something else.

    Args:
        operator: its rows must be independent, it must have one result, and nothing but vectors beside the input.
        input: the input, with the batch before its other dimensions.
        args: the operator's other arguments.
    """
    others = [each for kind in ("rows", "mask", "place") for each in operator.of_kind(kind, (None, *args))]
    if operator.row_dims is None or len(operator.results) > 1 or others:
        return None
    if input.dim() == 1 and operator.of_kind("dims", (None, *args)):
        return None  # an example has no dimensions, and an empty list means all of them
    arguments = zip(operator.arguments[1:], args, strict=True)
    return [input, *(_shifted(each, input.dim()) if a.kind == "dims" else each for a, each in arguments)]


def _shifted(dims: list[int], num_dims: int) -> list[int]:
    """The same dimensions after a first one; an empty list means all but that."""
    return [d + 1 if d >= 0 else d for d in dims] or list(range(1, num_dims))


for _name in signatures.VERBS | signatures.QUANTIZED:
    register(_name)
