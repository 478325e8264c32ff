"""The oracle itself: a result that is right passes, and one that is wrong, a little or in one place, does not."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from support import EAGER, Target, check
from torch import Tensor

import kernel_fusion as kf
from kernel_fusion.core import activations, checks, signatures
from kernel_fusion.testing import cases, long_double, oracle
from kernel_fusion.testing.case import with_gradients
from kernel_fusion.testing.oracle import RowNormCase, run

CASE = RowNormCase("layer_norm", (7, 255), torch.bfloat16, weight=torch.bfloat16, bias=torch.bfloat16)
NAMES = ("y", "dx", "dweight", "dbias")


def judge(name: str, wrong: Callable[[Tensor, Tensor], Tensor]) -> oracle.Comparison:
    """The oracle's verdict on `wrong(PyTorch's result, the reference)`."""
    inputs = oracle.make_inputs(CASE, "cpu")
    expected, theirs = oracle.reference(CASE, inputs)[name], oracle.pytorch(CASE, inputs)[name]
    return oracle.judge(name, [(wrong(theirs, torch.from_numpy(expected.astype("float64"))), expected, theirs)])


@pytest.mark.parametrize("name", NAMES)
def test_rounded_reference_passes(name: str) -> None:
    """The reference, rounded once, is within budget."""
    assert judge(name, lambda result, expected: expected.to(result.dtype)).ok


def _one_element(result: Tensor, expected: Tensor) -> Tensor:
    """Move the largest element by three times what PyTorch's error and one rounding come to."""
    at = expected.abs().argmax()
    pytorch_error = (result.double() - expected).abs().max()
    rounding = expected.abs().max() * torch.finfo(result.dtype).eps / 2
    wrong = result.double().clone()
    wrong.view(-1)[at] = expected.view(-1)[at] + 3 * (pytorch_error + rounding)
    return wrong.to(result.dtype)


def _with(value: float) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda result, _: result.where(torch.arange(result.numel()).view_as(result) != 3, value)


_WRONG: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "one-element": _one_element,
    "nan": _with(float("nan")),
    "inf": _with(float("inf")),
    "zeros": lambda result, _: torch.zeros_like(result),
    "shifted": lambda result, _: result.roll(1, -1),
}


@pytest.mark.parametrize("wrong", _WRONG)
@pytest.mark.parametrize("name", NAMES)
def test_wrong_values_are_rejected(name: str, wrong: str) -> None:
    """An error in one element, NaN, Inf, zeros and shifted columns are out of budget."""
    assert not judge(name, _WRONG[wrong]).ok


@pytest.mark.parametrize("wrong", [lambda t, _: t.float(), lambda t, _: t[:-1]], ids=["dtype", "shape"])
def test_wrong_dtype_or_shape_is_rejected(wrong: Callable[[Tensor, Tensor], Tensor]) -> None:
    """A result of another dtype or shape raises."""
    with pytest.raises(AssertionError, match=r"^y: got"):
        judge("y", wrong)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")], ids=str)
def test_what_is_not_finite_must_be_the_same(value: float) -> None:
    """If the reference is NaN or infinite, only the same value passes, whatever PyTorch has."""
    expected = np.array([1.0, value, 2.0], np.longdouble)
    result = torch.tensor([1.0, value, 2.0])
    assert oracle.judge("y", [(result, expected, result)]).ok
    for wrong in {float("nan"), float("inf"), -float("inf"), 0.0, 1e38} - {value}:
        got = result.where(torch.arange(3) != 1, wrong)
        if not (math.isnan(wrong) and math.isnan(value)):
            assert not oracle.judge("y", [(got, expected, result)]).ok
            assert not oracle.judge("y", [(got, expected, got)]).ok
            assert oracle.judge("y", [(result, expected, got)]).ok


@pytest.mark.parametrize("name", long_double.ACTIVATIONS)
def test_long_double_activations_are_the_definitions(name: str) -> None:
    """Value and slope by hand agree with PyTorch in float64, on either side of every kink and threshold."""
    x = torch.cat([torch.linspace(-45, 45, 9001, dtype=torch.float64), torch.tensor([-3.0, 0.0, 3.0, 20.0]).double()])
    x.requires_grad_()
    y = activations.formula(name)(x)
    (slope,) = torch.autograd.grad(y.sum(), x)
    by_hand = long_double.ACTIVATIONS[name]
    at = x.detach().numpy().astype(np.longdouble)
    for got, expected in ((y, by_hand.value(at)), (slope, by_hand.slope(at))):
        torch.testing.assert_close(got.detach(), torch.from_numpy(expected.astype(np.float64)), rtol=1e-13, atol=1e-14)


def test_long_double_has_every_activation() -> None:
    """An activation that is added needs its formula by hand."""
    assert set(long_double.ACTIVATIONS) == {*activations.ACTIVATIONS, activations.IDENTITY}


_FP64 = [case for case in cases.cases(quick=False) if case.dtype == torch.float64]


@pytest.mark.parametrize("case", _FP64, ids=str)
def test_long_double_results_are_those_of_the_definition(case: oracle.Case) -> None:
    """Hand-written results and gradients agree with the definition and autograd in float64.

    A mistake there would count as PyTorch's error and widen every budget of float64.
    """
    inputs = case.make_inputs("cpu")
    by_hand = case.long_double(inputs)
    wide = inputs.widened()
    results = with_gradients(case.definition(wide), wide)
    assert set(by_hand) == set(results)
    # A mean of 1e4 standard deviations takes four digits.
    far = getattr(case, "mean", 0.0) / getattr(case, "std", 1.0) > 1e3
    for name, result in results.items():
        expected = torch.from_numpy(by_hand[name].astype(np.float64))
        # Gradients that cancel to nothing, as of RMSNorm's rows of one element, are as exact as what cancels.
        scale = max([1e-3, *expected[expected.isfinite()].abs().flatten().tolist()])
        torch.testing.assert_close(result, expected, rtol=0, atol=(1e-8 if far else 1e-12) * scale, equal_nan=True)


@pytest.mark.parametrize("case", cases.cases(quick=False), ids=str)
def test_what_verify_runs(case: oracle.Case, target: Target) -> None:
    """Every verb, dtype and direction is within budget on each backend with kernels, and else on the definition."""
    check(case, EAGER if checks.without_kernels(case.verb, target.backend) else target)


@pytest.mark.parametrize(
    "case", {(c.verb, c.dtype): c for c in cases.cases(quick=True) if c.runs_kernels}.values(), ids=str
)
def test_the_definition_is_within_budget(case: oracle.Case) -> None:
    """The eager backend in the dtype of the call, where the budget is of its own run in float64."""
    check(case, EAGER)


def _unbiased(x: Tensor, shape: Any, weight: Tensor, bias: Tensor, **_: Any) -> Tensor:
    variance, mean = torch.var_mean(x.float(), -1, keepdim=True)
    return ((x - mean) * torch.rsqrt(variance + 1e-5) * weight + bias).to(x.dtype)


def _without_eps(x: Tensor, shape: Any, weight: Tensor, bias: Tensor, **_: Any) -> Tensor:
    return kf.layer_norm(x, shape, weight, bias, 0.0, backend="eager")


def _without_bias(x: Tensor, shape: Any, weight: Tensor, bias: Tensor, **_: Any) -> Tensor:
    return kf.layer_norm(x, shape, weight, bias * 0, backend="eager")


@pytest.mark.parametrize("implementation", [_unbiased, _without_eps, _without_bias])
def test_wrong_implementations_are_rejected(
    implementation: Callable[..., Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An unbiased variance, a missing eps and a missing bias are found by `compare`."""
    case = RowNormCase("layer_norm", (7, 64), torch.float32, weight=torch.float32, bias=torch.float32, std=0.01)
    with EAGER.ran():
        assert all(c.ok for c in oracle.compare(case, "cpu", "eager"))
    eager_layer_norm = kf.layer_norm

    def patched(*args: Any, **options: Any) -> Tensor:
        with monkeypatch.context() as inner:
            inner.setattr(kf, "layer_norm", eager_layer_norm)
            return implementation(*args, **options)

    monkeypatch.setattr(kf, "layer_norm", patched)
    assert not all(c.ok for c in oracle.compare(case, "cpu", "eager"))


def test_chance_alone_fails_no_result(monkeypatch: pytest.MonkeyPatch) -> None:
    """If PyTorch's errors all happen to be small in a draw, more draws tell chance from a wrong result.

    The weight's gradient here is 255 sums. In this draw the definition's error is more than twice PyTorch's; over many
    draws it is the same.
    """
    clamp = long_double.Activation(lambda x: np.clip(x, -1, 1), lambda x: np.where(np.abs(x) <= 1, np.longdouble(1), 0))
    monkeypatch.setitem(activations.ACTIVATIONS, "clamp", lambda x: x.clamp(-1, 1))
    monkeypatch.setitem(activations.CODES, "clamp", len(activations.CODES))
    monkeypatch.setitem(signatures.NAMES, "pre_activation", ("identity", "clamp"))
    monkeypatch.setitem(long_double.ACTIVATIONS, "clamp", clamp)
    double = torch.float64
    case = oracle.StagedNormCase("layer_norm", (33, 255), double, weight=double, bias=double, pre_activation="clamp")
    inputs = case.make_inputs("cpu")
    results = oracle.run(case, inputs, "eager"), oracle.reference(case, inputs), oracle.pytorch(case, inputs)
    ours, expected, theirs = (result["dweight"] for result in results)
    assert not oracle.judge("dweight", [(ours, expected, theirs)]).ok
    assert all(comparison.ok for comparison in oracle.compare(case, "cpu", "eager"))
    # An error that PyTorch's call never makes stays over budget.
    monkeypatch.setattr(oracle, "run", lambda *args: {name: t * (1 + 2e-14) for name, t in run(*args).items()})
    assert not any(comparison.ok for comparison in oracle.compare(case, "cpu", "eager"))
