"""Shared by the tests of the pass over graphs: how to run it, and norms written out as in transformers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import kernel_fusion as kf
from kernel_fusion.compiler import Fused


class Compiled:
    """A function or module that `torch.compile` runs with the pass, and what the pass did."""

    def __init__(self, function: Callable[..., Any], inner: str = "eager", **options: Any) -> None:
        self.fused = Fused()
        self.graphs = 0
        self.calls: list[Any] = []

        def fusing(gm: torch.fx.GraphModule, example_inputs: Any) -> Any:
            self.fused += kf.compiler.fuse(gm)
            self.graphs += 1
            gm.graph.lint()
            self.calls += [node.target for node in gm.graph.nodes if node.op.startswith("call")]
            return torch._dynamo.lookup_backend(inner)(gm, example_inputs)

        self.call = torch.compile(function, backend=fusing, fullgraph=True, **options)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The function's value."""
        return self.call(*args, **kwargs)


def fused(function: Callable[..., Any], *args: Any) -> Fused:
    """Run the pass on a function and return what it did; the value must stay within a few roundings."""
    compiled = Compiled(function)
    torch.testing.assert_close(compiled(*args), function(*args), rtol=2e-2, atol=1e-5)
    return compiled.fused


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """A leaf with gradients."""
    return torch.randn(shape).to(dtype).requires_grad_()


def block_of(norm: Callable[[Tensor], Tensor]) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """A residual addition and a norm."""

    def block(x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        h = residual + x
        return norm(h), h

    return block


class Llama(nn.Module):
    """The RMSNorm of Llama: rounded to the input's dtype, then multiplied by the weight."""

    def __init__(self, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, dtype=dtype))
        self.eps = 1e-6

    def forward(self, x: Tensor) -> Tensor:
        """As in transformers."""
        h = x.to(torch.float32)
        h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * h.to(x.dtype)


class T5(Llama):
    """The same arithmetic, where the product converts."""

    def forward(self, x: Tensor) -> Tensor:
        """As in transformers."""
        h = x * torch.rsqrt(x.to(torch.float32).pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * h.to(self.weight.dtype)


class Gemma(Llama):
    """The weight is stored around zero, and everything is rounded once."""

    def forward(self, x: Tensor) -> Tensor:
        """As in transformers."""
        h = x.float()
        h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)
        return (h * (1.0 + self.weight.float())).type_as(x)


class OLMo(Llama):
    """The weight multiplies before the conversion."""

    def forward(self, x: Tensor) -> Tensor:
        """As in transformers."""
        h = x.to(torch.float32)
        h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)
        return (self.weight * h).to(x.dtype)
