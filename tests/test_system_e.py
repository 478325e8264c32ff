"""The operations under their fixed names, `kf.ops` and `kf.kernels`, in four dtypes against float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support import Target, assert_as_accurate
from torch import Tensor

import kernel_fusion as kf

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
MATRIX, ROW, KEYS = (33, 96), (96,), (20, 96)


@dataclass(frozen=True)
class Name:
    """A name of `kf.ops`: its tensors' shapes, what follows them, and PyTorch's calls."""

    shapes: tuple[tuple[int, ...], ...]
    rest: tuple[Any, ...]
    pytorch: Callable[..., Tensor]
    kernel: str
    kernels: int = 1

    def arguments(self, tensors: list[Tensor]) -> list[Any]:
        """In the order of the signature: `normalized_shape` comes after the input."""
        return [tensors[0], *self.rest, *tensors[1:]] if self.rest == (96,) else [*tensors, *self.rest]


OPS = {
    "elementwise_add_relu": Name((MATRIX, MATRIX), (), lambda a, b: torch.relu(a + b), "elementwise.add_relu"),
    "elementwise_mul_tanh": Name((MATRIX, MATRIX), (), lambda a, b: torch.tanh(a * b), "elementwise.mul_tanh"),
    "fused_bias_gelu": Name((MATRIX, ROW), (), lambda x, b: F.gelu(x + b), "elementwise.bias_gelu"),
    "reduce_sum_squared": Name((MATRIX,), (-1,), lambda x: x.square().sum(-1), "reduction.sum_squared"),
    "reduce_mean_abs": Name((MATRIX,), (-1,), lambda x: x.abs().mean(-1), "reduction.mean_abs"),
    "fused_layer_norm_relu": Name(
        (MATRIX, ROW, ROW), (96,), lambda x, w, b: torch.relu(F.layer_norm(x, (96,), w, b)), "fusion.layer_norm_relu"
    ),
    "fused_relu_layer_norm": Name(
        (MATRIX, ROW, ROW), (96,), lambda x, w, b: F.layer_norm(torch.relu(x), (96,), w, b), "fusion.relu_layer_norm"
    ),
    "fused_gelu_dropout": Name((MATRIX,), (0.3, False), F.gelu, "fusion.gelu_dropout"),
    "fused_attention_score": Name((MATRIX, KEYS), (0.125,), lambda q, k: q @ k.mT * 0.125, "fusion.attention_score", 0),
}


def _kernel(path: str) -> Callable[..., Tensor]:
    module, name = path.split(".")
    return getattr(getattr(kf.kernels, module), name)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", OPS)
def test_ops(name: str, dtype: torch.dtype, target: Target) -> None:
    """Value and every gradient are within budget, in the dtype of the input, on the target's backend."""
    row = OPS[name]
    tensors = [torch.randn(s, device=target.device, dtype=dtype, requires_grad=True) for s in row.shapes]
    function = getattr(kf.ops, name)
    exact = row.kernels == 1 and not name.startswith("reduce")
    count = row.kernels if exact or row.kernels == 0 else None
    with kf.use_backend(target.backend), target.ran(forward=count, backward=count):
        y = function(*row.arguments(tensors))
        dy = torch.randn_like(y)
        results = [y, *torch.autograd.grad(y, tensors, dy)]
    assert {t.dtype for t in results} == {dtype}

    def pytorch(dy: Tensor, *tensors: Tensor) -> list[Tensor]:
        y = row.pytorch(*tensors)
        return [y, *torch.autograd.grad(y, tensors, dy.to(y))]

    if dtype == torch.float64:  # PyTorch is no reference for itself: its own tolerance for float64
        torch.testing.assert_close(results, pytorch(dy, *tensors))
    else:
        assert_as_accurate(results, pytorch, dy, *tensors)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", OPS)
def test_kernels_have_the_bits_of_ops(name: str, dtype: torch.dtype, target: Target) -> None:
    """The direct layer gives the same bits, without a graph."""
    row = OPS[name]
    tensors = [torch.randn(s, device=target.device, dtype=dtype, requires_grad=True) for s in row.shapes]
    count = None if name.startswith("reduce") else 2 * row.kernels
    with target.ran(forward=count):
        direct = _kernel(row.kernel)(*row.arguments(tensors))
        with kf.use_backend(target.backend):
            friendly = getattr(kf.ops, name)(*row.arguments(tensors))
    assert not direct.requires_grad
    assert torch.equal(direct, friendly)


def test_every_name_is_tested() -> None:
    """A name that is added to the library comes into the table."""
    assert set(OPS) == {name for name in vars(kf.ops) if name.startswith(("elementwise_", "fused_", "reduce_"))}


def test_gelu_dropout_drops(target: Target) -> None:
    """In training it drops with p and scales the rest, forward and backward alike."""
    x = torch.full((256, 256), 30.0, device=target.device, requires_grad=True)
    with kf.use_backend(target.backend), target.ran(forward=1, backward=1):
        y = kf.ops.fused_gelu_dropout(x, 0.25)
        (dx,) = torch.autograd.grad(y, x, torch.ones_like(y))
    assert set(y.unique().tolist()) == {0.0, 40.0}
    assert torch.equal(dx * 30, y)
    # 65536 trials of probability 1/4: six standard deviations are 0.0102.
    assert abs(float((y == 0).double().mean()) - 0.25) < 0.0102


def test_state_of_the_library(target: Target) -> None:
    """On a machine where these tests run, the extension is loaded, and CUDA is available where there is a GPU."""
    assert kf.EXTENSION_LOADED is True
    assert kf.CUDA_AVAILABLE is (torch.cuda.is_available() and torch.version.hip is None)
    assert target.device in ("cpu", "cuda")
