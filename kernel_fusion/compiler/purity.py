"""Whether a node is known to write to no tensor and to change no mode: other nodes may move across such ones only.

A call is pure if its schema says so, or if it is one of PyTorch's functions or methods that PyTorch writes without the
underscore of those in place, called without what makes it write: `inplace`, `out`, `max_norm`, running statistics.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Mapping
from functools import cache
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch.fx import Node

# Where functions in C live, none of which changes a mode.
_HOMES = frozenset(f"torch._C._{name}" for name in ("nn", "linalg", "fft", "special")) | {"math", "builtins"}
_OF_TORCH = "_VariableFunctionsClass."  # the functions of `torch` that are operators
# They update statistics, or the weight of an embedding.
_UPDATES = ("batch_norm", "instance_norm", "renorm", "moving_avg", "running")
_OF_TENSORS = frozenset({"backward", "register_hook", "retain_grad", "resize", "resize_as", "set_data"})
_IN_PLACE = frozenset(
    f"__{name}__" for name in dir(operator) if name.startswith("i") and hasattr(operator, f"__{name}__")
)
_NOT_IN_PLACE = frozenset({"__index__", "__inv__", "__invert__"})


def is_barrier(node: Node) -> bool:
    """Whether work must not move across a node."""
    return node.op not in ("placeholder", "get_attr", "output") and not _is_pure(node)


def clear_between(first: Node, last: Node) -> bool:
    """Whether no barrier lies after `first` and before `last`."""
    if first is last:
        return True
    node = first.next
    while node is not last:
        if node.op == "root" or is_barrier(node):
            return False
        node = node.next
    return True


def _is_pure(node: Node) -> bool:
    target, given = node.target, node.kwargs
    if given.get("out") is not None:
        return False
    if node.op == "call_method" and isinstance(target, str):
        return hasattr(torch.Tensor, target) and target not in _OF_TENSORS and not _writes_by_name(target)
    if node.op != "call_function" or isinstance(target, str):
        return False
    if isinstance(target, torch._ops.OpOverload):
        return not target._schema.is_mutable
    if isinstance(target, torch._ops.OpOverloadPacket):
        return not _may_write(target)
    name = getattr(target, "__name__", "")
    if _writes_by_name(name) or any(part in name for part in _UPDATES):
        return False
    return _is_known(target) and not any(_flags(target, node.args, given).values())


def _writes_by_name(name: str) -> bool:
    """Whether a method or function writes to its first argument, by its name."""
    if name.startswith("__"):
        return name in _IN_PLACE - _NOT_IN_PLACE or name in ("__setitem__", "__delitem__", "__setattr__")
    return name.endswith("_")


@cache
def _may_write(packet: Any) -> bool:
    """Whether an operator writes without being given an `out`."""
    overloads = (getattr(packet, name)._schema for name in packet.overloads())
    return any(schema.is_mutable and not any(a.is_out for a in schema.arguments) for schema in overloads)


def _is_known(target: Callable[..., Any]) -> bool:
    """Whether it is a function of PyTorch, of Python's operators, or of ours."""
    home, name = getattr(target, "__module__", None) or "", getattr(target, "__name__", "")
    if home == "_operator":
        return f"__{name}__" not in _IN_PLACE - _NOT_IN_PLACE and name not in ("setitem", "delitem")
    if home == "torch" and getattr(target, "__qualname__", "").startswith(_OF_TORCH):
        return True
    if home in ("torch.functional", "torch.nn.functional"):
        return getattr(torch if home == "torch.functional" else F, name, None) is target
    return home in _HOMES or home.startswith("kernel_fusion.")


def _flags(target: Callable[..., Any], args: tuple[Any, ...], given: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call that make it write, by position or by name."""
    bound = dict(given)
    if isinstance(target, FunctionType):  # functions in C have no flags
        bound |= dict(zip(inspect.signature(target).parameters, args, strict=False))
    return {name: bound[name] for name in ("inplace", "max_norm", "out") if name in bound}
