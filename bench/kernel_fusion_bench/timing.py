"""The one place that times: contenders take turns in one process, and medians are reported.

On a CPU, and on devices without our kernels, a sample is one call. On an NVIDIA GPU it is a replay of a CUDA graph of
calls on rotating inputs, together larger than the L2 cache, so neither launches nor a warm cache are measured. A
contender that raises has the reason instead of a time.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import torch

from kernel_fusion_bench import page_faults
from kernel_fusion_bench.providers import Provider
from kernel_fusion_bench.workloads import Call, Direction, Inputs

_Sample = TypeVar("_Sample")

# Five times the largest L2 cache (60 MB), so that a replay finds nothing of its inputs there.
ROTATED_BYTES = 300_000_000
# More calls take longer to capture than to time, and calls that small wait for launches, not for memory.
_MIN_CALLS, _MAX_CALLS = 4, 256
# Long enough to hide the few µs of a graph's start.
_SAMPLE_MS = 1.0
HOST_CALLS = 400
# Quartiles further apart than this share of the median mean that something else ran.
_NOISY = 0.25

METHODS = {
    "calls": "wall time of single calls, contenders taking turns in an order drawn for each round, one warm-up call "
    "each; median and quartiles; every call allocates and frees its own results; inputs are the same for all; "
    "page_faults: those of the process in a call, median",
    "cuda": "CUDA graph of calls that rotate over input sets, each call writing to memory of its own, at least "
    f"{ROTATED_BYTES // 10**6} MB touched per replay where {_MAX_CALLS} calls suffice for that (smaller calls wait for "
    "launches rather than for memory); all contenders write to the same memory, as where it lies among the inputs can "
    "change a time by a fifth; replays timed with events, contenders taking turns in an order drawn for each round; "
    "median and quartiles of the time per call; CuPy's calls are not captured but launched one by one on that stream",
    "host": f"wall time of {HOST_CALLS} calls without a synchronisation between them, over their number; contenders "
    "taking turns in an order drawn for each round; median and quartiles",
}


@dataclass(frozen=True)
class Effort:
    """How long to measure one cell.

    Attributes:
        min_rounds, max_rounds: samples of each contender when single calls are timed.
        max_seconds: for all contenders together, after `min_rounds`.
        replays, host_rounds: samples of each contender on a GPU, and of its host time.
        max_checked: elements of a tensor to compare with float64.
    """

    min_rounds: int
    max_rounds: int
    max_seconds: float
    replays: int
    host_rounds: int
    max_checked: int


FULL = Effort(min_rounds=15, max_rounds=300, max_seconds=6.0, replays=21, host_rounds=15, max_checked=1 << 20)
QUICK = Effort(min_rounds=5, max_rounds=50, max_seconds=0.6, replays=11, host_rounds=5, max_checked=1 << 19)


@dataclass(frozen=True)
class Place:
    """The place of a measurement: a device and, on a CPU, PyTorch's number of threads."""

    device: str
    threads: int | None = None

    def __str__(self) -> str:
        if self.threads is None:
            return self.device
        return f"{self.device}, {self.threads} thread{'s' if self.threads > 1 else ''}"


@dataclass(frozen=True)
class Setup:
    """Who is measured, where, in which directions, and how long.

    Attributes:
        threads: on a CPU; None for PyTorch's number.
        settles_memory: whether `page_faults` places a CPU's results, and forward is timed in reused memory too.
    """

    providers: Sequence[Provider]
    device: torch.device
    directions: Sequence[Direction]
    effort: Effort
    threads: int | None = None
    settles_memory: bool = False

    @property
    def place(self) -> Place:
        """The place of its results."""
        on_cpu = self.device.type == "cpu"
        return Place(str(self.device), (self.threads or torch.get_num_threads()) if on_cpu else None)


@dataclass(frozen=True)
class Timing:
    """Time per call over `iterations` samples of `calls_per_iteration` calls each.

    Attributes:
        page_faults: the median of the process's page faults in a call; None if meaningless.
        reused_median_ms: the median in reused memory; see `page_faults`.
    """

    median_ms: float
    q1_ms: float
    q3_ms: float
    iterations: int
    calls_per_iteration: int
    page_faults: float | None = None
    reused_median_ms: float | None = None

    @property
    def spread(self) -> float:
        """The distance of the quartiles over the median."""
        return (self.q3_ms - self.q1_ms) / self.median_ms

    @property
    def noisy(self) -> bool:
        """Whether the times vary too much for a mean or a picture."""
        return self.spread > _NOISY


