"""Patched norms: the form that was found, and the forward that computes it.

A form has a case for each pair of dtypes (input, weight) in which the module and our verb agree. All other calls run
the module's own forward: other dtypes, other arguments, an autocast that was not examined.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from kernel_fusion.functional import (
    add_layer_norm,
    add_rms_norm,
    gated_layer_norm,
    gated_rms_norm,
    layer_norm,
    rms_norm,
)


class Gate(NamedTuple):
    """How a second argument gates a norm: its name in the module's forward, and `kf.gated_rms_norm`'s arguments."""

    name: str
    activation: str | None
    first: bool
    group_size: int | None


class Case(NamedTuple):
    """How a call rounds, and its result's dtype; None leaves that to the verb."""

    rounding: str
    out_dtype: torch.dtype | None


class Key(NamedTuple):
    """The properties of a call that choose its case."""

    input: torch.dtype
    weight: torch.dtype | None
    autocast: bool  # CUDA's


@dataclass(frozen=True)
class NormForm:
    """A norm as arguments of our verbs."""

    rms: bool
    shape: tuple[int, ...] | None  # None: the last dimension, whatever its size
    weight: str | None  # the name of the parameter
    bias: str | None
    eps: str | float  # the name of the attribute, or the number
    weight_offset: float
    gate: Gate | None = None
    dims: tuple[int, ...] = ()  # allowed numbers of leading dimensions of x; empty: any
    cases: tuple[tuple[Key, Case], ...] = ()

    def __deepcopy__(self, memo: Any) -> NormForm:
        return self

    def __str__(self) -> str:
        verb = ("gated_" if self.gate else "") + ("rms_norm" if self.rms else "layer_norm")
        rounding = "rounding='hf'" if any(case.rounding == "hf" for _, case in self.cases) else ""
        offset = f"weight_offset={self.weight_offset}" if self.weight_offset else ""
        return ", ".join(filter(None, (verb, rounding, offset)))

    def methods(self, original: type[nn.Module]) -> Mapping[str, Callable[..., Any]]:
        """The methods of a patched norm."""
        return {"forward": _gated_forward(self, original) if self.gate else _forward(self, original)}

    def parts(self, module: nn.Module) -> tuple[Tensor | None, Tensor | None, float]:
        """A module's weight, bias and eps, read at each call, because they may change."""
        weight = None if self.weight is None else getattr(module, self.weight)
        bias = None if self.bias is None else getattr(module, self.bias)
        return weight, bias, getattr(module, self.eps) if isinstance(self.eps, str) else self.eps

    def verb(self, case: Case, *, adds: bool = False, backend: str | None = None) -> Callable[..., Any]:
        """The verb of this form: of an input (and gate), or of input and residual, then shape, weight, bias and eps."""
        options: dict[str, Any] = {"weight_offset": self.weight_offset, "backend": backend, **case._asdict()}
        if self.gate is not None:
            options |= {"gate_activation": self.gate.activation, "gate_first": self.gate.first}
            options |= {"group_size": self.gate.group_size}
            return partial(gated_rms_norm if self.rms else gated_layer_norm, **options)
        if adds:
            return partial(add_rms_norm if self.rms else add_layer_norm, **options)
        return partial(rms_norm if self.rms else layer_norm, **options)

    def fits(self, x: Any) -> bool:
        """Whether x is a tensor of rows such as the form was examined with."""
        if not isinstance(x, Tensor):
            return False
        sizes = x.shape
        num_dims = len(self.shape or (1,))
        if not sizes or (self.shape is not None and sizes[-num_dims:] != self.shape):
            return False
        return not self.dims or len(sizes) - num_dims in self.dims


Verb = Callable[..., Any]


def _verbs(form: NormForm, *, adds: bool = False) -> dict[tuple[Any, ...], Verb]:
    return {key: form.verb(case, adds=adds) for key, case in form.cases}


def _of_call(verbs: Mapping[tuple[Any, ...], Verb], x: Tensor, weight: Tensor | None) -> Verb | None:
    """The verb of a call's case, or None if it was not examined."""
    device = x.device.type
    autocast = torch.is_autocast_enabled(device)
    if autocast and device != "cuda":
        return None
    return verbs.get((x.dtype, None if weight is None else weight.dtype, autocast))


def _forward(form: NormForm, original: type[nn.Module]) -> Callable[..., Any]:
    norms, sums = _verbs(form), _verbs(form, adds=True)

    def forward(self: nn.Module, *args: Any, residual: Tensor | None = None, **kwargs: Any) -> Any:
        """The norm; with a residual, the pair of the sum's norm and the sum."""
        if len(args) != 1 or kwargs or not form.fits(args[0]):
            return original.forward(self, *args, **kwargs)
        (x,) = args
        weight, bias, eps = form.parts(self)
        shape = form.shape or x.shape[-1:]
        if residual is None:
            norm = _of_call(norms, x, weight)
            return norm(x, shape, weight=weight, bias=bias, eps=eps) if norm else original.forward(self, x)
        add = _of_call(sums, residual, weight)
        if add:
            return add(x, residual, shape, weight=weight, bias=bias, eps=eps)
        h = x + residual
        return original.forward(self, h), h

    return forward


def _gated_forward(form: NormForm, original: type[nn.Module]) -> Callable[..., Any]:
    norms, gating = _verbs(form), form.gate
    assert gating is not None

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        gate = args[1] if len(args) == 2 else kwargs.get(gating.name)
        if len(args) + len(kwargs) == 2 and isinstance(gate, Tensor) and args and form.fits(args[0]):
            (x, *_), (weight, bias, eps) = args, form.parts(self)
            norm = _of_call(norms, x, weight)
            if norm and gate.shape == x.shape and gate.dtype == x.dtype:
                return norm(x, gate, form.shape or x.shape[-1:], weight=weight, bias=bias, eps=eps)
        return original.forward(self, *args, **kwargs)

    return forward
