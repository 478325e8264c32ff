"""Memory as kernels see it: rows with up to three strides, and units that divide them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from torch import Tensor

_MAX_OUTER = 3


@dataclass(frozen=True)
class Rows:
    """Rows of tensors of one shape, indexed (outer, middle, inner).

    Attributes:
        count: of rows.
        middle, inner: sizes; both 1 if one stride is enough.
        strides: three for each tensor, in elements.
    """

    count: int
    middle: int
    inner: int
    strides: tuple[tuple[int, int, int], ...]

    @property
    def simple(self) -> bool:
        """Whether one stride is enough."""
        return self.middle == 1 and self.inner == 1

    def in_units(self, cols: int, *others: int) -> tuple[int, list[int]]:
        """The unit, which divides `others` too; and in it lengths, and strides of at least two tensors."""
        strides = [stride for of in (self.strides * 2)[: max(2, len(self.strides))] for stride in of]
        size = unit(cols, *strides, *others)
        return size, [self.count, cols // size, self.middle, self.inner, *(stride // size for stride in strides)]


def unit(*lengths: int) -> int:
    """The largest power of two, at most 16, that divides all lengths."""
    return next((u for u in (16, 8, 4, 2) if all(n % u == 0 for n in lengths)), 1)


def merge(sizes: Sequence[int], strides: Sequence[Sequence[int]]) -> tuple[list[int], list[list[int]]]:
    """Drop dimensions of size 1, and merge those that have one stride in every tensor."""
    merged: list[tuple[int, ...]] = []  # size and strides
    for size, *steps in zip(sizes, *strides, strict=True):
        if size == 1:
            continue
        if merged and all(outer == step * size for outer, step in zip(merged[-1][1:], steps, strict=True)):
            size *= merged.pop()[0]
        merged.append((size, *steps))
    return [size for size, *_ in merged], [[dim[1 + i] for dim in merged] for i in range(len(strides))]


def outer_rows(sizes: Sequence[int], strides: Sequence[Sequence[int]]) -> Rows | None:
    """Rows along merged outer dimensions, or None if there are more than three."""
    if len(sizes) > _MAX_OUTER:
        return None
    count = prod(sizes)
    middle = sizes[1] if len(sizes) == _MAX_OUTER else 1
    inner = sizes[-1] if len(sizes) > 1 else 1
    three = (
        (of[0] if of else 0, of[1] if len(of) == _MAX_OUTER else 0, of[-1] if len(of) > 1 else 0) for of in strides
    )
    return Rows(count, middle, inner, tuple(three))


def rows_of(tensors: Sequence[Tensor], num_dims: int) -> tuple[list[Tensor], Rows]:
    """Tensors of one shape as rows over their last `num_dims` dimensions; copied if they need more strides."""
    shape = tensors[0].shape
    split = len(shape) - num_dims
    cols = prod(shape[split:])
    if not all(t.is_contiguous() for t in tensors):
        strides = [t.stride() for t in tensors]
        inner_sizes, inner_strides = merge(shape[split:], [s[split:] for s in strides])
        whole = len(inner_sizes) == 0 or (len(inner_sizes) == 1 and all(s[0] == 1 for s in inner_strides))
        rows = outer_rows(*merge(shape[:split], [s[:split] for s in strides]))
        if whole and rows is not None:
            return list(tensors), rows
    count = prod(shape[:split])
    return [t.contiguous() for t in tensors], Rows(count, 1, 1, ((cols, 0, 0),) * len(tensors))


def memory_order(sizes: Sequence[int], strides: Sequence[Sequence[int]]) -> list[int]:
    """Dimensions, outermost first, in the memory order of PyTorch's pointwise results.

    The operands' strides decide, the first's if they disagree; strides of 0 do not count.
    """
    order = list(range(len(sizes)))[::-1]  # innermost first, as PyTorch compares

    def swaps(low: int, high: int) -> int:
        for of in strides:
            if of[low] == 0 or of[high] == 0:
                continue
            if of[low] != of[high]:
                return 1 if of[low] > of[high] else -1
            if sizes[low] > sizes[high]:
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
    """The strides of a dense tensor with this order of dimensions, outermost first."""
    strides = [1] * len(sizes)
    step = 1
    for dim in reversed(order):
        strides[dim] = step
        # As in PyTorch, an empty dimension counts as one of size 1.
        step = step * (sizes[dim] if sizes[dim] != 0 else 1)
    return strides
