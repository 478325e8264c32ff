"""PyTorch's own test cases for its norms, run through ours: samples, NumPy references, error inputs, module inputs.

They are compared as PyTorch compares them, with a float64 evaluation under PyTorch's tolerance for the dtype: samples
of one to thirty elements are too few for the oracle's budget, which takes PyTorch's largest error as its yardstick.
The databases are imported in the tests, because importing them takes seconds.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from support import Target, widened
from torch import Tensor
from torch.utils import _pytree as pytree

import kernel_fusion as kf

# native_layer_norm returns (y, mean, rstd); its y is layer_norm's.
VERBS: dict[str, Callable[..., Tensor]] = {
    "nn.functional.layer_norm": kf.layer_norm,
    "nn.functional.rms_norm": kf.rms_norm,
    "native_layer_norm": kf.layer_norm,
}
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
MODULES = {"LayerNorm": kf.FusedLayerNorm, "RMSNorm": kf.FusedRMSNorm}


@cache
def _op_db() -> dict[str, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.testing._internal.common_methods_invocations import op_db
    return {op.name: op for op in op_db if op.name in VERBS}


@cache
def _module_db() -> dict[str, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.testing._internal.common_modules import module_db
    return {info.module_cls.__name__: info for info in module_db if info.module_cls.__name__ in MODULES}


def _samples(name: str, target: Target, dtype: torch.dtype, requires_grad: bool) -> list[Any]:
    samples = list(_op_db()[name].sample_inputs(target.device, dtype, requires_grad=requires_grad))
    for sample in samples:
        # The default eps of rms_norm depends on the dtype; the reference in another dtype must use the same.
        if name == "nn.functional.rms_norm":
            sample.kwargs.setdefault("eps", torch.finfo(torch.float64 if dtype.itemsize == 8 else torch.float32).eps)
    assert samples
    return samples


def _first(result: Any) -> Any:
    return result[0] if isinstance(result, tuple) else result


def _launches(x: Tensor, *, backward: bool) -> dict[str, int]:
    """The kernels that a call on `x` runs: none without a row."""
    return {"forward": int(x.numel() > 0), "backward": int(backward and x.numel() > 0)}


def _with_gradients(function: Callable[..., Any], tree: Any, dy: Tensor) -> list[Tensor]:
    """The result of `function(*args, **kwargs)` and the gradients of every tensor among its arguments."""
    args, kwargs = tree
    y = _first(function(*args, **kwargs))
    leaves = [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]
    return [y, *torch.autograd.grad(y, leaves, dy)]


def _assert_close(ours: list[Tensor], expected: list[Tensor]) -> None:
    for one, other in zip(ours, expected, strict=True):
        torch.testing.assert_close(one, other.to(one))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", VERBS)
def test_samples(name: str, dtype: torch.dtype, target: Target) -> None:
    """PyTorch's samples give PyTorch's results and gradients."""
    for sample in _samples(name, target, dtype, requires_grad=True):
        args, kwargs = (sample.input, *sample.args), sample.kwargs
        dy = torch.randn_like(sample.input)
        with target.ran(**_launches(sample.input, backward=True)):
            ours = _with_gradients(VERBS[name], (args, {**kwargs, "backend": target.backend}), dy)
        assert {t.dtype for t in ours} == {dtype}
        _assert_close(ours, _with_gradients(_op_db()[name].op, widened((args, kwargs)), dy.double()))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", VERBS)
def test_references(name: str, dtype: torch.dtype, target: Target) -> None:
    """PyTorch's NumPy references, evaluated in float64, agree."""
    for sample in _samples(name, target, dtype, requires_grad=False):
        args, kwargs = (sample.input, *sample.args), sample.kwargs
        with target.ran(**_launches(sample.input, backward=False)):
            ours = VERBS[name](*args, **kwargs, backend=target.backend)
        arrays, _ = pytree.tree_map_only(Tensor, lambda t: t.cpu().double().numpy(), (args, kwargs))
        expected = _first(_op_db()[name].ref(*arrays, **kwargs))
        _assert_close([ours], [torch.from_numpy(np.asarray(expected))])


# layer_norm has no error inputs of its own; native_layer_norm's have the same arguments.
@pytest.mark.parametrize("name", ["native_layer_norm", "nn.functional.rms_norm"])
def test_error_inputs(name: str, target: Target) -> None:
    """PyTorch's bad inputs raise PyTorch's type of error in its words."""
    errors = list(_op_db()[name].error_inputs(target.device))
    assert errors
    for bad in errors:
        sample = bad.sample_input
        with target.ran(forward=0), pytest.raises(bad.error_type, match=bad.error_regex):
            VERBS[name](sample.input, *sample.args, **sample.kwargs, backend=target.backend)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", MODULES)
def test_module_inputs(name: str, training: bool, dtype: torch.dtype, target: Target) -> None:
    """PyTorch's module inputs give the parent's results and gradients."""
    info = _module_db()[name]
    inputs = info.module_inputs_func(info, target.device, dtype, requires_grad=True, training=training)
    assert inputs
    for case in inputs:
        args, kwargs = case.constructor_input.args, case.constructor_input.kwargs
        theirs = info.module_cls(*args, **kwargs, device=target.device, dtype=dtype).train(training)
        for parameter in theirs.parameters():
            torch.nn.init.normal_(parameter)
        ours = MODULES[name](*args, **kwargs, device=target.device, dtype=dtype).train(training)
        ours.load_state_dict(theirs.state_dict(), strict=True)
        (x,) = case.forward_input.args
        dy = torch.randn_like(x)
        with kf.use_backend(target.backend), target.ran(**_launches(x, backward=True)):
            results = _module_results(ours, x, dy)
        _assert_close(results, _module_results(copy.deepcopy(theirs).double(), *widened((x, dy))))


def _module_results(module: torch.nn.Module, x: Tensor, dy: Tensor) -> list[Tensor]:
    y = module(x)
    return [y, *torch.autograd.grad(y, [x, *module.parameters()], dy)]
