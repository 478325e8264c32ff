"""Runs workloads: every provider's results are compared with float64 first, and only who passes is timed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch

from kernel_fusion.bench import memory, timing
from kernel_fusion.bench.providers import DIRECTIONS, Call, Contender, Direction, Floor, Provider, input_sets
from kernel_fusion.bench.results import Failure, Measurement, Results
from kernel_fusion.bench.suites import Workload
from kernel_fusion.bench.timing import Effort, Timing
from kernel_fusion.testing import oracle
from kernel_fusion.testing.oracle import Comparison, RowNormCase

# What `measure` yields for one workload: a check, and a time for each direction.
STEPS = 1 + len(DIRECTIONS)


def describe_method(device: torch.device, effort: Effort) -> dict[str, str]:
    """How times, memory, floors and errors come about, in words for the files."""
    return {
        "time": timing.METHODS[device.type],
        "floor": "torch.neg(x) for forward, torch.add(x, dy) for backward, timed like the rest",
        "directions": "forward without gradients; backward alone (dx, dweight, dbias); forward+backward",
        "training_memory": memory.METHODS[device.type],
        "errors": "largest absolute error against float64; passes within twice (PyTorch's error + one rounding); "
        f"compared on the first rows that make up at most {effort.max_checked} elements",
    }


def measure(
    workload: Workload, providers: Sequence[Provider], device: torch.device, effort: Effort, results: Results
) -> Iterator[str]:
    """Check and time `providers` on `workload`, adding to `results`; yields what was done, `STEPS` times at most."""
    passed, bytes_taken = {}, {}
    sample = input_sets(workload.case, device, 1)[0]
    verdicts = check(limited(workload.case, effort.max_checked), providers, device)
    for provider in providers:
        verdict = verdicts[provider.name]
        if isinstance(verdict, str):
            results.failures.append(Failure(workload, provider.name, verdict))
            continue
        passed[provider] = verdict
        bytes_taken[provider] = memory.training_bytes(provider, workload.case, sample)
    del sample
    yield f"{workload.name}: checked"
    for direction in DIRECTIONS:
        floor = Floor()
        timings = time_direction(workload.case, direction, [floor, *passed], device, effort)
        results.measurements.append(Measurement(workload, direction, floor.name, floor.version, timings[floor.name]))
        results.measurements += [
            Measurement(workload, direction, p.name, p.version, timings[p.name], bytes_taken[p], verdict)
            for p, verdict in passed.items()
        ]
        yield f"{workload.name}: {direction}"


def check(case: RowNormCase, providers: Sequence[Provider], device: torch.device) -> dict[str, list[Comparison] | str]:
    """For each provider, by name, its comparisons with float64, or why it must not be timed."""
    inputs = oracle.make_inputs(case, device)
    expected, theirs = oracle.reference(case, inputs), oracle.pytorch(case, inputs)
    verdicts: dict[str, list[Comparison] | str] = {}
    for provider in providers:
        try:
            got = provider.results(case, inputs)
            comparisons = [oracle.judge(name, [(got[name], expected[name], theirs[name])]) for name in expected]
        except (RuntimeError, AssertionError) as error:
            verdicts[provider.name] = str(error)
            continue
        wrong = [f"{c.name} is {c.excess:.3g} times its error budget off" for c in comparisons if not c.ok]
        verdicts[provider.name] = "; ".join(wrong) or comparisons
    return verdicts


def limited(case: RowNormCase, max_elements: int) -> RowNormCase:
    """`case` with as many of its rows as have at most `max_elements` elements (one row at least)."""
    if math.prod(case.shape) <= max_elements:
        return case
    rows = max(1, max_elements // math.prod(case.normalized_shape))
    return replace(case, shape=(rows, *case.normalized_shape))


def time_direction(
    case: RowNormCase, direction: Direction, contenders: Sequence[Contender], device: torch.device, effort: Effort
) -> dict[str, Timing]:
    """Time the contenders against each other in one direction."""
    if device.type != "cuda":
        (inputs,) = input_sets(case, device, 1)
        return timing.time_cpu({c.name: c.prepare(direction, case, inputs) for c in contenders}, effort)
    bytes_per_call = math.prod(case.shape) * (case.dtype.itemsize + case.result_dtype.itemsize)
    sets = input_sets(case, device, timing.rotating_calls(bytes_per_call))

    def calls_of(contender: Contender) -> Callable[[], list[Call]]:
        return lambda: [contender.prepare(direction, case, inputs) for inputs in sets]

    timings = timing.time_cuda({c.name: calls_of(c) for c in contenders}, effort, device)
    # The graphs are gone; give their memory back before the next cell asks for its own.
    torch.cuda.empty_cache()
    return timings
