"""The tables of plans: what the planner chooses, and what the compiler makes of it."""

from __future__ import annotations

import re
from collections.abc import Iterator

from table_parts import table

from kernel_fusion.backends.cuda.compile import compile_source
from kernel_fusion.backends.cuda.device import KNOWN_DEVICES
from kernel_fusion.backends.cuda.planner import contiguous_access, family, plan_for, source_of
from kernel_fusion.backends.cuda.tree import ceil_div

PLANNED_LENGTHS = {
    "forward": (64, 255, 256, 1023, 1024, 4096, 4099, 5120, 8192, 12288, 16384, 32768, 32769, 50257, 65536, 131072),
    "backward": (64, 255, 256, 1023, 1024, 4096, 5120, 8192, 10240, 12288, 16384, 32768, 50257, 65536, 131072),
}


def plans(direction: str) -> Iterator[str]:
    """How LayerNorm runs on sm_90, bf16 / fp32: the planner's sizes, and what the compiler says."""
    columns = ("threads per row", "rows per block", "elements per thread", "elements per vector", "registers", "slots")
    rows = []
    for cols in PLANNED_LENGTHS[direction]:
        both = zip(*(_planned(cols, dtype, direction) for dtype in ("bf16", "f32")), strict=True)
        rows.append([str(cols), *(a if a == b else f"{a} / {b}" for a, b in both)])
    yield from table(["N", *columns, "shared memory KB"], rows)
    yield (
        "2×512 threads are a cluster of two blocks. Plans with slots are streamed, the others direct. "
        "Compiled by NVRTC 13.0."
    )
    yield ""


def _planned(cols: int, dtype: str, direction: str) -> list[str]:
    spec = next(s for s in family(cols, dtype, dtype, rms=False) if s.direction == direction)
    access, device = contiguous_access(spec), KNOWN_DEVICES[90]
    plan = plan_for(spec, access, device)
    _, log = compile_source(source_of(spec, access, plan).text(), device.arch, verbose=True)
    used = re.search(r"Used (\d+) registers(?:.*?(\d+) bytes smem)?", log)
    assert used, log
    threads = plan.lanes if plan.warps == 1 else plan.warps // plan.cluster * 32
    shared = plan.shared_bytes + int(used[2] or 0)
    return [
        f"{plan.cluster}×{threads}" if plan.cluster > 1 else str(threads),
        str(plan.per_block),
        str(ceil_div(cols, plan.warps * plan.lanes * plan.vec) * plan.vec),
        str(plan.vec),
        used[1],
        str(plan.ring.slots or "–"),
        "–" if shared < 16 else "<1" if shared < 1024 else str(round(shared / 1024)),
    ]
