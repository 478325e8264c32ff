"""Pointwise chains. `kernel_fusion.kernels` says what all tensors must be, and what is raised."""

from __future__ import annotations

from torch import Tensor

from kernel_fusion.functional import add_act, bias_act, mul_act
from kernel_fusion.kernels.demands import admit


def add_relu(a: Tensor, b: Tensor) -> Tensor:
    r"""relu(a + b), for contiguous floating-point `a` and `b` of one device, of shapes that broadcast.

    .. math:: y = \max(a + b, 0)

    Returns:
        Tensor of the broadcast shape and the promoted dtype, detached.

    Example:
        >>> import torch, kernel_fusion as kf
        >>> a, b = torch.randn(2, 4, 8)
        >>> torch.allclose(kf.kernels.elementwise.add_relu(a, b), torch.relu(a + b))
        True
    """
    backend, (a, b) = admit("elementwise.add_relu", a=a, b=b)
    return add_act(a, b, "relu", backend=backend)


def mul_tanh(a: Tensor, b: Tensor) -> Tensor:
    r"""tanh(a * b), for contiguous floating-point `a` and `b` of one device, of shapes that broadcast.

    .. math:: y = \tanh(a \cdot b)

    Returns:
        Tensor of the broadcast shape and the promoted dtype, detached.

    Example:
        >>> import torch, kernel_fusion as kf
        >>> a, b = torch.randn(2, 4, 8)
        >>> torch.allclose(kf.kernels.elementwise.mul_tanh(a, b), torch.tanh(a * b), atol=1e-6)
        True
    """
    backend, (a, b) = admit("elementwise.mul_tanh", a=a, b=b)
    return mul_act(a, b, "tanh", backend=backend)


def bias_gelu(input: Tensor, bias: Tensor) -> Tensor:
    r"""gelu(input + bias), for contiguous floating-point tensors of one device, of shapes that broadcast.

    .. math:: y = \mathrm{gelu}(x + b)

    Returns:
        Tensor of the broadcast shape and the promoted dtype, detached.

    Example:
        >>> import torch, kernel_fusion as kf
        >>> x, b = torch.randn(4, 8), torch.randn(8)
        >>> y = kf.kernels.elementwise.bias_gelu(x, b)
        >>> torch.allclose(y, torch.nn.functional.gelu(x + b), atol=1e-6)
        True
    """
    backend, (input, bias) = admit("elementwise.bias_gelu", input=input, bias=bias)
    return bias_act(input, bias, "gelu", backend=backend)
