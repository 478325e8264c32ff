"""`kf.patch` looks at all that decides a forward: held objects, buffers, the mode, large values, `__call__`."""

# ruff: noqa: D102 (the docstring of a module here says what its forward computes)
from __future__ import annotations

import copy
import importlib
import inspect
import pickle
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

import kernel_fusion as kf


class Call(nn.Module):
    """A function that the module holds."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


class Config:
    """An object with an eps."""

    def __init__(self, eps: float) -> None:
        self.eps = eps

    def scaled(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(x) if self.eps == 1.0 else x * torch.sigmoid(1.702 * x)


class ConfigNorm(nn.Module):
    """RMSNorm whose eps is in an object."""

    def __init__(self, eps: float) -> None:
        super().__init__()
        self.weight, self.config = nn.Parameter(torch.ones(16)), Config(eps)

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (16,), self.weight, self.config.eps)


class BufferNorm(nn.Module):
    """LayerNorm whose bias is a buffer."""

    bias: Tensor

    def __init__(self, bias: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(16))
        self.register_buffer("bias", torch.full((16,), bias))

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, (16,), self.weight, self.bias)


class SteppedNorm(BufferNorm):
    """LayerNorm, after its first step."""

    steps: Tensor

    def __init__(self) -> None:
        super().__init__(0.0)
        self.register_buffer("steps", torch.tensor(1))

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, (16,), self.weight) if self.steps < 5 else x


class PositiveNorm(nn.Module):
    """RMSNorm by the absolute values of its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(16))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (16,), self.weight.abs(), 1e-6)


class MovingNorm(BufferNorm):
    """LayerNorm that counts what it has seen in a buffer."""

    def forward(self, x: Tensor) -> Tensor:
        self.bias.mul_(0.9).add_(0.1)
        return super().forward(x)


class DroppingNorm(nn.LayerNorm):
    """LayerNorm, then dropout."""

    def forward(self, input: Tensor) -> Tensor:
        return F.dropout(super().forward(input), 0.5, self.training)


class ClippedNorm(nn.LayerNorm):
    """LayerNorm, then a limit that made-up rows seldom reach."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input).clamp(-3.5, 3.5)


class TwiceNorm(nn.LayerNorm):
    """LayerNorm, which a call doubles."""

    def __call__(self, *args: Any) -> Any:
        return 2 * super().__call__(*args)


class TwiceSilu(nn.SiLU):
    """SiLU, which a call doubles."""

    def __call__(self, *args: Any) -> Any:
        return 2 * super().__call__(*args)


class DroppingSilu(nn.Module):
    """SiLU, with dropout in training."""

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(F.silu(x), 0.5, self.training)


class DetachedNorm(nn.RMSNorm):
    """RMSNorm whose statistics have no gradient."""

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x * torch.rsqrt(x.detach().square().mean(-1, keepdim=True) + 1e-6)


class InferenceNorm(nn.LayerNorm):
    """LayerNorm without gradients."""

    @torch.no_grad()
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input)


class CountingNorm(nn.LayerNorm):
    """LayerNorm that counts its calls."""

    calls = 0

    def forward(self, input: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(input)


class LoggingNorm(nn.LayerNorm):
    """LayerNorm that notes its calls in what it holds."""

    def __init__(self, log: Any) -> None:
        super().__init__(16)
        self.log = log

    def forward(self, input: Tensor) -> Tensor:
        self.log.append(1) if isinstance(self.log, list) else self.log.add_(1)
        return super().forward(input)


class MendingNorm(nn.LayerNorm):
    """LayerNorm of what is a number."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input.nan_to_num())


class SwitchedNorm(nn.LayerNorm):
    """LayerNorm, if it is on."""

    on = True

    def __init__(self) -> None:
        super().__init__(16)
        self.on = True

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) if self.on else input


class DefaultNorm(nn.LayerNorm):
    """LayerNorm with a number that is its class's."""

    scale = 1.0

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * self.scale


class Swish(nn.Module):
    """x * sigmoid(beta x)."""

    def __init__(self) -> None:
        super().__init__()
        self.beta = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(self.beta * x)


