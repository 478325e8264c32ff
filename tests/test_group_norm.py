"""Group norms: results, memory formats, errors, gradients, transforms; on a CPU PyTorch's operations compute them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from support import CUDA, EAGER, Target, check
from torch import Tensor
from torch.nn import functional as F

import kernel_fusion as kf
from kernel_fusion.errors import BackendUnavailableError
from kernel_fusion.testing.oracle import GroupNormCase, lay_out

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
LAYOUTS = ("contiguous", "channels-last")
# A GPU's kernels where there is one, and the definition.
places = pytest.mark.parametrize(
    "place", [pytest.param(EAGER, id="eager"), pytest.param(CUDA, id="cuda", marks=pytest.mark.cuda)]
)


# Grid rationale. A row of one block with lines of a few lanes, of a warp and of more; one position; a single channel or
# all of them in a group; pieces of whole channels and of parts of them, the last one shorter; no whole vectors.
_SHAPES = (
    ((3, 8, 5, 3), 4),
    ((2, 40, 16, 16), 4),
    ((3, 96, 1, 1), 3),
    ((2, 6, 7, 9, 11), 6),
    ((1, 2304, 13), 1),
)
# On a GPU these are too long for a block.
_LONG_SHAPES = (((1, 2304, 17), 1), ((1, 8, 160, 128), 2), ((1, 4, 101, 211), 2), ((2, 3, 1000, 1001), 1))


@places
@pytest.mark.parametrize(("shape", "groups"), _SHAPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_sizes(shape: tuple[int, ...], groups: int, layout: str, place: Target) -> None:
    """Sizes are within budget in both memory formats, forward and backward, with and without what may stand around."""
    for dtype in (F32, BF16):
        options: dict[str, Any] = {"groups": groups, "layout": layout}
        check(GroupNormCase("group_norm", shape, dtype, weight=dtype, activation="silu", **options), place)
        check(GroupNormCase("group_norm", shape, dtype, around=dtype, **options), place)


@pytest.mark.cuda
@pytest.mark.parametrize(("shape", "groups"), _LONG_SHAPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [F32, BF16, F16, F64])
def test_pieces(shape: tuple[int, ...], groups: int, layout: str, dtype: torch.dtype) -> None:
    """Long rows, of pieces of whole channels and of parts of them, the last one shorter, are within budget."""
    options: dict[str, Any] = {"groups": groups, "layout": layout}
    check(GroupNormCase("group_norm", shape, dtype, weight=dtype, around=dtype, activation="silu", **options), CUDA)


@places
@pytest.mark.parametrize("layout", LAYOUTS)
def test_unlike_dtypes(layout: str, place: Target) -> None:
    """Weights, additions and modulations of any dtype are read as they are, and their gradients have their dtype."""
    for dtype, weight, around in ((BF16, F32, F16), (F16, BF16, F32), (F32, F16, BF16)):
        check(GroupNormCase("group_norm", (2, 12, 9, 10), dtype, 3, weight, around, layout=layout), place)


@places
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("dtype", "mean"), [(F32, 1e4), (F16, 300.0), (BF16, 10.0)])
def test_far_from_zero(dtype: torch.dtype, mean: float, layout: str, place: Target) -> None:
    """The variance is no difference of large squares, and gradients of weights are of centred values."""
    check(GroupNormCase("group_norm", (2, 8, 30, 30), dtype, 2, dtype, layout=layout, mean=mean), place)


@places
@pytest.mark.parametrize("layout", LAYOUTS)
def test_special_values(layout: str, place: Target) -> None:
    """NaN and infinity stay in their group, equal elements give zeros, and 1e30 stays finite."""
    x = lay_out(torch.randn(2, 8, 60, 60, device=place.device), layout)
    x[0, 3, 5, 5], x[1, 6, 0, 0] = float("nan"), float("inf")
    spoilt = torch.zeros(2, 8, dtype=torch.bool, device=place.device)
    spoilt[0, 2:4] = spoilt[1, 6:8] = True
    y = kf.group_norm(x, 4, backend=place.backend)
    assert torch.equal(y.isnan().flatten(2).all(-1), spoilt)
    assert torch.equal(y.isnan().flatten(2).any(-1), spoilt)
    equal = lay_out(torch.full((2, 8, 60, 60), 30000.0, dtype=F16, device=place.device), layout)
    assert (kf.group_norm(equal, 4, backend=place.backend) == 0).all()
    large = lay_out(torch.full((2, 8, 6, 6), 1e30, device=place.device), layout)
    assert kf.group_norm(large, 4, backend=place.backend).isfinite().all()


@places
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["weight", "scale", "scale_offset"])
def test_infinite_parameters(name: str, layout: str, place: Target) -> None:
    """They give infinities, as the products in the order of the formula do, where weight * factor would give NaN."""
    x = lay_out(torch.randn(2, 6, 4, 5, device=place.device), layout)
    w, b, s, t = (torch.randn(shape, device=place.device) for shape in ((6,), (6,), (2, 6), (2, 6)))
    given: dict[str, Any] = {"weight": w, "bias": b, "scale": s, "shift": t, "scale_offset": 1.0}
    given[name] = torch.inf if name == "scale_offset" else torch.full_like(given[name], torch.inf)
    w, b, s, t = (given[n].reshape(-1, 6, 1, 1) for n in ("weight", "bias", "scale", "shift"))
    expected = (F.group_norm(x, 3) * w + b) * (given["scale_offset"] + s) + t
    assert torch.equal(kf.group_norm(x, 3, **given, backend=place.backend), expected)
    assert expected.isinf().all()


# Name: a tensor of the same values as a contiguous one of shape (2, 6, 4, 5).
_LIES: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda t: t,
    "channels last": lambda t: t.to(memory_format=torch.channels_last),
    "transposed tokens": lambda t: t.flatten(2).mT.contiguous().mT,
    "one position": lambda t: t[:, :, :1, :1],
    "a slice of channels": lambda t: torch.cat((t, t), 1)[:, :6],
    "every second column": lambda t: t.repeat_interleave(2, -1)[..., ::2],
    "expanded": lambda t: t[:1].expand(2, -1, -1, -1),
}


@places
@pytest.mark.parametrize("name", _LIES)
def test_memory_formats(name: str, place: Target) -> None:
    """Result and gradient have channels last where the input has, else they are contiguous; values are the same."""
    x = _LIES[name](torch.randn(2, 6, 4, 5, device=place.device)).requires_grad_()
    y = kf.group_norm(x, 3, activation="silu", backend=place.backend)
    plain = x.detach().contiguous()
    torch.testing.assert_close(y, F.silu(F.group_norm(plain, 3)), atol=1e-5, rtol=1e-5)
    last = name in ("channels last", "transposed tokens")
    assert y.stride() == (x.stride() if last else plain.stride())
    assert y.movedim(1, -1).is_contiguous() or not last
    (dx,) = torch.autograd.grad(y, x, torch.randn_like(y))
    assert not last or place is EAGER or dx.stride() == x.stride()


@places
def test_shapes_of_what_stands_around(place: Target) -> None:
    """(N, C), (N, C, 1, 1) and the input's shape mean the same numbers."""
    x, w = torch.randn(2, 6, 4, 5, device=place.device), torch.randn(6, device=place.device)
    given = torch.randn(3, 2, 6, device=place.device)
    ways = (lambda t: t, lambda t: t[..., None, None], lambda t: t[..., None, None].expand(x.shape).contiguous())
    found = [
        kf.group_norm(x, 2, w, add=way(given[0]), scale=way(given[1]), shift=way(given[2]), backend=place.backend)
        for way in ways
    ]
    for each in found[1:]:
        torch.testing.assert_close(each, found[0])


