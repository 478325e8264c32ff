"""`kf.patch` replaces what it tried out and nothing else: shapes, strange values, modes, settings, far positions."""

# ruff: noqa: D102 (the docstring of a module here says what its forward computes)
from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import kernel_fusion as kf


class Norm(nn.Module):
    """RMSNorm, written out."""

    def __init__(self, size: int = 16) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.linspace(0.5, 1.5, size)), 1e-6

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)


class FewDimsNorm(Norm):
    """RMSNorm of batches, and twice that of a row and of more than five leading dimensions."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1 if 1 < x.dim() < 7 else 2)


class SqueezingNorm(Norm):
    """RMSNorm that loses dimensions of size 1."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).squeeze()


class InfiniteNorm(Norm):
    """RMSNorm of what is finite."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(torch.where(x.isinf(), 0.0, x))


class MendingNorm(Norm):
    """RMSNorm that skips NaN, but for rows of nothing else."""

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x.nan_to_num() * torch.rsqrt(x.square().nanmean(-1, keepdim=True) + self.eps)


class FrozenNorm(Norm):
    """RMSNorm whose statistics have no gradient in training."""

    def forward(self, x: Tensor) -> Tensor:
        v = x.square().mean(-1, keepdim=True)
        return self.weight * x * torch.rsqrt((v.detach() if self.training else v) + self.eps)


class TwoEpsNorm(Norm):
    """RMSNorm beside which an attribute has the value of its eps."""

    def __init__(self, first: str) -> None:
        super().__init__()
        del self.eps
        setattr(self, first, 1e-6)
        self.eps = self.other = 1e-6


class ConstantEpsNorm(Norm):
    """RMSNorm whose eps is a number in its code, and which has an attribute of this value."""

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


class SixtyFourNorm(nn.Module):
    """RMSNorm without a weight, by 64 columns whatever their number."""

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().sum(-1, keepdim=True) / 64 + 1e-6)


class Function(nn.Module):
    """A function that the module holds."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        act = self.function
        return act(x)


class Gated(nn.Module):
    """act(x) * value."""

    def forward(self, x: Tensor) -> Tensor:
        return mended_silu(x) * x.nan_to_num()


def mended_silu(x: Tensor) -> Tensor:
    """SiLU, and 0 for NaN."""
    return F.silu(x.nan_to_num())


def limited_silu(x: Tensor) -> Tensor:
    """SiLU, written out, of what is finite."""
    x = torch.where(x.isinf(), 3e38, x)
    return x * torch.sigmoid(x)


class FrozenSilu(nn.Module):
    """SiLU whose factor has no gradient in training."""

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(x.detach() if self.training else x)


ODD = torch.ones(3, 16)
ODD[0, 0], ODD[1, 1], ODD[2, 2] = torch.nan, torch.inf, -torch.inf


