"""The operations of the suite `quantised`: norms and gates with float8 results, and PyTorch's chains beside them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import kernel_fusion as kf
from kernel_fusion.bench.workloads import EPS, Argument, Dropout, Inputs, Operation, Workload
from kernel_fusion.core.quantize import BLOCK, LARGEST
from kernel_fusion.testing import unfused
from kernel_fusion.testing.oracle import Reference

CODES = torch.float8_e4m3fn
GIVEN = 2.0**-6  # a scale that clamps little of what a norm gives
_Call = Callable[..., tuple[Tensor, ...]]  # what is quantised, and what else there is


def _norm(x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    return (unfused.staged_norm(x, None, x.shape[-1:], weight, None, EPS, rms=True)[0],)


def _add_norm(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    return unfused.staged_norm(x, residual, x.shape[-1:], weight, None, EPS, rms=True)


def _gate(gate: Tensor, value: Tensor) -> tuple[Tensor, ...]:
    return (F.silu(gate) * value,)


def _ours_norm(x: Tensor, weight: Tensor, **options: Any) -> tuple[Any, ...]:
    return (kf.rms_norm(x, x.shape[-1:], weight, EPS, **options),)


def _ours_add_norm(x: Tensor, residual: Tensor, weight: Tensor, **options: Any) -> tuple[Any, ...]:
    return kf.add_rms_norm(x, residual, x.shape[-1:], weight, EPS, **options)


def _ours_gate(gate: Tensor, value: Tensor, **options: Any) -> tuple[Any, ...]:
    return (kf.gated_act(gate, value, "silu", **options),)


def _scale(v: Tensor, per: str | int) -> Tensor:
    """The scale of every element of v, as PyTorch's users write it; of a row or block once."""
    if per == "tensor":
        return torch.full((), GIVEN, dtype=v.dtype, device=v.device)
    parts = v.unflatten(-1, (-1, BLOCK)) if per == BLOCK else v
    return parts.abs().amax(-1, keepdim=True) / LARGEST[CODES]


def _quotients(v: Tensor, per: str | int) -> tuple[Tensor, Tensor]:
    """The values that are rounded to codes, and the scales."""
    v = v if v.dtype == torch.float64 else v.float()
    scale = _scale(v, per)
    parts = v.unflatten(-1, (-1, BLOCK)) if per == BLOCK else v
    clamped = (parts / scale).clamp(-LARGEST[CODES], LARGEST[CODES]).reshape(v.shape)
    return clamped, scale.squeeze(-1) if per == BLOCK else scale


def _named(names: Sequence[str], codes: Tensor, scale: Tensor, rest: Sequence[Tensor]) -> dict[str, Tensor]:
    return dict(zip(names, (codes, *([scale] if "scale" in names else []), *rest), strict=True))


def _operation(
    name: str, verb: str, per: str | int, tensors: Sequence[str], theirs: _Call, ours: Callable[..., tuple[Any, ...]]
) -> Operation:
    names = ("values", *(["scale"] if per != "tensor" else []), *(["h"] if verb.startswith("add_") else []))

    def arguments(shape: tuple[int, ...], dtype: torch.dtype) -> list[Argument]:
        row = Argument("weight", shape[-1:], dtype, 1.0, shared=True, gradient=False)
        given = [Argument(each, shape, dtype, gradient=False) for each in tensors]
        return given if verb == "gated_act" else [*given, row]

    def chain(*args: Tensor) -> dict[str, Tensor]:
        v, *rest = theirs(*args)
        clamped, scale = _quotients(v, per)
        return _named(names, clamped.to(CODES), scale, rest)

    def pytorch(_: Dropout, *args: Tensor) -> tuple[Tensor, ...]:
        return tuple(chain(*args).values())

    def fused(*args: Tensor, p: float, backend: str | None) -> tuple[Tensor, ...]:
        given = torch.full((), GIVEN, device=args[0].device) if per == "tensor" else None
        codes, *rest = ours(*args, out_dtype=kf.Quantize(CODES, given, per), backend=backend)
        return tuple(_named(names, codes.values, codes.scale, rest).values())

    def judged(_: Workload, inputs: Inputs) -> tuple[Reference, dict[str, Tensor]]:
        args = tuple(inputs.arguments.values())
        v, *rest = theirs(*(t.double() for t in args))
        exact = _named(names, *_quotients(v, per), rest)
        return {name: t.cpu().numpy() for name, t in exact.items()}, chain(*args)

    kind = {"tensor": "given scale", "row": "per row"}.get(str(per), f"per {per}")
    return Operation(f"{name}, {kind}", verb, arguments, pytorch, fused, results=names, judged=judged)


def _each(*what: Any) -> tuple[Operation, ...]:
    name, verb, *rest = what
    return tuple(_operation(name, verb, per, *rest) for per in ("tensor", "row", BLOCK))


NORMS = (
    *_each("rms_norm", "rms_norm", ("x",), _norm, _ours_norm),
    *_each("add+rms_norm", "add_rms_norm", ("x", "residual"), _add_norm, _ours_add_norm),
)
GATES = _each("silu gate", "gated_act", ("gate", "value"), _gate, _ours_gate)
