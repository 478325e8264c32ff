"""The rotary embedding: plans and sources (kernels/rotary.cuh)."""

from __future__ import annotations

from kernel_fusion.backends.cuda.device import Device
from kernel_fusion.backends.cuda.launch import Launch
from kernel_fusion.backends.cuda.source import Source
from kernel_fusion.core.fields import constants
from kernel_fusion.core.spec import RotaryAccess, RotarySpec

# Threads per multiprocessor that registers must allow.
_RESIDENT, _RESIDENT_F64 = 1024, 512


def plan(spec: RotarySpec, access: RotaryAccess, device: Device) -> Launch:
    """A block for each token."""
    resident = _RESIDENT_F64 if spec.acc == "f64" else _RESIDENT
    return Launch(threads=access.threads, min_blocks=max(1, resident // access.threads))


def source(spec: RotarySpec, access: RotaryAccess, plan: Launch) -> Source:
    """The source of the kernel."""
    types: dict[str, str | None] = {"X": spec.x, "Angle": spec.angles, "Acc": spec.acc}
    known = constants(spec, "cols", "half", "interleaved", "rounds", "backward")
    known |= constants(access, "vec", "threads", "positions", "align", "align_out", "align_angles")
    name = f"kf_rotary{'_bwd' if spec.backward else ''}_{spec.x}"
    return Source(name, "rotary", "RotaryArgs", types, known, plan.threads, plan.min_blocks)
