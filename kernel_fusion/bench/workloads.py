"""What can be measured: the protocol that every workload follows, and the tensors that it is measured on.

A workload knows its inputs, PyTorch's call or chain of calls, our verb, the bytes that must move and the numbers that
are right. Providers, checks, timings, memory, tables and plots know nothing but this protocol.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from kernel_fusion.testing.oracle import Reference, lay_out

Direction = Literal["forward", "backward", "forward+backward"]
DIRECTIONS: tuple[Direction, ...] = ("forward", "backward", "forward+backward")

Call = Callable[[], object]
# From the arguments in order, None for absent ones, to the result or a tuple of results.
Function = Callable[..., Any]


@dataclass(frozen=True)
class Inputs:
    """One set of tensors: the arguments of a call by name and in order, and a cotangent of each result."""

    arguments: Mapping[str, Tensor | None]
    cotangents: tuple[Tensor, ...]

    @property
    def leaves(self) -> dict[str, Tensor]:
        """The arguments that gradients are taken for, by the gradient's name."""
        return {f"d{name}": t for name, t in self.arguments.items() if t is not None and t.requires_grad}

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors of the set."""
        return [t for t in (*self.arguments.values(), *self.cotangents) if t is not None]

    def call(self, function: Function) -> tuple[Tensor, ...]:
        """The results of `function`."""
        results = function(*self.arguments.values())
        return tuple(results) if isinstance(results, tuple) else (results,)

    def gradients(self, results: Sequence[Tensor], retain_graph: bool = False) -> tuple[Tensor, ...]:
        """The gradients of `leaves`, in order."""
        leaves = tuple(self.leaves.values())
        return torch.autograd.grad(tuple(results), leaves, self.cotangents, retain_graph=retain_graph)

    def map(self, change: Callable[[str, Tensor], Tensor]) -> Inputs:
        """The same set with every argument changed, given its name; gradients are taken for the same ones."""

        def changed(name: str, t: Tensor | None) -> Tensor | None:
            return None if t is None else change(name, t.detach()).requires_grad_(t.requires_grad)

        return replace(self, arguments={name: changed(name, t) for name, t in self.arguments.items()})


@dataclass(frozen=True)
class Traffic:
    """Bytes that must move through memory: every tensor that is read or written once, and in full."""

    read: int
    written: int

    @property
    def total(self) -> int:
        """Read and written."""
        return self.read + self.written


class Workload(Protocol):
    """One named call to measure."""

    @property
    def name(self) -> str:
        """The configuration, such as a model or a shape."""

    @property
    def verb(self) -> str:
        """The verb of ours that is called."""

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the (first) input."""

    @property
    def facts(self) -> dict[str, Any]:
        """The fields of a `Measurement` that say what was measured."""

    @property
    def result_names(self) -> tuple[str, ...]:
        """What the results are called."""

    @property
    def lead(self) -> int:
        """How many first dimensions of the inputs count rows, which are computed independently of each other."""

    @property
    def shared(self) -> frozenset[str]:
        """The arguments that all rows read: their gradients are sums over rows."""

    @property
    def reduces_rows(self) -> bool:
        """Whether the results have no rows, being reductions over them."""

    @property
    def has_kernels(self) -> bool:
        """Whether kernels of ours run: not where the vendor's library does all there is to do."""

    @property
    def num_rows(self) -> int:
        """How many rows there are, in the sense of `lead`."""

    def input_sets(self, device: torch.device, count: int) -> list[Inputs]:
        """`count` sets of random tensors, drawn on the device; parameters are the same in each."""

    def unfused(self) -> Function:
        """PyTorch's call, or the chain of calls that its users write."""

    def fused(self, backend: str | None) -> Function:
        """Our verb, on `backend` or called without naming one."""

    def cupy(self) -> Callable[[Any], Function] | None:
        """The chain that a user of CuPy writes, given the module, for arrays of its own; None where there is none."""

    def traffic(self, direction: Literal["forward", "backward"]) -> Traffic:
        """What must move, apart from matrix products."""

    def products(self, direction: Literal["forward", "backward"], inputs: Inputs) -> list[Call]:
        """The bare matrix products, by the vendor's library."""

    def bytes_moved(self, direction: Direction, provider: str) -> int:
        """What must move, with the matrix products; of a chain of known passes, what the provider moves."""

    def without_dropout(self) -> Workload:
        """What is checked in its place: the same without dropout if its masks cannot be seen in the results."""

    def kept(self, results: Mapping[str, Tensor], inputs: Inputs) -> Tensor | None:
        """Where dropout kept elements, as results and gradients show it; None without dropout."""

    def references(self, inputs: Inputs, kept: Tensor | None) -> tuple[Reference, dict[str, Tensor]]:
        """Results and gradients in float64, and those of PyTorch in the dtypes at hand."""

    @property
    def dropout_p(self) -> float:
        """The probability of dropout, or 0."""


