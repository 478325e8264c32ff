"""Softmax: plans and sources (kernels/softmax*.cuh).

A kernel serves all lengths up to 2^k or 3 * 2^k vectors, so a new length seldom compiles anything.
"""

from __future__ import annotations

from dataclasses import dataclass

from kernel_fusion.backends.cuda.device import Device
from kernel_fusion.backends.cuda.source import Launch, Source
from kernel_fusion.core.fields import constants
from kernel_fusion.core.other_specs import RowAccess, SoftmaxAccess, SoftmaxBwdSpec, SoftmaxSpec
from kernel_fusion.core.spec import ITEMSIZE, VECTOR_BYTES

_MAX_THREADS = 1024
_ROWS_THREADS = 128  # of several rows
_LONG_UNROLL = 4


@dataclass(frozen=True)
class SoftmaxPlan(Launch):
    """How a softmax kernel runs.

    Attributes:
        lanes: threads per row.
        vectors: of a row per thread, in registers; 0: the row is read twice.
    """

    lanes: int
    vectors: int


def plan(spec: SoftmaxSpec | SoftmaxBwdSpec, access: SoftmaxAccess, device: Device) -> SoftmaxPlan:
    """Up to 32 bytes of a row per thread, 64 of half-read causal fp32; more only in the largest block."""
    backward = isinstance(spec, SoftmaxBwdSpec)
    itemsize = ITEMSIZE[spec.y if isinstance(spec, SoftmaxBwdSpec) else spec.x]
    whole = access.vec * itemsize == VECTOR_BYTES  # other vectors take a register per element
    elements = 32 // itemsize if whole else 16 if itemsize < 8 else 8
    if isinstance(spec, SoftmaxSpec) and spec.causal and spec.x == "f32" and whole:
        elements *= 2
    # 64 registers (fp64: 128) hold this beside a mask. Vectors in pieces need some, and fp32 on sm_120.
    roomy = whole and (itemsize == 2 or device.arch < 120)
    most = 8 if itemsize == 8 else 32 if roomy else 24
    max_threads = _MAX_THREADS // 2 if itemsize == 8 else _MAX_THREADS
    if backward:  # it holds two tensors
        elements = elements if whole else elements // 2
        most = 16 if itemsize == 4 or (itemsize == 2 and access.vec == 1) else most
    target = max(1, elements // access.vec)
    target = 3 if target == 2 else target  # capacities of 3 * 2^k then come out even
    lanes = 1
    while lanes < 32 and access.capacity > min(3, target) * lanes:
        lanes *= 2
    while lanes < max_threads and access.capacity > target * lanes:
        lanes *= 2
    vectors = -(-access.capacity // lanes)
    if vectors * access.vec > most:
        return SoftmaxPlan(threads=max_threads, lanes=max_threads, vectors=0)
    threads = max(lanes, _ROWS_THREADS) if lanes <= 32 else lanes
    # Threads that registers must allow; addresses of single elements take some.
    resident = 512 if spec.acc == "f64" else 768 if access.vec == 1 else 1024
    plain = isinstance(spec, SoftmaxSpec) and spec.mask is None and spec.acc == "f32" and whole
    if plain and vectors <= 3 and vectors * access.vec <= 16 and device.arch == 90:
        resident = 2048  # of 32 registers
    min_blocks = max(1, resident // threads)
    return SoftmaxPlan(threads=threads, per_block=threads // lanes, lanes=lanes, vectors=vectors, min_blocks=min_blocks)


def source(spec: SoftmaxSpec, access: SoftmaxAccess, plan: SoftmaxPlan) -> Source:
    """The source of the kernel."""
    types: dict[str, str | None] = {"X": spec.x, "MaskType": spec.mask, "Acc": spec.acc}
    known = _constants(access, plan, "X", "Mask", "Y") | constants(spec, "causal") | constants(access, "mask_repeats")
    header = "softmax" if plan.vectors else "softmax_long"
    return Source(f"kf_{header}_{spec.x}", header, "SoftmaxArgs", types, known, plan.threads, plan.min_blocks)


def source_bwd(spec: SoftmaxBwdSpec, access: SoftmaxAccess, plan: SoftmaxPlan) -> Source:
    """The same of backward."""
    types: dict[str, str | None] = {"DY": spec.dy, "Y": spec.y, "DX": spec.dx, "Acc": spec.acc}
    known = _constants(access, plan, "Y", "DY", "DX") | constants(spec, "leaves_out")
    name = f"kf_softmax_bwd_{spec.y}"
    return Source(name, "softmax_bwd", "SoftmaxBwdArgs", types, known, plan.threads, plan.min_blocks)


def _constants(access: SoftmaxAccess, plan: SoftmaxPlan, x: str, other: str, out: str) -> dict[str, str]:
    known = constants(access, "vec") | constants(plan, "threads", "lanes", "vectors")
    for name, rows in ((x, access.x), (other, access.other)):
        known |= {f"{key}{name}": value for key, value in constants(rows, "align", "strided").items()}
    return known | {f"kAlign{out}": str(RowAccess().align), "kUnroll": str(_LONG_UNROLL)}
