"""The table of lengths at which a fused call on a GPU sums a row in another order than the calls that it replaces."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from table_parts import table

from kernel_fusion.backends.cuda.device import KNOWN_DEVICES
from kernel_fusion.backends.cuda.planner import contiguous_access, family, plan_for
from kernel_fusion.core.spec import RowNormSpec

# Hidden sizes of models, and powers of two.
LENGTHS = (
    *(64, 128, 256, 384, 512, 640, 768, 896, 1024, 1152, 1280, 1536, 1600, 2048, 2304, 2560, 2880, 3072, 3584, 4096),
    *(5120, 6144, 7168, 8192, 12288, 13824, 16384, 20480, 24576, 32768),
)
# The ways in which a call differs from the plain norm whose bits it would have, by name.
CHANGES: dict[str, Callable[[RowNormSpec], RowNormSpec]] = {
    "training": lambda spec: replace(spec, direction="forward"),
    "residual, activation or gate": lambda spec: replace(spec, residual=spec.x),
    "weight in fp32": lambda spec: replace(spec, weight="f32", bias=None if spec.rms else "f32"),
}


def differs(change: str, cols: int, dtype: str, rms: bool, arch: int = 90) -> bool:
    """Whether the plans of the plain norm and of the changed one sum a row in different orders."""
    plain = family(cols, dtype, dtype, rms=rms)[0]
    one, other = (_order(spec, arch) for spec in (plain, CHANGES[change](plain)))
    return one != other


def _order(spec: RowNormSpec, arch: int) -> tuple[int, ...]:
    plan = plan_for(spec, contiguous_access(spec), KNOWN_DEVICES[arch])
    return plan.vec, plan.lanes, plan.warps, plan.center


def other_orders() -> Iterator[str]:
    """The lengths of `LENGTHS` at which the order differs on sm_90, from the plans."""
    rows = []
    for change in CHANGES:
        cells = []
        for rms in (True, False):
            for dtype in ("bf16", "f32"):
                lengths = [str(cols) for cols in LENGTHS if differs(change, cols, dtype, rms)]
                others = [str(cols) for cols in LENGTHS if str(cols) not in lengths]
                few = f"all but {others[0]}" if len(others) == 1 else ", ".join(lengths)
                cells.append("all" if not others else few or "none")
        rows.append([change, *cells])
    yield from table(["", "RMSNorm bf16", "RMSNorm fp32", "LayerNorm bf16", "LayerNorm fp32"], rows)
