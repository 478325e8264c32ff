"""The launcher's requests: rows of numbers, and the specs that they stand for.

The structures mirror native/extension/cuda/requests.h field by field, which a test compares. A family adds its fields
and its entry in `DECODERS`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any, ClassVar

from kernel_fusion.core.activations import CODES
from kernel_fusion.core.families import (
    BITS,
    COMBINES,
    DROPOUTS,
    MAPS,
    MODES,
    Operand,
    PointwiseAccess,
    PointwiseSpec,
    ReduceAccess,
    ReduceSpec,
    RowAccess,
    SoftmaxAccess,
    SoftmaxBwdSpec,
    SoftmaxSpec,
)
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


class PointwiseFields(ctypes.Structure):
    """`PointwiseFields` of requests.h."""

    _fields_: ClassVar = [
        *_int32("combine activation dropout dims vec lanes"),
        *((name, ctypes.c_int32 * 5) for name in ("type", "mode", "align")),
    ]


class ReduceFields(ctypes.Structure):
    """`ReduceFields` of requests.h."""

    _fields_: ClassVar = _int32("map in out acc lanes threads capacity vec contiguous chunked nested align align_out")


class SoftmaxFields(ctypes.Structure):
    """`SoftmaxFields` of requests.h."""

    _fields_: ClassVar = _int32("x mask causal vec capacity mask_repeats strided_x strided_mask align_x align_mask")


class SoftmaxBwdFields(ctypes.Structure):
    """`SoftmaxBwdFields` of requests.h."""

    _fields_: ClassVar = _int32("dy y dx leaves_out vec capacity strided_dy strided_y align_dy align_y")


_BOOLEAN_MASK = len(DTYPES)  # SoftmaxFields::kBooleanMask
_BITS = len(DTYPES)  # PointwiseFields::kBits
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


def _pointwise(fields: Any) -> tuple[PointwiseSpec, PointwiseAccess]:
    f = PointwiseFields.from_buffer_copy(fields)
    y, second, dy, a, b = (BITS if code == _BITS else _dtype(code) for code in f.type)
    assert a is not None
    chain = (COMBINES[f.combine], list(CODES)[f.activation], f.dropout > 0)
    if dy is None:
        spec = PointwiseSpec(*chain, a, b, y=y, bits=second == BITS)
    else:
        spec = PointwiseSpec(*chain, a, b, dy=dy, da=y, db=second)
    operands = tuple(Operand(MODES[mode], align) for mode, align in zip(f.mode, f.align, strict=True))
    return spec, PointwiseAccess(f.dims, f.vec, operands, f.lanes, DROPOUTS[f.dropout] == "aligned")


def _reduce(fields: Any) -> tuple[ReduceSpec, ReduceAccess]:
    f = ReduceFields.from_buffer_copy(fields)
    spec = ReduceSpec(MAPS[f.map], DTYPES[getattr(f, "in")], DTYPES[f.out], DTYPES[f.acc])
    ways = (bool(f.contiguous), bool(f.chunked), bool(f.nested))
    return spec, ReduceAccess(f.vec, f.lanes, f.threads, f.capacity, *ways, f.align, f.align_out)


def _softmax(fields: Any) -> tuple[SoftmaxSpec, SoftmaxAccess]:
    f = SoftmaxFields.from_buffer_copy(fields)
    mask = "b8" if f.mask == _BOOLEAN_MASK else _dtype(f.mask)
    x, mask_rows = RowAccess(f.align_x, bool(f.strided_x)), RowAccess(f.align_mask, bool(f.strided_mask))
    access = SoftmaxAccess(f.vec, f.capacity, x, mask_rows, bool(f.mask_repeats))
    return SoftmaxSpec(DTYPES[f.x], mask, bool(f.causal)), access


def _softmax_bwd(fields: Any) -> tuple[SoftmaxBwdSpec, SoftmaxAccess]:
    f = SoftmaxBwdFields.from_buffer_copy(fields)
    y, dy = RowAccess(f.align_y, bool(f.strided_y)), RowAccess(f.align_dy, bool(f.strided_dy))
    spec = SoftmaxBwdSpec(DTYPES[f.dy], DTYPES[f.y], DTYPES[f.dx], bool(f.leaves_out))
    return spec, SoftmaxAccess(f.vec, f.capacity, y, dy)


# By kernel number, the order of `Kernel` in launcher.h.
DECODERS: dict[int, Callable[[Any], tuple[Any, Any]]] = {
    0: lambda fields: _row_norm(fields, "forward"),
    1: lambda fields: _row_norm(fields, "backward"),
    2: lambda fields: _row_norm(fields, "backward_weight"),
    3: _sum_partials,
    4: _pointwise,
    5: _pointwise,
    6: _reduce,
    7: _softmax,
    8: _softmax_bwd,
}


def decode(request: Request) -> tuple[Any, Any]:
    """The spec and access that a request stands for."""
    return DECODERS[request.kernel](request.fields)
