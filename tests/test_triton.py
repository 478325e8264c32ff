"""The Triton backend: results, launches, dropout, autograd and the ways to reach it.

On a machine without a GPU the kernels run in Triton's interpreter (conftest.py), so shapes are small. That they compile
for GPUs is the subject of test_triton_offline.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from covering import covering, factors
from support import TRITON, check, python
from torch import Tensor
from verbs import VERBS, Verb, cotangents, gradients, results, verbs_where

import kernel_fusion as kf
from kernel_fusion.backends import availability
from kernel_fusion.backends.eager.dropout import random_bits, threshold
from kernel_fusion.backends.triton import plan
from kernel_fusion.core import checks
from kernel_fusion.errors import BackendUnavailableError
from kernel_fusion.operators import dispatch
from kernel_fusion.testing import cases
from kernel_fusion.testing.oracle import (
    Case,
    PointwiseCase,
    ReduceCase,
    RowNormCase,
    SoftmaxCase,
    StagedNormCase,
    Tensors,
)
from kernel_fusion.testing.rotary import RotaryCase
from kernel_fusion.testing.row_norms import GatedNormCase, ModulatedNormCase

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
DEVICE = TRITON.device
# On a GPU these are tests of its kernels; without one, of the interpreter's.
pytestmark = [pytest.mark.cuda] if DEVICE == "cuda" else []


def _first(result: Any) -> Tensor:
    return result if isinstance(result, Tensor) else result[0]


class SteppedNormCase(RowNormCase):
    """Rows whose first half lies far off the second: what is known of the mean after one block is far from it."""

    def make_inputs(self, device: torch.device | str, seed: int = 0) -> Tensors:
        """x with a step of a thousand standard deviations."""
        inputs = super().make_inputs(device, seed)
        with torch.no_grad():
            inputs.x[..., : self.shape[-1] // 2] += 1e3 * self.std
        return inputs


# Grid rationale. The quick list of `verify` has every verb, activation and dtype, at lengths with and without a tail;
# the rest are ways of this backend alone: rows in pieces, with and without a tail, with a mean far from zero and with
# stages; rows that are looped over in one direction alone and in both, in each family, with a gate; up to three strides
# of rows, and more; columns of bias summed in tiles; sections of reductions.
def _own_cases() -> Iterator[Case]:
    stages = {"pre_activation": "gelu", "activation": "silu", "dropout_p": 0.125}
    yield RowNormCase("layer_norm", (5, 1500), F32, weight=F32, bias=F32)
    yield RowNormCase("layer_norm", (3, 3072), BF16, weight=BF16, bias=BF16)
    yield RowNormCase("layer_norm", (3, 2048), F32, weight=F32, bias=F32, mean=1e4, std=1.0)
    yield StagedNormCase("add_layer_norm", (3, 2500), BF16, weight=F32, residual=F32, **stages)
    yield StagedNormCase("add_rms_norm", (3, 2500), BF16, weight=F32, residual=F32, **stages)
    yield RowNormCase("layer_norm", (3, 13000), BF16, weight=BF16, bias=BF16)
    yield RowNormCase("rms_norm", (2, 17000), F32, weight=F32)
    yield RowNormCase("layer_norm", (2, 16390), F32, weight=F32, bias=F32, mean=1e4, std=1.0)
    yield SteppedNormCase("layer_norm", (2, 32800), F32, weight=F32, bias=F32)
    yield RowNormCase("rms_norm", (2, 32776), F32, weight=F32)
    yield StagedNormCase("add_layer_norm", (1, 33000), F32, weight=F32, residual=F32, **stages)
    yield GatedNormCase("gated_layer_norm", (3, 2500), BF16, weight=BF16, bias=F32, gate=F32, gate_first=True)
    yield GatedNormCase("gated_rms_norm", (3, 2500), BF16, weight=BF16, gate=BF16, rounding="hf")
    yield GatedNormCase("gated_rms_norm", (2, 33000), F32, weight=F32, gate=F32, group_size=16500)
    for varies in ((2, 1), (2, 3), (3,)):
        yield ModulatedNormCase("modulated_layer_norm", (2, 3, 2500), BF16, shift=BF16, varies=varies)
        yield ModulatedNormCase("add_modulated_rms_norm", (2, 3, 24), F32, varies=varies, residual=F32, gate=F32)
    yield ModulatedNormCase("modulated_rms_norm", (2, 2, 33000), F32, shift=F32, varies=(2, 1))
    yield GatedNormCase("gated_layer_norm", (1, 33000), BF16, weight=F32, bias=F32, gate=F32)
    yield GatedNormCase("gated_layer_norm", (1, 33000), F32, weight=F32, gate=F32, gate_first=True)
    gated = {"layout": "transposed", "gate_layout": "transposed", "group_size": 24}
    yield GatedNormCase("gated_rms_norm", (4, 3, 96), F32, weight=F32, bias=F32, gate=F32, **gated)
    yield SoftmaxCase("softmax", (1, 33000), F32)
    yield SoftmaxCase("softmax", (2, 33000), F32, causal=True)
    yield SoftmaxCase("log_softmax", (2, 33000), F32, causal=True)
    yield ReduceCase("mean_abs", (2100, 5), F32, dim=0)
    yield RowNormCase("layer_norm", (4, 3, 96), F32, weight=F32, layout="transposed")
    yield StagedNormCase("add_rms_norm", (3, 2, 4, 40), BF16, weight=F32, residual=F32, layout="transposed")
    yield PointwiseCase("mul_act", (8, 3, 1, 17), F32, other=(5, 1))
    yield PointwiseCase("add_act", (4, 6, 8, 10), F32, layout="channels-last", other=(6, 1, 1))
    yield PointwiseCase("bias_act", (70, 1030), F32, activation="gelu", other=(1030,))
    yield PointwiseCase("add_act", (30, 100), F16, layout="transposed", other_layout="strided")
    yield ReduceCase("sum_squared", (4, 5, 6, 7), F32, dim=(0, 2))
    yield SoftmaxCase("softmax", (2, 3, 9, 40), F32, mask="boolean", mask_shape=(2, 1, 1, 40), causal=True)
    yield SoftmaxCase("softmax", (2, 3, 9, 40), BF16, mask="additive", mask_shape=(3, 1, 40))


def _affordable(case: Case) -> bool:
    """On a GPU all; in the interpreter those that take about a second, which leaves every verb, dtype and stage.

    The interpreter cuts bf16 off where a GPU rounds, which the fp32 gradient of a weight after a rounding shows.
    """
    cut_off = isinstance(case, RotaryCase) and case.rounding == "hf" and (case.dtype, case.weight) == (BF16, F32)
    return DEVICE == "cuda" or (case.draws <= 4 and math.prod(case.shape) <= 17000 and not cut_off)


def _cases() -> list[Case]:
    """On a GPU all of `verify`; in the interpreter enough for every pair of their fields."""
    served = (case for case in cases.cases(quick=True) if not checks.without_kernels(case.verb, "triton"))
    found = [*filter(_affordable, served)]
    if DEVICE == "cuda":
        return found
    return [found[index] for index in covering([factors({"case": case}) for case in found])]


def _with_marks(case: Case) -> Any:
    """Wide rows, groups of pieces and heads take the interpreter five seconds or more; the quick set has smaller ones.

    Gated, modulated and rotary norms round by the code of plain ones, which are there in fp16 and fp64 too.
    """
    wide = isinstance(case, RowNormCase) and math.prod(case.shape) > 34000
    pieces = isinstance(case, ModulatedNormCase) and case.shape[-1] == 2500 and case.varies != (2, 1)
    parts = case.verb.startswith(("gated_layer", "gated_rms", "modulated", "add_modulated", "qk_norm"))
    slow = wide or pieces or (parts and case.dtype in (F16, F64))
    return pytest.param(case, marks=pytest.mark.slow if DEVICE != "cuda" and slow else ())


@pytest.mark.covering(1, "case.verb", "case.dtype")
@pytest.mark.parametrize("case", [*map(_with_marks, [*_cases(), *_own_cases()])], ids=str)
def test_within_budget(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every verb, stage, activation, dtype and direction is within the oracle's budget."""
    if DEVICE != "cuda" and case.shape[-1] > 4096:
        # Sixteen columns a program are a thousand programs, each of which takes the interpreter as long as a wide one.
        narrow = plan.partial_sums()
        monkeypatch.setattr(plan, "partial_sums", lambda: replace(narrow, block=1024))
    check(case, TRITON)


