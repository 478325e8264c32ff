"""Shared by the tests of tuning: a device that plans take for an H200, its kernels, and a table."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from kernel_fusion.backends.cuda import planner, user_table
from kernel_fusion.backends.cuda.device import KNOWN_DEVICES, Device
from kernel_fusion_bench import trials
from kernel_fusion_bench.trials import Choice, Kernel

NAME = "NVIDIA H200"
H200 = replace(KNOWN_DEVICES[90], name=NAME)


def kernels(
    cols: int, direction: str, rms: bool = True, x: str = "bf16", device: Device = H200, **stages: Any
) -> list[Kernel]:
    """The kernels that `tune` plans together."""
    inference, forward, backward = planner.family(cols, x, x, rms=rms, **stages)
    specs = [backward] if direction == "backward" else [inference, forward]
    return [Kernel(spec, planner.contiguous_access(spec), device) for spec in specs]


def written(kernel: Kernel, choice: Choice, shown: str = "measured") -> Path:
    """The user's table with rows for one kernel."""
    path = user_table.path_of(NAME)
    trials.write(path, NAME, trials.with_rows({}, kernel, choice, shown))
    return path
