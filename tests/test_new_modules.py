"""The modules that are more than a norm of torch.nn: stages, residuals, bias, gates, softmax."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support import CPU, CUDA, EAGER, TRITON, Target, assert_as_accurate
from test_modules import randomize
from torch import Tensor, nn

import kernel_fusion as kf
from kernel_fusion.core.activations import ACTIVATIONS

_EPS = torch.finfo(torch.float32).eps


@dataclass(frozen=True)
class Module:
    """A module, how it prints, what it computes by PyTorch, and shapes to call it with.

    Attributes:
        make: the module, on a device.
        text: its `extra_repr`.
        pytorch: of the module and its inputs.
        shapes: of the inputs.
    """

    make: Callable[[str], nn.Module]
    text: str
    pytorch: Callable[..., Any]
    shapes: tuple[tuple[int, ...], ...] = ((3, 8),)


def _layer_norm(m: nn.Module, h: Tensor) -> Tensor:
    return F.layer_norm(h, (8,), m.weight + m.weight_offset, m.bias, m.eps)


def _rms_norm(m: nn.Module, h: Tensor) -> Tensor:
    return F.rms_norm(h, (8,), m.weight + m.weight_offset, _EPS)


def _grouped(x: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x.unflatten(-1, (2, 4)), (4,), eps=eps).flatten(-2)


# PyTorch 2.11 does not say whether there is a bias.
_LAYER_NORM = nn.LayerNorm(8).extra_repr()
MODULES = {
    "layer_norm": Module(
        lambda device: kf.FusedLayerNorm(8, activation="relu", device=device),
        f"{_LAYER_NORM}, activation='relu'",
        lambda m, x: torch.relu(_layer_norm(m, x)),
    ),
    "rms_norm": Module(
        lambda device: kf.FusedRMSNorm(8, pre_activation="gelu", weight_offset=1.0, device=device),
        "(8,), eps=None, elementwise_affine=True, pre_activation='gelu', weight_offset=1.0",
        lambda m, x: _rms_norm(m, F.gelu(x)),
    ),
    "add_layer_norm": Module(
        lambda device: kf.FusedAddLayerNorm(hidden_size=8, activation="silu", device=device),
        f"{_LAYER_NORM}, activation='silu'",
        lambda m, x, r: (F.silu(_layer_norm(m, r + x)), r + x),
        ((3, 8), (3, 8)),
    ),
    "add_rms_norm": Module(
        lambda device: kf.FusedAddRMSNorm(8, dropout=0.25, weight_offset=1.0, device=device).eval(),
        "(8,), eps=None, elementwise_affine=True, dropout=0.25, weight_offset=1.0",
        lambda m, x, r: (_rms_norm(m, r + x), r + x),
        ((3, 8), (3, 8)),
    ),
    "layer_norm_begins": Module(
        lambda device: kf.FusedAddLayerNorm(8, pre_activation="gelu", activation="silu", device=device),
        f"{_LAYER_NORM}, pre_activation='gelu', activation='silu'",
        lambda m, x: (F.silu(_layer_norm(m, F.gelu(x))), F.gelu(x)),
    ),
    "rms_norm_begins": Module(
        lambda device: kf.FusedAddRMSNorm(8, dropout=0.25, weight_offset=1.0, device=device).eval(),
        "(8,), eps=None, elementwise_affine=True, dropout=0.25, weight_offset=1.0",
        lambda m, x: (_rms_norm(m, x), x),
    ),
    "gated_rms_norm": Module(
        lambda device: kf.FusedGatedRMSNorm(8, gate_first=True, group_size=4, device=device),
        "(8,), eps=1e-05, elementwise_affine=True, gate_activation='silu', gate_first=True, group_size=4",
        lambda m, x, gate: _grouped(x * F.silu(gate), m.eps) * m.weight,
        ((3, 8), (3, 8)),
    ),
    "gated_rms_norm_offset": Module(
        lambda device: kf.FusedGatedRMSNorm(8, 1e-3, gate_activation="sigmoid", weight_offset=1.0, device=device),
        "(8,), eps=0.001, elementwise_affine=True, gate_activation='sigmoid', weight_offset=1.0",
        lambda m, x, gate: F.rms_norm(x, (8,), m.weight + 1, m.eps) * torch.sigmoid(gate),
        ((3, 8), (3, 8)),
    ),
    "without_a_gate": Module(
        lambda device: kf.FusedGatedRMSNorm(8, device=device),
        "(8,), eps=1e-05, elementwise_affine=True, gate_activation='silu'",
        lambda m, x: F.rms_norm(x, (8,), m.weight, m.eps),
    ),
    "without_a_gate_in_groups": Module(
        lambda device: kf.FusedGatedRMSNorm(8, gate_first=True, group_size=4, device=device),
        "(8,), eps=1e-05, elementwise_affine=True, gate_activation='silu', gate_first=True, group_size=4",
        lambda m, x: _grouped(x, m.eps) * m.weight,
    ),
    "modulated_layer_norm": Module(
        lambda device: kf.FusedModulatedLayerNorm(8, 1e-6, activation="silu", device=device),
        f"{nn.LayerNorm(8, 1e-6, False).extra_repr()}, activation='silu'",
        lambda m, x, scale: F.silu(F.layer_norm(x, (8,), eps=m.eps) * (1 + scale)),
        ((3, 8), (3, 8)),
    ),
    "modulated_affine": Module(
        lambda device: kf.FusedModulatedLayerNorm(8, elementwise_affine=True, device=device),
        _LAYER_NORM,
        lambda m, x, scale: _layer_norm(m, x) * (1 + scale),
        ((2, 3, 8), (2, 1, 8)),
    ),
    "bias_act": Module(
        lambda device: kf.FusedBiasAct(8, "gelu", 0.1, device=device).eval(),
        "8, activation='gelu', dropout=0.1",
        lambda m, x: F.gelu(x + m.bias),
    ),
    "act": Module(
        lambda device: kf.FusedBiasAct(8, "gelu", device=device, bias=False),
        "8, activation='gelu', bias=False",
        lambda m, x: F.gelu(x),
    ),
    "linear_act": Module(
        lambda device: kf.FusedLinearAct(8, 16, activation="gelu", dropout=0.1, device=device).eval(),
        "in_features=8, out_features=16, bias=True, activation='gelu', dropout=0.1",
        lambda m, x: F.gelu(F.linear(x, m.weight, m.bias)),
    ),
    "linear_without_bias": Module(
        lambda device: kf.FusedLinearAct(8, 16, False, activation="relu", device=device),
        "in_features=8, out_features=16, bias=False, activation='relu'",
        lambda m, x: F.relu(F.linear(x, m.weight)),
    ),
    "gated_act": Module(
        lambda device: kf.FusedGatedAct("silu", features=4),
        "activation='silu', dim=-1, features=4",
        lambda m, x: F.silu(x[..., :4]) * x[..., 4:],
    ),
    "gate_and_value": Module(
        lambda device: kf.FusedGatedAct("relu", dim=0),
        "activation='relu', dim=0",
        lambda m, gate, value: torch.relu(gate) * value,
        ((3, 8), (3, 8)),
    ),
    "softmax": Module(
        lambda device: kf.FusedSoftmax(scale=0.5), "dim=-1, scale=0.5", lambda m, x: torch.softmax(0.5 * x, -1)
    ),
    "causal_softmax": Module(
        lambda device: kf.FusedSoftmax(causal=True),
        "dim=-1, causal=True",
        lambda m, x: torch.softmax(x.masked_fill(torch.ones_like(x, dtype=torch.bool).triu(1), -torch.inf), -1),
        ((2, 8, 8),),
    ),
    "masked_softmax": Module(
        lambda device: kf.FusedSoftmax(),
        "dim=-1",
        lambda m, x, mask: torch.softmax(x + mask, -1),
        ((4, 8), (8,)),
    ),
}


@pytest.fixture(params=MODULES)
def name(request: pytest.FixtureRequest) -> str:
    """Each module by name."""
    return request.param


def made(name: str, target: Target) -> tuple[nn.Module, list[Tensor]]:
    """The module with random parameters, and inputs that require gradients."""
    module = MODULES[name].make(target.device)
    randomize(module)
    return module, [torch.randn(s, device=target.device, requires_grad=True) for s in MODULES[name].shapes]


def test_prints_its_arguments(name: str) -> None:
    """`extra_repr` names what was asked for, and nothing else."""
    assert MODULES[name].make("cpu").extra_repr() == MODULES[name].text


def test_forward_and_gradients_as_pytorch(name: str, any_target: Target) -> None:
    """Results, input gradients and parameter gradients agree with PyTorch's composition within budget."""
    module, inputs = made(name, any_target)
    results = MODULES[name].pytorch(module, *inputs)
    cotangents = [torch.randn_like(t) for t in (results if isinstance(results, tuple) else (results,))]

    def run(function: Callable[..., Any], module: nn.Module, cotangents: list[Tensor], *inputs: Tensor) -> list[Tensor]:
        results = function(*inputs)
        outputs = list(results) if isinstance(results, tuple) else [results]
        return [*outputs, *torch.autograd.grad(outputs, [*inputs, *module.parameters()], cotangents)]

    def theirs(cotangents: list[Tensor], *inputs: Tensor) -> list[Tensor]:
        m = copy.deepcopy(module).to(inputs[0].dtype)
        return run(lambda *t: MODULES[name].pytorch(m, *t), m, cotangents, *inputs)

    with kf.use_backend(any_target.backend), any_target.ran(forward=None, backward=None):
        ours = run(module, module, cotangents, *inputs)
    assert_as_accurate(ours, theirs, cotangents, *inputs)


