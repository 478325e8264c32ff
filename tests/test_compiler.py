"""Fusion across modules: models and norms compute what they computed, with fewer operators.

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
from compiler_support import T5, Compiled, Gemma, Llama, OLMo, block_of, fused, randn
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


@pytest.mark.covering(1)
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


@pytest.mark.parametrize(("inner", "left"), [("inductor", Fused(norms=1, gates=1, activations=1)), ("eager", Fused())])
def test_inductor_keeps_its_gates(inner: str, left: Fused, monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor gets gates, activations and norms without a weight as they are; other norms become operators for all."""

    def layer(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        y = F.layer_norm(residual + x, (64,), weight)
        return F.silu(y) * F.gelu(y + x[0]), F.layer_norm(residual, (64,)) * (1 + x)

    graphs: list[torch.fx.GraphModule] = []

    def keep(gm: torch.fx.GraphModule, example_inputs: Any, **options: Any) -> Any:
        graphs.append(gm)
        return gm

    torch.compile(layer, backend=keep)(randn(4, 64), randn(4, 64), randn(64))
    monkeypatch.setattr("torch._dynamo.backends.registry.lookup_backend", lambda name: keep)
    kf.compiler.backend(inner)(graphs[0], [])
    assert kf.compiler.fuse(graphs[0]) == left


@pytest.mark.parametrize(("rows", "dynamic", "norms"), [(4, False, 0), (1 << 15, False, 1), (4, True, 1)])
def test_a_compiler_keeps_small_norms_of_a_gpu(rows: int, dynamic: bool, norms: int) -> None:
    """A device without kernels stands for the GPU; rows that may change are not counted, and no guard is added."""
    found: list[Fused] = []

    def keep(gm: torch.fx.GraphModule, example_inputs: Any) -> Any:
        found.append(kf.compiler.fuse(gm, compiled=True))
        return gm

    compiled = torch.compile(nn.LayerNorm(64, device="meta"), backend=keep, dynamic=dynamic)
    compiled(torch.empty(rows, 64, device="meta"))
    compiled(torch.empty(rows + dynamic, 64, device="meta"))
    assert found == [Fused(norms=norms)]


@pytest.mark.slow
def test_pass_of_inductor_fuses() -> None:
    """As Inductor's own pre-gradient pass it makes kernels of ours run, and its key is the same in every process."""
    block = block_of(nn.LayerNorm(64))
    args = (randn(4, 64), randn(4, 64))
    options = {"pre_grad_custom_pass": kf.compiler.inductor_pass()}
    with CPU.ran(forward=None, backward=None):
        y, h = torch.compile(block, fullgraph=True, options=options)(*args)
        torch.autograd.backward((y, h), (torch.randn_like(y), torch.randn_like(h)))
    torch.testing.assert_close((y, h), block(*args))
    assert kf.compiler.inductor_pass().uuid() == kf.compiler.inductor_pass().uuid() is not None


@pytest.mark.parametrize("kind", [Llama, T5, Gemma, OLMo])
def test_bits_of_written_out_norms(kind: type[Llama]) -> None:
    """In bf16 at most one element in a thousand differs from the written-out norm, by one unit in the last place."""
    norm = kind(512, torch.bfloat16)
    args = randn(128, 512, dtype=torch.bfloat16), randn(128, 512, dtype=torch.bfloat16)
    compiled = Compiled(block_of(norm))
    ours, theirs = compiled(*args), block_of(norm)(*args)
    assert compiled.fused == Fused(add_norms=1)
    y, expected = (t[0].detach().view(torch.int16).int() for t in (ours, theirs))
    assert (y - expected).abs().max() <= 1
    assert (y != expected).float().mean() <= 1e-3
    assert torch.equal(ours[1], theirs[1])


def test_nothing_is_left_of_a_norm() -> None:
    """The sum of Gemma's weight and one is not computed any more either."""
    compiled = Compiled(block_of(Gemma(64, torch.bfloat16)))
    compiled(randn(4, 64, dtype=torch.bfloat16), randn(4, 64, dtype=torch.bfloat16))
    staged = torch.ops.kernel_fusion.staged_row_norm.default
    assert [target for target in compiled.calls if target is not operator.getitem] == [staged]


@pytest.mark.parametrize("weight", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("stream", [torch.float32, torch.bfloat16])
def test_dtypes_of_written_out_norms(stream: torch.dtype, weight: torch.dtype) -> None:
    """With a residual stream or a weight of another dtype the results have the dtypes that they had."""
    norm = Llama(64, weight)
    args = randn(4, 64, dtype=torch.bfloat16), randn(4, 64, dtype=stream)
    compiled = Compiled(block_of(norm))
    ours, theirs = compiled(*args), block_of(norm)(*args)
    assert compiled.fused == Fused(add_norms=1)
    assert [t.dtype for t in ours] == [t.dtype for t in theirs]
    torch.testing.assert_close(ours, theirs, rtol=1e-2, atol=1e-5)


@pytest.mark.parametrize("module", [nn.LayerNorm, nn.RMSNorm, kf.FusedLayerNorm, kf.FusedRMSNorm])
def test_modules_fuse_with_their_addition(module: type[nn.Module]) -> None:
    """PyTorch's norm modules and ours."""
    assert fused(block_of(module(64)), randn(4, 64), randn(4, 64)) == Fused(add_norms=1)


def test_norm_over_several_dimensions_fuses() -> None:
    """The normalised shape may have more than one dimension."""
    assert fused(block_of(nn.LayerNorm((4, 8))), randn(3, 4, 8), randn(3, 4, 8)) == Fused(add_norms=1)


def test_two_norms_of_one_sum() -> None:
    """The second reads the sum from the first."""
    first, second = nn.LayerNorm(8), nn.RMSNorm(8)

    def both(x: Tensor, residual: Tensor) -> tuple[Tensor, ...]:
        h = x + residual
        return first(h), second(h), h

    assert fused(both, randn(4, 8), randn(4, 8)) == Fused(add_norms=1, norms=1)


def test_gradients_of_all_users_of_the_sum() -> None:
    """Gradients that reach the sum by other ways are added to the norm's."""
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
    block = block_of(norm)
    compiled = Compiled(block, dynamic=True)
    for rows in (3, 5, 64):
        args = torch.randn(2, rows, 8), torch.randn(2, rows, 8)
        torch.testing.assert_close(compiled(*args), block(*args))
    assert (compiled.graphs, compiled.fused) == (1, Fused(add_norms=1))


def test_checkpointed_blocks_fuse() -> None:
    """The graph within a checkpoint is a graph, too."""
    block, args = block_of(nn.LayerNorm(8)), (randn(4, 8), randn(4, 8))

    def checkpointed(x: Tensor, residual: Tensor) -> Any:
        return checkpoint(block, x, residual, use_reentrant=False)

    compiled = Compiled(checkpointed, "aot_eager")
    torch.testing.assert_close(compiled(*args), block(*args))
    assert compiled.fused == Fused(add_norms=1)
