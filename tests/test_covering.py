"""Covering arrays: few rows, in which nothing is missing."""

from __future__ import annotations

from itertools import combinations, product

import pytest
from covering import covering, factors

from kernel_fusion.testing import cases

_PRODUCT = [dict(zip("abcd", values, strict=True)) for values in product("01", "012", "0123", "01234")]
_CASES = [factors({"case": case}) for case in cases.cases(quick=True)]


@pytest.mark.parametrize(("rows", "most"), [(_PRODUCT, 24), (_CASES, len(_CASES) // 3)], ids=["product", "cases"])
@pytest.mark.parametrize("strength", [1, 2])
def test_every_combination_is_there(rows: list[dict[str, str]], most: int, strength: int) -> None:
    """For any one or two factors, few rows have all values that occur together, and the same rows each time."""
    chosen = covering(rows, strength)

    def found(indices: list[int]) -> set[object]:
        return {tuple(part) for i in indices for part in combinations(sorted(rows[i].items()), strength)}

    assert found(chosen) == found([*range(len(rows))])
    assert len(chosen) <= most // (3 - strength)
    assert covering(rows, strength) == chosen
