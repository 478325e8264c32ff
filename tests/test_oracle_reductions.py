"""The reductions against float64: dimensions, lengths, dtypes, layouts. The budgets are the oracle's."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import pytest
import torch
from support import Target, check

import kernel_fusion as kf
from kernel_fusion.testing import unfused
from kernel_fusion.testing.oracle import ReduceCase

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
VERBS = ("sum_squared", "mean_abs")


@pytest.fixture(params=VERBS)
def reduction(request: pytest.FixtureRequest) -> str:
    """Each reduction by name."""
    return request.param


# Grid rationale. The reduced dimensions decide how a tensor is cut into (outer, reduced, inner), and how often; the
# layout decides which are neighbours in memory.
_SUBSETS = [dims for count in range(1, 5) for dims in combinations(range(4), count)]


@pytest.mark.parametrize("layout", ["contiguous", "channels-last", "transposed", "padded", "strided", "expanded"])
@pytest.mark.parametrize("dim", _SUBSETS, ids=str)
def test_dimensions(reduction: str, dim: tuple[int, ...], layout: str, target: Target) -> None:
    """Any dimensions of a tensor in any layout are within budget, kept or not."""
    for keepdim in (False, True):
        check(ReduceCase(reduction, (4, 5, 6, 7), F32, dim=dim, keepdim=keepdim, layout=layout), target)


@pytest.mark.parametrize("dim", [-1, -3, (-1, 0), (2, -3)], ids=str)
def test_negative_dimensions(reduction: str, dim: Any, target: Target) -> None:
    """Negative dimensions count from the end."""
    check(ReduceCase(reduction, (4, 5, 6), BF16, dim=dim), target)


# Grid rationale. Shorter than a vector; around a warp, a chunk, a block; many chunks; more than one block.
_LENGTHS = (1, 2, 3, 7, 8, 17, 255, 256, 1000, 1024, 4096, 4099, 65537, 300007)


@pytest.mark.parametrize("cols", _LENGTHS)
@pytest.mark.parametrize("dtype", [F32, BF16, F64])
def test_row_lengths(reduction: str, cols: int, dtype: torch.dtype, target: Target) -> None:
    """Any row length is within budget, of one row and of several."""
    for rows in (1, 7):
        check(ReduceCase(reduction, (rows, cols), dtype, dim=-1), target)


@pytest.mark.parametrize("shape", [(5000, 17), (30011, 3), (255, 1), (2, 4099), (1000, 256)], ids=str)
@pytest.mark.parametrize("dtype", [F32, F16])
def test_columns(reduction: str, shape: tuple[int, ...], dtype: torch.dtype, target: Target) -> None:
    """Sums down the columns of tall and of wide matrices are within budget, of one and of several."""
    check(ReduceCase(reduction, shape, dtype, dim=0), target)
    check(ReduceCase(reduction, (2, *shape), dtype, dim=1), target)


@pytest.mark.parametrize("out", [F16, BF16, F32], ids=str)
@pytest.mark.parametrize("dtype", [F16, BF16, F32], ids=str)
def test_result_dtype(reduction: str, dtype: torch.dtype, out: torch.dtype, target: Target) -> None:
    """`dtype` is that of the result, rounded once; the gradient keeps the input's dtype."""
    check(ReduceCase(reduction, (33, 255), dtype, dim=-1, out_dtype=out), target)
    check(ReduceCase(reduction, (33, 255), dtype, out_dtype=out), target)


@pytest.mark.parametrize(
    ("shape", "dim"),
    [((), None), ((), -1), ((), 0), ((1,), None), ((0,), None), ((0, 5), 0), ((0, 5), 1), ((3, 0, 2), (0, 1))],
    ids=str,
)
@pytest.mark.parametrize("keepdim", [False, True])
def test_small_and_empty(reduction: str, shape: tuple[int, ...], dim: Any, keepdim: bool, target: Target) -> None:
    """Tensors of no dimension or no element: a sum over nothing is 0, and a mean over nothing is NaN."""
    check(ReduceCase(reduction, shape, F32, dim=dim, keepdim=keepdim), target)


def test_sums_do_not_overflow_on_the_way(target: Target) -> None:
    """Squares beyond float16 make a finite mean or a float32 sum, and an infinite float16 sum."""
    x = torch.full((3, 1000), 300.0, dtype=F16, device=target.device)
    with target.ran(forward=None):
        assert torch.equal(kf.sum_squared(x, -1, dtype=F32, backend=target.backend), x.float().square().sum(-1))
        assert kf.sum_squared(x, -1, backend=target.backend).isinf().all()
        assert torch.equal(kf.mean_abs(x * 200, -1, backend=target.backend), x[:, 0] * 200)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")], ids=str)
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_nan_and_inf_as_in_pytorch(reduction: str, dtype: torch.dtype, dim: int, value: float, target: Target) -> None:
    """NaN and Inf reach the result and the gradient where they do in PyTorch, and no other row."""
    x = torch.randn(5, 1025, dtype=dtype, device=target.device)
    x[1, 600] = value
    x[3, -1] = value
    x.requires_grad_()
    with target.ran(forward=None, backward=1):
        ours = getattr(kf, reduction)(x, dim, backend=target.backend)
        dy = torch.randn_like(ours)
        (dx,) = torch.autograd.grad(ours, x, dy)
    theirs = unfused.reduce(reduction, x, dim)
    (expected,) = torch.autograd.grad(theirs, x, dy)
    finite = theirs.isfinite()
    assert torch.equal(ours[~finite].nan_to_num(7), theirs[~finite].nan_to_num(7))
    assert torch.equal(ours.isfinite(), finite)
    torch.testing.assert_close(dx, expected, equal_nan=True)


def test_slope_of_the_absolute_value_at_0_is_0(target: Target) -> None:
    """As in PyTorch."""
    x = torch.tensor([0.0, -0.0, 2.0, -3.0], device=target.device, requires_grad=True)
    with target.ran(forward=None, backward=1):
        kf.mean_abs(x, backend=target.backend).backward()
    assert torch.equal(x.grad, torch.tensor([0.0, 0.0, 0.25, -0.25], device=target.device))


# Whose squares and values have no place in float32.
@pytest.mark.parametrize("value", [1e-60, 1e50])
def test_gradients_of_fp64_are_computed_in_fp64(reduction: str, value: float, any_target: Target) -> None:
    """With `dtype=float32` the gradient of a float64 input has all digits, as in PyTorch."""
    x = torch.tensor([value, -2 * value, 0.0], device=any_target.device, dtype=F64, requires_grad=True)
    dy = torch.tensor(0.3, device=any_target.device)
    with any_target.ran(forward=None, backward=1):
        ours = getattr(kf, reduction)(x, dtype=F32, backend=any_target.backend)
        (dx,) = torch.autograd.grad(ours, x, dy)
    (expected,) = torch.autograd.grad(unfused.reduce(reduction, x), x, dy.double())
    torch.testing.assert_close(dx, expected, rtol=1e-14, atol=0)


@pytest.mark.parametrize("rows", [1, 5])
def test_no_dimension_means_all(reduction: str, rows: int, target: Target) -> None:
    """Without `dim` all dimensions are reduced, with the bits of naming them all."""
    x = torch.randn(rows, 70001, device=target.device)
    verb = getattr(kf, reduction)
    with target.ran(forward=None):
        assert torch.equal(verb(x, backend=target.backend), verb(x, (0, 1), backend=target.backend))
