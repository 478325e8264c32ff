"""`kf.patch` keeps the order of a method: what writes, and what draws, does so before and after what it did before."""

# ruff: noqa: D102 (the docstring of a module here says what its forward computes)
from __future__ import annotations

import copy
import importlib
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from patch_support import texts
from torch import Tensor, nn

import kernel_fusion as kf

_CLASS = """
import torch
from torch import nn
from torch.nn import functional as F

class Ordered(nn.Module):
    def __init__(self):
        super().__init__()
        self.branch = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(16, 16))
        self.write, self.same, self.act = nn.ReLU(inplace=True), nn.Identity(), nn.SiLU()
        self.one, self.other = nn.Linear(16, 16), nn.Linear(16, 16)
        self.drop, self.late = nn.Dropout(0.3), nn.Dropout(0.6)
        self.norm, self.bare = nn.LayerNorm(16), nn.LayerNorm(16, elementwise_affine=False)

    def doubled(self, x):
        return x.mul_(2)

    def forward(self, a, b):
        {}
"""
Load = Callable[..., Any]


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Load:
    """Make a module with a forward of these lines."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("sys.dont_write_bytecode", True)

    def made(lines: str, name: str = "ordered") -> Any:
        name = f"{name}_{tmp_path.name}"
        (tmp_path / f"{name}.py").write_text(_CLASS.format(lines.replace("; ", "\n        ")))
        importlib.invalidate_caches()
        torch.manual_seed(0)
        return importlib.import_module(name).Ordered()

    return made


def outcome(model: nn.Module, grads: bool = True) -> list[Tensor]:
    """The result, and the gradients of all that has some, for inputs that may be written to."""
    torch.manual_seed(1)
    leaves = torch.randn(2, 4, 16).requires_grad_(grads)
    y = model(*(leaf * 1 for leaf in leaves))
    if not grads:
        return [y]
    y.backward(torch.randn(y.shape))
    return [y.detach(), leaves.grad, *(p.grad for p in model.parameters() if p.grad is not None)]  # type: ignore[list-item]


def assert_same(model: nn.Module, grads: bool = True, **options: bool) -> kf.Report:
    """Patched, it computes the same; returns the report."""
    patched = copy.deepcopy(model)
    report = kf.patch(patched, **options)  # type: ignore[arg-type]
    with torch.set_grad_enabled(grads):
        for ours, theirs in zip(outcome(patched, grads), outcome(model, grads), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    return report


# Each stands for a form, with a write that no name shows: of a gate, a named one, one that a layer hands through, a
# modulation, a sum, a dropout. The text is what the report says of the method, "" if nothing of it is replaced.
_GATE, _LATE = "gated_act, activation='sigmoid'", "gated_act, activation='silu'"
WRITES = [
    ("return torch.sigmoid(a) * self.branch(a)", ""),
    ("return self.branch(a) * torch.sigmoid(a)", _GATE),
    ("g = torch.sigmoid(a); v = self.branch(a); return g * v", ""),
    ("g = torch.sigmoid(a); return self.branch(a) + g * b", ""),
    ("return self.act(self.same(a)) * self.branch(a)", _LATE),
    ("return self.act(self.one(a)) * self.branch(a)", _LATE),
    ("g = self.act(self.same(a)); v = self.branch(a); return g * v", _LATE),
    ("g = self.act(self.one(a)); a = self.write(a); return g * a", _LATE),
    ("return self.act(self.same(a.view(2, 2, 16))) * self.branch(a).view(2, 2, 16)", _LATE),
    ("return self.branch(a) * self.act(self.write(a))", _LATE),
    ("return self.act(a) * self.doubled(a)", ""),
    ("return self.bare(a) * (1 + self.branch(a)) + b", ""),
    ("return self.bare(a) * (1 + b) + self.branch(b)", "modulation after self.bare"),
    ("n = self.bare(a); return n * (1 + self.branch(a)) + b", ""),
    ("h = self.late(self.write(a)) + a * 0.5; return self.norm(h)", "dropout and addition before self.norm"),
    ("return self.norm(a + self.branch(a)) + a", "addition before self.norm"),
    ("h = a + b; return self.write(a) + self.norm(h)", "addition before self.norm"),
    ("h = a + b; r = h; return self.write(r) + self.norm(h)", ""),
    ("h = a + b; return self.branch(h) + self.norm(h)", ""),
    ("h = a + b; r = self.write(h); return self.norm(h) + r", ""),
    ("h = a + b; return self.write(b) + self.bare(h) * (1 + b)", "modulation after self.bare"),
    ("return self.bare(a + b) * (1 + self.branch(a))", "addition before self.bare"),
]


@pytest.mark.parametrize(("lines", "text"), WRITES)
def test_a_write_that_no_name_shows(load: Load, lines: str, text: str) -> None:
    """A layer that works in place between an activation, a norm or a dropout and what it would join changes nothing."""
    report = assert_same(load(lines).eval(), grads=False)
    assert texts(report).get("Ordered", "") == text
    if not text and "r = self.write" not in lines:
        left = [line.text for line in report.left if line.kind == "Ordered"]
        assert len(left) == 1
        assert left[0].endswith(": code between this and what it would join may write to what it reads")


@pytest.mark.parametrize("lines", [WRITES[0][0], WRITES[2][0], WRITES[14][0]])
def test_a_write_between_in_training(load: Load, lines: str) -> None:
    """The gradients are those of the unpatched model, too."""
    model = load(lines)
    model.drop.p = model.late.p = 0.0
    assert_same(model)


DRAWS = [
    "return self.drop(self.one(a)) * self.act(self.late(self.other(b)))",
    "return self.act(self.drop(a)) * self.late(b)",
    "g = self.act(self.drop(a)); return self.late(b) * g",
    "return self.norm(self.drop(a) + self.late(b))",
    "h = self.drop(a) + self.late(b); return self.norm(h) + h",
    "return self.bare(self.drop(a)) * (1 + self.late(b)) + b",
]


@pytest.mark.parametrize("lines", DRAWS)
def test_random_numbers_are_drawn_in_order(load: Load, lines: str) -> None:
    """With `dropouts=False` two dropouts around one expression drop what they dropped."""
    assert_same(load(lines), dropouts=False)


def test_a_layer_put_in_later_may_hand_its_input_through(load: Load) -> None:
    """Whether a gate is anybody else's is seen when it is computed: a linear layer may be replaced after the patch."""
    model = load("return self.act(self.one(a)) * self.branch(a)").eval()
    patched = copy.deepcopy(model)
    kf.patch(patched)
    model.one = patched.one = nn.Identity()
    torch.testing.assert_close(*(outcome(each, grads=False) for each in (patched, model)))