@places
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", [(5, 8, 9, 9), (3, 8, 160, 128)], ids=str)
@pytest.mark.parametrize("far", [None, 0, 1])
def test_samples_do_not_depend_on_each_other(
    far: int | None, shape: tuple[int, ...], layout: str, place: Target
) -> None:
    """A sample alone has the same bits, result and gradient, as in a batch, and so has every further call."""
    x, dy = (lay_out(torch.randn(shape, device=place.device), layout) for _ in range(2))
    if far is not None:
        x[far] += 1e4

    def both(rows: slice) -> tuple[Tensor, Tensor]:
        leaf = lay_out(x[rows], layout).requires_grad_()
        y = kf.group_norm(leaf, 4, activation="silu")
        return y.detach(), torch.autograd.grad(y, leaf, dy[rows])[0]

    for all_of, again, one in zip(both(slice(None)), both(slice(None)), both(slice(1, 2)), strict=True):
        assert torch.equal(all_of, again)
        assert torch.equal(all_of[1:2], one)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_a_cpu_has_the_kernel_of_pytorch(dtype: torch.dtype, layout: str) -> None:
    """The result on a CPU has the bits of PyTorch's operations, but in no sample for which these lose digits."""
    x = lay_out(torch.randn(1, 8, 40, 50).to(dtype), layout)
    w, b = torch.randn(8), torch.randn(8)
    assert torch.equal(kf.group_norm(x, 2, w, b, activation="silu"), F.silu(F.group_norm(x, 2, w, b)))
    equal = lay_out(torch.full((2, 8, 40, 50), 3e4).to(dtype), layout)
    equal[0] = x[0]
    y = kf.group_norm(equal, 2, w, b)
    assert torch.equal(y[0], F.group_norm(x, 2, w, b)[0])
    assert torch.equal(y[1], b.to(dtype)[:, None, None].expand_as(y[1]))


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_second_derivatives_of_narrow_types(dtype: torch.dtype) -> None:
    """On a CPU they are those of float64, with channels last, and beside a sample for which PyTorch loses digits."""
    x = torch.randn(2, 4, 3, 5)
    x[1] += 50
    leaves = [lay_out(x.to(dtype), "channels-last"), torch.randn(4), torch.randn(4)]

    def second(leaves: list[Tensor]) -> Tensor:
        leaves = [t.detach().requires_grad_() for t in leaves]
        y = kf.group_norm(leaves[0], 2, *leaves[1:], activation="silu")
        (dx,) = torch.autograd.grad(y.square().sum(), leaves[0], create_graph=True)
        return torch.autograd.grad(dx.square().sum(), leaves[1])[0]

    expected = second([t.double() for t in leaves])
    torch.testing.assert_close(
        second(leaves).double(), expected, rtol=0, atol=(1e-4 if dtype is F32 else 6e-2) * float(expected.abs().max())
    )


