"""Tuning: improves a norm's plan field by field, while the GPU at hand gets faster.

Every trial is timed beside the present plan, at a model's number of rows and at many. Its results must have the same
bits. The winner is measured again, for longer.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kernel_fusion.backends.cuda import compile as compiler
from kernel_fusion.backends.cuda import planner
from kernel_fusion.backends.cuda.device import Device
from kernel_fusion.backends.cuda.plan import Plan
from kernel_fusion.backends.cuda.source import Source
from kernel_fusion.core.spec import RowNormSpec, dtype_name
from kernel_fusion.errors import CompileError
from kernel_fusion_bench import loaded, providers, timing, trials
from kernel_fusion_bench.changes import beyond_noise
from kernel_fusion_bench.operations import case_workload
from kernel_fusion_bench.suites import SUITES
from kernel_fusion_bench.timing import FULL, QUICK, Effort, Timing
from kernel_fusion_bench.trials import Choice, Kernel
from kernel_fusion_bench.workloads import Call, Direction, Inputs, Workload

VERBS = ("layer_norm", "rms_norm", "add_layer_norm", "add_rms_norm")
DIRECTIONS: tuple[Direction, ...] = ("forward", "backward")

_GAIN = 0.98  # a table row must be at most this share of the present time
_STEP = 0.99  # another round needs at most this share of the best time
_ROUNDS = 4
_MANY_ELEMENTS = 2**25

Times = list[Timing]  # one choice, for each number of rows
# The times of choices, the present plan's first; empty for one that cannot run or has other bits.
Measure = Callable[[Sequence[Choice], Effort], list[Times]]


@dataclass(frozen=True)
class Cell:
    """A kernel to tune."""

    verb: str
    direction: Direction
    cols: int
    dtype: torch.dtype

    def __str__(self) -> str:
        return f"{self.verb} {self.direction}, N = {self.cols}, {dtype_name(self.dtype)}"

    def workloads(self) -> list[Workload]:
        """The call at two numbers of rows: that of the first model with this length, if any, and a large one."""
        models = SUITES["models"].workloads("cuda", [self.dtype], ["layer_norm"])
        rows = [each.num_rows for each in models if each.facts["cols"] == self.cols][:1]
        sizes = sorted({*rows, max(1, _MANY_ELEMENTS // self.cols)})
        return [case_workload(self.verb.replace("add_", "add+"), (each, self.cols), self.dtype) for each in sizes]


def cells(
    verbs: Sequence[str], directions: Sequence[Direction], hidden: Sequence[int] | None, dtype: torch.dtype
) -> list[Cell]:
    """Each combination; None for the row lengths of the suite `models`."""
    models = SUITES["models"].workloads("cuda", [dtype], ["layer_norm"])
    lengths = hidden or sorted({each.facts["cols"] for each in models})
    return [Cell(verb, direction, cols, dtype) for cols in lengths for verb in verbs for direction in directions]


@dataclass(frozen=True)
class Outcome:
    """The result of tuning a cell.

    Attributes:
        rows: the numbers of rows that were timed.
        present, best: times per call at each.
        choice: the settings of the best plan; empty if none is better.
        trials: how many were measured.
    """

    kernel: Kernel
    rows: tuple[int, ...]
    present: Times
    best: Times
    choice: Choice
    trials: int

    @property
    def ratio(self) -> float:
        """The best time over the present one."""
        return ratio(self.present, self.best)

    def evidence(self, where: str) -> str:
        """The evidence of a table row, in words; `where` names machine and versions."""
        pairs = zip(self.rows, self.present, self.best, strict=True)
        times = [f"{n} rows {new.median_ms * 1e3:.2f} of {old.median_ms * 1e3:.2f} µs" for n, old, new in pairs]
        return f"{where}: {', '.join(times)}; ratio {self.ratio:.3f}"


def ratio(before: Times, after: Times) -> float:
    """After over before, as the geometric mean over numbers of rows."""
    return statistics.geometric_mean(b.median_ms / a.median_ms for a, b in zip(before, after, strict=True))


def better(present: Times, best: Times) -> bool:
    """Whether to take a plan: 2 % faster on average, faster beyond noise at some size, slower beyond it at none."""
    noted = [b.median_ms / a.median_ms for a, b in zip(present, best, strict=True) if beyond_noise(a, b, "cuda")]
    return ratio(present, best) <= _GAIN and bool(noted) and max(noted) < 1


def climb(kernels: Sequence[Kernel], measure: Measure) -> tuple[Choice, Times, Times, int]:
    """The best choice, the present times, its times, and the number of trials."""
    best: Choice = {}
    count = 0
    for _ in range(_ROUNDS):
        tried = list(trials.neighbours(kernels, best))
        count += len(tried)
        _, *times = measure([{}, best, *tried], QUICK)
        leader, *others = times
        found = [(ratio(leader, each), choice) for each, choice in zip(others, tried, strict=True) if each and leader]
        step, choice = min(found, key=lambda each: each[0], default=(1.0, best))
        if step > _STEP:
            break
        best = choice
    best = trials.needed(kernels, best)
    present, again = measure([{}, best], FULL)
    if best and again and better(present, again):
        return best, present, again, count
    return {}, present, present, count


def tune(cell: Cell, device: torch.device) -> Outcome:
    """Find the best plan of a cell on a GPU; RuntimeError if the present one cannot be timed."""
    workloads = cell.workloads()
    counts = [timing.rotating_calls(each.bytes_moved(cell.direction, "")) for each in workloads]
    sets = [each.input_sets(device, count) for each, count in zip(workloads, counts, strict=True)]
    kernels = _kernels(cell, workloads[0], sets[0][0], Device.of(device.index))
    fits = _Fits(kernels, device.index)

    def measure(choices: Sequence[Choice], effort: Effort) -> list[Times]:
        sound = fits.among(choices)
        taken: list[Times] = [[] for _ in choices]
        for workload, inputs in zip(workloads, sets, strict=True):
            planned = [_by_spec(kernels, choices[i]) for i in sound]
            outcomes = _outcomes(cell, workload, inputs, planned, effort, device)
            for i, outcome in zip(sound, outcomes, strict=True):
                if isinstance(outcome, Timing):
                    taken[i].append(outcome)
                elif not choices[i]:
                    raise RuntimeError(f"{workload} cannot be timed: {outcome}")
        return [times if len(times) == len(workloads) else [] for times in taken]

    choice, present, best, count = climb(kernels, measure)
    return Outcome(kernels[0], tuple(each.num_rows for each in workloads), present, best, choice, count)


def _kernels(cell: Cell, workload: Workload, inputs: Inputs, device: Device) -> list[Kernel]:
    """The timed kernel as the planner sees it; for inference also the kernel of training."""
    asked: list[RowNormSpec] = []

    def note(spec: RowNormSpec, plan: Plan) -> Plan:
        asked.append(spec)
        return plan

    with trials.override_plan(note):
        providers.ours("cuda").prepare(cell.direction, workload, inputs)()
    wanted = "backward" if cell.direction == "backward" else "inference"
    spec = next(each for each in asked if each.direction == wanted)
    specs = [spec] if wanted == "backward" else [spec, replace(spec, direction="forward")]
    return [Kernel(each, planner.contiguous_access(each), device) for each in specs]


def _by_spec(kernels: Sequence[Kernel], choice: Choice) -> dict[RowNormSpec, Plan]:
    return dict(zip((kernel.spec for kernel in kernels), trials.plans(kernels, choice), strict=True))


class _Fits:
    """Which choices compile, spill no more than the present plan, and sum in its order."""

    def __init__(self, kernels: Sequence[Kernel], index: int) -> None:
        self.kernels, self.index = kernels, index
        self.present = self._loaded({})

    def among(self, choices: Sequence[Choice]) -> list[int]:
        """The positions of those that fit."""
        with ThreadPoolExecutor() as pool:
            list(pool.map(_compile, [each for choice in choices for each in self._sources(choice)]))
        return [i for i, choice in enumerate(choices) if not choice or self._fits(choice)]

    def _sources(self, choice: Choice) -> list[tuple[Plan, Source, int]]:
        pairs = zip(self.kernels, trials.plans(self.kernels, choice), strict=True)
        return [(plan, planner.source_of(k.spec, k.access, plan), k.device.arch) for k, plan in pairs]

    def _fits(self, choice: Choice) -> bool:
        try:
            pairs = list(zip(self._loaded(choice), self.present, strict=True))
        except (CompileError, RuntimeError):  # needs more than the device has
            return False
        spec = self.kernels[0].spec
        # All blocks that run at once sum columns, so their number decides the order.
        sums = spec.direction == "backward" and any(spec.grads[1:])
        same_order = not sums or all(new.max_blocks == old.max_blocks for new, old in pairs)
        return same_order and all(new.local_bytes <= old.local_bytes for new, old in pairs)

    def _loaded(self, choice: Choice) -> list[loaded.Kernel]:
        return [
            loaded.Kernel(plan, source.name, compiler.cubin(source.text(), arch), self.index)
            for plan, source, arch in self._sources(choice)
        ]


def _compile(planned: tuple[Plan, Source, int]) -> None:
    with suppress(CompileError):  # raised again where the choice is examined
        compiler.cubin(planned[1].text(), planned[2])


def _outcomes(
    cell: Cell,
    workload: Workload,
    sets: Sequence[Inputs],
    planned: Sequence[dict[RowNormSpec, Plan]],
    effort: Effort,
    device: torch.device,
) -> list[Timing | str]:
    """Time plans beside each other; the first ones are the present plans, whose bits all must reproduce."""
    current = dict(planned[0])
    expected: list[Tensor] = []

    def prepare(plans: dict[RowNormSpec, Plan]) -> list[Call]:
        current.update(plans)
        planner.forget_kernels()
        calls = [providers.ours("cuda").prepare(cell.direction, workload, inputs) for inputs in sets]
        results: Any = calls[0]()
        bits = results if isinstance(results, tuple) else (results,)
        expected.extend(() if expected else bits)
        if not all(map(torch.equal, bits, expected)):
            raise ValueError("its results have other bits")
        return calls

    with trials.override_plan(lambda spec, plan: current.get(spec, plan)):
        outcomes = timing.time_cuda({str(i): partial(prepare, each) for i, each in enumerate(planned)}, effort, device)
    return [outcomes[str(i)] for i in range(len(planned))]
