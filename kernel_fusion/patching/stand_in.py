"""A stand-in for a module: its code over random parameters on the CPU, to be called with made-up tensors.

So modules on `meta` or with sharded parameters can be examined, no hook runs, and the module never sees what its code
sets on itself.
"""

from __future__ import annotations

import contextlib
import inspect
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from kernel_fusion.patching.swap import original_class


def generator(seed: int = 0) -> torch.Generator:
    """A generator that leaves the user's random numbers alone."""
    return torch.Generator().manual_seed(seed)


class StandIn:
    """The forward of a module without submodules, over exchangeable parameters."""

    def __init__(self, module: nn.Module) -> None:
        self.kind = original_class(type(module))
        self.module: nn.Module = self.kind.__new__(self.kind)
        random = generator()
        self.parameters = {
            name: 1 + 0.3 * torch.randn(p.shape, generator=random)
            for name, p in module._parameters.items()
            if p is not None
        }
        buffers = {name: None if b is None else _on_cpu(b) for name, b in module._buffers.items()}
        vars(self.module).update(vars(module), _parameters=dict(module._parameters), _buffers=buffers)
        self.set(self.parameters)

    def set(self, parameters: dict[str, Tensor]) -> None:
        """Exchange the parameters."""
        own: dict[str, Any] = self.module._parameters
        own.update(parameters)

    def __call__(self, *inputs: Any) -> Any:
        """The result of the module's forward."""
        return self.kind.forward(self.module, *inputs)


def _on_cpu(buffer: Tensor) -> Tensor:
    return torch.ones(buffer.shape, dtype=buffer.dtype) if buffer.is_meta else buffer.detach().cpu()


def settings(module: nn.Module) -> dict[str, Any]:
    """The numbers, names and flags of a module; together with its class they decide its forward."""
    plain = (bool, int, float, str, tuple, type(None), torch.dtype)
    return {name: value for name, value in vars(module).items() if isinstance(value, plain) and name != "training"}


def arguments(function: Any) -> list[inspect.Parameter] | None:
    """The positional parameters of a method without `self`; None if it takes any number or requires keywords."""
    parameters = list(inspect.signature(function).parameters.values())[1:]
    if any(p.kind == p.VAR_POSITIONAL or (p.kind == p.KEYWORD_ONLY and p.default is p.empty) for p in parameters):
        return None
    return [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]


@contextlib.contextmanager
def examining() -> Iterator[None]:
    """Within: one thread, faster for small tensors, and no warnings from unknown code."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with warnings.catch_warnings(), torch.autocast("cpu", enabled=False), torch.inference_mode(False):
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.set_num_threads(threads)