def compared(model: nn.Module, x: Tensor, change: Callable[[Any], Any] = lambda model: None) -> None:
    """The model and a patched copy, changed after it, have the same results and gradients."""
    patched = copy.deepcopy(model)
    kf.patch(nn.Sequential(patched))
    outcomes = []
    for one in (model, patched):
        change(one)
        leaf = x.clone().requires_grad_()
        y = one(leaf)
        cotangent = torch.randn(y.shape, generator=torch.Generator().manual_seed(1))
        outcomes.append([y.detach(), *torch.autograd.grad(y, [leaf, *one.parameters()], cotangent)])
    for ours, theirs in zip(*outcomes, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("dims", [0, 1, 3, 5, 6, 7])
def test_numbers_of_leading_dimensions_that_were_not_tried_run_the_modules_code(dims: int) -> None:
    """A norm that computes otherwise for one row, or for very many dimensions, still does."""
    shape = [*[2] * min(dims, 1), *[1] * max(0, dims - 1), 16]
    compared(FewDimsNorm(), torch.randn(shape))
    compared(SqueezingNorm(), torch.randn(shape))


@pytest.mark.parametrize("kind", [InfiniteNorm, MendingNorm, Norm], ids=lambda kind: kind.__name__)
def test_a_norm_that_mends_strange_values_still_does(kind: type[Norm]) -> None:
    """A row with an infinity or a NaN comes out as it did."""
    compared(kind(), ODD)


@pytest.mark.parametrize("model", [Gated(), Function(mended_silu), Function(limited_silu)], ids=["gate", "nan", "inf"])
def test_a_function_that_mends_strange_values_still_does(model: nn.Module) -> None:
    """Ours would not."""
    compared(model, ODD)


@pytest.mark.parametrize("patched_in_training", [True, False])
@pytest.mark.parametrize("kind", [FrozenNorm, FrozenSilu])
def test_a_gradient_may_depend_on_the_mode(kind: type[nn.Module], patched_in_training: bool) -> None:
    """The gradient of the other mode is tried out, too."""
    model = kind().train(patched_in_training)
    compared(model, torch.randn(4, 16), lambda model: model.train(not patched_in_training))


@pytest.mark.parametrize("name", ["alpha", "eps", "other"])
@pytest.mark.parametrize("norm", [TwoEpsNorm("alpha"), ConstantEpsNorm()], ids=lambda norm: type(norm).__name__)
def test_eps_is_the_attribute_that_the_module_reads(norm: nn.Module, name: str) -> None:
    """Attributes with the same value are told apart; a number in the code is none of them."""
    compared(norm, 1e-3 * torch.randn(4, 16), lambda norm: setattr(norm, name, 0.1))


def test_rows_of_another_length_run_the_modules_code() -> None:
    """A norm without parameters is tried out at two lengths; if one comes out wrong, only the other is ours."""
    assert len(kf.patch(nn.Sequential(SixtyFourNorm())).replaced) == 1
    compared(SixtyFourNorm(), torch.randn(4, 16))


class ManyStridesNorm(Norm):
    """RMSNorm whose result is contiguous in bf16 only."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y.contiguous() if x.dtype is torch.bfloat16 else y


class Summed(nn.Module):
    """The norm of a sum, and the sum."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = x + x.clone()
        y = self.norm(h)
        return y, h


class ModulatedSum(Summed):
    """The same, modulated."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        scale = x[:1, :1, :1, :]
        h = x + scale * x.clone()
        y = self.norm(h) * (1 + scale) + scale
        return y, h


class GatedNorm(Norm):
    """RMSNorm, gated before."""

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        return super().forward(x * F.silu(gate))


class SelfGatedNorm(Summed):
    """A gated norm of the input, twice."""

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x, x)


class Headed(Summed):
    """A norm of heads, as attention calls it: its result goes back to tokens without a copy."""

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x.transpose(1, 2)).transpose(1, 2).view(2, 5, 48)


class Angles(nn.Module):
    """cos and sin of positions, each angle twice; beyond position 1000 the second is another."""

    def __init__(self, repeats: bool) -> None:
        super().__init__()
        self.repeats = repeats

    def forward(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        angles = positions.unsqueeze(-1) * torch.linspace(0.1, 1.0, 8)
        others = angles if self.repeats else torch.where(positions.unsqueeze(-1) > 1000, 2 * angles, angles)
        angles = torch.cat((angles, others), -1)
        return angles.cos(), angles.sin()


def turn(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """The halves of heads turned."""
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    turned = [torch.cat((-t[..., 8:], t[..., :8]), -1) for t in (q, k)]
    return q * cos + turned[0] * sin, k * cos + turned[1] * sin


class Turning(nn.Module):
    """Query and key, turned."""

    def __init__(self, repeats: bool) -> None:
        super().__init__()
        self.angles = Angles(repeats)

    def forward(self, x: Tensor) -> Tensor:
        cos, sin = self.angles(x, torch.arange(2000, 2000 + x.shape[2])[None])
        q, k = turn(x, x + 1, cos, sin)
        return q + k


def test_heads_are_joined_without_a_copy() -> None:
    """A norm of a view with tokens and heads swapped has the strides that its own code gives."""
    compared(Headed(Norm()), torch.randn(2, 5, 3, 16))


LAYOUTS = [
    torch.randn(2, 3, 5, 16).transpose(1, 2),  # swapped
    torch.randn(5, 4, 2, 16)[:, 1:].permute(2, 0, 1, 3),  # with gaps, too
    torch.randn(2, 3, 5, 48).chunk(3, -1)[1],
    torch.randn(2, 16, 3, 5).movedim(1, -1),  # rows in pieces
    torch.randn(2, 1, 5, 16).expand(2, 3, 5, 16),
    torch.randn(2, 3, 1, 16).transpose(1, 2),  # contiguous after all
]


@pytest.mark.parametrize(
    "model",
    [
        Norm(),
        ManyStridesNorm(),
        nn.LayerNorm(16),
        nn.RMSNorm(16),
        SelfGatedNorm(GatedNorm()),
        Summed(Norm()),
        Summed(nn.LayerNorm(16)),
        ModulatedSum(nn.LayerNorm(16, elementwise_affine=False)),
        Gated(),
        Function(lambda x: x * torch.sigmoid(x)),
        nn.Softmax(-1),
    ],
    ids=lambda model: "-".join(type(module).__name__ for module in model.modules()),
)
def test_strides_stay(model: nn.Module) -> None:
    """What a patched module or method returns lies in memory as before, so that a view of it exists as before."""
    patched = copy.deepcopy(model)
    kf.patch(nn.Sequential(patched))
    for layout, dtype in itertools.product(LAYOUTS, (torch.float32, torch.bfloat16)):
        x = layout.to(dtype)
        with torch.no_grad():
            both = [y if isinstance(y, tuple) else (y,) for y in (patched(x), model(x))]
        for ours, theirs in zip(*both, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=2e-2)
            found, expected = ([s for s, n in zip(t.stride(), t.shape, strict=True) if n > 1] for t in (ours, theirs))
            assert found == expected


@pytest.mark.parametrize("repeats", [True, False])
def test_angles_that_differ_at_far_positions_only(repeats: bool) -> None:
    """A module that repeats its angles only near the start is not taken for one that always does."""
    compared(Turning(repeats), torch.randn(2, 3, 5, 16))
    replaced = kf.patch(nn.Sequential(Turning(repeats))).replaced
    assert len(replaced) == 2 * repeats
