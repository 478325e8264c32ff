"""The activations in NumPy's long double, value and slope: the reference for float64.

They are written from the mathematics, not from another implementation, with PyTorch's thresholds and subgradients.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from kernel_fusion.core.activations import IDENTITY
from kernel_fusion.testing.budget import Array

_ONE = np.longdouble(1)
_PI = _ONE * 4 * np.arctan(_ONE)


class Activation(NamedTuple):
    """The value and the slope of one activation, as functions of an array."""

    value: Callable[[Array], Array]
    slope: Callable[[Array], Array]


def erf(x: Array) -> Array:
    """Return erf(x) = 2 / sqrt(pi) exp(-x^2) times the sum of 2^n x^(2n+1) / (2n+1)!!.

    All terms of the sum have the sign of x.
    """
    inside = np.clip(x, -7, 7)  # beyond, erf is 1 to 22 digits
    term = total = inside
    square, n = 2 * inside**2, 0
    while term.size and np.abs(term).max() > 1e-25:
        n += 1
        term = term * square / (2 * n + 1)
        total = total + term
    return np.asarray(2 / np.sqrt(_PI) * np.exp(-(inside**2)) * total)


def _sigmoid(x: Array) -> Array:
    return np.asarray(1 / (1 + np.exp(-x)))


def _phi(x: Array) -> Array:
    return np.asarray((1 + erf(x / np.sqrt(2 * _ONE))) / 2)


def _gelu_slope(x: Array) -> Array:
    return np.asarray(_phi(x) + x * np.exp(-(x**2) / 2) / np.sqrt(2 * _PI))


def _inner(x: Array) -> Array:
    return np.asarray(np.sqrt(2 / _PI) * (x + np.longdouble("0.044715") * x**3))


def _gelu_tanh_slope(x: Array) -> Array:
    t = np.tanh(_inner(x))
    inner_slope = np.sqrt(2 / _PI) * (1 + 3 * np.longdouble("0.044715") * x**2)
    return np.asarray((1 + t) / 2 + x * (1 - t**2) * inner_slope / 2)


def _silu_slope(x: Array) -> Array:
    return np.asarray(_sigmoid(x) * (1 + x * _sigmoid(-x)))


def _softplus(x: Array) -> Array:
    return np.where(x > 20, x, np.log1p(np.exp(np.minimum(x, 20))))


def _squareplus_root(x: Array) -> Array:
    return np.asarray(np.hypot(x, 2 * _ONE))


def _squareplus(x: Array) -> Array:
    return np.asarray(2 / (_squareplus_root(x) + np.abs(x)) + np.maximum(x, 0))


def _mish_slope(x: Array) -> Array:
    t = np.tanh(np.log1p(np.exp(x)))
    return np.asarray(t + x * (1 - t**2) * _sigmoid(x))


def _elu(scale: Any, alpha: Any) -> Activation:
    def at(x: Array, above: Array, below: Array) -> Array:
        return np.asarray(scale * np.where(x > 0, above, alpha * below))

    return Activation(
        lambda x: at(x, x, np.expm1(np.minimum(x, 0))), lambda x: at(x, np.ones_like(x), np.exp(np.minimum(x, 0)))
    )


_QUICK = np.longdouble("1.702")
ACTIVATIONS: dict[str, Activation] = {
    IDENTITY: Activation(lambda x: x, np.ones_like),
    "relu": Activation(lambda x: np.maximum(x, 0), lambda x: np.where(x > 0, _ONE, 0)),
    "relu_squared": Activation(lambda x: np.maximum(x, 0) ** 2, lambda x: 2 * np.maximum(x, 0)),
    "leaky_relu": Activation(lambda x: np.where(x > 0, x, x / 100), lambda x: np.where(x > 0, _ONE, _ONE / 100)),
    "gelu": Activation(lambda x: x * _phi(x), _gelu_slope),
    "gelu_tanh": Activation(lambda x: x * (1 + np.tanh(_inner(x))) / 2, _gelu_tanh_slope),
    "quick_gelu": Activation(lambda x: x * _sigmoid(_QUICK * x), lambda x: _silu_slope(_QUICK * x)),
    "silu": Activation(lambda x: x * _sigmoid(x), _silu_slope),
    "tanh": Activation(np.tanh, lambda x: 1 - np.tanh(x) ** 2),
    "sigmoid": Activation(_sigmoid, lambda x: _sigmoid(x) * _sigmoid(-x)),
    "mish": Activation(lambda x: x * np.tanh(np.log1p(np.exp(x))), _mish_slope),
    "softplus": Activation(_softplus, lambda x: np.where(x > 20, _ONE, _sigmoid(x))),
    "hardswish": Activation(
        lambda x: x * np.clip(x + 3, 0, 6) / 6,
        lambda x: np.where(x <= -3, 0 * _ONE, np.where(x >= 3, _ONE, x / 3 + _ONE / 2)),
    ),
    "elu": _elu(_ONE, _ONE),
    "squareplus": Activation(_squareplus, lambda x: _squareplus(x) / _squareplus_root(x)),
    "selu": _elu(np.longdouble("1.0507009873554804934193"), np.longdouble("1.6732632423543772848170")),
}


def sum_to(gradient: Array, shape: tuple[int, ...]) -> Array:
    """Return the gradient of an operand of this shape, which was broadcast to the shape of `gradient`."""
    lead = gradient.ndim - len(shape)
    gradient = gradient.sum(tuple(range(lead)))
    stretched = tuple(i for i, size in enumerate(shape) if size == 1 and gradient.shape[i] != 1)
    return np.asarray(gradient.sum(stretched, keepdims=True))
