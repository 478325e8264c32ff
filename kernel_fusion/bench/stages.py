"""The operations of the suite `stages`, norms with what transformers put around them: (batch, rows, columns)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import kernel_fusion as kf
from kernel_fusion.bench.workloads import EPS, Argument, Dropout, Operation
from kernel_fusion.testing import unfused

BATCH = 2  # samples, each with numbers of its own
# Rows of a sample, and columns, of an image's and a video's tokens.
SIZES = ((2304, 3072), (8192, 4096), (37800, 5120))
# Rows and columns of what is gated: heads of linear attention, and hidden states.
GATED_SIZES = ((1_000_000, 128), (65536, 4096))
QUICK_SIZES = ((256, 1024),)


def _chunks(shape: tuple[int, ...], dtype: torch.dtype, *names: str) -> list[Argument]:
    """A row for each sample; the first two are halves of one projection."""
    halves = ("first half", "second half", "contiguous")
    return [
        Argument(name, (shape[0], 1, shape[-1]), dtype, std=0.5, layout=layout)
        for name, layout in zip(names, halves, strict=False)
    ]


def _modulated(norm: str) -> Operation:
    def arguments(shape: tuple[int, ...], dtype: torch.dtype) -> list[Argument]:
        return [Argument("x", shape, dtype), *_chunks(shape, dtype, "scale", "shift")]

    def pytorch(_: Dropout, x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        y = unfused.norm(x, x.shape[-1:], None, None, EPS, rms=norm == "rms_norm")
        return unfused.modulated(y, scale, shift)

    def fused(x: Tensor, scale: Tensor, shift: Tensor, p: float, backend: str | None) -> Any:
        return getattr(kf, f"modulated_{norm}")(x, x.shape[-1:], scale, shift, eps=EPS, backend=backend)

    return Operation(f"modulated {norm}", f"modulated_{norm}", arguments, pytorch, fused)


def _add_modulated() -> Operation:
    def arguments(shape: tuple[int, ...], dtype: torch.dtype) -> list[Argument]:
        tensors = [Argument(name, shape, dtype) for name in ("x", "residual")]
        return [*tensors, *_chunks(shape, dtype, "scale", "shift", "gate")]

    def pytorch(_: Dropout, x: Tensor, residual: Tensor, scale: Tensor, shift: Tensor, gate: Tensor) -> Any:
        h = residual + gate * x
        return unfused.modulated(unfused.norm(h, x.shape[-1:], None, None, EPS, rms=False), scale, shift), h

    def fused(x: Tensor, residual: Tensor, scale: Tensor, *rest: Tensor, p: float, backend: str | None) -> Any:
        shift, gate = rest
        options: dict[str, Any] = {"eps": EPS, "gate": gate, "backend": backend}
        return kf.add_modulated_layer_norm(x, residual, x.shape[-1:], scale, shift, **options)

    name, verb = "gated addition, modulated layer_norm", "add_modulated_layer_norm"
    return Operation(name, verb, arguments, pytorch, fused, ("y", "h"))


def _gated() -> Operation:
    def arguments(shape: tuple[int, ...], dtype: torch.dtype) -> list[Argument]:
        weight = Argument("weight", shape[-1:], dtype, 1.0, shared=True)
        return [Argument("x", shape, dtype), Argument("gate", shape, dtype), weight]

    def pytorch(_: Dropout, x: Tensor, gate: Tensor, weight: Tensor) -> Tensor:
        return unfused.gated_norm(x, gate, x.shape[-1:], weight, None, EPS, rms=True)

    def fused(x: Tensor, gate: Tensor, weight: Tensor, p: float, backend: str | None) -> Tensor:
        return kf.gated_rms_norm(x, gate, x.shape[-1:], weight, EPS, backend=backend)

    return Operation("gated rms_norm", "gated_rms_norm", arguments, pytorch, fused)


GATED = (_gated(),)
MODULATED = (_modulated("layer_norm"), _add_modulated())
MODULATED_RMS = (_modulated("rms_norm"),)  # at one size: its kernel is that of LayerNorm
