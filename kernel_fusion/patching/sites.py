"""Called by rewritten methods: one pass if that is the same, else the method's own expression."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kernel_fusion.functional import bound, gated_act
from kernel_fusion.patching.agree import has_shape, is_floating, same_order
from kernel_fusion.patching.autocast import widened
from kernel_fusion.patching.reads import Reads
from kernel_fusion.patching.swap import has_torch_hooks, is_bare, is_captured, original_class


class Act(NamedTuple):
    """An activation in a method: text, class or function, our name, if CUDA's autocast widens it, what it reads."""

    text: str
    known: Any
    name: str
    widens: bool
    reads: Reads

    def guard(self) -> Callable[[Any], bool]:
        """Make a function that says whether an object is still this activation."""
        known = self.known
        if not isinstance(known, type):
            holds = self.reads.guard(None)
            return lambda act: act is known and holds(act)
        same = self.reads.guard(known)

        def is_same(act: Any) -> bool:
            kind = type(act)
            return (kind is known or original_class(kind) is known) and same(act) and is_bare(act)

        return is_same


def identity(act: Any) -> Any:
    """The class of an activation that is a module, or the function itself."""
    return original_class(type(act)) if isinstance(act, nn.Module) else act


class Gates(NamedTuple):
    """The functions of rewritten gates: `act(gate) * value` at once, or in two steps with other code between."""

    gated: Callable[..., Any]
    held: Callable[..., Any]
    held_result: Callable[..., Any]
    product: Callable[..., Any]


def gates_by(acts: Iterable[Act]) -> Gates:
    """Make these functions, for one pass over the examined activations."""
    in_one_pass = {act.text: (act.guard(), act.widens, bound.gated_act(gated_act, act.name)) for act in acts}

    def waiting(text: str, act: Any, gate: Any) -> tuple[Any, ...]:
        is_same, widens, gate_by = in_one_pass[text]
        if is_same(act) and is_floating(gate):
            return gate, gate_by, act, widens
        return act(gate), None, None, False

    def held(text: str, act: Any, gate: Any) -> tuple[Any, ...]:
        """The gate, and what will compute the product; or the activated gate if the two are not one pass."""
        return (act(gate), None, None, False) if is_captured() else waiting(text, act, gate)

    def held_result(text: str, act: Any, layer: Any, /, *args: Any, **options: Any) -> tuple[Any, ...]:
        """The same of a layer's result, which other code may write to unless nobody else holds it."""
        if is_captured():
            return act(layer(*args, **options)), None, None, False
        if type(layer) in _MAKERS and (is_bare(layer) or has_torch_hooks(layer)):
            return waiting(text, act, layer(*args, **options))
        gate, references = _called(layer, args, options)
        if references == _ALONE and owns_memory(gate):
            return waiting(text, act, gate)
        return act(gate), None, None, False

    def product(held: tuple[Any, ...], value: Any, swapped: Any = ()) -> Any:
        """Multiply the activated gate and the value, in the order of the source."""
        gate, gate_by, act, widens = held
        if gate_by is not None:
            if is_floating(value) and gate.shape == value.shape and same_order(gate, value):
                return gate_by(widened(gate) if widens else gate, value)
            gate = act(gate)
        return value * gate if swapped else gate * value

    def gated(text: str, act: Any, gate: Any, value: Any, swapped: Any = ()) -> Any:
        """Take both steps, the activation of the gate and the product."""
        return product(held(text, act, gate), value, swapped)

    return Gates(gated, held, held_result, product)


# Layers whose result is new memory.
_MAKERS = frozenset({nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d})


def _called(layer: Any, args: Any, options: Any) -> tuple[Any, int]:
    """A call's result, and how many references Python has to it."""
    result = layer(*args, **options)
    return result, sys.getrefcount(result)


_ALONE = _called(object, (), {})[1]  # for a result that nobody else holds


def owns_memory(t: Any) -> bool:
    """Whether no other tensor has the memory of this one, and only Python holds it."""
    if type(t) is not Tensor or t._use_count() != 1:  # type: ignore[attr-defined]
        return False
    holders = torch._C._storage_Use_Count(t.untyped_storage()._cdata) - 1  # without the storage just made
    return holders == 1 or (holders == 2 and t._is_view() and _held(t._base) == _DROPPED)


def _held(t: Any) -> tuple[int, int]:
    """How many references there are to a tensor, and to its object."""
    return t._use_count(), sys.getrefcount(t)


with torch.inference_mode(False):
    # For a base that only its view holds, as that of a matrix product.
    _DROPPED = _held(torch.empty(1, device="cpu").view(1)._base)


