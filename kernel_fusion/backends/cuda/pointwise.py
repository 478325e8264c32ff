"""Pointwise kernels: plans and sources (kernels/pointwise*.cuh)."""

from __future__ import annotations

from dataclasses import dataclass

from kernel_fusion.backends.cuda.device import Device
from kernel_fusion.backends.cuda.launch import Launch
from kernel_fusion.backends.cuda.source import Source
from kernel_fusion.core.activations import CODES
from kernel_fusion.core.families import COMBINES, DROPOUTS, MODES, PointwiseAccess, PointwiseSpec
from kernel_fusion.core.spec import ITEMSIZE

_THREADS = 256
# Bytes that a thread has asked for before it uses any: what it takes to hide the latency of memory at 1024 threads a
# multiprocessor is 24 KB, and the rest is for uneven moments.
_BYTES_IN_FLIGHT = 64
_MAX_UNROLL = 4


@dataclass(frozen=True)
class PointwisePlan(Launch):
    """How a pointwise kernel runs: `unroll` vectors, or rows of columns, of each operand at a time."""

    unroll: int = 1


def plan(spec: PointwiseSpec, access: PointwiseAccess, device: Device) -> PointwisePlan:
    """Enough vectors per thread to keep memory busy; fewer where the operands are several."""
    vector_bytes = sum(ITEMSIZE[t] for t in (spec.dy, spec.a, spec.b) if t) * access.vec
    if access.lanes:  # b is read once
        vector_bytes -= ITEMSIZE[spec.b or spec.a] * access.vec
    unroll = min(_MAX_UNROLL, max(1, _BYTES_IN_FLIGHT // vector_bytes))
    # 64 registers a thread, 80 with coordinates, 128 where it keeps sums of columns; fp64 takes what it needs.
    min_blocks = 1 if spec.acc == "f64" else 2 if access.lanes else 4 if access.dims == 1 else 3
    per_block = access.lanes * access.vec if access.lanes else _THREADS * access.vec * unroll
    return PointwisePlan(threads=_THREADS, per_block=per_block, unroll=unroll, min_blocks=min_blocks)


def source(spec: PointwiseSpec, access: PointwiseAccess, plan: PointwisePlan) -> Source:
    """What the kernel is compiled from."""
    backward = spec.dy is not None
    names = ("DA", "DB", "DY", "A", "B") if backward else ("Y", None, None, "A", "B")
    dtypes = (spec.da if backward else spec.y, spec.db, spec.dy, spec.a, spec.b)
    types: dict[str, str | None] = {name: dtype for name, dtype in zip(names, dtypes, strict=True) if name}
    types |= {"Acc": spec.acc, "Result": spec.result}
    aligned = "aligned" if access.aligned_positions else "anywhere"
    constants = {
        "kCombine": COMBINES.index(spec.combine),
        "kActivation": CODES[spec.activation],
        "kDropout": DROPOUTS.index(aligned if spec.dropout else "none"),
        "kVec": access.vec,
        "kUnroll": plan.unroll,
        "kThreads": plan.threads,
        "kLanes": access.lanes,
        "kDims": access.dims,
        # Rows of several dimensions are whole vectors, unless something is looked up by element.
        "kPartial": access.dims == 1 or any(operand.mode == "gather" for operand in access.operands),
    }
    for name, operand in zip(names, access.operands, strict=True):
        if name:
            constants |= {f"kMode{name}": MODES.index(operand.mode), f"kAlign{name}": operand.align}
    header = "pointwise" if not backward else "pointwise_bwd_columns" if access.lanes else "pointwise_bwd"
    args = "PointwiseColumnsArgs" if access.lanes else "PointwiseArgs"
    name = f"kf_{header}_{spec.combine}_{spec.activation}{'_dropout' if spec.dropout else ''}_{spec.a}"
    return Source(name, header, args, types, constants, plan.threads, plan.min_blocks)
