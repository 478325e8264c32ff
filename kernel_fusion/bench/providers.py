"""Who is measured: PyTorch, our backends, and the floor. Each turns one set of inputs into a call without arguments.

A peer is one more `Provider`: a name, a version and a forward function that autograd can differentiate.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, Protocol

import torch
from torch import Tensor

import kernel_fusion as kf
from kernel_fusion.backends import eager
from kernel_fusion.native import loader
from kernel_fusion.testing.oracle import Inputs, RowNormCase

Direction = Literal["forward", "backward", "forward+backward"]
_LAUNCH_COUNTERS = {"cpu": ("cpu_forward", "cpu_backward"), "cuda": ("cuda_launch",)}
DIRECTIONS: tuple[Direction, ...] = ("forward", "backward", "forward+backward")

Call = Callable[[], object]
Forward = Callable[[RowNormCase, Inputs], Tensor]
# (y, leaves, dy, retain_graph) -> the gradients of the leaves
Backward = Callable[[Tensor, tuple[Tensor, ...], Tensor, bool], tuple[Tensor, ...]]


class Contender(Protocol):
    """Whatever can be timed."""

    @property
    def name(self) -> str:
        """What tables and files call it."""

    @property
    def version(self) -> str:
        """The version of what runs."""

    def prepare(self, direction: Direction, case: RowNormCase, inputs: Inputs) -> Call:
        """A call that does the work of `direction` on `inputs` and returns its results, so that they can be kept."""


def autograd_backward(y: Tensor, leaves: tuple[Tensor, ...], dy: Tensor, retain_graph: bool) -> tuple[Tensor, ...]:
    """The gradients by autograd, without accumulating into `.grad`."""
    return torch.autograd.grad(y, leaves, dy, retain_graph=retain_graph)


@dataclass(frozen=True)
class Provider:
    """An implementation of the verb, forward and backward."""

    name: str
    version: str
    forward: Forward
    backward: Backward = autograd_backward
    backend: str | None = None  # ours, whose kernels must run

    def prepare(self, direction: Direction, case: RowNormCase, inputs: Inputs) -> Call:
        """See `Contender`. Forward alone is the inference path: no input requires a gradient."""
        if direction == "forward":
            return partial(self.forward, case, detached(inputs))
        leaves = tuple(gradient_leaves(inputs).values())
        if direction == "backward":
            return partial(self.backward, self.forward(case, inputs), leaves, inputs.dy, True)

        def forward_and_backward() -> tuple[Tensor, ...]:
            y = self.forward(case, inputs)
            return (y, *self.backward(y, leaves, inputs.dy, False))

        return forward_and_backward

    def results(self, case: RowNormCase, inputs: Inputs) -> dict[str, Tensor]:
        """y and the gradients by name, to be judged."""
        leaves = gradient_leaves(inputs)
        with kernels_must_run(self.backend):
            y = self.forward(case, inputs)
            gradients = self.backward(y, tuple(leaves.values()), inputs.dy, False)
        return {"y": y.detach()} | dict(zip(leaves, gradients, strict=True))


@dataclass(frozen=True)
class Floor:
    """PyTorch's elementwise kernels moving the unavoidable bytes: x to y forward, x and dy to dx backward."""

    name: str = "floor"
    version: str = torch.__version__

    def prepare(self, direction: Direction, case: RowNormCase, inputs: Inputs) -> Call:
        """See `Contender`. The tensors are contiguous whatever the layout of the case."""
        x, dy = inputs.x.detach().contiguous(), inputs.dy.contiguous()
        forward, backward = partial(torch.neg, x), partial(torch.add, x, dy)
        if direction == "forward+backward":
            return lambda: (forward(), backward())
        return forward if direction == "forward" else backward


def pytorch() -> Provider:
    """PyTorch's own call, which is the reference for speed."""

    def forward(case: RowNormCase, inputs: Inputs) -> Tensor:
        parameters = (case.normalized_shape, inputs.weight, inputs.bias, None, case.weight_offset, case.out_dtype)
        return eager.pytorch_row_norm(inputs.x, *parameters, case.verb == "rms_norm")

    return Provider("pytorch", torch.__version__, forward)


def ours(backend: str) -> Provider:
    """Our verb on an explicit backend, so that nothing else can be measured in its name."""

    def forward(case: RowNormCase, inputs: Inputs) -> Tensor:
        verb: Callable[..., Tensor] = getattr(kf, case.verb)
        options = {"weight_offset": case.weight_offset, "out_dtype": case.out_dtype, "backend": backend}
        return verb(inputs.x, case.normalized_shape, inputs.weight, bias=inputs.bias, **options)

    return Provider(f"kf-{backend}", kf.__version__, forward, backend=backend)


@contextmanager
def kernels_must_run(backend: str | None) -> Iterator[None]:
    """Raise if no kernel of `backend` runs within: then the eager definition served a call in its name.

    A no-op for backends without kernels, and where CUDA kernels are launched without the extension that counts them.
    """
    counters = _LAUNCH_COUNTERS.get(backend or "", ()) if loader.is_loaded() else ()
    before = [loader.launches(counter) for counter in counters]
    yield
    for counter, count in zip(counters, before, strict=True):
        if loader.launches(counter) == count:
            raise AssertionError(f"no kernel of backend {backend!r} ran: {counter} is still {count}")


def gradient_leaves(inputs: Inputs) -> dict[str, Tensor]:
    """The inputs that gradients are taken for, by the gradient's name."""
    leaves = {"dx": inputs.x, "dweight": inputs.weight, "dbias": inputs.bias}
    return {name: leaf for name, leaf in leaves.items() if leaf is not None}


def detached(inputs: Inputs) -> Inputs:
    """The same tensors outside any autograd graph."""
    weight, bias = (None if t is None else t.detach() for t in (inputs.weight, inputs.bias))
    return replace(inputs, x=inputs.x.detach(), weight=weight, bias=bias)


def input_sets(case: RowNormCase, device: torch.device, count: int) -> list[Inputs]:
    """`count` sets of random x and dy with one weight and bias, contiguous, drawn on the device.

    Each tensor is allocated by itself, so that all are aligned as a program's tensors are.
    """

    def parameter(dtype: torch.dtype | None) -> Tensor | None:
        return (
            None if dtype is None else torch.randn(case.normalized_shape, dtype=dtype, device=device).requires_grad_()
        )

    def one_set() -> Inputs:
        x = torch.randn(case.shape, dtype=case.dtype, device=device).requires_grad_()
        return Inputs(x, weight, bias, torch.randn(case.shape, dtype=case.result_dtype, device=device))

    weight, bias = parameter(case.weight), parameter(case.bias)
    return [one_set() for _ in range(count)]