def test_deepcopy_pickle_and_state_dict(name: str, any_target: Target) -> None:
    """Copies, pickles and a fresh module with the same state compute the same bits."""
    module, inputs = made(name, any_target)
    fresh = MODULES[name].make(any_target.device)
    fresh.load_state_dict(module.state_dict(), strict=True)
    with kf.use_backend(any_target.backend), any_target.ran(forward=None):
        y = module(*inputs)
        for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module)), fresh):
            assert type(other) is type(module)
            assert other.extra_repr() == module.extra_repr()
            assert all(map(torch.equal, _leaves(other(*inputs)), _leaves(y)))


def _leaves(results: Any) -> tuple[Tensor, ...]:
    return results if isinstance(results, tuple) else (results,)


def test_moves_between_dtypes_and_devices(name: str, any_target: Target) -> None:
    """Made on meta, given memory, initialised and moved to bfloat16, a module works."""
    module = MODULES[name].make("meta").to_empty(device=any_target.device)
    if hasattr(module, "reset_parameters"):
        module.reset_parameters()
    inputs = [torch.randn(s, device=any_target.device, dtype=torch.bfloat16) for s in MODULES[name].shapes]
    with kf.use_backend(any_target.backend), any_target.ran(forward=None):
        results = _leaves(module.to(torch.bfloat16)(*inputs))
    assert all(y.dtype == torch.bfloat16 and y.isfinite().all() for y in results)


