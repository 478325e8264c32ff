"""The bare norms as workloads: cases of the oracle, which has their numbers and budgets."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

import kernel_fusion as kf
from kernel_fusion.bench.workloads import Argument, Call, Direction, Function, Inputs, Traffic, Workload, input_sets
from kernel_fusion.core.spec import dtype_name
from kernel_fusion.testing import oracle
from kernel_fusion.testing.oracle import Reference, RowNormCase

VERBS = ("layer_norm", "rms_norm")


@dataclass(frozen=True)
class RowNorm:
    """A `Workload`: a norm over the last dimensions of one tensor."""

    name: str
    case: RowNormCase

    result_names = ("y",)
    shared = frozenset({"weight", "bias"})
    reduces_rows = False
    has_kernels = True
    dropout_p = 0.0

    def __str__(self) -> str:
        return f"{self.name} ({self.case})"

    @property
    def verb(self) -> str:
        """See `Workload`."""
        return self.case.verb

    @property
    def dtype(self) -> torch.dtype:
        """See `Workload`."""
        return self.case.dtype

    @property
    def lead(self) -> int:
        """See `Workload`."""
        return len(self.case.shape) - self.case.num_dims

    @property
    def num_rows(self) -> int:
        """See `Workload`."""
        return math.prod(self.case.shape[: self.lead])

    @property
    def facts(self) -> dict[str, Any]:
        """See `Workload`."""
        case = self.case
        return {
            "configuration": self.name,
            "verb": case.verb,
            "rows": self.num_rows,
            "cols": math.prod(case.normalized_shape),
            "dtype": dtype_name(case.dtype),
            "weight_dtype": dtype_name(case.weight) if case.weight else None,
            "bias_dtype": dtype_name(case.bias) if case.bias else None,
            "layout": case.layout,
        }

    def input_sets(self, device: torch.device, count: int) -> list[Inputs]:
        """See `Workload`."""
        case = self.case
        arguments = [Argument("x", case.shape, case.dtype, case.mean, case.std, case.layout)]
        for name, dtype, mean in (("weight", case.weight, 1.0), ("bias", case.bias, 0.5)):
            if dtype is not None:
                arguments.append(Argument(name, case.normalized_shape, dtype, mean, shared=True))
        y = torch.empty(case.shape, dtype=case.result_dtype, device="meta")
        absent = dict.fromkeys(("x", "weight", "bias"))
        sets = input_sets(arguments, [y], device, count)
        return [replace(one, arguments=absent | dict(one.arguments)) for one in sets]

    def unfused(self) -> Function:
        """PyTorch's own call.

        It refuses some mixes of dtypes; those are computed in the widest of them and rounded, which is what its users
        write.
        """
        own = self._call(F.layer_norm, F.rms_norm)
        if self.case.weight in (None, self.dtype):
            return own
        wide = torch.promote_types(self.dtype, self.case.weight)

        def widened(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
            parameters = (None if t is None else t.to(wide) for t in (weight, bias))
            y: Tensor = own(x.to(wide), *parameters)
            return y.to(x.dtype)

        return widened

    def fused(self, backend: str | None) -> Function:
        """See `Workload`."""
        if backend is None:
            return self._call(kf.layer_norm, kf.rms_norm)
        return self._call(partial(kf.layer_norm, backend=backend), partial(kf.rms_norm, backend=backend))

    def _call(self, layer_norm: Function, rms_norm: Function) -> Function:
        """The call of one of two functions that take PyTorch's arguments."""
        shape = self.case.normalized_shape
        if self.verb == "layer_norm":
            return lambda x, weight, bias: layer_norm(x, shape, weight, bias)
        return lambda x, weight, bias: rms_norm(x, shape, weight)

    def cupy(self) -> Callable[[Any], Function] | None:
        """None: the suites of norms have no such contender."""
        return None

    def traffic(self, direction: Literal["forward", "backward"]) -> Traffic:
        """x to y forward, x and dy to dx backward; parameters and their gradients are nothing beside them."""
        elements = math.prod(self.case.shape)
        x, y = (elements * dtype.itemsize for dtype in (self.dtype, self.case.result_dtype))
        return Traffic(x, y) if direction == "forward" else Traffic(x + y, x)

    def products(self, direction: Literal["forward", "backward"], inputs: Inputs) -> list[Call]:
        """None."""
        return []

    def bytes_moved(self, direction: Direction, provider: str) -> int:
        """See `Workload`; the same for every provider."""
        forward, backward = (self.traffic(d).total for d in ("forward", "backward"))
        return {"forward": forward, "backward": backward, "forward+backward": forward + backward}[direction]

    def without_dropout(self) -> Workload:
        """Itself."""
        return self

    def kept(self, results: Mapping[str, Tensor], inputs: Inputs) -> Tensor | None:
        """None."""
        return None

    def references(self, inputs: Inputs, kept: Tensor | None) -> tuple[Reference, dict[str, Tensor]]:
        """By the oracle, whose references are wider than float64 where the case is in float64."""
        x, weight, bias = inputs.arguments.values()
        assert x is not None
        part = replace(self.case, shape=tuple(x.shape), layout="contiguous")
        tensors = oracle.Inputs(x, weight, bias, *inputs.cotangents)
        return oracle.reference(part, tensors), oracle.pytorch(part, tensors)
