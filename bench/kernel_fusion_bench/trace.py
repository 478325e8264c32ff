"""Chrome traces of a workload by PyTorch's profiler, forward and backward, and tables of them.

A trace without a launch of the backend that it is named after is an error.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from kernel_fusion.cli.table import Table
from kernel_fusion.testing.launches import kernels_must_run
from kernel_fusion_bench import timing
from kernel_fusion_bench.providers import Provider
from kernel_fusion_bench.units import megabytes, number, shown
from kernel_fusion_bench.workloads import Inputs, Workload

_DIRECTIONS = ("forward", "backward")
_WARM_UP = 2
# The least number of traced steps; more if inputs rotate over more sets.
_STEPS = 10
# A trace's categories for the work of a device, and of the host.
_ON_DEVICE, _ON_HOST = ("kernel", "gpu_memcpy", "gpu_memset"), ("cpu_op",)
_WITH_KERNELS = ("cuda", "xpu")
# Smaller shares of a direction's time are added up in one row.
_SMALL = 0.01

METHOD = {
    "trace": f"torch.profiler, after {_WARM_UP} steps and one more under the profiler; each step a forward that keeps "
    f"what backward needs and a backward, waited for; at least {_STEPS} steps, on an NVIDIA GPU over as many sets of "
    "inputs as in a benchmark; a kernel's time is from its start to its end, also where it waits for the one before; "
    "on a CPU operators without those that they call",
    "bytes": "every argument and result once and in full; GB/s over the sum of the times, which tracing makes longer",
}


@dataclass(frozen=True)
class Launch:
    """A kernel of a device or, on a CPU, an operator without those that it called."""

    direction: str
    name: str
    microseconds: float


@dataclass(frozen=True)
class Trace:
    """A contender's file: all launches, and the names that only our backend launches."""

    provider: Provider
    path: Path
    steps: int
    launches: Sequence[Launch]
    ours: Sequence[str]


def file_name(provider: Provider) -> str:
    """The file name of a contender's trace."""
    return f"{provider.backend or provider.name}_profile.json"


def make_calls(provider: Provider, workload: Workload, device: torch.device) -> None:
    """Run some steps without tracing, for an external profiler."""
    (inputs,) = workload.input_sets(device, 1)
    for _ in range(_WARM_UP):
        _step(provider, workload, inputs, device)


def record(provider: Provider, workload: Workload, device: torch.device, folder: Path) -> Trace:
    """Trace warmed-up steps of a contender into its file in `folder`."""
    per_step = workload.bytes_moved("forward+backward", provider.name)
    sets = workload.input_sets(device, timing.rotating_calls(per_step) if device.type == "cuda" else 1)
    steps = max(_STEPS, len(sets))
    backend = provider.backend_of(workload)
    with kernels_must_run(backend, every=False):
        for index in range(_WARM_UP):
            _step(provider, workload, sets[index % len(sets)], device)
        with _profiler(device):  # the profiler must warm up too
            _step(provider, workload, sets[0], device)
        with _profiler(device) as profiler:
            for index in range(steps):
                _step(provider, workload, sets[index % len(sets)], device)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / file_name(provider)
    profiler.export_chrome_trace(str(path))
    launches = read(path, device.type)
    return Trace(provider, path, steps, launches, _ours(launches, backend, device.type, path))


def _profiler(device: torch.device) -> profile:
    activities = [ProfilerActivity.CPU]
    if device.type in _WITH_KERNELS:
        activities.append(getattr(ProfilerActivity, device.type.upper()))
    return profile(activities=activities, acc_events=True)


def _step(provider: Provider, workload: Workload, inputs: Inputs, device: torch.device) -> None:
    """Run forward and backward and wait after each, so that its kernels lie in its range."""
    function, inputs = provider.function(workload), provider.accepted(workload, inputs)
    with record_function("forward"):
        results = inputs.call(function)
        timing.synchronize(device)
    with record_function("backward"):
        inputs.gradients(results)
        timing.synchronize(device)