class Keeping(nn.Linear):
    """A linear layer that keeps its result."""

    def forward(self, input: Tensor) -> Tensor:
        self.kept = super().forward(input)
        return self.kept


class Adapted(nn.Linear):
    """A linear layer with something added, as adapters do."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) + 0.5 * input


@pytest.mark.parametrize(("layer", "fuses"), [(Keeping, False), (Adapted, True), (nn.Linear, True)])
@pytest.mark.parametrize("grads", [True, False])
def test_a_gate_of_an_unknown_layer(load: Load, layer: type[nn.Linear], fuses: bool, grads: bool) -> None:
    """It is fused if nobody else holds it, however it was made."""
    model = load("return self.act(self.one(a)) * self.other(b)")
    model.one = layer(16, 16)
    assert_same(model, grads)
    kf.patch(model)
    x = torch.randn(2, 4, 16)
    with torch.set_grad_enabled(grads), torch.profiler.profile() as profile:
        model(x, x)
    assert any("kernel_fusion::pointwise" in event.key for event in profile.key_averages()) == fuses


# ---- Random methods --------------------------------------------------------------------------------------------------


def _value(rng: random.Random, depth: int, names: list[str]) -> str:
    if depth == 0 or rng.random() < 0.25:
        return rng.choice(names)
    x, y = (_value(rng, depth - 1, names) for _ in range(2))
    layer = rng.choice(["one", "other", "same", "write", "branch", "act", "drop", "late", "norm", "bare", "doubled"])
    return rng.choice(
        [
            f"self.{layer}({x})",
            f"self.act({x}) * {y}",
            f"{y} * torch.sigmoid({x})",
            f"self.bare({x}) * (1 + {y}) + {rng.choice(names)}",
            f"self.norm({x} + {y})",
            f"(self.drop({x}) + {y})",
            f"({x} + {y})",
        ]
    )


def _method(rng: random.Random) -> str:
    """Lines of a method that gates, adds, drops, normalises, modulates and writes."""
    names, lines = ["a", "b"], []
    for place in range(rng.randint(2, 5)):
        name = rng.choice([*names, f"t{place}"])
        lines.append(f"{name} = {_value(rng, 2, names)}")
        names += [name] if name not in names else []
        if rng.random() < 0.2:
            lines.append(f"{rng.choice(names)}.retain_grad() if torch.is_grad_enabled() else None")
        if rng.random() < 0.2:
            lines.append(f"{name}.register_hook(lambda g: g.clamp(-0.3, 0.3)) if torch.is_grad_enabled() else None")
        if rng.random() < 0.2:
            lines.append(f"h = {rng.choice(names)} + {rng.choice(names)}; y = self.norm(h)")
            names += [each for each in ("h", "y") if each not in names]
    return "; ".join([*lines, f"return {' + '.join(names)}"])


@pytest.mark.parametrize("first", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in range(1, 40))])
def test_random_methods(load: Load, first: int) -> None:
    """Methods of all of these, with layers in place, hooks, `retain_grad` and returned sums, compute the same.

    A method that fails unpatched, as after a write to what backward reads, may fail or not. A patched one may refuse a
    write that the unpatched one allows, but computes nothing else.
    """
    for seed in range(40 * first, 40 * first + 40):
        model = load(_method(random.Random(seed)), f"random{seed}")
        for mode, grads in ((True, True), (False, False)):
            try:
                outcome(model.train(mode), grads)
            except RuntimeError:
                continue
            model.zero_grad()
            try:
                assert_same(model, grads, dropouts=False)
            except RuntimeError as error:  # docs/promises.md lists the writes that a patched model refuses
                if "modified by an inplace operation" not in str(error):
                    raise
