"""The plans and sources of the rotary embedding (kernels/rotary.cuh, rotary_norm.cuh, rotary_norm_bwd.cuh)."""

from __future__ import annotations

from dataclasses import dataclass

from kernel_fusion.backends.cuda.device import Device
from kernel_fusion.backends.cuda.source import Launch, Source
from kernel_fusion.backends.cuda.tree import ceil_div, power_of_two
from kernel_fusion.core.fields import constants
from kernel_fusion.core.other_specs import RotaryAccess, RotarySpec
from kernel_fusion.core.spec import ITEMSIZE

# The threads per multiprocessor for which registers must suffice.
_RESIDENT, _RESIDENT_F64 = 1024, 512
# With a norm, a thread keeps a weight and the next row; backward also keeps a sum, and takes more registers on
# Blackwell.
_NORM_THREADS = 128
_FORWARD, _BACKWARD, _BACKWARD_BLACKWELL, _BACKWARD_F64 = 768, 512, 384, 256
# The bytes of x, dy and angles per thread that leave registers for those of the next row. The single words of unaligned
# pairs do not.
_NEXT_BYTES = 96


@dataclass(frozen=True)
class RotaryPlan(Launch):
    """How a kernel of the rotary embedding runs, and whether a norm loads a row ahead."""

    prefetch: bool = False


def plan(spec: RotarySpec, access: RotaryAccess, device: Device) -> RotaryPlan:
    """Plan a kernel: one block per token or, with a norm, blocks that share all heads."""
    is_double = spec.acc == "f64"
    if not spec.norm:
        resident = _RESIDENT_F64 if is_double else _RESIDENT
        return RotaryPlan(threads=access.threads, min_blocks=max(1, resident // access.threads))
    units = ceil_div(spec.cols, 2) // access.vec
    lanes = min(32, power_of_two(units))
    held = ceil_div(units, lanes)
    scarce = 2 if held > 1 else 1
    rows, resident = (2, _BACKWARD if device.arch < 100 else _BACKWARD_BLACKWELL) if spec.backward else (1, _FORWARD)
    resident //= scarce
    if is_double:
        resident = min(resident, _BACKWARD_F64)
    angles = 1 if spec.backward else 2  # forward also keeps the angles of this row
    row_bytes = held * access.vec * (2 * rows * ITEMSIZE[spec.x] + 2 * angles * ITEMSIZE[spec.angles])
    return RotaryPlan(
        threads=_NORM_THREADS,
        per_block=_NORM_THREADS // lanes,
        persistent=True,
        min_blocks=resident // _NORM_THREADS,
        prefetch=held == 1 and row_bytes <= _NEXT_BYTES and access.align >= 4 and not is_double,
    )


def source(spec: RotarySpec, access: RotaryAccess, plan: RotaryPlan) -> Source:
    """The source of the kernel."""
    types: dict[str, str | None] = {"X": spec.x, "Angle": spec.angles, "Acc": spec.acc}
    known = constants(spec, "cols", "half", "interleaved", "rounds", "backward")
    known |= constants(access, "vec", "positions", "align", "align_out", "align_angles") | constants(plan, "threads")
    name = f"kf_rotary{'_bwd' if spec.backward else ''}_{spec.x}"
    if not spec.norm:
        return Source(name, "rotary", "RotaryArgs", types, known, plan.threads, plan.min_blocks)
    types |= {"QueryWeight": spec.query_weight, "KeyWeight": spec.key_weight}
    known |= constants(spec, "offset", "sums") | constants(access, "align_weights") | constants(plan, "prefetch")
    header = f"rotary_norm{'_bwd' if spec.backward else ''}"
    return Source(f"kf_{header}_{spec.x}", header, "RotaryNormArgs", types, known, plan.threads, plan.min_blocks)
