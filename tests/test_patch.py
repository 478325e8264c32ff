"""`kf.patch`: a model computes the same with our kernels, keeps all that it had, and what does not fit is left."""

# ruff: noqa: D102 (the docstring of a module here says what its forward computes)
from __future__ import annotations

import copy
import functools
import io
import pickle
import types
from typing import Any

import pytest
import torch
from patch_support import assert_no_worse, operations, outcomes, randomized, texts
from support import python
from torch import Tensor, nn
from torch.nn import functional as F

import kernel_fusion as kf


class HubNorm(nn.Module):
    """RMSNorm as most models of the transformers library write it."""

    def __init__(self, size: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.variance_epsilon = eps

    def forward(self, hidden_states: Tensor) -> Tensor:
        dtype = hidden_states.dtype
        hidden_states = hidden_states.float()
        variance = hidden_states.pow(2).mean(-1, keepdim=True)
        return self.weight * (hidden_states * torch.rsqrt(variance + self.variance_epsilon)).to(dtype)


class OffsetNorm(HubNorm):
    """RMSNorm with a weight around zero, rounded once, as in Gemma."""

    def forward(self, x: Tensor) -> Tensor:
        n = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return (n * (1.0 + self.weight.float())).type_as(x)


class GatedNorm(HubNorm):
    """RMSNorm of groups, gated before, as in Mamba-2."""

    def forward(self, x: Tensor, gate: Tensor | None = None) -> Tensor:
        wide = x.float() if gate is None else x.float() * F.silu(gate.float())
        groups = wide.unflatten(-1, (-1, 8))
        n = groups * torch.rsqrt(groups.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * n.flatten(-2).to(x.dtype)


class OtherEpsNorm(HubNorm):
    """A norm whose eps is added to the root, which no form of ours does."""

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x / (x.pow(2).mean(-1, keepdim=True).sqrt() + self.variance_epsilon)


class ChannelsFirstNorm(nn.LayerNorm):
    """A LayerNorm of the second dimension."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.movedim(1, -1)).movedim(-1, 1)


class FormulaGelu(nn.Module):
    """An activation written as a formula."""

    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * x * (1 + torch.tanh(0.7978845608028654 * (x + 0.044715 * x.pow(3))))


class GatedMlp(nn.Module):
    """act(gate(x)) * up(x)."""

    def __init__(self, size: int, act: nn.Module | None = None) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(size, 3 * size), nn.Linear(size, 3 * size), nn.Linear(3 * size, size)
        self.act = act or nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.gate(x)) * self.up(x))


class PackedMlp(GatedMlp):
    """Both projections in one, and the activated gate under a name."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.both = nn.Linear(size, 6 * size)
        del self.gate, self.up

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.both(x).chunk(2, dim=-1)
        gate = F.silu(gate)
        return self.down(up * gate)


class Block(nn.Module):
    """Pre-norm, with an addition before the second norm."""

    def __init__(self, size: int, norm: type[nn.Module] = HubNorm) -> None:
        super().__init__()
        self.first, self.second, self.mix, self.mlp = norm(size), norm(size), nn.Linear(size, size), GatedMlp(size)

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        residual = x
        x = self.mix(self.first(x))
        x = residual + x * scale
        residual = x
        x = self.second(x)
        return residual + self.mlp(x)


class Model(nn.Sequential):
    """Two blocks and a norm."""

    def __init__(self, size: int = 32, norm: type[nn.Module] = HubNorm) -> None:
        super().__init__(Block(size, norm), Block(size, norm), norm(size))


NORMS = [
    (HubNorm(48), "rms_norm, rounding='hf'"),
    (OffsetNorm(48), "rms_norm, weight_offset=1.0"),
    (GatedNorm(48), "gated_rms_norm, rounding='hf'"),
    (nn.LayerNorm(48), "layer_norm"),
    (nn.LayerNorm((4, 12), 1e-3), "layer_norm"),
    (nn.LayerNorm(48, elementwise_affine=False), "layer_norm"),
    (nn.RMSNorm(48), "rms_norm"),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("norm", "form"), NORMS, ids=lambda value: type(value).__name__)
def test_a_norm_is_known_by_what_it_computes(norm: nn.Module, form: str, dtype: torch.dtype) -> None:
    """Whatever its class, a norm gets the form that it computes, and is no less exact then, forward and backward."""
    model = randomized(copy.deepcopy(norm)).to(dtype)
    patched = copy.deepcopy(model)
    assert texts(kf.patch(patched)) == {type(norm).__name__: form}
    shape = getattr(norm, "normalized_shape", (48,))
    inputs = [torch.randn(5, *shape, dtype=dtype) for _ in range(1 + isinstance(norm, GatedNorm))]
    assert_no_worse(model, patched, *inputs)


@pytest.mark.parametrize("norm", [nn.LayerNorm(48), nn.RMSNorm(48, eps=1e-6), HubNorm(48)], ids=repr)
def test_a_norm_in_fp64(norm: nn.Module) -> None:
    """It is replaced if it computes in fp64."""
    model = randomized(copy.deepcopy(norm)).double()
    patched = copy.deepcopy(model)
    assert len(kf.patch(patched).replaced) == (not isinstance(norm, HubNorm))
    assert_no_worse(model, patched, torch.randn(5, 48, dtype=torch.float64))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("norm", [HubNorm, OffsetNorm])
def test_a_norm_rounds_as_it_did(norm: type[nn.Module], dtype: torch.dtype) -> None:
    """At most 0.1 % of the elements of a patched norm differ, by a unit in the last place."""
    model = randomized(norm(512)).to(dtype)
    x = torch.randn(400, 512, dtype=dtype)
    expected = model(x)
    kf.patch(model)
    off = (model(x).double() - expected.double()).abs()
    assert (off > 0).double().mean() <= 1e-3
    assert (off <= torch.finfo(dtype).eps * expected.double().abs()).all()


@pytest.mark.parametrize("weight", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_result_has_the_dtype_it_had(dtype: torch.dtype, weight: torch.dtype) -> None:
    """An fp32 weight widens the result of a bf16 input exactly where it did before."""
    for norm in (HubNorm(16), OffsetNorm(16)):
        model = norm.to(weight)
        expected = model(torch.randn(3, 16, dtype=dtype)).dtype
        kf.patch(model)
        assert model(torch.randn(3, 16, dtype=dtype)).dtype == expected


def test_eps_is_the_one_of_the_module() -> None:
    """Values around the root of eps come out as before: 1e-6 and PyTorch's default differ by a third there."""
    model, x = HubNorm(64, eps=1e-6), torch.full((1, 64), 1e-3)
    expected = model(x)
    assert kf.patch(model).replaced
    torch.testing.assert_close(model(x), expected)
    torch.testing.assert_close(model(x)[0, 0].item(), 0.5**0.5, rtol=1e-5, atol=0)


def test_eps_may_change_later() -> None:
    """A patched norm reads eps when it is called."""
    model, x = HubNorm(64), torch.randn(3, 64)
    kf.patch(model)
    model.variance_epsilon = 1.0
    torch.testing.assert_close(model(x), x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1))


@pytest.mark.parametrize("norm", [OtherEpsNorm(16), ChannelsFirstNorm(16), nn.GroupNorm(2, 16), nn.BatchNorm1d(16)])
def test_another_norm_is_left(norm: nn.Module) -> None:
    """A norm of no form of ours keeps its class."""
    kind = type(norm)
    report = kf.patch(nn.Sequential(norm))
    assert type(norm) is kind
    assert not report.replaced


def test_what_is_left_is_named_with_the_reason() -> None:
    """The report says which norm was left, and why, and prints it."""
    report = kf.patch(nn.Sequential(OtherEpsNorm(16), ChannelsFirstNorm(16)))
    assert [(line.name, line.kind) for line in report.left] == [("0", "OtherEpsNorm"), ("1", "ChannelsFirstNorm")]
    assert "OtherEpsNorm: it computes none of our norms over the last dimensions (0)" in str(report)
    assert "ChannelsFirstNorm: it takes no batches of rows" in str(report)


def test_what_liger_replaced_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The report says how to leave Liger's norms and rotary embedding out, whether a class or an instance has them."""
    kind = type("LigerRMSNorm", (OtherEpsNorm,), {"__module__": "liger_kernel.transformers.rms_norm"})
    forward = types.FunctionType(HubNorm.forward.__code__, HubNorm.forward.__globals__)
    forward.__module__ = "liger_kernel.transformers.functional"
    norms = [kind(16), HubNorm(16)]
    norms[1].forward = types.MethodType(forward, norms[1])
    report = kf.patch(nn.Sequential(*norms))
    assert [line.name for line in report.left] == ["0", "1"]
    assert all(line.text.startswith("Liger-Kernel computes it; apply Liger without it") for line in report.left)


def test_a_loss_of_ligers_stays_beside_our_norms() -> None:
    """After Liger without norms, rotary embedding and gates a patch takes those, and the model's forward is Liger's."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = HubNorm(16)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(x)

    def lce_forward(self: Model, x: Tensor) -> Tensor:
        return self.norm(x).square().mean()

    lce_forward.__module__ = "liger_kernel.transformers.model.llama"
    Model.forward = lce_forward  # type: ignore[method-assign]
    model, x = Model(), torch.randn(4, 16)
    before = model(x)
    report = kf.patch(model)
    assert [line.name for line in report.replaced] == ["norm"]
    assert not report.left
    torch.testing.assert_close(model(x), before)


class _Driver:
    """Triton's driver, as it is where there is no GPU: asking for it raises."""

    @property
    def active(self) -> float:
        raise RuntimeError("0 active drivers")


_DRIVER = _Driver()


class AsksADriver(nn.Module):
    """RMSNorm, unless something that raises says otherwise."""

    def forward(self, x: Tensor) -> Tensor:
        try:
            scale = _DRIVER.active
        except RuntimeError:
            scale = 1.0
        return scale * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


def test_a_property_that_raises_leaves_what_reads_it() -> None:
    """It cannot be compared at later calls, so its reader keeps its own code, and `patch` does not raise either."""
    model = nn.Sequential(AsksADriver())
    assert not kf.patch(model).replaced
    assert type(model[0]) is AsksADriver


def test_a_wrong_sum_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """An addition whose kernel computes something else stays apart from its norm, which is replaced, and is named."""

    def wrong(x: Tensor, residual: Tensor, *args: Any, **options: Any) -> Any:
        return kf.add_rms_norm(x, residual + 0.01, *args, **options)

    monkeypatch.setattr("kernel_fusion.functional.row_norm.add_rms_norm", wrong)
    report = kf.patch(Block(16))
    assert "Block" not in texts(report)
    assert "HubNorm" in texts(report)
    assert str(report).count("HubNorm: addition before it: the result differs from ours in torch.float32 on cpu") == 1


def test_a_forced_rounding() -> None:
    """`rounding="once"` rounds a norm of the other kind once: no bit differs from our verb's."""
    model = randomized(HubNorm(256)).bfloat16()
    x = torch.randn(64, 256, dtype=torch.bfloat16)
    kf.patch(model, rounding="once")
    assert torch.equal(model(x), kf.rms_norm(x, 256, model.weight, 1e-6))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_whole_model(dtype: torch.dtype) -> None:
    """Norms, gated products and additions together: no result and no gradient is worse."""
    model = randomized(Model()).to(dtype)
    patched = copy.deepcopy(model)
    assert texts(kf.patch(patched)) == {
        "HubNorm": "rms_norm, rounding='hf'",
        "GatedMlp": "gated_act, activation='silu'",
        "Block": "addition before self.second",
    }
    assert_no_worse(model, patched, torch.randn(2, 5, 32).to(dtype))


@pytest.mark.parametrize(
    "mlp", [GatedMlp(16), GatedMlp(16, nn.GELU("tanh")), GatedMlp(16, FormulaGelu()), PackedMlp(16)]
)
def test_gated_products(mlp: nn.Module) -> None:
    """A gated product is one pass, whatever the activation, packed or not, and no less exact."""
    patched = copy.deepcopy(mlp)
    report = kf.patch(patched)
    assert any("gated_act" in line.text for line in report.replaced)
    assert_no_worse(mlp, patched, torch.randn(7, 16))


def kept_for_backward(model: nn.Module, x: Tensor) -> int:
    """How many bytes of its own a model keeps."""
    sizes: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(x)
    return sum(sizes.values())


def test_a_patched_model_keeps_less() -> None:
    """The norms keep no fp32 copy and the products no activated gate, so less is kept for backward."""
    model, x = Model(64), torch.randn(256, 64)
    before = kept_for_backward(model, x)
    kf.patch(model)
    activated, normalised = 4 * 256 * 3 * 64, 4 * 256 * 64
    assert before - kept_for_backward(model, x) > 2 * activated + 3 * normalised


def test_another_activation_put_in_later_counts() -> None:
    """A rewritten product looks at its activation when it is called."""
    model, x = GatedMlp(16), torch.randn(3, 16)
    kf.patch(model)
    model.act = nn.Tanh()
    torch.testing.assert_close(model(x), model.down(torch.tanh(model.gate(x)) * model.up(x)))


def renaming(function: Any) -> Any:
    """A decorator that takes an argument by its old name, too."""

    @functools.wraps(function)
    def renamed(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **{"scale" if name == "factor" else name: value for name, value in kwargs.items()})

    return renamed


def noting(function: Any) -> Any:
    """A decorator that notes the function a second time, as those of `torch.compile` do."""
    renamed = renaming(function)
    renamed.noted = function
    return renamed


@pytest.mark.parametrize(("decorator", "rewritten"), [(renaming, True), (noting, False)])
def test_decorators_stay_around_a_rewritten_method(decorator: Any, rewritten: bool) -> None:
    """The inner function is replaced, once for each decorator; a wrapper that may look elsewhere is left."""

    class Decorated(Block):
        @decorator
        @torch.no_grad()
        def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
            h = x + self.mix(self.first(x)) * scale
            return h + self.second(h)

    model, x = randomized(Decorated(32)), torch.randn(4, 32, requires_grad=True)
    expected = model(x, factor=3.0)
    assert (texts(kf.patch(model)).get("Decorated") == "addition before self.second") == rewritten
    found = model(x, factor=3.0)
    torch.testing.assert_close(found, expected)
    assert not found.requires_grad
    inner = type(model).forward.__wrapped__.__wrapped__
    assert inner.__code__.co_filename.startswith("<kernel_fusion ") == rewritten


def test_activations_of_one_kernel_are_left() -> None:
    """An activation that PyTorch computes in one kernel stays; a formula is replaced."""
    report = kf.patch(nn.Sequential(nn.GELU(), FormulaGelu(), nn.Softmax(-1), nn.Softmax(1)))
    assert texts(report) == {"FormulaGelu": "bias_act, activation='gelu_tanh'", "Softmax": "softmax"}
    assert {line.text for line in report.left} == {
        "PyTorch computes it in one kernel",
        "it is not over the last dimension",
    }


@pytest.mark.parametrize("option", ["norms", "mlps", "activations", "residuals"])
def test_each_option_leaves_its_modules(option: str) -> None:
    """An option set to False leaves what it names."""
    model = nn.Sequential(Block(16), FormulaGelu(), nn.Softmax(-1))
    found = {line.kind for line in kf.patch(model, **{option: False}).replaced}
    missing = {
        "norms": {"HubNorm", "Block"},  # no addition without its norm
        "mlps": {"GatedMlp"},
        "activations": {"FormulaGelu", "Softmax"},
        "residuals": {"Block"},
    }[option]
    assert found == {"HubNorm", "Block", "GatedMlp", "FormulaGelu", "Softmax"} - missing


def test_a_second_patch_changes_nothing() -> None:
    """Patching is idempotent, and says how much was there already."""
    model = Model()
    first = kf.patch(model)
    kinds = [type(module) for module in model.modules()]
    second = kf.patch(model)
    assert second.replaced == []
    assert second.already == len(first.replaced)
    assert [type(module) for module in model.modules()] == kinds


def test_unpatch_gives_every_class_back() -> None:
    """After `unpatch` the classes are what they were, and so is every bit of the results."""
    model, x = Model(), torch.randn(4, 32)
    kinds, expected = [type(module) for module in model.modules()], model(x)
    count = len(kf.patch(model).replaced)
    report = kf.unpatch(model)
    assert len(report.replaced) == count
    assert str(report).startswith(f"Model: {count} modules restored, 0 left\n  restored ")
    assert [type(module) for module in model.modules()] == kinds
    assert torch.equal(model(x), expected)


def test_parameters_stay_the_same_objects() -> None:
    """Optimisers and ties hold on: parameters and state dict are the same, under the same names, and print alike."""
    model = Model()
    model[1].mlp.down.weight = model[0].mlp.down.weight
    named, text, keys = dict(model.named_parameters()), repr(model), list(model.state_dict())
    kf.patch(model)
    assert all(parameter is named[name] for name, parameter in model.named_parameters())
    assert list(model.state_dict()) == keys
    assert repr(model) == text
    assert isinstance(model[2], HubNorm)


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "torch.save"])
def test_copies_are_patched_too(how: str) -> None:
    """A copy computes the same bits with the same classes, and unpatches by itself."""
    model, x = randomized(Model()), torch.randn(4, 32)
    kf.patch(model)
    if how == "deepcopy":
        twin = copy.deepcopy(model)
    elif how == "pickle":
        twin = pickle.loads(pickle.dumps(model))
    else:
        torch.save(model, buffer := io.BytesIO())
        twin = torch.load(io.BytesIO(buffer.getvalue()), weights_only=False)
    assert type(twin[2]) is type(model[2])
    assert torch.equal(twin(x), model(x))
    kf.unpatch(twin)
    assert type(twin[2]) is HubNorm
    assert type(model[2]) is not HubNorm


