"""The extras of the norm modules: their defaults, `out_dtype`, and what they keep PyTorch from doing."""

from __future__ import annotations

import copy
import pickle
import pickletools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support import Target
from test_modules import randomize
from torch import Tensor, nn

import kernel_fusion as kf

_SWAPS: dict[str, tuple[Callable[[], nn.Module], type[nn.Module]]] = {
    "layer_norm": (lambda: nn.LayerNorm(8), kf.FusedLayerNorm),
    "rms_norm": (lambda: nn.RMSNorm(8), kf.FusedRMSNorm),
    "add_layer_norm": (lambda: nn.LayerNorm(8), kf.FusedAddLayerNorm),
    "add_rms_norm": (lambda: nn.RMSNorm(8), kf.FusedAddRMSNorm),
    "gated_rms_norm": (lambda: nn.RMSNorm(8), kf.FusedGatedRMSNorm),
    "softmax": (lambda: nn.Softmax(dim=-1), kf.FusedSoftmax),
}
_NORMS: dict[str, Callable[..., nn.Module]] = {
    "layer_norm": kf.FusedLayerNorm,
    "rms_norm": kf.FusedRMSNorm,
    "add_layer_norm": kf.FusedAddLayerNorm,
    "add_rms_norm": kf.FusedAddRMSNorm,
    "gated_rms_norm": kf.FusedGatedRMSNorm,
}


def first(results: Any) -> Tensor:
    """The output, of a module that may return h as well."""
    return results[0] if isinstance(results, tuple) else results


@pytest.mark.parametrize("name", _SWAPS)
def test_a_module_becomes_ours_by_its_class(name: str, target: Target) -> None:
    """`module.__class__ = ...` of PyTorch's module gives what a new one of ours with its parameters gives."""
    make, kind = _SWAPS[name]
    module = make().to(target.device)
    randomize(module)
    fresh = kind(8).to(target.device) if name != "softmax" else kind()
    fresh.load_state_dict(module.state_dict())
    fresh.eps = getattr(module, "eps", None)
    module.__class__ = kind
    x = torch.randn(3, 8, device=target.device)
    with kf.use_backend(target.backend), target.ran(forward=None):
        assert torch.equal(first(module(x)), first(fresh(x)))
        assert module.extra_repr() == fresh.extra_repr()


@pytest.mark.parametrize("name", _NORMS)
def test_a_pickle_from_before_an_extra_existed(name: str, target: Target) -> None:
    """A module saved without the attributes of the extras has their defaults."""
    module = _NORMS[name](8, device=target.device)
    extras = ("weight_offset", "pre_activation", "activation", "out_dtype", "rounding", "dropout", "gate_activation")
    for extra in extras:
        module.__dict__.pop(extra, None)
    old = pickle.loads(pickle.dumps(module))
    x = torch.randn(3, 8, device=target.device)
    with kf.use_backend(target.backend), target.ran(forward=None):
        assert torch.equal(first(old(x)), first(_NORMS[name](8, device=target.device)(x)))


@pytest.mark.parametrize("name", _NORMS)
def test_out_dtype(name: str, target: Target) -> None:
    """The result has the dtype asked for, and the bits of the verb's call."""
    module = _NORMS[name](8, out_dtype=torch.float32, device=target.device)
    randomize(module)
    x, other = torch.randn(2, 3, 8, device=target.device, dtype=torch.bfloat16)
    inputs = (x,) if name in ("layer_norm", "rms_norm") else (x, other)
    parameters = {"weight": module.weight, "eps": module.eps, "out_dtype": torch.float32}
    if "layer" in name:
        parameters["bias"] = module.bias
    with kf.use_backend(target.backend), target.ran(forward=2):
        y = first(module(*inputs))
        assert y.dtype == torch.float32
        assert torch.equal(y, first(getattr(kf, name)(*inputs, 8, **parameters)))
    assert module.extra_repr().endswith("out_dtype=torch.float32")


