"""torch.func and forward-mode AD through the verbs: everything that must see through the operator.

If a transform differentiates, the composite of PyTorch operations serves the call, so no kernel need run; the results
are judged against PyTorch's own call under the same transform. vmap alone batches rows and does run the kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from support import Target, call
from torch import Tensor
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vjp, vmap
from torch.utils import _pytree as pytree
from verbs import VERBS, Verb, results

import kernel_fusion as kf

Function = Callable[..., Any]


def weighted(function: Function) -> Function:
    """A scalar function of a verb's arguments whose gradients do not vanish."""

    def scalar(*tensors: Tensor) -> Tensor:
        total = tensors[0].new_zeros(())
        for y in results(function(*tensors)):
            weights = torch.linspace(-1, 1.3, y.numel(), device=y.device, dtype=y.dtype).sin().view(y.shape)
            total = total + (y * weights).sum()
        return total

    return scalar


def _every(tensors: Sequence[Tensor]) -> tuple[int, ...]:
    return tuple(range(len(tensors)))


_FIRST_ORDER: dict[str, Callable[[Function], Function]] = {
    "grad": lambda f: lambda *tensors: grad(weighted(f), argnums=_every(tensors))(*tensors),
    "vjp": lambda f: lambda *tensors: vjp(f, *tensors)[1](pytree.tree_map(torch.cos, f(*tensors))),
    "jvp": lambda f: lambda *tensors: jvp(f, tensors, tuple(t.flip(0).sin() for t in tensors))[1],
    "jacrev": lambda f: lambda *tensors: jacrev(f, argnums=_every(tensors))(*tensors),
    "jacfwd": lambda f: lambda *tensors: jacfwd(f, argnums=_every(tensors))(*tensors),
}


@pytest.mark.parametrize("transform", _FIRST_ORDER)
def test_first_order(operation: Verb, transform: str, target: Target) -> None:
    """grad, vjp, jvp, jacrev and jacfwd agree with PyTorch's call."""
    tensors = [t.detach().double() for t in operation.leaves(target, 3, 5)]
    result = _FIRST_ORDER[transform](operation.on(target))(*tensors)
    expected = _FIRST_ORDER[transform](operation.pytorch)(*tensors)
    assert_close(result, expected)


def assert_close(result: Any, expected: Any, vanishing: bool = False) -> None:
    """Equal to PyTorch's own tolerance for float64, tensor by tensor, and not because everything is 0."""
    pairs = list(zip(pytree.tree_leaves(result), pytree.tree_leaves(expected), strict=True))
    assert vanishing or max(float(other.abs().max()) for _, other in pairs) > 1e-4, "nothing to compare"
    for one, other in pairs:
        torch.testing.assert_close(one, other)


_SECOND_ORDER: dict[str, Callable[[Function, tuple[int, ...]], Function]] = {
    "hessian": hessian,
    "reverse-over-reverse": lambda f, argnums: jacrev(jacrev(f, argnums), argnums),
    "reverse-over-forward": lambda f, argnums: jacrev(jacfwd(f, argnums), argnums),
}


@pytest.mark.parametrize("transform", _SECOND_ORDER)
def test_second_order(operation: Verb, transform: str, target: Target) -> None:
    """Second derivatives, mixed ones included, agree with PyTorch's in float64."""
    tensors = [t.detach().double() for t in operation.leaves(target, 2, 5)]
    result = _SECOND_ORDER[transform](weighted(operation.on(target)), _every(tensors))(*tensors)
    # Not by torch.func: PyTorch 2.13 gets some second derivatives of its own layer_norm wrong there.
    expected = torch.autograd.functional.hessian(weighted(operation.pytorch), tuple(tensors))
    assert_close(result, expected, vanishing=operation.name == "mean_abs" or not operation.bends)


_ARGUMENTS = [
    pytest.param(operation, index, id=f"{operation}-{name}")
    for operation in VERBS.values()
    for index, name in enumerate(operation.arguments)
]


@pytest.mark.parametrize(("operation", "index"), _ARGUMENTS)
def test_forward_mode(operation: Verb, index: int, target: Target) -> None:
    """A tangent on any one argument reaches the result."""
    tensors = [t.detach().double() for t in operation.leaves(target, 3, 5)]
    tangent = torch.randn_like(tensors[index])

    def tangents_of(function: Function) -> list[Tensor]:
        with forward_ad.dual_level():
            inputs = list(tensors)
            inputs[index] = forward_ad.make_dual(inputs[index], tangent)
            duals = [forward_ad.unpack_dual(y) for y in results(function(*inputs))]
        return [torch.zeros_like(d.primal) if d.tangent is None else d.tangent for d in duals]

    assert_close(tangents_of(operation.on(target)), tangents_of(operation.pytorch))


def test_forward_mode_gradcheck(operation: Verb, target: Target) -> None:
    """Forward mode, its batched form and forward over reverse are those of finite differences."""
    tensors = operation.leaves(target, 2, 5, torch.float64)
    function = operation.on(target)
    assert torch.autograd.gradcheck(
        function, tensors, check_forward_ad=True, check_backward_ad=False, check_batched_forward_grad=True
    )
    assert torch.autograd.gradgradcheck(function, tensors, check_fwd_over_rev=True)


