"""What can be measured: an operation at one shape and dtype, and its tensors.

PyTorch's calls are written once. They are also the reference, in float64 with a contender's dropout mask.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from kernel_fusion.core.spec import dtype_name
from kernel_fusion.testing.oracle import Reference, lay_out
from kernel_fusion.testing.unfused import Dropout as Dropout
from kernel_fusion.testing.unfused import keep_all

Part = Literal["forward", "backward"]
Direction = Literal["forward", "backward", "forward+backward"]
DIRECTIONS: tuple[Direction, ...] = ("forward", "backward", "forward+backward")

Call = Callable[[], object]
Function = Callable[..., Any]  # from arguments in order to a result or a tuple of them

EPS = 1e-6  # of all norms but the bare ones
DROPOUT_P = 0.125  # a multiple of 2^-32, so that the scale equals PyTorch's to the last bit


@dataclass(frozen=True)
class Inputs:
    """The arguments of a call, by name and in order, and a cotangent for each result."""

    arguments: Mapping[str, Tensor]
    cotangents: tuple[Tensor, ...]

    @property
    def leaves(self) -> dict[str, Tensor]:
        """The arguments to differentiate for, by the gradient's name."""
        return {f"d{name}": t for name, t in self.arguments.items() if t.requires_grad}

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors of the set."""
        return [*self.arguments.values(), *self.cotangents]

    def call(self, function: Function) -> tuple[Tensor, ...]:
        """The results of `function`."""
        results = function(*self.arguments.values())
        return tuple(results) if isinstance(results, tuple) else (results,)

    def gradients(self, results: Sequence[Tensor], retain_graph: bool = False) -> tuple[Tensor, ...]:
        """The gradients of `leaves`, in order."""
        leaves = tuple(self.leaves.values())
        if not leaves:
            return ()
        return torch.autograd.grad(tuple(results), leaves, self.cotangents, retain_graph=retain_graph)

    def map(self, change: Callable[[str, Tensor], Tensor]) -> Inputs:
        """The same set with every argument changed, given its name."""
        changed = {n: change(n, t.detach()).requires_grad_(t.requires_grad) for n, t in self.arguments.items()}
        return replace(self, arguments=changed)

    def copy(self) -> Inputs:
        """The same values in memory of their own."""
        return replace(self.map(lambda _, t: t.clone()), cotangents=tuple(t.clone() for t in self.cotangents))


@dataclass(frozen=True)
class Traffic:
    """The bytes that must be read from and written to memory."""

    read: int
    written: int

    @property
    def total(self) -> int:
        """Both together."""
        return self.read + self.written


@dataclass(frozen=True)
class Argument:
    """A random tensor to draw.

    Attributes:
        layout: as in `RowNormCase`, or "first half" of a wider tensor whose "second half" is the next argument.
        values: "normal", "mask" (True in three of four and in the first column), "causal" (the lower triangle), "ids"
            (whole numbers from 0, less than `below`).
        shared: whether all rows read it; it is then the same in every set.
        moved: whether its bytes count.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    mean: float = 0.0
    std: float = 1.0
    layout: str = "contiguous"
    values: Literal["normal", "mask", "causal", "ids"] = "normal"
    below: int = 0
    shared: bool = False
    gradient: bool = True
    moved: bool = True

    @property
    def num_bytes(self) -> int:
        """Its size in memory."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclass(frozen=True)
class Operation:
    """A computation at any size.

    Attributes:
        arguments: the arguments of both calls, for a shape and a dtype.
        pytorch: (dropout, *arguments) -> results, by PyTorch's calls.
        fused: (*arguments, p=..., backend=...) -> results, by our verb.
        kept: finds the elements that dropout kept, from results, gradients and arguments; None if hidden.
        backward_reads: the arguments that backward reads (default: all); an unused name stands for a tensor of its size
            that forward keeps.
        backward_writes: the arguments whose gradients are written (default: all); the terms of a sum share one.
        row_dims: how many last dimensions form a row; rows are independent.
        reduces_rows: whether results are reductions over rows.
        has_kernels: whether our kernels run, rather than only the vendor's library.
        products: the bare matrix products of a direction.
        product_pass: whether a pass over the products' result follows.
        passes: the known number of passes over x, by contender.
        cupy: given the module, the chain that a user of CuPy writes.
        judged: results and gradients in float64 and PyTorch's, if not those of `pytorch`.
        bare: whether it is a norm alone, which other libraries have.
        dtypes: of the data, if not all.
    """

    name: str
    verb: str
    arguments: Callable[[tuple[int, ...], torch.dtype], Sequence[Argument]]
    pytorch: Function
    fused: Function
    results: tuple[str, ...] = ("y",)
    dropout_p: float = 0.0
    kept: Callable[[Mapping[str, Tensor], Mapping[str, Any]], Tensor] | None = None
    backward_reads: tuple[str, ...] | None = None
    backward_writes: tuple[str, ...] | None = None
    row_dims: int = 1
    reduces_rows: bool = False
    has_kernels: bool = True
    products: Callable[[str, Inputs], list[Call]] | None = None
    product_pass: bool = True
    passes: Mapping[str, int] = field(default_factory=dict, hash=False)
    cupy: Callable[[Any], Function] | None = None
    judged: Callable[[Workload, Inputs], tuple[Reference, dict[str, Tensor]]] | None = None
    bare: bool = False
    dtypes: tuple[torch.dtype, ...] | None = None


@dataclass(frozen=True)
class Workload:
    """An operation at one shape and dtype.

    Attributes:
        name: the configuration, such as a model or a shape.
        grouped: whether its table lists operations of one configuration, not configurations of one verb.
        weights: the dtype of parameters, if not that of the data.
        layout: of the first argument, if its operation has no other.
    """

    name: str
    what: Operation
    shape: tuple[int, ...]
    dtype: torch.dtype
    grouped: bool = True
    weights: torch.dtype | None = None
    layout: str = "contiguous"

    def __str__(self) -> str:
        shape = "x".join(map(str, self.shape))
        return f"{self.name} ({self.what.name}-{shape}-{dtype_name(self.dtype)})"

    @property
    def verb(self) -> str:
        """Our verb for it."""
        return self.what.verb

    @property
    def arguments(self) -> dict[str, Argument]:
        """The calls' arguments, by name."""
        x, *others = self.what.arguments(self.shape, self.dtype)
        x = x if self.layout == "contiguous" else replace(x, layout=self.layout)
        others = [replace(a, dtype=self.weights) if self.weights and a.shared else a for a in others]
        return {a.name: a for a in (x, *others)}

    @property
    def shared(self) -> frozenset[str]:
        """The arguments that all rows read; their gradients are sums over rows."""
        return frozenset(a.name for a in self.arguments.values() if a.shared)

    @property
    def row_dim(self) -> int:
        """The last dimension that counts rows; those before it count samples."""
        return len(self.shape) - self.what.row_dims - 1

    @property
    def num_rows(self) -> int:
        """The number of rows, of all samples."""
        return torch.Size(self.shape[: self.row_dim + 1]).numel()

    @property
    def facts(self) -> dict[str, Any]:
        """The fields of a `Measurement` that describe the workload."""
        arguments = self.arguments
        dtypes = {name: dtype_name(a.dtype) for name, a in arguments.items() if a.dtype.is_floating_point}
        layout = next(iter(arguments.values())).layout
        return {
            "configuration": self.name,
            "verb": self.verb,
            "operation": self.what.name if self.grouped else None,
            "rows": torch.Size(self.shape[:-1]).numel(),
            "cols": self.shape[-1],
            "dtype": dtype_name(self.dtype),
            "weight_dtype": dtypes.get("weight"),
            "bias_dtype": dtypes.get("bias"),
            "layout": "halves" if layout.endswith("half") else layout,
        }

    def input_sets(self, device: torch.device, count: int) -> list[Inputs]:
        """`count` sets of random tensors on the device; arguments that rows share are the same in each."""
        draw, arguments = _Draw(device), list(self.arguments.values())
        shared = draw.arguments([a for a in arguments if a.shared], {})

        def one_set() -> Inputs:
            tensors = draw.arguments(arguments, shared)
            results = self._results()
            dtypes = (self.dtype if r.dtype.itemsize == 1 else r.dtype for r in results)  # codes get no gradient
            cotangents = map(draw.normal, (tuple(r.shape) for r in results), dtypes)
            if self.layout == "channels-last":  # so lie the gradients that the next layer of such a network gives
                cotangents = map(partial(lay_out, layout=self.layout), cotangents)
            return Inputs(tensors, tuple(cotangents))

        return [one_set() for _ in range(count)]

    def _results(self) -> tuple[Tensor, ...]:
        """The results' sizes and dtypes, from PyTorch's calls on meta tensors."""
        nothing = {name: torch.empty(a.shape, dtype=a.dtype, device="meta") for name, a in self.arguments.items()}
        return Inputs(nothing, ()).call(partial(self.what.pytorch, keep_all))

    def unfused(self) -> Function:
        """PyTorch's calls, as users write them."""
        dropout = partial(F.dropout, p=self.what.dropout_p) if self.what.dropout_p else keep_all
        return partial(self.what.pytorch, dropout)

    def fused(self, backend: str | None) -> Function:
        """Our verb on `backend`, or without naming one."""
        return partial(self.what.fused, p=self.what.dropout_p, backend=backend)

    def traffic(self, part: Part) -> Traffic:
        """Every argument and result once; for products, the passes over their result."""
        results = sum(r.nbytes for r in self._results())
        if self.what.products is not None:
            passes = results if self.what.product_pass else 0
            return Traffic(passes if part == "forward" else 2 * passes, passes)
        moved = {name: a.num_bytes for name, a in self.arguments.items() if a.moved}
        if part == "forward":
            return Traffic(sum(moved.values()), results)
        reads = moved if self.what.backward_reads is None else self.what.backward_reads
        gradients = {name: a.num_bytes for name, a in self.arguments.items() if a.gradient}
        writes = gradients if self.what.backward_writes is None else self.what.backward_writes
        return Traffic(sum(moved[name] for name in reads) + results, sum(gradients[name] for name in writes))

    def products(self, part: Part, inputs: Inputs) -> list[Call]:
        """The bare matrix products, by the vendor's library."""
        return [] if self.what.products is None else self.what.products(part, inputs)

    def bytes_moved(self, direction: Direction, provider: str) -> int:
        """Bytes that must move, products included; for known passes, what the provider moves."""
        if direction == "forward+backward":
            return self.bytes_moved("forward", provider) + self.bytes_moved("backward", provider)
        if direction == "forward" and provider in self.what.passes:
            return self.what.passes[provider] * next(iter(self.arguments.values())).num_bytes
        total = self.traffic(direction).total
        if self.what.products is not None:
            operands = sum(a.num_bytes for a in self.arguments.values() if a.gradient)
            scores = sum(r.nbytes for r in self._results())
            # Forward has one product. Backward has two; each reads the scores' gradient and one operand.
            total += operands + scores if direction == "forward" else 2 * operands + 2 * scores
        return total

    def without_dropout(self) -> Workload:
        """The workload to check: the same, without dropout if results hide its mask."""
        if self.what.kept is not None or not self.what.dropout_p:
            return self
        return replace(self, what=replace(self.what, dropout_p=0.0))

    def kept(self, results: Mapping[str, Tensor], inputs: Inputs) -> Tensor | None:
        """The elements that dropout kept, as seen in results and gradients; None without dropout."""
        if not self.what.dropout_p:
            return None
        assert self.what.kept is not None
        return self.what.kept(results, inputs.arguments)

    def references(self, inputs: Inputs, kept: Tensor | None) -> tuple[Reference, dict[str, Tensor]]:
        """Results and gradients in float64, and PyTorch's in the given dtypes, with the mask `kept`."""
        if self.what.judged is not None:
            return self.what.judged(self, inputs)
        if self.dtype == torch.float64:
            raise ValueError("results in float64 have nothing wider to be compared with; choose another dtype")

        def dropout(t: Tensor) -> Tensor:
            return t if kept is None else torch.where(kept, t * (1 / (1 - self.what.dropout_p)), 0.0)

        def results(inputs: Inputs) -> dict[str, Tensor]:
            outputs = inputs.call(partial(self.what.pytorch, dropout))
            named = dict(zip(self.what.results, (r.detach() for r in outputs), strict=True))
            return named | dict(zip(inputs.leaves, inputs.gradients(outputs), strict=True))

        wide = inputs.map(lambda name, t: t.double() if t.is_floating_point() else t)
        wide = replace(wide, cotangents=tuple(c.double() for c in inputs.cotangents))
        return {name: t.cpu().numpy() for name, t in results(wide).items()}, results(inputs)


class _Draw:
    """Draws tensors on a device, each in its own allocation, aligned as a program's tensors are."""

    def __init__(self, device: torch.device) -> None:
        # A failed capture can break the device's default generator.
        self._generator = torch.Generator(device).manual_seed(0)

    def normal(self, shape: tuple[int, ...], dtype: torch.dtype, mean: float = 0.0, std: float = 1.0) -> Tensor:
        """Normally distributed values."""
        values = torch.randn(shape, dtype=dtype, device=self._generator.device, generator=self._generator)
        return values.mul_(std).add_(mean)

    def arguments(self, wanted: Sequence[Argument], given: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The tensors of `wanted` by name; those in `given` are reused."""
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
        if a.values == "ids":
            return torch.randint(a.below, a.shape, device=self._generator.device, generator=self._generator)
        if a.values == "causal":
            return torch.ones(a.shape, dtype=torch.bool, device=self._generator.device).tril()
        mask = torch.rand(a.shape, device=self._generator.device, generator=self._generator) < 0.75
        mask[..., 0] = True
        return mask