# Grid rationale. A row in one block, in pieces, and looped over in both directions.
@pytest.mark.parametrize("cols", [100, 300, 1500, 33000])
@pytest.mark.parametrize("value", [float("inf"), -float("inf"), float("nan"), 1e20, 1e30])
@pytest.mark.parametrize("verb", ["layer_norm", "rms_norm"])
def test_norms_take_what_overflows_as_the_definition(verb: str, value: float, cols: int) -> None:
    """One infinity, NaN or number whose square overflows in x: y is the definition's; in dy: where dx is finite is."""
    x, dy = torch.randn(2, 4, cols, device=DEVICE).unbind()
    x[0, 3], x[2, -1], dy[3, 5] = value, value, value
    results = []
    for backend in ("triton", "eager"):
        leaf = x.clone().requires_grad_()
        y = getattr(kf, verb)(leaf, cols, backend=backend)
        results.append((y.detach(), torch.autograd.grad(y, leaf, dy)[0].isfinite()))
    torch.testing.assert_close(*results, equal_nan=True)


def test_create_graph_takes_each_operand_apart() -> None:
    """Where an operand depends on another, `create_graph` counts no gradient twice."""
    x = torch.randn(4, 8, dtype=F64, device=DEVICE, requires_grad=True)
    row = torch.randn(8, dtype=F64, device=DEVICE)
    calls: list[Callable[..., Tensor]] = [
        lambda a, b, backend: kf.gated_rms_norm(a, b, 8, backend=backend),
        lambda a, b, backend: kf.rms_norm(a, 8, b[0], backend=backend),
        lambda a, b, backend: kf.add_rms_norm(a, b, 8, b[0], backend=backend)[0],
        lambda a, b, backend: kf.gated_act(a, b, "silu", backend=backend),
    ]
    for call in calls:
        found = []
        for backend in ("triton", "eager"):
            a = x * row
            found.append(torch.autograd.grad(call(a, a.sin(), backend).cos().sum(), x, create_graph=True)[0])
        torch.testing.assert_close(*found)


