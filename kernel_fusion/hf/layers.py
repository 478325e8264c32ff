"""Layers for Hugging Face `kernels`: each is a stateless `forward` for a model's own layer, which is `self`.

Layers of one name round differently, so each class of a model is tried once before it is served.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from kernel_fusion.functional import act_dropout, gated_rms_norm, rms_norm

_EPS = 1e-6
_roundings: dict[type[nn.Module], str] = {}


class _Layer(nn.Module):
    can_torch_compile = True
    has_backward = True


class RMSNorm(_Layer):
    """The norm of Llama and most others."""

    def forward(self: Any, hidden_states: Tensor) -> Tensor:
        """Normalise, rounding as the layer's class does."""
        weight, eps = self.weight, self.variance_epsilon
        rounding = rounding_of(type(self), _norm)
        mixed = rounding == "hf" and weight.dtype != hidden_states.dtype  # the product is promoted
        out_dtype = torch.promote_types(weight.dtype, hidden_states.dtype) if mixed else None
        return rms_norm(hidden_states, weight.shape, weight, eps, out_dtype=out_dtype, rounding=rounding)


class RMSNormZeroCentered(_Layer):
    """The norm whose weight is an offset from one."""

    def forward(self: Any, x: Tensor) -> Tensor:
        """Normalise."""
        rounding = rounding_of(type(self), _zero_centred)
        return rms_norm(x, self.weight.shape, self.weight, self.eps, weight_offset=1.0, rounding=rounding)


class RMSNormGated(_Layer):
    """The norm of gated delta nets, multiplied by an activation of the gate."""

    def forward(self: Any, hidden_states: Tensor, gate: Tensor) -> Tensor:
        """Normalise and gate."""
        weight, eps, activation = self.weight, self.variance_epsilon, self.activation
        rounding = rounding_of(type(self), _gated)
        return gated_rms_norm(
            hidden_states, gate, weight.shape, weight, eps, gate_activation=activation, rounding=rounding
        )


def _activation(layer: str, name: str) -> type[_Layer]:
    def forward(self: Any, input: Tensor) -> Tensor:
        return act_dropout(input, name, training=False)

    return type(layer, (_Layer,), {"forward": forward, "__module__": __name__})


GeLU = _activation("GeLU", "gelu")
GeluTanh = _activation("GeluTanh", "gelu_tanh")
NewGELU = _activation("NewGELU", "gelu_tanh")
FastGELU = _activation("FastGELU", "gelu_tanh")  # the same, factored differently
QuickGELU = _activation("QuickGELU", "quick_gelu")
SiLU = _activation("SiLU", "silu")

# The names under which models look up layers.
LAYERS = tuple(
    layer.__name__
    for layer in (RMSNorm, RMSNormZeroCentered, RMSNormGated, GeLU, GeluTanh, NewGELU, FastGELU, QuickGELU, SiLU)
)


def _norm(rounding: str, x: Tensor, weight: Tensor, offset: float = 0.0) -> Tensor:
    return rms_norm(x, weight.shape, weight, _EPS, weight_offset=offset, rounding=rounding, backend="eager")


_zero_centred = partial(_norm, offset=1.0)


def _gated(rounding: str, x: Tensor, weight: Tensor, gate: Tensor | None = None) -> Tensor:
    gate = x.flip(0) if gate is None else gate
    return gated_rms_norm(x, gate, weight.shape, weight, _EPS, rounding=rounding, backend="eager")


def rounding_of(kind: type[nn.Module], definition: Callable[..., Tensor]) -> str:
    """The `rounding` with which `definition` computes what layers of the class do.

    Raises:
        RuntimeError: neither "hf" nor "once" does.
    """
    if kind not in _roundings:
        _roundings[kind] = _tried(kind, definition)
    return _roundings[kind]


setattr(rounding_of, "_dynamo_marked_constant", True)  # noqa: B010  # tracers must not follow the trial


@torch.no_grad()
def _tried(kind: type[nn.Module], definition: Callable[..., Tensor]) -> str:
    layer: Any = kind.__new__(kind)
    nn.Module.__init__(layer)
    generator = torch.Generator("cpu").manual_seed(0)
    x, weight = (
        torch.randn(shape, generator=generator, device="cpu", dtype=torch.float32).to(torch.bfloat16)
        for shape in ((8, 256), (256,))
    )
    layer.weight = nn.Parameter(weight)
    layer.variance_epsilon = layer.eps = _EPS
    layer.activation = "silu"
    rows = (x, x.flip(0)) if definition is _gated else (x,)
    theirs = kind.forward(layer, *rows)
    for rounding in ("hf", "once"):
        # The wrong rounding changes a fifth of the elements, another order of sums 0.1 %.
        if theirs.dtype == x.dtype and (definition(rounding, x, weight) != theirs).double().mean() < 0.01:
            return rounding
    raise RuntimeError(f"kernel_fusion.hf: {kind.__name__} computes another norm than the layer that is to serve it")