def test_shapes_and_dtypes_on_meta(name: str) -> None:
    """A module on meta says what a call would give, as PyTorch's modules do."""
    found = []
    for device in ("meta", "cpu"):
        inputs = [torch.ones(shape, device=device) for shape in MODULES[name].shapes]
        found.append([(y.shape, y.dtype) for y in _leaves(MODULES[name].make(device)(*inputs))])
    assert found[0] == found[1]


def test_gated_norm_has_one_weight() -> None:
    """The state dict is that of other libraries' gated norms, and what does not fit is refused."""
    assert list(kf.FusedGatedRMSNorm(8).state_dict()) == ["weight"]
    for arguments, text in (
        ({"group_size": 3}, "`FusedGatedRMSNorm`: `group_size` must divide the length of a row, N = 8, got 3"),
        ({"gate_activation": "swish"}, "`FusedGatedRMSNorm`: `gate_activation` must be one of "),
        ({"rounding": "up"}, "`FusedGatedRMSNorm`: `rounding` must be one of "),
    ):
        with pytest.raises(ValueError, match=f"^{text}"):
            kf.FusedGatedRMSNorm(8, **arguments)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [(kf.FusedAddLayerNorm, nn.LayerNorm), (kf.FusedAddRMSNorm, nn.RMSNorm)],
)
def test_add_norms_are_their_parents(ours: Any, theirs: Any) -> None:
    """The constructor's positional arguments, the text and the state dict are those of torch.nn."""
    mine, parent = ours((3, 8), 1e-3, True), theirs((3, 8), 1e-3, True)
    assert isinstance(mine, theirs)
    assert mine.extra_repr() == parent.extra_repr()
    randomize(parent)
    mine.load_state_dict(parent.state_dict(), strict=True)
    parent.load_state_dict(mine.state_dict(), strict=True)


@pytest.mark.parametrize("kind", [kf.FusedAddLayerNorm, kf.FusedAddRMSNorm])
def test_residual_keeps_its_dtype(kind: Any, any_target: Target) -> None:
    """A float32 stream beside bfloat16 activations: y in bfloat16, h in float32."""
    module = kind(8, device=any_target.device, dtype=torch.bfloat16)
    x = torch.randn(3, 8, device=any_target.device, dtype=torch.bfloat16)
    with kf.use_backend(any_target.backend), any_target.ran(forward=None):
        result = module(x, torch.randn(3, 8, device=any_target.device))
    assert isinstance(result, kf.NormOutput)
    assert (result.output.dtype, result.residual.dtype) == (torch.bfloat16, torch.float32)


