"""A stand-in for a module: its code over random parameters on the CPU, to be called with made-up tensors.

So modules on `meta` or with sharded parameters can be examined, no hook runs, and the module never sees what its code
sets on itself.
"""

from __future__ import annotations

import copy
import functools
import inspect
import types
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn

from kernel_fusion.patching.examining import generator
from kernel_fusion.patching.swap import original_class

_OF_EVERY_MODULE = frozenset({*vars(nn.Module()), "_kf_place"})
_PLAIN = frozenset({bool, int, float, str, type(None), torch.dtype})
_SMALL = 4096  # elements of a buffer whose values are compared
_LARGEST = 2**24  # elements of all tensors of a module that is examined; a table of 131072 positions has as many


class StandIn:
    """The forward of a module without submodules, over exchangeable parameters.

    With `shape`, a norm of PyTorch gets parameters of this shape, and normalises rows of it.
    """

    def __init__(self, module: nn.Module, shape: tuple[int, ...] | None = None) -> None:
        self.kind = original_class(type(module))
        self.module: nn.Module = self.kind.__new__(self.kind)
        random = generator()
        self.parameters = {
            name: 1 + 0.3 * torch.randn(shape or p.shape, generator=random, dtype=torch.float32)
            for name, p in module._parameters.items()
            if p is not None
        }
        buffers = {name: None if b is None else _on_cpu(b) for name, b in module._buffers.items()}
        own = {name: value if name in _OF_EVERY_MODULE else _apart(value) for name, value in vars(module).items()}
        vars(self.module).update(own, _parameters=dict(module._parameters), _buffers=buffers)
        if shape is not None:
            vars(self.module)["normalized_shape"] = shape
        self.set(self.parameters)

    def set(self, parameters: dict[str, Tensor]) -> None:
        """Put these parameters in the place of the module's."""
        own: dict[str, Any] = self.module._parameters
        own.update(parameters)

    def __call__(self, *inputs: Any) -> Any:
        """The result of the module's forward."""
        return self.kind.forward(self.module, *inputs)

    def is_steady(self, *inputs: Tensor) -> bool:
        """Whether nothing is kept, and result and gradients stay in the other mode and with other buffers."""
        own = vars(self.module)
        kept = dict(own)
        held = {name: _apart(value) for name, value in _held(self.module).items()}
        try:
            before = self._outcome(*inputs)
            keeps = own.keys() != kept.keys() or any(own[name] is not value for name, value in kept.items())
            keeps |= not all(_alike(value, held[name]) for name, value in _held(self.module).items())
            own["training"] = not own["training"]
            own["_buffers"] = {name: _other(b) for name, b in self.module._buffers.items()}
            return not keeps and all(_same(*pair) for pair in zip(before, self._outcome(*inputs), strict=True))
        except Exception:
            return False
        finally:
            own.update(kept)

    def _outcome(self, *inputs: Tensor) -> list[Tensor | None]:
        """The result, and the gradients of inputs and parameters; None for those that have none."""
        with torch.enable_grad():
            leaves = [x.detach().requires_grad_() for x in inputs]
            parameters = {name: p.detach().requires_grad_() for name, p in self.parameters.items()}
            self.set(parameters)
            y = self(*leaves)
            wanted = [*leaves, *parameters.values()]
            if not y.requires_grad:
                return [y, *[None] * len(wanted)]
            cotangent = torch.randn(y.shape, generator=generator(3)).to(y.dtype)
            return [y.detach(), *torch.autograd.grad(y, wanted, cotangent, allow_unused=True)]


def _same(one: Tensor | None, other: Tensor | None) -> bool:
    return one is other or (one is not None and other is not None and torch.equal(one, other))


def too_large(module: nn.Module) -> bool:
    """Whether a stand-in would hold more than an examination may allocate, which is known before it is made."""
    held = [*module._parameters.values(), *module._buffers.values(), *vars(module).values()]
    return sum(t.numel() for t in held if isinstance(t, Tensor)) > _LARGEST


def _on_cpu(buffer: Tensor) -> Tensor:
    return torch.ones(buffer.shape, dtype=buffer.dtype) if buffer.is_meta else buffer.detach().cpu().clone()


def _held(module: nn.Module) -> dict[str, Any]:
    """The attributes and buffers that a module holds."""
    own = vars(module)
    return {name: own[name] for name in own.keys() - _OF_EVERY_MODULE} | module._buffers


def _apart(value: Any) -> Any:
    """A copy of what a module holds, for code that may write into it."""
    if isinstance(value, Tensor):
        return _on_cpu(value)
    try:
        return copy.copy(value) if isinstance(value, Collection) or hasattr(value, "__dict__") else value
    except Exception:  # unknown code may raise anything
        return value


def _alike(value: Any, other: Any) -> bool:
    """Whether a value still equals the copy that was made of it."""
    if isinstance(value, Tensor):
        return torch.equal(value, other)
    return value is other or bool(value == other if isinstance(value, Collection) else vars(value) == vars(other))


def _other(buffer: Tensor | None) -> Tensor | None:
    if buffer is None:
        return None
    if buffer.dtype == torch.bool:
        return ~buffer
    return buffer * 1.5 + 0.25 if buffer.is_floating_point() else buffer + 1000


def settings(module: nn.Module) -> tuple[Any, ...]:
    """The state that decides a forward, besides class and tensors."""
    return tuple(
        [(name, _value(module, value)) for name, value in vars(module).items() if name not in _OF_EVERY_MODULE]
    )


def _value(module: nn.Module, value: Any) -> Any:
    """A key for a value: hashable, fit for a pickle, and equal for equal values."""
    kind = type(value).__qualname__
    if type(value) in _PLAIN:
        return kind, value
    if isinstance(value, types.MethodType) and value.__self__ is module:
        return value.__func__
    try:
        hash(value)
    except TypeError:
        return repr(value)
    return repr(value) if isinstance(value, tuple | functools.partial) else (kind, value)


def buffers(module: nn.Module) -> tuple[Any, ...]:
    """The buffers as an examination sees them: the values of small ones, no values of those on `meta`."""
    return tuple((name, None if b is None else _seen(b)) for name, b in module._buffers.items())


def _seen(buffer: Tensor) -> Any:
    if buffer.is_meta:
        return tuple(buffer.shape), buffer.dtype, "meta"
    if type(buffer) is Tensor and buffer.numel() <= _SMALL:
        return tuple(buffer.shape), buffer.dtype, repr(buffer.tolist())
    return id(buffer)


def arguments(function: Any) -> list[inspect.Parameter] | None:
    """The positional parameters of a method without `self`; None if it takes any number or requires keywords."""
    parameters = list(inspect.signature(function).parameters.values())[1:]
    if any(p.kind == p.VAR_POSITIONAL or (p.kind == p.KEYWORD_ONLY and p.default is p.empty) for p in parameters):
        return None
    return [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
