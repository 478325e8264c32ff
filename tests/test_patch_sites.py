"""`kf.patch` around a norm: dropout and addition before it, modulation after it, in one pass."""

# ruff: noqa: D102 (the docstring of a module here says what its forward computes)
from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
from dropout_statistics import suspicions
from patch_support import assert_no_worse, operations, randomized, texts
from torch import Tensor, nn
from torch.nn import functional as F

import kernel_fusion as kf


class Joined(nn.Sequential):
    """A module's results as one tensor."""

    def forward(self, *inputs: Tensor) -> Tensor:
        return torch.cat(self[0](*inputs))


class Dropping(nn.Module):
    """Dropout, addition and norm, in the orders that models write them; returns the norm and the sum."""

    def __init__(self, size: int = 32, p: float = 0.25) -> None:
        super().__init__()
        self.norm, self.dropout, self.p = nn.LayerNorm(size), nn.Dropout(p), p

    def forward(self, x: Tensor, residual: Tensor) -> Any:
        x = x * 2
        x = self.dropout(x)
        h = x + residual
        y = self.norm(h)
        return y, h


class DroppingByFunction(Dropping):
    """The function in place of the module, and the residual first."""

    def forward(self, x: Tensor, residual: Tensor) -> Any:
        x = F.dropout(x * 2, p=self.p, training=self.training)
        x = residual + x
        residual = x
        x = self.norm(x)
        return x, residual


class DroppingInside(Dropping):
    """All in one expression, the sum only for the norm."""

    def forward(self, x: Tensor, residual: Tensor) -> Any:
        return self.norm(self.dropout(x * 2) + residual), residual


DROPPING = [Dropping, DroppingByFunction, DroppingInside]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", DROPPING)
def test_dropout_joins_the_addition(kind: type[Dropping], dtype: torch.dtype) -> None:
    """Dropout before an addition is named in the report, and inactive it changes no result for the worse."""
    model = randomized(Joined(kind())).to(dtype).eval()
    patched = copy.deepcopy(model)
    assert texts(kf.patch(patched))[kind.__name__] == "dropout and addition before self.norm"
    assert_no_worse(model, patched, *torch.randn(2, 7, 32).to(dtype))


@pytest.mark.parametrize("kind", [Dropping, DroppingByFunction])
def test_patched_dropout_drops_as_it_should(kind: type[Dropping]) -> None:
    """Elements drop independently with p, others are scaled, the norm is of that sum, and a seed repeats it all."""
    model, residual = kind(256), torch.randn(64, 256)
    kf.patch(model)
    x = torch.ones(64, 256, requires_grad=True)
    torch.manual_seed(3)
    y, h = model(x, residual)
    kept = h - residual
    dropped = kept.abs() < 1
    torch.testing.assert_close(kept, torch.where(dropped, 0.0, 2 / 0.75))
    assert suspicions(dropped, 0.25) == {}
    torch.testing.assert_close(y, model.norm(h))
    assert torch.equal(torch.autograd.grad(h.sum(), x)[0] == 0, dropped)
    assert not torch.equal(model(x, residual)[1], h)
    torch.manual_seed(3)
    assert torch.equal(model(x, residual)[1], h)


@pytest.mark.parametrize("kind", [Dropping, DroppingByFunction])
def test_probability_and_mode_are_read_at_each_call(kind: type[Dropping]) -> None:
    """p and the mode may change after the patch; a p that is no probability raises as before."""
    model, (x, residual) = kind(), torch.randn(2, 8, 32)
    kf.patch(model)
    model.eval()
    torch.testing.assert_close(model(x, residual)[1], 2 * x + residual)
    model.train()
    model.p = model.dropout.p = 1.0
    torch.testing.assert_close(model(x, residual)[1], residual)
    model.p = model.dropout.p = 1.5
    with pytest.raises(ValueError, match="dropout probability has to be between 0 and 1"):
        model(x, residual)


@pytest.mark.parametrize("wide", [0, 1])
def test_dropout_beside_another_dtype(wide: int) -> None:
    """Of two dtypes the sum has the wider one, whether the stream or what is dropped has it."""
    model, inputs = Dropping().eval(), [x.bfloat16() for x in torch.randn(2, 8, 32)]
    inputs[wide] = inputs[wide].float()
    expected = model(*inputs)
    kf.patch(model)
    torch.testing.assert_close(model(*inputs), expected)