Outcomes = dict[str, Timing | str]  # by name, the time or why there is none


@contextmanager
def num_threads(count: int | None) -> Iterator[None]:
    """Have PyTorch's CPU kernels and ours use `count` threads within the context; None changes nothing."""
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def synchronize(device: torch.device) -> None:
    """Wait until `device` has finished; a CPU always has."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def summarise(samples_ms: Sequence[float], calls: int, page_faults: Sequence[int] = ()) -> Timing:
    """Median and quartiles of samples, which are times per call."""
    faults = statistics.median(page_faults) if page_faults else None
    if len(samples_ms) == 1:
        return Timing(samples_ms[0], samples_ms[0], samples_ms[0], 1, calls, faults)
    q1, median, q3 = statistics.quantiles(samples_ms, n=4, method="inclusive")
    return Timing(median, q1, q3, len(samples_ms), calls, faults)


def steadied(measure: Callable[[], Outcomes]) -> Outcomes:
    """The outcomes of `measure`; if one is noisy, those of the steadier of two measurements."""

    def worst(outcomes: Outcomes) -> float:
        return max((timing.spread for timing in outcomes.values() if isinstance(timing, Timing)), default=0.0)

    first = measure()
    return first if worst(first) <= _NOISY else min(first, measure(), key=worst)


def with_reused(outcomes: Outcomes, reused: Outcomes) -> Outcomes:
    """The outcomes, each with its median in reused memory if both were timed."""
    merged = dict(outcomes)
    for name, timing in outcomes.items():
        again = reused.get(name)
        if isinstance(timing, Timing) and isinstance(again, Timing):
            merged[name] = replace(timing, reused_median_ms=again.median_ms)
    return merged


def reason(error: BaseException) -> str:
    """One line with the error and its first cause, since a broken capture raises an error of its own."""
    first = error
    while first.__context__ is not None:
        first = first.__context__
    return _one_line(error) + (f" (after {_one_line(first)})" if first is not error else "")


def rotating_calls(bytes_per_call: int) -> int:
    """How many calls on different inputs touch `ROTATED_BYTES`."""
    return min(_MAX_CALLS, max(_MIN_CALLS, math.ceil(ROTATED_BYTES / max(1, bytes_per_call))))


def time_work(
    contenders: Mapping[str, Callable[[Inputs], Call]],
    sets: Sequence[Inputs],
    effort: Effort,
    device: torch.device,
    not_captured: Collection[str] = (),
) -> Outcomes:
    """Time contenders, each given as a function that makes its call: on a GPU for every set of inputs, else for one."""
    if device.type == "cuda":  # pragma: gpu

        def all_calls(make: Callable[[Inputs], Call]) -> list[Call]:
            return [make(inputs) for inputs in sets]

        captured = {name: partial(all_calls, make) for name, make in contenders.items()}
        return time_cuda(captured, effort, device, not_captured)
    return time_calls({name: partial(make, sets[0]) for name, make in contenders.items()}, effort, device)


def time_calls(
    contenders: Mapping[str, Callable[[], Call]],
    effort: Effort,
    device: torch.device,
    clock: Callable[[], float] = time.perf_counter,
) -> Outcomes:
    """Time single calls of contenders, each given as a function that makes its call; waits for `device` after each."""

    def rounds() -> Iterator[int]:
        deadline = clock() + effort.max_seconds
        for round in range(effort.max_rounds):
            if round >= effort.min_rounds and clock() >= deadline:
                return
            yield round

    def sample(call: Call) -> tuple[float, int]:
        faults, start = page_faults.faults(), clock()
        call()
        synchronize(device)
        ms = (clock() - start) * 1e3
        return ms, page_faults.faults() - faults

    outcomes, samples = _take_turns(contenders, rounds(), sample)
    for name, taken in samples.items():
        times, faults = zip(*taken, strict=True)
        # On other devices the driver causes the page faults.
        outcomes[name] = summarise(times, 1, faults if device.type == "cpu" else ())
    return outcomes


def time_host(
    contenders: Mapping[str, Callable[[], Call]],
    effort: Effort,
    device: torch.device,
    clock: Callable[[], float] = time.perf_counter,
) -> Outcomes:
    """Time the host's work for a call of each contender, without waiting for the device."""

    def sample(call: Call) -> float:
        synchronize(device)
        start = clock()
        for _ in range(HOST_CALLS):
            call()
        return (clock() - start) * 1e3 / HOST_CALLS

    outcomes, samples = _take_turns(contenders, range(effort.host_rounds), sample)
    return outcomes | {name: summarise(times, HOST_CALLS) for name, times in samples.items()}


