"""Softmax and attention scores against float64: lengths, masks, layouts, values. The budgets are the oracle's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support import Target, check

import kernel_fusion as kf
from kernel_fusion.testing.oracle import ScoresCase, SoftmaxCase

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
INF = float("inf")


# Grid rationale. As for other rows: vectors, tails, one chunk, many; and rows that do not stay on chip.
_LENGTHS = (1, 2, 3, 8, 17, 64, 255, 256, 1023, 1024, 4096, 4099, 32768, 131072, 200003)


@pytest.mark.parametrize("cols", _LENGTHS)
@pytest.mark.parametrize("dtype", [F32, BF16, F16, F64])
def test_row_lengths(cols: int, dtype: torch.dtype, target: Target) -> None:
    """Any row length is within budget."""
    check(SoftmaxCase("softmax", (65 if cols < 2000 else 2, cols), dtype), target)


# Grid rationale. A mask is read by strides, of which any may be 0; boolean masks choose, additive ones add and have
# gradients of their own shape; both together with causal.
_MASK_SHAPES = ((40,), (9, 1), (9, 40), (1, 1, 40), (3, 9, 40), (2, 1, 1, 40), (2, 3, 9, 40), (2, 3, 1, 1))


@pytest.mark.parametrize("mask_shape", _MASK_SHAPES, ids=str)
@pytest.mark.parametrize("mask", ["boolean", "additive"])
@pytest.mark.parametrize("causal", [False, True])
def test_masks(mask: str, mask_shape: tuple[int, ...], causal: bool, target: Target) -> None:
    """Masks of any shape that broadcasts are within budget, their gradients included."""
    for dtype in (F32, BF16):
        options: dict[str, Any] = {"mask": mask, "mask_shape": mask_shape, "causal": causal, "scale": 0.5}
        check(SoftmaxCase("softmax", (2, 3, 9, 40), dtype, **options), target)


@pytest.mark.parametrize("mask_dtype", [F16, BF16, F32])
@pytest.mark.parametrize("dtype", [F16, BF16, F32])
def test_mask_dtypes(dtype: torch.dtype, mask_dtype: torch.dtype, target: Target) -> None:
    """An additive mask of another dtype is added as it is, and its gradient has its dtype."""
    case = SoftmaxCase("softmax", (33, 255), dtype, mask="additive", mask_shape=(255,), mask_dtype=mask_dtype)
    check(case, target)


# Grid rationale. More columns than rows, more rows than columns, one of either; a length past one chunk.
@pytest.mark.parametrize("shape", [(9, 9), (5, 9), (9, 5), (1, 7), (7, 1), (2, 3, 33, 65), (3, 1100, 1100)], ids=str)
@pytest.mark.parametrize("dtype", [F32, BF16, F64])
def test_causal(shape: tuple[int, ...], dtype: torch.dtype, target: Target) -> None:
    """Row i keeps columns 0 to i, counted from the top left."""
    check(SoftmaxCase("softmax", shape, dtype, causal=True, scale=0.7), target)


_LAYOUTS = ("padded", "unaligned", "transposed", "channels-last", "half", "strided", "expanded")


@pytest.mark.parametrize("layout", _LAYOUTS)
@pytest.mark.parametrize("dim", [-1, 0, 1, 2])
def test_layouts_and_dimensions(dim: int, layout: str, target: Target) -> None:
    """Any layout and any dimension are within budget."""
    check(SoftmaxCase("softmax", (4, 6, 5, 80), F32, dim=dim, layout=layout), target)


def test_masks_over_another_dimension(target: Target) -> None:
    """A mask goes with its elements where the softmax is over another dimension than the last."""
    for mask in ("boolean", "additive"):
        check(SoftmaxCase("softmax", (5, 60, 7), F32, dim=1, mask=mask, mask_shape=(60, 1)), target)


@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (0, 5), (1,), (1, 1)], ids=str)
def test_small_and_empty(shape: tuple[int, ...], target: Target) -> None:
    """Tensors of no dimension, of no element and of one."""
    case = SoftmaxCase("softmax", shape, F32)
    inputs = case.make_inputs(target.device)
    with target.ran(forward=int(inputs.x.numel() > 0)):
        y = kf.softmax(inputs.x, backend=target.backend)
    assert y.shape == shape
    assert torch.equal(y, torch.softmax(inputs.x, -1))


@pytest.mark.parametrize("scale", [1.0, -2.0, 0.0, 1e4])
def test_scales(scale: float, target: Target) -> None:
    """A negative, a vanishing and a huge factor are within budget."""
    check(SoftmaxCase("softmax", (65, 255), F32, scale=scale), target)
    check(SoftmaxCase("softmax", (65, 255), F32, scale=scale, mask="additive"), target)


@pytest.mark.parametrize("dtype", [F32, BF16, F16, F64])
@pytest.mark.parametrize("mean", [1e4, -1e4])
def test_large_logits_do_not_overflow(dtype: torch.dtype, mean: float, target: Target) -> None:
    """Logits far from zero, whose exponentials overflow or vanish, are within budget."""
    check(SoftmaxCase("softmax", (65, 255), dtype, mean=mean), target)


# Grid rationale. Without a mask PyTorch's softmax is the model, NaN for a row without a maximum included.
_ROWS = {
    "-inf-among-others": [1.0, -INF, 2.0],
    "all--inf": [-INF, -INF, -INF],
    "inf": [1.0, INF, 2.0],
    "inf-and--inf": [-INF, INF, 2.0],
    "nan": [1.0, float("nan"), 2.0],
    "nan-and--inf": [-INF, float("nan"), -INF],
}


@pytest.mark.parametrize("row", _ROWS)
@pytest.mark.parametrize("cols", [3, 17, 1026])
def test_special_values_as_in_pytorch(row: str, cols: int, target: Target) -> None:
    """Infinite logits and NaN give PyTorch's values and gradients, in their own row."""
    x = torch.randn(5, cols, device=target.device)
    x[2] = torch.tensor(_ROWS[row]).repeat(-(-cols // 3))[:cols]
    x.requires_grad_()
    dy = torch.randn_like(x)
    with target.ran(forward=1, backward=1):
        y = kf.softmax(x, backend=target.backend)
        (dx,) = torch.autograd.grad(y, x, dy)
    theirs = torch.softmax(x, -1)
    torch.testing.assert_close(y, theirs, equal_nan=True)
    torch.testing.assert_close(dx, torch.autograd.grad(theirs, x, dy)[0], equal_nan=True)


@pytest.mark.parametrize("kind", ["boolean", "additive"])
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_a_row_with_nothing_left_is_zero(kind: str, dtype: torch.dtype, any_target: Target) -> None:
    """A fully masked row gives zeros and zero gradients, in x and in an additive mask; the other rows are right."""
    x = torch.randn(4, 255, device=any_target.device, dtype=dtype, requires_grad=True)
    keep = torch.rand(4, 255, device=any_target.device) < 0.5
    keep[2] = False
    additive = torch.zeros(4, 255, device=any_target.device, dtype=dtype).masked_fill(~keep, -INF).requires_grad_()
    dy = torch.randn_like(x)
    with any_target.ran(forward=1, backward=1):
        y = kf.softmax(x, mask=keep if kind == "boolean" else additive, backend=any_target.backend)
        y.backward(dy)
    assert torch.equal(y[2], torch.zeros_like(y[2]))
    assert torch.equal(x.grad[2], torch.zeros_like(x[2]))
    assert torch.equal(y[~keep], torch.zeros_like(y[~keep]))
    assert torch.equal(x.grad[~keep], torch.zeros_like(y[~keep]))
    torch.testing.assert_close(y.float().sum(-1)[[0, 1, 3]], torch.ones(3, device=any_target.device), rtol=1e-2, atol=0)
    if kind == "additive":
        assert torch.equal(additive.grad, x.grad)


def test_what_is_masked_does_not_matter(target: Target) -> None:
    """NaN and Inf under a boolean or causal mask reach neither the result nor the gradients of what is kept."""
    x = torch.randn(9, 9, device=target.device)
    keep = torch.ones(9, 9, dtype=torch.bool, device=target.device).tril()
    dy = torch.randn_like(x)

    def run(x: torch.Tensor, **options: Any) -> list[torch.Tensor]:
        x = x.clone().requires_grad_()
        y = kf.softmax(x, backend=target.backend, **options)
        return [y.detach(), torch.autograd.grad(y, x, dy)[0]]

    with target.ran(forward=6, backward=6):
        for options in ({"mask": keep}, {"causal": True}):
            clean = run(x, **options)
            for value in (float("nan"), INF):
                dirty = run(x.masked_fill(~keep, value), **options)
                assert torch.equal(dirty[0], clean[0])
                assert torch.equal(dirty[1][keep], clean[1][keep])


@pytest.mark.parametrize("kind", ["boolean", "causal", "both"])
@pytest.mark.parametrize("cols", [9, 4100])
@pytest.mark.parametrize("value", [float("nan"), INF])
def test_nan_does_not_reach_what_is_left_out(kind: str, cols: int, value: float, any_target: Target) -> None:
    """In a row with NaN the gradients are PyTorch's; what is left out is zero, and so is its gradient."""
    x = torch.randn(3, cols, device=any_target.device)
    x[1, 0] = x[2, 1] = value
    keep = torch.rand(3, cols, device=any_target.device) < 0.5
    keep[:, :2], keep[:, -1] = True, False
    options = {} if kind == "causal" else {"mask": keep}
    if kind != "boolean":
        options["causal"] = True
    kept = torch.ones_like(keep).tril() if kind != "boolean" else torch.ones_like(keep)
    kept = kept if kind == "causal" else kept & keep
    dy = torch.randn_like(x)
    x.requires_grad_()
    with any_target.ran(forward=1, backward=1):
        y = kf.softmax(x, backend=any_target.backend, **options)
        (dx,) = torch.autograd.grad(y, x, dy)
    with any_target.ran(forward=1):
        again = kf.softmax(x, backend=any_target.backend, **options)
        (differentiable,) = torch.autograd.grad(again, x, dy, create_graph=True)
    theirs = torch.softmax(x.masked_fill(~kept, -INF), -1)
    torch.testing.assert_close(y, theirs.masked_fill(~kept, 0.0), equal_nan=True)
    (expected,) = torch.autograd.grad(theirs, x, dy)
    for found in (dx, differentiable):
        torch.testing.assert_close(found, expected, equal_nan=True)
        assert torch.equal(found[~kept], torch.zeros_like(found[~kept]))
    assert dx[2].isnan().any()


def test_causal_is_the_mask_of_scaled_dot_product_attention(target: Target) -> None:
    """Weights from `attention_scores` give what PyTorch's attention with `is_causal` gives."""
    q, k, v = torch.randn(3, 2, 4, 33, 16, device=target.device)
    with target.ran(forward=1):
        weights = kf.attention_scores(q, k, causal=True, normalize=True, backend=target.backend)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    torch.testing.assert_close(weights @ v, expected)


# Grid rationale. More rows than one product computes at a time; square, wide, and fewer columns than rows.
@pytest.mark.parametrize("cols", [1100, 1600, 300])
@pytest.mark.parametrize("dtype", [F32, F16])
def test_causal_weights_in_parts(cols: int, dtype: torch.dtype, target: Target) -> None:
    """Without gradients most scores above the diagonal are never computed; the weights are those of all scores."""
    q = torch.randn(2, 1, 1100, 16, device=target.device, dtype=dtype)
    k = torch.randn(3, cols, 16, device=target.device, dtype=dtype)
    with target.ran(forward=2):
        weights = kf.attention_scores(q, k, causal=True, normalize=True, backend=target.backend)
        q.requires_grad_()
        whole = kf.attention_scores(q, k, causal=True, normalize=True, backend=target.backend)
    torch.testing.assert_close(weights, whole.detach())


# Grid rationale. Broadcasting in front of the matrices, one query as in decoding, and a depth of one.
_QUERIES = [((9, 16), (9, 16)), ((2, 3, 1, 16), (2, 3, 40, 16)), ((2, 3, 9, 16), (12, 16)), ((9, 1), (5, 9, 1))]


@pytest.mark.parametrize(("query", "key"), _QUERIES, ids=str)
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_scores(
    query: tuple[int, ...], key: tuple[int, ...], normalize: bool, dtype: torch.dtype, target: Target
) -> None:
    """Scores and weights of queries and keys that broadcast are within budget."""
    check(ScoresCase("attention_scores", query, dtype, key_shape=key, normalize=normalize), target)


def test_scores_of_no_terms_are_zero(target: Target) -> None:
    """If D is 0, the product is 0 for any scale, and its softmax uniform."""
    query, key = (torch.empty(2, n, 0, device=target.device) for n in (3, 4))
    assert torch.equal(kf.attention_scores(query, key).cpu(), torch.zeros(2, 3, 4))
    weights = kf.attention_scores(query, key, normalize=True, backend=target.backend)
    assert torch.equal(weights.cpu(), torch.full((2, 3, 4), 0.25))


@pytest.mark.parametrize("layout", ["padded", "transposed", "half", "unaligned"])
def test_layouts_of_queries_and_keys(layout: str, target: Target) -> None:
    """Slices of a fused projection need not be contiguous."""
    check(ScoresCase("attention_scores", (2, 3, 9, 16), F32, normalize=True, layout=layout), target)


@pytest.mark.parametrize("mask", ["boolean", "additive"])
@pytest.mark.parametrize("causal", [False, True])
def test_masked_scores_are_minus_infinity(mask: str, causal: bool, target: Target) -> None:
    """Without `normalize` what is left out is -inf, and its cotangent reaches nothing."""
    check(ScoresCase("attention_scores", (2, 9, 16), F32, mask=mask, causal=causal), target)


# Grid rationale. The logarithm shares loads, masks and sums with softmax, whose grids are above; its own are the last
# step and backward: rows in one piece and in several, of each dtype, and each kind of mask.
_LOGARITHMS: list[tuple[tuple[int, ...], dict[str, Any]]] = [
    ((65, 255), {"scale": 0.5}),
    ((33, 64), {"scale": -2.0, "mean": 1e4}),
    ((3, 4100), {}),
    ((2, 70001), {}),
    ((2, 3, 9, 40), {"mask": "boolean", "mask_shape": (3, 1, 40), "causal": True}),
    ((2, 3, 9, 40), {"mask": "dead"}),
    ((2, 3, 9, 40), {"mask": "additive", "mask_shape": (1, 1, 40), "scale": 0.5}),
    ((2, 3, 9, 40), {"mask": "additive", "causal": True}),
    ((3, 1100, 1100), {"causal": True}),
    ((4, 60, 7), {"dim": 1, "mask": "boolean", "mask_shape": (60, 1)}),
    ((4, 6, 80), {"layout": "padded"}),
    ((), {}),
]


@pytest.mark.parametrize("dtype", [F32, BF16, F16, F64])
@pytest.mark.parametrize(("shape", "options"), _LOGARITHMS, ids=str)
def test_logarithm(shape: tuple[int, ...], options: dict[str, Any], dtype: torch.dtype, target: Target) -> None:
    """`log_softmax` and its gradients are within budget."""
    check(SoftmaxCase("log_softmax", shape, dtype, **options), target)


@pytest.mark.parametrize("row", _ROWS)
@pytest.mark.parametrize("cols", [3, 1026])
def test_logarithm_of_special_values_as_in_pytorch(row: str, cols: int, target: Target) -> None:
    """Infinite logits and NaN give PyTorch's logarithms and gradients, in their own row."""
    x = torch.randn(5, cols, device=target.device)
    x[2] = torch.tensor(_ROWS[row]).repeat(-(-cols // 3))[:cols]
    x.requires_grad_()
    dy = torch.randn_like(x)
    with target.ran(forward=1, backward=1):
        y = kf.log_softmax(x, backend=target.backend)
        (dx,) = torch.autograd.grad(y, x, dy)
    theirs = torch.log_softmax(x, -1)
    torch.testing.assert_close(y, theirs, equal_nan=True)
    torch.testing.assert_close(dx, torch.autograd.grad(theirs, x, dy)[0], equal_nan=True)


@pytest.mark.parametrize("kind", ["boolean", "additive"])
@pytest.mark.parametrize("cols", [9, 4100])
def test_logarithm_of_what_is_left_out(kind: str, cols: int, any_target: Target) -> None:
    """It is -inf, also in a row with nothing left or with NaN, and its incoming gradient reaches nothing."""
    x = torch.randn(4, cols, device=any_target.device, requires_grad=True)
    keep = torch.rand(4, cols, device=any_target.device) < 0.5
    keep[2], keep[:, 1] = False, False
    keep[[0, 1, 3], 0] = True
    additive = torch.zeros_like(x).masked_fill(~keep, -INF)
    mask = keep if kind == "boolean" else additive.detach().requires_grad_()
    dy = torch.randn_like(x)
    with any_target.ran(forward=1, backward=1):
        y = kf.log_softmax(x, mask=mask, backend=any_target.backend)
        (dx,) = torch.autograd.grad(y, x, dy)
    with any_target.ran(forward=1):
        again = kf.log_softmax(x, mask=mask, backend=any_target.backend)
        (differentiable,) = torch.autograd.grad(again, x, dy, create_graph=True)
    kept = dy.masked_fill(~keep, 0.0)
    expected = kept - kf.softmax(x, mask=keep, backend="eager") * kept.sum(-1, keepdim=True)
    for found in (dx, differentiable):
        torch.testing.assert_close(found, expected)
        assert torch.equal(found[~keep], torch.zeros_like(found[~keep]))
    torch.testing.assert_close(y, kf.softmax(x, mask=keep, backend="eager").log())
    if kind == "boolean":
        with any_target.ran(forward=1):
            spoilt = kf.log_softmax(x.detach().masked_fill(keep, float("nan")), mask=mask, backend=any_target.backend)
        assert spoilt[keep].isnan().all()
        assert torch.equal(spoilt[~keep], torch.full_like(spoilt[~keep], -INF))