def test_dropout_with_hooks_or_in_place_is_called() -> None:
    """A dropout that is watched, works in place or was replaced computes by itself."""
    model, (x, residual) = Dropping(p=0.0), torch.randn(2, 8, 32)
    kf.patch(model)
    seen: list[Any] = []
    handle = model.dropout.register_forward_hook(lambda *args: seen.append(args[2]))
    model(x, residual)
    assert torch.equal(seen[0], 2 * x)
    handle.remove()
    model.dropout = nn.Dropout(1.0, inplace=True)
    torch.testing.assert_close(model(x, residual)[1], residual)
    model.dropout = nn.Tanh()
    torch.testing.assert_close(model(x, residual)[1], torch.tanh(2 * x) + residual)


def test_a_dropped_value_that_is_read_again_is_made() -> None:
    """Where another statement reads what was dropped, dropout stays apart from the addition."""

    class Twice(Dropping):
        def forward(self, x: Tensor, residual: Tensor) -> Any:
            x = self.dropout(x)
            y = self.norm(x + residual)
            return y, x

    model, (x, residual) = Twice(), torch.randn(2, 8, 32)
    assert texts(kf.patch(model))["Twice"] == "addition before self.norm"
    y, dropped = model(x, residual)
    torch.testing.assert_close(y, model.norm(dropped + residual))


def test_patched_dropout_is_drawn_again_by_checkpoints() -> None:
    """A checkpoint that runs again drops the same elements."""
    model, (x, residual) = DroppingInside(), torch.randn(2, 8, 32)
    kf.patch(model)
    results = []
    for checkpointed in (False, True):
        torch.manual_seed(1)
        leaf = x.clone().requires_grad_()
        run: Any = functools.partial(torch.utils.checkpoint.checkpoint, model, use_reentrant=False)
        y = (run if checkpointed else model)(leaf, residual)[0]
        results.append([y, *torch.autograd.grad(y, leaf, residual)])
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


def test_dropouts_may_stay() -> None:
    """With `dropouts=False` the numbers are drawn as before, and the addition is fused."""
    model, (x, residual) = Dropping(), torch.randn(2, 8, 32)
    torch.manual_seed(2)
    expected = model(x, residual)
    assert texts(kf.patch(model, dropouts=False))["Dropping"] == "addition before self.norm"
    torch.manual_seed(2)
    torch.testing.assert_close(model(x, residual), expected)


class Modulated(nn.Module):
    """A modulated norm after a gated addition, in the orders that models write them; returns the norm and the sum."""

    def __init__(self, size: int = 32, **options: Any) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(size, eps=1e-6, **{"elementwise_affine": False, **options})

    def forward(self, x: Tensor, y: Tensor, scale: Tensor, shift: Tensor, gate: Tensor) -> Any:
        y = gate * y
        x = x + y
        n = self.norm(x)
        n = n * (1 + scale) + shift
        return n, x


class ModulatedInside(Modulated):
    """All in two statements, factors and terms the other way round."""

    def forward(self, x: Tensor, y: Tensor, scale: Tensor, shift: Tensor, gate: Tensor) -> Any:
        h = y * gate + x
        return shift + (1.0 + scale) * self.norm(h), h


class ModulatedSum(Modulated):
    """No gate and no shift, and an indexed scale."""

    def forward(self, x: Tensor, y: Tensor, scale: Tensor, shift: Tensor, gate: Tensor) -> Any:
        residual = x + y
        x = residual
        x = self.norm(x) * (1 + scale[:, 0])[:, None] + 0 * (shift + gate)
        return x, residual


class ModulatedAlone(Modulated):
    """No addition."""

    def forward(self, x: Tensor, y: Tensor, scale: Tensor, shift: Tensor, gate: Tensor) -> Any:
        n = self.norm(x)
        n = n * (1 + scale) + shift
        return n, y * gate


BOTH, AFTER = "addition before and modulation after self.norm", "modulation after self.norm"
MODULATED = [(Modulated, BOTH), (ModulatedInside, BOTH), (ModulatedSum, BOTH), (ModulatedAlone, AFTER)]


def of_samples(dtype: torch.dtype = torch.float32, batch: int = 3, vector: tuple[int, ...] = (3, 1)) -> list[Tensor]:
    """Two inputs, and scale, shift and gate."""
    return [*torch.randn(2, batch, 5, 32).to(dtype), *torch.randn(3, *vector, 32).to(dtype)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("kind", "text"), MODULATED)
