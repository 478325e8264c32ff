"""The CPU kernels of pointwise chains, reductions and softmax: values, slopes, layouts, threads, instruction sets."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from support import CPU, assert_as_accurate
from torch import Tensor

from kernel_fusion.backends import eager
from kernel_fusion.testing import unfused

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
pointwise, reduce, softmax = (getattr(torch.ops.kernel_fusion, name) for name in ("pointwise", "reduce", "softmax"))


def gradients(y: Tensor, inputs: list[Tensor], dy: Tensor) -> list[Tensor]:
    """The gradients that `dy` gives."""
    return list(torch.autograd.grad(y, inputs, dy))


def assert_matches(
    call: Callable[..., Tensor], definition: Callable[..., Tensor], *inputs: Tensor, forward: int | None = 1
) -> None:
    """One forward and one backward kernel, within the budget beside `definition`, which PyTorch runs."""
    leaves = [t.detach().requires_grad_() if t.is_floating_point() else t for t in inputs]
    wanted = [t for t in leaves if t.requires_grad]
    with CPU.ran(forward=forward, backward=1):
        y = call(*leaves)
        dy = torch.randn_like(y)
        ours = [y, *gradients(y, wanted, dy)]

    def theirs(d: Tensor, *arguments: Tensor) -> list[Tensor]:
        tensors = [t.detach().requires_grad_() if t.is_floating_point() else t for t in arguments]
        result = definition(*tensors)
        return [result, *gradients(result, [t for t in tensors if t.requires_grad], d.to(result.dtype))]

    if dy.dtype == torch.float64:  # nothing more accurate is at hand: both are off by a few roundings
        few = 32 * torch.finfo(torch.float64).eps
        torch.testing.assert_close(ours, theirs(dy, *leaves), rtol=few, atol=few)
    else:
        assert_as_accurate(ours, theirs, dy, *leaves)


# ---- Broadcasting and layouts


_SHAPES = [
    ((33, 70), (33, 70)),
    ((33, 70), (70,)),
    ((70,), (33, 70)),
    ((33, 70), (33, 1)),
    ((33, 1), (1, 70)),
    ((4, 5, 6, 7), (5, 1, 7)),
    ((4, 5, 6), (5, 6)),
    ((33, 70), ()),
    ((), ()),
    ((1, 70), (70,)),
    ((300, 1100), (1100,)),
    ((5, 3000), (5, 3000)),
    ((2000, 3), (3,)),
]


@pytest.mark.parametrize("combine", ["add", "mul", "gate"])
@pytest.mark.parametrize(("a_shape", "b_shape"), _SHAPES)
def test_broadcasting(a_shape: tuple[int, ...], b_shape: tuple[int, ...], combine: str) -> None:
    """Every pattern of broadcasting, forward and backward; shapes and strides are PyTorch's."""
    a, b = torch.randn(a_shape), torch.randn(b_shape)
    assert_matches(
        lambda a, b: pointwise(a, b, combine, "silu", 1.5, 0.0, None),
        lambda a, b: eager.pointwise(a, b, combine, "silu", 1.5, 0.0, None),
        a,
        b,
        forward=None,  # a sum over what was broadcast counts as one
    )
    assert pointwise(a, b, combine, "silu", 1.5, 0.0, None).stride() == (a + b).stride()


_LAYOUTS: dict[str, Callable[[], tuple[Tensor, Tensor]]] = {
    "channels_last": lambda: (
        torch.randn(2, 5, 6, 7).to(memory_format=torch.channels_last),
        torch.randn(5, 1, 1),
    ),
    "transposed": lambda: (torch.randn(40, 50).t(), torch.randn(50, 40)),
    "both transposed": lambda: (torch.randn(40, 50).t(), torch.randn(40, 50).t()),
    "halves": lambda: torch.randn(20, 200).chunk(2, -1),  # type: ignore[dict-item,return-value]
    "expanded": lambda: (torch.randn(1, 50).expand(40, 50), torch.randn(40, 1).expand(40, 50)),
    "every third": lambda: (torch.randn(30, 99)[:, ::3], torch.randn(90, 33)[::3]),
    "unaligned": lambda: (torch.randn(1001)[1:], torch.randn(1003)[3:]),
    "permuted": lambda: (torch.randn(6, 7, 8).permute(1, 2, 0), torch.randn(7, 8, 6)),
}


