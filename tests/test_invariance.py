"""The same bits: on every call, whatever else is in the batch, wherever a row lies, on any number of threads."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from support import CPU, Target, call
from torch import Tensor
from verbs import VERBS, Verb, cotangents, gradients, results, verbs_where

import kernel_fusion as kf
from kernel_fusion.backends import eager

DTYPES = [torch.float32, torch.bfloat16]


def run(verb: str, x: Tensor, weight: Tensor, bias: Tensor, dy: Tensor, target: Target) -> list[Tensor]:
    """y and all gradients."""
    tensors = [t.detach().requires_grad_() for t in (x, weight, bias)]
    y = call(verb, *tensors, backend=target.backend)
    return [y.detach(), *torch.autograd.grad(y, tensors, dy)]


def tensors(target: Target, rows: int, cols: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """x, weight, bias and dy, with a mean that makes the order of summation show."""
    shapes = ((rows, cols), (cols,), (cols,), (rows, cols))
    return [torch.randn(s, device=target.device).add_(3).to(dtype) for s in shapes]


def assert_equal(ones: list[Tensor], others: list[Tensor]) -> None:
    """Bit for bit."""
    for name, one, other in zip(("y", "dx", "dweight", "dbias"), ones, others, strict=False):
        assert torch.equal(one, other), name


# Grid rationale. Several rows per block, several blocks per sum, one long row per block: the ways in which partial
# sums come about.
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "cols"), [(1000, 64), (513, 255), (300, 1024), (7, 32768)])
def test_repeated_calls(verb: str, rows: int, cols: int, dtype: torch.dtype, target: Target) -> None:
    """Five calls give the same bits, forward and backward."""
    inputs = tensors(target, rows, cols, dtype)
    with target.ran(forward=5, backward=5):
        first = run(verb, *inputs, target)
        for _ in range(4):
            assert_equal(run(verb, *inputs, target), first)


# Grid rationale. Odd lengths, whose rows begin at every alignment; lengths at and around one vector, one warp and one
# block; one of which a CPU could keep a single row between the passes of backward, but not four (1500 of bf16); a
# length of which a GPU reads RMSNorm twice; one of which CPU threads share the columns even of a single row, in whole
# strips and a part of one; 67 rows are odd and more than a block of rows.
_LENGTHS = (1, 3, 17, 64, 255, 1000, 1023, 1024, 1500, 4097, 20001, 24576)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cols", _LENGTHS)
def test_a_row_alone_and_in_a_batch(verb: str, cols: int, dtype: torch.dtype, target: Target) -> None:
    """y and dx of a row are the same whether it comes alone or among 66 others, at every place in the batch."""
    x, weight, bias, dy = tensors(target, 67, cols, dtype)
    with target.ran(forward=1 + 67, backward=1 + 67):
        y, dx = run(verb, x, weight, bias, dy, target)[:2]
        for row in range(67):
            at = slice(row, row + 1)
            assert_equal(run(verb, x[at], weight, bias, dy[at], target)[:2], [y[at], dx[at]])


@pytest.mark.parametrize("cols", _LENGTHS)
@pytest.mark.parametrize("rows", [2, 5, 33])
def test_batches_of_any_size(verb: str, cols: int, rows: int, target: Target) -> None:
    """Cutting a batch into pieces changes no bit of y and dx."""
    x, weight, bias, dy = tensors(target, 67, cols)
    whole = run(verb, x, weight, bias, dy, target)[:2]
    with target.ran(forward=None, backward=None):
        pieces = [run(verb, a, weight, bias, b, target)[:2] for a, b in zip(x.split(rows), dy.split(rows), strict=True)]
    assert_equal([torch.cat(p) for p in zip(*pieces, strict=True)], whole)


# Grid rationale. Rows of which a CPU stores the results past its caches, from 32 MB on: that begin at every element of
# a cache line, are shorter and longer than what it puts together at once, or fill their lines.
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cols", [5, 255, 768, 1023, 5001])
def test_rows_past_the_caches(cols: int, dtype: torch.dtype) -> None:
    """y and dx are the same in a call that moves more than the caches hold and in one that does not."""
    rows = 40_000_000 // (2 * cols * dtype.itemsize)
    x, weight, bias, dy = tensors(CPU, rows, cols, dtype)
    with _threads(2):  # many threads have larger caches
        y, dx = run("layer_norm", x, weight, bias, dy, CPU)[:2]
    for first in (0, rows // 2 + 1, rows - 67):
        at = slice(first, first + 67)
        assert_equal(run("layer_norm", x[at], weight, bias, dy[at], CPU)[:2], [y[at], dx[at]])


def _in_columns(t: Tensor, offset: int, width: int) -> Tensor:
    """A copy of `t` as a slice of columns of a wider tensor."""
    wide = t.new_zeros(*t.shape[:-1], width)
    return wide[..., offset : offset + t.shape[-1]].copy_(t)


_PLACES: dict[str, Callable[[Tensor], Tensor]] = {
    "offset": lambda t: t.new_empty(t.numel() + 3)[3:].view_as(t).copy_(t),
    "qkv-slice": lambda t: _in_columns(t, t.shape[-1], 3 * t.shape[-1]),
    "odd-stride": lambda t: _in_columns(t, 1, t.shape[-1] + 3),
    "every-second-row": lambda t: t.repeat_interleave(2, 0)[::2],
    "backwards": lambda t: t.flip(0).contiguous().flip(0),
    "transposed": lambda t: t.T.contiguous().T,
    "five-dims": lambda t: t.view(2, 3, 2, 5, -1).transpose(0, 2).contiguous().transpose(0, 2),
    "six-dims": lambda t: t.view(1, 2, 3, 2, 5, -1).permute(4, 1, 3, 2, 0, 5).contiguous().permute(4, 1, 3, 2, 0, 5),
}


@pytest.mark.parametrize("place", _PLACES)
@pytest.mark.parametrize("cols", [17, 255, 1024])
@pytest.mark.parametrize("dtype", DTYPES)
def test_memory_layout(verb: str, place: str, cols: int, dtype: torch.dtype, target: Target) -> None:
    """Alignment and strides of x and dy change no bit of y or dx.

    Nor of dweight and dbias on the CPU; on a GPU, how many blocks add up the rows may depend on how these lie.
    """
    x, weight, bias, dy = tensors(target, 60, cols, dtype)
    with target.ran(forward=2, backward=2):
        plain = run(verb, x, weight, bias, dy, target)
        placed = run(verb, _PLACES[place](x), weight, bias, _PLACES[place](dy), target)
    compared = 2 if target.device == "cuda" else 4
    assert_equal([t.reshape(p.shape) for t, p in zip(placed, plain, strict=True)][:compared], plain[:compared])


def test_expanded_rows(verb: str, target: Target) -> None:
    """Rows that all lie in the same place (stride 0) give that row's bits."""
    x, weight, bias, dy = tensors(target, 1, 255)
    with target.ran(forward=2, backward=2):
        one = run(verb, x, weight, bias, dy, target)[:2]
        many = run(verb, x.expand(5, 255), weight, bias, dy.expand(5, 255), target)[:2]
    assert_equal(many, [t.expand(5, 255) for t in one])


