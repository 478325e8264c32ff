"""Shared by the tests of `kf.patch`: results of a model before and after, and what the compiler sees of it."""

from __future__ import annotations

import copy
from typing import Any

import torch
from model_checks import InFloat64
from torch import Tensor, nn

import kernel_fusion as kf


def randomized(model: Any) -> Any:
    """The model with no parameter at its initial value."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def outcomes(model: nn.Module, *inputs: Tensor) -> list[Tensor]:
    """The result and every gradient, for one random cotangent."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    y = model(*leaves)
    cotangent = torch.randn(y.shape, generator=torch.Generator().manual_seed(3)).to(y.dtype)
    wanted = [*leaves, *(p for p in model.parameters() if p.requires_grad)]
    return [y.detach(), *torch.autograd.grad(y, wanted, cotangent)]


def assert_no_worse(model: nn.Module, patched: nn.Module, *inputs: Tensor) -> None:
    """Every result of the patched model is at most twice as far from a float64 run, and one rounding."""
    with InFloat64():
        exact = outcomes(copy.deepcopy(model).double(), *(x.double() for x in inputs))
    for ours, theirs, true in zip(outcomes(patched, *inputs), outcomes(model, *inputs), exact, strict=True):
        assert ours.dtype == theirs.dtype
        unit = torch.finfo(ours.dtype).eps / 2 * true.norm()
        assert (ours.double() - true).norm() <= 2 * ((theirs.double() - true).norm() + unit)


def texts(report: kf.Report) -> dict[str, str]:
    """The replacement of each class."""
    return {line.kind: line.text for line in report.replaced}


def operations(model: nn.Module, *inputs: Tensor) -> list[str]:
    """The operations of the one graph that the compiler makes of a model, by name."""
    seen: list[str] = []

    def record(graph: torch.fx.GraphModule, _: Any) -> Any:
        seen.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph

    torch.compile(model, backend=record, fullgraph=True)(*inputs)
    return sorted(seen)
