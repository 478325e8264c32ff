"""The planner: gives compiled kernels to the launcher, and compiles ahead.

native/extension/cuda/launcher.cpp asks once per kernel and process, through a C callback, for machine code and a
`Launch`, so the steady state runs no Python.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

from kernel_fusion.backends.cuda import compile as compiler
from kernel_fusion.backends.cuda import group_norm, pointwise, quantize, reduce, rotary, softmax, sum_partials
from kernel_fusion.backends.cuda.device import Device
from kernel_fusion.backends.cuda.plan import Plan
from kernel_fusion.backends.cuda.row_norm_plan import plan_row_norm
from kernel_fusion.backends.cuda.row_norm_source import row_norm_source
from kernel_fusion.backends.cuda.source import Launch, Source
from kernel_fusion.core.activations import IDENTITY
from kernel_fusion.core.fields import kinds, numbers, read
from kernel_fusion.core.other_specs import (
    GroupNormAccess,
    GroupNormSpec,
    PointwiseAccess,
    PointwiseSpec,
    QuantizeAccess,
    QuantizeSpec,
    ReduceAccess,
    ReduceSpec,
    RotaryAccess,
    RotarySpec,
    SoftmaxAccess,
    SoftmaxBwdSpec,
    SoftmaxSpec,
    TokenLogprobSpec,
)
from kernel_fusion.core.spec import ITEMSIZE, Access, Direction, RowNormSpec, SumPartialsSpec

Spec = RowNormSpec | SumPartialsSpec | PointwiseSpec | ReduceSpec | SoftmaxSpec | SoftmaxBwdSpec | RotarySpec
Spec |= QuantizeSpec | GroupNormSpec | TokenLogprobSpec


class Kernel(NamedTuple):
    """A spec's access type, and makers of plan and source."""

    access: type
    plan: Callable[[Any, Any, Device], Any]
    source: Callable[[Any, Any, Any], Source]


# A position is a kernel's number in C++.
KERNELS: dict[type, Kernel] = {
    RowNormSpec: Kernel(Access, plan_row_norm, row_norm_source),
    SumPartialsSpec: Kernel(Access, sum_partials.plan, sum_partials.source),
    PointwiseSpec: Kernel(PointwiseAccess, pointwise.plan, pointwise.source),
    ReduceSpec: Kernel(ReduceAccess, reduce.plan, reduce.source),
    SoftmaxSpec: Kernel(SoftmaxAccess, softmax.plan, softmax.source),
    SoftmaxBwdSpec: Kernel(SoftmaxAccess, softmax.plan, softmax.source_bwd),
    RotarySpec: Kernel(RotaryAccess, rotary.plan, rotary.source),
    QuantizeSpec: Kernel(QuantizeAccess, quantize.plan, quantize.source),
    GroupNormSpec: Kernel(GroupNormAccess, group_norm.plan, group_norm.source),
    TokenLogprobSpec: Kernel(SoftmaxAccess, softmax.plan_logprob, softmax.source_logprob),
}

# `Planner` of launcher.cpp: the key, then outputs.
_INTEGERS, _TEXT = ctypes.POINTER(ctypes.c_int), ctypes.POINTER(ctypes.c_char_p)
_CALLBACK = ctypes.CFUNCTYPE(None, _INTEGERS, _TEXT, _TEXT, _TEXT, _INTEGERS)

# The launcher points to these.
_kept: list[bytes] = []
# They share a sum over columns.
_REHEARSED_MULTIPROCESSORS = 132
# Make launchers forget their kernels.
forgets: list[Callable[[], object]] = []


def install(library: ctypes.CDLL, devices: Iterable[int]) -> None:
    """Give the extension this planner, for its CUDA kernels on `devices`."""
    forgets.append(library.kf_forget_kernels)
    library.kf_set_planner(ctypes.cast(_callback, ctypes.c_void_p), sum(1 << index for index in devices))


