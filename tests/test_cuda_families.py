"""Pointwise chains, reductions and softmax on a GPU, through their operators: results, launches, invariance, sizes.

Results are judged by the oracle's budget beside the same PyTorch calls; where dropout is in, its mask comes from the
definition, so that kernels and definition must agree on every element's bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from support import CUDA, Draw, assert_as_accurate, assert_draws_as_accurate
from torch import Tensor

from kernel_fusion.backends import eager
from kernel_fusion.backends.cuda.compile import counters
from kernel_fusion.backends.eager.pointwise import COMBINES
from kernel_fusion.core.activations import ACTIVATIONS, formula
from kernel_fusion.testing import oracle

pytestmark = pytest.mark.cuda
F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
ops = torch.ops.kernel_fusion


def randn(*shape: int, dtype: torch.dtype = F32, grad: bool = True) -> Tensor:
    """Random values on the GPU, of a dtype."""
    return torch.randn(shape, device="cuda").to(dtype).requires_grad_(grad)


def chain(combine: str, activation: str, p: float = 0.0, seed: Tensor | None = None) -> Callable[..., Tensor]:
    """A chain as PyTorch's users write it, one operation after the other in the dtype of the operands."""

    def unfused(a: Tensor, b: Tensor | None = None) -> Tensor:
        y = COMBINES[combine](formula(activation), a, a if b is None else b)
        return eager.dropout(y, p, seed)

    return unfused


def fused(combine: str, activation: str, p: float = 0.0, seed: Tensor | None = None) -> Callable[..., Tensor]:
    """The same chain, by the operator."""
    return lambda a, b=None: ops.pointwise(a, b, combine, activation, 1.0, p, seed)


def with_grads(function: Callable[..., Tensor], dy: Tensor) -> Callable[..., list[Tensor]]:
    """y and the gradients of all arguments that require one."""

    def run(*args: Any) -> list[Tensor]:
        y = function(*args)
        leaves = [t for t in args if isinstance(t, Tensor) and t.requires_grad]
        return [y.detach(), *torch.autograd.grad(y, leaves, dy.to(y.dtype))]

    return run


def new_seed() -> Tensor:
    """A seed of dropout on the GPU."""
    return eager.draw_seed(torch.device("cuda"))


# Grid rationale. Every activation in the dtypes whose arithmetic differs; a size that is no multiple of a block, nor of
# a vector.
@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations(activation: str, dtype: torch.dtype) -> None:
    """Every activation, forward and backward, with and without dropout."""
    a, b = randn(33, 2049, dtype=dtype), randn(33, 2049, dtype=dtype)
    dy, seed = randn(33, 2049, dtype=dtype, grad=False), new_seed()
    for p, s in ((0.0, None), (0.25, seed)):
        for combine in ("add", "gate"):
            with CUDA.ran(forward=1, backward=1):
                ours = with_grads(fused(combine, activation, p, s), dy)(a, b)
            assert_as_accurate(ours, with_grads(chain(combine, activation, p, s), dy), a, b)