def test_a_pickle_opens_in_another_process(tmp_path: Any) -> None:
    """The file holds the original class and the plan, so a fresh interpreter makes the patched class again."""
    model, x = (
        nn.Sequential(nn.LayerNorm(16), nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0)),
        torch.randn(2, 3, 16),
    )
    kf.patch(model)
    torch.save((model, x, model(x)), tmp_path / "model.pt")
    code = f"""
        import torch
        model, x, y = torch.load({str(tmp_path / "model.pt")!r}, weights_only=False)
        print(torch.equal(model(x), y), type(model[0]).__mro__[1] is torch.nn.LayerNorm)
    """
    assert python(code).stdout.split() == ["True", "True"]


def test_a_state_dict_loads_both_ways() -> None:
    """A checkpoint of either loads into the other."""
    model, other = randomized(Model()), Model()
    kf.patch(other)
    other.load_state_dict(model.state_dict())
    Model().load_state_dict(other.state_dict())
    x = torch.randn(4, 32)
    torch.testing.assert_close(other(x), model(x))


def test_moving_to_another_dtype_later() -> None:
    """Patched in fp32 and then moved, a model rounds as one that was moved first."""
    model, x = randomized(Model()), torch.randn(4, 32).bfloat16()
    other = copy.deepcopy(model).bfloat16()
    kf.patch(model)
    kf.patch(other)
    assert torch.equal(model.bfloat16()(x), other(x))