class DroppingSoftmax(nn.Softmax):
    """Softmax, with dropout in training."""

    def forward(self, input: Tensor) -> Tensor:
        return F.dropout(super().forward(input), 0.5, self.training)


class Gated(nn.Module):
    """act(a(x)) * b(x)."""

    def __init__(self, act: nn.Module) -> None:
        super().__init__()
        self.a, self.b, self.act = nn.Linear(16, 16), nn.Linear(16, 16), act

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.a(x)) * self.b(x)  # type: ignore[no-any-return]


class Halved:
    """Overrides a method, and is no module."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x / 2)  # type: ignore[misc, no-any-return]


class HalvedGated(Halved, Gated):
    """act(a(x / 2)) * b(x / 2)."""


class Summed(nn.Module):
    """norm(a(x) + x)."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.a, self.norm = nn.Linear(16, 16), norm

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x) + x
        return self.norm(h) + h  # type: ignore[no-any-return]


def assert_same(model: nn.Module, change: Callable[[Any], Any] = lambda model: None, size: float = 1.0) -> None:
    """The patched model computes the same, after both are changed."""
    patched = copy.deepcopy(model)
    kf.patch(patched)
    change(model)
    change(patched)
    x = size * torch.randn(64, 16)
    x[0, 0] *= 100
    results = []
    for one in (model, patched):
        torch.manual_seed(3)
        results.append(one(x))
    torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "model",
    [
        nn.Sequential(Call(lambda x: x * torch.sigmoid(x)), Call(lambda x: x * torch.tanh(F.softplus(x)))),
        nn.Sequential(Gated(Call(F.silu)), Gated(Call(F.gelu))),
        nn.Sequential(Call(Config(1.0).scaled), Call(Config(2.0).scaled)),
        nn.Sequential(ConfigNorm(1e-6), nn.Linear(16, 16), ConfigNorm(1e-1)),
        nn.Sequential(BufferNorm(0.0), BufferNorm(2.0)),
        nn.Sequential(MovingNorm(0.0)),
        nn.Sequential(ClippedNorm(16)),
        nn.Sequential(Call(lambda x: torch.clamp(F.relu(x), max=20.0))),
        Summed(TwiceNorm(16)),
        Gated(TwiceSilu()),
        HalvedGated(nn.SiLU()),
    ],
    ids=[
        "functions",
        "gates",
        "methods",
        "configs",
        "buffers",
        "statistics",
        "clipped",
        "limited",
        "call",
        "gate's call",
        "overridden",
    ],
)
def test_modules_of_a_class_that_compute_otherwise(model: nn.Module) -> None:
    """Modules that hold different things are not taken for each other, and nothing rare is lost."""
    assert_same(model, size=10.0)


@pytest.mark.parametrize(
    "model",
    [nn.Sequential(DroppingNorm(16)), Gated(DroppingSilu()), nn.Sequential(DroppingSoftmax(-1))],
    ids=["norm", "gate", "softmax"],
)
def test_a_model_in_evaluation_may_be_trained_later(model: nn.Module) -> None:
    """Code that runs in training only is seen though the model is patched in evaluation."""
    assert_same(model.eval(), nn.Module.train)


@pytest.mark.parametrize(
    ("norm", "name"), [(BufferNorm(0.0), "bias"), (SteppedNorm(), "steps"), (PositiveNorm(), "weight")], ids=str
)
def test_tensors_may_change_later(norm: nn.Module, name: str) -> None:
    """A checkpoint may be loaded after the patch, and weights may become negative."""
    assert_same(nn.Sequential(norm), lambda model: model[0].state_dict()[name].fill_(-7 if name == "weight" else 7))


