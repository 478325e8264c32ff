"""The layout of tensors as kernels see it: rows with up to three strides, and a unit that divides all strides.

Kernels get lengths and strides in units. A unit is a constant of a kernel, so that the compiler knows how tensors are
aligned and loads vectors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from torch import Tensor

from kernel_fusion.core.symbols import known

# How many dimensions the rows of a tensor may have for a kernel.
_MAX_OUTER = 3


@dataclass(frozen=True)
class RowLayout:
    """The places of the rows of tensors of one shape. Rows are indexed (outer, middle, inner).

    Attributes:
        count: How many rows there are.
        middle: The size of the middle dimension of rows.
        inner: The size of the inner dimension of rows. Both sizes are 1 if one stride is enough.
        strides: The three strides of each tensor, in elements.
    """

    count: int
    middle: int
    inner: int
    strides: tuple[tuple[int, int, int], ...]

    @property
    def simple(self) -> bool:
        """Whether one stride is enough."""
        return known(self.middle == 1) and known(self.inner == 1)

    def in_units(self, cols: int, *others: int) -> tuple[int, list[int]]:
        """Return the unit, and the numbers that kernels take: count, columns, middle, inner, and the tensors' strides.

        Columns and strides are in units. There are strides of at least two tensors, because kernels have two.

        Args:
            cols: The columns of a row, in elements.
            others: Further lengths that the unit must divide.
        """
        strides = [stride for of in (self.strides * 2)[: max(2, len(self.strides))] for stride in of]
        size = unit(cols, *strides, *others)
        return size, [self.count, cols // size, self.middle, self.inner, *(stride // size for stride in strides)]


def unit(*lengths: int) -> int:
    """Return the largest power of two, at most 16, that divides all `lengths`."""
    return next((u for u in (16, 8, 4, 2) if all(known(n % u == 0) for n in lengths)), 1)


def merge(sizes: Sequence[int], strides: Sequence[Sequence[int]]) -> tuple[list[int], list[list[int]]]:
    """Return sizes and strides without dimensions of size 1, with neighbours merged where one stride serves both.

    Args:
        sizes: The sizes of the dimensions, outermost first.
        strides: The strides of these dimensions, for each tensor.
    """
    merged: list[tuple[int, ...]] = []  # size and strides
    for size, *steps in zip(sizes, *strides, strict=True):
        if known(size == 1):
            continue
        if merged and all(known(outer == step * size) for outer, step in zip(merged[-1][1:], steps, strict=True)):
            size *= merged.pop()[0]
        merged.append((size, *steps))
    return [size for size, *_ in merged], [[dim[1 + i] for dim in merged] for i in range(len(strides))]


def outer_rows(sizes: Sequence[int], strides: Sequence[Sequence[int]]) -> RowLayout | None:
    """Return the layout of rows along `merge`d outer dimensions, or None if there are more than three of them."""
    if len(sizes) > _MAX_OUTER:
        return None
    count = prod(sizes)
    middle = sizes[1] if len(sizes) == _MAX_OUTER else 1
    inner = sizes[-1] if len(sizes) > 1 else 1
    three = (
        (of[0] if of else 0, of[1] if len(of) == _MAX_OUTER else 0, of[-1] if len(of) > 1 else 0) for of in strides
    )
    return RowLayout(count, middle, inner, tuple(three))


def rows_of(tensors: Sequence[Tensor], num_dims: int) -> tuple[list[Tensor], RowLayout]:
    """Return tensors of one shape and the layout of their rows, which are the last `num_dims` dimensions.

    The tensors are copied if kernels cannot describe their rows.
    """
    shape = tensors[0].shape
    split = len(shape) - num_dims
    cols = prod(shape[split:])
    if not all(t.is_contiguous() for t in tensors):
        strides = [t.stride() for t in tensors]
        inner_sizes, inner_strides = merge(shape[split:], [s[split:] for s in strides])
        whole = len(inner_sizes) == 0 or (len(inner_sizes) == 1 and all(known(s[0] == 1) for s in inner_strides))
        rows = outer_rows(*merge(shape[:split], [s[:split] for s in strides]))
        if whole and rows is not None:
            return list(tensors), rows
    count = prod(shape[:split])
    return [t.contiguous() for t in tensors], RowLayout(count, 1, 1, ((cols, 0, 0),) * len(tensors))


def memory_order(sizes: Sequence[int], strides: Sequence[Sequence[int]]) -> list[int]:
    """Return the dimensions, outermost first, in the order in which PyTorch's pointwise results lie in memory.

    The strides of the operands decide, and those of the first one if they disagree. Strides of 0 do not count.

    Args:
        sizes: The sizes of the result.
        strides: The strides of each operand, broadcast to these sizes.
    """
    order = list(range(len(sizes)))[::-1]  # innermost first, as PyTorch compares

    def swaps(low: int, high: int) -> int:
        """1 if `low` belongs outside `high`, -1 if it belongs inside, and 0 if no operand says."""
        for of in strides:
            if known(of[low] == 0) or known(of[high] == 0):
                continue
            if not known(of[low] == of[high]):
                return 1 if known(of[low] > of[high]) else -1
            if known(sizes[low] > sizes[high]):
                return 1
        return 0

    for i in range(1, len(order)):
        current = i
        for previous in range(i - 1, -1, -1):
            verdict = swaps(order[previous], order[current])
            if verdict > 0:
                order[previous], order[current] = order[current], order[previous]
                current = previous
            elif verdict < 0:
                break
    return order[::-1]


def dense_strides(sizes: Sequence[int], order: Sequence[int]) -> list[int]:
    """Return the strides of a dense tensor with these sizes and this order of dimensions, outermost first."""
    strides = [1] * len(sizes)
    step = 1
    for dim in reversed(order):
        strides[dim] = step
        # An empty dimension counts as one of size 1, as in PyTorch.
        step = step * (1 if known(sizes[dim] == 0) else sizes[dim])
    return strides