def run_operation(operation: Verb, tensors: list[Tensor], dys: list[Tensor], target: Target) -> list[Tensor]:
    """The results and all gradients."""
    leaves = [t.detach().requires_grad_() for t in tensors]
    y = operation.on(target)(*leaves)
    return [one.detach() for one in results(y)] + gradients(y, leaves, dys)


def _with_cotangents(operation: Verb, target: Target, rows: int, cols: int, dtype: torch.dtype) -> list[list[Tensor]]:
    """Arguments whose mean makes the order of summation show, and cotangents."""
    tensors = [(t.detach() + 0.5).to(dtype) for t in operation.leaves(target, rows, cols)]
    return [tensors, cotangents(operation.on(target)(*tensors))]


# Grid rationale. As above; the row lengths are those of one chunk and of several.
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "cols"), [(513, 255), (40, 4097)])
def test_repeated_calls_of_every_verb(
    operation: Verb, rows: int, cols: int, dtype: torch.dtype, target: Target
) -> None:
    """Three calls give the same bits, forward and backward."""
    with operation.ran(target, 4, 3):
        inputs = _with_cotangents(operation, target, rows, cols, dtype)
        first = run_operation(operation, *inputs, target)
        for _ in range(2):
            again = run_operation(operation, *inputs, target)
            assert all(torch.equal(a, b) for a, b in zip(again, first, strict=True))


