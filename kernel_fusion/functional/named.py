"""Docstrings of the operations under fixed names: `kernel_fusion.ops` and `kernel_fusion.kernels` have the same nine.

The functions are written out, so that type checkers see their signatures. What both layers say of an operation, its
formula and example, stands once in `_OPERATIONS`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from kernel_fusion.functional.interop import refuse_script

_Function = TypeVar("_Function", bound=Callable[..., Any])

_PAIR, _ROWS = "a, b = torch.randn(2, 4, 8)", "x = torch.randn(4, 8)"
# The formula of each operation, by its name in `kernels`, and the lines of the example, in which `{f}` is the function.
_OPERATIONS = {
    "add_relu": (r"y = \max(a + b, 0)", [_PAIR, "torch.allclose({f}(a, b), torch.relu(a + b))"]),
    "mul_tanh": (r"y = \tanh(a \cdot b)", [_PAIR, "torch.allclose({f}(a, b), torch.tanh(a * b), atol=1e-6)"]),
    "bias_gelu": (
        r"y = \mathrm{gelu}(x + b)",
        [
            "x, b = torch.randn(4, 8), torch.randn(8)",
            "torch.allclose({f}(x, b), torch.nn.functional.gelu(x + b), atol=1e-6)",
        ],
    ),
    "sum_squared": (r"y = \sum_i x_i^2", [_ROWS, "torch.allclose({f}(x, dim=-1), x.square().sum(-1))"]),
    "mean_abs": (r"y = \frac{1}{n} \sum_i |x_i|", [_ROWS, "torch.allclose({f}(x, dim=-1), x.abs().mean(-1))"]),
    "layer_norm_relu": (
        r"y = \max\left(\frac{x - \mathrm{E}[x]}{\sqrt{\mathrm{Var}[x] + \epsilon}} \cdot w + b, 0\right)",
        [
            "x, w, b = torch.randn(4, 16), torch.ones(16), torch.zeros(16)",
            "expected = torch.relu(torch.nn.functional.layer_norm(x, (16,), w, b))",
            "torch.allclose({f}(x, 16, w, b), expected, atol=1e-6)",
        ],
    ),
    "relu_layer_norm": (
        r"y = \frac{u - \mathrm{E}[u]}{\sqrt{\mathrm{Var}[u] + \epsilon}} \cdot w + b, \qquad u = \max(x, 0)",
        [
            "x, w, b = torch.randn(4, 16), torch.ones(16), torch.zeros(16)",
            "expected = torch.nn.functional.layer_norm(torch.relu(x), (16,), w, b)",
            "torch.allclose({f}(x, 16, w, b), expected, atol=1e-6)",
        ],
    ),
    "gelu_dropout": (
        r"y = \mathrm{dropout}_p(\mathrm{gelu}(x))",
        [
            _ROWS,
            "y = {f}(x, 0.1, training=False)",
            "torch.allclose(y, torch.nn.functional.gelu(x), atol=1e-6)",
        ],
    ),
    "attention_score": (
        r"S = \mathrm{scale} \cdot Q K^T",
        ["q, k = torch.randn(2, 3, 8, 16)", "torch.allclose({f}(q, k, 0.25), q @ k.mT / 4, atol=1e-5)"],
    ),
}


def documented(operation: str, summary: str, text: str) -> Callable[[_Function], _Function]:
    """A decorator that writes a function's docstring.

    Args:
        operation: its name in the table.
        summary: the first line.
        text: what stands between the formula and the example.
    """
    formula, example = _OPERATIONS[operation]

    def write(function: _Function) -> _Function:
        path = f"{function.__module__}.{function.__name__}".replace("kernel_fusion", "kf")
        lines = ["import torch, kernel_fusion as kf", *(line.format(f=path) for line in example)]
        shown = "".join(f"    >>> {line}\n" for line in lines)
        function.__doc__ = f"{summary}\n\n.. math:: {formula}\n\n{text}\n\nExample:\n{shown}    True\n"
        setattr(function, "__prepare_scriptable__", refuse_script)  # noqa: B010  # no attribute that mypy knows
        return function

    return write
