"""The planner: answers the launcher's requests with compiled kernels, and compiles ahead.

The launcher (native/extension/cuda/launcher.cpp) asks once per kernel and process, through a C callback, with a row of
numbers; it gets back machine code and launch numbers. So the steady state runs no Python.
"""

from __future__ import annotations

import ctypes
import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from kernel_fusion.backends.cuda import compile as compiler
from kernel_fusion.backends.cuda.plan import Device, Plan, kernel_source, plan_row_norm, plan_sum_partials
from kernel_fusion.core.spec import DTYPES, ITEMSIZE, Access, Direction, RowNormSpec, SumPartialsSpec, dtype_name

Spec = RowNormSpec | SumPartialsSpec


class Request(ctypes.Structure):
    """`KernelRequest` of launcher.h, field by field."""

    _names = "device kernel cols rms x y weight bias flags align_x align_y align_weight align_dx"
    _fields_ = [(name, ctypes.c_int32) for name in _names.split()]


_NUMBERS = ("threads", "shared_bytes", "cluster", "per_block", "splits_weight", "persistent", "chained")


class Answer(ctypes.Structure):
    """`KernelPlan` of launcher.cpp, field by field."""

    _fields_ = [
        ("error", ctypes.c_char_p),
        ("image", ctypes.c_char_p),
        ("name", ctypes.c_char_p),
        *((name, ctypes.c_int32) for name in _NUMBERS),
    ]


class Flag:
    """`KernelRequest::Flag`."""

    STATS, OFFSET, DX, DWEIGHT, DBIAS, STRIDED_X, STRIDED_Y = (1 << i for i in range(7))


_CALLBACK = ctypes.CFUNCTYPE(None, ctypes.POINTER(Request), ctypes.POINTER(Answer))
_FORWARD, _BACKWARD, _BACKWARD_WEIGHT, _SUM_PARTIALS = range(4)

# What the launcher holds pointers to; never freed, as a process meets few kernels.
_kept: list[bytes] = []
# Of the whole process, because backward plans on autograd's threads.
_override: Callable[[RowNormSpec, Plan], Plan] | None = None


def install(library: ctypes.CDLL, devices: Iterable[int]) -> None:
    """Give the extension this planner; from then on its CUDA kernels are enabled on `devices`."""
    library.kf_set_planner(ctypes.cast(_callback, ctypes.c_void_p), sum(1 << index for index in devices))


def _answer(request: Any, answer: Any) -> None:
    # Nothing may be raised through C; every error becomes the launcher's.
    try:
        spec, access = decode(request.contents)
        device = Device.of(request.contents.device)
        plan, name, code = compiled(spec, access, device)
        for field, value in _launch_numbers(plan, device).items():
            setattr(answer.contents, field, value)
        _set_pointer(answer.contents, "image", code)
        _set_pointer(answer.contents, "name", name.encode())
    except BaseException as error:
        _set_pointer(answer.contents, "error", f"{type(error).__name__}: {error}".encode())


_callback = _CALLBACK(_answer)


def _set_pointer(answer: Answer, field: str, data: bytes) -> None:
    _kept.append(data)
    setattr(answer, field, data)


def _launch_numbers(plan: Plan, device: Device) -> dict[str, int]:
    return {
        "threads": plan.threads,
        "shared_bytes": plan.shared_bytes,
        "cluster": plan.cluster,
        "per_block": plan.per_block,
        "splits_weight": plan.splits_weight,
        "persistent": plan.persistent,
        "chained": device.has_dependent_launch,
    }


def decode(request: Request) -> tuple[Spec, Access]:
    """The spec and access that a request's numbers stand for."""

    def dtype(code: int) -> str | None:
        return None if code < 0 else DTYPES[code]

    if request.kernel == _SUM_PARTIALS:
        acc = DTYPES[request.x]
        return SumPartialsSpec(request.cols, acc, dtype(request.weight), dtype(request.bias)), Access()
    flags = request.flags
    direction: Direction = "forward" if flags & Flag.STATS else "inference"
    if request.kernel != _FORWARD:
        direction = "backward" if request.kernel == _BACKWARD else "backward_weight"
    spec = RowNormSpec(
        direction=direction,
        rms=bool(request.rms),
        cols=request.cols,
        x=DTYPES[request.x],
        y=DTYPES[request.y],
        weight=dtype(request.weight),
        bias=dtype(request.bias),
        offset=bool(flags & Flag.OFFSET),
        grads=(bool(flags & Flag.DX), bool(flags & Flag.DWEIGHT), bool(flags & Flag.DBIAS)),
    )
    access = Access(
        x=request.align_x,
        y=request.align_y,
        weight=request.align_weight,
        dx=request.align_dx,
        strided_x=bool(flags & Flag.STRIDED_X),
        strided_y=bool(flags & Flag.STRIDED_Y),
    )
    return spec, access


