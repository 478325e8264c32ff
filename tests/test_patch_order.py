"""`kf.patch` keeps the order of a method: what writes, and what draws, does so before and after what it did before."""

# ruff: noqa: D102 (the docstring of a module here says what its forward computes)
from __future__ import annotations

import copy
import importlib
import itertools
import random
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
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
        self.fire = nn.ModuleDict({{"squeeze": nn.Sequential(nn.ReLU(inplace=True), nn.Linear(16, 16))}})
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


def outcome(model: nn.Module, grads: bool = True, strided: bool = False) -> list[Tensor]:
    """The result, and the gradients of all that has some, for inputs that may be written to."""
    torch.manual_seed(1)
    model.zero_grad()
    leaves = torch.randn(2, 4, 16).requires_grad_(grads)
    inputs = [leaf * 1 for leaf in leaves]
    if strided:  # with gaps between rows, and with rows that do not lie in one piece
        inputs = [torch.cat((inputs[0], inputs[1]), 1)[:, :16], inputs[1].t().contiguous().t()]
    y = model(*inputs)
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


def both(load: Load, methods: list[str], **options: bool) -> tuple[list[Any], nn.ModuleList, kf.Report]:
    """A model for each method; copies, patched in one call, which examines their layers once; and the report."""
    models = [load(lines, f"ordered{place}") for place, lines in enumerate(methods)]
    patched = nn.ModuleList(map(copy.deepcopy, models))
    return models, patched, kf.patch(patched, **options)  # type: ignore[arg-type]


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
    ("return torch.sigmoid(a) * self.fire.squeeze(a)", ""),
    ("fire = self.fire; return torch.sigmoid(a) * fire.squeeze(a)", ""),
    ("return torch.sigmoid(a) * b.view(b.shape[0], *b.shape[1:], 1).squeeze(-1)", _GATE),
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
    ("return self.bare(a + b) * (1 + self.write(a))[:]", "addition before self.bare"),
    ("return self.norm(self.write(a) + self.norm(a + a))", "addition before self.norm"),
    ("return self.act(self.write(a)) * self.norm(a + b)", f"{_LATE}; addition before self.norm"),
]


def test_a_write_that_no_name_shows(load: Load) -> None:
    """A layer that works in place between an activation, a norm or a dropout and what it would join changes nothing."""
    methods = [lines for lines, _ in WRITES]
    models, patched, report = both(load, methods)
    for place, (model, ours, (lines, text)) in enumerate(zip(models, patched, WRITES, strict=True)):
        with torch.no_grad():
            torch.testing.assert_close(outcome(ours.eval(), False), outcome(model.eval(), False), msg=lines)
        assert [line.text for line in report.replaced if line.name == str(place)] == ([text] if text else []), lines
        if not text and "r = self.write" not in lines:
            left = [line.text for line in report.left if line.name == str(place)]
            assert len(left) == 1, lines
            assert left[0].endswith(": code between this and what it would join may write to what it reads")


@pytest.mark.parametrize("lines", [WRITES[0][0], WRITES[2][0], WRITES[17][0]])
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


def test_random_numbers_are_drawn_in_order(load: Load) -> None:
    """With `dropouts=False` two dropouts around one expression drop what they dropped."""
    models, patched, _ = both(load, DRAWS, dropouts=False)
    for model, ours, lines in zip(models, patched, DRAWS, strict=True):
        torch.testing.assert_close(outcome(ours), outcome(model), rtol=1e-4, atol=1e-4, msg=lines)


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


# Products and sums whose operands lie in memory in different ways, where the first one decides the result's strides.
LAID_OUT = [
    "return b * torch.sigmoid(a)",
    "return torch.sigmoid(b) * a",
    "g = torch.sigmoid(a); return b * g",
    "h = b + self.drop(a); return h + 0 * self.norm(h)",
    "h = b + a * b; return h + 0 * self.bare(h) * (1 + a)",
    "return (1 + b) * self.bare(a)",
    "return b + self.bare(a) * (1 + a)",
]


def test_the_first_operand_decides_the_strides(load: Load) -> None:
    """A result has the strides that it had if the rows of one of two operands do not lie in one piece."""
    models, patched, report = both(load, LAID_OUT)
    one, other = torch.randn(4, 16), torch.randn(16, 4).t()
    for place, (model, ours, lines) in enumerate(zip(models, patched, LAID_OUT, strict=True)):
        assert str(place) in [line.name for line in report.replaced], lines
        for a, b in itertools.permutations((one, other)):
            mine, theirs = ours.eval()(a, b), model.eval()(a, b)
            torch.testing.assert_close(mine, theirs, msg=lines)
            assert mine.stride() == theirs.stride(), lines


# Writes after a patched expression that the unpatched model allows; True if a patched one refuses the write, because
# backward reads then what PyTorch's does not.
LATE_WRITES = [
    ("t = self.one(b); y = self.bare(a) * (1 + b) + t; t.add_(1); return y", False),
    ("t = self.one(b); y = self.bare(a) * (1 + t) + b; t.add_(1); return y", True),
    ("h = a + b; y = self.norm(h); a.add_(1); b.add_(1); return h + y", False),
    ("h = self.drop(a) + b; y = self.norm(h); a.add_(1); b.add_(1); return h + y", False),
    ("x = self.one(a); h = b + x * b.detach(); y = self.bare(h) * (1 + b); x.add_(1); return y", False),
    ("g = self.one(a); h = b + b.detach() * g; y = self.bare(h) * (1 + b); g.add_(1); return y", False),
    ("x = self.one(a).detach(); y = self.bare(x) * (1 + b); x.add_(1); return y", True),
    ("v = self.one(a); y = self.act(b.detach()) * v; v.add_(1); return y", False),
    ("g = self.one(a).detach(); y = self.act(g) * b; g.add_(1); return y", True),
    ("g = self.one(a); y = torch.sigmoid(g) * b; g.add_(1); return y", True),
    ("g = self.one(a); y = torch.tanh(g) * b; g.add_(1); return y", True),
    ("g = self.one(a); y = torch.relu(g) * b; g.add_(1); return y", True),
]


