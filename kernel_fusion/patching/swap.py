"""Changes modules by exchanging their class for a subclass with the same name, and nothing else.

Parameters, buffers, hooks, names, `isinstance` and the state dict stay, and restoring the class undoes it. Modules that
had one class have one class afterwards, too, though they may have several plans, or none: FSDP, for example, wraps the
modules of the class that it finds under a name. Copies and pickles store the original class and the plans, and make the
subclass again.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import importlib
import sys
import types
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import _global_forward_hooks, _global_forward_pre_hooks, _has_any_global_hook

from kernel_fusion.patching.wrappers import around, inside

Whole = Mapping[str, types.CellType]  # by name, variables that will hold the methods that a class has in the end
_NONE = -1  # the place of a module that has no plan among those of its class


class Plan(ABC):
    """How modules of a class are changed; hashable, and picklable, because modules' pickles contain it."""

    def __deepcopy__(self, memo: Any) -> Plan:
        return self

    def read(self, original: type[nn.Module]) -> tuple[Any, ...]:
        """The functions that the plan was made from: once one is another, modules get another class."""
        return ()

    @abstractmethod
    def methods(self, original: type[nn.Module], whole: Whole) -> Mapping[str, Callable[..., Any]]:
        """The methods that replace those of `original`."""


def original_class(kind: type) -> Any:
    """The class that a changed class was made from; any other class itself."""
    return kind.__dict__.get("_kf_original", kind)


def is_changed(module: nn.Module) -> bool:
    """Whether the module's class is ours; somebody else's subclass of it is not."""
    return "_kf_original" in type(module).__dict__


def plan_of(module: nn.Module) -> Plan | None:
    """The plan of a changed module, even if somebody made a subclass of ours."""
    place, plans = getattr(module, "_kf_place", _NONE), getattr(type(module), "_kf_plans", ())
    return None if place == _NONE else plans[place]


def change(modules: Sequence[tuple[nn.Module, Plan | None]], undo: Callable[..., Any]) -> None:
    """Give modules that had one class another one that carries out the plan of each; `undo` gets calls that restore."""
    plans = tuple(dict.fromkeys(plan for _, plan in modules if plan is not None))
    kind = changed_class(original_class(type(modules[0][0])), plans, all(plan is not None for _, plan in modules))
    for module, plan in modules:
        undo(_exchange, module, type(module), vars(module).get("_kf_place"))
        _exchange(module, kind, None if kind._kf_place == 0 else _NONE if plan is None else plans.index(plan))


def restore(module: nn.Module) -> None:
    """Give a changed module its own class back."""
    _exchange(module, original_class(type(module)), None)


def _exchange(module: nn.Module, kind: type[nn.Module], place: int | None) -> None:
    """Give a module a class, and its methods where the module holds some, as after accelerate's hooks."""
    held = [name for name, value in vars(module).items() if holds_own(module, value)]
    object.__setattr__(module, "__class__", kind)
    for name in held:
        vars(module)[name] = types.MethodType(getattr(kind, vars(module)[name].__name__), module)
    vars(module).pop("_kf_place", None)
    if place is not None:
        vars(module)["_kf_place"] = place


def holds_own(module: nn.Module, value: Any) -> bool:
    """Whether this, which a module holds, is a method of its class."""
    bound = isinstance(value, types.MethodType) and value.__self__ is module
    return bound and getattr(type(module), value.__name__, None) is value.__func__


def holders(modules: Iterable[nn.Module]) -> dict[nn.Module, str]:
    """The modules of which something outside their own dictionaries holds a method of ours, and the method's name."""
    own = {module: {id(value) for value in vars(module).values()} for module in modules}
    kinds = {type(module) for module in own}
    functions = {f for kind in kinds for f in vars(kind).values() if isinstance(f, types.FunctionType)}
    found = gc.get_referrers(*functions) if functions else []
    bound = [m for m in found if isinstance(m, types.MethodType) and isinstance(m.__self__, nn.Module)]
    return {m.__self__: m.__name__ for m in bound if m.__self__ in own and id(m) not in own[m.__self__]}


