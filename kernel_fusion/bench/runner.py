"""Runs workloads. Results are compared with float64 first, and only who passes is timed, in one process, in turns.

Whatever a workload raises, memory that runs out included, becomes a failure of that workload, and the run goes on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch

from kernel_fusion.bench import check, host, memory, timing
from kernel_fusion.bench.providers import Call, Contender, Direction, Floor, input_sets
from kernel_fusion.bench.results import Results
from kernel_fusion.bench.suites import Kind, Workload
from kernel_fusion.bench.timing import Outcomes, Setup
from kernel_fusion.testing.oracle import Inputs, RowNormCase


def describe_method(kind: Kind, setup: Setup) -> dict[str, str]:
    """How times, memory, floors and errors come about, in words for the files."""
    device = setup.device.type
    facts = {
        "time": timing.METHODS["host" if kind == "host" else device],
        "floor": "torch.neg(x) for forward, torch.add(x, dy) for backward, timed like the rest",
        "directions": "forward without gradients; backward alone (dx, dweight, dbias); forward+backward",
        "saved_memory": memory.METHODS["saved"],
        "training_memory": memory.METHODS[device],
        "errors": check.describe(setup.effort.max_checked),
    }
    apply = {
        "kernels": ("time", "floor", "directions", "training_memory", "errors"),
        "host": ("time", "errors"),
        "memory": ("saved_memory", "training_memory", "errors"),
    }
    return {name: facts[name] for name in apply[kind]}


def run(results: Results, kind: Kind, workload: Workload, setup: Setup) -> Iterator[str]:
    """Measure `workload` into `results`; yields what was done."""
    try:
        for done in MEASURES[kind](results, workload, setup):
            yield f"{workload.name}: {done}"
    except Exception as error:
        results.fail("everybody", workload, timing.reason(error))
    if setup.device.type == "cuda":
        # The graphs and inputs are gone; give their memory back before the next workload asks for its own.
        torch.cuda.empty_cache()


def measure_kernels(results: Results, workload: Workload, setup: Setup) -> Iterator[str]:
    """Check once, then time the providers and the floor against each other in each direction; yields each time."""
    case, device = workload.case, setup.device
    bytes_per_call = math.prod(case.shape) * (case.dtype.itemsize + case.result_dtype.itemsize)
    sets = input_sets(case, device, timing.rotating_calls(bytes_per_call) if device.type == "cuda" else 1)
    errors = check.passing(results, workload, setup, sets[0])
    training_bytes = {provider: memory.training_bytes(provider, case, sets[0]) for provider in errors}
    yield "checked"
    contenders: list[Contender] = [Floor(), *errors]
    for direction in setup.directions:
        outcomes = time_direction(case, direction, contenders, sets, setup)
        results.add_times(workload, direction, contenders, outcomes, errors, training_bytes)
        yield direction


def time_direction(
    case: RowNormCase, direction: Direction, contenders: Sequence[Contender], sets: Sequence[Inputs], setup: Setup
) -> Outcomes:
    """Time the contenders against each other in one direction; on a GPU over all sets of inputs, else on the first."""

    def prepare(contender: Contender) -> list[Call]:
        return [contender.prepare(direction, case, inputs) for inputs in sets]

    if setup.device.type == "cuda":
        return timing.time_cuda({c.name: partial(prepare, c) for c in contenders}, setup.effort, setup.device)
    return timing.time_cpu({c.name: partial(c.prepare, direction, case, sets[0]) for c in contenders}, setup.effort)


MEASURES: dict[Kind, Callable[[Results, Workload, Setup], Iterator[str]]] = {
    "kernels": measure_kernels,
    "host": host.measure,
    "memory": memory.measure,
}
