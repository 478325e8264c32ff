"""The launcher's requests: rows of numbers, and the specs that they stand for.

The structures mirror native/extension/cuda/requests.h field by field, which a test compares. A family adds its fields
and its entry in `DECODERS`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any, ClassVar

from kernel_fusion.core.activations import CODES
from kernel_fusion.core.spec import DTYPES, Access, Direction, RowNormSpec, SumPartialsSpec


class Request(ctypes.Structure):
    """`KernelRequest` of launcher.h."""

    _fields_: ClassVar = [("device", ctypes.c_int32), ("kernel", ctypes.c_int32), ("fields", ctypes.c_int32 * 22)]


def _int32(names: str) -> list[tuple[str, Any]]:
    return [(name, ctypes.c_int32) for name in names.split()]


class RowNormFields(ctypes.Structure):
    """`RowNormFields` of requests.h."""

    _fields_: ClassVar = _int32(
        "cols rms x y weight bias flags align_x align_y align_weight align_dx "
        "residual pre_activation activation align_residual align_pre_x"
    )


class RowNormFlag:
    """`RowNormFields::Flag`."""

    STATS, OFFSET, DX, DWEIGHT, DBIAS, STRIDED_X, STRIDED_Y = (1 << i for i in range(7))
    DROPOUT, DH, DRESIDUAL, STRIDED_RESIDUAL, STRIDED_PRE_X = (1 << i for i in range(7, 12))


class SumPartialsFields(ctypes.Structure):
    """`SumPartialsFields` of requests.h."""

    _fields_: ClassVar = _int32("cols acc first second")


_ACTIVATION_NAMES = list(CODES)


def _dtype(code: int) -> str | None:
    return None if code < 0 else DTYPES[code]


def _row_norm(fields: Any, direction: Direction) -> tuple[RowNormSpec, Access]:
    f, flags = RowNormFields.from_buffer_copy(fields), RowNormFlag
    if direction == "forward" and not f.flags & flags.STATS:
        direction = "inference"
    spec = RowNormSpec(
        direction=direction,
        rms=bool(f.rms),
        cols=f.cols,
        x=DTYPES[f.x],
        y=DTYPES[f.y],
        weight=_dtype(f.weight),
        bias=_dtype(f.bias),
        offset=bool(f.flags & flags.OFFSET),
        grads=(bool(f.flags & flags.DX), bool(f.flags & flags.DWEIGHT), bool(f.flags & flags.DBIAS)),
        residual=_dtype(f.residual),
        pre_activation=_ACTIVATION_NAMES[f.pre_activation],
        activation=_ACTIVATION_NAMES[f.activation],
        dropout=bool(f.flags & flags.DROPOUT),
        dh=bool(f.flags & flags.DH),
        dresidual=bool(f.flags & flags.DRESIDUAL),
    )
    access = Access(
        x=f.align_x,
        y=f.align_y,
        weight=f.align_weight,
        dx=f.align_dx,
        strided_x=bool(f.flags & flags.STRIDED_X),
        strided_y=bool(f.flags & flags.STRIDED_Y),
        residual=f.align_residual,
        pre_x=f.align_pre_x,
        strided_residual=bool(f.flags & flags.STRIDED_RESIDUAL),
        strided_pre_x=bool(f.flags & flags.STRIDED_PRE_X),
    )
    return spec, access


def _sum_partials(fields: Any) -> tuple[SumPartialsSpec, Access]:
    f = SumPartialsFields.from_buffer_copy(fields)
    return SumPartialsSpec(f.cols, DTYPES[f.acc], _dtype(f.first), _dtype(f.second)), Access()


# By kernel number, the order of `Kernel` in launcher.h.
DECODERS: dict[int, Callable[[Any], tuple[Any, Any]]] = {
    0: lambda fields: _row_norm(fields, "forward"),
    1: lambda fields: _row_norm(fields, "backward"),
    2: lambda fields: _row_norm(fields, "backward_weight"),
    3: _sum_partials,
}


def decode(request: Request) -> tuple[Any, Any]:
    """The spec and access that a request stands for."""
    return DECODERS[request.kernel](request.fields)
