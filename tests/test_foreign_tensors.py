"""Tensors that are not ours to compute: PyTorch's outcome, value or error, is ours.

Integers, complex numbers, other layouts, nested tensors and subclasses with rules of their own. No backend is named,
because the automatic choice is what is tested; the counters show that no kernel of ours touched the tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support import EAGER, Target, call
from test_errors import outcome
from torch import Tensor
from torch.utils import _pytree as pytree
from verbs import Verb, results

import kernel_fusion as kf


def assert_same(ours: Any, theirs: Any) -> None:
    """Equal values of equal type, or errors of equal type and text, after our name for the argument."""
    assert type(ours) is type(theirs), (ours, theirs)
    if isinstance(theirs, tuple):
        assert ours[0] == theirs[0]
        assert ours[1].endswith(theirs[1])
    else:
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)


_PLAIN: dict[str, Callable[[], Tensor]] = {
    "int64": lambda: torch.ones(2, 8, dtype=torch.int64),
    "bool": lambda: torch.ones(2, 8, dtype=torch.bool),
    "complex64": lambda: torch.randn(2, 8, dtype=torch.complex64),
    "sparse": lambda: torch.randn(2, 8).to_sparse(),
    "mkldnn": lambda: torch.randn(2, 8).to_mkldnn(),
}


@pytest.mark.parametrize("kind", _PLAIN)
@pytest.mark.parametrize("affine", [False, True])
def test_other_dtypes_and_layouts_as_in_pytorch(verb: str, kind: str, affine: bool) -> None:
    """Integer, complex, sparse and mkldnn inputs behave as in PyTorch's call."""
    x = _PLAIN[kind]()
    weight = torch.ones(8) if affine else None
    theirs = outcome(lambda: getattr(F, verb)(x, (8,), weight))
    with EAGER.ran():
        ours = outcome(lambda: getattr(kf, verb)(x, (8,), weight))
    assert_same(ours, theirs)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage:UserWarning")
@pytest.mark.parametrize("kind", ["strided", "jagged with holes"])
def test_nested_tensors_as_in_pytorch(verb: str, kind: str) -> None:
    """Nested tensors take PyTorch's own rule, except jagged ones that are rows alone (test_jagged.py)."""
    if kind == "strided":
        x = torch.nested.nested_tensor([torch.randn(3, 8), torch.randn(1, 8)])
    else:
        x = torch.nested.nested_tensor_from_jagged(torch.randn(5, 8), torch.tensor([0, 3, 5]), torch.tensor([2, 2]))
    weight, bias = torch.randn(8), torch.randn(8)
    arguments = (weight, bias) if verb == "layer_norm" else (weight,)
    theirs = outcome(lambda: getattr(F, verb)(x, (8,), *arguments))
    with EAGER.ran():
        ours = outcome(lambda: getattr(kf, verb)(x, (8,), *arguments))
    assert type(ours) is type(theirs), (ours, theirs)
    if isinstance(theirs, tuple):
        assert ours == theirs
    else:
        for one, other in zip(ours.unbind(), theirs.unbind(), strict=True):
            assert torch.equal(one, other)


class _FunctionSubclass(Tensor):
    """Records PyTorch's functions, as DTensor-like and unit-carrying tensors do."""

    seen: list[Any] = []  # noqa: RUF012  # one record for all instances, cleared by the test

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Record and go on."""
        cls.seen.append(func)
        return super().__torch_function__(func, types, args, kwargs or {})


def test_torch_function_subclass_sees_pytorch_call(verb: str) -> None:
    """A subclass with a `__torch_function__` of its own gets PyTorch's function to override."""
    _FunctionSubclass.seen.clear()
    x = torch.randn(2, 8).as_subclass(_FunctionSubclass)
    with EAGER.ran():
        y = call(verb, x)
    assert getattr(F, verb) in _FunctionSubclass.seen
    assert isinstance(y, _FunctionSubclass)


class _DispatchSubclass(Tensor):
    """Wraps a tensor and knows ATen's operators only."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> _DispatchSubclass:
        """A wrapper of the shape and dtype of `inner`."""
        wrapper = Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=inner.device)
        wrapper.inner = inner
        return wrapper

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Unwrap, compute, wrap."""
        assert func.namespace == "aten", f"{func} is not PyTorch's"
        args, kwargs = pytree.tree_map_only(cls, lambda t: t.inner, (args, kwargs or {}))
        return pytree.tree_map_only(Tensor, cls, func(*args, **kwargs))


