"""Called by rewritten methods: one pass if that is the same, else the method's own expression."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from kernel_fusion.functional import bound, gated_act
from kernel_fusion.patching.swap import is_bare, is_changed, original_class

_FLOATING = (torch.float32, torch.bfloat16, torch.float16)


def identity(act: Any) -> Any:
    """The identity of an activation: a module's class, or the function itself."""
    return original_class(type(act)) if isinstance(act, nn.Module) else act


def gated_by(acts: dict[str, tuple[Any, str]]) -> Callable[[str, Any, Any, Any], Any]:
    """Make a function for `act(gate) * value`, in one pass for the examined activations."""
    in_one_pass = {text: (known, bound.gated_act(gated_act, name)) for text, (known, name) in acts.items()}

    def gated(text: str, act: Any, gate: Any, value: Any) -> Any:
        known, gate_by = in_one_pass[text]
        if (
            not torch.compiler.is_compiling()  # the compiler fuses this itself
            and identity(act) is known
            and (not isinstance(act, nn.Module) or is_bare(act))
            and _floating(gate)
            and _floating(value)
            and gate.shape == value.shape
        ):
            return gate_by(gate, value)
        return act(gate) * value

    return gated


def add_norm(norm: Any, a: Any, b: Any) -> tuple[Any, Any]:
    """`norm(a + b)` and `a + b`, in one pass if the norm is patched and has no hooks."""
    add = getattr(norm, "_kf_add", None) if is_changed(norm) and not torch.compiler.is_dynamo_compiling() else None
    if add is not None and is_bare(norm) and isinstance(a, Tensor) and isinstance(b, Tensor) and a.shape == b.shape:
        pair = _in_order(a, b)
        if pair is not None and (found := add(*pair)) is not None:
            return found  # type: ignore[no-any-return]
    h = a + b
    return norm(h), h


def _in_order(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor] | None:
    """The other term, and one that has the sum's dtype, if there is one."""
    if a.dtype is b.dtype:
        return b, a
    wider = torch.promote_types(a.dtype, b.dtype)
    if not (_floating(a) and _floating(b)) or wider not in (a.dtype, b.dtype):
        return None
    return (b, a) if wider == a.dtype else (a, b)


def _floating(x: Any) -> bool:
    return isinstance(x, Tensor) and x.dtype in _FLOATING
