"""Host time per call: what a call costs before the device has done anything, as a function and as a module.

Ours is called as users call it, without naming a backend.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

import kernel_fusion as kf
from kernel_fusion.bench import check, timing
from kernel_fusion.bench.providers import Call, Provider, arguments, gradient_leaves, input_sets, ours
from kernel_fusion.bench.results import OURS, REFERENCE, Results
from kernel_fusion.bench.suites import Workload
from kernel_fusion.bench.timing import Setup
from kernel_fusion.testing.oracle import Inputs, RowNormCase

MODES = ("inference", "training forward", "forward+backward")
_PYTORCH = {"layer_norm": torch.nn.LayerNorm, "rms_norm": torch.nn.RMSNorm}
_OURS = {"layer_norm": kf.FusedLayerNorm, "rms_norm": kf.FusedRMSNorm}

Form = tuple[Callable[[], Tensor], tuple[Tensor, ...]]  # what is called, and what gradients are taken for


def measure(results: Results, workload: Workload, setup: Setup) -> Iterator[str]:
    """Time functions, then the modules of PyTorch and ours, in each of `MODES`; yields each time."""
    (inputs,) = input_sets(workload.case, setup.device, 1)
    others = [provider for provider in setup.providers if provider.backend is None]
    setup = replace(setup, providers=[*others, ours(setup.device.type, explicit=False)])
    errors = check.passing(results, workload, setup, inputs)
    with_module = [p for p in errors if p.name == REFERENCE or p.name.startswith(OURS)]
    for name, form, providers in (("function", _function, list(errors)), ("module", _module, with_module)):
        named = replace(workload, name=f"{workload.name} {name}")
        for mode in MODES:
            with torch.set_grad_enabled(mode != "inference"):
                calls = {p.name: partial(_call, mode, form(p, workload.case, inputs), inputs.dy) for p in providers}
                outcomes = timing.time_host(calls, setup.effort, setup.device)
            results.add_times(named, mode, providers, outcomes, errors)
            yield f"{name}, {mode}"


def _function(provider: Provider, case: RowNormCase, inputs: Inputs) -> Form:
    inputs = provider.accepted(case, inputs)
    return partial(provider.norm(case), *arguments(inputs)), tuple(gradient_leaves(inputs).values())


def _module(provider: Provider, case: RowNormCase, inputs: Inputs) -> Form:
    modules = _PYTORCH if provider.backend is None else _OURS
    module = modules[case.verb](case.normalized_shape, device=inputs.x.device, dtype=case.weight)
    return partial(module, inputs.x), (inputs.x, *module.parameters())


def _call(mode: str, form: Form, dy: Tensor) -> Call:
    forward, leaves = form
    if mode == "forward+backward":
        return lambda: torch.autograd.grad(forward(), leaves, dy)
    return forward
