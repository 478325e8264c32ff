"""The budget by which every result is judged, and the verdict.

An element may be off by twice (the largest error of the same PyTorch call in the same dtype + one rounding of the
element to the output dtype). This is derived, never tuned. PyTorch's error is random, so small results are judged over
several draws, with PyTorch's errors pooled; `oracle.compare` says how many.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

Array = np.ndarray[tuple[int, ...], np.dtype[np.floating[Any]]]
Reference = dict[str, Array]


@dataclass(frozen=True)
class Comparison:
    """The verdict on one tensor, compared with its float64 reference by absolute errors.

    Attributes:
        name: The name of a result, "y" or "h", or of a gradient, such as "dx".
        error: Our largest absolute error.
        pytorch_error: PyTorch's largest absolute error.
        excess: Our largest error divided by its budget. A tensor passes with at most 1. If only one of ours and the
            reference is NaN somewhere, this is infinite.
    """

    name: str
    error: float
    pytorch_error: float
    excess: float

    @property
    def ok(self) -> bool:
        """Whether the tensor is within its budget."""
        return self.excess <= 1.0


def judge(name: str, draws: list[tuple[Tensor, Any, Tensor]]) -> Comparison:
    """Return the verdict on the tensor `name`, from draws of (our result, the reference, PyTorch's result)."""
    errors, roundings, pytorch_error = [], [], 0.0
    for ours, expected, theirs in draws:
        if ours.shape != expected.shape or ours.dtype != theirs.dtype:
            raise AssertionError(
                f"{name}: got {ours.dtype} of shape {tuple(ours.shape)}, expected {theirs.dtype} of {expected.shape}"
            )
        if expected.size == 0:
            return Comparison(name, 0.0, 0.0, 0.0)
        info = torch.finfo(ours.dtype)
        errors.append(_errors(ours, expected))
        roundings.append(np.maximum(np.nan_to_num(np.abs(expected)) * (info.eps / 2), info.tiny))
        # An overflow or a NaN of PyTorch's does not widen the budget.
        their_errors = _errors(theirs, expected)
        pytorch_error = max(pytorch_error, float(their_errors[np.isfinite(their_errors)].max(initial=0.0)))
    worst = [
        float((error / (2 * (pytorch_error + rounding))).max())
        for error, rounding in zip(errors, roundings, strict=True)
    ]
    excess = math.inf if any(map(math.isnan, worst)) else max(worst)
    return Comparison(name, max(float(error.max()) for error in errors), pytorch_error, excess)


def _errors(result: Tensor, expected: Array) -> Array:
    """The absolute errors of a result. Equal infinities, and a NaN where one is expected, count as no error."""
    got = result.detach().cpu().double().numpy()  # a long double reference widens it further
    same = (got == expected) | (np.isnan(got) & np.isnan(expected))
    with np.errstate(invalid="ignore"):  # inf - inf of equal signs
        errors: Array = np.where(same, 0.0, np.abs(got - expected))
    return errors
