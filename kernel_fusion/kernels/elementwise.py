"""Pointwise chains. `kernel_fusion.kernels` says what all tensors must be, and what is raised."""

from __future__ import annotations

from torch import Tensor

from kernel_fusion.functional import add_act, bias_act, mul_act
from kernel_fusion.functional.named import documented
from kernel_fusion.kernels.demands import admit

_PAIR = ", for contiguous floating-point `a` and `b` of one device, of shapes that broadcast."
_RETURNS = "Returns:\n    Tensor of the broadcast shape and the promoted dtype, detached."


@documented("add_relu", "relu(a + b)" + _PAIR, _RETURNS)
def add_relu(a: Tensor, b: Tensor) -> Tensor:
    backend, (a, b) = admit("elementwise.add_relu", a=a, b=b)
    return add_act(a, b, "relu", backend=backend)


@documented("mul_tanh", "tanh(a * b)" + _PAIR, _RETURNS)
def mul_tanh(a: Tensor, b: Tensor) -> Tensor:
    backend, (a, b) = admit("elementwise.mul_tanh", a=a, b=b)
    return mul_act(a, b, "tanh", backend=backend)


@documented(
    "bias_gelu",
    "gelu(input + bias), for contiguous floating-point tensors of one device, of shapes that broadcast.",
    _RETURNS,
)
def bias_gelu(input: Tensor, bias: Tensor) -> Tensor:
    backend, (input, bias) = admit("elementwise.bias_gelu", input=input, bias=bias)
    return bias_act(input, bias, "gelu", backend=backend)
