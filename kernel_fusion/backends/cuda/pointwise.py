"""The plans and sources of pointwise kernels (kernels/pointwise*.cuh)."""

from __future__ import annotations

from dataclasses import dataclass, replace

from kernel_fusion.backends.cuda.device import Device
from kernel_fusion.backends.cuda.source import Launch, Source
from kernel_fusion.core.fields import constants
from kernel_fusion.core.other_specs import Operand, Operands, PointwiseAccess, PointwiseSpec
from kernel_fusion.core.spec import BITS, ITEMSIZE, VECTOR_BYTES

_THREADS = 128  # larger blocks are slower, and so are smaller ones
# A block has twice as many threads for dropout of fp16 and bf16 and for gathered operands, unless a single row meets
# all others.
_BYTES_IN_FLIGHT = 32
_MIN_UNROLL, _MAX_UNROLL = 2, 4
# 128 registers hold all loads in flight. The gradients of both factors with dropout need 168.
_MIN_BLOCKS, _MIN_BLOCKS_OF_PRODUCTS = 4, 2
# Dropout of fp16 and bf16 waits for arithmetic, so twice as many warps help. 64 registers allow them, and suffice for
# simple addresses.
_MIN_BLOCKS_OF_NARROW_DROPOUT = 8
_CONTIGUOUS = ("linear", "vector")


@dataclass(frozen=True)
class PointwisePlan(Launch):
    """How a pointwise kernel runs.

    Attributes:
        vec: the elements of a vector.
        operands: how each operand is read or written by these vectors.
        unroll: how many vectors (for sums over rows, rows) of each operand are in flight.
    """

    vec: int
    operands: Operands
    unroll: int = 1


def plan(spec: PointwiseSpec, access: PointwiseAccess, device: Device) -> PointwisePlan:
    """Plan a kernel. A thread takes enough vectors to keep memory busy, and fewer of them with several operands."""
    access = _by_vectors(spec, access)
    vec, operands, min_blocks = access.vec, access.operands, _min_blocks(spec, access)
    if access.lanes:
        per_block = access.lanes * vec
        return PointwisePlan(vec, operands, _MAX_UNROLL, threads=_THREADS, per_block=per_block, min_blocks=min_blocks)
    dtypes = (spec.dy, None if spec.a == BITS else spec.a, spec.b)  # bits are few bytes
    read = [(t, operand) for t, operand in zip(dtypes, operands[2:], strict=True) if t]
    # Other operands mostly repeat elements and are cached.
    linear = [t for t, operand in read if operand.mode == "linear"] or [t for t, _ in read]
    narrow_dropout = spec.dropout and ITEMSIZE[spec.result] == 2
    has_more_to_do = narrow_dropout or (access.dims > 1 and not _has_simple_addresses(spec, access))
    wanted = 2 * _BYTES_IN_FLIGHT if has_more_to_do else _BYTES_IN_FLIGHT
    unroll = wanted // (sum(ITEMSIZE[t] for t in linear) * vec)
    unroll = min(_MAX_UNROLL, max(_MIN_UNROLL, unroll))
    per_block = _THREADS * vec * unroll
    return PointwisePlan(vec, operands, unroll, threads=_THREADS, per_block=per_block, min_blocks=min_blocks)


def _by_vectors(spec: PointwiseSpec, access: PointwiseAccess) -> PointwiseAccess:
    """The access by vectors. Rows of no whole vectors are gathered if caches help; otherwise vectors are smaller."""
    if not access.divisor:
        return access
    if access.repeats:
        read = [each if each.mode == "linear" else Operand("gather") for each in access.operands]
        return replace(access, operands=tuple(read))
    dtypes = (spec.da or spec.y, spec.db, spec.dy, spec.dy if spec.a == BITS else spec.a, spec.b)
    cut = [
        replace(each, align=min(each.align, access.divisor * ITEMSIZE[t])) if t and each.mode in _CONTIGUOUS else each
        for t, each in zip(dtypes, access.operands, strict=True)
    ]
    return replace(access, vec=access.divisor, operands=tuple(cut))


def _has_simple_addresses(spec: PointwiseSpec, access: PointwiseAccess) -> bool:
    if spec.dy is not None or not access.aligned_positions:
        return False
    y, _, _, a, b = access.operands
    row = spec.b is None or (b.mode in _CONTIGUOUS and b.align == VECTOR_BYTES)
    return y.mode == "linear" and a.mode == "linear" and row


def _min_blocks(spec: PointwiseSpec, access: PointwiseAccess) -> int:
    if spec.acc == "f64":
        return 1  # the kernel may take as many registers as it needs
    if not spec.dropout:
        return _MIN_BLOCKS
    if spec.dy is not None:
        return _MIN_BLOCKS_OF_PRODUCTS if spec.combine in ("mul", "gate") else _MIN_BLOCKS
    narrow = ITEMSIZE[spec.result] == 2 and _has_simple_addresses(spec, access)
    return _MIN_BLOCKS_OF_NARROW_DROPOUT if narrow else _MIN_BLOCKS


def source(spec: PointwiseSpec, access: PointwiseAccess, plan: PointwisePlan) -> Source:
    """The source of the kernel."""
    backward = spec.dy is not None
    names = ("DA", "DB", "DY", "A", "B") if backward else ("Y", "Bits", None, "A", "B")
    dtypes = (spec.da if backward else spec.y, BITS if spec.bits else spec.db, spec.dy, spec.a, spec.b)
    types: dict[str, str | None] = {name: dtype for name, dtype in zip(names, dtypes, strict=True) if name}
    types |= {"Acc": spec.acc, "Result": spec.result}
    # Rows of several dimensions consist of whole vectors, unless they are gathered. To write bits, whole warps run past
    # the end.
    partial = access.dims == 1 or spec.bits or any(operand.mode == "gather" for operand in plan.operands)
    known = constants(spec, "combine", "activation", "dropout") | constants(plan, "threads", "vec", "unroll")
    known |= constants(access, "dims", "lanes", "aligned_positions") | {"kPartial": str(int(partial))}
    for name, operand in zip(names, plan.operands, strict=True):
        if name:
            known |= {f"{key}{name}": value for key, value in constants(operand, "mode", "align").items()}
    header = "pointwise" if not backward else "pointwise_bwd_columns" if access.lanes else "pointwise_bwd"
    args = "PointwiseColumnsArgs" if access.lanes else "PointwiseArgs"
    name = f"kf_{header}_{spec.combine}_{spec.activation}{'_dropout' if spec.dropout else ''}_{spec.a}"
    return Source(name, header, args, types, known, plan.threads, plan.min_blocks)
