"""Groups of rows that share weight, bias and the residual's gate.

The rows of a group are neighbours, or lie at equal distances, so two numbers describe all groups. For that, the
dimensions that the parameters have must not alternate with those along which they broadcast.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from torch import Tensor

from kernel_fusion.core.symbols import known, possible


@dataclass(frozen=True)
class Groups:
    """Row r belongs to group r // inner % count."""

    count: int = 1
    inner: int = 1

    @property
    def step(self) -> int:
        """The distance from a row to the next row of its group."""
        return self.count if known(self.inner == 1) else 1


def groups_of(input: Sequence[int], parameter: Sequence[int], num_dims: int) -> Groups | None:
    """The groups of an input's rows, from the shapes of input and parameter; None if dimensions alternate.

    The last `num_dims` dimensions of both shapes are the normalised ones.
    """
    leading = list(input[: len(input) - num_dims])
    own = [1] * (len(input) - len(parameter)) + list(parameter[: len(parameter) - num_dims])
    # Whether the parameters have each dimension in which there may be several rows.
    has = [(not known(size == 1), rows) for size, rows in zip(own, leading, strict=True) if not known(rows == 1)]
    if sum(a != b for (a, _), (b, _) in pairwise(has)) > 1:
        return None
    count = inner = 1
    for varies, rows in has:
        count *= rows if varies else 1
        inner *= rows if not varies and has[0][0] else 1
    return Groups(count, inner)


def laid_out(input: Sequence[int], parameters: Sequence[Tensor | None], num_dims: int) -> list[Tensor | None]:
    """Views of the parameters, broadcast to the smallest common shape for which the rows have groups."""
    shapes = [(1,) * (len(input) - p.dim()) + tuple(p.shape) for p in parameters if p is not None]
    shape = [next((size for size in sizes if not known(size == 1)), 1) for sizes in zip(*shapes, strict=True)]
    while groups_of(input, shape, num_dims) is None:
        first = next(d for d, size in enumerate(shape) if not possible(size == input[d]))
        shape[first] = input[first]
    return [p if p is None else p.expand(shape) for p in parameters]
