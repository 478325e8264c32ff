"""Statistics of dropout masks, each a standard normal under the hypothesis that elements drop independently with p.

A mask is judged by a few dozen of them, and suspect beyond 6 standard deviations: each then raises a false alarm with
probability 2e-9, all together with less than 1e-6. (Seeds are fixed, so that a test passes always or never.) A
statistic that counts too few events to be normal is left out, and so is the chi square of too small cells.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

LIMIT = 6.0
# Neighbours, the eight elements of one block of the generator, warps and vectors, and 2^16 elements apart.
_LAGS = (1, 2, 3, 4, 5, 6, 7, 8, 16, 32, 64, 128, 256, 1024, 65536)
_WORD = 8
_FEW = 10  # events, of which a count is far from normal


def suspicions(dropped: Tensor, p: float) -> dict[str, float]:
    """The statistics beyond the limit, by name, of a mask of rows and columns (True = dropped)."""
    rows, cols = dropped.shape
    centered = dropped.flatten().double() - p
    statistics = {"rate": float(centered.sum()) / math.sqrt(p * (1 - p) * centered.numel())}
    rare = min(p, 1 - p)
    for lag in sorted(lag for lag in {*_LAGS, cols} if 2 * lag < dropped.numel() and rare**2 * dropped.numel() > _FEW):
        statistics[f"lag {lag}"] = _correlation(centered[lag:], centered[:-lag], p)
    if cols * rare > _FEW:
        per_row = dropped.double().sum(1)
        statistics["rows"] = _chi_square(float(((per_row - cols * p) ** 2 / (cols * p * (1 - p))).sum()), rows)
    statistics["gaps"] = gaps(dropped.flatten() if p < 0.5 else ~dropped.flatten(), rare)
    statistics["words"] = patterns(dropped.flatten(), p)
    return {name: value for name, value in statistics.items() if abs(value) > LIMIT}


def gaps(events: Tensor, rate: float) -> float:
    """Whether the distances between neighbouring events are those of independent ones; 0 for too few to tell."""
    distances = events.nonzero().flatten().diff().cpu()
    cells = min(16, int(events.numel() * rate / _FEW))
    if cells < 2 or not len(distances):
        return 0.0
    # Cell by cell the longest distance; longer ones have the probability (1 - rate)^distance. Distances are whole, so
    # that the cells are only about equally likely.
    ends = sorted({math.ceil(math.log(1 - k / cells) / math.log(1 - rate)) for k in range(1, cells)})
    beyond = torch.tensor([1.0, *((1 - rate) ** end for end in ends), 0.0], dtype=torch.float64)
    expected = -beyond.diff() * len(distances)
    counts = torch.bincount(torch.bucketize(distances, torch.tensor(ends)), minlength=len(expected))
    return _chi_square(float(((counts - expected) ** 2 / expected).sum()), len(ends))


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