def test_torch_dispatch_subclass_sees_pytorch_operators(verb: str) -> None:
    """A wrapper subclass meets no operator that it cannot know."""
    x = torch.randn(2, 8)
    with EAGER.ran():
        y = call(verb, _DispatchSubclass(x))
    assert isinstance(y, _DispatchSubclass)
    assert torch.equal(y.inner, getattr(F, verb)(x, (8,)))


def test_meta_tensors_have_shape_and_dtype(verb: str) -> None:
    """On the meta device the result has the shape, dtype and strides of the real one."""
    x = torch.empty(3, 4, 8, device="meta", dtype=torch.bfloat16).transpose(0, 1)
    with EAGER.ran():
        y = call(verb, x, torch.empty(8, device="meta"), out_dtype=torch.float32)
    assert (y.device.type, y.shape, y.dtype) == ("meta", x.shape, torch.float32)
    assert y.is_contiguous()


# Ours, and PyTorch's calls.
_OTHERS: dict[str, tuple[Callable[[Tensor], Any], Callable[[Tensor], Any]]] = {
    "add_act": (lambda t: kf.add_act(t, t, "relu"), lambda t: F.relu(t + t)),
    "mul_act": (lambda t: kf.mul_act(t, t, "tanh"), lambda t: torch.tanh(t * t)),
    "bias_act": (lambda t: kf.bias_act(t, t[0], "leaky_relu"), lambda t: F.leaky_relu(t + t[0])),
    "act_dropout": (lambda t: kf.act_dropout(t, "relu", training=False), F.relu),
    "gated_act": (lambda t: kf.gated_act(t, t, "silu"), lambda t: F.silu(t) * t),
    "sum_squared": (lambda t: kf.sum_squared(t, -1), lambda t: t.square().sum(-1)),
    "mean_abs": (lambda t: kf.mean_abs(t, -1), lambda t: t.abs().mean(-1)),
    "softmax": (kf.softmax, lambda t: torch.softmax(t, -1)),
}


@pytest.mark.parametrize("kind", ["int64", "complex64"])
@pytest.mark.parametrize("name", _OTHERS)
def test_other_dtypes_of_other_verbs_as_in_pytorch(name: str, kind: str) -> None:
    """Integers and complex numbers behave as in PyTorch's calls."""
    x = _PLAIN[kind]()
    ours, theirs = _OTHERS[name]
    with EAGER.ran():
        assert_same(outcome(lambda: ours(x)), outcome(lambda: theirs(x)))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage:UserWarning")
@pytest.mark.parametrize("name", ["add_act", "gated_act", "act_dropout"])
def test_nested_chains_as_in_pytorch(name: str) -> None:
    """Chains of nested tensors take PyTorch's own rules, except jagged ones that are rows alone (test_jagged.py)."""
    x = torch.nested.nested_tensor_from_jagged(torch.randn(5, 8), torch.tensor([0, 3, 5]), torch.tensor([2, 2]))
    ours, theirs = _OTHERS[name]
    with EAGER.ran():
        result = ours(x)
    for one, other in zip(result.unbind(), theirs(x).unbind(), strict=True):
        torch.testing.assert_close(one, other)


def test_dispatch_subclass_in_every_verb(operation: Verb) -> None:
    """A wrapper subclass meets no operator that it cannot know, in any verb."""
    tensors = [t.detach() for t in operation.leaves(EAGER)]
    with EAGER.ran():
        y = operation.ours(*(_DispatchSubclass(t) for t in tensors))
    for one, other in zip(results(y), results(operation.pytorch(*tensors)), strict=True):
        assert isinstance(one, _DispatchSubclass)
        torch.testing.assert_close(one.inner, other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_meta_tensors_of_every_verb(operation: Verb, dtype: torch.dtype, target: Target) -> None:
    """On the meta device results have the shapes, dtypes and strides of the real ones."""
    tensors = [t.detach() for t in operation.leaves(target, dtype=dtype)]
    tensors[0] = tensors[0].movedim(0, -1).contiguous().movedim(-1, 0)
    with operation.ran(target, 1):
        real = results(operation.ours(*tensors))
        meta = results(operation.ours(*(t.to("meta") for t in tensors)))
    for one, other in zip(meta, real, strict=True):
        assert one.is_meta
        assert (one.shape, one.dtype, one.stride()) == (other.shape, other.dtype, other.stride())


@pytest.mark.parametrize("function", ["conj", "neg"])
def test_lazily_negated_views(verb: str, function: str) -> None:
    """Views that PyTorch negates lazily are read as what they stand for."""
    z = torch.randn(2, 8, dtype=torch.complex64)
    x = z.conj().imag if function == "neg" else z.conj().real
    assert x.is_neg() == (function == "neg")
    assert torch.equal(call(verb, x), call(verb, x.clone()))
