"""`torch.fx`: verbs and modules are traced as calls of verbs, and tools that are built on it take our modules."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from support import CPU
from test_interop import CALLS, results
from test_new_modules import MODULES, made
from torch import Tensor, fx, nn

import kernel_fusion as kf
from kernel_fusion import functional

_TRACED = {name: call for name, call in CALLS.items() if not name.startswith("ops.")}


def calls(graph: fx.Graph) -> list[Any]:
    """The functions that a graph calls."""
    return [node.target for node in graph.nodes if node.op == "call_function"]


class _Verb(nn.Module):
    """A verb as the forward of a module, with a weight of its own."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.weight = nn.Parameter(torch.randn(8))

    def forward(self, x: Tensor, y: Tensor) -> Any:
        """The call on the weight and two tensors."""
        return _TRACED[self.name](x, y, self.weight)


@pytest.mark.parametrize("name", _TRACED)
def test_a_proxy_records_a_call_of_the_verb(name: str) -> None:
    """The graph calls the public verb, with arguments that compute the same bits and gradients."""
    module = _Verb(name)
    graph = fx.symbolic_trace(module)
    verbs = {getattr(functional, verb) for verb in functional.__all__}
    assert [target for target in calls(graph.graph) if target in verbs]
    x, y = torch.randn(2, 4, 8, requires_grad=True)
    for one, other in zip(results(graph(x, y)), results(module(x, y)), strict=True):
        assert torch.equal(one, other)
        cotangent = torch.randn_like(one)
        ours, theirs = (torch.autograd.grad(t, x, cotangent, retain_graph=True) for t in (one, other))
        assert torch.equal(ours[0], theirs[0])


def test_every_option_is_recorded() -> None:
    """Options that are not the defaults are in the call."""
    options: dict[str, Any] = {"eps": 0.5, "weight_offset": 1.0, "out_dtype": torch.float32, "rounding": "hf"}
    options |= {"backend": "eager"}

    def every(x: Tensor, y: Tensor, w: Tensor) -> Any:
        norms = {"pre_activation": "relu", "activation": "silu"} | options
        turning = {"interleaved": True, "unsqueeze_dim": -2, "weight_offset": 1.0, "rounding": "hf", "backend": "eager"}
        gating = {"gate_activation": "tanh", "gate_first": True, "group_size": 4}
        return (
            kf.layer_norm(x, 8, w, **norms),
            kf.add_rms_norm(x, y, 8, w, dropout_p=1.0, **norms),
            kf.gated_layer_norm(x, y, 8, w, bias=w, **gating, **options),
            kf.modulated_layer_norm(x, 8, y, x, w, w, activation="relu", weight_offset=1.0, backend="eager"),
            kf.add_modulated_rms_norm(x, y, 8, w, y, gate=y, eps=0.5, backend="eager"),
            kf.bias_act(x, w, "gelu", dropout_p=1.0, backend="eager"),
            kf.act_dropout(x, "relu", 1.0, backend="eager"),
            kf.sum_squared(x, -1, keepdim=True, dtype=torch.float64, backend="eager"),
            kf.softmax(x, 0, scale=2.0, mask=y, backend="eager"),
            kf.softmax(x, causal=True, backend="eager"),
            kf.attention_scores(x, x, 2.0, causal=True, normalize=True, backend="eager"),
            kf.rope(x[:, None], y[:, :4], y[:, 4:], interleaved=True, unsqueeze_dim=-2, backend="eager"),
            kf.qk_norm_rope(x[:, None], y[:, None], w, w, x[:, :4], y[:, 4:], 0.5, **turning),
        )

    inputs = torch.randn(4, 8), torch.randn(4, 8), torch.randn(8)
    traced = fx.symbolic_trace(every)(*inputs)
    for one, other in zip(traced, every(*inputs), strict=True):
        assert all(map(torch.equal, results(one), results(other)))


class _One(nn.Module):
    """A module called with one tensor, by the name that a model gives it."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Any:
        """The layer's result."""
        return self.layer(x)


class _Two(_One):
    """The same with two tensors."""

    def forward(self, x: Tensor, y: Tensor) -> Any:
        """The layer's result."""
        return self.layer(x, y)


@pytest.mark.parametrize("name", MODULES)
def test_modules_are_traced(name: str) -> None:
    """Each module traces into verbs, and the graph computes its bits and keeps its parameters' names."""
    module, inputs = made(name, CPU)
    root = (_One if len(inputs) == 1 else _Two)(module)
    traced = fx.symbolic_trace(root)
    assert traced.state_dict().keys() == root.state_dict().keys()
    assert any(target.__module__.startswith("kernel_fusion.functional") for target in calls(traced.graph))
    assert all(map(torch.equal, results(traced(*inputs)), results(root(*inputs))))


@pytest.mark.parametrize("name", MODULES)
def test_graphs_of_modules_are_saved(name: str) -> None:
    """A graph of the module alone pickles: the annotations of its forward are types, no text."""
    module, _ = made(name, CPU)
    traced = fx.symbolic_trace(module)
    assert pickle.loads(pickle.dumps(traced)).code == traced.code


class _Block(nn.Module):
    """A pre-norm feed-forward block that hands a stream on."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = kf.FusedAddRMSNorm(8)
        self.up = nn.Linear(8, 16, bias=False)
        self.act = kf.FusedBiasAct(16, "gelu")
        self.down = nn.Linear(16, 8)

    def forward(self, x, stream):  # type: ignore[no-untyped-def]  # annotations are text here, which no graph pickles
        """The block's result and the stream."""
        y, h = self.norm(x, stream)
        return self.down(self.act(self.up(y))), h


def test_results_unpack_and_graphs_are_saved() -> None:
    """A NormOutput is unpacked in the graph, and a pickled graph computes the same."""
    block = _Block()
    traced = pickle.loads(pickle.dumps(fx.symbolic_trace(block)))
    inputs = torch.randn(2, 4, 8)
    assert all(map(torch.equal, traced(*inputs), block(*inputs)))


def test_features_are_extracted() -> None:
    """A graph cut after a verb, as feature extractors cut it, gives the result of that verb."""
    block = _Block()
    traced = fx.symbolic_trace(block)
    verb = next(node for node in traced.graph.nodes if node.target is kf.bias_act)
    next(node for node in traced.graph.nodes if node.op == "output").args = ({"act": verb},)
    traced.graph.eliminate_dead_code()
    traced.recompile()
    x, stream = torch.randn(2, 4, 8)
    expected = block.act(block.up(block.norm(x, stream).output))
    assert torch.equal(traced(x, stream)["act"], expected)


@pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:Please use quant_min and quant_max to specify the range:UserWarning")
def test_prepare_fx_observes_what_stands_between() -> None:
    """Quantisation puts its observers around the linear layers, and the verbs compute what they did."""
    from torch.ao.quantization import get_default_qconfig_mapping, quantize_fx

    block = _Block().eval()
    inputs = tuple(torch.randn(2, 64, 8))
    prepared = quantize_fx.prepare_fx(copy.deepcopy(block), get_default_qconfig_mapping("x86"), inputs)
    assert {kf.add_rms_norm, kf.bias_act} <= set(calls(prepared.graph))
    assert sum(name.startswith("activation_post_process") for name, _ in prepared.named_children()) >= 3
    assert all(map(torch.equal, prepared(*inputs), block(*inputs)))


def test_halves_of_a_proxy() -> None:
    """FusedGatedAct takes its halves in the graph."""
    x = torch.randn(4, 16)
    module = kf.FusedGatedAct("silu")
    assert torch.equal(fx.symbolic_trace(_One(module))(x), module(x))
