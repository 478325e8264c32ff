"""Sharding rules: the axis of each dimension of an operator's tensors, from its signature (core/signatures.py).

Ranks may have different parts of a free axis. An argument without that axis is the same on all ranks, and its gradient
a sum over them; so is a result without it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kernel_fusion.backends import eager
from kernel_fusion.core import checks
from kernel_fusion.core.group_norm import GroupNorm
from kernel_fusion.core.rotary import Rotary, problem
from kernel_fusion.core.signatures import OPERATORS, Operator
from kernel_fusion.core.spec import VERBS

# None: a dimension of size 1 without an axis.
Axes = tuple[int | None, ...]


@dataclass(frozen=True)
class Call:
    """One call of an operator.

    Attributes:
        sizes: of the axes.
        operands: the axes of each tensor argument.
        results: those of each result; None for one that nobody reads.
        free: axes that may be sharded.
        joined: axes that may be if ranks exchange sums.
        seed: the position of dropout's seed.
    """

    sizes: tuple[int, ...]
    operands: Mapping[int, Axes]
    results: tuple[Axes | None, ...]
    free: frozenset[int]
    joined: frozenset[int] = frozenset()
    seed: int | None = None


def axes_of(name: str, args: Sequence[Any]) -> Call:
    """The call of the operator `name`. Rows, masks and vectors have the axes of the dimensions to which they broadcast.

    Rows that the signature calls independent are free. The other axes of a norm are joined.

    Raises:
        RuntimeError: shapes don't fit.
    """
    if name in _RULES:
        return _RULES[name](*args)
    operator = OPERATORS[name]
    call = operator.by_name(args)
    is_norm = "num_dims" in call
    if is_norm:
        _check_norm(call, call["num_dims"], call.get("rms", name == "rms_norm"), call.get("grouped", False))
    sizes = tuple(torch.broadcast_shapes(*(t.shape for t in operator.of_kind("rows", args))))
    axes = tuple(range(len(sizes)))
    places = {i: each for i, each in enumerate(operator.arguments[: len(args)]) if args[i] is not None}
    operands = {
        i: _broadcast_axes(args[i], sizes) for i, each in places.items() if each.kind in ("rows", "mask", "vector")
    }
    rows = frozenset(axes[: len(sizes) - _row_dims(operator, call)])
    # A result that has the name of an argument is there if that is.
    results = tuple(axes if call.get(result, 0) is not None else None for result in operator.results)
    seed = next((i for i, each in places.items() if each.name == "seed"), None)
    return Call(sizes, operands, results, rows, frozenset(axes) - rows if is_norm else frozenset(), seed)


def _row_dims(operator: Operator, call: Mapping[str, Any]) -> int:
    """Those that no rank may have a part of. A causal mask is no reason, because each rank gets its own (serve.py)."""
    assert operator.row_dims is not None
    dims = operator.row_dims(dict(call) | ({"causal": False} if "causal" in call else {}))
    assert dims is not None
    return dims


def _broadcast_axes(t: Tensor, sizes: Sequence[int]) -> Axes:
    """The axes of a tensor that broadcasts to `sizes`."""
    first = len(sizes) - t.dim()
    return tuple(first + d if size == sizes[first + d] else None for d, size in enumerate(t.shape))


def _check_norm(given: Mapping[str, Any], num_dims: int, rms: bool, grouped: bool) -> None:
    """Raise if shapes do not fit: ranks whose parts fit by chance would hang."""
    input, weight, bias = given["input"], given.get("weight"), given.get("bias")
    for name, prefix in VERBS.items():
        checks.other_row(prefix + ("rms_norm" if rms else "layer_norm"), name, input, given.get(name))
    shape = checks.parameter_shape(input, num_dims, grouped, weight, bias)
    if not checks.shaped(shape, weight, bias):
        w, b = (None if t is None else torch.empty(t.shape, device="meta") for t in (weight, bias))
        x = torch.empty(input.shape, device="meta")
        eager.pytorch_row_norm(x, shape, w, b, None, 0.0, None, rms)  # raises, in PyTorch's words


def _reduce(input: Tensor, dim: list[int], keepdim: bool, *_: Any) -> Call:
    """Every axis is free: sums of parts are parts of the sum."""
    torch.empty(input.shape, device="meta").sum(dim)  # raises, in PyTorch's words
    everything = tuple(range(input.dim()))
    gone = {d % input.dim() for d in dim} if dim and everything else set(everything)
    kept: Axes = tuple(None if axis in gone else axis for axis in everything if keepdim or axis not in gone)
    return Call(tuple(input.shape), {0: everything}, (kept,), frozenset(everything))


def _qk_norm_rope(query: Tensor, key: None, weight: Tensor | None, _: None, *rest: Any) -> Call:
    """Examples, tokens and heads are free; ranks share a table that is read by positions."""
    c = Rotary(query, key, weight, None, *rest)
    if text := problem(c):
        raise RuntimeError(f"`{'rope' if c.eps is None else 'qk_norm_rope'}`: {text}")
    cols, pair, row = 3, 4, 5
    of_rows = 1 if c.positions is None else row

    def example(t: Tensor) -> int | None:
        return 0 if t.shape[0] == query.shape[0] else None

    operands: dict[int, Axes] = {0: (0, 1, 2, cols)}
    operands |= {} if weight is None else {2: (cols,)}
    operands |= {i: (example(t), of_rows, pair) for i, t in ((4, c.cos), (5, c.sin))}
    operands |= {} if c.positions is None else {6: (example(c.positions), 1)}
    sizes = (*query.shape, c.half, c.cos.shape[1])
    return Call(sizes, operands, ((0, 1, 2, cols), None), frozenset((0, 1, 2)))


def _without_memory(args: Sequence[Any]) -> list[Any]:
    """Arguments with plain tensors on `meta` in place of DTensors, for which PyTorch 2.11 lacks some operations."""
    return [torch.empty(t.shape, dtype=t.dtype, device="meta") if isinstance(t, Tensor) else t for t in args]


def _group_norm(*args: Any) -> Call:
    """Samples are free."""
    c = GroupNorm(*args)
    eager.group_norm(*_without_memory(args))  # raises where shapes don't fit
    axes: Axes = tuple(range(c.input.dim()))
    around = {i: t for i, t in enumerate(args[4:7], 4) if t is not None}
    operands = {0: axes} | {i: (1,) for i in (2, 3) if args[i] is not None}
    return Call(
        tuple(c.input.shape), operands | {i: axes[: t.dim()] for i, t in around.items()}, (axes,), frozenset((0,))
    )


def _token_logprob(*args: Any) -> Call:
    """Rows are free. `ids` may have a dimension of its own."""
    eager.token_logprob(*_without_memory(args))  # raises where shapes don't fit
    input, ids, mask, temperature, weight, *_, extra, predicts = args
    classes = input.dim() - 1
    rows = tuple(range(classes))
    of_ids = rows if ids.dim() == classes else (*rows, input.dim())
    operands: dict[int, Axes] = {0: (*rows, classes), 1: of_ids}
    operands |= {} if mask is None else {2: _broadcast_axes(mask, input.shape)}
    operands |= {3: rows} if temperature is not None else {}
    operands |= {4: (classes,)} if weight is not None else {}
    results = (of_ids, rows, rows, rows if extra != "none" else None, rows if predicts else None)
    return Call((*input.shape, ids.shape[-1] if ids.dim() else 1), operands, results, frozenset(rows))


# The operators whose results are no rows of their first tensor.
_RULES: dict[str, Callable[..., Call]] = {
    "reduce": _reduce,
    "qk_norm_rope": _qk_norm_rope,
    "group_norm": _group_norm,
    "token_logprob": _token_logprob,
}