# Name: arguments after the input that do not fit, the error, and its text; None: PyTorch's.
_WRONG: dict[str, tuple[dict[str, Any], type[Exception], str | None]] = {
    "groups": ({"num_groups": 4}, RuntimeError, None),
    "weight": ({"num_groups": 2, "weight": torch.ones(5)}, RuntimeError, None),
    "bias": ({"num_groups": 2, "bias": torch.ones(2, 3)}, RuntimeError, None),
    "add": ({"num_groups": 2, "add": torch.ones(6)}, RuntimeError, r"`group_norm`: `add` must have shape \(N, C\) = "),
    "scale": ({"num_groups": 2, "scale": 2.0}, TypeError, "`group_norm`: `scale` must be a tensor, got 2.0"),
    "dtype": (
        {"num_groups": 2, "weight": torch.ones(6).double()},
        RuntimeError,
        "`group_norm`: `weight` must be float",
    ),
    "activation": ({"num_groups": 2, "activation": "swish"}, ValueError, "`group_norm`: `activation` must be one of"),
}


@pytest.mark.parametrize("name", _WRONG)
def test_errors(name: str) -> None:
    """Errors are PyTorch's where it has some, and else sentences."""
    arguments, kind, text = _WRONG[name]
    x = torch.randn(2, 6, 4, 5)
    if text is None:
        with pytest.raises(kind) as theirs:
            F.group_norm(x, **arguments)
        with pytest.raises(kind) as ours:
            kf.group_norm(x, **arguments)
        assert str(ours.value) == str(theirs.value)
        return
    with pytest.raises(kind, match=text):
        kf.group_norm(x, **arguments)


def test_a_single_value_per_group_is_refused() -> None:
    """In PyTorch's words."""
    with pytest.raises(ValueError, match="Expected more than 1 value per channel"):
        kf.group_norm(torch.randn(1, 6, 1, 1), 6)


