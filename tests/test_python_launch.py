"""The part of launches from Python that needs no GPU: autograd, over the CPU's operators, and the announced shapes.

test_cuda.py tests the launches on a GPU.
"""

from __future__ import annotations

import pytest
import torch
from support import CPU, assert_as_accurate, python, pytorch_call
from torch import Tensor

from kernel_fusion.backends.cuda import python_launch

EPS = torch.finfo(torch.float32).eps


def apply(verb: str, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """The norm of the last dimension, by this autograd."""
    eps = 1e-5 if verb == "layer_norm" else EPS
    return python_launch.RowNorm.apply(x, 1, weight, bias, eps, 0.0, None, verb == "rms_norm")


@pytest.mark.parametrize("wanted", [(True, True, True), (True, False, False), (False, True, False)])
def test_gradients(verb: str, wanted: tuple[bool, ...]) -> None:
    """Values and gradients are as accurate as PyTorch's, and only those that are wanted are computed."""
    shapes = (6, 32), (32,), (32,)
    tensors = [torch.randn(shape, requires_grad=want) for shape, want in zip(shapes, wanted, strict=True)]
    dy = torch.randn(6, 32)
    with CPU.ran(forward=1, backward=1):
        y = apply(verb, *tensors)
        y.backward(dy)
    assert [t.grad is not None for t in tensors] == list(wanted)

    def pytorch(dy: Tensor, *tensors: Tensor) -> list[Tensor]:
        y = pytorch_call(verb, *tensors)
        return [y, *torch.autograd.grad(y, [t for t in tensors if t.requires_grad], dy)]

    assert_as_accurate([y, *(t.grad for t in tensors if t.requires_grad)], pytorch, dy, *tensors)


def test_without_weight_and_bias(verb: str) -> None:
    """The gradient of the input alone, where there is nothing else."""
    x, dy = torch.randn(2, 6, 32).unbind()
    with CPU.ran(forward=1, backward=1):
        (dx,) = torch.autograd.grad(apply(verb, x.requires_grad_(), None, None), x, dy)

    def pytorch(dy: Tensor, x: Tensor) -> Tensor:
        return torch.autograd.grad(pytorch_call(verb, x), x, dy)[0]

    assert_as_accurate(dx, pytorch, dy, x)


def test_double_backward(verb: str) -> None:
    """A backward that is differentiated itself goes through the definition."""
    x, weight, bias = (torch.randn(s, dtype=torch.float64, requires_grad=True) for s in ((3, 8), (8,), (8,)))
    assert torch.autograd.gradgradcheck(lambda *tensors: apply(verb, *tensors), (x, weight, bias))


def test_shapes_it_announces() -> None:
    """Traced without the extension, results have the shapes and dtypes that the definition gives them."""
    code = """
        import torch, kernel_fusion
        from kernel_fusion.backends.cuda import python_launch
        from kernel_fusion.operators import schemas

        python_launch.register(schemas.library)
        ops = torch.ops.kernel_fusion
        x = torch.empty(2, 5, 32, dtype=torch.bfloat16, device="meta")
        weight = torch.empty(32, device="meta")
        for rms, kept in ((False, 2), (True, 1)):
            y, stats, _ = ops.row_norm_fwd(x, 1, weight, None, 1e-5, 0.0, torch.float16, rms)
            assert (y.shape, y.dtype) == (x.shape, torch.float16)
            assert (stats.shape, stats.dtype) == ((kept, 2, 5), torch.float32)
            for wants in ([True, True, True, False, False], [False, False, True, False, False]):
                grads = ops.row_norm_bwd(y, x, stats, 1, weight, torch.float64, 0.0, rms, wants)
                shapes = [x.shape, weight.shape, weight.shape]
                assert [g.dtype for g in grads[:3]] == [x.dtype, weight.dtype, torch.float64]
                assert [g.shape for g in grads[:3]] == [s if w else (0,) for s, w in zip(shapes, wants)]
    """
    python(code, env={"CXX": "/nonexistent"})