@pytest.mark.parametrize("kind", [kf.FusedAddLayerNorm, kf.FusedAddRMSNorm])
def test_a_stream_begins_as_one_of_zeros(kind: Any, any_target: Target) -> None:
    """Without a residual the same is dropped and normalised, and h is the input to the bit, but not the input."""
    module = kind(8, dropout=0.5, pre_activation="relu", device=any_target.device)
    x = torch.randn(16, 8, device=any_target.device, dtype=torch.bfloat16)
    with kf.use_backend(any_target.backend), any_target.ran(forward=None):
        torch.manual_seed(0)
        begun = module(x)
        torch.manual_seed(0)
        added = module(x, torch.zeros_like(x))
        x[0] = -0.0
        plain = kind(8, dropout=0.5, device=any_target.device).eval()(x)
    assert torch.equal(begun.residual, added.residual)
    assert torch.equal(begun.output, added.output)
    assert begun.output.dtype == plain.output.dtype == torch.bfloat16
    assert torch.equal(plain.residual.view(torch.int16), x.view(torch.int16))
    assert plain.residual.data_ptr() != x.data_ptr()


@pytest.mark.parametrize("kind", [kf.FusedAddLayerNorm, kf.FusedAddRMSNorm])
@pytest.mark.parametrize("target", [CPU, TRITON, pytest.param(CUDA, marks=pytest.mark.cuda)], ids=lambda t: t.backend)
def test_a_stream_begins_in_one_pass(kind: Any, target: Target) -> None:
    """Without a residual, what stands for one is one row, and only Triton's backend adds the gradient of h apart."""
    module = kind(64, device=target.device, dtype=torch.bfloat16)
    x, dy, dh = torch.randn(3, 4, 6, 64, device=target.device, dtype=torch.bfloat16)
    x.requires_grad_()

    def gradient(*inputs: Tensor) -> Tensor:
        with target.ran():
            y, h = module(*inputs)
        with target.ran(forward=0, backward=1):
            return torch.autograd.grad([y, h], x, [dy, dh])[0]

    with kf.use_backend(target.backend):
        added = gradient(x, torch.zeros_like(x))
        with torch.autograd.profiler.profile(use_kineto=False) as profile:
            begun = gradient(x)
    assert torch.equal(begun, added)
    passes = {event.name for event in profile.function_events} & {"aten::add", "aten::clone", "aten::contiguous"}
    assert passes == ({"aten::add"} if target.backend == "triton" else set())


_DROPPING: dict[str, tuple[Callable[[str], nn.Module], Callable[[nn.Module, Tensor], Tensor]]] = {
    "add_layer_norm": (
        lambda device: kf.FusedAddLayerNorm(64, dropout=0.5, device=device),
        lambda m, x: m(x, torch.zeros_like(x)).residual,
    ),
    "add_rms_norm": (
        lambda device: kf.FusedAddRMSNorm(64, dropout=0.5, device=device),
        lambda m, x: m(x, torch.zeros_like(x)).residual,
    ),
    "bias_act": (lambda device: kf.FusedBiasAct(64, None, 0.5, device=device), lambda m, x: m(x)),
}


@pytest.mark.parametrize("kind", _DROPPING)
def test_dropout_in_training_alone(kind: str, any_target: Target) -> None:
    """`train()` drops half and doubles the rest, `eval()` drops nothing."""
    make, dropped = _DROPPING[kind]
    module = make(any_target.device)
    x = torch.rand(128, 64, device=any_target.device) + 1
    with kf.use_backend(any_target.backend), any_target.ran(forward=None):
        h = dropped(module.train(), x)
        assert torch.equal(dropped(module.eval(), x), x)
    kept = h != 0
    # 8192 elements: five standard deviations of the share are 0.028.
    assert abs(kept.float().mean().item() - 0.5) < 0.028
    assert torch.equal(h[kept], 2 * x[kept])


