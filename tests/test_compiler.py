"""Fusion across modules: what the pass replaces, what it leaves alone, and that models compute what they computed.

Dynamo's backend "eager" runs the graph as it is, so that what differs is the pass's doing; Inductor is tested once.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support import CPU
from tiny_models import tiny
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import kernel_fusion as kf
from kernel_fusion.compiler import Fused
from kernel_fusion.testing import oracle


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> None:
    """No graph of another test is reused."""
    torch._dynamo.reset()


class Compiled:
    """A function or module that `torch.compile` runs with the pass, and what the pass did."""

    def __init__(self, function: Callable[..., Any], inner: str = "eager", **options: Any) -> None:
        self.fused = Fused()
        self.graphs = 0
        self.calls: list[Any] = []

        def fusing(gm: torch.fx.GraphModule, example_inputs: Any) -> Any:
            self.fused += kf.compiler.fuse(gm)
            self.graphs += 1
            gm.graph.lint()
            self.calls += [node.target for node in gm.graph.nodes if node.op.startswith("call")]
            return torch._dynamo.lookup_backend(inner)(gm, example_inputs)

        self.call = torch.compile(function, backend=fusing, fullgraph=True, **options)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The function's value."""
        return self.call(*args, **kwargs)


def fused(function: Callable[..., Any], *args: Any) -> Fused:
    """What the pass does to a function, whose value must stay as it is within a few roundings."""
    compiled = Compiled(function)
    torch.testing.assert_close(compiled(*args), function(*args), rtol=2e-2, atol=1e-5)
    return compiled.fused


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """A leaf with gradients."""
    return torch.randn(shape).to(dtype).requires_grad_()


# Whole models.

_COUNTS = {
    "llama": Fused(add_norms=4, norms=1, gates=2),
    "qwen3": Fused(add_norms=4, norms=5, gates=2),
    "gemma3": Fused(add_norms=4, norms=9, gates=2),
    "gpt2": Fused(add_norms=4, norms=1),
    "vit": Fused(add_norms=4, norms=1, activations=2),
    "t5": Fused(add_norms=10, norms=2),
    "whisper": Fused(add_norms=10, norms=2, activations=4),
    "bert": Fused(add_norms=4, norms=2, activations=3),
}


def _run(call: Callable[..., Any], model: nn.Module, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Logits and every gradient, for random cotangents that depend on nothing but the shape."""
    model.zero_grad()
    dtype = next(model.parameters()).dtype
    logits = call(**{name: t.to(dtype) if t.is_floating_point() else t for name, t in inputs.items()}).logits
    cotangent = torch.randn(logits.shape, generator=torch.Generator().manual_seed(1))
    logits.backward(cotangent.to(dtype))
    return {"logits": logits.detach()} | {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", _COUNTS)
def test_models_compute_the_same(name: str, dtype: torch.dtype) -> None:
    """Norms fuse with their additions, and logits and gradients are as near float64 as PyTorch's twice over."""
    model, inputs = tiny(name)
    model = model.to(dtype)
    wide = copy.deepcopy(model).double()
    compiled = Compiled(model)
    with CPU.ran(forward=None, backward=None):
        ours = _run(compiled, model, inputs)
    theirs, exact = _run(model, model, inputs), _run(wide, wide, inputs)
    assert compiled.graphs == 1
    assert compiled.fused == _COUNTS[name]
    assert ours.keys() == theirs.keys() == exact.keys()
    judged = [oracle.judge(n, [(ours[n], exact[n].numpy(), theirs[n])]) for n in ours]
    assert not [each for each in judged if not each.ok]


@pytest.mark.slow
def test_inductor_compiles_what_was_fused() -> None:
    """Inductor takes the graph whole, forward and backward."""
    model, inputs = tiny("llama")
    compiled = Compiled(model, "inductor")
    with CPU.ran(forward=None, backward=None):
        ours = _run(compiled, model, inputs)
    for name, theirs in _run(model, model, inputs).items():
        torch.testing.assert_close(ours[name], theirs, rtol=1e-3, atol=1e-4)


@pytest.mark.slow
def test_pass_of_inductor_fuses() -> None:
    """As Inductor's own pre-gradient pass it makes kernels of ours run, and its key is the same in every process."""
    block = _block(nn.LayerNorm(64))
    args = (randn(4, 64), randn(4, 64))
    options = {"pre_grad_custom_pass": kf.compiler.inductor_pass()}
    with CPU.ran(forward=None, backward=None):
        y, h = torch.compile(block, fullgraph=True, options=options)(*args)
        torch.autograd.backward((y, h), (torch.randn_like(y), torch.randn_like(h)))
    torch.testing.assert_close((y, h), block(*args))
    assert kf.compiler.inductor_pass().uuid() == kf.compiler.inductor_pass().uuid() is not None


def _block(norm: Callable[[Tensor], Tensor]) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """A residual addition and a norm."""

    def block(x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        h = residual + x
        return norm(h), h

    return block


# Norms, one by one.


class Llama(nn.Module):
    """The RMSNorm of Llama: rounded to the input's dtype, then multiplied by the weight."""

    def __init__(self, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, dtype=dtype))
        self.eps = 1e-6

    def forward(self, x: Tensor) -> Tensor:
        """As in transformers."""
        h = x.to(torch.float32)
        h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * h.to(x.dtype)


class T5(Llama):
    """The same arithmetic, where the product converts."""

    def forward(self, x: Tensor) -> Tensor:
        """As in transformers."""
        h = x * torch.rsqrt(x.to(torch.float32).pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * h.to(self.weight.dtype)


class Gemma(Llama):
    """The weight is stored around zero, and everything is rounded once."""

    def forward(self, x: Tensor) -> Tensor:
        """As in transformers."""
        h = x.float()
        h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)
        return (h * (1.0 + self.weight.float())).type_as(x)


class OLMo(Llama):
    """The weight multiplies before the conversion."""

    def forward(self, x: Tensor) -> Tensor:
        """As in transformers."""
        h = x.to(torch.float32)
        h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)
        return (self.weight * h).to(x.dtype)


