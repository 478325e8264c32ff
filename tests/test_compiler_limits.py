"""Fusion across modules: what the pass leaves alone; dropout, gates, biases and activations."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compiler_support import Compiled, block_of, fused, randn
from torch import Tensor, nn

import kernel_fusion as kf
from kernel_fusion.compiler import Fused


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> None:
    """No graph of another test is reused."""
    torch._dynamo.reset()


# These must not fuse.


def test_sums_of_different_shapes_stay() -> None:
    """Positions that are added to every sequence are no residual; the norm alone fuses."""
    assert fused(block_of(nn.LayerNorm(8)), randn(2, 4, 8), randn(1, 4, 8)) == Fused(norms=1)


def test_sum_in_place_stays() -> None:
    """A sum written to its operand stays."""
    norm = nn.LayerNorm(8)

    def block(x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        h = residual * 1.0
        h += x
        return norm(h), h

    assert fused(block, randn(4, 8), randn(4, 8)) == Fused(norms=1)


def test_write_between_sum_and_norm_separates_them() -> None:
    """The norm sees what was written to the sum."""
    norm = nn.LayerNorm(8)

    def block(x: Tensor, residual: Tensor) -> Tensor:
        h = residual + x
        h.mul_(2.0)
        return norm(h)

    assert fused(block, torch.randn(4, 8), torch.randn(4, 8)) == Fused(norms=1)


def test_write_between_dropout_and_sum_separates_them() -> None:
    """Dropout outside training is its input; a write to that afterwards must stay before the sum."""
    norm = nn.LayerNorm(8)

    def block(x: Tensor, residual: Tensor) -> Tensor:
        source = x * 1.0
        dropped = F.dropout(source, 0.0, training=True)
        source.zero_()
        return norm(residual + dropped)

    assert fused(block, torch.randn(4, 8), torch.randn(4, 8)) == Fused(add_norms=1)


def test_autocast_between_sum_and_norm_separates_them() -> None:
    """A norm in another autocast region stays there."""
    norm = nn.LayerNorm(8)

    def block(x: Tensor, residual: Tensor) -> Tensor:
        h = residual + x
        with torch.autocast("cpu", torch.bfloat16):
            return norm(h)

    assert fused(block, randn(4, 8), randn(4, 8)) == Fused(norms=1)


@pytest.mark.parametrize(
    "variance",
    [
        lambda h: h.pow(3).mean(-1, keepdim=True),
        lambda h: h.pow(2).mean(0, keepdim=True),
        lambda h: h.pow(2).mean(),
        lambda h: (h * h.detach()).mean(-1, keepdim=True),
        lambda h: h.pow(2).mean(-1)[..., None].exp(),
    ],
)
def test_other_arithmetic_stays(variance: Callable[[Tensor], Tensor]) -> None:
    """Whatever is no mean square of each row."""

    def norm(h: Tensor) -> Tensor:
        return h * torch.rsqrt(variance(h.abs()) + 1e-6)

    assert fused(block_of(norm), randn(4, 8), randn(4, 8)) == Fused()


def test_norm_computed_in_bf16_stays() -> None:
    """The kernels accumulate in float32, which is not what is written there."""

    def norm(h: Tensor) -> Tensor:
        return h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)

    args = randn(4, 8, dtype=torch.bfloat16), randn(4, 8, dtype=torch.bfloat16)
    assert fused(block_of(norm), *args) == Fused()


def test_norm_with_other_readers_stays() -> None:
    """If something else reads the variance, nothing would be saved."""

    def norm(h: Tensor) -> Tensor:
        variance = h.pow(2).mean(-1, keepdim=True)
        return h * torch.rsqrt(variance + 1e-6) + variance

    assert fused(block_of(norm), randn(4, 8), randn(4, 8)) == Fused()


def test_product_that_is_no_norm_stays() -> None:
    """With one column, the squared root has the shape of the row."""

    def squared_root(h: Tensor) -> Tensor:
        root = torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)
        return root * root

    assert fused(block_of(squared_root), randn(4, 1), randn(4, 1)) == Fused()


def test_transformed_functions_stay() -> None:
    """Nothing is moved out of `torch.func.vmap`; the norm within it fuses."""
    norm = nn.LayerNorm(8)

    def block(x: Tensor, residual: Tensor) -> Tensor:
        h = residual + x
        return torch.func.vmap(lambda row: norm(row))(h)

    assert fused(block, torch.randn(4, 8), torch.randn(4, 8)) == Fused(norms=1)


def test_graph_without_shapes_stays() -> None:
    """A graph that says nothing about its values, as of `symbolic_trace`, is left alone."""
    traced = torch.fx.symbolic_trace(nn.Sequential(nn.LayerNorm(8), nn.GELU()))
    assert kf.compiler.fuse(traced) == Fused()


# Dropout.


def test_dropout_before_the_sum_fuses() -> None:
    """Elements are dropped at the rate, the others scaled, by the seed; and the gradient has the same mask."""
    compiled = Compiled(_block_with_dropout(nn.LayerNorm(64), training=True))
    x, residual = randn(64, 64), randn(64, 64)
    torch.manual_seed(3)
    y, h = compiled(x, residual)
    assert compiled.fused == Fused(add_norms=1)
    kept = (h - residual).abs() > 0
    assert abs(kept.float().mean() - 0.75) < 6 * (0.75 * 0.25 / kept.numel()) ** 0.5
    torch.testing.assert_close(h, residual + kept * x / 0.75)
    torch.testing.assert_close(y, F.layer_norm(h, (64,)))
    (dx,) = torch.autograd.grad(h, x, torch.ones_like(h))
    torch.testing.assert_close(dx, kept / 0.75)
    torch.manual_seed(3)
    assert torch.equal(compiled(x, residual)[1], h)


def test_dropout_outside_training_is_left_out() -> None:
    """Nothing is drawn, and nothing is dropped."""
    block = _block_with_dropout(nn.LayerNorm(64), training=False)
    state = torch.random.get_rng_state()
    assert fused(block, randn(4, 64), randn(4, 64)) == Fused(add_norms=1)
    torch.random.set_rng_state(state)
    compiled = Compiled(block)
    compiled(torch.zeros(4, 64), torch.zeros(4, 64))
    assert torch.equal(torch.random.get_rng_state(), state)


def _block_with_dropout(norm: nn.Module, training: bool) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
    def block(x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        h = F.dropout(x, 0.25, training) + residual
        return norm(h), h

    return block


# Gates, biases, activations.


@pytest.mark.parametrize(
    "act", [F.silu, F.gelu, torch.relu, torch.tanh, F.mish, torch.sigmoid, lambda g: F.gelu(g, approximate="tanh")]
)
@pytest.mark.parametrize("gate_first", [True, False])
def test_gates_fuse(act: Callable[[Tensor], Tensor], gate_first: bool) -> None:
    """act(gate) * value, in either order, also of the halves of one tensor."""

    def gated(x: Tensor) -> Tensor:
        gate, value = x.chunk(2, -1)
        return act(gate) * value if gate_first else value * act(gate)

    assert fused(gated, randn(4, 16)) == Fused(gates=1)


def test_gate_with_another_reader_stays() -> None:
    """The activation would be computed twice."""

    def gated(gate: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        opened = F.silu(gate)
        return opened * value, opened

    assert fused(gated, randn(4, 8), randn(4, 8)) == Fused()


@pytest.mark.parametrize("act", [F.gelu, F.silu, torch.relu, torch.tanh])
def test_biases_fuse_with_activations(act: Callable[[Tensor], Tensor]) -> None:
    """A bias that is added, and one of a linear layer."""
    linear, bias = nn.Linear(8, 16), randn(8)
    assert fused(lambda x: act(x + bias), randn(4, 8)) == Fused(activations=1)
    assert fused(lambda x: act(linear(x)), randn(4, 8)) == Fused(activations=1)


def test_dropout_after_an_activation_fuses() -> None:
    """dropout(relu(x)): what is not dropped is scaled."""
    compiled, x = Compiled(lambda x: F.dropout(torch.relu(x), 0.5)), randn(64, 64)
    y = compiled(x)
    assert compiled.fused == Fused(activations=1)
    torch.testing.assert_close(y, torch.where(y > 0, 2 * torch.relu(x), 0))
    assert abs((y > 0).float().mean() - 0.25) < 0.05


def test_activation_alone_stays() -> None:
    """Without a bias or dropout there is nothing to fuse."""
    assert fused(lambda x: F.gelu(x.sin()), randn(4, 8)) == Fused()


def test_linear_layer_that_is_read_elsewhere_stays() -> None:
    """Its result is needed with the bias."""
    linear = nn.Linear(8, 8)

    def block(x: Tensor) -> tuple[Tensor, Tensor]:
        h = linear(x)
        return F.gelu(h), h

    assert fused(block, randn(4, 8)) == Fused()


def test_activation_in_place_stays() -> None:
    """It writes to its argument, which may be read elsewhere."""
    linear = nn.Linear(8, 8)
    assert fused(lambda x: F.relu(linear(x), inplace=True), randn(4, 8)) == Fused()


_INDICES = torch.tensor([0, 2])
# Calls that write to their first argument, and say so neither by an underscore nor by `inplace=True`.
_WRITES: dict[str, Callable[[Tensor], Any]] = {
    "hardswish": lambda h: F.hardswish(h, True),
    "leaky_relu": nn.LeakyReLU(0.3, inplace=True),
    "elu": nn.ELU(inplace=True),
    "threshold": nn.Threshold(0.0, 7.0, inplace=True),
    "packet": lambda h: torch.ops.kf_order.twice(h),
    "overload": lambda h: torch.ops.kf_order.twice.default(h),
    "max_norm": lambda h: F.embedding(_INDICES, h, max_norm=0.5),
    "iadd": lambda h: h.__iadd__(1.0),
    "out": lambda h: torch.mul(h, 2.0, out=h),
}


@pytest.fixture(scope="module")
def _operator() -> Iterator[None]:
    """An operator that writes, as inference engines define them."""
    library = torch.library.Library("kf_order", "FRAGMENT")
    library.define("twice(Tensor(a!) h) -> ()")

    def twice(h: Tensor) -> None:
        h.mul_(2.0)

    library.impl("twice", twice, "CPU")
    library.impl("twice", lambda h: None, "Meta")
    yield
    library._destroy()


@pytest.mark.usefixtures("_operator")
@pytest.mark.parametrize("write", _WRITES.values(), ids=_WRITES)
@pytest.mark.parametrize("gate", [False, True], ids=["norm", "gate"])
def test_calls_that_write_without_saying_so(write: Callable[[Tensor], Any], gate: bool) -> None:
    """Nothing moves across a call that is not known to be pure: the sum is written to before its norm, not after it."""
    norm = nn.LayerNorm(8)

    def block(x: Tensor, residual: Tensor) -> Tensor:
        h = residual + x
        g = F.silu(h)
        write(h)
        return g * residual if gate else norm(h)

    with torch.no_grad():
        found = fused(block, torch.randn(4, 8), torch.randn(4, 8))
    assert found == (Fused() if gate else Fused(norms=1))


def test_pure_calls_are_no_barrier() -> None:
    """Functions, methods and operators that write nothing may stand between a sum and its norm."""
    norm = nn.LayerNorm(8)

    def block(x: Tensor, residual: Tensor, weight: Tensor) -> Tensor:
        h = residual + x
        others = F.linear(x, weight).view(2, 2, 8).softmax(-1).sum(), torch.cat((x, x)).mean(), F.relu(x, False).max()
        others += torch.ops.aten.add(x, 1.0).amax(), F.embedding(_INDICES, weight).norm(), torch.linalg.norm(x)
        return norm(h) + sum(others)

    with torch.no_grad():
        assert fused(block, torch.randn(4, 8), torch.randn(4, 8), torch.randn(8, 8)) == Fused(add_norms=1)
