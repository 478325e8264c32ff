"""Moments of rows whose columns are on several ranks, in float64 to its last digits."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def merged(join: Callable[[Tensor], None], moments: Tensor) -> tuple[Tensor, Tensor]:
    """The variance and mean of whole rows and a one, as `moments` lie; and the number of columns.

    Sums of squares would cancel. So the first of two all-reduces gives a mean for all ranks, about which each moves its
    deviations; the second adds those up, and what the mean lacks.

    Args:
        join: adds up a tensor over all ranks, in place.
        moments: squared deviations from the mean, the mean, and the number of columns of a rank's part of each row, in
            float64, one after the other.
    """
    rows = (moments.numel() - 1) // 2
    squares, own, count = moments.split([rows, rows, 1])
    sums = torch.cat([torch.where(count > 0, own * count, 0.0), count])  # a rank may have no columns
    join(sums)
    columns = sums[rows:]
    mean = sums[:rows] / columns
    apart = torch.where(count > 0, own - mean, 0.0)
    moved = torch.cat([squares + count * apart.square(), count * apart])
    join(moved)
    rest = moved[rows:] / columns
    variance = (moved[:rows] / columns - rest.square()).clamp_min(0.0)
    return torch.cat([variance, mean + rest, torch.ones_like(count)]), columns
