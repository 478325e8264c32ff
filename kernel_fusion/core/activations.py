"""The activations: name, definition, and the order that native/shared/activations.h repeats.

A row here is what eager computes and every test compares with; the struct of the same name in the header is what the
kernels compute. Adding an activation is one of each.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F


def _squareplus(x: Tensor) -> Tensor:
    """(x + sqrt(x^2 + 4)) / 2; of negative x 2 / (sqrt(x^2 + 4) - x), where the sum would cancel."""
    two, negative = torch.full_like(x, 2), x < 0
    above, below = torch.where(negative, 0, x), torch.where(negative, x, 0)
    return torch.where(negative, 2 / (torch.hypot(below, two) - below), above / 2 + torch.hypot(above, two) / 2)


# Each maps a tensor to one of the same dtype, is differentiable (twice), and takes NaN and infinities as PyTorch does.
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
}

# What an absent activation is called in specs and operators; the slope of |x|, which backward of `mean_abs` takes; and
# what backward takes that knows the value y of a tanh or sigmoid: functions whose slopes at y are theirs.
IDENTITY = "identity"
_INTERNAL: dict[str, Callable[[Tensor], Tensor]] = {
    IDENTITY: lambda x: x,
    "sign": torch.sign,
    "from_tanh": lambda y: y - y**3 / 3,
    "from_sigmoid": lambda y: y**2 / 2 - y**3 / 3,
}

# The position of a name is its code in C++; the internal ones come first.
CODES = {name: code for code, name in enumerate([*_INTERNAL, *ACTIVATIONS])}


def formula(name: str) -> Callable[[Tensor], Tensor]:
    """The definition of an activation, or of an internal one, by its name."""
    return ACTIVATIONS.get(name) or _INTERNAL[name]
