"""Softmax and log-probabilities: plans and sources (kernels/softmax.cuh, token_logprob.cuh)."""

from __future__ import annotations

from kernel_fusion.backends.cuda.device import Device
from kernel_fusion.backends.cuda.plan import Pace, Ring
from kernel_fusion.backends.cuda.row_plan import (
    RowPlan,
    once_plan,
    resident_plan,
    row_constants,
    streamed_plan,
    twice_plan,
)
from kernel_fusion.backends.cuda.source import Source
from kernel_fusion.backends.cuda.tree import ceil_div, power_of_two
from kernel_fusion.core.fields import constants, flags
from kernel_fusion.core.other_specs import RowAccess, SoftmaxAccess, SoftmaxBwdSpec, SoftmaxSpec, TokenLogprobSpec
from kernel_fusion.core.spec import ITEMSIZE, VECTOR_BYTES

_MAX_THREADS = 1024
_RESIDENT_BYTES = 32768  # of a row of forward; longer ones stream
_LOADED_BYTES = 64  # of log-probabilities' rows: a thread's in flight
_LOGPROB_THREADS = 512  # of a row, at most
_RING = Ring(slots=4, helpers=2, pace=Pace(tolerance=7))


def plan(spec: SoftmaxSpec | SoftmaxBwdSpec, access: SoftmaxAccess, device: Device) -> RowPlan:
    """In registers up to 32 KB of a row, of backward all that a block holds; then streamed; else read twice."""
    resident = _resident(spec, access, device)
    backward = isinstance(spec, SoftmaxBwdSpec)
    tensors = (spec.y, spec.dy) if isinstance(spec, SoftmaxBwdSpec) else (spec.x,)
    itemsize = ITEMSIZE[tensors[0]]
    if resident and (backward or access.capacity * access.vec * itemsize <= _RESIDENT_BYTES):
        return resident
    # Forward reads rows of half vectors twice, which takes less time than to stream them.
    if spec.acc == "f32" and (backward or access.vec * itemsize != VECTOR_BYTES // 2):
        most = _streamed_elements(spec, access.vec, device)
        streamed = streamed_plan(access.capacity, access.vec, tensors, device, _RING, most)
        resident = streamed or resident
    threads = _MAX_THREADS // 2 if itemsize == 8 else _MAX_THREADS
    return resident or twice_plan(threads, _unroll(spec, access.vec, device))


def _adds_below_a_diagonal(spec: SoftmaxSpec | SoftmaxBwdSpec) -> bool:
    """Whether an additive mask meets causal rows, which takes the most registers."""
    return isinstance(spec, SoftmaxSpec) and spec.causal and spec.mask not in (None, "b8")


def _takes_more(spec: SoftmaxSpec | SoftmaxBwdSpec) -> bool:
    """Whether another flag is set than those whose registers the plans below count."""
    return any(getattr(spec, name) for name in flags(spec) if name not in ("causal", "scaled", "leaves_out"))


def _streamed_elements(spec: SoftmaxSpec | SoftmaxBwdSpec, vec: int, device: Device) -> int:
    """Elements that a thread of a streamed row holds, at most: more spill. Single elements take an address each."""
    single, narrow = vec == 1, device.arch >= 100
    most = (16 if single else 32 if narrow else 64) if _takes_more(spec) else 64
    if isinstance(spec, SoftmaxBwdSpec):
        return most
    plain = not (spec.mask or spec.causal)
    if _adds_below_a_diagonal(spec) and (single or narrow):
        return 16
    if single and not (plain and not narrow):
        return min(most, 16 if narrow else 24)
    return min(most, 64 if plain else 32)


def _unroll(spec: SoftmaxSpec | SoftmaxBwdSpec, vec: int, device: Device) -> int:
    """Vectors at a time of a row that is read twice. Four of fp16 or bf16 beside those of a mask, causal, spill."""
    if isinstance(spec, SoftmaxBwdSpec) or not (spec.mask and spec.causal) or vec * ITEMSIZE[spec.x] != VECTOR_BYTES:
        return 4
    spills = device.arch < 100 or (spec.x == "f16" and _adds_below_a_diagonal(spec))
    return 2 if spills and ITEMSIZE[spec.x] == 2 else 4


def _resident(spec: SoftmaxSpec | SoftmaxBwdSpec, access: SoftmaxAccess, device: Device) -> RowPlan | None:
    """Up to 32 bytes of a row per thread, 64 of half-read causal fp32; more only in the largest block."""
    backward, causal = isinstance(spec, SoftmaxBwdSpec), isinstance(spec, SoftmaxSpec) and spec.causal
    tensor = spec.y if isinstance(spec, SoftmaxBwdSpec) else spec.x
    itemsize = ITEMSIZE[tensor]
    whole = access.vec * itemsize == VECTOR_BYTES  # other vectors take a register per element
    max_threads = _MAX_THREADS // 2 if itemsize == 8 else _MAX_THREADS
    elements = 32 // itemsize if whole else 16 if itemsize < 8 else 8
    if causal and itemsize == 4 and whole:
        elements *= 2
    # 64 registers (fp64: 128) hold this beside a mask. Vectors in pieces need some, and fp32 on sm_120; before sm_90 an
    # additive mask with causal rows does.
    roomy = whole and (itemsize == 2 or device.arch < 120) and (device.arch >= 90 or not _adds_below_a_diagonal(spec))
    most = 8 if itemsize == 8 else 32 if roomy else 24
    if backward:  # it holds two tensors
        elements = elements if whole else elements // 2
        most = 16 if itemsize == 4 or (itemsize == 2 and access.vec == 1) else most
        if access.vec == 1 and _takes_more(spec):
            most = 8
    elif device.arch < 90 and _takes_more(spec):
        most = min(most, 16)
    target = max(1, elements // access.vec)
    target = 3 if target == 2 else target  # capacities of 3 * 2^k then come out even
    lanes = 1
    while lanes < 32 and access.capacity > min(3, target) * lanes:
        lanes *= 2
    while lanes < max_threads and access.capacity > target * lanes:
        lanes *= 2
    vectors = -(-access.capacity // lanes)
    if vectors * access.vec > most:
        return None
    # Threads that registers must allow; addresses of single elements take some.
    threads = 512 if spec.acc == "f64" or (access.vec == 1 and _takes_more(spec)) else 768 if access.vec == 1 else 1024
    plain = spec in (SoftmaxSpec(tensor), SoftmaxSpec(tensor, scaled=True)) and spec.acc == "f32" and whole
    if plain and vectors <= 3 and vectors * access.vec <= 16 and device.arch == 90:
        threads = 2048  # of 32 registers
    # Dealt chunks of single fp32 elements take longer; stretches of many spill in backward from sm_100 on.
    spills = backward and access.vec == 1 and vectors >= 8 and device.arch >= 100
    return resident_plan(lanes, vectors, threads, dealt=whole or causal or itemsize == 2 or spills)


def source(spec: SoftmaxSpec, access: SoftmaxAccess, plan: RowPlan) -> Source:
    """The source of the kernel."""
    types: dict[str, str | None] = {"X": spec.x, "MaskType": spec.mask, "Acc": spec.acc}
    known = row_constants(plan, access.vec, {"X": access.x, "Mask": access.other, "Y": RowAccess()})
    known |= constants(spec, *flags(spec)) | constants(access, "mask_repeats")
    return Source(f"kf_softmax_{spec.x}", "softmax", "SoftmaxArgs", types, known, plan.threads, plan.min_blocks)


def source_bwd(spec: SoftmaxBwdSpec, access: SoftmaxAccess, plan: RowPlan) -> Source:
    """The same of backward."""
    types: dict[str, str | None] = {"DY": spec.dy, "Y": spec.y, "DX": spec.dx, "Acc": spec.acc}
    known = row_constants(plan, access.vec, {"Y": access.x, "DY": access.other, "DX": RowAccess()})
    known |= constants(spec, *flags(spec))
    name = f"kf_softmax_bwd_{spec.y}"
    return Source(name, "softmax", "SoftmaxBwdArgs", types, known, plan.threads, plan.min_blocks)


def plan_logprob(spec: TokenLogprobSpec, access: SoftmaxAccess, device: Device) -> RowPlan:
    """Rows of any length are read once: a thread keeps a few numbers of its vectors, or writes what they become."""
    itemsize = ITEMSIZE[spec.x]
    unroll = min(16, _LOADED_BYTES // (access.vec * itemsize))
    if spec.weighted or (spec.masked and spec.capped):  # these take registers
        unroll //= 2
    lanes = min(_LOGPROB_THREADS, power_of_two(ceil_div(access.capacity, unroll)))
    return once_plan(lanes, unroll, 512 if itemsize == 8 else 1024)


def source_logprob(spec: TokenLogprobSpec, access: SoftmaxAccess, plan: RowPlan) -> Source:
    """The source of the kernel of either direction."""
    known = row_constants(plan, access.vec, {"X": access.x, "Mask": access.other, "DX": RowAccess()})
    known |= constants(spec, *flags(spec), "extra") | constants(access, "mask_repeats")
    types: dict[str, str | None] = {"X": spec.x, "Acc": spec.acc}
    name, args = f"kf_token_logprob_{spec.x}", "TokenLogprobArgs"
    if spec.backward:
        name, args = f"kf_token_logprob_bwd_{spec.x}", "TokenLogprobBwdArgs"
    return Source(name, "token_logprob", args, types, known, plan.threads, plan.min_blocks)