_ROW_WISE = [operation for operation in VERBS.values() if operation.row_wise]


@pytest.mark.parametrize("operation", _ROW_WISE, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cols", [1, 17, 255, 1000, 1024, 4097])
def test_a_row_of_every_verb_alone_and_in_a_batch(
    operation: Verb, cols: int, dtype: torch.dtype, target: Target
) -> None:
    """Results and input gradients of a row are the same whether it comes alone or among 66 others."""
    with operation.ran(target, None, None):
        tensors, dys = _with_cotangents(operation, target, 67, cols, dtype)
        batch = [t.shape[:1] == (67,) and t.dim() == 2 for t in tensors]
        count = len(dys) + sum(batch)
        whole = run_operation(operation, tensors, dys, target)[:count]
        for row in (0, 1, 33, 66):
            at = slice(row, row + 1)
            one = [t[at] if rows else t for t, rows in zip(tensors, batch, strict=True)]
            alone = run_operation(operation, one, [dy[at] for dy in dys], target)[:count]
            assert all(torch.equal(a, b[at]) for a, b in zip(alone, whole, strict=True))


@contextmanager
def _fresh_memory_is_nan() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.empty(8).isnan().all()
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def test_fresh_memory_of_every_verb(operation: Verb, target: Target) -> None:
    """The old contents of the memory of results and intermediate tensors change no bit."""
    with operation.ran(target, 3, 2):
        inputs = _with_cotangents(operation, target, 9, 4097, torch.float32)
        expected = run_operation(operation, *inputs, target)
        with _fresh_memory_is_nan():
            again = run_operation(operation, *inputs, target)
    assert all(torch.equal(a, b) for a, b in zip(again, expected, strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cols", [1, 255, 1024, 4097, 32768])
def test_fresh_memory(verb: str, cols: int, dtype: torch.dtype, target: Target) -> None:
    """The old contents of the memory of results and partial sums change no bit."""
    inputs = tensors(target, 9, cols, dtype)
    with target.ran(forward=2, backward=2):
        expected = run(verb, *inputs, target)
        with _fresh_memory_is_nan():
            assert_equal(run(verb, *inputs, target), expected)


@pytest.mark.parametrize("wants", [(True, False, False), (True, True, False), (True, False, True)], ids=str)
@pytest.mark.parametrize("cols", [255, 4096, 32768])
def test_dx_does_not_depend_on_the_other_gradients(
    verb: str, cols: int, wants: tuple[bool, ...], target: Target
) -> None:
    """Freezing weight or bias changes no bit of dx."""
    inputs = tensors(target, 5, cols)
    with target.ran(forward=2, backward=2):
        dx = run(verb, *inputs, target)[1]
        leaves = [t.detach().requires_grad_(want) for t, want in zip(inputs, wants, strict=False)]
        call(verb, *leaves, backend=target.backend).backward(inputs[3])
    assert torch.equal(leaves[0].grad, dx)


@contextmanager
def _threads(count: int) -> Iterator[None]:
    previous = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(previous)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("rows", "cols"), [(1, 4096), (7, 1000), (1000, 255), (513, 1024), (4096, 17), (3, 20001), (50, 16500), (12, 9000)]
)
def test_number_of_threads(verb: str, rows: int, cols: int, dtype: torch.dtype) -> None:
    """On the CPU one, two and three threads give the same bits, sums over rows included."""
    inputs = tensors(CPU, rows, cols, dtype)
    results = []
    with CPU.ran(forward=3, backward=3):
        for count in (1, 2, 3):
            with _threads(count):
                results.append(run(verb, *inputs, CPU))
    assert_equal(results[1], results[0])
    assert_equal(results[2], results[0])


# Grid rationale. Everything that stretches of few long rows, which two threads share and one does not, can meet: spread
# rows, each parameter or none, an offset, mixed dtypes, and results past the caches, whose lines begin and end in other
# stretches.
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("parameters", ["both", "weight", "bias", "none"])
def test_stretches_of_few_long_rows(dtype: torch.dtype, parameters: str) -> None:
    """On the CPU one thread and two give the same bits of strided rows, with an offset and parameters of fp32."""
    x = torch.randn(3, 30011)[:, 5:30006].to(dtype)
    weight, bias = (torch.randn(30001, dtype=torch.promote_types(dtype, torch.float32)) for _ in range(2))
    weight = weight if parameters in ("both", "weight") else None
    bias = bias if parameters in ("both", "bias") else None
    offset = 0.0 if weight is None else 1.0
    ys = []
    for count in (1, 2):
        with _threads(count), CPU.ran(forward=1):
            ys.append(kf.layer_norm(x, 30001, weight, bias, weight_offset=offset))
    assert torch.equal(ys[0], ys[1])


# Grid rationale. Sixteen threads keep in the caches what one and two write past them, but not of the last, 72 MB.
@pytest.mark.parametrize(("rows", "cols"), [(3, 1_500_001), (4500, 1001), (3, 3_000_001)])
def test_number_of_threads_past_the_caches(rows: int, cols: int) -> None:
    """On the CPU one, two and sixteen threads give the same bits of rows that begin anywhere in a cache line."""
    x = torch.randn(rows, cols)
    ys = []
    for count in (1, 2, 16):
        with _threads(count), CPU.ran(forward=1):
            ys.append(kf.rms_norm(x, cols))
    assert torch.equal(ys[1], ys[0])
    assert torch.equal(ys[2], ys[0])


def test_number_of_threads_past_the_caches_of_other_verbs() -> None:
    """The same of pointwise chains and of softmax, whose backward stores past the caches as well."""
    x, dy = torch.randn(2, 1500, 3000)
    x.requires_grad_()
    bias = torch.randn(3000, requires_grad=True)
    results = []
    for count in (1, 16):
        with _threads(count), CPU.ran(forward=2, backward=2):
            activated, weights = kf.bias_act(x, bias, "relu"), kf.softmax(x)
            grads = torch.autograd.grad(activated, (x, bias), dy), torch.autograd.grad(weights, x, dy)
            results.append([activated, weights, *grads[0], *grads[1]])
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


# A matrix product is the vendor library's, and its sums depend on the threads.
@verbs_where(lambda verb: verb.exact)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "cols"), [(1, 70001), (7, 1000), (1000, 255), (4096, 17)])
def test_number_of_threads_of_every_verb(operation: Verb, rows: int, cols: int, dtype: torch.dtype) -> None:
    """On the CPU one, two and three threads give the same bits, whatever the verb."""
    outcomes = []
    with operation.ran(CPU, 4, 3):
        inputs = _with_cotangents(operation, CPU, rows, cols, dtype)
        for count in (1, 2, 3):
            with _threads(count):
                outcomes.append(run_operation(operation, *inputs, CPU))
    for other in outcomes[1:]:
        assert all(torch.equal(a, b) for a, b in zip(other, outcomes[0], strict=True))