@dataclass(frozen=True)
class Argument:
    """A random tensor to be drawn.

    Attributes:
        name, shape, dtype: what it is called, and its size.
        mean, std: of its values.
        layout: as in `RowNormCase`, or "first half" of the columns of a wider tensor, or the "second half" of the one
            of which the argument before it is the first.
        values: "normal"; "mask" (boolean, three of four are True, the first column all); "causal" (the lower triangle).
        shared: whether all rows read it; it is then also the same in every set.
        gradient: whether a gradient is taken for it.
        moved: whether our verb reads it.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    mean: float = 0.0
    std: float = 1.0
    layout: str = "contiguous"
    values: Literal["normal", "mask", "causal"] = "normal"
    shared: bool = False
    gradient: bool = True
    moved: bool = True

    @property
    def num_bytes(self) -> int:
        """What it takes in memory."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


class Draw:
    """Draws tensors on a device, each allocated by itself, so that all are aligned as a program's tensors are."""

    def __init__(self, device: torch.device) -> None:
        # A generator of its own: a failed capture can leave the device's default one unusable.
        self._generator = torch.Generator(device).manual_seed(0)

    def normal(self, shape: tuple[int, ...], dtype: torch.dtype, mean: float = 0.0, std: float = 1.0) -> Tensor:
        """Normally distributed values."""
        values = torch.randn(shape, dtype=dtype, device=self._generator.device, generator=self._generator)
        return values.mul_(std).add_(mean)

    def arguments(self, wanted: Sequence[Argument], given: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The tensors of `wanted` by name, those of `given` taken from there."""
        drawn: dict[str, Tensor] = {}
        other_half = torch.empty(0)
        for a in wanted:
            if a.name in given:
                drawn[a.name] = given[a.name]
                continue
            if a.layout == "second half":
                values = other_half
            elif a.layout == "first half":
                wide = self.normal((*a.shape[:-1], 2 * a.shape[-1]), a.dtype, a.mean, a.std)
                values, other_half = wide.chunk(2, -1)
            else:
                values = self._contiguous(a)
                values = values if a.layout == "contiguous" else lay_out(values, a.layout)
            drawn[a.name] = values.requires_grad_(a.gradient)
        return drawn

    def _contiguous(self, a: Argument) -> Tensor:
        if a.values == "normal":
            return self.normal(a.shape, a.dtype, a.mean, a.std)
        if a.values == "causal":
            return torch.ones(a.shape, dtype=torch.bool, device=self._generator.device).tril()
        mask = torch.rand(a.shape, device=self._generator.device, generator=self._generator) < 0.75
        mask[..., 0] = True
        return mask


def input_sets(
    arguments: Sequence[Argument], results: Sequence[Tensor], device: torch.device, count: int
) -> list[Inputs]:
    """`count` sets: everything new in each but what is shared; contiguous cotangents, of the sizes of `results`."""
    draw = Draw(device)
    shared = draw.arguments([a for a in arguments if a.shared], {})

    def one_set() -> Inputs:
        tensors = draw.arguments(arguments, shared)
        return Inputs(tensors, tuple(draw.normal(tuple(r.shape), r.dtype) for r in results))

    return [one_set() for _ in range(count)]
