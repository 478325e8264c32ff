"""The operations of the suite `quantised`: norms and gates with float8 results, and PyTorch's chains beside them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

import kernel_fusion as kf
from kernel_fusion.core.quantize import BLOCK, LARGEST
from kernel_fusion.testing.oracle import Reference
from kernel_fusion.testing.unfused import keep_all
from kernel_fusion_bench import operations
from kernel_fusion_bench.workloads import Argument, Dropout, Inputs, Operation, Workload

CODES = torch.float8_e4m3fn
GIVEN = 2.0**-6  # a scale that clamps little of what a norm gives
_KINDS: dict[str | int, str] = {"tensor": "given scale", "row": "per row", BLOCK: f"per {BLOCK}"}


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


def _several(results: Any) -> Sequence[Any]:
    return (results,) if isinstance(results, Tensor | kf.Quantized) else results


def _quantised(base: Operation, per: str | int) -> Operation:
    """An operation whose first result becomes codes, with their scales if these are not given."""
    names = ("values", *(["scale"] if per != "tensor" else []), *base.results[1:])

    def named(codes: Tensor, scale: Tensor, rest: Sequence[Tensor]) -> dict[str, Tensor]:
        return dict(zip(names, (codes, *([scale] if "scale" in names else []), *rest), strict=True))

    def arguments(shape: tuple[int, ...], dtype: torch.dtype) -> list[Argument]:
        return [replace(a, gradient=False, layout="contiguous") for a in base.arguments(shape, dtype)]

    def unfused(*args: Tensor) -> dict[str, Tensor]:
        v, *rest = _several(base.pytorch(keep_all, *args))
        clamped, scale = _quotients(v, per)
        return named(clamped.to(CODES), scale, rest)

    def pytorch(_: Dropout, *args: Tensor) -> tuple[Tensor, ...]:
        return tuple(unfused(*args).values())

    def fused(*args: Tensor, p: float, backend: str | None) -> tuple[Tensor, ...]:
        given = torch.full((), GIVEN, device=args[0].device) if per == "tensor" else None
        out_dtype = kf.Quantize(CODES, given, per=per)
        codes, *rest = _several(base.fused(*args, p=p, backend=backend, out_dtype=out_dtype))
        return tuple(named(codes.values, codes.scale, rest).values())

    def judged(_: Workload, inputs: Inputs) -> tuple[Reference, dict[str, Tensor]]:
        args = tuple(inputs.arguments.values())
        v, *rest = _several(base.pytorch(keep_all, *(t.double() for t in args)))
        exact = named(*_quotients(v, per), rest)
        return {name: t.cpu().numpy() for name, t in exact.items()}, unfused(*args)

    return Operation(f"{base.name}, {_KINDS[per]}", base.verb, arguments, pytorch, fused, results=names, judged=judged)


def _each(*bases: str) -> tuple[Operation, ...]:
    return tuple(_quantised(operations.BY_NAME[base], per) for base in bases for per in _KINDS)


NORMS, GATES = _each("rms_norm", "add+rms_norm"), _each("silu gate")
