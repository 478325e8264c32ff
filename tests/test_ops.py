"""`kf.ops`: the operations under fixed names, as PyTorch's compositions of them and as the verbs that they are."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support import EAGER, Target, assert_as_accurate
from torch import Tensor

import kernel_fusion as kf


@dataclass(frozen=True)
class Op:
    """One operation: its signature, what it stands for, and shapes to call it with.

    Attributes:
        signature: without annotations, as documented.
        verb: the same by the main verbs.
        pytorch: the same by PyTorch's functions.
        shapes: of the tensor arguments.
        call: the operation with the arguments that are no tensors; None where there are none.
        kernels: whether a kernel of ours runs.
    """

    signature: str
    verb: Callable[..., Tensor]
    pytorch: Callable[..., Tensor]
    shapes: tuple[tuple[int, ...], ...]
    call: Callable[..., Tensor] | None = None
    kernels: bool = True


_NORM = "(input, normalized_shape, weight=None, bias=None, eps=1e-05)"
_REDUCE = "(input, dim=None, keepdim=False)"
_ROWS, _ROW = (5, 96), (96,)
OPS = {
    "elementwise_add_relu": Op(
        "(a, b)", lambda a, b: kf.add_act(a, b, "relu"), lambda a, b: torch.relu(a + b), (_ROWS, _ROWS)
    ),
    "elementwise_mul_tanh": Op(
        "(a, b)", lambda a, b: kf.mul_act(a, b, "tanh"), lambda a, b: torch.tanh(a * b), (_ROWS, _ROWS)
    ),
    "fused_bias_gelu": Op(
        "(input, bias)", lambda x, b: kf.bias_act(x, b, "gelu"), lambda x, b: F.gelu(x + b), (_ROWS, _ROW)
    ),
    "reduce_sum_squared": Op(_REDUCE, kf.sum_squared, lambda x: x.square().sum(), (_ROWS,)),
    "reduce_mean_abs": Op(_REDUCE, kf.mean_abs, lambda x: x.abs().mean(), (_ROWS,)),
    "fused_layer_norm_relu": Op(
        _NORM,
        lambda x, w, b: kf.layer_norm(x, 96, w, b, activation="relu"),
        lambda x, w, b: torch.relu(F.layer_norm(x, (96,), w, b)),
        (_ROWS, _ROW, _ROW),
        lambda x, w, b: kf.ops.fused_layer_norm_relu(x, 96, w, b),
    ),
    "fused_relu_layer_norm": Op(
        _NORM,
        lambda x, w, b: kf.layer_norm(x, 96, w, b, pre_activation="relu"),
        lambda x, w, b: F.layer_norm(torch.relu(x), (96,), w, b),
        (_ROWS, _ROW, _ROW),
        lambda x, w, b: kf.ops.fused_relu_layer_norm(x, 96, w, b),
    ),
    "fused_gelu_dropout": Op(
        "(input, p=0.5, training=True)",
        lambda x: kf.act_dropout(x, "gelu", 0.3, training=False),
        F.gelu,
        (_ROWS,),
        lambda x: kf.ops.fused_gelu_dropout(x, 0.3, training=False),
    ),
    "fused_attention_score": Op(
        "(query, key, scale=None)",
        kf.attention_scores,
        lambda q, k: q @ k.mT * 32**-0.5,
        ((2, 7, 32), (2, 5, 32)),
        kernels=False,
    ),
}


@pytest.fixture(params=OPS)
def name(request: pytest.FixtureRequest) -> str:
    """Each operation by name."""
    return request.param


def call(name: str) -> Callable[..., Tensor]:
    """The operation as a function of its tensors."""
    return OPS[name].call or getattr(kf.ops, name)


def inputs(name: str, target: Target, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Random tensors for an operation, which require gradients."""
    return [torch.randn(shape, device=target.device).to(dtype).requires_grad_() for shape in OPS[name].shapes]


def ran(name: str, target: Target, backward: int | None = 0) -> Any:
    """`target.ran` where the operation has kernels of ours, else that none ran."""
    return target.ran(forward=None, backward=backward) if OPS[name].kernels else EAGER.ran()


def bare_signature(function: Callable[..., Any]) -> str:
    """The signature without annotations."""
    parameters = inspect.signature(function).parameters.values()
    return str(inspect.Signature([p.replace(annotation=inspect.Parameter.empty) for p in parameters]))


def test_names_and_signatures(name: str) -> None:
    """Every operation is there under its name with its documented signature."""
    assert name in kf.ops.__all__
    assert bare_signature(getattr(kf.ops, name)) == OPS[name].signature