def decode(row: Iterator[int]) -> tuple[Spec, Any]:
    """A key's spec and access."""
    spec, kernel = list(KERNELS.items())[next(row)]
    return read(spec, row), read(kernel.access, row)


def callback(serve: Callable[[int, Spec, Any], tuple[Launch, str, bytes]]) -> Any:
    """The C callback of `serve`, which answers device index, spec and access with launch, name and code."""

    def answer(key: Any, error: Any, image: Any, name: Any, launch: Any) -> None:
        # Nothing may be raised through C.
        try:
            row = (key[i] for i in itertools.count())
            how, kernel, code = serve(next(row), *decode(row))
            for i, number in enumerate(numbers(Launch, how)):
                launch[i] = number
            image[0], name[0] = _keep(code), _keep(kernel.encode())
        except BaseException as raised:
            error[0] = _keep(f"{type(raised).__name__}: {raised}".encode())

    return _CALLBACK(answer)


def _answer(index: int, spec: Spec, access: Any) -> tuple[Launch, str, bytes]:
    device = Device.of(index)
    plan, kernel, code = compiled(spec, access, device)
    return launch_of(plan, device), kernel, code


_callback = callback(_answer)


def _keep(data: bytes) -> bytes:
    _kept.append(data)
    return data


def launch_of(plan: Any, device: Device) -> Launch:
    """The launcher's part of a plan."""
    known = {name: getattr(plan, name) for name in kinds(Launch) if name != "dependent"}
    known["least_per_block"] = plan.least_per_block or plan.per_block
    return Launch(**known, dependent=device.has_dependent_launch)


def plan_for(spec: Spec, access: Any, device: Device) -> Any:
    """The plan of a spec on a device."""
    return KERNELS[type(spec)].plan(spec, access, device)


def source_of(spec: Spec, access: Any, plan: Any) -> Source:
    """The source of the kernel."""
    return KERNELS[type(spec)].source(spec, access, plan)


def compiled(spec: Spec, access: Any, device: Device) -> tuple[Any, str, bytes]:
    """Plan, name and machine code, compiled or from the disk cache."""
    plan = plan_for(spec, access, device)
    source = source_of(spec, access, plan)
    return plan, source.name, compiler.cubin(source.text(), device.arch, source.name)


def forget_kernels() -> None:
    """Plan kernels anew."""
    for forget in forgets:
        forget()


@contextmanager
def rehearsal(library: ctypes.CDLL, device: Device) -> Iterator[dict[tuple[Spec, Any], None]]:
    """Within, in every thread, CPU tensors stand for those of `device`, and results are meaningless.

    Yields:
        Spec and access of each kernel that calls have needed so far.
    """
    met: dict[tuple[Spec, Any], None] = {}

    def note(_: int, spec: Spec, access: Any) -> tuple[Launch, str, bytes]:
        met[spec, access] = None
        return launch_of(plan_for(spec, access, device), device), "", b""

    noting = callback(note)  # C++ may call it
    library.kf_rehearse(ctypes.cast(noting, ctypes.c_void_p), _REHEARSED_MULTIPROCESSORS)
    try:
        yield met
    finally:
        library.kf_rehearse(None, 0)


def family(
    cols: int, x: str, weight: str | None, *, rms: bool, y: str | None = None, **stages: Any
) -> list[RowNormSpec]:
    """The specs of one norm: inference, forward, backward."""
    bias = None if rms else weight
    grads = (True, weight is not None, bias is not None)
    directions: tuple[Direction, ...] = ("inference", "forward", "backward")
    specs = [RowNormSpec(d, rms, cols, x, y or x, weight, bias, grads=grads, **stages) for d in directions]
    added, beside = specs[-1].residual is not None, specs[-1].beside is not None
    gated = specs[-1].residual_gate is not None
    return [*specs[:-1], replace(specs[-1], dh=added, dresidual=added or beside, dgate=gated)]


