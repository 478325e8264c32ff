"""Patched norms: the form that was found, and the forward that computes it.

A form has a case for each pair of dtypes (input, weight) in which the module and our verb agree. All other calls run
the module's own forward: other dtypes, other arguments, an autocast that was not examined.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
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

    def call(
        self, case: Case, x: Tensor, *gate: Tensor, weight: Any, bias: Any, eps: float, backend: str | None = None
    ) -> Tensor:
        """Call the verb of this form."""
        shape = self.shape or x.shape[-1:]
        options: dict[str, Any] = {"weight_offset": self.weight_offset, "backend": backend, **case._asdict()}
        if self.gate is not None:
            gated: Callable[..., Tensor] = gated_rms_norm if self.rms else gated_layer_norm
            options |= {"gate_activation": self.gate.activation, "gate_first": self.gate.first}
            options |= {"group_size": self.gate.group_size, "weight": weight, "bias": bias, "eps": eps}
            return gated(x, *gate, shape, **options)
        if self.rms:
            return rms_norm(x, shape, weight, eps, bias=bias, **options)
        return layer_norm(x, shape, weight, bias, eps, **options)

    def add(
        self, case: Case, x: Tensor, residual: Tensor, *, weight: Any, bias: Any, eps: float
    ) -> tuple[Tensor, Tensor]:
        """Call the verb of this form that adds first; the pair of the sum's norm and the sum."""
        verb: Callable[..., Any] = add_rms_norm if self.rms else add_layer_norm
        shape = self.shape or x.shape[-1:]
        options = {"bias": bias, "eps": eps, "weight_offset": self.weight_offset, **case._asdict()}
        return verb(x, residual, shape, weight, **options)  # type: ignore[no-any-return]

    def fits(self, x: Any) -> bool:
        """Whether x is a tensor of rows such as the form was examined with."""
        if not isinstance(x, Tensor) or x.dim() == 0:
            return False
        shape = self.shape or tuple(x.shape[-1:])
        return tuple(x.shape[-len(shape) :]) == shape and (not self.dims or x.dim() - len(shape) in self.dims)


def _case(cases: Mapping[Key, Case], x: Tensor, weight: Tensor | None) -> Case | None:
    """The case of a call, or None if it was not examined."""
    autocast = torch.is_autocast_enabled(x.device.type)
    if autocast and x.device.type != "cuda":
        return None
    return cases.get(Key(x.dtype, None if weight is None else weight.dtype, autocast))


def _forward(form: NormForm, original: type[nn.Module]) -> Callable[..., Any]:
    cases = dict(form.cases)

    def forward(self: nn.Module, *args: Any, residual: Tensor | None = None, **kwargs: Any) -> Any:
        """The norm; with a residual, the pair of the sum's norm and the sum."""
        if len(args) != 1 or kwargs or not form.fits(args[0]):
            return original.forward(self, *args, **kwargs)
        (x,) = args
        weight, bias, eps = form.parts(self)
        case = _case(cases, x if residual is None else residual, weight)
        if residual is None:
            if case is None:
                return original.forward(self, x)
            return form.call(case, x, weight=weight, bias=bias, eps=eps)
        if case is None:
            h = x + residual
            return original.forward(self, h), h
        return form.add(case, x, residual, weight=weight, bias=bias, eps=eps)

    return forward


def _gated_forward(form: NormForm, original: type[nn.Module]) -> Callable[..., Any]:
    cases, gating = dict(form.cases), form.gate
    assert gating is not None

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        gate = args[1] if len(args) == 2 else kwargs.get(gating.name)
        if len(args) + len(kwargs) == 2 and isinstance(gate, Tensor) and args and form.fits(args[0]):
            weight, bias, eps = form.parts(self)
            case = _case(cases, args[0], weight)
            if case is not None and gate.shape == args[0].shape and gate.dtype == args[0].dtype:
                return form.call(case, args[0], gate, weight=weight, bias=bias, eps=eps)
        return original.forward(self, *args, **kwargs)

    return forward
