"""Runs workloads. Results are compared with float64 first, and only who passes is timed, in one process, in turns.

Whatever a workload raises, memory that runs out included, becomes a failure of that workload, and the run goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch

from kernel_fusion.bench import check, floor, host, memory, timing
from kernel_fusion.bench.floor import Floor
from kernel_fusion.bench.providers import Contender, Provider
from kernel_fusion.bench.results import Results
from kernel_fusion.bench.suites import Kind
from kernel_fusion.bench.timing import Outcomes, Setup, Timing
from kernel_fusion.bench.workloads import Call, Direction, Inputs, Workload


def describe_method(kind: Kind, setup: Setup) -> dict[str, str]:
    """How times, memory, floors and errors come about, in words for the files."""
    device = setup.device.type
    facts = {
        "time": timing.METHODS["host" if kind == "host" else device],
        "floor": floor.METHOD,
        "bytes": "every argument and result once and in full, whoever computes it; in the suite relu-layernorm the "
        "passes that each contender makes",
        "directions": "forward without gradients; backward alone (gradients of all inputs); forward+backward",
        "saved_memory": memory.METHODS["saved"],
        "training_memory": memory.METHODS[device],
        "errors": check.describe(setup.effort.max_checked),
    }
    apply = {
        "kernels": ("time", "floor", "bytes", "directions", "training_memory", "errors"),
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
    device = setup.device
    bytes_per_call = workload.bytes_moved("forward", Floor().name)
    sets = workload.input_sets(device, timing.rotating_calls(bytes_per_call) if device.type == "cuda" else 1)
    errors = check.passing(results, workload, setup, sets[0])
    differentiable = [provider for provider in errors if provider.differentiable]
    training_bytes = {provider: memory.training_bytes(provider, workload, sets[0]) for provider in differentiable}
    yield "checked"
    for direction in setup.directions:
        contenders: list[Contender] = [Floor(), *(errors if direction == "forward" else differentiable)]
        outcomes = time_direction(workload, direction, contenders, sets, setup)
        results.add_times(workload, direction, contenders, outcomes, errors, training_bytes)
        yield direction


def time_direction(
    workload: Workload, direction: Direction, contenders: Sequence[Contender], sets: Sequence[Inputs], setup: Setup
) -> Outcomes:
    """Time the contenders against each other in one direction; on a GPU over all sets of inputs, else on the first."""
    known: Outcomes = {}
    if (ms := floor.computed_ms(direction, workload, setup.device)) is not None:
        known = {Floor().name: Timing(ms, ms, ms, 0, 0)}
        contenders = [c for c in contenders if c.name not in known]

    def prepare(contender: Contender) -> list[Call]:
        return [contender.prepare(direction, workload, inputs) for inputs in sets]

    if setup.device.type == "cuda":
        calls = {c.name: partial(prepare, c) for c in contenders}
        launched = [c.name for c in contenders if isinstance(c, Provider) and not c.in_graphs]
        return known | timing.time_cuda(calls, setup.effort, setup.device, launched)
    single = {c.name: partial(c.prepare, direction, workload, sets[0]) for c in contenders}
    return known | timing.time_cpu(single, setup.effort)


MEASURES: dict[Kind, Callable[[Results, Workload, Setup], Iterator[str]]] = {
    "kernels": measure_kernels,
    "host": host.measure,
    "memory": memory.measure,
}
