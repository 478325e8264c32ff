"""The finish of column sums: partial rows added in a fixed order (kernels/sum_partials.cuh)."""

from __future__ import annotations

from kernel_fusion.backends.cuda.launch import Launch
from kernel_fusion.backends.cuda.source import Source
from kernel_fusion.core.spec import SumPartialsSpec

_THREADS = 256


def plan() -> Launch:
    """32 columns per block, the partial rows spread over its threads."""
    return Launch(threads=_THREADS, per_block=32)


def source(spec: SumPartialsSpec) -> Source:
    """What the kernel is compiled from."""
    types: dict[str, str | None] = {"Acc": spec.acc, "First": spec.first, "Second": spec.second}
    constants = {"kCols": spec.cols, "kThreads": _THREADS}
    return Source("sum_partials", "sum_partials", "SumPartialsArgs", types, constants, _THREADS)
