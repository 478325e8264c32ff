"""Who is measured: PyTorch, our backends, and the floor. Each turns one set of inputs into a call without arguments.

Other libraries are providers too, and stand in `peers`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

import kernel_fusion as kf
from kernel_fusion.native import loader
from kernel_fusion.testing.oracle import Inputs, RowNormCase, lay_out

Direction = Literal["forward", "backward", "forward+backward"]
DIRECTIONS: tuple[Direction, ...] = ("forward", "backward", "forward+backward")
_LAUNCH_COUNTERS = {"cpu": ("cpu_forward", "cpu_backward"), "cuda": ("cuda_launch",)}

Call = Callable[[], object]
Norm = Callable[[Tensor, Tensor | None, Tensor | None], Tensor]  # (x, weight, bias) -> y


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


@dataclass(frozen=True)
class Provider:
    """An implementation of the verbs.

    Attributes:
        name, version: see `Contender`.
        norm: the function that does a case's call, which autograd can differentiate.
        backend: ours, whose kernels must run; None for everybody else.
        f32_weights: the verbs for which weight and bias are given in float32 whatever the case says.
    """

    name: str
    version: str
    norm: Callable[[RowNormCase], Norm]
    backend: str | None = None
    f32_weights: tuple[str, ...] = ()

    def prepare(self, direction: Direction, case: RowNormCase, inputs: Inputs) -> Call:
        """See `Contender`. Forward alone is the inference path: no input requires a gradient."""
        norm, inputs = self.norm(case), self.accepted(case, inputs)
        if direction == "forward":
            weight, bias = (None if t is None else t.detach() for t in (inputs.weight, inputs.bias))
            return partial(norm, inputs.x.detach(), weight, bias)
        leaves = tuple(gradient_leaves(inputs).values())
        if direction == "backward":
            y = norm(*arguments(inputs))
            return partial(torch.autograd.grad, y, leaves, inputs.dy, retain_graph=True)

        def forward_and_backward() -> tuple[Tensor, ...]:
            y = norm(*arguments(inputs))
            return (y, *torch.autograd.grad(y, leaves, inputs.dy))

        return forward_and_backward

    def results(self, case: RowNormCase, inputs: Inputs) -> dict[str, Tensor]:
        """y and the gradients by name, to be judged."""
        inputs = self.accepted(case, inputs)
        leaves = gradient_leaves(inputs)
        with kernels_must_run(self.backend):
            y = self.norm(case)(*arguments(inputs))
            gradients = torch.autograd.grad(y, tuple(leaves.values()), inputs.dy)
        return {"y": y.detach()} | dict(zip(leaves, gradients, strict=True))

    def accepted(self, case: RowNormCase, inputs: Inputs) -> Inputs:
        """The inputs with weight and bias in a dtype that this provider takes."""
        if case.verb not in self.f32_weights:
            return inputs
        weight, bias = (
            None if t is None else t.detach().float().requires_grad_() for t in (inputs.weight, inputs.bias)
        )
        return replace(inputs, weight=weight, bias=bias)


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
    """PyTorch's own call, which is the reference for speed.

    It refuses some mixes of dtypes; those are computed in the widest of them and rounded, which is what its users
    write.
    """

    def norm(case: RowNormCase) -> Norm:
        own = _norm(case, F.layer_norm, F.rms_norm)
        if case.weight in (None, case.dtype):
            return own
        wide = torch.promote_types(case.dtype, case.weight)

        def widened(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
            parameters = (None if t is None else t.to(wide) for t in (weight, bias))
            return own(x.to(wide), *parameters).to(case.dtype)

        return widened

    return Provider("pytorch", torch.__version__, norm)


def ours(backend: str, explicit: bool = True) -> Provider:
    """Our verbs on `backend`; explicitly, so that nothing else can be measured in its name.

    Asking for a backend costs the host some time. `explicit=False` is the call that users write, for a backend that is
    the device's own.
    """

    def norm(case: RowNormCase) -> Norm:
        if not explicit:
            return _norm(case, kf.layer_norm, kf.rms_norm)
        return _norm(case, partial(kf.layer_norm, backend=backend), partial(kf.rms_norm, backend=backend))

    return Provider(f"kf-{backend}", kf.__version__, norm, backend)


def _norm(case: RowNormCase, layer_norm: Callable[..., Tensor], rms_norm: Callable[..., Tensor]) -> Norm:
    """The call of `case`, of two functions that take PyTorch's arguments."""
    shape = case.normalized_shape
    if case.verb == "layer_norm":
        return lambda x, weight, bias: layer_norm(x, shape, weight, bias)
    return lambda x, weight, bias: rms_norm(x, shape, weight)


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


def arguments(inputs: Inputs) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The arguments of a `Norm`."""
    return inputs.x, inputs.weight, inputs.bias


def gradient_leaves(inputs: Inputs) -> dict[str, Tensor]:
    """The inputs that gradients are taken for, by the gradient's name."""
    leaves = zip(("dx", "dweight", "dbias"), arguments(inputs), strict=True)
    return {name: leaf for name, leaf in leaves if leaf is not None}


def input_sets(case: RowNormCase, device: torch.device, count: int) -> list[Inputs]:
    """`count` sets of random x and dy with one weight and bias, drawn on the device; dy is contiguous.

    Each tensor is allocated by itself, so that all are aligned as a program's tensors are.
    """
    # A generator of their own: a failed capture can leave the device's default one unusable.
    generator = torch.Generator(device).manual_seed(0)

    def random(shape: tuple[int, ...], dtype: torch.dtype, mean: float = 0.0, std: float = 1.0) -> Tensor:
        return torch.randn(shape, dtype=dtype, device=device, generator=generator).mul_(std).add_(mean)

    def parameter(dtype: torch.dtype | None, mean: float) -> Tensor | None:
        return None if dtype is None else random(case.normalized_shape, dtype, mean).requires_grad_()

    def one_set() -> Inputs:
        x = random(case.shape, case.dtype, case.mean, case.std)
        x = x if case.layout == "contiguous" else lay_out(x, case.layout)
        return Inputs(x.requires_grad_(), weight, bias, random(case.shape, case.result_dtype))

    weight, bias = parameter(case.weight, 1.0), parameter(case.bias, 0.5)
    return [one_set() for _ in range(count)]