@pytest.mark.parametrize("name", _NORMS)
def test_out_dtype_that_is_no_dtype(name: str) -> None:
    """The constructor names module, argument and value."""
    expected = r"^`Fused\w+`: `out_dtype` must be a torch.dtype, a Quantize or None, got 'float32'$"
    with pytest.raises(TypeError, match=expected):
        _NORMS[name](8, out_dtype="float32")


@pytest.mark.parametrize("name", _NORMS)
def test_extras_are_no_hooks(name: str) -> None:
    """A call takes the short way of `nn.Module`, which is for modules without hooks; a user's hook is called."""
    module = _NORMS[name](8, weight_offset=1.0)
    assert not module._forward_pre_hooks
    seen: list[nn.Module] = []
    handle = module.register_forward_pre_hook(lambda module, args: seen.append(module))
    module(torch.randn(3, 8))
    handle.remove()
    module(torch.randn(3, 8))
    assert seen == [module]
    assert not module._forward_pre_hooks


@pytest.mark.parametrize("name", _NORMS)
def test_pickles_name_the_class_alone(name: str) -> None:
    """A pickle holds the name of the module's class and nothing private."""
    module = _NORMS[name](8, weight_offset=1.0)
    strings = [arg for _, arg, _ in pickletools.genops(pickle.dumps(module, protocol=4)) if isinstance(arg, str)]
    modules = {text for text in strings if text.startswith("kernel_fusion")}
    assert modules == {type(module).__module__}
    assert not [text for text in strings if text in ("_no_change", "_CountedHooks")]


_COPIES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "itself": lambda module: module,
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda module: pickle.loads(pickle.dumps(module)),
}


@pytest.mark.parametrize("how", _COPIES)
def test_copies_stay_out_of_the_encoder_fast_path(how: str) -> None:
    """PyTorch's fused inference path, which would drop the activation, calls the norms of a copied layer, too."""
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
    for norm in ("norm1", "norm2"):
        setattr(layer, norm, _COPIES[how](kf.FusedLayerNorm(32, activation="relu")))
    x = torch.randn(2, 5, 32)
    trained = layer.train()(x).detach()
    with torch.no_grad():
        torch.testing.assert_close(layer.eval()(x), trained)


def test_extras_compile_in_one_graph() -> None:
    """Dynamo traces through a module with extras, and one with a hook, without a break."""
    for hooked in (False, True):
        module = kf.FusedLayerNorm(8, activation="relu")
        if hooked:
            module.register_forward_pre_hook(lambda module, args: (args[0] + 1,))
        x = torch.randn(3, 8)
        compiled = torch.compile(nn.Sequential(module), backend="eager", fullgraph=True)
        assert torch.equal(compiled(x), module(x))


def test_linear_act_loads_a_linear_layer() -> None:
    """The state dict and the initial values are those of torch.nn.Linear, which the module is not."""
    torch.manual_seed(0)
    linear = nn.Linear(8, 16)
    torch.manual_seed(0)
    module = kf.FusedLinearAct(8, 16, activation="relu")
    assert not isinstance(module, nn.Linear)
    for (name, ours), (other, theirs) in zip(module.state_dict().items(), linear.state_dict().items(), strict=True):
        assert name == other
        assert torch.equal(ours, theirs)
    randomize(linear)
    module.load_state_dict(linear.state_dict(), strict=True)
    x = torch.randn(4, 8)
    torch.testing.assert_close(module(x), torch.relu(linear(x)))


def test_linear_act_under_autocast() -> None:
    """Under autocast the result has the dtype of a linear layer's."""
    x = torch.randn(4, 8)
    linear, module = nn.Linear(8, 16), kf.FusedLinearAct(8, 16, activation=None)
    module.load_state_dict(linear.state_dict())
    with torch.autocast("cpu", torch.bfloat16):
        ours, theirs = module(x), linear(x)
    assert ours.dtype == theirs.dtype == torch.bfloat16
    # Ours rounds the product before the bias is added: half a unit in the last place of bfloat16, and that of the sum.
    torch.testing.assert_close(ours, theirs, rtol=0, atol=2**-8 * 2 * (x @ linear.weight.T).abs().max().item())