def test_a_model_on_meta() -> None:
    """A model without data is patched as well, and computes when it gets some."""
    with torch.device("meta"):
        model = Model()
    assert {line.kind for line in kf.patch(model).replaced} == {"HubNorm", "GatedMlp", "Block"}
    real = randomized(Model())
    model.to_empty(device="cpu").load_state_dict(real.state_dict())
    x = torch.randn(4, 32)
    torch.testing.assert_close(model(x), real(x))


def test_hooks_see_what_they_saw() -> None:
    """A hooked norm is called with one tensor and returns one, though an addition precedes it."""
    model, x, seen = Model(), torch.randn(4, 32), []
    kf.patch(model)
    expected = model(x)
    for module in (model[0].second, model[0].mlp.act):
        module.register_forward_hook(lambda module, args, result: seen.append((len(args), type(result))))
    torch.testing.assert_close(model(x), expected)
    assert seen == [(1, Tensor), (1, Tensor)]


def test_a_replaced_forward_is_left() -> None:
    """If something has put a forward into a module, such as an offloading hook, it stays."""
    model = nn.Sequential(HubNorm(8))
    model[0].forward = lambda x: x + 1
    report = kf.patch(model)
    assert [line.text for line in report.left] == ["its forward was replaced on the instance"]
    assert torch.equal(model(torch.zeros(8)), torch.ones(8))