@pytest.mark.parametrize("verb", ["add_layer_norm", "add_rms_norm"])
def test_h_is_normalised_as_it_is(verb: str) -> None:
    """h is rounded to the residual's dtype, and y is the norm of these bits."""
    x, r = torch.randn(2, 9, 255, device=DEVICE).bfloat16().unbind()
    norm = getattr(kf, verb)
    y, h = norm(x, r, 255, backend="triton", out_dtype=F32)
    again, same = norm(torch.zeros_like(x), h, 255, backend="triton", out_dtype=F32)
    assert torch.equal(same, h)
    assert torch.equal(again, y)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")], ids=str)
@pytest.mark.parametrize("name", kf.ACTIVATIONS)
def test_activations_take_nan_and_infinities_as_the_definition(name: str, value: float) -> None:
    """Value and slope of infinities, and the value of NaN, are the definition's; PyTorch's slopes at NaN disagree.

    The definition's in float64: in float32, with AVX-512, PyTorch's gelu of infinity is NaN.
    """
    results = []
    for backend, dtype in (("triton", F32), ("eager", F64)):
        x = torch.full((4,), value, dtype=dtype, device=DEVICE, requires_grad=True)
        y = kf.act_dropout(x, name, 0.0, backend=backend)
        (slope,) = torch.autograd.grad(y.sum(), x)
        results.append((y.detach().float(), (slope if math.isinf(value) else y.detach()).float()))
    torch.testing.assert_close(*results, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", ["relu", "relu_squared", "hardswish"])
def test_no_gradient_where_there_is_no_slope(name: str) -> None:
    """At a flat point of the activation the gradient is 0, whatever arrives."""
    x = torch.full((4,), -4.0, device=DEVICE, requires_grad=True)
    y = kf.act_dropout(x, name, 0.0, backend="triton")
    assert torch.autograd.grad(y, x, torch.full_like(x, math.inf))[0].eq(0).all()


# Grid rationale. 64: every row begins with a block of random bits; 63: none but the first does; 4099: several tiles.
@pytest.mark.parametrize("cols", [64, 63, 4099])
@pytest.mark.parametrize("p", [0.25, 0.3, 1.0])
def test_dropout_is_the_definitions(cols: int, p: float) -> None:
    """The kernels drop the elements that the definition drops, in chains and in norms."""
    x = torch.ones(5, cols, device=DEVICE)
    torch.manual_seed(3)
    seed = torch.randint(-(2**63), 2**63 - 1, (1,), dtype=torch.int64, device=DEVICE)
    kept = (random_bits(seed, x.numel()) >= threshold(p)).view(x.shape)
    for call in (
        lambda: kf.act_dropout(x, None, p, backend="triton"),
        lambda: kf.add_layer_norm(x, torch.zeros_like(x), cols, dropout_p=p, backend="triton").residual,
    ):
        torch.manual_seed(3)
        with TRITON.ran(1, 0):
            assert torch.equal(call() != 0, kept)


@verbs_where(lambda verb: verb.row_wise)
def test_the_same_bits_for_any_number_of_rows(operation: Verb) -> None:
    """A row's result does not depend on the rows around it, and a call gives the same bits twice."""
    tensors, function = [t.detach() for t in operation.leaves(TRITON, 9, 40)], operation.on(TRITON)
    whole = _first(function(*tensors))
    assert torch.equal(whole, _first(function(*tensors)))
    assert torch.equal(whole[:2], _first(function(*(t[:2] if len(t) == 9 else t for t in tensors))))


def test_gradients_are_computed_only_where_wanted(operation: Verb) -> None:
    """Each input alone gets the gradient that it gets among all, and `dy` is left alone.

    It is another program, in which a GPU's compiler may fuse other multiplications with additions. The interpreter
    fuses none, so there the bits show that the formula and its order are the same.
    """
    leaves = operation.leaves(TRITON, 9, 40)
    outputs = results(operation.on(TRITON)(*leaves))
    given = cotangents(outputs)
    before = [dy.clone() for dy in given]
    for i, expected in enumerate(gradients(outputs, leaves, given)):
        alone = [t.detach().requires_grad_(i == j) for j, t in enumerate(leaves)]
        (found,) = gradients(operation.on(TRITON)(*alone), alone, given)
        torch.testing.assert_close(found, expected)
        assert torch.equal(found, expected) or DEVICE == "cuda"
    assert all(map(torch.equal, given, before))


def test_double_backward(operation: Verb) -> None:
    """Second derivatives are right: a differentiated backward is the definition's."""
    leaves = operation.leaves(TRITON, 3, 4, F64)
    assert torch.autograd.gradgradcheck(lambda *t: _first(operation.on(TRITON)(*t)), leaves, fast_mode=True)


@verbs_where(lambda verb: not verb.lacks(TRITON))
def test_transforms_take_the_definition(operation: Verb) -> None:
    """`torch.func.grad`, forward mode and vmap give the definition's results."""
    x, *rest = (t.detach() for t in operation.leaves(TRITON, 5, 8, F64))
    tangent = torch.randn_like(x)

    def call(backend: str) -> Callable[[Tensor], Tensor]:
        return lambda t: _first(operation.ours(t, *rest, backend=backend))

    def results(f: Callable[[Tensor], Tensor]) -> list[Any]:
        batch = torch.stack([x, 2 * x])
        gradient = torch.func.grad(lambda t: f(t).square().sum())(x)
        return [gradient, *torch.func.jvp(f, (x,), (tangent,)), torch.vmap(f)(batch)]

    torch.testing.assert_close(results(call("triton")), results(call("eager")))


def test_empty_tensors_launch_nothing() -> None:
    """There is nothing to launch for tensors without elements, and the result is the definition's."""
    x = torch.empty(0, 8, device=DEVICE)
    assert kf.layer_norm(x, 8, backend="triton").shape == (0, 8)
    assert kf.mean_abs(x, backend="triton").isnan()


def test_errors_are_those_of_every_backend() -> None:
    """Shapes and dtypes that do not fit are refused in the same words as elsewhere."""
    x = torch.randn(4, 8, device=DEVICE)
    calls: list[Callable[[str], Any]] = [
        lambda b: kf.layer_norm(x, 8, torch.ones(7, device=DEVICE), backend=b),
        lambda b: kf.layer_norm(x, 8, torch.ones(8, device=DEVICE, dtype=F64), backend=b),
        lambda b: kf.add_rms_norm(x, x[:2], 8, backend=b),
        lambda b: kf.add_act(x, x[:3], "relu", backend=b),
        lambda b: kf.sum_squared(x, (0, 0), backend=b),
    ]
    for call in calls:
        texts = []
        for backend in ("triton", "eager"):
            with pytest.raises((RuntimeError, ValueError, IndexError)) as error:
                call(backend)
            texts.append((type(error.value), str(error.value)))
        assert texts[0] == texts[1]


@pytest.mark.parametrize("options", [{"causal": True}, {"mask": torch.tensor([True, True, False] * 3)}], ids=str)
@pytest.mark.parametrize("repeats", [1, 1000])
def test_nan_does_not_reach_what_is_left_out(options: dict[str, Any], repeats: int) -> None:
    """A left out element of a row with NaN is zero, and so is its gradient: as in the definition, of several blocks."""
    x = torch.randn(3, 9 * repeats, device=DEVICE)
    x[1, 0] = x[2, 1] = float("nan")
    options = {name: value.to(DEVICE).repeat(repeats) if name == "mask" else value for name, value in options.items()}
    dy, found = torch.randn_like(x), []
    for backend in ("triton", "eager"):
        leaf = x.clone().requires_grad_()
        y = kf.softmax(leaf, backend=backend, **options)
        found.append([y, *torch.autograd.grad(y, leaf, dy)])
    torch.testing.assert_close(*found, equal_nan=True)
    assert found[0][1][:, -1].isfinite().all()


@pytest.mark.parametrize(("verb", "slope"), [(kf.sum_squared, 2e-60), (kf.mean_abs, 1.0)], ids=["squares", "means"])
def test_gradients_of_fp64_are_computed_in_fp64(verb: Callable[..., Tensor], slope: float) -> None:
    """With `dtype=float32` the gradient of a float64 input has all its digits."""
    x = torch.tensor([1e-60], device=DEVICE, dtype=F64, requires_grad=True)
    verb(x, dtype=F32, backend="triton").backward()
    torch.testing.assert_close(x.grad, torch.full_like(x, slope), rtol=1e-14, atol=0)


def test_integers_are_refused() -> None:
    """An explicit request never falls back."""
    with pytest.raises(
        BackendUnavailableError, match=r"`sum_squared`: backend 'triton' was requested, but its kernels"
    ):
        kf.sum_squared(torch.ones(3, dtype=torch.int64, device=DEVICE), backend="triton")


def test_without_the_interpreter_cpu_tensors_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The message names the interpreter."""
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with pytest.raises(BackendUnavailableError, match=r"the input is on cpu.*TRITON_INTERPRET=1"):
        kf.add_act(torch.ones(3), torch.ones(3), "relu", backend="triton")


def test_without_triton_the_reason_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """A missing package is named."""
    monkeypatch.setattr(availability, "_has_triton", lambda: False)
    reason = dispatch.unavailable_reason("triton", torch.device(DEVICE))
    assert reason is not None
    assert reason.startswith("the package triton is not installed")


_explained = [
    name for name, verb in VERBS.items() if hasattr(kf, name) and "rope" not in name and not verb.lacks(TRITON)
]


@pytest.mark.parametrize("name", _explained)
def test_explain(name: str) -> None:
    """The plan of a requested call is listed, and nothing is launched; test_explain.py has those of heads."""
    x = torch.randn(4, 40000, device=DEVICE)
    arguments: dict[str, Any] = {"normalize": True} if name == "attention_scores" else {}
    arguments |= {"normalized_shape": 40000} if name.endswith("norm") else {}
    arguments |= {"activation": "relu"} if name.endswith("act") or name == "act_dropout" else {}
    arguments |= {"scale": x[0]} if "modulated" in name else {}
    pair = name.startswith(("add", "mul", "gated", "bias", "attention"))
    with TRITON.ran(0, 0):
        explanation = kf.explain(getattr(kf, name), *([x, x] if pair else [x]), **arguments, backend="triton")
    assert explanation.backend == "triton"
    assert explanation.plan
    if name.endswith("norm"):
        assert [line.partition(":")[0] for line in explanation.plan] == ["forward", "backward", "dweight, dbias"]


# Grid rationale. Powers of two and their neighbours, at the borders of blocks and of what is looped over.
@pytest.mark.parametrize(
    "cols", [1, 17, 768, 1025, 2048, 3000, 4097, 5120, 5121, 8192, 14337, 24576, 32768, 32769, 1 << 20]
)
@pytest.mark.parametrize("warp_size", [32, 64])
@pytest.mark.parametrize("itemsize", [2, 4, 8])
@pytest.mark.parametrize("staged", [False, True])
def test_plans_fit(cols: int, warp_size: int, itemsize: int, staged: bool) -> None:
    """Up to 8 blocks, powers of two, hold a row, or it is looped over; a program has 1024 threads at most."""
    plans = [
        plan.norm_forward(cols, itemsize),
        plan.norm_backward(cols, itemsize, staged),
        plan.row_plan(cols, itemsize == 8, kept=2),
        plan.norm_columns(itemsize),
        plan.columns(cols),
        plan.pointwise(cols),
    ]
    for one in plans:
        assert one.block & (one.block - 1) == 0
        assert plan.DeviceLimits(1, warp_size).warps(one.warps) * warp_size <= 1024
    for one in plans[:3]:
        assert one.pieces <= 8
        assert one.looped or one.pieces * one.block >= cols > (one.pieces - 1) * one.block


def test_persistent_programs_fit_beside_each_other() -> None:
    """Registers are bounded where several programs share a multiprocessor and would otherwise take too many."""
    device = plan.DeviceLimits(132, 32, registers=65536)
    two = plan.norm_backward(4096, 2, False)
    assert device.registers_of(two) == 128
    assert device.registers_of(plan.norm_backward(8192, 2, False)) is None
    assert device.registers_of(plan.norm_backward(256, 4, False)) is None
    assert plan.DeviceLimits(304, 64).registers_of(two) is None


# Grid rationale. Heads that turn in part and whole, odd and long ones, whose tiles are of few.
@pytest.mark.parametrize(
    ("cols", "half"), [(128, 64), (96, 16), (80, 20), (576, 32), (1024, 100), (8192, 4096), (6, 3)]
)
@pytest.mark.parametrize("heads", [(1, 0), (3, 1), (24, 5), (32, 8), (100, 0)])
def test_tiles_of_heads(cols: int, half: int, heads: tuple[int, int]) -> None:
    """A tile's heads are a power of two, as Triton asks, and hold at most 1024 pairs."""
    layout = plan.rotary(half, cols, heads, 32)
    assert layout.rows.bit_count() == 1
    assert layout.rows * (layout.block + layout.rest // 2) <= max(1024, layout.block + layout.rest // 2)


# Grid rationale. No row, one tile, a tile for each program, more than four on each multiprocessor, as many as fit.
@pytest.mark.parametrize(
    ("rows", "wanted", "of_four"),
    [(0, 1, 1), (1, 1, 1), (5, 2, 2), (512, 128, 128), (4096, 528, 264), (6000, 750, 264), (1 << 20, 1056, 264)],
)
def test_how_many_programs_walk_through_the_rows(rows: int, wanted: int, of_four: int) -> None:
    """One for each tile of 4 rows, then for every other; partial sums of more would cost more than they gain."""
    device = plan.DeviceLimits(132, 32, registers=65536)
    layout = plan.norm_backward(512, 2, False)
    assert (layout.rows, layout.resident) == (4, 8)
    assert device.programs(layout, rows) == wanted
    assert device.programs(layout, rows, beside=4) == of_four


_FIRST_USE = """
    import torch, kernel_fusion as kf
    x = torch.randn(64, 96, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = kf.layer_norm(x, 96, backend="triton")
    graph.replay()
    torch.testing.assert_close(y, torch.nn.functional.layer_norm(x, (96,)))
"""


@pytest.mark.skipif(DEVICE != "cuda", reason="there are no graphs of calls without a GPU")
def test_first_use_may_fall_inside_a_capture() -> None:
    """Triton compiles and loads there: the graph of a process that has loaded no kernel holds the call."""
    python(_FIRST_USE)


@pytest.mark.skipif(DEVICE != "cuda", reason="Inductor compiles Triton kernels for a GPU")
@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores")  # Inductor's advice about products in fp32
@pytest.mark.parametrize("name", ["layer_norm", "add_rms_norm", "bias_act", "gated_act", "sum_squared", "softmax"])
def test_inductor_runs_the_kernels(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One graph for any number of rows, forward and backward, with the results of calls that are not compiled."""
    torch._dynamo.reset()
    monkeypatch.setattr(torch._dynamo.config, "error_on_recompile", True)

    def call(*leaves: Tensor) -> Tensor:
        return _first(VERBS[name].on(TRITON)(*leaves))

    compiled = torch.compile(call, fullgraph=True, dynamic=True)
    for rows in (300, 7, 4096):
        leaves = VERBS[name].leaves(TRITON, rows, 40)
        dy = torch.randn_like(call(*leaves))
        found, expected = (
            [y := function(*leaves), *torch.autograd.grad(y, leaves, dy, allow_unused=True)]
            for function in (compiled, call)
        )
        torch.testing.assert_close(found, expected)


_TAKE_OVER = """
    import torch, kernel_fusion as kf
    from kernel_fusion.operators import fallback

    fallback.take_over("CPU")
    from kernel_fusion.backends.triton.launch import launches
    x, w = torch.randn(4, 8, requires_grad=True), torch.ones(8, requires_grad=True)
    y = kf.layer_norm(x, 8, w) + kf.rms_norm(x, 8) + kf.add_act(x, w, "relu") + kf.softmax(x)
    (y.sum() + kf.add_rms_norm(x, x, 8).output.sum() + kf.sum_squared(x)).backward()
    with torch.inference_mode():
        kf.layer_norm(x, 8)
    assert kf.sum_squared(torch.ones(3, dtype=torch.int64)) == 3
    print(sorted(launches))
"""


@pytest.mark.skipif(DEVICE != "cpu", reason="stands in for a GPU without kernels of the extension")
def test_a_device_without_other_kernels_takes_these_by_itself() -> None:
    """If the kernels take over a device type, every verb runs them without being asked to."""
    names = python(_TAKE_OVER).stdout
    for kernel in ("row_norm_fwd", "row_norm_bwd", "sum_partials", "pointwise", "softmax_bwd", "reduce_rows"):
        assert kernel in names
