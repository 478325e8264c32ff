"""The list of activations: adding one is a row in Python and a struct in C++."""

from __future__ import annotations

import re

import torch
from support import PACKAGE

import kernel_fusion as kf
from kernel_fusion.core import activations

HEADER = (PACKAGE / "native" / "shared" / "activations.h").read_text()


def test_every_name_has_a_struct_with_value_and_slope() -> None:
    """Every activation that Python lists is defined."""
    for name in activations.CODES:
        body = re.search(rf"^struct {name} {{\n(.*?)^}};", HEADER, re.MULTILINE | re.DOTALL)[1]
        assert re.search(r" value\(typename M::V", body), name
        assert re.search(r" slope\(typename M::V", body), name


def test_public_list_is_that_of_the_specification() -> None:
    """The names that users may rely on."""
    names = "relu relu_squared leaky_relu gelu gelu_tanh quick_gelu silu tanh sigmoid mish softplus hardswish elu"
    assert list(kf.ACTIVATIONS) == [*names.split(" "), "squareplus"]


def test_slopes_of_two_values_are_those_of_the_header() -> None:
    """A bit tells these slopes: each is that at 0 or that at 1, also at NaN and infinities."""
    x = torch.cat([torch.linspace(-30, 30, 1201), torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0])])

    def slopes(name: str, x: torch.Tensor) -> torch.Tensor:
        x = x.requires_grad_()
        return torch.autograd.grad(kf.ACTIVATIONS[name](x), x, torch.ones_like(x))[0]

    def has_two(name: str) -> bool:
        return len(slopes(name, x).unique()) == 2 == len(slopes(name, torch.tensor([0.0, 1.0])).unique())

    assert re.findall(r"kTwoSlopes<(\w+)> = true", HEADER) == [name for name in kf.ACTIVATIONS if has_two(name)]
