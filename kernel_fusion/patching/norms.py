"""Patched norms: the form that was found, and the forward that computes it.

A form has a case for each pair of dtypes (input, weight) in which the module and our verb agree. All other calls run
the module's own forward: of other dtypes or arguments, under an unexamined autocast, or captured, as by torch.compile.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from kernel_fusion.core.spec import rounding_for
from kernel_fusion.functional import bound, gated_norm, modulated_norm, row_norm
from kernel_fusion.patching.agree import has_shape, in_order
from kernel_fusion.patching.reads import NOTHING, Reads
from kernel_fusion.patching.swap import Plan, Whole, is_captured

# Most written-out norms return the strides of their input, and PyTorch's norms contiguous memory.
KEPT, CONTIGUOUS = "kept", "contiguous"


class Gate(NamedTuple):
    """How a second argument gates a norm: its name in forward, and `kf.gated_rms_norm`'s arguments."""

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
class NormForm(Plan):
    """A norm as arguments of our verbs."""

    rms: bool
    shape: tuple[int, ...] | None  # None: the last dimension, whatever its size
    weight: str | None  # the name of the parameter
    bias: str | None
    eps: str | float  # the name of the attribute, or the number
    weight_offset: float
    gate: Gate | None = None
    dims: frozenset[int] = frozenset()  # the numbers of leading dimensions of x that were tried out
    strides: str | None = None  # of results: KEPT, CONTIGUOUS, or None if neither
    cases: tuple[tuple[Key, Case], ...] = ()
    reads: Reads = NOTHING

    def __str__(self) -> str:
        rounding = "rounding='hf'" if any(case.rounding == "hf" for _, case in self.cases) else ""
        offset = f"weight_offset={self.weight_offset}" if self.weight_offset else ""
        return ", ".join(filter(None, (self._name(), rounding, offset)))

    def read(self, original: type[nn.Module]) -> tuple[Any, ...]:
        """The functions that were examined."""
        return self.reads.now(original)

    def methods(self, original: type[nn.Module], whole: Whole) -> Mapping[str, Callable[..., Any]]:
        """The methods of a patched norm; the others are for what stands around it (sites.py)."""
        if self.gate:
            return {"forward": _gated_forward(self, original)}
        methods = {"forward": _forward(self, original), "_kf_add": _add(self, original)}
        return methods | {"_kf_modulate": _modulate(self, original)} if self.modulates else methods

    @property
    def modulates(self) -> bool:
        """Whether a modulation after it takes one pass: with a weight of its own it would take several."""
        return self.weight is None and self.bias is None and self.gate is None

    def parts(self, module: nn.Module) -> tuple[Tensor | None, Tensor | None, float]:
        """A module's weight, bias and eps, read at each call, because they may change."""
        own = module._parameters  # parametrised ones are elsewhere
        weight = bias = None
        if self.weight is not None and (weight := own.get(self.weight)) is None:
            weight = getattr(module, self.weight)
        if self.bias is not None and (bias := own.get(self.bias)) is None:
            bias = getattr(module, self.bias)
        return weight, bias, getattr(module, self.eps) if isinstance(self.eps, str) else self.eps

    def verb(
        self, case: Case, *, adds: bool = False, modulated: bool = False, backend: str | None = None
    ) -> Callable[..., Any]:
        """The verb of this form: of an input (and gate), or of input and residual, then shape, weight, bias and eps.

        That of a modulated norm takes scale and shift in place of weight and bias, and rounds once.
        """
        options: dict[str, Any] = {"out_dtype": case.out_dtype, "backend": backend}
        if not modulated:
            options |= {"weight_offset": self.weight_offset, "rounding": case.rounding}
        if self.gate is not None:
            options |= {"gate_activation": self.gate.activation, "gate_first": self.gate.first}
            options |= {"group_size": self.gate.group_size}
        home = gated_norm if self.gate else modulated_norm if modulated else row_norm
        return partial(getattr(home, self._name(adds, modulated)), **options)

    def _name(self, adds: bool = False, modulated: bool = False) -> str:
        """The name of the verb that computes this norm."""
        stages = "gated_" if self.gate else "modulated_" if modulated else ""
        return f"{'add_' if adds else ''}{stages}{'rms_norm' if self.rms else 'layer_norm'}"

    def bound(self, key: Key, case: Case, *, adds: bool = False) -> Verb:
        """The same verb with its options bound, for many calls."""
        options = self.rms, self.weight_offset, case.out_dtype, rounding_for(case.rounding, key.input)
        return (bound.add_norm if adds else bound.norm)(self.verb(case, adds=adds), *options)

    def num_dims(self, x: Any) -> int:
        """How many dimensions to normalise, or 0 if x is no tensor such as the form was examined with."""
        if not has_shape(x) or not (dims := x.dim()):
            return 0
        shape = self.shape
        found = 1 if shape is None else len(shape)
        if shape is not None and (x.size(-1) != shape[0] if found == 1 else x.shape[-found:] != shape):
            return 0
        return found if dims - found in self.dims else 0


Verb = Callable[..., Any]