@pytest.mark.parametrize("dtypes", [(torch.float32,) * 2, (torch.bfloat16, torch.float32), (torch.float64,) * 2])
@pytest.mark.parametrize("layout", _LAYOUTS)
@pytest.mark.parametrize("combine", ["add", "mul", "gate"])
def test_layouts(layout: str, combine: str, dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    """Any strides are read where they lie, and the result has the strides of PyTorch's."""
    a, b = (t.to(d) for t, d in zip(_LAYOUTS[layout](), dtypes, strict=True))
    assert_matches(
        lambda a, b: pointwise(a, b, combine, "tanh", 1.0, 0.0, None),
        lambda a, b: eager.pointwise(a, b, combine, "tanh", 1.0, 0.0, None),
        a,
        b,
        forward=None,
    )
    y = pointwise(a, b, combine, "tanh", 1.0, 0.0, None)
    assert (y.dtype, y.stride()) == ((a + b).dtype, (a + b).stride())


def test_gradient_of_no_rows() -> None:
    """Without elements there are no kernels, and the gradient of a bias is zero."""
    a, b = torch.randn(0, 5, requires_grad=True), torch.randn(5, requires_grad=True)
    with CPU.ran(forward=0, backward=0):
        y = pointwise(a, b, "add", "relu", 1.0, 0.0, None)
        da, db = gradients(y, [a, b], torch.empty(0, 5))
    assert da.shape == (0, 5)
    assert torch.equal(db, torch.zeros(5))


def test_promotion_with_scalars() -> None:
    """A float64 tensor without dimensions does not widen the result, as in PyTorch, and gets its own gradient."""
    a, b = torch.randn(10, requires_grad=True), torch.tensor(0.5, dtype=torch.float64, requires_grad=True)
    with CPU.ran(forward=2, backward=1):
        y = pointwise(a, b, "mul", "sigmoid", 1.0, 0.0, None)
        da, db = gradients(y, [a, b], torch.ones(10))
    assert (y.dtype, da.dtype, db.dtype) == (torch.float32, torch.float32, torch.float64)
    torch.testing.assert_close(y, torch.sigmoid(a * b))


# ---- Dropout


@pytest.mark.parametrize("p", [0.1, 0.5, 1.0, 1e-6])
@pytest.mark.parametrize("layout", list(_LAYOUTS))
def test_dropout_is_that_of_the_definition(layout: str, p: float) -> None:
    """The same seed drops the same elements as the definition, forward and backward, in every layout."""
    tensors = _LAYOUTS[layout]()
    inputs = [[t.detach().requires_grad_() for t in tensors] for _ in range(2)]
    seed = torch.tensor([-(2**62) + 12345])
    results = []
    for (a, b), call in zip(inputs, (pointwise, eager.pointwise), strict=True):
        y = call(a, b, "add", "silu", 1.0, p, seed)
        dy = torch.linspace(1, 2, y.numel()).view(y.shape)
        results.append([y, *gradients(y, [a, b], dy)])
    for ours, theirs in zip(*results, strict=True):
        assert torch.equal(ours == 0, theirs == 0)
        torch.testing.assert_close(ours, theirs)


def test_dropout_of_a_bias() -> None:
    """The pass that sums columns drops what forward dropped."""
    a, b, seed = torch.randn(100, 1500, requires_grad=True), torch.randn(1500, requires_grad=True), torch.tensor([7])
    with CPU.ran(forward=1, backward=1):
        y = pointwise(a, b, "add", "sigmoid", 1.0, 0.25, seed)
        da, db = gradients(y, [a, b], torch.ones(100, 1500))
    assert torch.equal(da == 0, y == 0)
    torch.testing.assert_close(db, da.sum(0), rtol=1e-5, atol=1e-4)


# ---- Reductions


_KINDS = ("sum_squared", "mean_abs")


@pytest.mark.parametrize("kind", _KINDS)
@pytest.mark.parametrize("dim", [[0], [1], [2], [0, 1], [1, 2], [0, 2], []])
@pytest.mark.parametrize(
    "x",
    [
        pytest.param(lambda: torch.randn(12, 10, 14).permute(2, 0, 1), id="permuted"),
        pytest.param(lambda: torch.randn(12, 20, 14)[::2, ::4], id="steps"),
        pytest.param(lambda: torch.randn(12, 10, 28)[..., ::2], id="every second"),
        pytest.param(lambda: torch.randn(12, 1, 14).expand(12, 10, 14), id="expanded"),
    ],
)
def test_reductions_of_any_strides(x: Callable[[], Tensor], dim: list[int], kind: str) -> None:
    """Strides change neither the result nor its layout."""
    tensor = x()
    with CPU.ran(forward=None):
        y = reduce(tensor, dim, False, kind, None)
    assert y.is_contiguous()
    torch.testing.assert_close(y, unfused.reduce(kind, tensor.contiguous(), dim))


def test_reductions_of_nothing() -> None:
    """An empty sum is 0 and an empty mean NaN, as in PyTorch; the errors are PyTorch's."""
    x = torch.empty(3, 0, requires_grad=True)
    assert torch.equal(reduce(x, [1], False, "sum_squared", None), torch.zeros(3))
    assert reduce(x, [1], True, "mean_abs", torch.bfloat16).isnan().all()
    assert reduce(x, [0], False, "mean_abs", None).shape == (0,)
    assert reduce(x, [1], False, "sum_squared", None).sum().backward() is None
    with pytest.raises(RuntimeError, match="dim 1 appears multiple times in the list of dims"):
        reduce(torch.ones(2, 2), [1, -1], False, "sum_squared", None)
    with pytest.raises(IndexError, match="Dimension out of range"):
        reduce(torch.ones(2, 2), [2], False, "sum_squared", None)


def test_reduction_to_a_wider_dtype() -> None:
    """The result has `dtype`, and the gradient the dtype of x."""
    x = torch.full((300,), 200.0, dtype=torch.float16, requires_grad=True)
    with CPU.ran(forward=1, backward=1):
        y = reduce(x, [], False, "sum_squared", torch.float32)
        (dx,) = gradients(y, [x], torch.tensor(0.5))
    assert y.item() == 300 * 200.0**2
    assert torch.equal(dx, x.detach())


def test_sums_stay_accurate() -> None:
    """Long sums of equal terms, whose roundings all go one way, in rows and in columns."""
    for shape in ((2**22,), (2**21, 2), (20000, 1024)):
        x = torch.full(shape, 0.1)
        assert_as_accurate(reduce(x, [0], False, "sum_squared", None), lambda t: t.square().sum(0), x)


# ---- Softmax


_MASKS: dict[str, Callable[[], Tensor | None]] = {
    "none": lambda: None,
    "bool": lambda: torch.rand(2, 3, 50, 70) > 0.3,
    "row": lambda: (torch.rand(70) > 0.3).expand(2, 3, 50, 70),
    "additive": lambda: torch.randn(2, 1, 50, 70),
    "columns": lambda: torch.randn(50, 1),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("mask", _MASKS)
def test_softmax(mask: str, causal: bool, dtype: torch.dtype) -> None:
    """Masks of every kind, forward and backward, with the gradient of an additive one."""
    given = _MASKS[mask]()
    inputs = [torch.randn(2, 3, 50, 70).to(dtype)]
    if given is not None:
        inputs.append(given if given.dtype == torch.bool else given.to(dtype))

    def definition(x: Tensor, m: Tensor | None = None) -> Tensor:
        logits = x * 0.7
        if m is not None:
            logits = logits + m if m.is_floating_point() else logits.masked_fill(~m, -math.inf)
        if causal:
            logits = logits.masked_fill(eager.causal_mask(x).logical_not(), -math.inf)
        return torch.softmax(logits, -1)

    # Rows of which nothing is left are another test.
    if given is not None and given.dtype == torch.bool:
        inputs[1] = given.clone().index_fill_(-1, torch.tensor([0]), True)
    assert_matches(lambda x, m=None: softmax(x, m, 0.7, causal), definition, *inputs)


@pytest.mark.parametrize("cols", [1, 7, 513, 1024, 5000])
def test_softmax_of_any_length(cols: int) -> None:
    """Rows shorter and longer than a chunk, and rows of a wider tensor."""
    assert_matches(lambda x: softmax(x, None, 1.0, False), lambda x: torch.softmax(x, -1), torch.randn(9, cols))
    x = torch.randn(9, cols + 3)[:, :cols]
    torch.testing.assert_close(softmax(x, None, 1.0, False), torch.softmax(x, -1))


def test_softmax_of_nothing_left() -> None:
    """A row that is masked as a whole gives zeros and zero gradients; NaN and infinities come out as in PyTorch."""
    x = torch.randn(4, 30, requires_grad=True)
    keep = torch.ones(4, 30, dtype=torch.bool)
    keep[1] = False
    y = softmax(x, keep, 1.0, False)
    (dx,) = gradients(y, [x], torch.randn(4, 30))
    assert torch.equal(y[1], torch.zeros(30))
    assert torch.equal(dx[1], torch.zeros(30))
    odd = torch.randn(4, 30)
    odd[0, 3], odd[1, 4], odd[2, 5], odd[3] = math.nan, math.inf, -math.inf, -math.inf
    torch.testing.assert_close(softmax(odd, None, 1.0, False), torch.softmax(odd, -1), equal_nan=True)


# ---- Derivatives of every order


def _double(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, requires_grad=True)


_DIFFERENTIABLE: dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...]]] = {
    "first": (lambda a: pointwise(a, None, "first", "gelu", 1.0, 0.0, None), (_double(3, 4),)),
    "add": (lambda a, b: pointwise(a, b, "add", "tanh", 0.5, 0.0, None), (_double(3, 4), _double(4))),
    "mul": (lambda a, b: pointwise(a, b, "mul", "silu", 1.0, 0.0, None), (_double(4), _double(3, 4))),
    "gate": (lambda a, b: pointwise(a, b, "gate", "mish", 1.0, 0.0, None), (_double(3, 1), _double(3, 4))),
    "dropout": (
        lambda a, b: pointwise(a, b, "add", "silu", 1.0, 0.3, torch.tensor([5])),
        (_double(3, 4), _double(4)),
    ),
    "sum_squared": (lambda x: reduce(x, [0], False, "sum_squared", None), (_double(3, 4),)),
    "mean_abs": (lambda x: reduce(x, [], False, "mean_abs", None), (_double(3, 4),)),
    "softmax": (lambda x: softmax(x, None, 0.7, False), (_double(3, 4),)),
    "masked softmax": (lambda x, m: softmax(x, m, 0.7, True), (_double(2, 4, 4), _double(4, 4))),
}


