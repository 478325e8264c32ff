"""`compare` times a user's own functions against each other, as the suites time ours."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kernel_fusion_bench import timing
from kernel_fusion_bench.providers import call_of
from kernel_fusion_bench.timing import FULL, QUICK, Outcomes, Timing
from kernel_fusion_bench.units import number, time_unit
from kernel_fusion_bench.workloads import DIRECTIONS, Direction, Inputs


@dataclass(frozen=True, repr=False)
class Times:
    """The result of `compare`; print it.

    Attributes:
        baseline: the name that speed-ups are relative to.
        timings: the time, or why there is none, by direction and name.
        differences: the largest absolute difference from the baseline, by name, then by result or gradient.
    """

    baseline: str
    timings: Mapping[Direction, Outcomes]
    differences: Mapping[str, Mapping[str, float]]

    def speedup(self, name: str, direction: Direction = "forward") -> float:
        """The baseline's median time over that of `name`; ValueError if one has no time."""
        ours, theirs = (self.timings[direction][each] for each in (name, self.baseline))
        if isinstance(ours, Timing) and isinstance(theirs, Timing):
            return theirs.median_ms / ours.median_ms
        raise ValueError(f"{name} and {self.baseline} were not both timed: {ours}, {theirs}")

    def __repr__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        for direction, outcomes in self.timings.items():
            unit = time_unit([t.median_ms for t in outcomes.values() if isinstance(t, Timing)])
            for name, outcome in outcomes.items():
                if isinstance(outcome, str):
                    yield f"{name}, {direction}: {outcome}"
                    continue
                quartiles = outcome.q1_ms, outcome.median_ms, outcome.q3_ms
                low, middle, high = (number(ms * unit.factor) for ms in quartiles)
                line = f"{name}, {direction}: {middle} {unit.name} (quartiles {low} to {high})"
                if name != self.baseline and isinstance(outcomes[self.baseline], Timing):
                    line += f", {self.speedup(name, direction):.2f}× {self.baseline}"
                yield line + (", noisy" if outcome.noisy else "")
        for name, found in self.differences.items():
            each = ", ".join(f"{result} {difference:.1e}" for result, difference in found.items())
            yield f"{name} differs from {self.baseline} by at most: {each}"


def compare(
    functions: Mapping[str, Callable[..., Any]],
    inputs: Tensor | Sequence[Tensor],
    *,
    baseline: str | None = None,
    quick: bool = False,
) -> Times:
    """Time functions of the same tensors against each other.

    They take turns in one process, in a random order per round. On an NVIDIA GPU, calls are captured in CUDA graphs and
    rotate over copies of the inputs, so neither launches nor a warm cache are measured. Elsewhere a sample is one call.
    If an input requires a gradient, backward and both together are timed too, with random cotangents.

    Args:
        functions: by name; each takes `inputs` as its arguments and returns a floating-point tensor or a tuple of them.
        inputs: the arguments, tensors of one device, or a single tensor. Functions enclose everything else they need.
        baseline: the name of the function that the others are compared with. Default: the last one.
        quick: whether to take a tenth of the time, for a first look.

    Returns:
        a `Times`; print it.

    Raises:
        TypeError: an input is no tensor, or a function returns something else than floating-point tensors.
        ValueError: there is no function or tensor, `baseline` names no function, a result has no elements, or results
            differ in shape from the baseline's.

    Example:
        >>> import torch, kernel_fusion as kf
        >>> mine = lambda x: kf.layer_norm(x, (64,))
        >>> pytorch = lambda x: torch.nn.functional.layer_norm(x, (64,))
        >>> times = kf.bench.compare({"mine": mine, "pytorch": pytorch}, torch.randn(32, 64), quick=True)
        >>> times.speedup("mine") > 0
        True
    """
    tensors = (inputs,) if isinstance(inputs, Tensor) else tuple(inputs)
    name = baseline or next(reversed(list(functions)), None)
    if name not in functions or name is None:
        raise ValueError(f"`compare`: `baseline` must name one of the functions {list(functions)}, got {name!r}")
    if not tensors:
        raise ValueError("`compare`: `inputs` must be a tensor or several, got none")
    for tensor in tensors:
        if not isinstance(tensor, Tensor):
            raise TypeError(f"`compare`: `inputs` must be tensors, got {type(tensor).__name__}")
    device = tensors[0].device
    arguments = Inputs({f"input {at}": tensor for at, tensor in enumerate(tensors)}, ())
    cotangents = tuple(map(torch.randn_like, _results(name, functions[name], arguments)))
    given = replace(arguments, cotangents=cotangents)
    per_call = sum(t.nbytes for t in given.tensors)
    count = timing.rotating_calls(per_call) if device.type == "cuda" else 1
    sets = [given.copy() for _ in range(count)]
    differences = _differences(functions, name, sets[0])
    directions = DIRECTIONS if given.leaves else DIRECTIONS[:1]
    effort = QUICK if quick else FULL
    timings = {}
    for direction in directions:
        calls = {each: partial(call_of, function, direction) for each, function in functions.items()}
        timings[direction] = timing.steadied(partial(timing.time_work, calls, sets, effort, device))
    return Times(name, timings, differences)


def _results(name: str, function: Callable[..., Any], inputs: Inputs) -> tuple[Tensor, ...]:
    """The results of a function, all of them floating-point tensors with elements."""
    found = inputs.call(function)
    if not found:
        raise TypeError(f"`compare`: {name} must return a floating-point tensor or a tuple of them, got an empty tuple")
    for value in found:
        if not isinstance(value, Tensor) or not value.is_floating_point():
            got = f"a tensor of {value.dtype}" if isinstance(value, Tensor) else type(value).__name__
            raise TypeError(f"`compare`: {name} must return a floating-point tensor or a tuple of them, got {got}")
        if value.numel() == 0:
            raise ValueError(f"`compare`: {name} must return tensors with elements, got the shape {tuple(value.shape)}")
    return found


def _differences(
    functions: Mapping[str, Callable[..., Any]], baseline: str, inputs: Inputs
) -> dict[str, dict[str, float]]:
    """The distance of each result and gradient from the baseline's, by name."""

    def results(name: str) -> dict[str, Tensor]:
        values = _results(name, functions[name], inputs)
        named = {f"result {at}": value.detach() for at, value in enumerate(values)}
        gradients = inputs.gradients(values) if inputs.leaves else ()
        return named | {f"gradient of {leaf[1:]}": g for leaf, g in zip(inputs.leaves, gradients, strict=True)}

    expected, found = results(baseline), {}
    for name in (name for name in functions if name != baseline):
        got = results(name)
        shapes, wanted = ({each: tuple(t.shape) for each, t in several.items()} for several in (got, expected))
        if shapes != wanted:
            raise ValueError(f"`compare`: results of {name} must have the shapes of {baseline}, {wanted}, got {shapes}")
        found[name] = {each: float((got[each].double() - t.double()).abs().amax()) for each, t in expected.items()}
    return found
