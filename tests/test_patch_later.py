"""`kf.patch` and what changes after it: methods, helpers and settings that are put in later count, as unpatched."""

# ruff: noqa: D102 (the docstring of a module here says what its forward computes)
from __future__ import annotations

import copy
import functools
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from patch_support import texts
from torch import Tensor, nn
from torch.nn import functional as F

import kernel_fusion as kf

SCALE = 1.0
TABLE = {"scale": 1.0}
STATE = types.SimpleNamespace(scale=1.0)


def helper(x: Tensor) -> Tensor:
    """RMSNorm without a weight."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


def renormed(x: Tensor) -> Tensor:
    """Half of it."""
    return 0.5 * helper_of_before(x)


helper_of_before = helper


class Norm(nn.Module):
    """RMSNorm, and what decides it in all the ways there are."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, 16))


class ByHelper(Norm):
    """By a function of its file."""

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * helper(x)


class ByMethod(Norm):
    """By another method."""

    def _norm(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * self._norm(x)


class BySuper(ByMethod):
    """By its base's forward."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


class WithBias(ByMethod):
    """With a bias, if it has one."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.weight * self._norm(x)
        bias = getattr(self, "bias", None)
        return y if bias is None else y + bias


class WithNoBias(WithBias):
    """The same, with a bias that is None."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = None


class ByClass(ByMethod):
    """With a factor of its class."""

    scale = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * self._norm(x) * self.scale


class ByConstant(ByMethod):
    """With a factor of its file."""

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * self._norm(x) * SCALE


class ByState(ByMethod):
    """With a factor of an object of its file."""

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * self._norm(x) * STATE.scale


class ByTable(ByMethod):
    """With a factor in a table of its file."""

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * self._norm(x) * TABLE["scale"]


class Config:
    """A configuration."""

    def __init__(self, inner: Any = None) -> None:
        self.scale, self.inner = 1.0, inner


class Holding(ByMethod):
    """With factors of what it holds."""

    def __init__(self, held: Any, get: Callable[[Any], Any]) -> None:
        super().__init__()
        self.held, self.get = held, get

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * self._norm(x) * self.get(self.held)


def _halve(norm: Any) -> None:
    norm.held = functools.partial(abs, 0.5)


class Gated(nn.Module):
    """act(a(x)) * b(x)."""

    def __init__(self, act: Any = None) -> None:
        super().__init__()
        self.a, self.b, self.act = nn.Linear(16, 16), nn.Linear(16, 16), act or nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.a(x)) * self.b(x)  # type: ignore[no-any-return]


class InFunction(Gated):
    """The same, decorated."""

    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.a(x)) * self.b(x)  # type: ignore[no-any-return]


class Act(nn.Module):
    """SiLU by a function of its file."""

    def forward(self, x: Tensor) -> Tensor:
        return swish(x)


def swish(x: Tensor) -> Tensor:
    """SiLU."""
    return x * torch.sigmoid(x)


class Summed(nn.Module):
    """norm(a(x) + x)."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.a, self.norm = nn.Linear(16, 16), norm

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x) + x
        return self.norm(h) + h  # type: ignore[no-any-return]


def doubled(self: Any, x: Tensor) -> Tensor:
    """A forward put in later."""
    return 2 * x


def assert_same(model: nn.Module, change: Callable[[Any], Any]) -> list[kf.Report]:
    """The patched model computes the same after the change, and one patched after the change, too."""
    patched, later = copy.deepcopy(model), copy.deepcopy(model)
    reports = [kf.patch(patched)]
    change(model)
    change(patched)
    change(later)
    reports.append(kf.patch(later))
    x = torch.randn(8, 16)
    expected = model(x)
    for one in (patched, later):
        torch.testing.assert_close(one(x), expected, rtol=1e-4, atol=1e-4)
    return reports


def put(monkeypatch: pytest.MonkeyPatch, target: Any, name: str, value: Any) -> Callable[[Any], None]:
    """A change of something that modules share."""
    return lambda model: monkeypatch.setattr(target, name, value)


_HERE = __import__("sys").modules[__name__]


