"""Whether compiled kernels keep everything in registers: the compiler's own count, which needs no GPU."""

from __future__ import annotations

import re
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

from kernel_fusion.backends.cuda.compile import compile_source
from kernel_fusion.errors import CompileError

_LOG = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")


def local_memory(source: str, name: str, arch: int) -> str | None:
    """The compiler's words about local memory if the kernel uses any."""
    try:
        _, log = compile_source(source, arch, verbose=True)
    except CompileError as error:
        return f"{name}: {error}"
    counts = _LOG.findall(log)
    if not counts:
        return f"{name}: no count of spills in the log: {log}"
    used = [match for match in counts if any(map(int, match))]
    return f"{name}: stack frame, spill stores, spill loads = {used} bytes" if used else None


def assert_no_local_memory(kernels: Mapping[str, str], arch: int) -> None:
    """Every kernel (source: name) compiles for sm_`arch` and uses no local memory."""
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        lines = pool.map(local_memory, kernels, kernels.values(), [arch] * len(kernels), chunksize=8)
        bad = [line for line in lines if line]
    assert not bad, f"{len(bad)} of {len(kernels)} kernels use local memory on sm_{arch}:\n" + "\n".join(bad)
