"""Shared by the tests of the benchmark harness: small cases, minimal effort, wrong providers, and invented results."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from kernel_fusion_bench import providers
from kernel_fusion_bench.operations import BARE_NORMS
from kernel_fusion_bench.providers import Provider
from kernel_fusion_bench.results import Measurement, Results
from kernel_fusion_bench.timing import Effort, Setup, Timing
from kernel_fusion_bench.workloads import DIRECTIONS, Function, Workload

CPU = torch.device("cpu")
FP32, BF16 = torch.float32, torch.bfloat16
EFFORT = Effort(min_rounds=2, max_rounds=2, max_seconds=0.0, replays=2, host_rounds=2, max_checked=1 << 20)
ABOUT = {
    "command": "kernel-fusion bench large",
    "date": "2026-01-01",
    "machine": {"device": "cuda", "cpu": "A CPU"},
    "versions": {"torch": "2"},
    "peers": {"quack": "absent: ModuleNotFoundError"},
    "method": {"time": "a clock"},
}


def norm(shape: tuple[int, ...], dtype: torch.dtype = FP32, verb: str = "layer_norm") -> Workload:
    """A bare norm, whose parameters have the dtype of its input."""
    return Workload("a", BARE_NORMS[verb], shape, dtype, grouped=False)


NORM = norm((48, 96))


def scaled(name: str, factor: float, backend: str | None = None) -> Provider:
    """PyTorch's numbers under another name, one column of the first result multiplied by `factor`."""

    def function(workload: Workload) -> Function:
        right = workload.unfused()

        def wrong(*arguments: Any) -> Any:
            results = right(*arguments)
            y, *others = results if isinstance(results, tuple) else (results,)
            scale = torch.ones(y.shape, dtype=y.dtype)
            scale[..., min(3, scale.shape[-1] - 1) if scale.dim() else ...] = factor
            return (y * scale, *others) if others else y * scale

        return wrong

    return Provider(name, "0", function, backend)


def setup(*contenders: Provider, directions: Any = DIRECTIONS) -> Setup:
    """PyTorch and `contenders`, measured on the CPU with next to no effort."""
    return Setup([providers.pytorch(), *contenders], CPU, directions, EFFORT)


def empty() -> Results:
    """Results to measure into."""
    return Results("models", "Models", True, {})


def measured(provider: str, median_ms: float | None, rows: int = 32, spread: float = 0.001, **more: Any) -> Measurement:
    """One contender in the cell of `rows` rows, its quartiles `spread` of the median away from it."""
    timing = None
    if median_ms is not None:
        timing = Timing(median_ms, median_ms * (1 - spread), median_ms * (1 + spread), 21, 4)
    shape = f"{rows}x64", "layer_norm", rows, 64, "bf16", "bf16", "bf16", "contiguous"
    return replace(Measurement(*shape, "cuda", "forward", provider, "1", timing=timing), **more)


def run(*measurements: Measurement) -> Results:
    """A run with these measurements."""
    return Results("large", "Large inputs", False, ABOUT, list(measurements))
