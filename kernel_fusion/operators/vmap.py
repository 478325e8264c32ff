"""The rules of the operators for `torch.vmap`.

If only the input is batched, one call with more rows serves all examples. In all other cases (a batched weight or mask,
dropout) there is a call per example.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

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
    rows = _RULES[name]
    operator = schemas.overload(prefix + name)

    def rule(info: Any, in_dims: tuple[Any, ...], *given: Any) -> Any:
        args = schemas.bind(operator, given, {})
        if in_dims[0] is not None and not any(map(_batched, in_dims[1:])):
            batched = rows(args[0].movedim(in_dims[0], 0), *args[1:])
            if batched is not None:
                return operator(*batched), 0
        return _one_by_one(operator, info, in_dims, args)

    torch.library.register_vmap(f"kernel_fusion::{prefix}{name}", rule, lib=schemas.library)


def _same(input: Tensor, *rest: Any) -> list[Any]:
    return [input, *rest]


def _reduce(input: Tensor, dim: list[int], *rest: Any) -> list[Any] | None:
    if input.dim() == 1:
        return None  # an example has no dimensions, and an empty `dim` means all of them
    dims = [d + 1 if d >= 0 else d for d in dim] or list(range(1, input.dim()))
    return [input, dims, *rest]


def _softmax(input: Tensor, mask: Tensor | None, *rest: Any) -> list[Any] | None:
    return [input, mask, *rest] if mask is None else None


# For each operator, the arguments of one call with more rows, or None if that would compute something else.
_RULES: dict[str, Callable[..., list[Any] | None]] = {
    "layer_norm": _same,
    "rms_norm": _same,
    "staged_row_norm": lambda *args: None,
    "pointwise": lambda a, b, *rest: [a, b, *rest] if b is None and rest[-1] is None else None,
    "reduce": _reduce,
    "softmax": _softmax,
    "qk_norm_rope": lambda *args: None,
    **dict.fromkeys(schemas.QUANTIZED, lambda *args: None),
}
for _name in _RULES:
    register(_name)