@pytest.mark.parametrize(
    ("model", "target", "name", "value"),
    [
        (ByMethod(), ByMethod, "forward", doubled),
        (nn.LayerNorm(16), nn.LayerNorm, "forward", doubled),
        (BySuper(), ByMethod, "forward", doubled),
        (ByMethod(), ByMethod, "_norm", doubled),
        (ByHelper(), _HERE, "helper", renormed),
        (Summed(ByHelper()), _HERE, "helper", renormed),
        (Summed(ByMethod()), Summed, "forward", doubled),
        (Gated(), Gated, "forward", doubled),
        (InFunction(), InFunction, "forward", doubled),
        (Gated(Act()), Act, "forward", doubled),
        (Gated(Act()), _HERE, "swish", F.relu),
        (Gated(swish), torch, "__doc__", None),
        (nn.Sequential(Act()), Act, "forward", doubled),
        (nn.Softmax(-1), nn.Softmax, "forward", doubled),
        (ByClass(), ByClass, "scale", 3.0),
        (ByConstant(), _HERE, "SCALE", 3.0),
        (ByState(), STATE, "scale", 3.0),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_what_modules_share_may_be_replaced(
    model: nn.Module, target: Any, name: str, value: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A method, a function of a file, a class attribute or a constant put in later is what runs, now and patched."""
    first, _ = assert_same(nn.Sequential(model), put(monkeypatch, target, name, value))
    assert first.replaced


@pytest.mark.parametrize(
    ("model", "change", "replaced"),
    [
        (WithBias(), lambda norm: setattr(norm, "bias", nn.Parameter(torch.ones(16))), True),
        (WithBias(), lambda norm: norm.register_buffer("bias", torch.ones(16)), True),
        (WithBias(), lambda norm: setattr(norm, "bias", 1.0), True),
        (WithNoBias(), lambda norm: setattr(norm, "bias", nn.Parameter(torch.ones(16))), True),
        (ByMethod(), lambda norm: setattr(norm, "_norm", lambda x: 3 * x), True),
        (ByTable(), lambda norm: TABLE.update(scale=3.0), True),
        (Holding(Config(), lambda held: held.scale), lambda norm: setattr(norm.held, "scale", 3.0), True),
        (Holding([1.0], lambda held: held[0]), lambda norm: norm.held.append(norm.held.pop() + 2), True),
        (Holding({"scale": 1.0}, lambda held: held["scale"]), lambda norm: norm.held.update(scale=3.0), True),
        (Holding(torch.ones(()), lambda held: held), lambda norm: norm.held.fill_(3.0), False),
        (Holding((1.0,), lambda held: held[0]), lambda norm: setattr(norm, "held", (3.0,)), True),
        (Holding(functools.partial(abs, 1.0), lambda held: held()), _halve, True),
    ],
    ids=[
        "parameter",
        "buffer",
        "number",
        "none",
        "method",
        "table",
        "configuration",
        "list",
        "dict",
        "tensor",
        "tuple",
        "partial",
    ],
)
def test_settings_that_are_absent_or_held(model: nn.Module, change: Any, replaced: bool) -> None:
    """What was absent at the patch, and what a module holds, counts; code that reads a tensor it holds is left."""
    first, _ = assert_same(nn.Sequential(model), lambda model: change(model[0]))
    assert bool(first.replaced) == replaced
    TABLE.update(scale=1.0)


class Configured(ByMethod):
    """With eps and a factor of a configuration."""

    def __init__(self) -> None:
        super().__init__()
        self.config = Config(Config())

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * self._norm(x) * self.config.scale * self.config.inner.scale


@pytest.mark.parametrize("inner", [False, True])
def test_an_entry_of_a_held_configuration_counts(inner: bool) -> None:
    """Attributes of objects that a norm holds are compared, one by one."""

    def change(model: Any) -> None:
        (model[0].config.inner if inner else model[0].config).scale = 3.0

    first, _ = assert_same(nn.Sequential(Configured()), change)
    assert first.replaced


def test_attributes_that_no_code_reads_change_nothing() -> None:
    """FSDP notes on an activation that it manages it: a gated product stays one pass, and so does a norm."""
    model = nn.Sequential(Gated(), ByMethod())
    kf.patch(model)
    for module in (model[0].act, model[1]):
        module._is_fsdp_managed_module = True
    with torch.profiler.profile() as profile:
        model(torch.randn(4, 16))
    assert {"kernel_fusion::pointwise", "kernel_fusion::rms_norm"} <= {event.name for event in profile.events()}


def rotate_half(x: Tensor) -> Tensor:
    """The halves of a head, turned by a right angle."""
    a, b = x.chunk(2, -1)
    return torch.cat((-b, a), -1)


def turn(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Both, turned."""
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin


class Angles(nn.Module):
    """cos and sin of positions, each angle twice."""

    def forward(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        angles = (positions.unsqueeze(-1) * torch.tensor([1.0, 0.1, 0.2, 0.3])).repeat(1, 1, 2)
        return angles.cos(), angles.sin()


class Turning(nn.Module):
    """Query by key, both turned."""

    def __init__(self) -> None:
        super().__init__()
        self.angles = Angles()

    def forward(self, x: Tensor) -> Tensor:
        q, k = x.reshape(1, 4, 2, 2, 8).movedim(2, 0).transpose(-2, -3)
        cos, sin = self.angles(x, torch.arange(4)[None])
        q, k = turn(q, k, cos, sin)
        return q @ k.mT  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", ["rotate_half", "turn", "forward"])
def test_a_helper_of_a_rotation_may_be_replaced(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The function of angles, what it calls, and what makes the angles: another one runs as it is."""

    def interleaved(self: nn.Module, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        angles = (positions.unsqueeze(-1) * torch.tensor([1.0, 0.1, 0.2, 0.3])).repeat_interleave(2, -1)
        return angles.cos(), angles.sin()

    values: dict[str, Any] = {"rotate_half": lambda x: x.flip(-1), "turn": lambda q, k, cos, sin: (k, q)}
    change = put(monkeypatch, *(Angles, "forward", interleaved) if name == "forward" else (_HERE, name, values[name]))
    model = nn.Sequential(nn.Unflatten(0, (1, -1)), Turning())
    patched = copy.deepcopy(model)
    assert "Turning" in texts(kf.patch(patched))
    x = torch.randn(8, 16)
    torch.testing.assert_close(patched(x), model(x))
    change(model)
    torch.testing.assert_close(patched(x), model(x))
