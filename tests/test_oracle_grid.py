"""Every norm against float64: dtypes, parameters, shapes, layouts and values, y and all gradients.

The budgets are the oracle's. The grids are separate rather than one product, because each varies what one part of the
code branches on; the comment above a grid says which.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import pytest
import torch
from support import CPU, Target, call, check
from torch import Tensor
from torch.nn import functional as F

import kernel_fusion as kf
from kernel_fusion.testing import oracle
from kernel_fusion.testing.oracle import RowNormCase

VERBS = ("layer_norm", "rms_norm")
F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64


# Grid rationale. Every dtype of x, weight, bias and y is a type parameter of some load, store or sum of its own, and
# an absent weight or bias is a compile-time branch; so all mixes that the contract allows, at one shape that has full
# vectors and a tail in every dtype (255 = 31 x 8 + 7 = 63 x 4 + 3) and several rows.
def _mixes() -> Iterator[RowNormCase]:
    low = (F16, BF16, F32)
    for verb, (x, parameters) in product(VERBS, [*product(low, [low]), (F64, (F64,))]):
        outputs = (None, *(dtype for dtype in parameters if dtype != x))
        for weight, bias, out in product((None, *parameters), (None, *parameters), outputs):
            yield RowNormCase(verb, (7, 255), x, weight=weight, bias=bias, out_dtype=out)


@pytest.mark.parametrize("case", list(_mixes()), ids=str)
def test_dtype_mixes(case: RowNormCase, target: Target) -> None:
    """Any mix of dtypes, with and without weight and bias, is within budget."""
    check(case, target)


# Grid rationale. The row length decides vectors, tails, lanes per row, warps per row, clusters and whether a row stays
# in registers: 1 and 3 are shorter than a vector, 8 and 17 than a warp; 64 | 255, 256 | 1000, 1023, 1024 straddle full
# vectors and warps; 4096, 5000, 10240, 12288 take several warps; 32768 and 32769 take clusters, as
# 131072 does; 200003 (a prime) is past all of them. One row leaves the other rows of a block idle; 7 rows are odd; 1000
# rows make several blocks and partial sums of unequal length, and are only taken where they stay small. A single row of
# fewer than 64 elements is too few for PyTorch's error to be a fair measure; that it has the bits of the same row in a
# batch is tested elsewhere. Rows of one element stay away from 0, where RMSNorm's dx is nothing but cancellation: its
# error grows like 1 / |x|, ours and PyTorch's, so that the smallest of thousands of draws alone would decide.
_LENGTHS = (1, 3, 8, 17, 64, 255, 256, 1000, 1023, 1024, 4096, 5000, 10240, 12288, 32768, 32769, 131072, 200003)


def _lengths() -> Iterator[RowNormCase]:
    for verb, dtype, cols in product(VERBS, (F32, BF16, F16, F64), _LENGTHS):
        for rows in (7, 1000) if cols < 64 else (1, 7, 1000) if cols <= 1024 else (1, 7) if cols <= 32769 else (2,):
            values = {"mean": 3.0, "std": 0.5} if cols == 1 else {}
            yield RowNormCase(verb, (rows, cols), dtype, weight=dtype, bias=dtype, **values)


@pytest.mark.parametrize("case", list(_lengths()), ids=str)
def test_row_lengths(case: RowNormCase, target: Target) -> None:
    """Any row length and row count is within budget."""
    check(case, target)


# Grid rationale. Long rows in another mix and without sums take other plans than with them: the sums decide
# how many elements a thread may hold.
@pytest.mark.parametrize("cols", [4096, 12288, 32768, 131072])
@pytest.mark.parametrize("weight", [None, F32], ids=["plain", "f32-weight"])
def test_long_rows_of_other_mixes(verb: str, cols: int, weight: torch.dtype | None, target: Target) -> None:
    """Long bf16 rows with a float32 weight, or with no parameter at all, are within budget."""
    check(RowNormCase(verb, (3, cols), BF16, weight=weight), target)


# Grid rationale. Empty rows, an empty batch and an empty everything leave PyTorch's code by different doors: the
# gradients of weight and bias are zeros of full shape, or empty.
@pytest.mark.parametrize("shape", [(0, 8), (2, 0, 8), (0,), (3, 0), (0, 0)])
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_empty(verb: str, shape: tuple[int, ...], dtype: torch.dtype, target: Target) -> None:
    """Empty inputs give empty results and zero gradients of the parameters."""
    check(RowNormCase(verb, shape, dtype, weight=dtype, bias=dtype), target)


# Grid rationale. Rows of more than one dimension, down to none left over: statistics then have leading dimensions of
# any number. 255 = 3 x 5 x 17 keeps a tail.
@pytest.mark.parametrize("num_dims", [1, 2, 3, 4])
def test_several_normalized_dimensions(verb: str, num_dims: int, target: Target) -> None:
    """Rows may span any number of last dimensions, all of them included."""
    check(RowNormCase(verb, (4, 3, 5, 17), F32, num_dims, weight=F32, bias=F32), target)


# Grid rationale. Three leading dimensions is the most that the row addressing holds; x and dy have the same layout
# here. "unaligned" and "padded" rows of odd length change a row's alignment from row to row.
_LAYOUTS = ("padded", "unaligned", "transposed")
_LAYOUT_SHAPES = ((7, 255), (2, 3, 64), (3, 4, 5, 1000), (2, 3, 1, 2, 264), (5, 4097))


@pytest.mark.parametrize("layout", _LAYOUTS)
@pytest.mark.parametrize("shape", _LAYOUT_SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [F32, BF16, F64])
def test_layouts(verb: str, dtype: torch.dtype, shape: tuple[int, ...], layout: str, target: Target) -> None:
    """Strided rows, permuted dimensions and storage offsets are within budget."""
    check(RowNormCase(verb, shape, dtype, weight=dtype, bias=dtype, layout=layout), target)


# Grid rationale. The values that break a variance computed as E[x^2] - E[x]^2, or in the input's dtype: a mean far from
# zero, squares that overflow fp16 or lose their cubes in fp32, a variance near eps, no variance at all. With a far
# mean, its one rounding is most of the error and a matter of luck; 64 rows make PyTorch's largest error a fair measure.
_VALUES = [
    pytest.param(F32, 1e4, 1.0, id="f32-far"),
    pytest.param(F64, 1e8, 1.0, id="f64-far"),
    pytest.param(BF16, 1e4, 1.0, id="bf16-far"),
    pytest.param(F16, 1e4, 1.0, id="f16-far"),
    pytest.param(F16, 0.0, 1e4, id="f16-squares-overflow"),
    pytest.param(BF16, 0.0, 1e15, id="bf16-large"),
    pytest.param(F32, 0.0, 1e-3, id="f32-variance-near-eps"),
    pytest.param(F32, 0.0, 1e-20, id="f32-tiny"),
    pytest.param(F32, 3.0, 0.0, id="f32-constant"),
    pytest.param(BF16, 3.0, 0.0, id="bf16-constant"),
]


@pytest.mark.parametrize(("dtype", "mean", "std"), _VALUES)
@pytest.mark.parametrize("cols", [255, 4096, 12288])
def test_values(verb: str, dtype: torch.dtype, mean: float, std: float, cols: int, target: Target) -> None:
    """Rows with a large mean, a large, tiny or no variance stay within budget."""
    check(RowNormCase(verb, (64, cols), dtype, weight=dtype, bias=dtype, mean=mean, std=std), target)


# Grid rationale. If statistics are taken in passing, the first columns of a warp's or a chunk's stretch give their
# center: here these lie a thousand or a hundred thousand deviations off the rest, in every sixteenth of a row. Lengths
# that a GPU holds, of vectors (4096) and of single elements (4099, 12289), and reads twice (RMSNorm of 24576).
@pytest.mark.parametrize("distance", [2e3, 2e5])
@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("cols", [4096, 4099, 12289, 24576])
def test_first_columns_far_off(verb: str, cols: int, dtype: torch.dtype, distance: float, target: Target) -> None:
    """y is within budget though the columns that are read first lie far off the others."""
    case = RowNormCase(verb, (64, cols), dtype, weight=dtype, bias=dtype)
    inputs = oracle.make_inputs(case, target.device)
    first = torch.arange(cols, device=target.device) % (cols // 16) < cols // 128
    with torch.no_grad():
        inputs.x += distance * first
    with target.ran(forward=1, backward=1):
        ours = oracle.run(case, inputs, target.backend)["y"]
    verdict = oracle.judge("y", [(ours, oracle.reference(case, inputs)["y"], oracle.pytorch(case, inputs)["y"])])
    assert verdict.ok, verdict


@pytest.mark.parametrize("activation", [None, "silu"])
def test_sums_over_many_rows(activation: str | None) -> None:
    """On the CPU dweight and dbias of a tall input err no more than PyTorch's sums, which are cascades."""
    rows, cols = 131072, 31
    x, dy = torch.randn(2, rows, cols)
    parameters = [p.requires_grad_() for p in torch.randn(2, cols)]

    def pytorch(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        y = F.rms_norm(x, (cols,), weight, 1e-5) + bias
        return F.silu(y) if activation else y

    with CPU.ran(forward=1, backward=1):
        y = kf.rms_norm(x, cols, parameters[0], 1e-5, bias=parameters[1], activation=activation)
        ours = torch.autograd.grad(y, parameters, dy)
    theirs = torch.autograd.grad(pytorch(x, *parameters), parameters, dy)
    wide = [p.detach().double().requires_grad_() for p in parameters]
    exact = torch.autograd.grad(pytorch(x.double(), *wide), wide, dy.double())
    ours_off, theirs_off = (torch.cat(found) - torch.cat(exact) for found in (ours, theirs))
    assert ours_off.norm() <= theirs_off.norm()


# Grid rationale. The offset is added in the compute type: a bf16 weight near zero keeps its digits.
@pytest.mark.parametrize("offset", [1.0, -0.5])
@pytest.mark.parametrize(("dtype", "weight"), [(F32, F32), (BF16, BF16), (BF16, F32), (F64, F64)])
def test_weight_offset(verb: str, dtype: torch.dtype, weight: torch.dtype, offset: float, target: Target) -> None:
    """`weight_offset` is within budget, forward and backward."""
    check(RowNormCase(verb, (7, 255), dtype, weight=weight, bias=weight, weight_offset=offset), target)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")], ids=str)
@pytest.mark.parametrize("dtype", [F32, BF16, F16, F64])
@pytest.mark.parametrize("cols", [17, 1024, 5000])
def test_nan_and_inf_propagate_as_in_pytorch(
    verb: str, cols: int, dtype: torch.dtype, value: float, target: Target
) -> None:
    """A NaN or Inf makes NaN and Inf of the same elements of y and of the gradients as PyTorch's call on the CPU does.

    On the CPU, because PyTorch's CUDA rms_norm gives other patterns for some row lengths than for others.
    """
    case = RowNormCase(verb, (4, cols), dtype, weight=dtype, bias=dtype)
    inputs, cpu_inputs = oracle.make_inputs(case, target.device), oracle.make_inputs(case, "cpu")
    with torch.no_grad():
        for x in (inputs.x, cpu_inputs.x):
            x[1, cols // 2] = value
            x[2, -1] = value
    with target.ran(forward=1, backward=1):
        ours = oracle.run(case, inputs, target.backend)
    theirs = oracle.pytorch(case, cpu_inputs)
    for name, result in theirs.items():
        # PyTorch's kernels disagree with each other on Inf or NaN in a row that holds either, so both count as one.
        assert torch.equal(ours[name].isfinite().cpu(), result.isfinite()), name
    assert not ours["y"][1].isfinite().all(), "the value did not propagate"


def test_nan_stays_in_its_row(verb: str, target: Target) -> None:
    """A row of NaN leaves every other row's y and dx as they are, to the bit."""
    clean = torch.randn(9, 255, device=target.device)
    dirty = clean.clone()
    dirty[4] = float("nan")
    dy = torch.randn_like(clean)
    results = []
    with target.ran(forward=2, backward=2):
        for x in (clean, dirty):
            x.requires_grad_()
            y = call(verb, x, backend=target.backend)
            results.append((y, *torch.autograd.grad(y, x, dy)))
    others = torch.arange(9) != 4
    for one, other in zip(*results, strict=True):
        assert torch.equal(one[others], other[others])
        assert other[4].isnan().all()