@pytest.mark.parametrize("backend", ["cpu", "triton"])
def test_backends_without_kernels_say_so(backend: str) -> None:
    """A request that cannot be met raises, by argument and by context; the automatic choice is the definition."""
    x = torch.randn(2, 6, 4)
    with pytest.raises(BackendUnavailableError, match=f"backend '{backend}' was requested, but it has no kernels"):
        kf.group_norm(x, 2, backend=backend)
    with kf.use_backend(backend), pytest.raises(BackendUnavailableError, match="no kernels for group norms"):
        kf.group_norm(x, 2)
    assert kf.explain(kf.group_norm, x, 2).backend == "eager"


@places
def test_derivatives(place: Target) -> None:
    """Gradients of gradients, forward mode and batches are those of PyTorch's operations."""
    x, w, a = (torch.randn(*s, device=place.device, dtype=F64) for s in ((1, 4, 3, 2), (4,), (1, 4)))

    def norm(x: Tensor, w: Tensor, a: Tensor) -> Tensor:
        return kf.group_norm(x, 2, w, add=a, scale=a, activation="silu", backend=place.backend)

    leaves = [t.clone().requires_grad_() for t in (x, w, a)]
    assert torch.autograd.gradgradcheck(norm, leaves)
    _, tangent = torch.func.jvp(norm, (x, w, a), (x, w, a))
    _, pulled = torch.func.vjp(norm, x, w, a)
    dy = torch.randn_like(tangent)
    inner = sum((g * t).sum() for g, t in zip(pulled(dy), (x, w, a), strict=True))
    torch.testing.assert_close((tangent * dy).sum(), inner)
    xs = torch.randn(3, 1, 4, 3, 2, device=place.device, dtype=F64)
    batched = torch.func.vmap(lambda x: norm(x, w, a))(xs)
    torch.testing.assert_close(batched, torch.stack([norm(each, w, a) for each in xs]))


@places
@pytest.mark.parametrize("last", [False, True])
def test_compiled(last: bool, place: Target) -> None:
    """One graph without breaks serves every batch, with the strides and values of the call outside it."""
    norm = kf.FusedGroupNorm(2, 6, activation="silu", device=place.device)
    compiled = torch.compile(norm, fullgraph=True, dynamic=True, backend="aot_eager")
    format = torch.channels_last if last else torch.contiguous_format
    for samples in (2, 3, 5):
        x = torch.randn(samples, 6, 4, 5, device=place.device).to(memory_format=format).requires_grad_()
        y, expected = compiled(x), norm(x)
        assert y.stride() == expected.stride()
        torch.testing.assert_close(y, expected)
        dy = torch.randn_like(y)
        torch.testing.assert_close(torch.autograd.grad(y, x, dy)[0], torch.autograd.grad(expected, x, dy)[0])


def test_module_is_a_group_norm() -> None:
    """State, text and results are those of `torch.nn.GroupNorm`, with the activation behind it."""
    theirs = torch.nn.GroupNorm(2, 6, eps=1e-3)
    ours = kf.FusedGroupNorm(2, 6, eps=1e-3, activation="silu")
    torch.nn.init.normal_(theirs.weight)
    ours.load_state_dict(theirs.state_dict())
    assert repr(ours) == f"FusedGroupNorm({theirs.extra_repr()}, activation='silu')"
    x = torch.randn(2, 6, 4)
    torch.testing.assert_close(ours(x), F.silu(theirs(x)))
    assert isinstance(ours, torch.nn.GroupNorm)


def test_arrays_go_in_and_come_out() -> None:
    """An array of NumPy gives an array, with the numbers of the tensor."""
    x = torch.randn(2, 6, 5, 4)
    result = kf.group_norm(x.numpy(), 3, activation="silu")
    assert type(result) is np.ndarray
    assert torch.equal(torch.from_numpy(result), kf.group_norm(x, 3, activation="silu"))


def test_export() -> None:
    """An exported program calls the operator once, and gives the numbers of the module."""
    module, x = kf.FusedGroupNorm(3, 6, activation="silu"), torch.randn(2, 6, 5, 4)
    program = torch.export.export(module, (x,))
    called = [node.target for node in program.graph.nodes if node.op == "call_function"]
    assert called == [torch.ops.kernel_fusion.group_norm.default]
    assert torch.equal(program.module()(x), module(x))
