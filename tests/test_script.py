"""TorchScript: the norm modules compile as those of torch.nn do, and every module can be traced."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from support import CPU
from test_modules import randomize
from test_new_modules import MODULES, made
from torch import Tensor, nn

import kernel_fusion as kf

pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch.jit.*` is (deprecated|not supported)"),
]
_PLAIN = [kf.FusedLayerNorm, kf.FusedRMSNorm]
_ADDING = [kf.FusedAddLayerNorm, kf.FusedAddRMSNorm]
_EXTRAS: list[dict[str, Any]] = [
    {},
    {"elementwise_affine": False},
    {"eps": 1e-3, "weight_offset": 1.0, "out_dtype": torch.float32},
    {"pre_activation": "gelu", "activation": "relu"},
    {"rounding": "hf"},
]


def scripted(module: nn.Module) -> list[Any]:
    """The compiled module, and the same saved and loaded."""
    script = torch.jit.script(module)
    buffer = io.BytesIO()
    torch.jit.save(script, buffer)
    buffer.seek(0)
    return [script, torch.jit.load(buffer)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("extras", _EXTRAS, ids=str)
@pytest.mark.parametrize("kind", _PLAIN)
def test_norms_compile(kind: Any, extras: Any, dtype: torch.dtype) -> None:
    """The script, before and after it was saved, runs our kernel and gives the module's bits and gradients."""
    module = kind(8, **extras).to(dtype)
    randomize(module)
    x = torch.randn(3, 8, dtype=dtype, requires_grad=True)
    y = module(x)
    dy = torch.randn_like(y)
    for script in scripted(module):
        assert script.state_dict().keys() == module.state_dict().keys()
        with CPU.ran(backward=1):
            ours = script(x)
            (dx,) = torch.autograd.grad(ours, x, dy)
        assert ours.dtype == y.dtype
        assert torch.equal(ours, y)
        assert torch.equal(dx, torch.autograd.grad(y, x, dy, retain_graph=True)[0])


@pytest.mark.parametrize("begins", [False, True])
@pytest.mark.parametrize("extras", _EXTRAS, ids=str)
@pytest.mark.parametrize("kind", _ADDING)
def test_norms_of_sums_compile(kind: Any, extras: Any, begins: bool) -> None:
    """The same of norms with a residual, or where a stream begins; the result is a named tuple of y and h."""
    module = kind(8, **extras)
    randomize(module)
    x, r = torch.randn(2, 3, 8)
    inputs = (x,) if begins else (x, r)
    for script in scripted(module):
        with CPU.ran():
            ours = script(*inputs)
        theirs = module(*inputs)
        assert torch.equal(ours.output, theirs.output)
        assert torch.equal(ours.residual, theirs.residual)


@pytest.mark.parametrize("kind", [*_PLAIN, *_ADDING])
def test_a_norm_of_pytorch_compiles_after_it_became_ours(kind: Any) -> None:
    """It has the extras of the class alone, which a script sees too."""
    module = nn.RMSNorm(8) if issubclass(kind, nn.RMSNorm) else nn.LayerNorm(8)
    module.__class__ = kind
    x = torch.randn(3, 8)
    for ours, theirs in zip(torch.jit.script(module)(x), module(x), strict=True):
        assert torch.equal(ours, theirs)


def test_dropout_of_a_script_follows_the_mode_and_the_seed() -> None:
    """In training a script drops what the module drops with the same seed; in evaluation nothing."""
    module = kf.FusedAddLayerNorm(64, dropout=0.5)
    script = torch.jit.script(module)
    x = torch.randn(16, 64)
    results = []
    for each in (script, module):
        torch.manual_seed(0)
        results.append(each(x).residual)
    assert torch.equal(*results)
    assert (results[0] == 0).any()
    assert torch.equal(script.eval()(x).residual, x)


@pytest.mark.parametrize("kind", _PLAIN)
def test_a_script_refuses_another_width(kind: Any) -> None:
    """An input that does not end with the normalised shape is an error, also without a weight."""
    for affine in (True, False):
        script = torch.jit.script(kind(8, elementwise_affine=affine))
        with pytest.raises(torch.jit.Error, match="Given normalized_shape="):
            script(torch.randn(3, 7))


def test_norms_compile_inside_a_model() -> None:
    """A model with our norms compiles where the same model with PyTorch's does."""
    model = nn.Sequential(kf.FusedRMSNorm(8), nn.Linear(8, 8), kf.FusedLayerNorm(8))
    x = torch.randn(3, 8)
    with CPU.ran(forward=2):
        y = torch.jit.script(model)(x)
    assert torch.equal(y, model(x))


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