def test_bias_starts_at_zero() -> None:
    """A new FusedBiasAct adds nothing, in the dtype asked for."""
    module = kf.FusedBiasAct(8, "relu", dtype=torch.bfloat16)
    assert torch.equal(module.bias, torch.zeros(8, dtype=torch.bfloat16))
    assert module.bias.requires_grad
    assert dict(module.named_parameters()).keys() == {"bias"}


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_gate_is_the_first_half(dim: int, any_target: Target) -> None:
    """One input is gate and value along `dim`, in this order, and equals the pair."""
    x = torch.randn(4, 6, device=any_target.device)
    module = kf.FusedGatedAct("silu", dim)
    with kf.use_backend(any_target.backend), any_target.ran(forward=None):
        y = module(x)
        assert torch.equal(y, module(*x.chunk(2, dim)))
    assert_as_accurate(y, lambda t: F.silu(t.chunk(2, dim)[0]) * t.chunk(2, dim)[1], x)


@pytest.mark.parametrize(
    ("shape", "dim"), [((4, 7), -1), ((), -1), ((4, 6), 2)], ids=["odd", "0-d", "no such dimension"]
)
def test_no_two_halves_in_pytorch_words(shape: tuple[int, ...], dim: int) -> None:
    """An input that cannot be split raises what torch.nn.GLU raises."""
    x = torch.randn(shape)
    with pytest.raises((RuntimeError, IndexError)) as theirs:
        nn.GLU(dim)(x)
    with EAGER.ran(), pytest.raises(theirs.type) as ours:
        kf.FusedGatedAct("silu", dim)(x)
    assert str(ours.value) == str(theirs.value)


_MAKERS: list[Callable[..., nn.Module]] = [
    kf.FusedLayerNorm,
    kf.FusedRMSNorm,
    kf.FusedAddLayerNorm,
    kf.FusedAddRMSNorm,
]


@pytest.mark.parametrize("argument", ["pre_activation", "activation"])
@pytest.mark.parametrize("make", _MAKERS)
def test_unknown_activation(make: Callable[..., nn.Module], argument: str) -> None:
    """The constructor names the argument and the choices."""
    with pytest.raises(ValueError, match=rf"^`{make.__name__}`: `{argument}` must be one of 'relu', .*, got 'rleu'$"):
        make(8, **{argument: "rleu"})


def test_unknown_activation_of_pointwise_modules() -> None:
    """As the norms."""
    for make in (lambda: kf.FusedBiasAct(8, "rleu"), lambda: kf.FusedGatedAct("rleu")):
        with pytest.raises(ValueError, match=r"^`Fused\w+`: `activation` must be one of 'relu', .*, got 'rleu'$"):
            make()


@pytest.mark.parametrize("p", [-0.1, 1.5, float("nan")])
def test_dropout_that_is_no_probability(p: float) -> None:
    """The constructor names the module and the value."""
    for make in (kf.FusedAddLayerNorm, kf.FusedAddRMSNorm, lambda _, dropout: kf.FusedBiasAct(8, None, dropout)):
        with pytest.raises(ValueError, match=r"^`Fused\w+`: `dropout` must be a probability between 0 and 1, got"):
            make(8, dropout=p)


@pytest.mark.parametrize("make", _MAKERS)
def test_weight_offset_without_weight(make: Callable[..., nn.Module]) -> None:
    """An offset needs a weight to be added to."""
    with pytest.raises(ValueError, match=rf"^`{make.__name__}`: `weight_offset` needs a `weight`"):
        make(8, elementwise_affine=False, weight_offset=1.0)


@pytest.mark.parametrize("kind", [kf.FusedLayerNorm, kf.FusedRMSNorm])
@pytest.mark.parametrize("stage", ["pre_activation", "activation"])
def test_stages_disable_the_encoder_fast_path(kind: Any, stage: str, any_target: Target) -> None:
    """PyTorch's inference fast path, which would drop a stage, steps aside: inference equals training."""
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True, device=any_target.device)
    for norm in ("norm1", "norm2"):
        setattr(layer, norm, kind(32, device=any_target.device, **{stage: "silu"}))
    x = torch.randn(2, 5, 32, device=any_target.device)
    with kf.use_backend(any_target.backend), any_target.ran(forward=None):
        trained = layer.train()(x).detach()
        with torch.no_grad():
            y = layer.eval()(x)
    torch.testing.assert_close(y, trained)


def test_every_activation_is_accepted() -> None:
    """The modules take what the table of activations has."""
    for activation in ACTIVATIONS:
        kf.FusedLayerNorm(8, activation=activation, pre_activation=activation)
        kf.FusedBiasAct(8, activation)
        kf.FusedGatedAct(activation)