def plan_for(spec: Spec, access: Access, device: Device) -> Plan:
    """The plan of a spec on a device."""
    if isinstance(spec, SumPartialsSpec):
        return plan_sum_partials(spec)
    plan = plan_row_norm(spec, access, device)
    return plan if _override is None else _override(spec, plan)


def compiled(spec: Spec, access: Access, device: Device) -> tuple[Plan, str, bytes]:
    """Plan, kernel name and machine code of a spec on a device, compiled or from the disk cache."""
    plan = plan_for(spec, access, device)
    name, source = kernel_source(spec, access, plan)
    return plan, name, compiler.cubin(source, device.arch)


@contextmanager
def override_plan(change: Callable[[RowNormSpec, Plan], Plan]) -> Iterator[None]:
    """Within this context, in every thread, row-norm kernels run by `change(spec, plan)`. For tests and tuning."""
    from kernel_fusion.native import loader

    global _override
    _override = change
    loader.library().kf_forget_kernels()
    try:
        yield
    finally:
        _override = None
        loader.library().kf_forget_kernels()


def family(cols: int, x: str, weight: str | None, *, rms: bool, y: str | None = None) -> list[RowNormSpec]:
    """The specs of one norm: inference, forward and backward."""
    bias = None if rms else weight
    grads = (True, weight is not None, bias is not None)
    directions: tuple[Direction, ...] = ("inference", "forward", "backward")
    return [RowNormSpec(d, rms, cols, x, y or x, weight, bias, grads=grads) for d in directions]


def weight_pass(spec: RowNormSpec) -> RowNormSpec:
    """The pass over dweight and dbias alone that belongs to a backward whose plan splits them off."""
    return dataclasses.replace(spec, direction="backward_weight")


def with_helpers(spec: RowNormSpec, plan: Plan) -> list[Spec]:
    """The kernels that a call of `spec` launches: itself and, after a backward with sums, those that finish them."""
    specs: list[Spec] = [spec]
    if spec.direction == "backward" and any(spec.grads[1:]):
        if plan.splits_weight:
            specs.append(weight_pass(spec))
        first, second = (spec.weight if spec.grads[1] else None), (spec.bias if spec.grads[2] else None)
        specs.append(SumPartialsSpec(spec.cols, spec.acc, first, second))
    return specs


def compile_ahead(
    hidden_sizes: Iterable[int], dtypes: Iterable[str], arch: int, shared_bytes: int | None = None
) -> int:
    """Compile the kernels of both norms for contiguous rows into the disk cache; no GPU needed.

    Args:
        hidden_sizes: row lengths N.
        dtypes: of the input, by the names "f16", "bf16", "f32", "f64"; weights in the same type and in f32.
        arch: 90 for sm_90.
        shared_bytes: the most shared memory per block, in bytes; None takes the known value of the architecture.

    Returns:
        How many kernels there are.
    """
    from kernel_fusion.backends.cuda.plan import KNOWN_DEVICES

    device = KNOWN_DEVICES[arch] if shared_bytes is None else Device(arch, shared_bytes)
    wanted: set[tuple[Spec, Access]] = set()
    for cols, dtype, rms in itertools.product(hidden_sizes, dtypes, (False, True)):
        for weight in sorted({dtype, "f64" if dtype == "f64" else "f32"}):
            for spec in family(cols, dtype, weight, rms=rms):
                plan = plan_for(spec, contiguous_access(spec), device)
                wanted.update((each, contiguous_access(each)) for each in with_helpers(spec, plan))
    for each, access in wanted:
        compiled(each, access, device)
    return len(wanted)


def contiguous_access(spec: Spec) -> Access:
    """How contiguous tensors of a spec lie in memory."""
    if isinstance(spec, SumPartialsSpec):
        return Access()
    x, y = (_row_alignment(spec.cols, dtype) for dtype in (spec.x, spec.y))
    return Access(x=x, y=y, weight=16, dx=x if spec.direction.startswith("backward") else 16)


def _row_alignment(cols: int, dtype: str) -> int:
    row_bytes = cols * ITEMSIZE[dtype]
    return min(16, row_bytes & -row_bytes)


def explain(
    verb: str, input: Tensor, normalized_shape: Any, weight: Tensor | None = None, *args: Any, **kwargs: Any
) -> tuple[str, ...]:
    """One line per direction: the plan of `verb` on `input`."""
    shape = (normalized_shape,) if isinstance(normalized_shape, int) else tuple(normalized_shape)
    cols = int(torch.Size(shape).numel())
    weight_type = None if weight is None else dtype_name(weight.dtype)
    specs = family(cols, dtype_name(input.dtype), weight_type, rms=verb == "rms_norm")
    device = Device.of(input.device.index)
    return tuple(f"{spec.direction}: {plan_for(spec, contiguous_access(spec), device)}" for spec in specs[1:])