def test_there_are_no_others() -> None:
    """The table of this file is the module."""
    assert set(OPS) == set(kf.ops.__all__)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_forward_and_gradients_as_pytorch(name: str, dtype: torch.dtype, any_target: Target) -> None:
    """Result and every gradient agree with PyTorch's composition within budget."""
    tensors = inputs(name, any_target, dtype)
    dy = torch.randn_like(OPS[name].pytorch(*tensors))

    def run(function: Callable[..., Tensor], dy: Tensor, *tensors: Tensor) -> list[Tensor]:
        y = function(*tensors)
        return [y, *torch.autograd.grad(y, tensors, dy)]

    with kf.use_backend(any_target.backend), ran(name, any_target, backward=None):
        results = run(call(name), dy, *tensors)
    assert_as_accurate(results, lambda dy, *t: run(OPS[name].pytorch, dy, *t), dy, *tensors)


def test_is_the_verb(name: str, any_target: Target) -> None:
    """The same bits as the verb with its activation named."""
    tensors = inputs(name, any_target)
    with kf.use_backend(any_target.backend), ran(name, any_target):
        assert torch.equal(call(name)(*tensors), OPS[name].verb(*tensors))


def test_any_layout(name: str, any_target: Target) -> None:
    """Transposed inputs give what their contiguous copies give."""
    tensors = [t.detach() for t in inputs(name, any_target)]
    with kf.use_backend(any_target.backend), ran(name, any_target):
        expected = call(name)(*tensors)
        y = call(name)(*(t.mT.contiguous().mT if t.dim() > 1 else t for t in tensors))
    # Sums over everything follow the memory.
    torch.testing.assert_close(y, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", ["elementwise_add_relu", "elementwise_mul_tanh", "fused_bias_gelu"])
def test_promotion_and_broadcasting_as_pytorch(name: str, any_target: Target) -> None:
    """float16 with float32 gives float32, and shapes broadcast."""
    a = torch.randn(5, 1, 96, device=any_target.device, dtype=torch.float16)
    b = torch.randn(3, 96, device=any_target.device)
    with kf.use_backend(any_target.backend), ran(name, any_target):
        y = call(name)(a, b)
    theirs = OPS[name].pytorch(a, b)
    assert (y.dtype, y.shape) == (theirs.dtype, theirs.shape) == (torch.float32, (5, 3, 96))


@pytest.mark.parametrize("name", ["reduce_sum_squared", "reduce_mean_abs"])
@pytest.mark.parametrize("dim", [None, 0, -1, (0, 2)], ids=str)
@pytest.mark.parametrize("keepdim", [False, True])
def test_reduction_dimensions(name: str, dim: Any, keepdim: bool, any_target: Target) -> None:
    """`dim` and `keepdim` mean what they mean in torch.sum and torch.mean."""
    x = torch.randn(4, 5, 6, device=any_target.device)
    with kf.use_backend(any_target.backend), any_target.ran(forward=None):
        y = getattr(kf.ops, name)(x, dim, keepdim)
    assert_as_accurate(y, lambda t: t.square().sum(dim, keepdim) if "sum" in name else t.abs().mean(dim, keepdim), x)


def test_gelu_dropout_drops_and_scales(any_target: Target) -> None:
    """In training a third is dropped, the rest scaled, by the seed of the moment; the same seed repeats it."""
    x = torch.randn(64, 256, device=any_target.device)
    with kf.use_backend(any_target.backend), any_target.ran(forward=None):
        torch.manual_seed(7)
        y, other = (kf.ops.fused_gelu_dropout(x, 0.3) for _ in range(2))
        torch.manual_seed(7)
        again = kf.ops.fused_gelu_dropout(x, 0.3)
        assert torch.equal(kf.ops.fused_gelu_dropout(x, 1.0), torch.zeros_like(x))
    assert torch.equal(y, again)
    assert not torch.equal(y, other)
    kept = y != 0
    # 16384 elements: five standard deviations of the share are 0.018.
    assert abs(1 - kept.float().mean().item() - 0.3) < 0.018
    torch.testing.assert_close(y[kept], (F.gelu(x) / 0.7)[kept])


def test_scale_of_scores(any_target: Target) -> None:
    """A given scale takes the place of 1 / sqrt(D)."""
    q, k = torch.randn(2, 3, 7, 16, device=any_target.device)
    with EAGER.ran():
        y = kf.ops.fused_attention_score(q, k, 3.0)
    assert_as_accurate(y, lambda q, k: q @ k.mT * 3.0, q, k)