def test_parametrized_and_scripted_modules_survive() -> None:
    """A module that PyTorch has rebuilt is left alone and works."""
    model = nn.Sequential(nn.LayerNorm(8), torch.jit.script(nn.LayerNorm(8)))
    nn.utils.parametrize.register_parametrization(model[0], "weight", nn.Softplus())
    x = torch.randn(3, 8)
    expected = model(x)
    assert kf.patch(model).replaced == []
    assert torch.equal(model(x), expected)


def test_compiled_before_and_after() -> None:
    """A model that was compiled before it is patched is compiled anew, in one graph, and computes the same."""
    model, x = randomized(Model()), torch.randn(4, 32)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    expected = compiled(x)
    assert kf.patch(compiled).replaced
    torch.testing.assert_close(compiled(x), expected)


def test_the_compiler_sees_the_unpatched_model() -> None:
    """A patched model's graph has the operations of the unpatched one, which the compiler fuses itself."""
    model, x = randomized(Model()), torch.randn(4, 32)
    unpatched = operations(model, x)
    assert kf.patch(model).replaced
    assert operations(model, x) == unpatched


def test_checkpointing() -> None:
    """Activation checkpointing recomputes the same bits."""
    model = randomized(Model())
    kf.patch(model)
    x = torch.randn(4, 32)

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, x: Tensor) -> Tensor:
            for block in self.model:
                x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)
            return x

    for one, other in zip(outcomes(Checkpointed(), x), outcomes(model, x), strict=True):
        assert torch.equal(one, other)


