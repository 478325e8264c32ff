"""PyTorch and our backends as contenders; `peers` has other libraries, `floor` the floor."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

import kernel_fusion as kf
from kernel_fusion.core import checks
from kernel_fusion.operators import loader
from kernel_fusion.testing.launches import kernels_must_run
from kernel_fusion_bench.workloads import Call, Direction, Function, Inputs, Workload

_Result = TypeVar("_Result")


@dataclass(frozen=True)
class Contender:
    """Anything that is measured: its name in tables and files, and the version of its library."""

    name: str
    version: str


@dataclass(frozen=True)
class Provider(Contender):
    """An implementation of the verbs.

    Attributes:
        function: maps a workload to a differentiable function that does its call.
        backend: our backend, whose kernels must run; None for others.
        f32_weights: the verbs whose weight and bias must be float32.
        convert: turns a tensor into the function's argument, outside the timing; None for tensors.
        in_graphs: whether CUDA graphs can capture its calls.
        in_place: the operations in which it overwrites arguments or dy; it gets copies, made outside the timing.
        variant: the build of our CPU kernels to run; None for the best.
    """

    function: Callable[[Workload], Function]
    backend: str | None = None
    f32_weights: tuple[str, ...] = ()
    measures: Callable[[Workload], bool] = lambda workload: True
    convert: Callable[[Tensor], object] | None = None
    differentiable: bool = True
    in_graphs: bool = True
    in_place: tuple[str, ...] = ()
    variant: str | None = None

    def prepare(self, direction: Direction, workload: Workload, inputs: Inputs) -> Call:
        """A call that does the work of `direction`. Forward alone is inference: no input requires a gradient."""
        call = self._run(partial(self._prepare, direction, workload, inputs))
        return call if self.variant is None else partial(self._run, call)

    def _prepare(self, direction: Direction, workload: Workload, inputs: Inputs) -> Call:
        function, inputs = self.function(workload), self.accepted(workload, inputs)
        if direction != "forward" and not self.differentiable:
            raise NotImplementedError(f"{self.name} has no backward pass")
        return call_of(function, direction, inputs, self.convert)

    def backend_of(self, workload: Workload) -> str | None:
        """Our backend whose kernels a workload must run; None if others' kernels serve it."""
        if self.backend is None or checks.without_kernels(workload.verb, self.backend):
            return None
        return self.backend if workload.what.has_kernels else None

    def results(self, workload: Workload, inputs: Inputs) -> dict[str, Tensor]:
        """Results and gradients by name; without a backward pass, only results."""
        if not self.differentiable:
            got: Any = self.prepare("forward", workload, inputs)()
            each = got if isinstance(got, tuple) else (got,)
            tensors = (y if isinstance(y, Tensor) else torch.utils.dlpack.from_dlpack(y) for y in each)
            return dict(zip(workload.what.results, tensors, strict=True))
        inputs = self.accepted(workload, inputs)
        backend = self.backend_of(workload)
        with kernels_must_run(backend, every=False):
            results = self._run(partial(inputs.call, self.function(workload)))
        with kernels_must_run(backend if inputs.leaves else None, every=False):
            gradients = self._run(partial(inputs.gradients, results))
        named = dict(zip(workload.what.results, (r.detach() for r in results), strict=True))
        return named | dict(zip(inputs.leaves, gradients, strict=True))

    def _run(self, call: Callable[[], _Result]) -> _Result:
        """Run `call` on the kernels of `variant`."""
        if self.variant is None:
            return call()
        best = loader.cpu_variant()
        loader.use_cpu_variant(self.variant)
        try:
            return call()
        finally:
            loader.use_cpu_variant(best)

    def accepted(self, workload: Workload, inputs: Inputs) -> Inputs:
        """The inputs, with weight and bias in a dtype that the provider takes, or copies that it may overwrite."""
        if workload.what.name in self.in_place:
            return inputs.copy()
        if workload.verb not in self.f32_weights:
            return inputs
        return inputs.map(lambda name, t: t.float() if name in ("weight", "bias") else t)


def call_of(
    function: Function, direction: Direction, inputs: Inputs, convert: Callable[[Tensor], object] | None = None
) -> Call:
    """A call that does the work of `direction`; forward alone takes converted arguments without gradients."""
    if direction == "forward":
        detached = (t.detach() for t in inputs.arguments.values())
        return partial(function, *(t if convert is None else convert(t) for t in detached))
    if direction == "backward":
        results = inputs.call(function)
        return partial(inputs.gradients, results, retain_graph=True)

    def forward_and_backward() -> tuple[Tensor, ...]:
        results = inputs.call(function)
        return (*results, *inputs.gradients(results))

    return forward_and_backward


def pytorch() -> Provider:
    """PyTorch's own call or chain of calls, the reference for speed."""
    return Provider("pytorch", torch.__version__, lambda workload: workload.unfused())


def ours(backend: str, explicit: bool | None = None) -> Provider:
    """Our verbs on `backend`, which calls name if `explicit`; by default not on a CPU, since that takes host time."""
    if explicit is None:
        explicit = backend != "cpu"

    def function(workload: Workload) -> Function:
        return workload.fused(backend if explicit else None)

    return Provider(f"kf-{backend}", kf.__version__, function, backend)