def in_passes(spec: RowNormSpec) -> list[RowNormSpec]:
    """The specs of the two passes of a norm whose rows lie in pieces."""
    if spec.direction == "backward":
        of_sums = replace(spec, grads=(False, *spec.grads[1:]), dh=False, dresidual=False, dgate=False)
        rest = replace(spec, grads=(spec.grads[0], False, False))
        return [replace(of_sums, passes="first"), replace(rest, passes="second")]
    before: dict[str, Any] = {"direction": "inference", "y": spec.x, "weight": None, "bias": None, "offset": False}
    before |= {"activation": IDENTITY, "rounding": "once", "grouped": spec.grouped and spec.residual_gate is not None}
    if not spec.gate_first:
        before |= {"gate": None, "gate_activation": IDENTITY}
    after: dict[str, Any] = {}
    if spec.residual is not None:
        after = {"x": spec.residual, "residual": None, "pre_activation": IDENTITY, "dropout": False}
        after["residual_gate"] = None
    return [replace(spec, passes="first", **before), replace(spec, passes="second", **after)]


def weight_pass(spec: RowNormSpec) -> RowNormSpec:
    """A backward's pass for column sums."""
    return replace(spec, direction="backward_weight")


def with_helpers(spec: RowNormSpec, plan: Plan) -> list[RowNormSpec | SumPartialsSpec]:
    """A call's kernels: that of `spec` and, after a backward with sums, those that finish them."""
    specs: list[RowNormSpec | SumPartialsSpec] = [spec]
    if spec.direction == "backward" and any(spec.column_sums) and not spec.one_row:
        if plan.splits:
            specs.append(weight_pass(spec))
        cols = 0 if spec.grouped else spec.cols
        first, second = (spec.weight if spec.grads[1] else None), (spec.bias if spec.grads[2] else None)
        if first or second:
            specs.append(SumPartialsSpec(cols, spec.acc, first, second))
        if spec.dgate:
            specs.append(SumPartialsSpec(cols, spec.acc, spec.residual_gate, None))
    return specs


def compile_ahead(hidden_sizes: Iterable[int], dtypes: Iterable[str], device: Device) -> int:
    """Compile both norms' kernels for contiguous rows into the disk cache; needs no GPU.

    Args:
        hidden_sizes: row lengths N.
        dtypes: of the input, "f16", "bf16", "f32" or "f64"; weights have the same or f32.
        device: that kernels are planned for.

    Returns:
        How many kernels there are.
    """
    wanted: set[tuple[RowNormSpec | SumPartialsSpec, Access]] = set()
    for cols, dtype, rms in itertools.product(hidden_sizes, dtypes, (False, True)):
        for weight in sorted({dtype, "f64" if dtype == "f64" else "f32"}):
            for spec in family(cols, dtype, weight, rms=rms):
                plan = plan_for(spec, contiguous_access(spec), device)
                wanted.update((each, contiguous_access(each)) for each in with_helpers(spec, plan))
    for each, access in wanted:
        compiled(each, access, device)
    return len(wanted)


def contiguous_access(spec: RowNormSpec | SumPartialsSpec) -> Access:
    """Contiguous tensors' access."""
    if isinstance(spec, SumPartialsSpec):
        return Access()
    x, y = (_row_alignment(spec.cols, dtype) for dtype in (spec.x, spec.y))
    other = spec.residual or spec.beside
    h = _row_alignment(spec.cols, other) if other else 16
    if not spec.direction.startswith("backward"):
        return Access(x=x, y=y, residual=h)
    normalised = h if spec.residual else x
    pre_x = _row_alignment(spec.cols, spec.pre_x) if spec.pre_x else 16
    return Access(x=normalised, y=y, dx=x, residual=h if spec.dh else 16, pre_x=pre_x)


def _row_alignment(cols: int, dtype: str) -> int:
    row_bytes = cols * ITEMSIZE[dtype]
    return min(16, row_bytes & -row_bytes)