def _strided(norm: Verb, x: Tensor, num_dims: int, *args: Any) -> Tensor | None:
    """The norm of x, with the strides of x if that is dense; None if its rows do not lie in one piece."""
    if type(x) is not Tensor or 0 in x.stride():
        return None
    order = sorted(range(x.dim()), key=x.stride().__getitem__, reverse=True)
    lead = x.dim() - num_dims
    if order[lead:] != list(range(lead, x.dim())):
        return None
    back = sorted(range(x.dim()), key=order.__getitem__)
    return norm(x.permute(order), num_dims, *args).permute(back)  # type: ignore[no-any-return]


def _of_call(verbs: Mapping[Any, Verb], x: Tensor, weight: Tensor | None) -> Verb | None:
    """The verb of a call's case, or None if it was not examined."""
    if x.is_cuda:
        autocast = torch.is_autocast_enabled("cuda")
    elif not x.is_meta and torch.is_autocast_enabled("cpu" if x.is_cpu else x.device.type):
        return None
    else:
        autocast = False
    return verbs.get((x.dtype, None if weight is None else weight.dtype, autocast))


def _forward(form: NormForm, original: type[nn.Module]) -> Callable[..., Any]:
    norms, holds = {key: form.bound(key, case) for key, case in form.cases}, form.reads.guard(original)
    contiguous, keeps = form.strides == CONTIGUOUS, form.strides == KEPT

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Normalise by the verb of the call's case; calls of other cases run the module's own forward."""
        if not is_captured() and len(args) == 1 and not kwargs and (num_dims := form.num_dims(x := args[0])):
            weight, bias, eps = form.parts(self)
            if (norm := _of_call(norms, x, weight)) and holds(self):
                if contiguous or x.is_contiguous():
                    return norm(x, num_dims, weight, bias, eps)
                if keeps and (y := _strided(norm, x, num_dims, weight, bias, eps)) is not None:
                    return y
        return original.forward(self, *args, **kwargs)

    return forward


def _add(form: NormForm, original: type[nn.Module]) -> Callable[..., Any]:
    sums, holds = {key: form.bound(key, case, adds=True) for key, case in form.cases}, form.reads.guard(original)

    def add(self: nn.Module, x: Tensor, residual: Tensor, dropout_p: float = 0.0) -> tuple[Tensor, Tensor] | None:
        """The norm of the sum, of x after dropout and residual, and the sum, if that was examined."""
        num_dims = form.num_dims(residual)
        if not num_dims or not (in_order(residual) and in_order(x)):
            return None
        weight, bias, eps = form.parts(self)
        norm = _of_call(sums, residual, weight) if holds(self) else None
        return norm(x, residual, num_dims, weight, bias, eps, dropout_p) if norm else None

    return add


def _wider(dtype: torch.dtype, other: torch.dtype) -> bool:
    """Whether `other` adds nothing to the fp32 of a stream."""
    return dtype is torch.float32 and other in (torch.bfloat16, torch.float16)


def _modulate(form: NormForm, original: type[nn.Module]) -> Callable[..., Any]:
    holds = form.reads.guard(original)
    norms = {
        key: bound.modulated_norm(form.verb(case, modulated=True), form.verb(case, adds=True, modulated=True), form.rms)
        for key, case in form.cases
        if rounding_for(case.rounding, key.input) == "once" and case.out_dtype in (None, key.input, torch.float32)
    }

    def modulate(
        self: nn.Module, x: Tensor, residual: Tensor | None, gate: Any, scale: Any, shift: Any
    ) -> tuple[Tensor, Tensor] | None:
        """The modulated norm of residual + gate * x, or of x, and what is normalised, if that was examined."""
        h = x if residual is None else residual
        if form.num_dims(h) != 1 or not in_order(h):
            return None
        dtype = h.dtype
        others = (x, scale, shift, gate) if residual is not None else (scale, shift)
        for p in others:
            if p is None:
                continue
            if not (isinstance(p, Tensor) and (p.dtype is dtype or _wider(dtype, p.dtype)) and in_order(p, p is not x)):
                return None
        norm = _of_call(norms, h, None) if holds(self) else None
        return norm(x, residual, gate, scale, shift, form.parts(self)[2]) if norm else None

    return modulate


def _gated_forward(form: NormForm, original: type[nn.Module]) -> Callable[..., Any]:
    norms, gating = {key: form.verb(case) for key, case in form.cases}, form.gate
    holds = form.reads.guard(original)
    assert gating is not None

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        gate = args[1] if len(args) == 2 else kwargs.get(gating.name)
        ours = not is_captured() and args and len(args) + len(kwargs) == 2
        num_dims = form.num_dims(args[0]) if ours else 0
        if num_dims and isinstance(gate, Tensor):
            (x, *_), (weight, bias, eps) = args, form.parts(self)
            norm = _of_call(norms, x, weight)
            fits = gate.shape == x.shape and gate.dtype == x.dtype and in_order(x) and in_order(gate)
            if norm and fits and holds(self):
                return norm(x, gate, x.shape[-num_dims:], weight=weight, bias=bias, eps=eps)
        return original.forward(self, *args, **kwargs)

    return forward
