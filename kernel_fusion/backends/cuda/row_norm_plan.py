"""Plans: how a spec runs on a device. A rule per direction that is safe everywhere, and tables of what measured better.

Two things decide speed. A thread should hold few enough elements to stay in registers, yet enough to keep several
16-byte loads in flight; and a row should be spread over no more warps than it needs.
"""

from __future__ import annotations

from kernel_fusion.backends.cuda.device import Device
from kernel_fusion.backends.cuda.plan import SMALL_ROW_THREADS, Plan
from kernel_fusion.backends.cuda.plan_backward import plan_backward
from kernel_fusion.backends.cuda.plan_forward import plan_forward
from kernel_fusion.backends.cuda.tuned import Facts
from kernel_fusion.core.spec import Access, RowNormSpec


def plan_row_norm(spec: RowNormSpec, access: Access, device: Device) -> Plan:
    """The plan of a row-norm kernel."""
    facts = Facts(spec, access, device)
    if spec.direction == "backward_weight":
        return Plan("row_norm_bwd_weight", facts.vec, 32, warps=1, per_block=SMALL_ROW_THREADS * facts.vec)
    return plan_backward(facts) if spec.direction == "backward" else plan_forward(facts)