@pytest.mark.parametrize("name", _DIFFERENTIABLE)
def test_first_and_second_derivatives(name: str) -> None:
    """gradcheck and gradgradcheck, in float64."""
    call, inputs = _DIFFERENTIABLE[name]
    assert torch.autograd.gradcheck(call, inputs)
    assert torch.autograd.gradgradcheck(call, inputs)


def test_gradients_only_where_needed() -> None:
    """Each subset of gradients is one kernel and the same numbers."""
    a, b, dy = torch.randn(20, 300), torch.randn(300), torch.randn(20, 300)
    both = [t.clone().requires_grad_() for t in (a, b)]
    da, db = gradients(pointwise(*both, "mul", "silu", 1.0, 0.0, None), both, dy)
    for wants in ((True, False), (False, True)):
        leaves = [t.clone().requires_grad_(w) for t, w in zip((a, b), wants, strict=True)]
        with CPU.ran(forward=1, backward=1):
            y = pointwise(*leaves, "mul", "silu", 1.0, 0.0, None)
            (gradient,) = gradients(y, [t for t in leaves if t.requires_grad], dy)
        assert torch.equal(gradient, da if wants[0] else db)


# ---- Threads


def _everything() -> list[Tensor]:
    """Results of every kernel, each large enough for several threads."""
    a, b = torch.randn(700, 1025, requires_grad=True), torch.randn(1025, requires_grad=True)
    y = pointwise(a, b, "add", "gelu", 1.0, 0.25, torch.tensor([3]))
    weights = softmax(a, None, 1.0, True)
    results = [y, *gradients(y, [a, b], torch.ones_like(y)), weights, *gradients(weights, [a], a.detach())]
    gate = pointwise(a.detach()[:, 1:], a.detach()[:, :-1], "gate", "silu", 1.0, 0.0, None)
    sums = [reduce(a.detach(), dim, False, "sum_squared", None) for dim in ([0], [1], [])]
    return [t.detach() for t in (*results, gate, *sums)]


def test_the_number_of_threads_changes_nothing() -> None:
    """The same bits on one, two and three threads."""
    before, reference = torch.get_num_threads(), None
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            torch.manual_seed(1)
            results = _everything()
            reference = reference or results
            for one, other in zip(results, reference, strict=True):
                assert torch.equal(one, other)
    finally:
        torch.set_num_threads(before)