def test_writes_after_a_patched_expression(load: Load) -> None:
    """A write to what backward does not read is allowed, and the gradients are the same; a refused one is listed."""
    models, patched, report = both(load, [lines for lines, _ in LATE_WRITES])
    for place, (model, ours, (lines, refused)) in enumerate(zip(models, patched, LATE_WRITES, strict=True)):
        assert str(place) in [line.name for line in report.replaced], lines
        expected = outcome(model.eval())
        if refused:
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                outcome(ours.eval())
        else:
            torch.testing.assert_close(outcome(ours.eval()), expected, rtol=1e-4, atol=1e-4, msg=lines)


class WideNorm(nn.LayerNorm):
    """A LayerNorm in fp32, of a copy of its input if that is not fp32."""

    def forward(self, x: Tensor) -> Tensor:
        """The norm."""
        wide = x.float()
        wide = (wide - wide.mean(-1, keepdim=True)) * (wide.var(-1, keepdim=True, correction=0) + self.eps).rsqrt()
        return (wide * self.weight + self.bias).to(x.dtype)


def test_a_write_to_the_input_of_a_norm_that_copies_it() -> None:
    """Ours keeps the input in bf16, and not the fp32 copy of it, so that the later write is refused."""
    norm = WideNorm(16)
    patched = copy.deepcopy(norm)
    assert kf.patch(patched).replaced
    for each in (norm, patched):
        x = torch.randn(4, 16, dtype=torch.bfloat16, requires_grad=True) * 1
        y = each(x)
        x.detach().add_(1)
        if each is norm:
            y.sum().backward()
        else:
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                y.sum().backward()


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


# The writes that a patched model refuses, as docs/promises.md lists them: to the gate of an activation that PyTorch
# differentiates from its result, and to the scale of a modulation. In these spellings they are not replaced.
_REFUSED = (("torch.sigmoid(", "torch.Tensor.sigmoid("), ("(1 + ", "(1 * 1 + "))


def _respelled(lines: str) -> str:
    for text, other in _REFUSED:
        lines = lines.replace(text, other)
    return lines


def _tripled(self: nn.Module, x: Tensor) -> Tensor:
    return x.mul_(3)


def _halved(self: nn.Module, x: Tensor) -> Tensor:
    return x * 0.5


def _swapped(self: Any, a: Tensor, b: Tensor) -> Tensor:
    return self.norm(b + self.doubled(a)) * self.act(b)


def _replace(rng: random.Random, models: list[Any]) -> Callable[[], None]:
    """Replace a method of the models, on their class or on each; returns what takes that back."""
    owner, name, method = rng.choice(
        [
            ("", "doubled", _tripled),
            ("", "doubled", _halved),
            ("", "forward", _swapped),
            ("norm", "forward", _halved),
            ("act", "forward", _halved),
            ("drop", "forward", _tripled),
        ]
    )
    if not owner and rng.random() < 0.5:  # the classes of layers are those of all other tests, too
        kind = type(models[0])
        kind, before = getattr(kind, "_kf_original", kind), getattr(kind, name)
        setattr(kind, name, method)
        return lambda: setattr(kind, name, before)
    for model in models:
        module = model.get_submodule(owner)
        setattr(module, name, types.MethodType(method, module))
    return lambda: [delattr(model.get_submodule(owner), name) for model in models]  # type: ignore[return-value]


@pytest.mark.parametrize("first", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in range(1, 40))])
def test_random_methods(load: Load, first: int) -> None:
    """Methods of all of these, with layers in place, hooks, `retain_grad` and returned sums, compute the same.

    So they do after one of their methods is replaced, and with strided inputs. A method that fails unpatched, as after
    a write to what backward reads, may fail or not. A patched one refuses no other writes than the listed ones.
    """
    methods = [_method(random.Random(seed)) for seed in range(40 * first, 40 * first + 40)]
    models, patched, _ = both(load, [*methods, *map(_respelled, methods)], dropouts=False)
    for place, model in enumerate(models[: len(methods)]):
        rng, ours, other = random.Random(place), patched[place], patched[len(methods) + place]
        _compare(model, ours, other)
        take_back = _replace(rng, [model, ours, other])
        _compare(model, ours, other)
        take_back()


def _compare(model: nn.Module, ours: nn.Module, other: nn.Module) -> None:
    """Compare a model and its patched copy; one in another spelling, if that refuses a write."""
    for training, strided in itertools.product((True, False), (False, True)):
        for each in (model, ours, other):
            each.train(training)
        try:
            expected = outcome(model, training, strided)
        except RuntimeError:
            continue
        try:
            found = outcome(ours, training, strided)
        except RuntimeError as error:
            if "modified by an inplace operation" not in str(error):
                raise
            found = outcome(other, training, strided)
        for mine, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)
