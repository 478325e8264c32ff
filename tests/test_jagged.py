"""Jagged nested tensors: our kernels read their values, and the results are jagged with the same offsets."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support import CPU, EAGER
from torch import Tensor
from torch.utils import _pytree as pytree

import kernel_fusion as kf
from kernel_fusion.errors import BackendUnavailableError

_LENGTHS = (3, 1, 0, 4)

# Each verb of two rows of 8 columns, of a weight, and with every stage.
_CALLS: dict[str, Callable[[Tensor, Tensor, Tensor], Any]] = {
    "layer_norm": lambda x, r, w: kf.layer_norm(x, 8, w, w),
    "rms_norm": lambda x, r, w: kf.rms_norm(x, (8,), w),
    "layer_norm_relu": lambda x, r, w: kf.layer_norm(x, 8, w, activation="relu"),
    "add_layer_norm": lambda x, r, w: kf.add_layer_norm(x, r, 8, w, pre_activation="gelu"),
    "add_rms_norm": lambda x, r, w: kf.add_rms_norm(x, r, 8, w, dropout_p=0.5),
    "gated_rms_norm": lambda x, r, w: kf.gated_rms_norm(x, r, 8, w),
    "gated_in_groups": lambda x, r, w: kf.gated_layer_norm(x, r, 8, w, group_size=4),
    "modulated_rms_norm": lambda x, r, w: kf.modulated_rms_norm(x, 8, w),
    "add_act": lambda x, r, w: kf.add_act(x, r, "relu"),
    "mul_act": lambda x, r, w: kf.mul_act(w, x, "tanh"),
    "bias_act": lambda x, r, w: kf.bias_act(x, w, "gelu", dropout_p=0.25),
    "act_dropout": lambda x, r, w: kf.act_dropout(x, "gelu", 0.5),
    "gated_act": lambda x, r, w: kf.gated_act(x, r, "silu"),
    "sum_squared": lambda x, r, w: kf.sum_squared(x, -1, keepdim=True),
    "mean_abs": lambda x, r, w: kf.mean_abs(x, -1),
    "softmax": lambda x, r, w: kf.softmax(x, scale=0.5),
}


def jagged(*shape: int) -> Tensor:
    """A jagged tensor of examples of several lengths, one of them empty, that requires gradients."""
    values = [torch.randn(length, *shape) for length in _LENGTHS]
    return torch.nested.nested_tensor(values, layout=torch.jagged, requires_grad=True)


def rows(x: Tensor) -> Tensor:
    """A jagged tensor of the offsets of `x` and other values, a leaf."""
    return torch.nested.nested_tensor_from_jagged(torch.randn_like(x.values()), x.offsets()).detach().requires_grad_()


def values(tree: Any) -> list[Tensor]:
    """The rows of every tensor of a result."""
    return [t.values() if t.is_nested else t for t in pytree.tree_leaves(tree)]


@pytest.mark.parametrize("name", _CALLS)
def test_kernels_read_the_values(name: str) -> None:
    """Results and gradients are those of the call on the values, to the bit, and as jagged as the input."""
    x, w = jagged(8), torch.randn(8, requires_grad=True)
    r = rows(x)
    flat = [t.values().detach().requires_grad_() for t in (x, r)]
    torch.manual_seed(0)
    expected = values(_CALLS[name](*flat, w))
    dy = [torch.randn_like(t) for t in expected]
    torch.manual_seed(0)
    with CPU.ran(backward=1):
        results = _CALLS[name](x, r, w)
        ours = torch.autograd.grad(values(results), [x, r, w], dy, allow_unused=True)
    theirs = torch.autograd.grad(expected, [*flat, w], dy, allow_unused=True)
    for result in pytree.tree_leaves(results):
        assert result.shape[:2] == x.shape[:2]
        assert torch.equal(result.offsets(), x.offsets())
    assert all(map(torch.equal, values(results), expected))
    for one, other in zip(ours, theirs, strict=True):
        assert (one is None) == (other is None)
        assert one is None or torch.equal(one.values() if one.is_nested else one, other)


def test_modules_hand_a_jagged_stream_on() -> None:
    """Modules take jagged tensors, also where a stream begins."""
    x = jagged(8)
    norm, act = kf.FusedAddLayerNorm(8), kf.FusedGatedAct("silu")
    with CPU.ran(forward=3):
        y, h = norm(x)
        z = act(norm(y, h).output)
    assert z.shape == (*x.shape[:2], 4)
    assert torch.equal(h.values(), x.values())


def test_one_graph_when_compiled() -> None:
    """Dynamo traces verbs of jagged tensors without a break, and the result is the call's."""

    def block(x: Tensor, r: Tensor, w: Tensor) -> Tensor:
        y, h = kf.add_layer_norm(x, r, 8, w)
        return kf.bias_act(y, w, "gelu") + h

    x, w = jagged(8), torch.randn(8)
    r = rows(x)
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")(x, r, w)
    assert torch.equal(compiled.values(), block(x, r, w).values())


def test_a_named_backend_reads_the_values() -> None:
    """A backend that is asked for serves jagged tensors, or says why not."""
    x = jagged(8)
    with CPU.ran():
        y = kf.layer_norm(x, 8, backend="cpu")
    assert torch.equal(y.values(), kf.layer_norm(x.values(), 8))
    with pytest.raises(BackendUnavailableError, match="the input is on cpu"):
        kf.layer_norm(x, 8, backend="cuda")


def test_a_norm_over_the_rows_of_an_example_is_pytorchs() -> None:
    """Normalised over the ragged dimension too, a tensor takes PyTorch's rule."""
    values = torch.randn(5, 8)
    x = torch.nested.nested_tensor_from_jagged(values, torch.tensor([0, 3, 5]))
    with EAGER.ran():
        y = kf.layer_norm(x, x.shape[1:])
    torch.testing.assert_close(y.values()[:3], F.layer_norm(values[:3], (3, 8)))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.jagged, torch.strided], ids=str)
@pytest.mark.parametrize("dim", [-2, 1, 2, 3])
def test_softmax_over_any_dimension(dim: int, layout: torch.layout) -> None:
    """Of a nested tensor, a dimension that no kernel knows is PyTorch's, scaled, unless a backend is asked for."""
    x = torch.nested.nested_tensor([torch.randn(n, 3, 8) for n in (2, 5, 3)], layout=layout)
    found, wanted = kf.softmax(x, dim, scale=0.5), torch.softmax(x * 0.5, dim)
    for one, two in zip(found.unbind(), wanted.unbind(), strict=True):
        torch.testing.assert_close(one, two)
    if dim != 3:
        with pytest.raises(BackendUnavailableError, match="no kernels have rows of a nested `input`"):
            kf.softmax(x, dim, backend="cpu")
        with pytest.raises(RuntimeError, match="takes no `mask` beside dim"):
            kf.softmax(x, dim, mask=torch.ones(8, dtype=torch.bool))


@pytest.mark.parametrize(
    "function",
    [
        lambda x: kf.add_act(x, torch.randn(len(_LENGTHS), 1, 8), "relu"),
        lambda x: kf.sum_squared(x, 0),
        lambda x: kf.add_layer_norm(x, x, x.shape[1:]),
    ],
    ids=["per example", "sum over examples", "norm over rows"],
)
def test_what_mixes_rows_runs_no_kernel(function: Callable[[Tensor], Any]) -> None:
    """A call that is not the same for every row is left to PyTorch, whether it has a rule or an error."""
    with EAGER.ran(), suppress(RuntimeError, NotImplementedError, ValueError, TypeError):
        function(jagged(8))