def test_torch_func_sees_through() -> None:
    """`functional_call` and forward mode work on a patched model."""
    model = randomized(Model(norm=nn.LayerNorm)).double()
    kf.patch(model)
    parameters = dict(model.named_parameters())
    x = torch.randn(3, 32, dtype=torch.float64)

    def run(x: Tensor) -> Tensor:
        return torch.func.functional_call(model, parameters, (x,))

    _, tangent = torch.func.jvp(run, (x,), (x,))
    step = 1e-6
    torch.testing.assert_close(tangent, (run(x + step * x) - run(x - step * x)) / (2 * step), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "name", ["pow", "square", "sum", "rsqrt", "reciprocal", "exp", "layer_norm", "rms_norm", "softmax"]
)
def test_the_imitated_autocast_widens_what_cuda_widens(name: str) -> None:
    """Each function that an examination widens is one that CUDA's autocast runs in fp32."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    from kernel_fusion.patching.autocast import CudaAutocast

    def call(x: Tensor) -> torch.dtype:
        extra: dict[str, Any] = {"pow": {"exponent": 2}, "softmax": {"dim": -1}}.get(name, {})
        if name.endswith("_norm"):
            extra = {"normalized_shape": (8,)}
        return getattr(F if hasattr(F, name) else torch, name)(x, **extra).dtype

    with CudaAutocast():
        ours = call(torch.ones(2, 8, dtype=torch.bfloat16))
    torch.set_autocast_enabled("cuda", True)
    try:
        with FakeTensorMode():
            theirs = call(torch.empty(2, 8, dtype=torch.bfloat16, device="cuda"))
    finally:
        torch.set_autocast_enabled("cuda", False)
    assert ours == theirs
    assert name == "rms_norm" or ours == torch.float32  # which PyTorch 2.11 does not widen


def test_nothing_of_the_user_is_disturbed() -> None:
    """Random numbers, threads, gradients and modes are after a patch what they were before."""
    model = Model()
    state, threads = torch.get_rng_state(), torch.get_num_threads()
    kf.patch(model)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.get_num_threads() == threads
    assert all(parameter.grad is None for parameter in model.parameters())
    assert model.training


def test_bad_arguments() -> None:
    """The error names a model that is no module, and an unknown rounding."""
    with pytest.raises(TypeError, match=r"`patch`: `model` must be a torch.nn.Module, got int"):
        kf.patch(3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"`unpatch`: `model` must be a torch.nn.Module, got int"):
        kf.unpatch(3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="`patch`: `rounding` must be one of 'match', 'once', 'hf', got 'twice'"):
        kf.patch(nn.LayerNorm(4), rounding="twice")