# Grid rationale. The arguments that carry the batch dimension, and its position in each.
_BATCHED = [
    pytest.param(operation, dims, id=f"{operation}-{dims}")
    for operation in VERBS.values()
    for dims in product((0, None), repeat=len(operation.arguments))
    if any(dim is not None for dim in dims)
]


@pytest.mark.parametrize(("operation", "in_dims"), _BATCHED)
def test_vmap(operation: Verb, in_dims: tuple[int | None, ...], target: Target) -> None:
    """Batching any of the arguments gives what one call per example gives."""
    examples = [[t.detach().double() for t in operation.leaves(target, 3, 5)] for _ in range(4)]
    columns = list(zip(*examples, strict=True))
    tensors = [column[0] if dim is None else torch.stack(column) for column, dim in zip(columns, in_dims, strict=True)]
    function = operation.on(target)
    batched = results(vmap(function, in_dims=in_dims)(*tensors))
    for i in range(4):
        one = [t if dim is None else t[i] for t, dim in zip(tensors, in_dims, strict=True)]
        assert_close([y[i] for y in batched], results(function(*one)))


_ROW_WISE = [operation for operation in VERBS.values() if operation.batches]


@pytest.mark.parametrize("operation", _ROW_WISE, ids=str)
@pytest.mark.parametrize("in_dim", [0, 1, 2])
@pytest.mark.parametrize("out_dim", [0, -1])
def test_vmap_of_rows_runs_the_kernel(operation: Verb, in_dim: int, out_dim: int, target: Target) -> None:
    """Batching the first argument alone is one call with more rows, with the bits of one call per example."""
    x, *rest = (t.detach() for t in operation.leaves(target, 3, 5))
    x = torch.stack([x, x.flip(0), x.sin(), x + 1]).movedim(0, in_dim)
    function = operation.on(target)
    with operation.ran(target, 1):
        y = vmap(lambda t: function(t, *rest), in_dims=in_dim, out_dims=out_dim)(x)
    with operation.ran(target, 4):
        looped = torch.stack([function(t, *rest) for t in x.unbind(in_dim)], out_dim)
    assert torch.equal(y, looped)


@pytest.mark.parametrize("dim", [0, 1, -1, (0, 2), (1, -3), None])
def test_vmap_of_dimensions(dim: Any, target: Target) -> None:
    """The dimensions of a reduction are those of an example, wherever the batch is."""
    x = torch.randn(2, 3, 4, 5, device=target.device)
    reduced = partial(kf.sum_squared, dim=dim, backend=target.backend)
    expected = torch.stack([t.square().sum(dim) for t in x.unbind(2)])
    torch.testing.assert_close(vmap(reduced, in_dims=2)(x), expected)


def test_vmap_of_0_d_examples_and_nested(verb: str, target: Target) -> None:
    """vmap leaves rows of one dimension, and nests."""
    x = torch.randn(2, 3, 4, 5, device=target.device)
    norm = partial(call, verb, backend=target.backend)
    with target.ran(forward=2):
        assert torch.equal(vmap(vmap(vmap(norm)))(x), norm(x))


def test_vmap_backward(operation: Verb, target: Target) -> None:
    """Gradients flow through a vmapped call."""
    x, *rest = (t.detach().double() for t in operation.leaves(target, 3, 5))
    x = torch.stack([x, x.flip(0), x.sin()])
    tensors = [t.requires_grad_() for t in (x, *rest)]
    in_dims = (0, *[None] * len(rest))

    def gradients_of(function: Function) -> tuple[Tensor, ...]:
        return torch.autograd.grad(weighted(vmap(function, in_dims=in_dims))(*tensors), tensors)

    assert_close(gradients_of(operation.on(target)), gradients_of(operation.pytorch))


def test_per_sample_gradients(operation: Verb, target: Target) -> None:
    """vmap over grad gives the gradient of each example, in every argument."""
    x, *rest = (t.detach().double() for t in operation.leaves(target, 3, 5))
    x = torch.stack([x, x.flip(0), x.sin()])

    def per_sample(function: Function) -> Any:
        gradients = grad(weighted(function), argnums=_every([x, *rest]))
        return vmap(gradients, in_dims=(0, *[None] * len(rest)))(x, *rest)

    assert_close(per_sample(operation.on(target)), per_sample(operation.pytorch))


_OF_NUMBERS: dict[str, Function] = {
    "act_dropout": lambda x, **o: kf.act_dropout(x, "quick_gelu", 0.5, **o),
    "bias_act": lambda x, **o: kf.bias_act(x, torch.ones_like(x), "quick_gelu", dropout_p=0.5, **o),
    "mul_act": lambda x, **o: kf.mul_act(x, x, "quick_gelu", **o),
    "gated_act": lambda x, **o: kf.gated_act(x, x, "quick_gelu", **o),
    "sum_squared": kf.sum_squared,
    "mean_abs": kf.mean_abs,
    "softmax": lambda x, **o: kf.softmax(x, 0, scale=0.5, **o),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", _OF_NUMBERS)
def test_tangents_of_numbers(name: str, dtype: torch.dtype, any_target: Target) -> None:
    """The tangent of a tensor without dimensions has the dtype of the result, whatever Python floats it meets."""
    x = torch.tensor(1.5, device=any_target.device, dtype=dtype)
    y, tangent = jvp(lambda t: _OF_NUMBERS[name](t, backend=any_target.backend), (x,), (torch.ones_like(x),))
    assert y.dtype == tangent.dtype == dtype
    assert y.shape == tangent.shape == ()
