"""The host's time for a call, as a function and as a module; our calls name no backend."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

import kernel_fusion as kf
from kernel_fusion_bench import check, timing
from kernel_fusion_bench.providers import Provider, ours
from kernel_fusion_bench.results import OURS, REFERENCE, Results
from kernel_fusion_bench.timing import Setup
from kernel_fusion_bench.workloads import Call, Inputs, Workload

MODES = ("inference", "training forward", "forward+backward")
_PYTORCH = {"layer_norm": torch.nn.LayerNorm, "rms_norm": torch.nn.RMSNorm}
_OURS = {"layer_norm": kf.FusedLayerNorm, "rms_norm": kf.FusedRMSNorm}

Form = tuple[Callable[[], Tensor], tuple[Tensor, ...]]  # the call, and the tensors to differentiate for


def measure(results: Results, workload: Workload, setup: Setup) -> Iterator[str]:
    """Time functions, then the modules of PyTorch and ours, in each of `MODES`; yields each time."""
    (inputs,) = workload.input_sets(setup.device, 1)
    others = [provider for provider in setup.providers if provider.backend is None]
    setup = replace(setup, providers=[*others, ours(setup.device.type, explicit=False)])
    errors = check.passing(results, workload, setup, inputs)
    with_module = [p for p in errors if p.name == REFERENCE or p.name.startswith(OURS)]
    for name, form, providers in (("function", _function, list(errors)), ("module", _module, with_module)):
        named = replace(workload, name=f"{workload.name} {name}")
        for mode in MODES:
            with torch.set_grad_enabled(mode != "inference"):
                calls = {
                    p.name: partial(_timed, mode, form(p, workload, inputs), inputs.cotangents[0]) for p in providers
                }
                outcomes = timing.steadied(partial(timing.time_host, calls, setup.effort, setup.device))
            results.add_times(setup, named, mode, providers, outcomes, errors)
            yield f"{name}, {mode}"


def _function(provider: Provider, workload: Workload, inputs: Inputs) -> Form:
    inputs = provider.accepted(workload, inputs)
    return partial(provider.function(workload), *inputs.arguments.values()), tuple(inputs.leaves.values())


def _module(provider: Provider, workload: Workload, inputs: Inputs) -> Form:
    modules: dict[str, Any] = _PYTORCH if provider.backend is None else _OURS
    x, weight = inputs.arguments["x"], inputs.arguments["weight"]
    module = modules[workload.verb](weight.shape, device=x.device, dtype=weight.dtype)
    return partial(module, x), (x, *module.parameters())


def _timed(mode: str, form: Form, dy: Tensor) -> Call:
    forward, leaves = form
    if mode == "forward+backward":
        return lambda: torch.autograd.grad(forward(), leaves, dy)
    return forward
