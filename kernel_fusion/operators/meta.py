"""The shapes and dtypes of results, for tracing, by PyTorch's own calls.

The norms compute theirs in C++. Quantised functions are made of operators that have theirs here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kernel_fusion.core import arguments, signatures
from kernel_fusion.core.group_norm import GroupNorm
from kernel_fusion.core.group_norm import result_like as group_norm_like
from kernel_fusion.core.quantize import empty_scales
from kernel_fusion.core.rotary import result_like
from kernel_fusion.core.spec import compute_dtype
from kernel_fusion.operators.schemas import library


def _meta(function: Callable[..., Any]) -> Callable[..., Any]:
    """Register a function as the Meta kernel of the operator that has its name."""

    def checked(*args: Any) -> Any:
        arguments.one_device(function.__name__, args)
        return function(*args)

    library.impl(function.__name__, checked, "Meta")
    return function


def _like_an_argument(operator: signatures.Operator) -> Callable[..., Tensor]:
    """The contiguous result of an operator whose signature says which argument it is like."""

    def result(*args: Any) -> Tensor:
        like: Tensor = operator.by_name(args)[operator.like]
        return torch.empty_like(like, memory_format=torch.contiguous_format)

    result.__name__ = operator.name
    return result


for _operator in signatures.OPERATORS.values():
    if _operator.like:
        _meta(_like_an_argument(_operator))


@_meta
def pointwise(a: Tensor, b: Tensor | None, *_: Any) -> Tensor:
    """The sum's, by PyTorch's rules."""
    return torch.empty_like(a) if b is None else torch.empty_like(torch.add(a, b))


@_meta
def pointwise_fwd(a: Tensor, b: Tensor | None, *rest: Any) -> tuple[Tensor, Tensor]:
    """The result, and memory for one bit per element."""
    y = pointwise(a, b, *rest)
    return y, y.new_empty((y.numel() + 7) // 8, dtype=torch.uint8)


@_meta
def pointwise_bwd(dy: Tensor, a: Tensor, b: Tensor | None, *rest: Any) -> tuple[Tensor, Tensor]:
    """The gradients that the mask, the last argument, asks for."""
    wants = rest[-1]
    return (
        torch.empty_like(dy if a.dtype == torch.uint8 else a) if wants[0] else dy.new_empty(0),
        torch.empty_like(b) if b is not None and wants[1] else dy.new_empty(0),
    )


@_meta
def reduce(input: Tensor, dim: list[int], keepdim: bool, _: str, dtype: torch.dtype | None) -> Tensor:
    """The sum's, by PyTorch's rules."""
    return torch.empty_like(input.sum(dim, keepdim, dtype=dtype or input.dtype))


@_meta
def token_logprob(input: Tensor, ids: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    """Numbers for each id and for each row."""
    *_, extra, predicts = rest
    wide = compute_dtype(input.dtype)
    number, nothing = input.new_empty(input.shape[:-1], dtype=wide), input.new_empty(0, dtype=wide)
    predicted = number if predicts else nothing
    return (
        input.new_empty(ids.shape, dtype=wide),
        number,
        torch.empty_like(number),
        nothing if extra == "none" else torch.empty_like(number),
        torch.empty_like(predicted, dtype=torch.int64),
    )


@_meta
def qk_norm_rope(query: Tensor, key: Tensor | None, *_: Any) -> tuple[Tensor, Tensor]:
    """Query and key, each with its dimensions in the order of its argument's strides."""
    return result_like(query), query.new_empty(0) if key is None else result_like(key)


@_meta
def qk_norm_rope_bwd(dy: Tensor, dy_key: Tensor | None, query: Tensor | None, key: Tensor | None, *rest: Any) -> Any:
    """The gradients that the mask, the last argument, asks for. Those of weights have the length of a head."""
    heads = dy if query is None else query, dy_key if key is None else key
    like: list[tuple[Tensor | None, Callable[..., Tensor]]] = [
        *((t, result_like) for t in heads),
        *((weight, torch.empty_like) for weight in rest[:2]),
    ]
    return tuple(
        make(t) if wanted and t is not None else dy.new_empty(0)
        for (t, make), wanted in zip(like, rest[-1], strict=True)
    )


@_meta
def group_norm(*args: Any) -> Tensor:
    """As the input lies, contiguous or with channels last."""
    c = GroupNorm(*args)
    return group_norm_like(c.input, c.out_dtype or c.input.dtype)


@_meta
def group_norm_fwd(*args: Any) -> tuple[Tensor, Tensor]:
    """The result, and the statistics of each group."""
    c = GroupNorm(*args)
    stats = c.input.new_empty((2, c.input.shape[0], c.num_groups), dtype=compute_dtype(c.input.dtype))
    return group_norm(*args), stats


@_meta
def group_norm_bwd(dy: Tensor, input: Tensor, stats: Tensor, num_groups: int, *rest: Any) -> tuple[Tensor, ...]:
    """The gradients that the mask, the last argument, asks for."""
    wants = rest[-1]
    dx = group_norm_like(input) if wants[0] else input.new_empty(0)
    others = zip(rest[:5], wants[1:], strict=True)
    like = [(t, wanted and t is not None) for t, wanted in others]
    return dx, *(
        torch.empty_like(t, memory_format=torch.contiguous_format) if there else input.new_empty(0) for t, there in like
    )


@_meta
def quantize(input: Tensor, dtype: torch.dtype, scale: Tensor | None, block: int) -> tuple[Tensor, Tensor]:
    """Contiguous codes, and scales with the layout that kernels give them."""
    values = torch.empty_like(input, dtype=dtype, memory_format=torch.contiguous_format)
    return values, empty_scales(input, block) if scale is None else input.new_empty(0, dtype=torch.float32)