@pytest.mark.parametrize("kind", [Llama, T5, Gemma, OLMo])
def test_bits_of_written_out_norms(kind: type[Llama]) -> None:
    """In bf16 at most one element in a thousand differs from the written-out norm, by one unit in the last place."""
    norm = kind(512, torch.bfloat16)
    args = randn(128, 512, dtype=torch.bfloat16), randn(128, 512, dtype=torch.bfloat16)
    compiled = Compiled(_block(norm))
    ours, theirs = compiled(*args), _block(norm)(*args)
    assert compiled.fused == Fused(add_norms=1)
    y, expected = (t[0].detach().view(torch.int16).int() for t in (ours, theirs))
    assert (y - expected).abs().max() <= 1
    assert (y != expected).float().mean() <= 1e-3
    assert torch.equal(ours[1], theirs[1])


def test_nothing_is_left_of_a_norm() -> None:
    """The sum of Gemma's weight and one is not computed any more either."""
    compiled = Compiled(_block(Gemma(64, torch.bfloat16)))
    compiled(randn(4, 64, dtype=torch.bfloat16), randn(4, 64, dtype=torch.bfloat16))
    staged = torch.ops.kernel_fusion.staged_row_norm.default
    assert [target for target in compiled.calls if target is not operator.getitem] == [staged]


