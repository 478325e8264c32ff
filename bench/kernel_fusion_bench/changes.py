"""What got faster or slower between two results files, beyond noise."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from kernel_fusion_bench.results import FLOOR, OURS, Measurement, Results
from kernel_fusion_bench.timing import Timing

# Smaller differences are noise: a share of the time per device type, and a time. Single calls vary as they do on a CPU.
_NOISE_SHARE = {"cpu": 0.05, "cuda": 0.02}
_NOISE_MS = 0.3e-3


@dataclass(frozen=True)
class Change:
    """Our time in one cell, before and after."""

    measurement: Measurement
    before: Timing
    after: Timing

    @property
    def ratio(self) -> float:
        """The time after the change over that before it."""
        return self.after.median_ms / self.before.median_ms


def beyond_noise(before: Timing, after: Timing, device: str) -> bool:
    """Whether the medians are further apart than noise, and each lies outside the other's inter-quartile range."""
    share = _NOISE_SHARE["cuda" if device.startswith("cuda") else "cpu"]
    if abs(after.median_ms - before.median_ms) <= max(share * before.median_ms, _NOISE_MS):
        return False
    return not (before.q1_ms <= after.median_ms <= before.q3_ms or after.q1_ms <= before.median_ms <= after.q3_ms)


@dataclass(frozen=True)
class Comparison:
    """Two runs, cell by cell.

    Attributes:
        cells: how many of our cells both runs have.
        faster, slower: differences beyond noise, the largest first.
        floor: the floor's time after over before (geometric mean), which shows how the machine changed.
    """

    cells: int
    faster: list[Change]
    slower: list[Change]
    floor: float | None


def compare(before: Results, after: Results) -> Comparison:
    """Compare our times in the cells that both results have."""
    old = {(m.cell, m.provider): m.timing for m in before.measurements}
    changes = [
        Change(m, timing, m.timing)
        for m in after.measurements
        if m.timing and (timing := old.get((m.cell, m.provider)))
    ]
    floors = [change.ratio for change in changes if change.measurement.provider == FLOOR]
    mine = [change for change in changes if change.measurement.provider.startswith(OURS)]
    beyond = (change for change in mine if beyond_noise(change.before, change.after, change.measurement.device))
    changed = sorted(beyond, key=lambda change: change.ratio)
    faster = [change for change in changed if change.ratio < 1]
    slower = [change for change in reversed(changed) if change.ratio > 1]
    return Comparison(len(mine), faster, slower, statistics.geometric_mean(floors) if floors else None)
