"""Changes a module by exchanging its class for a subclass with the same name, and nothing else.

Parameters, buffers, hooks, names, `isinstance` and the state dict stay, and restoring the class undoes it. Copies and
pickles store the original class and the plan, and make the subclass again.
"""

from __future__ import annotations

import functools
import types
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import _has_any_global_hook


class Plan(ABC):
    """How modules of a class are changed; hashable, and picklable, because modules' pickles contain it."""

    def __deepcopy__(self, memo: Any) -> Plan:
        return self

    @abstractmethod
    def methods(self, original: type[nn.Module]) -> Mapping[str, Callable[..., Any]]:
        """The methods that replace those of `original`."""


def original_class(kind: type) -> Any:
    """The class that a changed class was made from; any other class itself."""
    return kind.__dict__.get("_kf_original", kind)


def is_changed(module: nn.Module) -> bool:
    """Whether the module's class is ours; somebody else's subclass of it is not."""
    return "_kf_original" in type(module).__dict__


def plan_of(module: nn.Module) -> Plan | None:
    """The plan of a changed module, even if somebody made a subclass of ours."""
    return getattr(type(module), "_kf_plan", None)


def change(module: nn.Module, plan: Plan) -> None:
    """Give a module the class that carries out `plan`."""
    kind: Any = type(module)
    _exchange(module, changed_class(kind, plan))


def restore(module: nn.Module) -> None:
    """Give a changed module its own class back."""
    _exchange(module, original_class(type(module)))


def _exchange(module: nn.Module, kind: type[nn.Module]) -> None:
    """Give a module a class, and its methods where the module holds some, as after accelerate's hooks."""
    held = [name for name, value in vars(module).items() if holds_own(module, value)]
    object.__setattr__(module, "__class__", kind)
    for name in held:
        vars(module)[name] = types.MethodType(getattr(kind, vars(module)[name].__name__), module)


def holds_own(module: nn.Module, value: Any) -> bool:
    """Whether this, which a module holds, is a method of its class."""
    bound = isinstance(value, types.MethodType) and value.__self__ is module
    return bound and getattr(type(module), value.__name__, None) is value.__func__


# Keys have the identity of the original class, which lives as long as the changed one.
_changed: weakref.WeakValueDictionary[tuple[int, Plan], type[nn.Module]] = weakref.WeakValueDictionary()


def changed_class(original: Any, plan: Plan) -> type[nn.Module]:
    """The subclass of `original` that carries out `plan`; one per pair while it lives, for shared compiled code."""
    key = id(original), plan
    known = _changed.get(key)
    return _changed.setdefault(key, _made(original, plan)) if known is None else known


def _made(original: Any, plan: Plan) -> type[nn.Module]:
    """A new subclass of `original` that carries out `plan`."""

    def reduce(self: nn.Module, protocol: Any) -> tuple[Any, ...]:
        """Pickle and copy the original class and the plan, because nobody can import the subclass."""
        reduced: Any = super(kind, self).__reduce_ex__(max(2, int(protocol)))
        if type(self) is not kind or reduced[0].__name__ != "__newobj__":  # somebody's subclass, or `__reduce__`
            return reduced  # type: ignore[no-any-return]
        _, (_, *args), *state = reduced
        return _new, (original, plan, *args), *state

    names = ("__module__", "__qualname__", "__doc__")
    members: dict[str, Any] = {name: getattr(original, name) for name in names}
    members |= {"_kf_original": original, "_kf_plan": plan, "__reduce_ex__": reduce, **plan.methods(original)}
    if "forward" in members and not hasattr(members["forward"], "__wrapped__"):
        functools.update_wrapper(members["forward"], original.forward)  # its signature
    kind: type[nn.Module] = type(original)(original.__name__, (nn.Module,), members)
    kind.__bases__ = (original,)  # without its `__init_subclass__`
    return kind


def _new(original: Any, plan: Plan, *args: Any) -> nn.Module:
    kind = changed_class(original, plan)
    return kind.__new__(kind, *args)


def is_captured() -> bool:
    """Whether torch.compile, torch.export or `torch.jit.trace` records the call; they get the module's own code."""
    return torch.compiler.is_compiling() or torch.jit.is_tracing()  # type: ignore[attr-defined, no-untyped-call]


def is_bare(module: nn.Module) -> bool:
    """Whether calling the module only runs its class's `forward`: no hooks, no `forward` of its own.

    Hooks may move, gather or record inputs and results, so modules with hooks are called as before.
    """
    return not (
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or "forward" in module.__dict__
        or _has_any_global_hook()
    )