@pytest.mark.parametrize("weight", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("stream", [torch.float32, torch.bfloat16])
def test_dtypes_of_written_out_norms(stream: torch.dtype, weight: torch.dtype) -> None:
    """With a residual stream or a weight of another dtype the results have the dtypes that they had."""
    norm = Llama(64, weight)
    args = randn(4, 64, dtype=torch.bfloat16), randn(4, 64, dtype=stream)
    compiled = Compiled(_block(norm))
    ours, theirs = compiled(*args), _block(norm)(*args)
    assert compiled.fused == Fused(add_norms=1)
    assert [t.dtype for t in ours] == [t.dtype for t in theirs]
    torch.testing.assert_close(ours, theirs, rtol=1e-2, atol=1e-5)


@pytest.mark.parametrize("module", [nn.LayerNorm, nn.RMSNorm, kf.FusedLayerNorm, kf.FusedRMSNorm])
def test_modules_fuse_with_their_addition(module: type[nn.Module]) -> None:
    """PyTorch's norm modules and ours."""
    assert fused(_block(module(64)), randn(4, 64), randn(4, 64)) == Fused(add_norms=1)


def test_norm_over_several_dimensions_fuses() -> None:
    """The normalised shape may have more than one dimension."""
    assert fused(_block(nn.LayerNorm((4, 8))), randn(3, 4, 8), randn(3, 4, 8)) == Fused(add_norms=1)


def test_two_norms_of_one_sum() -> None:
    """The second reads the sum from the first."""
    first, second = nn.LayerNorm(8), nn.RMSNorm(8)

    def both(x: Tensor, residual: Tensor) -> tuple[Tensor, ...]:
        h = x + residual
        return first(h), second(h), h

    assert fused(both, randn(4, 8), randn(4, 8)) == Fused(add_norms=1, norms=1)


def test_gradients_of_all_users_of_the_sum() -> None:
    """What arrives at the sum by other ways is added to the gradient of the norm."""
    norm = Gemma(64, torch.float32)

    def block(x: Tensor, residual: Tensor) -> Tensor:
        h = residual + x
        return norm(h).sin() + h.cos()

    args = randn(4, 64), randn(4, 64)
    cotangent = torch.randn(4, 64)
    leaves = (*args, norm.weight)
    ours = torch.autograd.grad(Compiled(block)(*args), leaves, cotangent)
    torch.testing.assert_close(ours, torch.autograd.grad(block(*args), leaves, cotangent))


@pytest.mark.parametrize("norm", [nn.LayerNorm(8), Llama(8, torch.float32)], ids=["called", "written out"])
def test_one_graph_serves_all_row_counts(norm: nn.Module) -> None:
    """With dynamic shapes, where eps is an input too, nothing is compiled again, and nothing loses its fusion."""
    block = _block(norm)
    compiled = Compiled(block, dynamic=True)
    for rows in (3, 5, 64):
        args = torch.randn(2, rows, 8), torch.randn(2, rows, 8)
        torch.testing.assert_close(compiled(*args), block(*args))
    assert (compiled.graphs, compiled.fused) == (1, Fused(add_norms=1))


def test_checkpointed_blocks_fuse() -> None:
    """The graph within a checkpoint is a graph, too."""
    block, args = _block(nn.LayerNorm(8)), (randn(4, 8), randn(4, 8))

    def checkpointed(x: Tensor, residual: Tensor) -> Any:
        return checkpoint(block, x, residual, use_reentrant=False)

    compiled = Compiled(checkpointed, "aot_eager")
    torch.testing.assert_close(compiled(*args), block(*args))
    assert compiled.fused == Fused(add_norms=1)


# What must not fuse.


def test_sums_of_different_shapes_stay() -> None:
    """Positions that are added to every sequence are no residual; the norm alone fuses."""
    assert fused(_block(nn.LayerNorm(8)), randn(2, 4, 8), randn(1, 4, 8)) == Fused(norms=1)


def test_sum_in_place_stays() -> None:
    """What is written to its operand stays where it is."""
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

    assert fused(_block(norm), randn(4, 8), randn(4, 8)) == Fused()


def test_norm_computed_in_bf16_stays() -> None:
    """The kernels accumulate in float32, which is not what is written there."""

    def norm(h: Tensor) -> Tensor:
        return h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)

    args = randn(4, 8, dtype=torch.bfloat16), randn(4, 8, dtype=torch.bfloat16)
    assert fused(_block(norm), *args) == Fused()


def test_norm_with_other_readers_stays() -> None:
    """If something else reads the variance, nothing would be saved."""

    def norm(h: Tensor) -> Tensor:
        variance = h.pow(2).mean(-1, keepdim=True)
        return h * torch.rsqrt(variance + 1e-6) + variance

    assert fused(_block(norm), randn(4, 8), randn(4, 8)) == Fused()


def test_product_that_is_no_norm_stays() -> None:
    """With one column, the squared root has the shape of the row."""

    def squared_root(h: Tensor) -> Tensor:
        root = torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)
        return root * root

    assert fused(_block(squared_root), randn(4, 1), randn(4, 1)) == Fused()


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
