"""`kf.bench.compare`: functions of one's own are timed, checked against each other, and compared in words."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from support import python
from torch import Tensor

import kernel_fusion as kf
from kernel_fusion_bench import functions
from kernel_fusion_bench.timing import QUICK

FAST = replace(QUICK, min_rounds=2, max_rounds=2, max_seconds=0.0)


@pytest.fixture(autouse=True)
def little_effort(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two rounds."""
    monkeypatch.setattr(functions, "QUICK", FAST)


def compare(mine: Callable[..., Any], inputs: Any, **options: Any) -> functions.Times:
    """`mine` beside a sum of squares."""
    return kf.bench.compare({"mine": mine, "pytorch": lambda x, *_: (x * x).sum(-1)}, inputs, quick=True, **options)


def test_functions_are_timed_in_every_direction_that_there_is() -> None:
    """Forward alone without gradients; backward and both where an input requires one."""
    x = torch.randn(8, 16)
    assert compare(lambda x: x.square().sum(-1), x).timings.keys() == {"forward"}
    times = compare(lambda x: x.square().sum(-1), x.requires_grad_())
    assert times.timings.keys() == {"forward", "backward", "forward+backward"}
    assert all(times.speedup("mine", direction) > 0 for direction in times.timings)
    assert x.grad is None


def test_the_last_function_is_the_baseline_unless_one_is_named() -> None:
    """Its speed-up over itself is one."""
    x = torch.randn(8, 16)
    assert compare(lambda x: x.sum(-1), x).baseline == "pytorch"
    assert compare(lambda x: x.sum(-1), x, baseline="mine").speedup("mine") == 1


def test_differences_are_those_of_results_and_gradients() -> None:
    """The largest of each, by its place among results and inputs; inputs without gradients have none."""
    x, y = torch.zeros(8, 16, requires_grad=True), torch.ones(8, 16)
    found = compare(lambda x, y: (x * x).sum(-1) + 0.25 * y.sum(-1), [x, y]).differences
    assert found == {"mine": {"result 0": 4.0, "gradient of input 0": 0.0}}


def test_output_says_times_ratios_and_differences() -> None:
    """A line per function and direction, and one per function that is no baseline."""
    lines = str(compare(lambda x: x.square().sum(-1), torch.randn(8, 16))).splitlines()
    assert re.match(r"mine, forward: [\d.]+ [µm]s \(quartiles [\d.]+ to [\d.]+\), \d+\.\d\d× pytorch", lines[0])
    assert re.match(r"pytorch, forward: [\d.]+ [µm]s \(quartiles [\d.]+ to [\d.]+\)(, noisy)?$", lines[1])
    assert re.match(r"mine differs from pytorch by at most: result 0 [\d.e+-]+$", lines[2])


def test_a_function_that_cannot_be_timed_has_a_reason() -> None:
    """Such as one whose calls cannot be captured; its speed-up cannot be told."""
    times = compare(lambda x: x.square().sum(-1), torch.randn(8, 16, requires_grad=True))
    outcomes = times.timings["backward"] | {"mine": "RuntimeError: only once"}
    times = replace(times, timings=times.timings | {"backward": outcomes})
    assert "mine, backward: RuntimeError: only once" in str(times)
    with pytest.raises(ValueError, match="mine and pytorch were not both timed: RuntimeError: only once"):
        times.speedup("mine", "backward")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: kf.bench.compare({}, x), r"`baseline` must name one of the functions \[\], got None"),
        (lambda x: compare(torch.sum, x, baseline="other"), r"the functions \['mine', 'pytorch'\], got 'other'"),
        (lambda x: compare(torch.sum, []), "`inputs` must be a tensor or several, got none"),
        (lambda x: compare(torch.sum, x), r"results of mine must have the shapes of pytorch, .*\(8,\).*, got .*\(\)"),
    ],
)
def test_what_cannot_be_compared_is_refused(call: Callable[[Tensor], Any], message: str) -> None:
    """No functions, no such baseline, no tensors, results of other shapes."""
    with pytest.raises(ValueError, match=message):
        call(torch.randn(8, 16))


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (None, "mine must return a floating-point tensor or a tuple of them, got NoneType"),
        ([torch.ones(8)], "got list"),
        ((), "got an empty tuple"),
        ((torch.ones(8), None), "got NoneType"),
        (torch.ones(8, dtype=torch.int64), "got a tensor of torch.int64"),
        (torch.ones(0, 8), r"mine must return tensors with elements, got the shape \(0, 8\)"),
    ],
)
@pytest.mark.parametrize("baseline", ["mine", "pytorch"])
def test_results_of_other_kinds_are_refused(returned: Any, message: str, baseline: str) -> None:
    """Of the baseline and of every other function: a sentence that names it, instead of an error from within."""
    with pytest.raises((TypeError, ValueError), match=message):
        compare(lambda x: returned, torch.randn(8, 16), baseline=baseline)


def test_inputs_that_are_no_tensors_are_refused() -> None:
    """A sentence, before any function is called."""
    with pytest.raises(TypeError, match="`inputs` must be tensors, got float"):
        compare(torch.sum, [1.0])


def test_the_room_is_imported_when_it_is_read() -> None:
    """`import kernel_fusion` does without; `kf.bench` is there all the same."""
    code = """
        import sys
        import kernel_fusion as kf
        print("kernel_fusion.bench" in sys.modules, callable(kf.bench.compare), "kernel_fusion.bench" in sys.modules)
    """
    assert python(code).stdout.split() == ["False", "True", "True"]


@pytest.mark.cuda
def test_functions_are_captured_on_a_gpu() -> None:
    """Calls of a graph, on inputs that rotate."""
    times = compare(lambda x: x.square().sum(-1), torch.randn(64, 1024, device="cuda", requires_grad=True))
    for outcomes in times.timings.values():
        assert all(outcome.calls_per_iteration > 1 for outcome in outcomes.values())
