"""torch.compile where sizes are symbols: rows that follow from data, dynamic batch and tokens, an empty batch.

Each rule runs over the table of verbs, forward and backward, and compares with the eager call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from support import Target
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from verbs import VERBS, Verb, cotangents, gradients, results

import kernel_fusion as kf
from kernel_fusion.backends import availability

_COLS = 64


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    """No graph of another test is reused; `x[mask]` is part of a graph."""
    torch._dynamo.reset()
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        yield


def _tokens(rows: int, cols: int) -> tuple[int, ...]:
    return rows, 3, cols


def _sample(rows: int, cols: int) -> tuple[int, ...]:
    return rows, 1, cols


def _matrix(rows: int, cols: int) -> tuple[int, ...]:
    return rows, cols


def _row(rows: int, cols: int) -> tuple[int, ...]:
    return (cols,)


def _modulated(verb: str, name: str, varies: Callable[[int, int], tuple[int, ...]], *affine: str) -> Verb:
    """A modulated norm of (B, L, N), whose vectors have the shape of `varies`, perhaps with a weight of its own."""

    def ours(x: Tensor, *vectors: Tensor, backend: str | None = None) -> Any:
        if not verb.startswith("add_"):
            return getattr(kf, verb)(x, x.shape[-1:], *vectors, eps=1e-5, backend=backend)
        scale, shift, gate = vectors
        return getattr(kf, verb)(x, x.cos(), x.shape[-1:], scale, shift, eps=1e-5, gate=gate, backend=backend)

    names = ("scale", "shift", *(["gate"] if verb.startswith("add_") else []))
    arguments = {"x": _tokens} | dict.fromkeys(names, varies) | dict.fromkeys(affine, _row)
    return Verb(f"{verb}-{name}", arguments, ours, ours)


def _quantised(verb: str, per: str | int, keeps: bool, **arguments: Callable[[int, int], tuple[int, ...]]) -> Verb:
    """A quantised result, and what it was made of if that is kept."""

    def ours(x: Tensor, *others: Tensor, backend: str | None = None) -> list[Tensor]:
        how: dict[str, Any] = {"out_dtype": kf.Quantize(torch.int8, per=per, unquantized=keeps), "backend": backend}
        if verb == "gated_act":
            result = kf.gated_act(x, *others, "silu", **how)
        elif verb == "gated_rms_norm":
            result = kf.gated_rms_norm(x, others[0], x.shape[-1:], *others[1:], group_size=_COLS // 2, **how)
        else:
            result = getattr(kf, verb)(x, x.shape[-1:], *others, **how)
        return [t for t in result if t is not None]

    return Verb(f"{verb}-{per}-{keeps}", {"x": _matrix} | arguments, ours, ours)


def _turned_by_positions(x: Tensor, backend: str | None = None) -> Tensor:
    angles = torch.arange(9, device=x.device)[:, None] * torch.ones(x.shape[-1] // 2, device=x.device)
    positions = torch.arange(x.shape[1], dtype=torch.int32, device=x.device)
    return kf.rope(x, angles.cos(), angles.sin(), positions=positions, unsqueeze_dim=2, backend=backend)


MORE = (
    _modulated("modulated_layer_norm", "sample", _sample),
    _modulated("modulated_rms_norm", "sample-weight", _sample, "weight"),
    _modulated("modulated_rms_norm", "token", _tokens),
    _modulated("add_modulated_layer_norm", "token", _tokens),
    _modulated("add_modulated_rms_norm", "sample", _sample),
    _quantised("rms_norm", "row", False, weight=_row),
    _quantised("layer_norm", 128, True, weight=_row),
    _quantised("modulated_rms_norm", "row", False, scale=_matrix),
    _quantised("gated_rms_norm", 128, False, gate=_matrix, weight=_row),
    _quantised("gated_act", "row", True, value=_matrix),
    Verb(
        "rope-positions", {"x": lambda rows, cols: (rows, 5, 2, 2 * cols)}, _turned_by_positions, _turned_by_positions
    ),
)
# Grid rationale. Each way to decide on a size: groups of rows and of columns, heads, quantising, and none. The rest is
# slow.
_QUICK = ("add_rms_norm", "gated_rms_norm-grouped", "rope", "qk_norm_rope", "modulated_rms_norm-sample-weight")
_QUICK += ("add_modulated_layer_norm-token", "rms_norm-row-False", "gated_rms_norm-128-False")


def _functions(*quick: str) -> pytest.MarkDecorator:
    """Each function; the named ones are in the quick set."""
    every = (*VERBS.values(), *MORE)
    marked = [pytest.param(verb, marks=() if verb.name in quick else pytest.mark.slow) for verb in every]
    return pytest.mark.parametrize("function", marked, ids=str)


def _compare(call: Callable[..., Any], expected: Callable[..., Any], tensors: list[Tensor], target: Target) -> None:
    """Equal results and gradients; then, without gradients, the results of other operators."""
    ours, theirs = results(call(*tensors)), results(expected(*tensors))
    pairs = list(zip(ours, theirs, strict=True))
    dys = cotangents([y.detach() if y.is_floating_point() else y.float() for y in theirs])
    if any(y.requires_grad for y in theirs):
        pairs += zip(gradients(ours, tensors, dys), gradients(theirs, tensors, dys), strict=True)
    plain = [t.detach() for t in tensors]
    pairs += zip(results(call(*plain)), results(expected(*plain)), strict=True)
    for one, other in pairs:
        torch.testing.assert_close(one, other, equal_nan=True)  # the mean of nothing


@_functions(*_QUICK)
def test_rows_that_follow_from_data(function: Verb, target: Target) -> None:
    """One full graph serves `x[mask]`, however many rows the mask leaves: none of them, one, several."""
    of_rows = [shape(4, _COLS) != shape(5, _COLS) for shape in function.arguments.values()]
    on_target = function.on(target)

    def call(mask: Tensor, *tensors: Tensor) -> list[Tensor]:
        return results(on_target(*(t[mask] if rows else t for t, rows in zip(tensors, of_rows, strict=True))))

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    for kept in ([1, 0, 1, 1, 0, 1], [0] * 6, [0, 0, 1, 0, 0, 0]):
        mask = torch.tensor(kept, dtype=torch.bool, device=target.device)
        tensors = function.leaves(target, len(kept), _COLS)
        _compare(lambda *t, m=mask: compiled(m, *t), lambda *t, m=mask: call(m, *t), tensors, target)


@_functions("rope", "rms_norm-row-False")
def test_dynamic_and_empty_batch(function: Verb, target: Target) -> None:
    """One graph serves several numbers of rows, and an empty batch, which PyTorch compiles for itself, is right."""
    counter = CompileCounterWithBackend("aot_eager")

    def call(*tensors: Tensor) -> list[Tensor]:
        return results(function.on(target)(*tensors))

    compiled = torch.compile(call, fullgraph=True, dynamic=True, backend=counter)
    for rows in (4, 7, 33, 0):
        _compare(compiled, call, function.leaves(target, rows, _COLS), target)
        if rows == 4:
            graphs = len(counter.graphs)
        assert rows == 0 or len(counter.graphs) == graphs


@pytest.mark.parametrize("verb", ["modulated_layer_norm", "add_modulated_rms_norm"])
@pytest.mark.parametrize("tokens", [False, True])
def test_dynamic_batch_and_tokens(verb: str, tokens: bool, target: Target) -> None:
    """The second batch and sequence length make sizes symbols, and the graph then serves all others."""
    counter = CompileCounterWithBackend("aot_eager")

    def call(x: Tensor, scale: Tensor, shift: Tensor) -> list[Tensor]:
        rows = [x, x.cos()] if verb.startswith("add_") else [x]
        return results(getattr(kf, verb)(*rows, x.shape[-1:], scale, shift, backend=target.backend))

    compiled = torch.compile(call, fullgraph=True, backend=counter)
    for index, (batch, length) in enumerate([(2, 3), (5, 7), (4, 9), (3, 2)]):
        shape = batch, length if tokens else 1, _COLS
        sizes = (batch, length, _COLS), shape, shape
        tensors = [torch.randn(s, device=target.device, requires_grad=True) for s in sizes]
        _compare(compiled, call, tensors, target)
        if index == 1:
            graphs = len(counter.graphs)
        assert index < 2 or len(counter.graphs) == graphs


@pytest.mark.parametrize("name", ["rope", "qk_norm_rope"])
def test_empty_batch_differentiated_twice(name: str, any_target: Target) -> None:
    """Second derivatives of an empty batch are empty; a compiled call's are those of the eager one."""
    function = VERBS[name]
    for call in (function.on(any_target), torch.compile(function.on(any_target), backend="eager", dynamic=True)):
        tensors = function.leaves(any_target, 0, 8)
        outputs = results(call(*tensors))
        dys = [torch.randn_like(y, requires_grad=True) for y in outputs]
        first = torch.autograd.grad(outputs, tensors, dys, create_graph=True)
        second = torch.autograd.grad(first, dys, [torch.ones_like(g) for g in first])
        assert [g.shape for g in second] == [dy.shape for dy in dys]


def test_a_tracer_asks_for_triton_outside_the_graph() -> None:
    """Whether Triton can run is an answer, not a part of the graph: spread norms ask for it at each call."""

    @torch.compile(fullgraph=True, backend="eager")
    def function(x: Tensor) -> Tensor:
        return x + 1 if availability.why_not_triton(x.device) is None else x - 1

    x = torch.zeros(1)
    assert function(x).item() == (1 if availability.why_not_triton(x.device) is None else -1)