def _halves(cols: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    x = randn(200, 2 * cols, dtype=dtype, grad=False)
    return x[:, :cols].requires_grad_(), x[:, cols:].requires_grad_()


# Grid rationale. The ways in which an operand can meet the iteration: linear, contiguous rows, one element to a row,
# rows with a stride, element by element; whole vectors and odd rows; unaligned; several dimensions; unlike dtypes.
_LAYOUTS: dict[str, Callable[[torch.dtype], tuple[Tensor, Tensor]]] = {
    "bias": lambda t: (randn(300, 768, dtype=t), randn(768, dtype=t)),
    "odd bias": lambda t: (randn(300, 767, dtype=t), randn(767, dtype=t)),
    "short bias": lambda t: (randn(5000, 24, dtype=t), randn(24, dtype=t)),
    "wide bias": lambda t: (randn(3, 40000, dtype=t), randn(40000, dtype=t)),
    "bias in fp32": lambda t: (randn(300, 768, dtype=t), randn(768)),
    "column": lambda t: (randn(300, 768, dtype=t), randn(300, 1, dtype=t)),
    "odd column": lambda t: (randn(300, 765, dtype=t), randn(300, 1, dtype=t)),
    "scalar": lambda t: (randn(300, 768, dtype=t), randn(1, dtype=t)),
    "halves": lambda t: _halves(512, t),
    "odd halves": lambda t: _halves(509, t),
    "transposed": lambda t: (randn(300, 200, dtype=t), randn(200, 300, dtype=t).detach().t().requires_grad_()),
    "unaligned": lambda t: (
        randn(5001, dtype=t, grad=False)[1:].requires_grad_(),
        randn(5003, dtype=t, grad=False)[3:].requires_grad_(),
    ),
    "every second": lambda t: (
        randn(300, 64, 2, dtype=t, grad=False)[..., 0].requires_grad_(),
        randn(300, 64, dtype=t),
    ),
    "both broadcast": lambda t: (randn(6, 1, 50, 40, dtype=t), randn(1, 7, 1, 40, dtype=t)),
    "both broadcast, odd": lambda t: (randn(6, 1, 50, 41, dtype=t), randn(1, 7, 1, 41, dtype=t)),
}


@pytest.mark.parametrize("p", [0.0, 0.25])
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("layout", _LAYOUTS)
def test_layouts(layout: str, dtype: torch.dtype, p: float) -> None:
    """Operands of any strides, broadcast, unaligned: the kernel reads them where they lie."""
    draws: list[Draw] = []
    for _ in range(8 if layout == "scalar" else 1):  # its gradient is a single number, which may happen to be exact
        a, b = _LAYOUTS[layout](dtype)
        dy, seed = torch.randn_like(a + b), new_seed() if p else None
        with CUDA.ran(forward=1, backward=None):
            ours = with_grads(fused("mul", "gelu", p, seed), dy)(a, b)
        draws.append((ours, with_grads(chain("mul", "gelu", p, seed), dy), (a, b)))
    assert_draws_as_accurate(draws)


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_bias_gradient_takes_two_launches(dtype: torch.dtype) -> None:
    """da and the sum db come from one pass and its finish."""
    a, b, dy = randn(4096, 1024, dtype=dtype), randn(1024, dtype=dtype), randn(4096, 1024, dtype=dtype, grad=False)
    y = fused("add", "gelu")(a, b)
    with CUDA.ran(forward=2):
        torch.autograd.grad(y, (a, b), dy)


@pytest.mark.parametrize("dtype", [F32, BF16, F64], ids=str)
@pytest.mark.parametrize("p", [0.0, 0.5, 1.0])
def test_dropout_drops_what_the_definition_drops(dtype: torch.dtype, p: float) -> None:
    """Bit for bit: relu of positive numbers is exact, so is the scale of p = 1/2; p = 1 leaves nothing."""
    x, seed = randn(129, 257, dtype=dtype, grad=False).abs(), new_seed()
    with CUDA.ran(forward=int(p < 1)):
        y = fused("first", "relu", p, seed)(x)
    assert torch.equal(y, eager.pointwise(x, None, "first", "relu", 1.0, p, seed))
    with CUDA.ran(forward=int(p < 1)):
        rows = fused("first", "relu", p, seed)(x.t())
    assert torch.equal(rows, eager.pointwise(x.t(), None, "first", "relu", 1.0, p, seed))


_SPECIAL = [math.nan, math.inf, -math.inf, 0.0, -0.0, 3e38, -3e38, 1e-40, 20.0, -20.0, 3.0, -3.0]


@pytest.mark.parametrize("dtype", [F32, BF16, F16, F64], ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_special_values(activation: str, dtype: torch.dtype) -> None:
    """NaN and infinities go where PyTorch takes them."""
    x = torch.tensor(_SPECIAL, device="cuda").to(dtype)
    with CUDA.ran(forward=1):
        y = fused("first", activation)(x)
    expected = formula(activation)(x)
    assert torch.equal(y.isnan(), expected.isnan()), (y, expected)
    assert torch.equal(y.isinf(), expected.isinf()), (y, expected)


def _kept(call: Callable[[], Tensor]) -> tuple[Tensor, list[Tensor]]:
    """The result, and the tensors that autograd saved."""
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        return call(), kept


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_bits_are_kept_where_they_tell_the_slope(activation: str) -> None:
    """An eighth of a byte per element, and nothing else, of one operand and of a sum; of a bias its row too."""
    a, b, bias = randn(33, 71), randn(33, 71), randn(71)
    for operands, rows in (((a,), 0), ((a, b), 0), ((a, bias), 1)):
        combine = "add" if len(operands) == 2 else "first"
        _, kept = _kept(lambda operands=operands, combine=combine: fused(combine, activation)(*operands))
        bits = [t for t in kept if t.dtype == torch.uint8]
        assert [t.numel() for t in bits] == [-(-33 * 71 // 8)] * (activation in ("relu", "leaky_relu"))
        assert not bits or len(kept) == 1 + rows


# Grid rationale. dy of every kind that autograd hands over: dense, in another order than y, part of a tensor, expanded;
# operands of both orders in memory, and rows.
@pytest.mark.parametrize("dtype", [F32, BF16, F16, F64], ids=str)
@pytest.mark.parametrize("activation", ["relu", "leaky_relu"])
@pytest.mark.parametrize("layout", ["dense", "transposed", "unaligned", "bias", "odd bias"])
def test_gradients_by_bits(layout: str, activation: str, dtype: torch.dtype) -> None:
    """The gradient is dy times the slope, to the last digit, however dy lies in memory."""
    rows, cols = 300, 765 if layout == "odd bias" else 768
    a = randn(rows, cols, dtype=dtype, grad=False)
    if layout == "transposed":
        a = randn(cols, rows, dtype=dtype, grad=False).t()
    if layout == "unaligned":
        a = randn(rows * cols + 1, dtype=dtype, grad=False)[1:].view(rows, cols)
    operands = [a.requires_grad_(), *([randn(cols, dtype=dtype)] if "bias" in layout else [])]
    combine = "add" if len(operands) == 2 else "first"
    y, kept = _kept(lambda: fused(combine, activation)(*operands))
    assert torch.uint8 in {t.dtype for t in kept}
    z = torch.stack([t.detach().double().expand(rows, cols) for t in operands]).sum(0)
    low = z.new_tensor(0.0 if activation == "relu" else 0.01)
    slope = torch.where(z > 0, 1.0, low).to(torch.promote_types(dtype, F32))
    dense = randn(rows, cols, dtype=dtype, grad=False)
    parted = randn(rows, 2 * cols, dtype=dtype, grad=False)[:, :cols]
    for dy in (dense, parted, dense.t().contiguous().t(), dense[:1].expand(rows, cols)):
        with CUDA.ran(forward=None):
            ours = torch.autograd.grad(y, operands, dy, retain_graph=True)
        assert torch.equal(ours[0], (dy * slope).to(dtype))
        if dtype != F64:
            assert_as_accurate([y, *ours], with_grads(chain(combine, activation), dy), *operands)


def test_more_than_2_to_the_31_elements() -> None:
    """Offsets are right beyond 32 bits, where the iteration is linear and where it is cut into parts."""
    if torch.cuda.get_device_properties(0).total_memory < 40 << 30:
        pytest.skip("needs 40 GB")
    rows, cols = 2**20 + 3, 2056
    x, bias = torch.ones(rows, cols, device="cuda", dtype=BF16), torch.arange(cols, device="cuda").to(BF16)
    x[-1, -1] = 5
    with CUDA.ran(forward=None):
        y = fused("add", "relu")(x, bias)
    assert torch.equal(y[0], bias + 1)
    assert torch.equal(y[-1, :-1], bias[:-1] + 1)
    assert y[-1, -1] == bias[-1] + 5
    assert torch.equal(y.view(-1)[:: cols * 4096], (bias[:1] + 1).expand(-(-rows // 4096)))
    del y
    with CUDA.ran(forward=1, backward=1):
        y = fused("first", "relu")(x.requires_grad_())
        (dx,) = torch.autograd.grad(y, x, x.detach())
    assert torch.equal(y, x)
    assert torch.equal(dx, x)
    del y, dx
    # A dy whose memory is short, but not da's.
    each = (torch.arange(rows, device="cuda") % 7).to(BF16)[:, None]
    (dx,) = torch.autograd.grad(fused("first", "relu")(x), x, each.expand(rows, cols))
    assert torch.equal(dx[:, ::1027], each.expand(rows, 3))


# Grid rationale. Rows by lanes of a warp (64, 1000), by a block (4096, 8193), in chunks (70001 and all at once);
# columns many and few, in whole vectors and odd, with their rows shared out and not; dimensions between others.
_REDUCTIONS: dict[str, tuple[tuple[int, ...], list[int]]] = {
    "64": ((5000, 64), [1]),
    "1000": ((300, 1000), [1]),
    "1": ((300, 1), [1]),
    "4096": ((300, 4096), [1]),
    "8193": ((30, 8193), [1]),
    "70001": ((3, 70001), [1]),
    "all": ((1000, 3001), []),
    "columns": ((4096, 1024), [0]),
    "odd columns": ((4096, 1023), [0]),
    "few columns": ((100000, 6), [0]),
    "few rows": ((7, 100000), [0]),
    "many columns": ((300, 50000), [0]),
    "middle": ((20, 300, 48), [1]),
    "many middles": ((300, 50, 200), [1]),
    "outer and inner": ((20, 30, 48), [0, 2]),
}


@pytest.mark.parametrize("kind", ["sum_squared", "mean_abs"])
@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
@pytest.mark.parametrize("case", _REDUCTIONS)
def test_reductions(case: str, dtype: torch.dtype, kind: str) -> None:
    """Sums over any dimensions, in one pass or a few. Few results are judged over several draws together."""
    shape, dim = _REDUCTIONS[case]

    def definition(x: Tensor) -> Tensor:
        return eager.reduce(x, dim, False, kind, F64 if x.dtype == F64 else F32).to(F32)

    def draw() -> Draw:
        x = randn(*shape, dtype=dtype, grad=False)
        with CUDA.ran(forward=None):
            ours = ops.reduce(x, dim, False, kind, F32)
            assert torch.equal(ops.reduce(x, dim, False, kind, F32), ours)
        return ours, definition, (x,)

    first = draw()
    assert_draws_as_accurate([first, *(draw() for _ in range(15 // first[0].numel()))])


# Grid rationale. Tiles of columns for fewer multiprocessors than pay for blocks that take all rows, for just enough of
# them, for each and for more; with rows that a block's lines share evenly, and not.
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize(("share", "launches"), [(0.5, 2), (0.56, 1), (1.0, 1), (1.01, 2)])
def test_columns_by_blocks_that_take_all_rows(share: float, launches: int, dtype: torch.dtype) -> None:
    """If their tiles occupy most multiprocessors, columns are summed in one launch, else in two."""
    tiles = math.ceil(share * torch.cuda.get_device_properties(0).multi_processor_count)
    columns = tiles * 16 * (16 // dtype.itemsize)

    def definition(x: Tensor) -> Tensor:
        return eager.reduce(x, [0], False, "sum_squared", F64 if x.dtype == F64 else F32).to(F32)

    for rows in (1024, 301):
        x = randn(rows, columns, dtype=dtype, grad=False)
        with CUDA.ran(forward=launches):
            ours = ops.reduce(x, [0], False, "sum_squared", F32)
        assert_draws_as_accurate([(ours, definition, (x,))])


# Grid rationale. Rows by lanes of a warp, by blocks of every size, in one chunk to its last element, in two and three.
@pytest.mark.parametrize(
    ("cols", "launches"), [(500, 1), (1024, 1), (2000, 1), (5001, 1), (16384, 1), (16385, 2), (40001, 2)]
)
def test_reductions_of_views_have_the_same_bits(cols: int, launches: int) -> None:
    """The order of a row's sum depends on its length alone, whatever its alignment, strides or number."""
    x = randn(50, cols, grad=False)
    expected = ops.reduce(x, [1], False, "sum_squared", None)
    padded = torch.empty(50, cols + 2, device="cuda")
    padded[:, 1:-1] = x
    nested = torch.empty(10, 7, cols, device="cuda")[:, :5]  # rows of two strides
    nested.copy_(x.view(10, 5, cols))
    for view in (padded[:, 1:-1], x.repeat_interleave(2, 1)[:, ::2], x[:1], nested):
        with CUDA.ran(forward=launches):
            ours = ops.reduce(view, [-1], False, "sum_squared", None)
        assert torch.equal(ours.view(-1), expected[: ours.numel()])


def test_reductions_in_fp64() -> None:
    """fp64 is summed in fp64."""
    x = randn(30, 5001, dtype=F64, grad=False)
    exact = (x.cpu().numpy().astype(np.longdouble) ** 2).sum(1)
    with CUDA.ran(forward=1):
        ours = ops.reduce(x, [1], False, "sum_squared", None)
    judged = oracle.judge("sum", [(ours, exact, x.square().sum(1))])
    assert judged.ok, judged


# Grid rationale. Lengths of every alignment; in lanes of a warp, in blocks of every size, the largest too, read twice.
_LENGTHS = (1, 2, 5, 24, 63, 128, 255, 384, 768, 1000, 1023, 2048, 3000, 4096)
_LONG_LENGTHS = (12288, 16384, 20000, 32768, 50257, 131072)


@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
@pytest.mark.parametrize("cols", _LENGTHS + _LONG_LENGTHS)
def test_softmax(cols: int, dtype: torch.dtype) -> None:
    """Rows of any length, forward and backward, one launch each."""
    x, dy = (
        randn(2**20 // cols % 37 + 3, cols, dtype=dtype),
        randn(2**20 // cols % 37 + 3, cols, dtype=dtype, grad=False),
    )
    with CUDA.ran(forward=1, backward=1):
        ours = with_grads(lambda x: ops.softmax(x, None, 0.7, False), dy)(x)
    assert_as_accurate(ours, with_grads(lambda x: torch.softmax(x * 0.7, -1), dy), x)


def test_softmax_in_fp64() -> None:
    """fp64 is computed in fp64."""
    for cols in (100, 3000, 9001):
        x = randn(7, cols, dtype=F64, grad=False)
        wide = x.cpu().numpy().astype(np.longdouble)
        exact = np.exp(wide - wide.max(-1, keepdims=True))
        exact /= exact.sum(-1, keepdims=True)
        with CUDA.ran(forward=1):
            ours = ops.softmax(x, None, 1.0, False)
        judged = oracle.judge("softmax", [(ours, exact, torch.softmax(x, -1))])
        assert judged.ok, judged


_MASKS: dict[str, Callable[[], Tensor | None]] = {
    "none": lambda: None,
    "boolean": lambda: randn(2, 3, 64, 320, grad=False) > 0,
    "keys": lambda: randn(2, 1, 1, 320, grad=False) > 0,
    "rows": lambda: randn(2, 3, 64, 1, grad=False) > 0,
    "additive": lambda: randn(1, 1, 64, 320, grad=False),
    "additive bf16": lambda: randn(64, 320, dtype=BF16, grad=False),
    "additive rows": lambda: randn(3, 64, 1, grad=False),
    "lowest": lambda: torch.where(randn(2, 1, 64, 320, grad=False) > 0, 0.0, torch.finfo(F32).min),
    "transposed": lambda: randn(320, 64, grad=False).t() > 0,
}


@pytest.mark.parametrize("cols", [320, 317, 40])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("mask", _MASKS)
def test_masks(mask: str, causal: bool, cols: int) -> None:
    """Masks of any kind and strides, causal or not; what is left out is zero, as in the definition."""
    x, dy = randn(2, 3, 64, cols), randn(2, 3, 64, cols, grad=False)
    m = _MASKS[mask]()
    m = None if m is None else (m if m.shape[-1] == 1 else m[..., :cols]).expand(x.shape)
    with CUDA.ran(forward=1, backward=1):
        ours = with_grads(lambda x, m: ops.softmax(x, m, 0.5, causal), dy)(x, m)
    assert_as_accurate(ours, with_grads(lambda x, m: eager.softmax(x, m, 0.5, causal), dy), x, m)


@pytest.mark.parametrize("cols", [50, 40000])
def test_softmax_of_special_values(cols: int) -> None:
    """NaN and infinities; rows of which nothing is left are zero with a mask or causal, and NaN without."""
    x = randn(6, cols, grad=False)
    x[0, 3], x[1], x[2, 7], x[3, : cols // 2], x[4] = math.nan, -math.inf, math.inf, -math.inf, torch.finfo(F32).min
    keep = randn(6, cols, grad=False) > 0
    keep[5] = False
    for mask, causal in ((None, False), (keep, False), (None, True), (keep, True), (torch.zeros_like(x), False)):
        for log in (False, True):
            with CUDA.ran(forward=1):
                ours = ops.softmax(x, mask, 1.0, causal, log)
            torch.testing.assert_close(ours, eager.softmax(x, mask, 1.0, causal, log), equal_nan=True)


def test_softmax_rows_do_not_depend_on_each_other() -> None:
    """A row's bits, forward and backward, are those of the row alone, at another address, with a stride."""
    for cols in (63, 1000, 4096, 33000):
        x, dy = randn(9, cols, grad=False), randn(9, cols, grad=False)
        y = ops.softmax(x, None, 1.0, False)
        dx = ops.softmax_bwd(dy, y, 1.0)
        padded = torch.empty(9, cols + 5, device="cuda")
        padded[:, 1:-4] = x
        with CUDA.ran(forward=2):
            assert torch.equal(ops.softmax(padded[:, 1:-4], None, 1.0, False), y)
            assert torch.equal(ops.softmax(x[4:5].clone(), None, 1.0, False), y[4:5])
        with CUDA.ran(forward=0, backward=1):
            assert torch.equal(ops.softmax_bwd(dy[4:5].clone(), y[4:5].clone(), 1.0), dx[4:5])


def test_new_lengths_compile_nothing() -> None:
    """Lengths of one capacity share a kernel, and so do all sizes of a chain and of a reduction's other dimensions."""

    def calls(cols: int) -> None:
        x = randn(8, cols, dtype=BF16, grad=False)
        ops.softmax(x, None, 1.0, False)
        ops.reduce(x, [1], False, "sum_squared", None)
        fused("add", "gelu")(x, x)
        fused("add", "gelu")(x, x[0])

    calls(2056)
    before = (counters.compiled, counters.from_disk)
    for cols in (2104, 2520, 3000, 3064):
        with CUDA.ran(forward=4):
            calls(cols)
    assert (counters.compiled, counters.from_disk) == before