@pytest.mark.parametrize(
    ("module", "change"),
    [
        (SwitchedNorm(), lambda module: setattr(module, "on", False)),
        (Summed(SwitchedNorm()), lambda module: setattr(module.norm, "on", False)),
        (Swish(), lambda module: setattr(module, "beta", 1.702)),
        (nn.RMSNorm(16), lambda module: setattr(module, "eps", 1.0)),
        (DefaultNorm(16), lambda module: setattr(module, "scale", 3.0)),
        (nn.LayerNorm(16, bias=False), lambda module: setattr(module, "bias", nn.Parameter(torch.ones(16)))),
    ],
    ids=["norm", "sum", "activation", "eps", "class", "bias"],
)
def test_settings_may_change_later(module: nn.Module, change: Any) -> None:
    """A patched norm or activation whose attributes are set anew computes by them."""
    assert_same(nn.Sequential(module), lambda model: change(model[0]))


@pytest.mark.parametrize(
    ("act", "change"),
    [
        (nn.GELU(), lambda model: setattr(model, "act", nn.GELU("tanh"))),
        (nn.LeakyReLU(), lambda model: setattr(model.act, "negative_slope", 0.3)),
        (Call(F.silu), lambda model: setattr(model.act, "function", F.relu)),
    ],
    ids=["another", "setting", "function"],
)
def test_an_activation_of_the_same_class_put_in_later_counts(act: nn.Module, change: Any) -> None:
    """A rewritten product looks at what its activation holds, too."""
    assert_same(Gated(act), change, size=3.0)


@pytest.mark.parametrize(
    "module",
    [DetachedNorm(16), InferenceNorm(16), Call(lambda x: x * torch.sigmoid(x.detach())), Call(torch.no_grad()(F.mish))],
    ids=["statistics", "norm", "activation", "activation without"],
)
def test_a_detached_gradient_stays_so(module: nn.Module) -> None:
    """A module whose result is ours and whose gradient is another function's is left."""
    model = nn.Sequential(nn.Linear(16, 16), module)
    patched = copy.deepcopy(model)
    assert kf.patch(patched).replaced == []
    x = torch.randn(8, 16)
    for one in (model, patched):
        y = one(x)
        if y.requires_grad:
            y.square().sum().backward()
    torch.testing.assert_close(patched[0].weight.grad, model[0].weight.grad)


@pytest.mark.parametrize("limit", [20.0, 65504.0])
def test_an_activation_with_a_limit_is_left(limit: float) -> None:
    """Also with that of fp16, which is far away."""
    assert kf.patch(nn.Sequential(Call(lambda x: (x * torch.sigmoid(x)).clamp(max=limit)))).replaced == []


def test_what_a_norm_keeps_of_its_calls_is_kept() -> None:
    """A norm that writes to itself runs its own forward."""
    model = nn.Sequential(CountingNorm(16))
    kf.patch(model)
    model(torch.ones(2, 16))
    assert model[0].calls == 1


@pytest.mark.parametrize("log", [[], torch.zeros(())], ids=["list", "tensor"])
def test_what_a_norm_holds_is_not_written_to(log: Any) -> None:
    """Its own calls are noted, those of an examination are not."""
    model = nn.Sequential(LoggingNorm(log))
    kf.patch(model)
    model(torch.ones(2, 16))
    assert sum(log) == 1 if isinstance(log, list) else log == 1


def test_a_norm_that_mends_nan_is_left() -> None:
    """Our norms return NaN for NaN."""
    model = nn.Sequential(MendingNorm(16))
    kf.patch(model)
    assert model(torch.full((2, 16), torch.nan)).isfinite().all()


def turned(t: Tensor) -> Tensor:
    """The halves of a head, turned by a right angle."""
    a, b = t.chunk(2, -1)
    return torch.cat((-b, a), -1)


