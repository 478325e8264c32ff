"""The value and the slope (derivative) of every activation, chosen by name when a kernel is compiled.

The names are those of core/activations.py. NaN, infinities and slopes at kinks are as in PyTorch. Comparisons with NaN
are false, so NaN takes the last branch. A constant that float32 cannot hold exactly stands only next to a value, whose
type it takes.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernel_fusion.backends.triton.kernels.elementary import exp, expm1, log1p, tanh


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + exp(-x))


@triton.jit
def _relu(x):
    return tl.where(x <= 0.0, 0.0, x)


@triton.jit
def _phi(x):
    """The distribution function of the normal distribution, (1 + erf(x / sqrt(2))) / 2."""
    return 0.5 + 0.5 * tl.erf(x * 0.70710678118654752440)


@triton.jit
def _gelu_tanh_of(x):
    """tanh(sqrt(2 / pi) (x + 0.044715 x^3))."""
    return tanh(0.79788456080286535588 * (x + 0.044715 * x * x * x))


@triton.jit
def _mish_n(x):
    """n = e^x (e^x + 2), of which n / (n + 2) is tanh(log(1 + e^x)). From x = 20 on that is 1 to the last digit."""
    e = exp(tl.where(x > 20.0, 20.0, x))
    return e * (e + 2.0)


@triton.jit
def _squareplus_root(x):
    """s = sqrt(x^2 + 4), which is |x| to the last digit from 2^30 on."""
    return tl.where(tl.abs(x) > 2.0**30, tl.abs(x), tl.sqrt(x * x + 4.0))


@triton.jit
def _squareplus(x):
    """(x + s) / 2, computed without cancellation as max(x, 0) + 2 / (s + |x|)."""
    return _relu(x) + 1.0 / (0.5 * _squareplus_root(x) + 0.5 * tl.abs(x))


@triton.jit
def value(x, NAME: tl.constexpr):
    """The activation NAME of a tile of float32 or float64."""
    if NAME == "identity":
        y = x
    elif NAME == "sign":
        y = tl.where(x > 0.0, 1.0, tl.where(x < 0.0, -1.0, 0.0))
    elif NAME == "from_tanh":
        y = x - x * x * x / 3.0
    elif NAME == "from_sigmoid":
        y = x * x * (0.5 - x / 3.0)
    elif NAME == "relu":
        y = _relu(x)
    elif NAME == "relu_squared":
        y = _relu(x) * _relu(x)
    elif NAME == "leaky_relu":
        y = tl.where(x > 0.0, x, 0.01 * x)
    elif NAME == "gelu":
        y = x * _phi(x)
    elif NAME == "gelu_tanh":
        y = 0.5 * x * (1.0 + _gelu_tanh_of(x))
    elif NAME == "quick_gelu":
        y = x * _sigmoid(1.702 * x)
    elif NAME == "silu":
        y = x * _sigmoid(x)
    elif NAME == "tanh":
        y = tanh(x)
    elif NAME == "sigmoid":
        y = _sigmoid(x)
    elif NAME == "mish":
        n = _mish_n(x)
        y = x * (n / (n + 2.0))
    elif NAME == "softplus":
        y = tl.where(x > 20.0, x, log1p(exp(x)))
    elif NAME == "hardswish":
        y = x * tl.where(x < -3.0, 0.0, tl.where(x > 3.0, 6.0, x + 3.0)) / 6.0
    elif NAME == "elu":
        y = tl.where(x > 0.0, x, expm1(x))
    elif NAME == "squareplus":
        y = _squareplus(x)
    elif NAME == "selu":
        y = tl.where(x > 0.0, 1.0507009873554805 * x, 1.7580993408473769 * expm1(x))
    else:
        tl.static_assert(False, "no such activation")
    return y


@triton.jit
def slope(x, NAME: tl.constexpr):
    """The derivative of the activation NAME at x."""
    if NAME == "identity":
        d = tl.full(x.shape, 1.0, x.dtype)
    elif NAME == "sign":
        d = tl.full(x.shape, 0.0, x.dtype)
    elif NAME == "from_tanh":
        d = 1.0 - x * x
    elif NAME == "from_sigmoid":
        d = x * (1.0 - x)
    elif NAME == "relu":
        d = tl.where(x <= 0.0, 0.0, 1.0)
    elif NAME == "relu_squared":
        d = 2.0 * _relu(x)
    elif NAME == "leaky_relu":
        d = tl.where(x > 0.0, tl.full(x.shape, 1.0, x.dtype), tl.full(x.shape, 0.01, x.dtype))
    elif NAME == "gelu":
        d = _phi(x) + x * (0.39894228040143267794 * exp(-0.5 * x * x))
    elif NAME == "gelu_tanh":
        t = _gelu_tanh_of(x)
        inner = 0.79788456080286535588 * (1.0 + 0.134145 * x * x)
        d = 0.5 * (1.0 + t) + 0.5 * x * (1.0 - t * t) * inner
    elif NAME == "quick_gelu":
        s = _sigmoid(1.702 * x)
        d = s + 1.702 * x * s * (1.0 - s)
    elif NAME == "silu":
        s = _sigmoid(x)
        d = s * (1.0 + x * (1.0 - s))
    elif NAME == "tanh":
        e = exp(-2.0 * tl.abs(x))
        r = 1.0 / (1.0 + e)
        d = 4.0 * e * r * r  # 1 - tanh^2 without cancellation
    elif NAME == "sigmoid":
        s = _sigmoid(x)
        d = s * (1.0 - s)
    elif NAME == "mish":
        # 1 - tanh^2 is 4 (n + 1) / (n + 2)^2, which cancels nothing. At infinities x - x makes the slope NaN, as in
        # PyTorch.
        n = _mish_n(x)
        r = 1.0 / (n + 2.0)
        d = tl.where(x > 20.0, 1.0, n * r + x * _sigmoid(x) * (((n + 1.0) * r) * (4.0 * r))) + (x - x)
    elif NAME == "softplus":
        d = tl.where(x > 20.0, 1.0, _sigmoid(x))
    elif NAME == "hardswish":
        d = tl.where(x <= -3.0, 0.0, tl.where(x >= 3.0, 1.0, x / 3.0 + 0.5))
    elif NAME == "elu":
        d = tl.where(x > 0.0, 1.0, exp(x))
    elif NAME == "squareplus":
        d = _squareplus(x) / _squareplus_root(x) + (x - x)  # NaN at infinities, as in the definition
    elif NAME == "selu":
        d = tl.where(x > 0.0, tl.full(x.shape, 1.0507009873554805, x.dtype), 1.7580993408473769 * exp(x))
    else:
        tl.static_assert(False, "no such activation")
    return d.to(x.dtype)


@triton.jit
def times_slope(g, x, NAME: tl.constexpr):
    """The gradient at x, from the gradient `g` at the activation NAME of x.

    If the slope is 0, PyTorch's backward of some activations gives 0 whatever g is, and so does this.
    """
    d = slope(x, NAME)
    SELECTS: tl.constexpr = NAME == "sign" or NAME == "relu" or NAME == "relu_squared" or NAME == "hardswish"
    if SELECTS:
        g = tl.where(d == 0.0, 0.0, g * d)
    else:
        g = g * d
    return g
