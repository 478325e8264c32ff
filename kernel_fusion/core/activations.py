"""The activations as PyTorch operations, which define them.

native/shared/activations.h has a struct for each, with the same name and in the same order.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F


def _squareplus(x: Tensor) -> Tensor:
    """(x + sqrt(x^2 + 4)) / 2. For negative x it is computed as 2 / (sqrt(x^2 + 4) - x), in which nothing cancels."""
    two, negative = torch.full_like(x, 2), x < 0
    above, below = torch.where(negative, 0, x), torch.where(negative, x, 0)
    return torch.where(negative, 2 / (torch.hypot(below, two) - below), above / 2 + torch.hypot(above, two) / 2)


# Each function keeps the dtype, is twice differentiable, and treats NaN and infinities as PyTorch does.
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "relu_squared": lambda x: F.relu(x).square(),
    "leaky_relu": F.leaky_relu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "silu": F.silu,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "mish": F.mish,
    "softplus": F.softplus,
    "hardswish": F.hardswish,
    "elu": F.elu,
    "squareplus": _squareplus,
    "selu": F.selu,
}

# "sign" is the slope of |x|. "from_tanh" and "from_sigmoid" compute the slopes of tanh and sigmoid from their
# results, so that backward needs only the result.
IDENTITY = "identity"
_INTERNAL: dict[str, Callable[[Tensor], Tensor]] = {
    IDENTITY: lambda x: x,
    "sign": torch.sign,
    "from_tanh": lambda y: y - y**3 / 3,
    "from_sigmoid": lambda y: y**2 / 2 - y**3 / 3,
}

# The position of a name is its code in C++.
CODES = {name: code for code, name in enumerate([*_INTERNAL, *ACTIVATIONS])}


def formula(name: str) -> Callable[[Tensor], Tensor]:
    """The definition of the activation called `name`."""
    return ACTIVATIONS.get(name) or _INTERNAL[name]
