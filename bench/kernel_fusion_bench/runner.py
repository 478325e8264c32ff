"""Runs suites in one process: compares results with float64, then times what passed, in turns.

An exception in a workload becomes a failure of that workload, and the run goes on.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import torch

from kernel_fusion.core.spec import dtype_name
from kernel_fusion_bench import check, floor, host, memory, page_faults, plot, results, steps, summary, timing
from kernel_fusion_bench.floor import Floor
from kernel_fusion_bench.providers import Provider
from kernel_fusion_bench.results import Results
from kernel_fusion_bench.suite import Kind, Suite
from kernel_fusion_bench.timing import Outcomes, Setup, Timing
from kernel_fusion_bench.units import dtype_label
from kernel_fusion_bench.workloads import Direction, Inputs, Workload


def run_suite(
    suite: Suite,
    setups: Sequence[Setup],
    folder: Path,
    *,
    dtypes: Sequence[torch.dtype] | None = None,
    verbs: Sequence[str] | None = None,
    weights: torch.dtype | None = None,
    command: str = "",
    quick: bool = False,
    peers: Mapping[str, str] | None = None,
    report: Callable[[int, int, str], None] = lambda *_: None,
) -> tuple[Results, list[Path]]:
    """Measure a suite in every setup and write JSON, CSV, Markdown and, if Matplotlib is installed, plots.

    The JSON file is rewritten after every workload and marked as interrupted until the run is complete. An interrupt
    (Ctrl-C) only ends the measuring, so no measurement is lost.

    Args:
        suite: one of `kernel_fusion_bench.suites.SUITES`, or your own.
        setups: who is measured, and where; each workload is measured in each.
        folder: where the files go, named after the suite; created if missing.
        dtypes, verbs: those to measure; None for the suite's, whose dtypes depend on the device.
        weights: the dtype of weight and bias of bare norms; None for the input's.
        command: the command that repeats the run, for the files.
        quick: whether to name and mark the files as those of a quick run.
        peers: the version of each other library, or why it is absent, for the files.
        report: called with the number of finished workloads, their total, and what was done last.

    Returns:
        The results and the paths of the files. Failures are in `Results.failures`, not raised.
    """
    chosen = suite.verbs if verbs is None else verbs
    jobs = [
        (setup, workload)
        for setup in setups
        for workload in suite.workloads(
            setup.device.type, dtypes or suite.dtypes_on(setup.device.type), chosen, weights
        )
    ]
    devices = list(dict.fromkeys(setup.device for setup in setups))
    method = describe_method(suite.kind, setups)
    facts = results.describe(devices, command, method, dict(peers or {}))
    found = Results(suite.name, suite.title, quick, facts, interrupted=True)
    with contextlib.suppress(KeyboardInterrupt):
        for finished, (setup, workload) in enumerate(jobs):
            about = f"{setup.place}, {workload.verb} {dtype_label(dtype_name(workload.dtype))}"
            for done in run(found, suite.kind, workload, setup):
                report(finished, len(jobs), f"{about} {done}")
            report(finished + 1, len(jobs), about)
            found.write_json(folder)
        found.interrupted = False
    paths = [*found.write(folder), summary.write_markdown(found, folder)]
    return found, paths if plot.missing() else [*paths, *plot.plot(found, folder, suite.plots)]


def describe_method(kind: Kind, setups: Sequence[Setup]) -> dict[str, str]:
    """How times, memory, floors and errors are measured, in words for the files."""
    if kind == "steps":
        return dict(steps.METHOD)
    devices = dict.fromkeys(setup.device.type for setup in setups)

    def on_each(texts: Mapping[str, str]) -> str:
        return "; ".join(dict.fromkeys(texts[device] for device in devices))

    clocks = {device: timing.METHODS["cuda" if device == "cuda" else "calls"] for device in devices}
    peaks = {device: memory.METHODS["cuda" if device == "cuda" else "cpu"] for device in devices}
    facts = {
        "time": timing.METHODS["host"] if kind == "host" else on_each(clocks),
        "floor": floor.METHOD,
        "bytes": "every argument and result once and in full, whoever computes it; in the suite relu-layernorm the "
        "passes that each contender makes",
        "directions": "forward without gradients; backward alone (gradients of all inputs); forward+backward",
        "saved_memory": memory.METHODS["saved"],
        "training_memory": on_each(peaks),
        "errors": check.describe(setups[0].effort.max_checked),
        "memory_of_results": page_faults.METHOD,
    }
    apply: dict[Kind, tuple[str, ...]] = {
        "kernels": ("time", "floor", "bytes", "directions", "training_memory", "errors"),
        "host": ("time", "errors"),
        "memory": ("saved_memory", "training_memory", "errors"),
    }
    names = [*apply[kind], *(["memory_of_results"] if any(setup.settles_memory for setup in setups) else [])]
    return {name: facts[name] for name in names}


def run(results: Results, kind: Kind, workload: Workload, setup: Setup) -> Iterator[str]:
    """Measure `workload` into `results`; yields what was done."""
    try:
        with timing.num_threads(setup.threads):
            for done in MEASURES[kind](results, workload, setup):
                yield f"{workload.name}: {done}"
    except Exception as error:
        results.fail(setup, "everybody", workload, timing.reason(error))
    if setup.device.type == "cuda":  # pragma: gpu
        # Graphs and inputs are gone; free their memory for the next workload.
        torch.cuda.empty_cache()


def measure_kernels(results: Results, workload: Workload, setup: Setup) -> Iterator[str]:
    """Check once, then time providers and floor in turns, in each direction; yields after each."""
    device = setup.device
    bytes_per_call = workload.bytes_moved("forward", Floor().name)
    sets = workload.input_sets(device, timing.rotating_calls(bytes_per_call) if device.type == "cuda" else 1)
    errors = check.passing(results, workload, setup, sets[0])
    differentiable = [provider for provider in errors if provider.differentiable]
    training_bytes = {provider: memory.training_bytes(provider, workload, sets[0]) for provider in differentiable}
    yield "checked"
    for direction in setup.directions:
        contenders = [Floor(), *(errors if direction == "forward" else differentiable)]
        outcomes = time_direction(workload, direction, contenders, sets, setup)
        results.add_times(setup, workload, direction, contenders, outcomes, errors, training_bytes)
        yield direction


def time_direction(
    workload: Workload,
    direction: Direction,
    contenders: Sequence[Floor | Provider],
    sets: Sequence[Inputs],
    setup: Setup,
) -> Outcomes:
    """Time the contenders in turns. Noisy times are measured once more."""
    known: Outcomes = {}
    if (ms := floor.computed_ms(direction, workload, setup.device)) is not None:
        known = {Floor().name: Timing(ms, ms, ms, 0, 0)}
        contenders = [c for c in contenders if c.name not in known]
    calls = {c.name: partial(c.prepare, direction, workload) for c in contenders}
    launched = [c.name for c in contenders if isinstance(c, Provider) and not c.in_graphs]
    measure = partial(timing.time_work, calls, sets, setup.effort, setup.device, launched)
    settled = partial(_settled, measure, direction) if setup.settles_memory else measure
    return known | timing.steadied(settled)


def _settled(measure: Callable[[], Outcomes], direction: Direction) -> Outcomes:
    with page_faults.settled():
        outcomes = measure()
    if direction != "forward":
        return outcomes
    with page_faults.reused():
        return timing.with_reused(outcomes, measure())


MEASURES: dict[Kind, Callable[[Results, Workload, Setup], Iterator[str]]] = {
    "kernels": measure_kernels,
    "host": host.measure,
    "memory": memory.measure,
    "steps": steps.measure,
}
