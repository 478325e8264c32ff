"""Decisions on sizes, some of which are symbols while a program is traced.

A symbol may stand for a number that follows from data, as that of the rows in `x[mask]` does. Nobody knows then whether
a condition on it holds, and an `if` would end the trace. A rule that takes a way of its own asks `known`; one that
refuses a call asks `possible`, and the operators check real sizes again when the program runs.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import SymInt, Tensor
from torch.compiler import is_compiling


def known(condition: bool) -> bool:
    """Whether a comparison of sizes holds, and False where that follows from data."""
    if isinstance(condition, bool | Tensor) and not is_compiling():  # where even a comparison of two symbols is a bool
        return bool(condition)  # `torch.jit.trace` compares sizes as tensors
    from torch.fx.experimental.symbolic_shapes import guard_or_false  # imports SymPy

    return guard_or_false(condition)


def possible(condition: bool) -> bool:
    """Whether a comparison of sizes holds, and True where that follows from data."""
    if isinstance(condition, bool | Tensor) and not is_compiling():
        return bool(condition)
    from torch.fx.experimental.symbolic_shapes import guard_or_true  # imports SymPy

    return guard_or_true(condition)


def follows_from_data(size: int | SymInt) -> bool:
    """Whether a size is a symbol for a number that follows from data."""
    if isinstance(size, int):
        return False
    from torch.fx.experimental.symbolic_shapes import has_free_unbacked_symbols  # imports SymPy

    return has_free_unbacked_symbols(size)


def alike(shape: Sequence[int], other: Sequence[int]) -> bool:
    """Whether two shapes may be equal."""
    return len(shape) == len(other) and all(possible(m == n) for m, n in zip(shape, other, strict=True))


def same(shape: Sequence[int], other: Sequence[int]) -> bool:
    """Whether two shapes are equal, as far as a tracer knows."""
    return len(shape) == len(other) and all(known(m == n) for m, n in zip(shape, other, strict=True))


def broadcasts(size: int, rows: int) -> bool:
    """Whether a dimension may be broadcast to this number of rows."""
    return known(size == 1) or possible(size == rows)