def test_modulation_joins_the_norm(kind: type[Modulated], text: str, dtype: torch.dtype) -> None:
    """Scale and shift after a norm, and a gated addition before it, are one pass, and no result is worse."""
    model = Joined(kind())
    patched = copy.deepcopy(model)
    assert texts(kf.patch(patched))[kind.__name__] == text
    assert_no_worse(model, patched, *of_samples(dtype))


@pytest.mark.parametrize(
    ("batch", "vector"), [(1, (1, 1)), (3, (3, 5)), (3, ()), (3, (5,)), (0, (1, 1))], ids=lambda value: str(value)
)
def test_modulation_of_other_shapes(batch: int, vector: tuple[int, ...]) -> None:
    """Vectors of one sample, of tokens, of all rows, and empty inputs come out as before."""
    model = Joined(Modulated())
    patched, inputs = copy.deepcopy(model), of_samples(batch=batch, vector=vector)
    kf.patch(patched)
    torch.testing.assert_close(patched(*inputs), model(*inputs), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("change", ["number", "wider", "one column", "hook"])
def test_modulation_that_is_not_ours_is_the_models_own(change: str) -> None:
    """Numbers, wider vectors, vectors of one column and hooked norms run the model's own code."""
    model = Joined(Modulated())
    patched, inputs = copy.deepcopy(model), of_samples(torch.bfloat16)
    kf.patch(patched)
    if change == "number":
        inputs[2:] = [torch.tensor(0.5), 1.0, 2.0]  # type: ignore[list-item]
    elif change == "wider":
        inputs[2] = inputs[2].float()
    elif change == "one column":
        inputs[3] = inputs[3][..., :1]
    else:
        patched[0].norm.register_forward_hook(lambda *args: None)
    found, expected = patched(*inputs), model(*inputs)
    assert found.dtype == expected.dtype
    torch.testing.assert_close(found, expected)


def test_a_weight_keeps_modulation_apart() -> None:
    """A norm with a weight is joined with the addition, since a modulation beside it would take more passes."""
    report = kf.patch(Modulated(elementwise_affine=True))
    assert texts(report)["Modulated"] == "addition before self.norm"


def test_half_gates_beside_a_wide_stream() -> None:
    """An fp32 stream with bf16 branches and vectors, as autocast makes them, stays fp32."""
    model = Joined(Modulated())
    patched, inputs = copy.deepcopy(model), of_samples()
    kf.patch(patched)
    inputs[1:] = [x.bfloat16() for x in inputs[1:]]
    found, expected = patched(*inputs), model(*inputs)
    assert found.dtype == expected.dtype == torch.float32
    torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-2)  # theirs rounds 1 + scale and the product


@pytest.mark.parametrize("change", ["a vector", "the sum"])
def test_a_norm_is_not_moved_before_what_it_needs(change: str) -> None:
    """If a scale is computed from the sum, or what is modulated is read again, each stays in its place."""

    class FromSum(Modulated):
        def forward(self, x: Tensor, y: Tensor, scale: Tensor, shift: Tensor, gate: Tensor) -> Any:
            scale = scale + y
            n = self.norm(scale) * (1 + scale) + shift
            return n, scale

    class ReadAgain(Modulated):
        def forward(self, x: Tensor, y: Tensor, scale: Tensor, shift: Tensor, gate: Tensor) -> Any:
            n = self.norm(x)
            m = n * (1 + scale) + shift
            return m, n

    kind = FromSum if change == "a vector" else ReadAgain
    model = Joined(kind())
    patched, inputs = copy.deepcopy(model), of_samples()
    assert texts(kf.patch(patched)).get(kind.__name__) == (AFTER if change == "a vector" else None)
    torch.testing.assert_close(patched(*inputs), model(*inputs))


@pytest.mark.parametrize("kind", [DroppingInside, Modulated])
def test_sites_stay_apart_for_the_compiler(kind: type[nn.Module]) -> None:
    """The compiler's graph of a patched model has the operations of the unpatched one."""
    model, inputs = kind(), of_samples()
    inputs = inputs[:2] if kind is DroppingInside else inputs
    unpatched = operations(model, *inputs)
    assert texts(kf.patch(model))[kind.__name__]
    assert operations(model, *inputs) == unpatched


def test_unpatch_takes_sites_back() -> None:
    """After `unpatch` every bit is what it was."""
    model, inputs = Joined(Modulated()), of_samples(torch.bfloat16)
    expected = model(*inputs)
    kf.patch(model)
    kf.unpatch(model)
    assert torch.equal(model(*inputs), expected)
