"""Plans: how a spec runs on a device. One readable rule per direction, each with its reason.

Two things decide speed here. A thread should hold few enough elements to stay in registers, yet enough to keep
several 16-byte loads in flight; and a row should be spread over no more warps than that needs. All sizes of
plan_forward.py and plan_backward.py follow.
"""

from __future__ import annotations

from kernel_fusion.backends.cuda.device import Device
from kernel_fusion.backends.cuda.plan import Plan
from kernel_fusion.backends.cuda.plan_backward import plan_backward
from kernel_fusion.backends.cuda.plan_forward import plan_forward
from kernel_fusion.backends.cuda.tree import vector_of
from kernel_fusion.core.spec import Access, RowNormSpec

__all__ = ["Plan", "plan_row_norm"]


def plan_row_norm(spec: RowNormSpec, access: Access, device: Device) -> Plan:
    """The plan of a row-norm kernel."""
    if spec.direction == "backward_weight":
        vec, threads = vector_of(spec), 128
        return Plan(vec, lanes=32, warps=1, threads=threads, per_block=threads * vec)
    return (plan_backward if spec.direction == "backward" else plan_forward)(spec, access, device)
