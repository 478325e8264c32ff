"""The plans of row norms: a safe rule per direction, and tables of what measured better.

A thread holds few enough elements to keep them in registers, but enough for several loads of 16 bytes. A row takes no
more warps than that needs.
"""

from __future__ import annotations

from dataclasses import replace

from kernel_fusion.backends.cuda.device import Device
from kernel_fusion.backends.cuda.plan import SMALL_ROW_THREADS, Plan
from kernel_fusion.backends.cuda.plan_backward import plan_backward
from kernel_fusion.backends.cuda.plan_forward import plan_forward
from kernel_fusion.backends.cuda.quantize import has_whole_blocks
from kernel_fusion.backends.cuda.tree import ceil_div
from kernel_fusion.backends.cuda.tuned import Facts
from kernel_fusion.backends.cuda.user_table import Table, users_table
from kernel_fusion.core.quantize import NO_CODES
from kernel_fusion.core.spec import ITEMSIZE, Access, RowNormSpec

# With codes: the bytes of a row in a thread that does the work of several warps; the threads per multiprocessor for
# which registers must suffice.
_BYTES, _THREADS = 64, 768


def plan_row_norm(spec: RowNormSpec, access: Access, device: Device) -> Plan:
    """The plan of a row norm."""
    return planned(spec, access, device, users_table(device, spec.direction))[0]


def planned(spec: RowNormSpec, access: Access, device: Device, users: Table) -> tuple[Plan, Facts]:
    """The plan and the facts that it was made from. A row of the user's table counts only if it changes no bits."""
    if spec.codes != NO_CODES:
        plan, facts = planned(replace(spec, codes=NO_CODES), access, device, users)
        return _with_codes(spec, plan), facts
    facts = Facts(spec, access, device, {})
    if spec.direction == "backward_weight":
        per_block = SMALL_ROW_THREADS * facts.vec
        return Plan("row_norm_bwd_weight", facts.vec, 32, warps=1, per_block=per_block), facts
    rule = plan_backward if spec.direction == "backward" else plan_forward
    plan = rule(facts)
    if users:
        its_facts = Facts(spec, access, device, users)
        its_plan = rule(its_facts)
        if its_plan.order(spec) == plan.order(spec):
            return its_plan, its_facts
    return plan, facts


def _with_codes(spec: RowNormSpec, plan: Plan) -> Plan:
    """The plan of y for a call with codes. If one block holds the row in registers, the same kernel makes the codes."""
    whole = spec.codes.scales != "block" or has_whole_blocks(plan)
    if plan.kernel != "row_norm_fwd" or plan.cluster > 1 or not whole:
        return replace(plan, sums="apart")
    # One warp that does the work of several saves instructions.
    held = ceil_div(spec.cols, 32 * plan.warps) * ITEMSIZE[spec.row]
    shares = next(n for n in (4, 2, 1) if n == 1 or (plan.warps % n == 0 and n * held <= _BYTES))
    plan = replace(plan, shifted=False, shares=shares)
    most = _THREADS // plan.threads
    return replace(plan, min_blocks=max(1, most if shares > 1 else min(plan.min_blocks, most)))