def add_norm(norm: Any, a: Any, b: Any) -> tuple[Any, Any]:
    """`norm(a + b)` and `a + b`, in one pass if the norm is patched and has no hooks."""
    add = _method(norm, "_kf_add")
    if add is not None and has_shape(a) and has_shape(b) and a.shape == b.shape:
        pair = _in_order(a, b)
        if pair is not None and (found := add(norm, *pair)) is not None:
            return found  # type: ignore[no-any-return]
    h = a + b
    return norm(h), h


def drop_add_norm(
    norm: Any, left: bool, residual: Any, x: Any, dropout: Any, /, *args: Any, **options: Any
) -> tuple[Any, Any]:
    """`norm(h)` and `h = dropout(x, *args, **options) + residual`, in one pass if it is PyTorch's dropout.

    `left` says whether the dropout stands on the left of the sum.
    """
    add = _method(norm, "_kf_add")
    if (
        add is not None
        and has_shape(x)
        and has_shape(residual)
        and x.shape == residual.shape
        and (pair := _in_order(residual, x)) is not None
        and pair[1] is residual
        and (p := _probability(dropout, args, options)) is not None
        and (found := add(norm, x, residual, p)) is not None
    ):
        return found  # type: ignore[no-any-return]
    dropped = dropout(x, *args, **options)
    return add_norm(norm, dropped, residual) if left else add_norm(norm, residual, dropped)


def modulated(norm: Any, x: Any, scale: Any, shift: Any = None, swapped: Any = ()) -> Any:
    """`norm(x) * (1 + scale) + shift`, in one pass if the norm has no parameters and nothing is widened."""
    modulate = _method(norm, "_kf_modulate")
    if modulate is not None and (found := modulate(norm, x, None, None, scale, shift)) is not None:
        return found[0]
    return _modulated(norm(x), scale, shift, swapped)


def add_modulated(
    norm: Any, residual: Any, x: Any, gate: Any, scale: Any, shift: Any = None, swapped: Any = ()
) -> tuple[Any, Any]:
    """`norm(h) * (1 + scale) + shift` and `h = residual + x * gate`, likewise; x and gate may change places."""
    modulate = _method(norm, "_kf_modulate")
    if modulate is not None and has_shape(residual) and has_shape(x):
        one, stream, factor = x, residual, gate
        if gate is None:
            one, stream = _in_order(residual, x) or (x, residual)
        elif isinstance(gate, Tensor) and x.shape != residual.shape:
            one, factor = gate, x
        if one.shape == stream.shape and (found := modulate(norm, one, stream, factor, scale, shift)) is not None:
            return found  # type: ignore[no-any-return]
    one = x if gate is None else x * gate
    h = one + residual if "sum" in swapped else residual + one
    return _modulated(norm(h), scale, shift, swapped), h


def _modulated(y: Any, scale: Any, shift: Any, swapped: Any) -> Any:
    y = (1 + scale) * y if "scale" in swapped else y * (1 + scale)
    return y if shift is None else shift + y if "shift" in swapped else y + shift


def _method(norm: Any, name: str) -> Any:
    """The method for a site of a norm that is patched and has no hooks, in a call that nothing captures."""
    if is_captured():
        return None
    method = type(norm).__dict__.get(name)  # not of a class that somebody made of a changed one
    return method if method is not None and is_bare(norm) else None


def is_dropout(dropout: Any) -> bool:
    """Whether this is PyTorch's dropout, the module or the function."""
    return type(dropout) is nn.Dropout or dropout is F.dropout


def _probability(dropout: Any, args: tuple[Any, ...], options: dict[str, Any]) -> float | None:
    """The probability with which a call of a dropout zeroes an element; None if it is not just that."""
    if type(dropout) is nn.Dropout:
        p, training, inplace = dropout.p, dropout.training, dropout.inplace
        if args or options or not is_bare(dropout):
            return None
    elif dropout is F.dropout:
        p, training, inplace = _of_function(*args, **options)
    else:
        return None
    if inplace or not 0.0 <= p <= 1.0:
        return None
    return p if training else 0.0


def _of_function(p: float = 0.5, training: bool = True, inplace: bool = False) -> tuple[float, bool, bool]:
    """The arguments of `F.dropout` after its input."""
    return p, training, inplace


def _in_order(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor] | None:
    """The other term of a sum, and a term of the sum's dtype, if there is one."""
    if a.dtype is b.dtype:
        return b, a
    wider = torch.promote_types(a.dtype, b.dtype)
    if not (is_floating(a) and is_floating(b)) or wider not in (a.dtype, b.dtype):
        return None
    return (b, a) if wider == a.dtype else (a, b)
