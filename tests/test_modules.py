"""The modules as drop-ins for torch.nn: what a model or a checkpoint expects of the parent class."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from support import EAGER, Target, assert_as_accurate
from torch import Tensor, nn

import kernel_fusion as kf

PAIRS = [
    pytest.param(kf.FusedLayerNorm, nn.LayerNorm, id="LayerNorm"),
    pytest.param(kf.FusedRMSNorm, nn.RMSNorm, id="RMSNorm"),
]
# Positional arguments of both parents, then keyword arguments.
CONSTRUCTORS: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
    ((8,), {}),
    (([3, 8],), {}),
    ((8, 1e-3), {}),
    ((8, 1e-3, False), {}),
    ((8,), {"elementwise_affine": False}),
    ((8,), {"eps": 1e-6, "device": "cpu", "dtype": torch.bfloat16}),
]


def randomize(module: nn.Module) -> None:
    """Give every parameter a random value, so that swapping or dropping one shows."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn_like(parameter))


@pytest.mark.parametrize(("ours", "theirs"), PAIRS)
@pytest.mark.parametrize(("args", "kwargs"), CONSTRUCTORS, ids=str)
def test_same_constructor_and_repr(ours: Any, theirs: Any, args: Any, kwargs: Any) -> None:
    """The parent's arguments, by position and by name, give a module that prints alike and is one of the parent's."""
    mine, parent = ours(*args, **kwargs), theirs(*args, **kwargs)
    assert isinstance(mine, theirs)
    assert mine.extra_repr() == parent.extra_repr()
    assert repr(mine) == repr(parent).replace(theirs.__name__, ours.__name__)
    for (name, one), (other_name, other) in zip(mine.named_parameters(), parent.named_parameters(), strict=True):
        assert name == other_name
        assert one.dtype == other.dtype
        assert torch.equal(one, other)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("positional", [True, False])
def test_layer_norm_bias_argument(bias: bool, positional: bool) -> None:
    """`bias` is the fourth positional argument and a keyword, as in the parent."""
    module = kf.FusedLayerNorm(8, 1e-5, True, bias) if positional else kf.FusedLayerNorm(8, bias=bias)
    assert (module.bias is not None) == bias
    assert module.extra_repr() == nn.LayerNorm(8, bias=bias).extra_repr()


@pytest.mark.parametrize(("ours", "theirs"), PAIRS)
def test_hidden_size_is_another_name(ours: Any, theirs: Any) -> None:
    """`hidden_size=` stands for `normalized_shape`; both or neither is a TypeError."""
    assert ours(hidden_size=8).normalized_shape == theirs(8).normalized_shape
    for arguments in ({}, {"normalized_shape": 8, "hidden_size": 8}):
        with pytest.raises(TypeError, match="exactly one of `normalized_shape` and its other name `hidden_size`"):
            ours(**arguments)


@pytest.mark.parametrize(("ours", "theirs"), PAIRS)
def test_state_dict_travels_both_ways(ours: Any, theirs: Any, target: Target) -> None:
    """A checkpoint of either class loads strictly into the other and gives the same result."""
    mine, parent = ours(8).to(target.device), theirs(8).to(target.device)
    x = torch.randn(3, 8, device=target.device)
    for source, sink in ((parent, mine), (mine, parent)):
        randomize(source)
        sink.load_state_dict(source.state_dict(), strict=True)
        with kf.use_backend(target.backend), target.ran(forward=1):
            y = mine(x)
        assert_as_accurate(y, lambda t, m=parent: copy.deepcopy(m).to(t)(t), x)


