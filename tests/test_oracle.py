"""The oracle itself: a result that is right passes, and one that is wrong, a little or in one place, does not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support import EAGER
from torch import Tensor

import kernel_fusion as kf
from kernel_fusion.testing import oracle
from kernel_fusion.testing.oracle import RowNormCase

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
