"""torch.func and forward-mode AD through the verbs: everything that must see through the operator.

Where a transform differentiates, the composite of PyTorch operations serves the call, so no kernel need run; the
results are judged against PyTorch's own call under the same transform. vmap alone batches rows and does run the kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from support import Target, assert_as_accurate, call, pytorch_call
from torch import Tensor
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

# PyTorch's forward mode scripts its decompositions when first used.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")

EPS = torch.finfo(torch.float32).eps
Function = Callable[..., Any]


def ours(verb: str, target: Target) -> Function:
    """The verb with the eps that `pytorch_call` uses, on the target's backend."""
    eps = 1e-5 if verb == "layer_norm" else EPS
    return partial(call, verb, eps=eps, backend=target.backend)


def arguments(target: Target, *lead: int) -> list[Tensor]:
    """x of shape (\\*lead, 5), weight and bias."""
    return [torch.randn(*shape, device=target.device) for shape in ((*lead, 5), (5,), (5,))]


def weighted(norm: Function, dy: Tensor) -> Function:
    """A scalar function of the norm's arguments whose gradients do not vanish."""
    return lambda *tensors: (norm(*tensors) * dy.to(tensors[0])).sum()


_FIRST_ORDER: dict[str, Callable[[Function, Tensor], Function]] = {
    "grad": lambda norm, dy: grad(weighted(norm, dy), argnums=(0, 1, 2)),
    "vjp": lambda norm, dy: lambda *tensors: vjp(norm, *tensors)[1](dy.to(tensors[0])),
    "jvp": lambda norm, dy: lambda x, w, b: jvp(norm, (x, w, b), (dy.to(x), w.flip(0), b.flip(0)))[1],
    "jacrev": lambda norm, dy: jacrev(norm, argnums=(0, 1, 2)),
    "jacfwd": lambda norm, dy: jacfwd(norm, argnums=(0, 1, 2)),
}


@pytest.mark.parametrize("transform", _FIRST_ORDER)
def test_first_order(verb: str, transform: str, target: Target) -> None:
    """grad, vjp, jvp, jacrev and jacfwd agree with PyTorch's call within budget."""
    tensors, dy = arguments(target, 3), torch.randn(3, 5, device=target.device)
    transformed = _FIRST_ORDER[transform]
    result = transformed(ours(verb, target), dy)(*tensors)
    assert_as_accurate(result, transformed(partial(pytorch_call, verb), dy), *tensors)


_SECOND_ORDER: dict[str, Callable[[Function], Function]] = {
    "hessian": hessian,
    "reverse-over-reverse": lambda f: jacrev(jacrev(f)),
    "reverse-over-forward": lambda f: jacrev(jacfwd(f)),
}


@pytest.mark.parametrize("transform", _SECOND_ORDER)
def test_second_order(verb: str, transform: str, target: Target) -> None:
    """Second derivatives agree with PyTorch's Hessian in float64, to PyTorch's own tolerance for float64."""
    x, weight, bias = (t.double() for t in arguments(target, 2))
    dy = torch.randn(2, 5, device=target.device)
    result = _SECOND_ORDER[transform](weighted(ours(verb, target), dy))(x, weight, bias)
    # Always its Hessian: PyTorch 2.13 gets the reverse over forward derivative of its own layer_norm wrong.
    expected = hessian(weighted(partial(pytorch_call, verb), dy))(x, weight, bias)
    assert expected.abs().max() > 0.01, "nothing to compare"
    torch.testing.assert_close(result, expected)


@pytest.mark.parametrize("which", ["x", "weight", "bias"])
def test_forward_mode(verb: str, which: str, target: Target) -> None:
    """A tangent on any one input reaches the result."""
    tensors = arguments(target, 3)
    index = ("x", "weight", "bias").index(which)
    tangent = torch.randn_like(tensors[index])

    def tangent_of(norm: Function) -> Function:
        def run(*args: Tensor) -> Tensor:
            *inputs, direction = args
            with forward_ad.dual_level():
                inputs[index] = forward_ad.make_dual(inputs[index], direction)
                result = forward_ad.unpack_dual(norm(*inputs)).tangent
            assert result is not None
            return result

        return run

    result = tangent_of(ours(verb, target))(*tensors, tangent)
    assert_as_accurate(result, tangent_of(partial(pytorch_call, verb)), *tensors, tangent)