# Grid rationale. The special values lie in different pieces of a row, so that each is joined to pieces without any.
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mask", [None, "boolean", "additive", "causal"])
@pytest.mark.parametrize("log", [False, True])
def test_pieces_of_few_long_rows_of_softmax(dtype: torch.dtype, mask: str | None, log: bool) -> None:
    """On the CPU one thread and two give the same bits, and the definition's values, around -inf, inf and NaN."""
    x = (3 * torch.randn(6, 30016)).to(dtype)
    x[0, :9000] = x[1, 9000:] = -math.inf
    x[2, 20000], x[3, 5] = math.inf, math.nan
    x[4, 20000:] -= 200
    function = kf.log_softmax if log else kf.softmax
    keep = torch.rand(6, 30016) < 0.7
    keep[1, :9000] = False
    masks = {"boolean": keep, "additive": torch.zeros(6, 30016, dtype=dtype).masked_fill(~keep, -math.inf)}
    for rows in (slice(3), slice(3, 6)):
        chosen, causal = masks.get(mask), mask == "causal"
        chosen = None if chosen is None else chosen[rows]
        ys = []
        for count in (1, 2):
            with _threads(count), CPU.ran(forward=1):
                ys.append(function(x[rows], mask=chosen, causal=causal))
        assert torch.equal(ys[0].nan_to_num(2.0), ys[1].nan_to_num(2.0))
        expected = eager.softmax(x[rows].double(), chosen if mask != "additive" else chosen.double(), 1.0, causal, log)
        bounds = {"rtol": max(torch.finfo(dtype).eps, 4e-6), "atol": torch.finfo(dtype).smallest_normal}
        torch.testing.assert_close(ys[0].double(), expected, **bounds, equal_nan=True)
