"""TorchScript: `torch.jit.script` is refused in one sentence that names what to use; every module can be traced."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support import CPU
from test_new_modules import MODULES, made
from torch import Tensor, nn

import kernel_fusion as kf
from kernel_fusion.errors import KernelFusionError

pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch.jit.*` is (deprecated|not supported)"),
]
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    f"{layer.__name__}.{name}": function
    for layer in (kf.functional, kf.ops, kf.kernels.elementwise, kf.kernels.reduction, kf.kernels.fusion)
    for name, function in vars(layer).items()
    if inspect.isfunction(function) and function.__module__.startswith(layer.__name__) and not name.startswith("_")
}


@pytest.mark.parametrize("name", _FUNCTIONS)
def test_functions_are_not_scripted(name: str) -> None:
    """`torch.jit.script` of a public function, and of a function that calls it, says what to use instead."""
    called = _FUNCTIONS[name]

    def caller(x: Tensor) -> Tensor:
        return called(x)  # type: ignore[no-any-return]

    for function in (called, caller):
        with pytest.raises(KernelFusionError, match=r"torch\.jit\.script cannot.*torch\.compile.*torch\.export"):
            torch.jit.script(function)


@pytest.mark.parametrize("name", MODULES)
def test_modules_are_not_scripted(name: str) -> None:
    """So does a module, alone and inside a model that TorchScript could compile."""
    module, _ = made(name, CPU)
    for scripted in (module, nn.Sequential(nn.Linear(8, 8), module)):
        with pytest.raises(KernelFusionError, match=r"torch\.jit\.script cannot.*torch\.compile.*torch\.export"):
            torch.jit.script(scripted)


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")  # sizes are compared with the module's
@pytest.mark.parametrize("name", MODULES)
def test_every_module_is_traced(name: str) -> None:
    """`torch.jit.trace` records the operators, which compute the same bits from other inputs."""
    module, inputs = made(name, CPU)
    with torch.no_grad():
        traced = torch.jit.trace(module, tuple(inputs))
        inputs = [torch.randn_like(t) for t in inputs]
        ours, theirs = traced(*inputs), module(*inputs)
    pairs = zip(*((t,) if isinstance(t, Tensor) else t for t in (ours, theirs)), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)