def time_cuda(  # pragma: gpu
    contenders: Mapping[str, Callable[[], list[Call]]],
    effort: Effort,
    device: torch.device,
    not_captured: Collection[str] = (),
) -> Outcomes:
    """Time contenders, each given as a function that makes its calls, one per set of inputs.

    The function runs on the capture's stream, because autograd runs backward on the stream of forward. Contenders in
    `not_captured` are launched call by call.
    """
    with torch.cuda.device(device):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            captured: dict[str, _Repeated] = {}
            outcomes: Outcomes = {}
            # All use one memory pool in turn, so that all work on the same bytes.
            pool = torch.cuda.graph_pool_handle()
            for name, make in contenders.items():
                try:
                    prepare = _launched if name in not_captured else partial(_capture, stream=stream, pool=pool)
                    captured[name] = prepare(make())
                except Exception as error:  # the others can still be timed
                    outcomes[name] = reason(error)
                    pool = torch.cuda.graph_pool_handle()  # the allocator may still be filling the old one
            events: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {name: [] for name in captured}
            # These loops never wait: the next sample is queued while the GPU runs the last one.
            for warm_up in captured.values():
                warm_up.replay()
            for round in range(effort.replays):
                for name in _drawn(captured, round):
                    events[name].append(_timed_replays(captured[name].replay, captured[name].replays))
            stream.synchronize()
        for name, repeated in captured.items():
            per_sample = repeated.replays * len(repeated.calls)
            outcomes[name] = summarise([a.elapsed_time(b) / per_sample for a, b in events[name]], len(repeated.calls))
        return outcomes


@dataclass(frozen=True)
class _Repeated:
    """A replay of all calls, how often a sample repeats it, and the calls, which own its tensors."""

    replay: Call
    replays: int
    calls: list[Call]

    @classmethod
    def of(cls, replay: Call, calls: list[Call]) -> _Repeated:  # pragma: gpu
        """Repeat `replay` often enough to fill a sample."""
        replay()
        start, end = _timed_replays(replay, 1)
        end.synchronize()
        return cls(replay, max(1, round(_SAMPLE_MS / start.elapsed_time(end))), calls)


def _launched(calls: list[Call]) -> _Repeated:  # pragma: gpu
    def replay() -> None:
        for call in calls:
            call()

    return _Repeated.of(replay, calls)


def _capture(calls: list[Call], stream: torch.cuda.Stream, pool: Any) -> _Repeated:  # pragma: gpu
    for call in calls[:2]:
        call()
    graph = torch.cuda.CUDAGraph()
    with _allocator_restored(stream.device_index, pool), torch.cuda.graph(graph, pool=pool, stream=stream):
        results = [call() for call in calls]
    # Kept until now, so that no call reused the memory of another's results.
    del results
    return _Repeated.of(graph.replay, calls)


@contextmanager
def _allocator_restored(device: int, pool: tuple[int, int]) -> Iterator[None]:  # pragma: gpu
    """After a failed capture, make the allocator leave the graph's pool, which PyTorch may forget."""
    try:
        yield
    except BaseException:
        with suppress(RuntimeError):  # it had left the pool
            torch._C._cuda_endAllocateToPool(device, pool)
        raise


def _take_turns(
    contenders: Mapping[str, Callable[[], Call]], rounds: Iterable[int], sample: Callable[[Call], _Sample]
) -> tuple[Outcomes, dict[str, list[_Sample]]]:
    """Warm every contender up with one call, then sample round by round; a failing one gets its reason."""
    calls: dict[str, Call] = {}
    outcomes: Outcomes = {}
    for name, make in contenders.items():
        try:
            call = make()
            call()
        except Exception as error:  # the others can still be timed
            outcomes[name] = reason(error)
        else:
            calls[name] = call
    samples: dict[str, list[_Sample]] = {name: [] for name in calls}
    for round in rounds:
        for name in _drawn(calls, round):
            samples[name].append(sample(calls[name]))
    return outcomes, samples


def _timed_replays(replay: Call, count: int) -> tuple[torch.cuda.Event, torch.cuda.Event]:  # pragma: gpu
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(count):
        replay()
    end.record()
    return start, end


def _drawn(names: Iterable[str], round: int) -> list[str]:
    """The names in this round's random order, so that nobody always follows the same one into the caches."""
    order = list(names)
    random.Random(round).shuffle(order)
    return order


def _one_line(error: BaseException) -> str:
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0]}" if text else type(error).__name__
