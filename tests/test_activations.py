"""The list of activations."""

from __future__ import annotations

import re

import torch
from support import PACKAGE, ROOT

import kernel_fusion as kf

HEADER = (PACKAGE / "native" / "shared" / "activations.h").read_text()


def test_public_list_is_that_of_the_readme() -> None:
    """The names that users may rely on."""
    listed = re.search("^Activations: (.*)\\.$", (ROOT / "README.md").read_text(), re.MULTILINE)[1]
    assert listed == ", ".join(f"`{name}`" for name in kf.ACTIVATIONS)


def test_slopes_of_two_values_are_those_of_the_header() -> None:
    """A bit tells these slopes: each is that at 0 or that at 1, also at NaN and infinities."""
    x = torch.cat([torch.linspace(-30, 30, 1201), torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0])])

    def slopes(name: str, x: torch.Tensor) -> torch.Tensor:
        x = x.requires_grad_()
        return torch.autograd.grad(kf.ACTIVATIONS[name](x), x, torch.ones_like(x))[0]

    def has_two(name: str) -> bool:
        return len(slopes(name, x).unique()) == 2 == len(slopes(name, torch.tensor([0.0, 1.0])).unique())

    assert re.findall(r"kTwoSlopes<(\w+)> = true", HEADER) == [name for name in kf.ACTIVATIONS if has_two(name)]
