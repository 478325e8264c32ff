"""Timing, the one place where it is done: contenders take turns within one process, and medians are reported.

On a CPU one call is one sample, its result freed within it, as in a program. On a GPU a sample is a replay of a CUDA
graph that holds calls on rotating inputs, so that neither launches nor a warm cache are measured: the calls of a graph
touch several times what the L2 cache holds, and every call writes to memory of its own.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from kernel_fusion.bench.providers import Call

# The H200 has 60 MB of L2 cache: five times that in one graph leaves nothing of a call for the next replay.
ROTATED_BYTES = 300_000_000
_MIN_CALLS, _MAX_CALLS = 8, 4096
# A sample this long makes the start of a graph, a few µs, invisible.
_SAMPLE_MS = 1.0

METHODS = {
    "cpu": "wall time of single calls, contenders taking turns in rotating order, one warm-up call each; median and "
    "quartiles; every call allocates and frees its own results; inputs are the same for all",
    "cuda": "CUDA graph of calls that rotate over input sets, each call writing to memory of its own, at least "
    f"{ROTATED_BYTES // 10**6} MB touched per replay where {_MAX_CALLS} calls suffice for that; replays timed with "
    "events, contenders taking turns in rotating order; median and quartiles of the time per call",
}


@dataclass(frozen=True)
class Effort:
    """How long to measure one cell.

    Attributes:
        min_rounds, max_rounds: samples of each contender on a CPU.
        max_seconds: for the cell, all contenders together; `min_rounds` comes first.
        replays: samples of each contender on a GPU.
        max_checked: elements of the largest tensor whose results are compared with float64.
    """

    min_rounds: int
    max_rounds: int
    max_seconds: float
    replays: int
    max_checked: int


FULL = Effort(min_rounds=15, max_rounds=300, max_seconds=6.0, replays=51, max_checked=1 << 24)
QUICK = Effort(min_rounds=5, max_rounds=50, max_seconds=0.6, replays=15, max_checked=1 << 21)


@dataclass(frozen=True)
class Timing:
    """Time per call over `iterations` samples of `calls` calls each."""

    median_ms: float
    q1_ms: float
    q3_ms: float
    iterations: int
    calls: int


def summarise(samples_ms: Sequence[float], calls: int) -> Timing:
    """Median and quartiles of samples that are already times per call."""
    if len(samples_ms) == 1:
        return Timing(samples_ms[0], samples_ms[0], samples_ms[0], 1, calls)
    q1, median, q3 = statistics.quantiles(samples_ms, n=4, method="inclusive")
    return Timing(median, q1, q3, len(samples_ms), calls)


def rotating_calls(bytes_per_call: int) -> int:
    """How many calls on different inputs touch `ROTATED_BYTES`."""
    return min(_MAX_CALLS, max(_MIN_CALLS, math.ceil(ROTATED_BYTES / max(1, bytes_per_call))))


def time_cpu(
    calls: Mapping[str, Call], effort: Effort, clock: Callable[[], float] = time.perf_counter
) -> dict[str, Timing]:
    """Time each of `calls`, by name."""
    for call in calls.values():
        call()
    samples: dict[str, list[float]] = {name: [] for name in calls}
    deadline = clock() + effort.max_seconds
    for round in range(effort.max_rounds):
        if round >= effort.min_rounds and clock() >= deadline:
            break
        for name in _rotated(list(calls), round):
            call = calls[name]
            start = clock()
            call()
            samples[name].append((clock() - start) * 1e3)
    return {name: summarise(times, 1) for name, times in samples.items()}


def time_cuda(
    contenders: Mapping[str, Callable[[], list[Call]]], effort: Effort, device: torch.device
) -> dict[str, Timing]:
    """Time contenders, each given as a function that makes its calls, one per set of inputs.

    The function runs on the stream of the capture: autograd runs a backward on the stream of its forward.
    """
    with torch.cuda.device(device):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            captured = {name: _capture(make(), stream) for name, make in contenders.items()}
            replays = {name: math.ceil(_SAMPLE_MS / _replay_ms(graph)) for name, (graph, _) in captured.items()}
            events: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {name: [] for name in captured}
            # Nothing waits in this loop: the GPU is still busy with one sample while the next is queued.
            next(iter(captured.values()))[0].replay()
            for round in range(effort.replays):
                for name in _rotated(list(captured), round):
                    events[name].append(_timed_replays(captured[name][0], replays[name]))
            stream.synchronize()
        return {
            name: summarise([a.elapsed_time(b) / (replays[name] * len(calls)) for a, b in events[name]], len(calls))
            for name, (_, calls) in captured.items()
        }


def _capture(calls: list[Call], stream: torch.cuda.Stream) -> tuple[torch.cuda.CUDAGraph, list[Call]]:
    """The graph of `calls`, and the calls, whose tensors the graph reads and which must live as long."""
    for call in calls[:2]:
        call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        results = [call() for call in calls]
    # Kept up to here, so that no call was given the memory of another's results.
    del results
    return graph, calls


def _replay_ms(graph: torch.cuda.CUDAGraph) -> float:
    graph.replay()
    start, end = _timed_replays(graph, 1)
    end.synchronize()
    return float(start.elapsed_time(end))


def _timed_replays(graph: torch.cuda.CUDAGraph, count: int) -> tuple[torch.cuda.Event, torch.cuda.Event]:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(count):
        graph.replay()
    end.record()
    return start, end


def _rotated(names: list[str], round: int) -> list[str]:
    """The names, another one first each round, so that none always follows the same one."""
    first = round % len(names)
    return names[first:] + names[:first]