def read(path: Path, device: str) -> list[Launch]:
    """The launches of a device type in a trace, by start; ValueError if it is none of a forward and a backward."""
    try:
        events = [e for e in json.loads(path.read_text())["traceEvents"] if e.get("ph") == "X"]
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"{path} is no Chrome trace: {error!r}") from error
    ranges = [e for e in events if e.get("cat") == "user_annotation" and e["name"] in _DIRECTIONS]
    if {e["name"] for e in ranges} != {*_DIRECTIONS}:
        raise ValueError(f"{path} does not say where forward and backward are")
    kinds = _ON_DEVICE if device in _WITH_KERNELS else _ON_HOST
    work = sorted((e for e in events if e.get("cat") in kinds), key=lambda e: (e["ts"], -e["dur"]))
    alone = _self_times(work) if kinds == _ON_HOST else [e["dur"] for e in work]
    launches = []
    for event, microseconds in zip(work, alone, strict=True):
        middle = event["ts"] + event["dur"] / 2
        within = [r["name"] for r in ranges if r["ts"] <= middle <= r["ts"] + r["dur"]]
        launches += [Launch(direction, event["name"], microseconds) for direction in within]
    return launches


def _self_times(work: Sequence[dict[str, Any]]) -> list[float]:
    """Each event's time without the events nested in it on its thread; events are sorted by start."""
    alone = [float(event["dur"]) for event in work]
    open_on: dict[Any, list[int]] = {}
    for index, event in enumerate(work):
        around = open_on.setdefault(event["tid"], [])
        while around and work[around[-1]]["ts"] + work[around[-1]]["dur"] <= event["ts"]:
            around.pop()
        if around:
            alone[around[-1]] -= event["dur"]
        around.append(index)
    return alone


def _ours(launches: Sequence[Launch], backend: str | None, device: str, path: Path) -> list[str]:
    """The names that `backend` launched. On a device both directions must have some; on a CPU only forward, because
    only it goes through the dispatcher.
    """
    if backend in (None, "eager"):
        return []
    prefixes = _prefixes(backend) if device in _WITH_KERNELS else ("kernel_fusion::",)
    found = [launch for launch in launches if launch.name.startswith(prefixes)]
    for direction in _DIRECTIONS if device in _WITH_KERNELS else _DIRECTIONS[:1]:
        if not any(launch.direction == direction for launch in found):
            names = ", ".join(dict.fromkeys(launch.name for launch in launches if launch.direction == direction))
            raise ValueError(f"{path} shows no launch of backend {backend!r} in {direction}, but {names or 'nothing'}")
    return list(dict.fromkeys(launch.name for launch in found))


def _prefixes(backend: str) -> tuple[str, ...]:
    if backend == "triton":
        from kernel_fusion.backends.triton.launch import launches

        return tuple(launches)
    return "kf_", "sum_partials"


def summary(trace: Trace, workload: Workload) -> Table:
    """Time per kernel or operator; per direction the total, its bytes and its bandwidth under the profiler."""
    columns = ("direction", "launched", "per step", "µs each", "µs per step", "share", "MB", "GB/s")
    rows = [row for direction in _DIRECTIONS for row in _rows(trace, workload, direction)]
    return Table(f"{shown(trace.provider.name)}, {workload}, {trace.steps} steps", columns, tuple(rows))


def _rows(trace: Trace, workload: Workload, direction: Any) -> Iterator[tuple[str, ...]]:
    launches = [launch for launch in trace.launches if launch.direction == direction]
    by_name: dict[str, list[float]] = {}
    for launch in launches:
        by_name.setdefault(launch.name, []).append(launch.microseconds)
    total = sum(launch.microseconds for launch in launches)
    small = [name for name, times in by_name.items() if sum(times) < _SMALL * total]
    if len(small) > 1:
        by_name[f"{len(small)} others"] = [time for name in small for time in by_name.pop(name)]
    for name, times in sorted(by_name.items(), key=lambda item: -sum(item[1])):
        spent = sum(times)
        share = f"{spent / total:.0%}" if total else ""
        per_step = f"{len(times) / trace.steps:g}"
        yield direction, name, per_step, number(spent / len(times)), number(spent / trace.steps), share, "", ""
    moved, per_step_us = workload.bytes_moved(direction, trace.provider.name), total / trace.steps
    speed = number(moved / per_step_us / 1e3) if total else ""
    yield direction, "all of it", "", "", number(per_step_us), "", megabytes(moved), speed


def ncu_command(trace: Trace, calls: Sequence[str]) -> list[str]:
    """The Nsight Compute command line for our kernels in a trace, while `calls` makes them."""
    report = trace.path.with_name(f"{trace.provider.backend}_counters")
    chosen = ["--kernel-name", f"regex:^({'|'.join(trace.ours)})$"]
    return ["ncu", "--set", "full", "--target-processes", "all", *chosen, "--export", str(report), *calls]
