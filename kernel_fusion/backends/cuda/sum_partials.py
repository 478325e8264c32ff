"""The plan and source of the kernel that finishes column sums (kernels/sum_partials.cuh).

It adds partial rows in a fixed order.
"""

from __future__ import annotations

from kernel_fusion.backends.cuda.device import Device
from kernel_fusion.backends.cuda.source import Launch, Source
from kernel_fusion.core.fields import constants
from kernel_fusion.core.spec import Access, SumPartialsSpec

COLS = 32  # the columns of a block; partial rows are padded to a multiple
_THREADS = 256
# With so few columns, backward leaves at least a thousand partial rows to few blocks.
_FEW_COLS, _THREADS_OF_FEW = 256, 1024
# 64 registers hold eight loads of four sums. With more columns a thread gets 40, so that all blocks run at once.
_MANY_COLS = 8192


def plan(spec: SumPartialsSpec, access: Access, device: Device) -> Launch:
    """Plan the kernel: the threads of a block share the partial rows of its columns."""
    if 0 < spec.cols <= _FEW_COLS:
        return Launch(threads=_THREADS_OF_FEW, per_block=COLS, min_blocks=1)
    return Launch(threads=_THREADS, per_block=COLS, min_blocks=4 if 0 < spec.cols <= _MANY_COLS else 6)


def source(spec: SumPartialsSpec, access: Access, plan: Launch) -> Source:
    """The source of the kernel."""
    types: dict[str, str | None] = {"Acc": spec.acc, "First": spec.first, "Second": spec.second}
    known = constants(spec, "cols") | constants(plan, "threads")
    return Source("sum_partials", "sum_partials", "SumPartialsArgs", types, known, plan.threads, plan.min_blocks)
