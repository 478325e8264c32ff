"""Reads the nodes of Dynamo's graph: what a node calls, its arguments, and what its value looks like.

PyTorch spells one operation in several ways (`a + b`, `torch.add`, `Tensor.add`). The table here gives each operation
one name for the matchers. A call with other arguments than the table lists is not recognised.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Node
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

# Annotated, because PyTorch's type guard narrows to a type that is no tensor.
_is_subclass: Callable[[object], bool] = is_traceable_wrapper_subclass

# The parameters of each operation, in PyTorch's order, with its defaults; other operations have an input alone.
_PARAMETERS: dict[str, dict[str, Any]] = {
    "add": {"input": None, "other": None},
    "mul": {"input": None, "other": None},
    "pow": {"input": None, "exponent": None},
    "mean": {"input": None, "dim": None, "keepdim": False},
    "to": {"input": None, "dtype": None},
    "type_as": {"input": None, "other": None},
    "getitem": {"input": None, "index": None},
    "linear": {"input": None, "weight": None, "bias": None},
    "dropout": {"input": None, "p": 0.5, "training": True, "inplace": False},
    "layer_norm": {"input": None, "normalized_shape": None, "weight": None, "bias": None, "eps": 1e-5},
    "rms_norm": {"input": None, "normalized_shape": None, "weight": None, "eps": None},
    "relu": {"input": None, "inplace": False},
    "silu": {"input": None, "inplace": False},
    "mish": {"input": None, "inplace": False},
    "gelu": {"input": None, "approximate": "none"},
}
_FUNCTIONS: dict[Any, str] = {
    getattr(module, name): name
    for module, names in (
        (operator, ("add", "mul", "pow", "getitem")),
        (torch, ("add", "mul", "pow", "square", "mean", "rsqrt", "rms_norm", "relu", "tanh", "sigmoid")),
        (F, ("linear", "dropout", "layer_norm", "rms_norm", "relu", "silu", "mish", "gelu", "tanh", "sigmoid")),
    )
    for name in names
}
_METHODS = ("add", "mul", "pow", "square", "mean", "rsqrt", "float", "to", "type_as", "relu", "tanh", "sigmoid")
# Operations that have our activations' names.
_PLAIN_ACTIVATIONS = ("relu", "silu", "mish", "tanh", "sigmoid")
_GELUS = {"none": "gelu", "tanh": "gelu_tanh"}


def name_of(node: Any) -> str | None:
    """The name of the operation that a node calls, in this module's table, or None."""
    if not isinstance(node, Node):
        return None
    if node.op == "call_method" and node.target in _METHODS:
        return node.target
    return _FUNCTIONS.get(node.target) if node.op == "call_function" else None


def arguments(node: Any, name: str) -> dict[str, Any] | None:
    """The arguments of a call of `name`, with defaults; None for other calls, or other arguments."""
    if name_of(node) != name:
        return None
    parameters = _PARAMETERS.get(name, {"input": None})
    if len(node.args) > len(parameters) or not set(node.kwargs) <= set(parameters):
        return None
    return parameters | dict(zip(parameters, node.args, strict=False)) | dict(node.kwargs)


def value(node: Any) -> Tensor | None:
    """Dynamo's fake tensor for a node, with shape, dtype and device; None for a subclass."""
    found = node.meta.get("example_value") if isinstance(node, Node) else None
    return found if isinstance(found, Tensor) and not _is_subclass(found) else None


def known(node: Node) -> Tensor:
    """As `value`, for a node that has one."""
    found = value(node)
    assert found is not None
    return found


def activation(node: Any) -> tuple[str, Node] | None:
    """The activation that a node applies, by our name, and its argument; None if it is not ours."""
    if (call := arguments(node, "gelu")) and call["approximate"] in _GELUS:
        return _GELUS[call["approximate"]], call["input"]
    for name in _PLAIN_ACTIVATIONS:
        call = arguments(node, name)
        if call and not call.get("inplace", False) and isinstance(call["input"], Node):
            return name, call["input"]
    return None


def same_shape(a: Tensor, b: Tensor) -> bool:
    """Whether two shapes are equal for all sizes of dynamic dimensions; adds no guard."""
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return a.dim() == b.dim() and all(statically_known_true(m == n) for m, n in zip(a.shape, b.shape, strict=True))


def only_user(node: Node, user: Node | None = None) -> Node | None:
    """The only reader of `node`; None if there are others, or it is not `user`."""
    users = list(node.users)
    return users[0] if len(users) == 1 and user in (None, users[0]) else None


def cast_to(node: Any) -> tuple[Node, torch.dtype] | None:
    """The argument of a dtype conversion (or of a no-op one) and the dtype; None for other nodes."""
    for name in ("float", "to", "type_as"):
        call = arguments(node, name)
        if call is None:
            continue
        source, result = call["input"], value(node)
        # `.to` may only name a device, and `type_as` may change it.
        if value(source) is None or result is None or result.device != known(source).device:
            return None
        if name == "to" and not isinstance(call["dtype"], torch.dtype):
            return None
        return source, result.dtype
    return None
