"""Statistics of dropout masks, each a standard normal under the hypothesis that elements drop independently with p.

A mask is judged by a few dozen of them, and suspect beyond 6 standard deviations: each then raises a false alarm with
probability 2e-9, all together with less than 1e-6. (Seeds are fixed, so that a test passes always or never.)
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

LIMIT = 6.0
# Neighbours, the eight elements of one block of the generator, warps and vectors, and the span of 16 bits.
_LAGS = (1, 2, 3, 4, 5, 6, 7, 8, 16, 32, 64, 128, 256, 1024, 65536)
_WORD = 8


def suspicions(dropped: Tensor, p: float) -> dict[str, float]:
    """The statistics beyond the limit, by name, of a mask of rows and columns (True = dropped)."""
    rows, cols = dropped.shape
    centered = dropped.flatten().double() - p
    statistics = {"rate": float(centered.sum()) / math.sqrt(p * (1 - p) * centered.numel())}
    for lag in sorted(lag for lag in {*_LAGS, cols} if 2 * lag < dropped.numel()):
        statistics[f"lag {lag}"] = _correlation(centered[lag:], centered[:-lag], p)
    per_row = dropped.double().sum(1)
    statistics["rows"] = _chi_square(float(((per_row - cols * p) ** 2 / (cols * p * (1 - p))).sum()), rows)
    statistics["words"] = patterns(dropped.flatten(), p)
    return {name: value for name, value in statistics.items() if abs(value) > LIMIT}


def patterns(dropped: Tensor, p: float) -> float:
    """Whether each pattern of eight consecutive elements comes as often as it should; 0 for too few to tell."""
    words = dropped[: dropped.numel() // _WORD * _WORD].view(-1, _WORD)
    codes = (words.long() << torch.arange(_WORD, device=words.device)).sum(1)
    ones = torch.tensor([code.bit_count() for code in range(2**_WORD)], dtype=torch.float64)
    expected = len(words) * p**ones * (1 - p) ** (_WORD - ones)
    common = expected > 10  # the others are too rare for the distribution to be that of chi square
    if not common.any():
        return 0.0
    counts = torch.bincount(codes.cpu(), minlength=2**_WORD).double()
    return _chi_square(float(((counts - expected) ** 2 / expected)[common].sum()), int(common.sum()))


def _correlation(one: Tensor, other: Tensor, p: float) -> float:
    return float((one * other).sum()) / (p * (1 - p) * math.sqrt(one.numel()))


def _chi_square(value: float, freedom: int) -> float:
    """A chi square as a standard normal (Wilson and Hilferty)."""
    spread = 2 / (9 * freedom)
    return ((value / freedom) ** (1 / 3) - (1 - spread)) / math.sqrt(spread)
