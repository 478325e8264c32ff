"""Few of many combinations of parameters, and still every pair: covering arrays, and what they do to the set of tests.

A grid of parameters is a product, or a list of cases. Nearly all faults show in one value or in a pair of values, so
the quick set takes as few combinations as have every pair that the grid has; the rest of the grid is marked `slow`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from heapq import heapify, heappop, heapreplace
from itertools import combinations, product
from typing import Any

import pytest


def covering(rows: Sequence[Mapping[str, Hashable]], strength: int = 2) -> list[int]:
    """Positions of few of `rows` that have, for any `strength` factors, all combinations of values that the rows have.

    Greedy: the row with most combinations that are still missing comes next, the first of several.
    """
    numbers = {item: number for number, item in enumerate(dict.fromkeys(item for row in rows for item in row.items()))}
    numbered = [sorted(numbers[item] for item in row.items()) for row in rows]
    wanted = [set(combinations(row, min(strength, len(row)))) for row in numbered]
    covered: set[Any] = set()
    heap = [(-len(found), index) for index, found in enumerate(wanted)]
    heapify(heap)
    chosen = []
    while heap:
        gain, index = heap[0]
        missing = len(wanted[index] - covered)
        if missing < -gain:  # as counted when fewer were covered
            heapreplace(heap, (-missing, index))
        elif missing == 0:
            break
        else:
            heappop(heap)
            covered |= wanted[index]
            chosen.append(index)
    return sorted(chosen)


def factors(params: Mapping[str, Any]) -> dict[str, Hashable]:
    """The parameters of a test as factors; a case counts as its fields."""
    found: dict[str, Hashable] = {}
    for name, value in params.items():
        if is_dataclass(value) and not isinstance(value, type):
            found[f"{name}.type"] = type(value).__name__
            found |= {f"{name}.{f.name}": repr(getattr(value, f.name)) for f in fields(value)}
        else:
            found[name] = repr(value)  # NaN equals its text alone, and True is not 1
    return found


def rest_slow(values: Iterable[Any]) -> list[Any]:
    """For `parametrize`: the first value for the quick set, the others marked `slow`."""
    first, *rest = (value if isinstance(value, tuple) else (value,) for value in values)
    return [pytest.param(*first), *(pytest.param(*value, marks=pytest.mark.slow) for value in rest)]


def triples(**values: Iterable[Any]) -> pytest.MarkDecorator:
    """For tests of which a whole product takes too long: few combinations of the values that have any three of them."""
    rows = [dict(zip(values, row, strict=True)) for row in product(*values.values())]
    found = [tuple(rows[index].values()) for index in covering([*map(factors, rows)], 3)]
    return pytest.mark.parametrize(tuple(values), found)


def mark_slow(items: Sequence[pytest.Item]) -> None:
    """Mark `slow` what the covering array of its test leaves out, apart for tests with and without a GPU.

    `@pytest.mark.covering(n, *names)` on a test asks for combinations of n factors, 2 unless it says so, where those of
    the names count as one more.
    """
    grids: dict[tuple[str, bool], list[pytest.Item]] = defaultdict(list)
    for item in items:
        if hasattr(item, "callspec") and not item.get_closest_marker("slow"):
            grids[item.nodeid.partition("[")[0], bool(item.get_closest_marker("cuda"))].append(item)
    for grid in grids.values():
        marker = grid[0].get_closest_marker("covering")
        strength, *names = marker.args if marker else (2,)
        rows = [factors(item.callspec.params) for item in grid]
        rows = [row | {"together": " ".join(row[name] for name in names)} for row in rows]
        chosen = covering(rows, strength)
        for index in {*range(len(grid))}.difference(chosen):
            grid[index].add_marker("slow")