def turn_in_place(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Turn two tensors, and return them."""
    for t in (q, k):
        t.copy_(t * cos.unsqueeze(1) + turned(t) * sin.unsqueeze(1))
    return q, k


class Angles(nn.Module):
    """cos and sin of positions, each angle twice."""

    def forward(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        angles = (positions.unsqueeze(-1) * torch.tensor([1.0, 0.1])).repeat(1, 1, 2)
        return angles.cos(), angles.sin()


class TurningInPlace(nn.Module):
    """Query by key, both turned where they are."""

    def __init__(self) -> None:
        super().__init__()
        self.angles = Angles()

    def forward(self, x: Tensor) -> Tensor:
        q, k = x.unflatten(-1, (2, 2, 4)).movedim(2, 0).transpose(-2, -3).clone()
        cos, sin = self.angles(x, torch.arange(x.shape[1]).expand(x.shape[0], -1))
        turn_in_place(q, k, cos, sin)
        return q @ k.mT  # type: ignore[no-any-return]


def test_a_function_that_turns_in_place_is_left() -> None:
    """A caller may ignore what such a function returns."""
    assert_same(nn.Sequential(nn.Unflatten(0, (8, 8)), TurningInPlace()))


def test_a_patch_leaves_buffers_and_random_numbers() -> None:
    """The user's statistics do not move, though the module's code writes into them, nor do random numbers."""
    model = nn.Sequential(MovingNorm(0.5), DroppingNorm(16))
    state = torch.get_rng_state()
    kf.patch(model)
    assert torch.equal(model.get_buffer("0.bias"), torch.full((16,), 0.5))
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_defaults_of_the_user_change_nothing(dtype: torch.dtype) -> None:
    """A default device and a default dtype do not reach the made-up tensors."""
    model = nn.Sequential(nn.LayerNorm(16))
    torch.set_default_dtype(dtype)
    try:
        with torch.device("meta"):
            assert len(kf.patch(model).replaced) == 1
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_patch_within_autocast(device: str) -> None:
    """An examination, also on a GPU, sees no autocast of the user's, who has it afterwards."""

    def plain(x: Tensor) -> Tensor:
        assert not torch.is_autocast_enabled(device)
        return x * torch.sigmoid(x)

    torch.set_autocast_enabled(device, True)
    try:
        assert len(kf.patch(nn.Sequential(Call(plain))).replaced) == 1
        assert torch.is_autocast_enabled(device)
    finally:
        torch.set_autocast_enabled(device, False)


def test_a_patched_model_computes_shapes_on_meta() -> None:
    """Tensors without data go through norms, sums and softmaxes as before."""
    model = nn.Sequential(Summed(nn.LayerNorm(16)), nn.LayerNorm(16), nn.Softmax(-1))
    assert len(kf.patch(model).replaced) == 4
    assert model.to("meta")(torch.empty(3, 16, device="meta")).shape == (3, 16)


def test_a_gate_by_a_builtin_function_pickles() -> None:
    """A patched model remembers nothing of an activation that cannot be pickled."""
    model = Gated(Call(F.gelu))
    assert kf.patch(model).replaced
    x = torch.randn(4, 16)
    assert torch.equal(pickle.loads(pickle.dumps(model))(x), model(x))


class Entered:
    """A class that enters its subclasses in a table."""

    table: ClassVar[dict[str, type]] = {}

    def __init_subclass__(cls, *, under: str) -> None:
        cls.table[under] = cls


class EnteredNorm(nn.LayerNorm, Entered, under="norm"):
    """LayerNorm in a table."""

    def __setattr__(self, name: str, value: Any) -> None:
        """Refuse, after the constructor."""
        assert "bias" not in vars(self).get("_parameters", {})
        super().__setattr__(name, value)


class Final(type):
    """Refuses subclasses."""

    def __new__(cls, name: str, bases: tuple[type, ...], members: dict[str, Any]) -> Any:
        """A class, unless it has a base beside `nn.LayerNorm`."""
        if bases != (nn.LayerNorm,):
            raise TypeError("it is final")
        return super().__new__(cls, name, bases, members)


class FinalNorm(nn.LayerNorm, metaclass=Final):
    """LayerNorm without subclasses."""


def test_a_class_may_have_rules_for_subclasses_and_attributes() -> None:
    """A patch does not enter a class in the user's table, and needs neither its keywords nor its `__setattr__`."""
    model = nn.Sequential(EnteredNorm(16))
    assert len(kf.patch(model).replaced) == 1
    assert Entered.table == {"norm": EnteredNorm}
    assert isinstance(model[0], EnteredNorm)
    kf.unpatch(model)
    assert type(model[0]) is EnteredNorm


def test_a_class_without_subclasses_is_left() -> None:
    """The report says what its metaclass says, and the rest is patched."""
    report = kf.patch(nn.Sequential(FinalNorm(16), nn.LayerNorm(16)))
    assert [line.text for line in report.left] == ["its class allows no subclass: it is final"]
    assert len(report.replaced) == 1


def test_a_class_made_of_a_patched_one_copies_as_itself() -> None:
    """FSDP2 and parametrisations extend the class of a module, and say themselves what a copy or a pickle is."""
    model = nn.LayerNorm(16)
    kf.patch(model)
    model.__class__ = type("FSDPLayerNorm", (type(model),), {})
    assert type(copy.copy(model)) is type(model)
    nn.utils.parametrize.register_parametrization(model, "weight", nn.Softplus())
    with pytest.raises(RuntimeError, match="only supported through state_dict"):
        pickle.dumps(model)


def test_the_signature_of_a_forward_stays() -> None:
    """Libraries read it, such as `kernels` and FX."""
    model = nn.Sequential(nn.LayerNorm(16), nn.Softmax(-1), Swish())
    before = [inspect.signature(module.forward) for module in model]
    assert len(kf.patch(model).replaced) == 3
    assert [inspect.signature(module.forward) for module in model] == before
    x = torch.randn(2, 16)
    torch.testing.assert_close(torch.fx.symbolic_trace(model[0])(x), model[0](x))


def test_an_export_has_the_operations_of_the_unpatched_model() -> None:
    """An exported program opens where kernel_fusion is not installed, and goes to ONNX."""
    model, x = nn.Sequential(Summed(nn.LayerNorm(16)), nn.RMSNorm(16)), torch.randn(2, 16)
    kf.patch(model)
    assert "kernel_fusion" not in str(torch.export.export(model, (x,)).graph)


@pytest.mark.filterwarnings("ignore:`torch.jit.*` is (deprecated|not supported)")
def test_a_trace_has_the_operations_of_the_unpatched_model() -> None:
    """So ONNX's older exporter, which traces, takes a patched model."""
    model, x = nn.Sequential(Summed(nn.LayerNorm(16)), Gated(nn.SiLU()), nn.RMSNorm(16), Swish()), torch.randn(2, 16)
    assert len(kf.patch(model).replaced) >= 4
    assert "kernel_fusion::" not in str(torch.jit.trace(model, x).inlined_graph)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
@pytest.mark.parametrize("model", [nn.LayerNorm(16), Call(F.silu), Summed(nn.LayerNorm(16)), Gated(nn.SiLU())], ids=str)
def test_nested_tensors_without_a_shape(model: nn.Module) -> None:
    """Strided nested tensors, which `nn.TransformerEncoder` makes, run the module's own code."""
    x = torch.nested.nested_tensor([torch.randn(2, 16), torch.randn(3, 16)])
    expected = model(x)
    kf.patch(nn.Sequential(model))
    for ours, theirs in zip(model(x).unbind(), expected.unbind(), strict=True):
        torch.testing.assert_close(ours, theirs)


class FormulaGelu(nn.Module):
    """GELU as GPT-2 writes it."""

    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * x * (1.0 + torch.tanh(0.7978845608028654 * (x + 0.044715 * torch.pow(x, 3.0))))


class SelfGated(nn.Module):
    """act(x) * x."""

    def __init__(self, act: nn.Module) -> None:
        super().__init__()
        self.act = act

    def forward(self, x: Tensor) -> Tensor:
        return self.act(x) * x  # type: ignore[no-any-return]


@pytest.mark.parametrize("model", [FormulaGelu(), SelfGated(FormulaGelu()), SelfGated(nn.SiLU())], ids=repr)
def test_an_activation_that_autocast_widens(model: nn.Module) -> None:
    """Under CUDA's autocast `torch.pow` returns fp32, and so does what is computed from it, patched or not."""
    model = nn.Sequential(model)
    patched = copy.deepcopy(model)
    assert kf.patch(patched).replaced
    torch.set_autocast_enabled("cuda", True)
    try:
        with FakeTensorMode(allow_non_fake_inputs=True):
            x = torch.empty(4, 16, dtype=torch.float16, device="cuda")
            found, expected = (one(x).dtype for one in (patched, model))
    finally:
        torch.set_autocast_enabled("cuda", False)
    assert found == expected


def test_a_norm_of_no_columns_is_left() -> None:
    """FSDP's shard of a small weight may be empty, and a patch must not fail for that."""
    assert "row" in kf.patch(nn.Sequential(nn.LayerNorm(0))).left[0].text


def test_weights_of_inference_mode() -> None:
    """A model made in inference mode is patched, too."""
    with torch.inference_mode():
        model = nn.Sequential(nn.LayerNorm(16))
        assert len(kf.patch(model).replaced) == 1


_FILE = """
from torch import nn

class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.act = nn.SiLU()

    def forward(self, x):
        return self.act(x) * x + 1.0
"""


def test_a_file_that_has_changed_since_is_not_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A method is rewritten from its source only where that is what runs."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    file = tmp_path / "edited_later.py"
    file.write_text(_FILE)
    model = importlib.import_module("edited_later").Gated()
    file.write_text(_FILE.replace("+ 1.0", "- 1000.0"))
    x = torch.randn(2, 16)
    expected = model(x)
    kf.patch(model)
    assert torch.equal(model(x), expected)


def test_a_module_without_text_is_named() -> None:
    """Its gated product, if there is one, cannot be seen, and the report says so."""
    scope: dict[str, Any] = {"__name__": __name__}
    exec(_FILE, scope)
    report = kf.patch(nn.Sequential(scope["Gated"]()))
    assert ("Gated", "the text of its method `forward` is missing", "0") in report.left
    assert report.replaced == []


_METHOD = """
from torch import nn

class Written(nn.Module):
    def __init__(self):
        super().__init__()
        self.act, self.norm, self.bare = nn.SiLU(), nn.LayerNorm(16), nn.LayerNorm(16, elementwise_affine=False)
        self.write = nn.ReLU(inplace=True)

    def forward(self, a, b):
        {}
"""


@pytest.mark.parametrize(
    ("name", "lines"),
    [
        ("other_sum", ["h = a + b", "return sum(self.norm(h) for h in (a, b)) + h"]),
        ("other_gate", ["g = self.act(a)", "return sum([g * v for g, v in ((a, b), (b, a))])"]),
        ("one_line", ["y = self.bare(a); z = y * (1 + b) + a; return y + z"]),
        ("gate_written", ["g = a * 1", "return self.act(g) * g.mul_(2)"]),
        ("input_written", ["h = a * 1", "y = self.bare(h)", "return y * (1 + h.mul_(2)) + b"]),
        ("view_written", ["h = a * 1", "g = self.act(h.view(4, 16))", "h += b", "return g * h"]),
        ("sum_written", ["h = a + b", "return self.write(h) + self.norm(h)"]),
        ("named_within", ["h = a * 1", "return h * 2 + self.bare((h := b)) * (1 + a)"]),
        ("condition", ["h = a[:, 1:] + b[:, 1:]", "return self.norm(h) if h.shape[1] == 16 else h"]),
        ("short_cut", ["h = a[:, 1:] + b[:, 1:]", "return h if h.shape[1] != 16 or self.norm(h) is None else a"]),
    ],
)
def test_names_and_writes_that_decide_a_value(
    name: str, lines: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a comprehension binds, what is read again, written to, or not computed at all: none of that is moved."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / f"written_{name}.py").write_text(_METHOD.format("\n        ".join(lines)))
    model = importlib.import_module(f"written_{name}").Written()
    a, b = torch.randn(4, 16), torch.randn(4, 16)
    with torch.no_grad():
        expected = model(a, b)
        kf.patch(model)
        torch.testing.assert_close(model(a, b), expected)


def test_an_activation_may_refuse_an_input() -> None:
    """Its error does not end the patch, and what it takes is computed as before."""

    def choosy(x: Tensor) -> Tensor:
        assert x.dim() == 3
        assert x.dtype != torch.bfloat16
        return x * torch.sigmoid(x)

    model, x = Gated(Call(choosy)), torch.randn(2, 4, 16, dtype=torch.float64)
    expected = model.double()(x)
    assert len(kf.patch(nn.Sequential(model, nn.LayerNorm(16))).replaced) >= 1
    torch.testing.assert_close(model(x), expected)


class LazyNorm(nn.modules.lazy.LazyModuleMixin, nn.Module):  # type: ignore[misc]
    """RMSNorm that learns its size from its first input."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.UninitializedParameter()

    def initialize_parameters(self, x: Tensor) -> None:
        """Make the weight."""
        self.weight.materialize(x.shape[-1:])
        nn.init.ones_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], self.weight, 1e-6)


def test_a_lazy_norm_is_left_until_it_has_a_shape() -> None:
    """Its size is known after a call."""
    model = nn.Sequential(LazyNorm(), nn.LazyLinear(3))
    assert kf.patch(model).replaced == []
    model(torch.ones(2, 16))
    assert len(kf.patch(model).replaced) == 1


@dataclass(frozen=True)
class Sizes:
    """Seems hashable."""

    eps: float
    sizes: list[int] = field(default_factory=list)


def test_a_norm_may_hold_what_has_no_hash() -> None:
    """A frozen dataclass of lists is compared as it prints."""
    model = nn.Sequential(ConfigNorm(1e-6), ConfigNorm(1e-1))
    model[0].config, model[1].config = Sizes(1e-6), Sizes(1e-1)  # type: ignore[assignment]
    assert_same(model)


class ReducedNorm(nn.LayerNorm):
    """LayerNorm that says itself how it is pickled."""

    def __reduce__(self) -> Any:
        """Made anew."""
        return ReducedNorm, (16,)


def test_a_class_may_say_how_it_is_pickled() -> None:
    """What it says makes a whole module, which can be patched again."""
    model = nn.Sequential(ReducedNorm(16))
    kf.patch(model)
    x = torch.randn(2, 16)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        torch.testing.assert_close(twin(x), model(x))


def test_a_patch_among_fake_tensors() -> None:
    """A model of fake tensors is patched as one on `meta` is; so other modes, such as counters, see no examination."""
    with FakeTensorMode():
        model = nn.Sequential(Summed(nn.LayerNorm(16)), Gated(nn.SiLU()))
        assert len(kf.patch(model).replaced) == 3
        assert model(torch.randn(2, 16)).shape == (2, 16)


def test_a_patch_that_is_stopped_leaves_the_model() -> None:
    """All modules are changed, or none."""

    def stop(x: Tensor) -> Tensor:
        raise KeyboardInterrupt

    model = nn.Sequential(nn.LayerNorm(16), Call(stop))
    with pytest.raises(KeyboardInterrupt):
        kf.patch(model)
    assert type(model[0]) is nn.LayerNorm


@pytest.mark.parametrize("before", [True, False])
def test_methods_that_a_module_holds_are_exchanged(before: bool) -> None:
    """accelerate's hooks keep the forward that they replace, and put it back on the instance."""
    model, x = nn.LayerNorm(16), torch.randn(64, 16)
    expected = model(x)
    if before:
        model.forward = model.forward  # type: ignore[method-assign]
    assert len(kf.patch(model).replaced) == 1
    model.forward = model.forward  # type: ignore[method-assign]
    assert vars(model)["forward"].__func__ is not nn.LayerNorm.forward
    kf.unpatch(model)
    assert vars(model)["forward"].__func__ is nn.LayerNorm.forward
    assert torch.equal(model(x), expected)


def test_a_subclass_made_elsewhere_is_rewritten() -> None:
    """FSDP2 makes a class of a layer's in its own file; the layer's methods are found."""
    model = Summed(nn.LayerNorm(16))
    model.__class__ = type("FSDPSummed", (Summed,), {"__module__": "elsewhere"})
    assert [line.kind for line in kf.patch(model).replaced] == ["LayerNorm", "FSDPSummed"]


def test_two_threads_may_patch() -> None:
    """Each has the process's number of threads back afterwards, and so do later ones."""
    threads = torch.get_num_threads()
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: kf.patch(nn.Sequential(ConfigNorm(1e-6))), range(8)))
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(torch.get_num_threads).result() == threads == torch.get_num_threads()
