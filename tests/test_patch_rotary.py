"""`kf.patch` takes over rotary embeddings, where a module of the model makes the angles."""

# ruff: noqa: D102 (the docstring of a module here says what its forward computes)
from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from support import CPU, EAGER
from test_patch import assert_no_worse, outcomes, randomized
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import kernel_fusion as kf
from kernel_fusion.patching.rotary import _forms


class Angles(nn.Module):
    """cos and sin of positions, each angle twice, as a rotary module of the transformers library makes them."""

    def __init__(self, columns: int) -> None:
        super().__init__()
        self.register_buffer("inv_freq", 100.0 ** -(torch.arange(0, columns, 2) / columns), persistent=False)

    @torch.no_grad()
    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        angles = position_ids[..., None] * self.inv_freq
        angles = self.repeat(angles)
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)

    def repeat(self, angles: Tensor) -> Tensor:
        return torch.cat((angles, angles), -1)


class Pairs(Angles):
    """The same, for pairs of neighbours."""

    def repeat(self, angles: Tensor) -> Tensor:
        return angles.repeat_interleave(2, -1)


class Unlike(Angles):
    """The halves differ, so one cannot stand for both."""

    def repeat(self, angles: Tensor) -> Tensor:
        return torch.cat((angles, 2 * angles), -1)


def turn(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    """Turn halves, as Llama does."""
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    halves = [torch.cat((-t[..., t.shape[-1] // 2 :], t[..., : t.shape[-1] // 2]), -1) for t in (q, k)]
    return q * cos + halves[0] * sin, k * cos + halves[1] * sin


def turn_pairs(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Turn pairs in fp32, as Cohere does."""
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    neighbours = [torch.stack((-t[..., 1::2], t[..., ::2]), -1).flatten(-2).float() for t in (q, k)]
    return (q.float() * cos + neighbours[0] * sin).to(q.dtype), (k.float() * cos + neighbours[1] * sin).to(k.dtype)


class Attention(nn.Module):
    """Scores of turned queries and keys, whose angles come from outside."""

    def __init__(self, size: int, heads: int = 4) -> None:
        super().__init__()
        self.both, self.heads = nn.Linear(size, 2 * size), heads

    def forward(self, x: Tensor, position_embeddings: tuple[Tensor, Tensor]) -> Tensor:
        q, k = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.both(x).chunk(2, -1))
        cos, sin = position_embeddings
        q, k = turn(q, k, cos, sin)
        return (q @ k.mT).flatten(1, 2)


class PairsAttention(Attention):
    """The same with pairs of neighbours."""

    def forward(self, x: Tensor, position_embeddings: tuple[Tensor, Tensor]) -> Tensor:
        q, k = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.both(x).chunk(2, -1))
        cos, sin = position_embeddings
        q, k = turn_pairs(q, k, cos, sin)
        return (q @ k.mT).flatten(1, 2)


class Turning(nn.Module):
    """Attention with the module that makes its angles."""

    def __init__(self, angles: type[Angles] = Angles, attention: type[Attention] = Attention) -> None:
        super().__init__()
        self.angles, self.attention, self.between = angles(8), attention(32), nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        cos, sin = self.angles(x, torch.arange(x.shape[1]).expand(x.shape[:2]))
        return self.attention(x, (self.between(cos), sin))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kinds", [(Angles, Attention), (Pairs, PairsAttention)], ids=["halves", "pairs"])
def test_queries_and_keys_turn_in_one_launch(kinds: Any, dtype: torch.dtype) -> None:
    """Results and gradients are no less exact, by one kernel each way; so they are after pickling, and undone."""
    model = randomized(Turning(*kinds)).to(dtype)
    patched, x = copy.deepcopy(model), torch.randn(2, 5, 32).to(dtype)
    assert {line.kind for line in kf.patch(patched).replaced} == {kind.__name__ for kind in kinds}
    for one in (patched, pickle.loads(pickle.dumps(patched))):
        assert_no_worse(model, one, x)
        with CPU.ran(forward=1, backward=1):
            outcomes(one, x)
    compiled = torch.compile(patched, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), model(x))
    kf.unpatch(patched)
    with EAGER.ran():
        assert torch.equal(patched(x), model(x))


@pytest.mark.parametrize("within", ["checkpoint", "grad"])
def test_a_loaded_model_may_run_first_within(within: str) -> None:
    """It examines its functions at its first call, and no checkpoint or transform of the call sees that."""
    model, x = randomized(Turning()), torch.randn(2, 5, 32)
    patched = copy.deepcopy(model)
    kf.patch(patched)
    _forms.clear()

    def gradient(model: nn.Module) -> Tensor:
        if within == "grad":
            return torch.func.grad(lambda x: model(x).square().sum())(x)
        leaf = x.clone().requires_grad_()
        return torch.autograd.grad(checkpoint(model, leaf, use_reentrant=False).square().sum(), leaf)[0]

    torch.testing.assert_close(gradient(patched), gradient(model))


class Doubling(nn.Module):
    """Angles that somebody changes in between, in place or in a copy."""

    def __init__(self, in_place: bool) -> None:
        super().__init__()
        self.in_place = in_place

    def forward(self, x: Tensor) -> Tensor:
        return x.mul_(2) if self.in_place else 2 * x


@pytest.mark.parametrize("in_place", [True, False])
def test_angles_that_were_changed_are_not_taken(in_place: bool) -> None:
    """A mark holds for the tensor that a module made, as long as nobody writes into it."""
    model = randomized(Turning())
    model.between = Doubling(in_place)
    patched, x = copy.deepcopy(model), torch.randn(2, 5, 32)
    kf.patch(patched)
    with EAGER.ran():
        assert torch.equal(patched(x), model(x))


def test_angles_that_were_changed_in_inference_mode() -> None:
    """Nothing counts writes there, so the angles are read where the call finds them."""
    model = randomized(Turning())
    model.between = Doubling(True)
    patched, x = copy.deepcopy(model), torch.randn(2, 5, 32)
    kf.patch(patched)
    with torch.inference_mode(), CPU.ran():
        torch.testing.assert_close(patched(x), model(x))


@pytest.mark.parametrize("change", [lambda t: t.clamp(-50, 50), Tensor.detach], ids=["clipped", "detached"])
def test_a_function_that_changes_heads_first_is_left(change: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Large heads and gradients show it, and the report does not claim otherwise."""
    whole = turn
    monkeypatch.setitem(globals(), "turn", lambda q, k, cos, sin: whole(change(q), k, cos, sin))
    assert kf.patch(Turning()).replaced == []


@pytest.mark.parametrize("angles", [Unlike, Pairs])
def test_angles_of_another_form_leave_the_function(angles: type[Angles]) -> None:
    """Halves that differ, and pairs for a function of halves, are the model's own affair; the report says so."""
    model = randomized(Turning(angles))
    report = kf.patch(model)
    assert [line[:2] for line in report.left if line.kind == "Attention"] == [
        ("Attention", "turn: no module here makes its angles")
    ]
    assert not report.replaced
