"""Sharding rules: the axis of each dimension of an operator's tensors.

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
from kernel_fusion.core.rotary import Rotary, problem
from kernel_fusion.core.spec import ROWS, VECTORS, VERBS
from kernel_fusion.core.stages import ARGUMENTS, FIRST, PLACES

_GROUPED = FIRST + [each.name for each in ARGUMENTS].index("grouped")
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


def layer_norm(*args: Any) -> Call:
    """Rows are free, columns joined; weight and bias lie along a row."""
    return _norm(args, {"input": 0, "weight": 2, "bias": 3}, num_dims=args[1], rms=False)


def rms_norm(*args: Any) -> Call:
    """As for layer_norm."""
    return _norm(args, {"input": 0, "weight": 2, "bias": 3}, num_dims=args[1], rms=True)


def staged_row_norm(*args: Any) -> Call:
    """As layer_norm; residual, gate and h are rows too, and grouped weights and gates have leading dimensions."""
    positions = {"input": 0, "residual": 1, "weight": 3, "bias": 4}
    positions |= {name: PLACES[name] for name in (*ROWS, *VECTORS)}
    grouped = len(args) > _GROUPED and args[_GROUPED]
    return _norm(args, positions, num_dims=args[2], rms=args[8], grouped=grouped, seed=PLACES["seed"])


def _norm(
    args: Sequence[Any],
    positions: dict[str, int],
    num_dims: int,
    rms: bool,
    grouped: bool = False,
    seed: int | None = None,
) -> Call:
    given = {name: args[i] for name, i in positions.items() if i < len(args) and args[i] is not None}
    input, residual = given["input"], given.get("residual")
    _check_norm(given, num_dims, rms, grouped)
    axes = tuple(range(input.dim()))
    operands = {positions[name]: _broadcast_axes(t, input.shape) for name, t in given.items()}
    results = (axes, axes if residual is not None else None)
    rows = frozenset(axes[: input.dim() - num_dims])
    return Call(tuple(input.shape), operands, results, rows, frozenset(axes) - rows, seed)


def _broadcast_axes(t: Tensor, sizes: Sequence[int]) -> Axes:
    """The axes of a tensor that broadcasts to `sizes`."""
    first = len(sizes) - t.dim()
    return tuple(first + d if size == sizes[first + d] else None for d, size in enumerate(t.shape))


def _check_norm(given: dict[str, Tensor], num_dims: int, rms: bool, grouped: bool) -> None:
    """Raise if shapes do not fit: ranks whose parts fit by chance would hang."""
    input, weight, bias = given["input"], given.get("weight"), given.get("bias")
    for name, prefix in VERBS.items():
        checks.other_row(prefix + ("rms_norm" if rms else "layer_norm"), name, input, given.get(name))
    shape = checks.parameter_shape(input, num_dims, grouped, weight, bias)
    if not checks.shaped(shape, weight, bias):
        w, b = (None if t is None else torch.empty(t.shape, device="meta") for t in (weight, bias))
        x = torch.empty(input.shape, device="meta")
        eager.pytorch_row_norm(x, shape, w, b, None, 0.0, None, rms)  # raises, in PyTorch's words


def pointwise(a: Tensor, b: Tensor | None, *_: Any) -> Call:
    """Every axis is free."""
    sizes = tuple(a.shape if b is None else torch.broadcast_shapes(a.shape, b.shape))
    operands = {i: _broadcast_axes(t, sizes) for i, t in enumerate((a, b)) if t is not None}
    everything = tuple(range(len(sizes)))
    return Call(sizes, operands, (everything,), frozenset(everything), seed=6)


def reduce(input: Tensor, dim: list[int], keepdim: bool, *_: Any) -> Call:
    """Every axis is free: sums of parts are parts of the sum."""
    torch.empty(input.shape, device="meta").sum(dim)  # raises, in PyTorch's words
    everything = tuple(range(input.dim()))
    gone = {d % input.dim() for d in dim} if dim and everything else set(everything)
    kept: Axes = tuple(None if axis in gone else axis for axis in everything if keepdim or axis not in gone)
    return Call(tuple(input.shape), {0: everything}, (kept,), frozenset(everything))


def softmax(input: Tensor, mask: Tensor | None, *_: Any) -> Call:
    """Every axis but the last is free."""
    axes = tuple(range(input.dim()))
    operands = {i: axes[input.dim() - t.dim() :] for i, t in enumerate((input, mask)) if t is not None}
    return Call(tuple(input.shape), operands, (axes,), frozenset(axes[:-1]))


def qk_norm_rope(query: Tensor, key: None, weight: Tensor | None, _: None, *rest: Any) -> Call:
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


RULES: dict[str, Callable[..., Call]] = {
    rule.__name__: rule for rule in (layer_norm, rms_norm, staged_row_norm, pointwise, reduce, softmax, qk_norm_rope)
}