@pytest.mark.parametrize(("ours", "theirs"), PAIRS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_forward_and_gradients_as_the_parent(ours: Any, theirs: Any, dtype: torch.dtype, target: Target) -> None:
    """Result, input gradient and parameter gradients agree with the parent's within budget."""
    parent = theirs(32, 1e-5).to(target.device, dtype)
    randomize(parent)
    mine = ours(32, 1e-5).to(target.device, dtype)
    mine.load_state_dict(parent.state_dict())
    x = torch.randn(5, 32, device=target.device, dtype=dtype, requires_grad=True)
    dy = torch.randn_like(x)

    def run(module: nn.Module, x: Tensor, dy: Tensor) -> list[Tensor]:
        y = module(x)
        return [y, *torch.autograd.grad(y, [x, *module.parameters()], dy)]

    with kf.use_backend(target.backend), target.ran(forward=1, backward=1):
        results = run(mine, x, dy)
    assert_as_accurate(results, lambda t, d: run(copy.deepcopy(parent).to(t), t, d), x, dy)


@pytest.mark.parametrize(("ours", "theirs"), PAIRS)
def test_deepcopy_and_pickle(ours: Any, theirs: Any, target: Target) -> None:
    """Copies and pickles keep parameters, eps and extras, and compute the same bits."""
    module = ours(8, 1e-3, weight_offset=1.0).to(target.device)
    randomize(module)
    x = torch.randn(3, 8, device=target.device)
    with kf.use_backend(target.backend), target.ran(forward=3):
        y = module(x)
        for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
            assert type(other) is ours
            assert other.extra_repr() == module.extra_repr()
            assert torch.equal(other(x), y)


@pytest.mark.parametrize(("ours", "theirs"), PAIRS)
def test_weight_offset_starts_as_plain_normalisation(ours: Any, theirs: Any, target: Target) -> None:
    """With `weight_offset` a new module, and one after `reset_parameters`, is the plain normalisation."""
    module, plain = ours(8, weight_offset=1.0).to(target.device), ours(8).to(target.device)
    x = torch.randn(3, 8, device=target.device)
    assert torch.equal(module.weight, torch.zeros_like(module.weight))
    assert module.extra_repr() == plain.extra_repr() + ", weight_offset=1.0"
    with kf.use_backend(target.backend), target.ran(forward=4):
        assert torch.equal(module(x), plain(x))
        randomize(module)
        module.reset_parameters()
        assert torch.equal(module(x), plain(x))


@pytest.mark.parametrize(("ours", "theirs"), PAIRS)
def test_weight_offset_without_weight_raises(ours: Any, theirs: Any) -> None:
    """A module that has no weight to add the offset to says so, as the verb does, instead of dropping it."""
    with EAGER.ran(), kf.use_backend("eager"), pytest.raises(ValueError, match="`weight_offset` needs a `weight`"):
        ours(8, elementwise_affine=False, weight_offset=1.0)(torch.randn(3, 8))


@pytest.mark.parametrize(("ours", "theirs"), PAIRS)
def test_error_texts_are_the_parents(ours: Any, theirs: Any, target: Target) -> None:
    """An input of the wrong width raises the parent's error."""
    x = torch.randn(3, 7, device=target.device)
    with pytest.raises(RuntimeError) as parent_error:
        theirs(8).to(target.device)(x)
    with kf.use_backend(target.backend), target.ran(forward=0), pytest.raises(RuntimeError) as error:
        ours(8).to(target.device)(x)
    assert str(error.value) == str(parent_error.value)


@pytest.mark.parametrize(("ours", "theirs"), PAIRS)
def test_moves_between_dtypes_and_devices(ours: Any, theirs: Any, target: Target) -> None:
    """`to`, `to_empty` and construction on meta work as for any module."""
    module = ours(8, device="meta").to_empty(device=target.device)
    module.reset_parameters()
    x = torch.randn(3, 8, device=target.device, dtype=torch.bfloat16)
    with kf.use_backend(target.backend), target.ran(forward=1):
        y = module.to(torch.bfloat16)(x)
    assert y.dtype == torch.bfloat16


class _Block(nn.Module):
    """A pre-norm transformer block beside PyTorch's own attention."""

    def __init__(self, norm: type[nn.Module], width: int = 32) -> None:
        super().__init__()
        self.norm1, self.norm2 = norm(width), norm(width)
        self.attention = nn.MultiheadAttention(width, 4, batch_first=True)
        self.feed_forward = nn.Sequential(nn.Linear(width, 64), nn.GELU(), nn.Linear(64, width))

    def forward(self, x: Tensor) -> Tensor:
        """Attention and feed-forward, each with its residual."""
        h = self.norm1(x)
        x = x + self.attention(h, h, h, need_weights=False)[0]
        return x + self.feed_forward(self.norm2(x))


# PyTorch's, where a product is the first thing that a thread of autograd does on the GPU.
@pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS, but there was no current CUDA context")
@pytest.mark.parametrize(("ours", "theirs"), PAIRS)
def test_inside_a_block_beside_attention(ours: Any, theirs: Any, target: Target) -> None:
    """Swapping the norms of a block trains to the same gradients within budget."""
    parent = _Block(theirs).to(target.device)
    block = _Block(ours).to(target.device)
    block.load_state_dict(parent.state_dict())
    x = torch.randn(2, 5, 32, device=target.device, requires_grad=True)
    dy = torch.randn_like(x)

    def run(module: nn.Module, x: Tensor, dy: Tensor) -> list[Tensor]:
        y = module(x)
        return [y, *torch.autograd.grad(y, [x, *module.norm1.parameters(), *module.norm2.parameters()], dy)]

    with kf.use_backend(target.backend), target.ran(forward=2, backward=2):
        results = run(block, x, dy)
    assert_as_accurate(results, lambda t, d: run(copy.deepcopy(parent).to(t), t, d), x, dy)


@pytest.mark.parametrize("training", [True, False])
def test_inside_transformer_encoder_layer(training: bool, target: Target) -> None:
    """In nn.TransformerEncoderLayer the result is the plain layer's, on its inference fast path too."""
    theirs = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True, device=target.device)
    layer = copy.deepcopy(theirs)
    for name in ("norm1", "norm2"):
        norm = kf.FusedLayerNorm(32, device=target.device)
        norm.load_state_dict(getattr(theirs, name).state_dict())
        setattr(layer, name, norm)
    layer.train(training), theirs.train(training)
    x = torch.randn(2, 5, 32, device=target.device)
    # PyTorch's inference fast path reads the parameters of the norms and never calls them.
    with torch.set_grad_enabled(training), kf.use_backend(target.backend), target.ran(forward=2 if training else 0):
        y = layer(x)
        assert_as_accurate(y, lambda t: copy.deepcopy(theirs).to(t)(t), x)


def test_weight_offset_disables_the_encoder_fast_path(target: Target) -> None:
    """With a weight_offset, which PyTorch's inference fast path would drop, the norms are called."""
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True, device=target.device)
    plain = copy.deepcopy(layer)
    for name in ("norm1", "norm2"):
        setattr(layer, name, kf.FusedLayerNorm(32, weight_offset=1.0, device=target.device))
    x = torch.randn(2, 5, 32, device=target.device)
    with torch.no_grad(), kf.use_backend(target.backend), target.ran(forward=2):
        y = layer.eval()(x)
        assert_as_accurate(y, lambda t: copy.deepcopy(plain).eval().to(t)(t), x)