def test_forward_mode_gradcheck(verb: str, target: Target) -> None:
    """Forward mode, its batched form and forward over reverse are those of finite differences."""
    tensors = [t.double().requires_grad_() for t in arguments(target, 2)]
    norm = ours(verb, target)
    assert torch.autograd.gradcheck(
        norm, tensors, check_forward_ad=True, check_backward_ad=False, check_batched_forward_grad=True
    )
    assert torch.autograd.gradgradcheck(norm, tensors, check_fwd_over_rev=True)


@pytest.mark.parametrize("in_dim", [0, 1, 2])
@pytest.mark.parametrize("out_dim", [0, 1])
def test_vmap_over_rows_runs_the_kernel(verb: str, in_dim: int, out_dim: int, target: Target) -> None:
    """Batching x alone is one call with more rows, with the bits of one call per example."""
    _, weight, bias = arguments(target)
    x = torch.randn(4, 3, 5, device=target.device).movedim(0, in_dim)
    norm = ours(verb, target)
    with target.ran(forward=1):
        y = vmap(lambda t: norm(t, weight, bias), in_dims=in_dim, out_dims=out_dim)(x)
    with target.ran(forward=4):
        looped = torch.stack([norm(t, weight, bias) for t in x.unbind(in_dim)], out_dim)
    assert torch.equal(y, looped)


# Grid rationale. Which of x, weight and bias carry the batch dimension: with a parameter batched the rows do not share
# it any more, which no kernel serves.
@pytest.mark.parametrize("in_dims", [(0, 0, 0), (0, 0, None), (0, None, 0), (None, 0, 0), (None, None, 0)], ids=str)
def test_vmap_over_parameters(verb: str, in_dims: tuple[int | None, ...], target: Target) -> None:
    """Batched weights and biases work, through the composite."""
    shapes = [(3, 5), (5,), (5,)]
    tensors = [
        torch.randn(*([4] if d is not None else []), *shape, device=target.device)
        for shape, d in zip(shapes, in_dims, strict=True)
    ]
    result = vmap(ours(verb, target), in_dims=in_dims)(*tensors)
    assert_as_accurate(result, vmap(partial(pytorch_call, verb), in_dims=in_dims), *tensors)


def test_vmap_of_0_d_examples_and_nested(verb: str, target: Target) -> None:
    """vmap leaves rows of one dimension, and nests."""
    x = torch.randn(2, 3, 4, 5, device=target.device)
    norm = ours(verb, target)
    with target.ran(forward=2):
        assert torch.equal(vmap(vmap(vmap(norm)))(x), norm(x))


def test_vmap_backward(verb: str, target: Target) -> None:
    """Gradients flow through a vmapped call."""
    tensors = [t.requires_grad_() for t in arguments(target, 4, 3)]
    dy = torch.randn(4, 3, 5, device=target.device)

    def gradients(norm: Function) -> Function:
        def run(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
            y = vmap(norm, in_dims=(0, None, None))(x, weight, bias)
            return torch.autograd.grad(y, (x, weight, bias), dy.to(y))

        return run

    assert_as_accurate(gradients(ours(verb, target))(*tensors), gradients(partial(pytorch_call, verb)), *tensors)


def test_per_sample_gradients(verb: str, target: Target) -> None:
    """vmap over grad gives the gradient of each example."""
    tensors, dy = arguments(target, 4, 3), torch.randn(3, 5, device=target.device)

    def per_sample(norm: Function) -> Function:
        return vmap(grad(weighted(norm, dy), argnums=(1, 2)), in_dims=(0, None, None))

    assert_as_accurate(per_sample(ours(verb, target))(*tensors), per_sample(partial(pytorch_call, verb)), *tensors)