def changed_class(original: Any, plans: tuple[Plan, ...], complete: bool) -> Any:
    """The subclass of `original` whose modules have these plans; `complete` if each of them has one.

    While it lives, there is one for the same functions, so that compiled code is shared.
    """
    key = plans, complete, tuple(plan.read(original) for plan in plans)
    for known in type.__subclasses__(original):
        if known.__dict__.get("_kf_key") == key:
            return known

    def reduce(self: nn.Module, protocol: Any) -> tuple[Any, ...]:
        """Pickle and copy the original class and the plans, because nobody can import the subclass."""
        reduced: Any = super(kind, self).__reduce_ex__(max(2, int(protocol)))
        if type(self) is not kind or reduced[0].__name__ != "__newobj__":  # somebody's subclass, or `__reduce__`
            return reduced  # type: ignore[no-any-return]
        _, (_, *args), *state = reduced
        return _new, (original, plans, complete, *args), *state

    one = complete and len(plans) == 1
    members: dict[str, Any] = {name: getattr(original, name) for name in ("__module__", "__qualname__", "__doc__")}
    members |= {"_kf_original": original, "_kf_plans": plans, "_kf_key": key, "_kf_place": 0 if one else _NONE}
    members |= {"__reduce_ex__": reduce, **_methods(original, plans, one)}
    if "forward" in members and not hasattr(members["forward"], "__wrapped__"):
        functools.update_wrapper(members["forward"], original.forward)  # its signature
    kind = subclass(original, members)
    _enter(original, kind)
    return kind


def _methods(original: type[nn.Module], plans: tuple[Plan, ...], one: bool) -> dict[str, Callable[..., Any]]:
    """The methods of a changed class: those of its only plan, or some that ask for the plan of a module."""
    whole = {name: types.CellType() for base in original.__mro__ for name in vars(base)}
    found = [plan.methods(original, whole) for plan in plans]
    names = dict.fromkeys(name for methods in found for name in methods)
    methods = dict(found[0]) if one else {n: _of_each(original, n, [m.get(n) for m in found], whole) for n in names}
    for name in methods.keys() & whole.keys():
        whole[name].cell_contents = methods[name]
    return methods


def _of_each(
    original: type[nn.Module], name: str, methods: list[Callable[..., Any] | None], whole: Whole
) -> Callable[..., Any]:
    """A method that calls the one of a module's plan; without one, that of the class, or nothing."""
    before: Any = getattr(original, name, None)
    copied = around(before, inside(before), whole[name]) if isinstance(before, types.FunctionType) else before

    def method(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        place = self.__dict__.get("_kf_place", _NONE)
        own = methods[place] if place != _NONE else None
        if own is None:
            now = getattr(original, name, None)
            own = copied if now is before else now
        return None if own is None else own(self, *args, **kwargs)

    return functools.update_wrapper(method, before or method)


def _enter(original: Any, kind: Any) -> None:
    """Enter a changed class where the caches of diffusers look up the exact class of a block, if the original is."""
    known = sys.modules.get("diffusers.hooks._helpers")
    if known is None and original.__module__.startswith("diffusers."):
        with contextlib.suppress(ImportError):
            known = importlib.import_module("diffusers.hooks._helpers")
    registry = getattr(known, "TransformerBlockRegistry", None)
    if registry is not None:
        with contextlib.suppress(ValueError):  # it is not registered
            registry.register(kind, copy.copy(registry.get(original)))


class _Base:
    """The base of a new class until it gets its own."""


def subclass(original: Any, members: dict[str, Any]) -> Any:
    """A subclass with the name of its base, which does not hear of it: `__init_subclass__` does not run."""
    base = nn.Module if issubclass(original, nn.Module) else _Base
    kind = type(original)(original.__name__, (base,), members)
    kind.__bases__ = (original,)
    return kind


def _new(original: Any, plans: tuple[Plan, ...], complete: bool, *args: Any) -> nn.Module:
    kind = changed_class(original, plans, complete)
    return kind.__new__(kind, *args)  # type: ignore[no-any-return]


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


def has_torch_hooks(module: nn.Module) -> bool:
    """Whether all that runs beside a call's `forward` are hooks of PyTorch's own, such as those of parallel styles.

    They lay out inputs and results, or count; they do not write to them.
    """
    forward = (module._forward_hooks, module._forward_pre_hooks, _global_forward_hooks, _global_forward_pre_hooks)
    backward = module._backward_hooks or module._backward_pre_hooks
    if backward or "forward" in module.__dict__:
        return False
    return all(getattr(hook, "__module__", "").startswith("torch.") for hooks in forward for hook in hooks.values())
