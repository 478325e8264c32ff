"""Chrome traces of a workload by PyTorch's profiler, forward and backward, and tables of what they show.

A trace is judged by its file: without a launch of the backend that it is named after it is an error.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from kernel_fusion.bench import timing
from kernel_fusion.bench.providers import Provider, a_kernel_must_run
from kernel_fusion.bench.tables import Table
from kernel_fusion.bench.units import megabytes, number, shown
from kernel_fusion.bench.workloads import Inputs, Workload

_DIRECTIONS = ("forward", "backward")
_WARM_UP = 2
# At least so many steps are traced; more where inputs rotate over more sets.
_STEPS = 10
# What a trace calls the work of a device, and that of the host.
_ON_DEVICE, _ON_HOST = ("kernel", "gpu_memcpy", "gpu_memset"), ("cpu_op",)
_WITH_KERNELS = ("cuda", "xpu")
# What takes a smaller share of a direction's time is summed up in one row.
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
    """A kernel of a device that ran or, on a CPU, an operator without those that it called."""

    direction: str
    name: str
    microseconds: float


@dataclass(frozen=True)
class Trace:
    """What a contender's file holds: all launches, and which names among them only our backend launches."""

    provider: Provider
    path: Path
    steps: int
    launches: Sequence[Launch]
    ours: Sequence[str]


def file_name(provider: Provider) -> str:
    """What the trace of a contender is called."""
    return f"{provider.backend or provider.name}_profile.json"


def make_calls(provider: Provider, workload: Workload, device: torch.device, steps: int = _WARM_UP) -> None:
    """Some steps without tracing them, for a profiler that looks on from outside."""
    (inputs,) = workload.input_sets(device, 1)
    for _ in range(steps):
        _step(provider, workload, inputs, device)


def record(provider: Provider, workload: Workload, device: torch.device, folder: Path) -> Trace:
    """Trace warmed-up steps of a contender into its file in `folder`.

    Raises:
        AssertionError: no kernel of the contender's backend ran.
        ValueError: the file shows none.
    """
    per_step = workload.bytes_moved("forward+backward", provider.name)
    sets = workload.input_sets(device, timing.rotating_calls(per_step) if device.type == "cuda" else 1)
    steps = max(_STEPS, len(sets))
    backend = provider.backend if workload.what.has_kernels else None
    with a_kernel_must_run(backend):
        for index in range(_WARM_UP):
            _step(provider, workload, sets[index % len(sets)], device)
        with _profiler(device):  # the profiler has to warm up as well
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
    """A forward and a backward, each waited for, so that its kernels run within its range."""
    function, inputs = provider.function(workload), provider.accepted(workload, inputs)
    with record_function("forward"):
        results = inputs.call(function)
        timing.synchronize(device)
    with record_function("backward"):
        inputs.gradients(results)
        timing.synchronize(device)


def read(path: Path, device: str) -> list[Launch]:
    """What a trace holds of the work of a device type, in the order in which it began.

    Raises:
        ValueError: the file is no trace of a forward and a backward.
    """
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
    """The time of each event without that of those within it on the same thread; events are sorted by their start."""
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
    """The names of what `backend` launched; on a device both directions must have some.

    On a CPU only the forward goes through the dispatcher.
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
    """How the names of a backend's kernels begin."""
    if backend == "triton":
        from kernel_fusion.backends.triton.launch import launches

        return tuple(launches)
    return "kf_", "sum_partials"


def summary(trace: Trace, workload: Workload) -> Table:
    """Time per kernel or operator, and per direction the whole, its bytes and bandwidth while it was traced."""
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
    """The command line that has Nsight Compute look at the kernels of ours in a trace, while `calls` makes them."""
    report = trace.path.with_name(f"{trace.provider.backend}_counters")
    chosen = ["--kernel-name", f"regex:^({'|'.join(trace.ours)})$"]
    return ["ncu", "--set", "full", "--target-processes", "all", *chosen, "--export", str(report), *calls]
