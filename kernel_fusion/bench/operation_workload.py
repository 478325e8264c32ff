"""Operations that PyTorch computes by several calls and we by one, as workloads.

PyTorch's calls are written once. Timed, their dropout is PyTorch's; as the reference they run in float64 with the masks
that the results of a contender show, so that every contender is judged by its own masks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from kernel_fusion.bench.workloads import Argument, Call, Direction, Function, Inputs, Traffic, Workload, input_sets
from kernel_fusion.core.spec import dtype_name
from kernel_fusion.testing.oracle import Reference

# The arguments of an operation for a shape and the dtype of its data.
Arguments = Callable[[tuple[int, ...], torch.dtype], Sequence[Argument]]
Dropout = Callable[[Tensor], Tensor]

# A multiple of 2^-32, so that the scale of what is kept is PyTorch's to the last bit.
DROPOUT_P = 0.125


@dataclass(frozen=True)
class Operation:
    """What is computed, at any size.

    Attributes:
        name: what tables call it.
        verb: ours that computes it.
        arguments: those of `pytorch` and of `verb`, in order.
        pytorch: (dropout, *arguments) -> results, by PyTorch's calls.
        fused: (*arguments, p=..., backend=...) -> results, by our verb.
        results: their names.
        dropout_p: the probability of dropout.
        kept: from results with gradients and from arguments, by name, where dropout kept elements; None where they do
            not show it. Where it contradicts a result or a gradient, that one is wrong.
        backward_reads: the arguments that backward must read; by default all. One that was never an argument may stand
            for a tensor of its size that the forward makes and keeps.
        backward_writes: the arguments whose gradients are written; by default all. The terms of a sum share one.
        reduces_rows, has_kernels: as in `Workload`.
        products: the bare matrix products of a direction.
        product_pass: whether more than the products is computed: a pass over their result.
        passes: in how many passes over x a contender of that name reads and writes, where it is known.
        cupy: as in `Workload`.
        dtypes: of the data, if not all.
    """

    name: str
    verb: str
    arguments: Arguments
    pytorch: Callable[..., Any]
    fused: Callable[..., Any]
    results: tuple[str, ...] = ("y",)
    dropout_p: float = 0.0
    kept: Callable[[Mapping[str, Tensor], Mapping[str, Any]], Tensor] | None = None
    backward_reads: tuple[str, ...] | None = None
    backward_writes: tuple[str, ...] | None = None
    reduces_rows: bool = False
    has_kernels: bool = True
    products: Callable[[str, Inputs], list[Call]] | None = None
    product_pass: bool = True
    passes: Mapping[str, int] = field(default_factory=dict, hash=False)
    cupy: Callable[[Any], Function] | None = None
    dtypes: tuple[torch.dtype, ...] | None = None


@dataclass(frozen=True)
class OperationWorkload:
    """A `Workload`: an operation at one shape and dtype.

    Attributes:
        name: the configuration.
        grouped: whether it stands in one table with other operations of its configuration, rather than in one with
            other configurations of its operation.
    """

    name: str
    what: Operation
    shape: tuple[int, ...]
    dtype: torch.dtype
    grouped: bool = True

    lead = 1

    def __str__(self) -> str:
        shape = "x".join(map(str, self.shape))
        return f"{self.name} ({self.what.name}-{shape}-{dtype_name(self.dtype)})"

    @property
    def verb(self) -> str:
        """See `Workload`."""
        return self.what.verb

    @property
    def result_names(self) -> tuple[str, ...]:
        """See `Workload`."""
        return self.what.results

    @property
    def dropout_p(self) -> float:
        """See `Workload`."""
        return self.what.dropout_p

    @property
    def arguments(self) -> tuple[Argument, ...]:
        """What the call takes."""
        return tuple(self.what.arguments(self.shape, self.dtype))

    @property
    def shared(self) -> frozenset[str]:
        """See `Workload`."""
        return frozenset(a.name for a in self.arguments if a.shared)

    @property
    def reduces_rows(self) -> bool:
        """See `Workload`."""
        return self.what.reduces_rows

    @property
    def has_kernels(self) -> bool:
        """See `Workload`."""
        return self.what.has_kernels

    @property
    def num_rows(self) -> int:
        """See `Workload`."""
        return self.shape[0]

    @property
    def facts(self) -> dict[str, Any]:
        """See `Workload`."""
        dtypes = {a.name: dtype_name(a.dtype) for a in self.arguments if a.dtype.is_floating_point}
        return {
            "configuration": self.name,
            "verb": self.verb,
            "operation": self.what.name if self.grouped else None,
            "rows": torch.Size(self.shape[:-1]).numel(),
            "cols": self.shape[-1],
            "dtype": dtype_name(self.dtype),
            "weight_dtype": dtypes.get("weight"),
            "bias_dtype": dtypes.get("bias"),
            "layout": "halves" if any(a.layout.endswith("half") for a in self.arguments) else "contiguous",
        }

    def input_sets(self, device: torch.device, count: int) -> list[Inputs]:
        """See `Workload`."""
        return input_sets(self.arguments, self._results(), device, count)

    def _results(self) -> tuple[Tensor, ...]:
        """The results' sizes and dtypes, from PyTorch's calls on tensors without data."""
        nothing = {a.name: torch.empty(a.shape, dtype=a.dtype, device="meta") for a in self.arguments}
        return Inputs(nothing, ()).call(partial(self.what.pytorch, _no_dropout))

    def unfused(self) -> Function:
        """See `Workload`."""
        pytorch, dropout = self.what.pytorch, partial(F.dropout, p=self.dropout_p) if self.dropout_p else _no_dropout

        def call(*arguments: Tensor) -> Any:
            return pytorch(dropout, *arguments)

        return call

    def fused(self, backend: str | None) -> Function:
        """See `Workload`."""
        return partial(self.what.fused, p=self.dropout_p, backend=backend)

    def cupy(self) -> Callable[[Any], Function] | None:
        """See `Workload`."""
        return self.what.cupy

    def traffic(self, direction: Literal["forward", "backward"]) -> Traffic:
        """Every argument and result once; where there are products, the passes over their result."""
        results = sum(r.nbytes for r in self._results())
        if self.what.products is not None:
            passes = results if self.what.product_pass else 0
            return Traffic(passes if direction == "forward" else 2 * passes, passes)
        arguments = {a.name: a.num_bytes for a in self.arguments if a.moved}
        if direction == "forward":
            return Traffic(sum(arguments.values()), results)
        reads = arguments if self.what.backward_reads is None else self.what.backward_reads
        gradients = {a.name: a.num_bytes for a in self.arguments if a.gradient}
        writes = gradients if self.what.backward_writes is None else self.what.backward_writes
        return Traffic(sum(arguments[name] for name in reads) + results, sum(gradients[name] for name in writes))

    def products(self, direction: Literal["forward", "backward"], inputs: Inputs) -> list[Call]:
        """See `Workload`."""
        return [] if self.what.products is None else self.what.products(direction, inputs)

    def bytes_moved(self, direction: Direction, provider: str) -> int:
        """See `Workload`. A product reads its operands and writes its result."""
        if direction == "forward+backward":
            return self.bytes_moved("forward", provider) + self.bytes_moved("backward", provider)
        if direction == "forward" and provider in self.what.passes:
            return self.what.passes[provider] * self.arguments[0].num_bytes
        total = self.traffic(direction).total
        if self.what.products is not None:
            operands = sum(a.num_bytes for a in self.arguments if a.gradient)
            scores = sum(r.nbytes for r in self._results())
            # One product forward; two backward, each reads the scores' gradient and one operand.
            total += operands + scores if direction == "forward" else 2 * operands + 2 * scores
        return total

    def without_dropout(self) -> Workload:
        """See `Workload`."""
        if self.what.kept is not None or not self.dropout_p:
            return self
        return replace(self, what=replace(self.what, dropout_p=0.0))

    def kept(self, results: Mapping[str, Tensor], inputs: Inputs) -> Tensor | None:
        """See `Workload`."""
        if not self.dropout_p:
            return None
        assert self.what.kept is not None
        return self.what.kept(results, inputs.arguments)

    def references(self, inputs: Inputs, kept: Tensor | None) -> tuple[Reference, dict[str, Tensor]]:
        """PyTorch's results in float64, and in the dtype of the data; with the mask `kept`.

        Raises:
            ValueError: the inputs are in float64 already.
        """
        if self.dtype == torch.float64:
            raise ValueError("results in float64 have nothing wider to be compared with; choose another dtype")

        def dropout(t: Tensor) -> Tensor:
            return t if kept is None else torch.where(kept, t * (1 / (1 - self.dropout_p)), 0.0)

        def results(inputs: Inputs) -> dict[str, Tensor]:
            outputs = inputs.call(partial(self.what.pytorch, dropout))
            named = dict(zip(self.result_names, (r.detach() for r in outputs), strict=True))
            return named | dict(zip(inputs.leaves, inputs.gradients(outputs), strict=True))

        wide = inputs.map(lambda name, t: t.double() if t.is_floating_point() else t)
        wide = replace(wide, cotangents=tuple(c.double() for c in inputs.cotangents))
        return {name: t.cpu().numpy() for name, t in results(wide).items()}, results(inputs)


def _no_dropout(t: Tensor) -> Tensor:
    return t
