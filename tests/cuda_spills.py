"""Whether compiled kernels keep everything in registers: the compiler's own count, which needs no GPU.

A grid gives, for an architecture, the kernels to look at. One that several architectures of a generation plan is
compiled for the first of them, and one that an earlier generation plans too is compiled again only one time in three:
where a generation is short of registers, it is so in more kernels than one. Verdicts are kept in the cache folder, by
all that they depend on.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

import pytest
from covering import covering, factors

from kernel_fusion.backends.cuda import compile, planner
from kernel_fusion.backends.cuda.device import KNOWN_DEVICES
from kernel_fusion.bench.machine import nvrtc_version
from kernel_fusion.core.cache import Cache
from kernel_fusion.errors import CompileError

Kernel = tuple[Any, Any]  # spec and access
Grid = Callable[[int], Iterable[Kernel]]

# Architectures whose compilers give out registers alike; sm_90, whose plans are tightest, first.
_GENERATIONS = {"hopper": (90,), "blackwell": (100, 120), "ampere": (80, 86, 89)}
_VERDICTS = Cache("spills", ".txt")
_LOG = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")

# Every kernel of a generation, or few that have each value of the grid once.
each_generation = pytest.mark.parametrize(
    "generation", ["some", *(pytest.param(name, marks=pytest.mark.slow) for name in _GENERATIONS)]
)


def local_memory(source: str, name: str, arch: int) -> str | None:
    """The compiler's words about local memory if the kernel uses any."""
    key = compile.key("spills", source, arch, str(nvrtc_version()))
    kept = _VERDICTS.read(key)
    if kept is None:
        try:
            _, log = compile.compile_source(source, arch, verbose=True)
        except CompileError as error:
            return f"{name}: {error}"
        counts = _LOG.findall(log)
        if not counts:
            return f"{name}: no count of spills in the log: {log}"
        kept = str([match for match in counts if any(map(int, match))] or "").encode()
        _VERDICTS.write(key, kept)
    return f"{name} on sm_{arch}: stack frame, spill stores, spill loads = {kept.decode()} bytes" if kept else None


def assert_no_local_memory(grid: Grid, generation: str) -> None:
    """Every kernel of the grid for the generation compiles and uses no local memory."""
    planned = _planned(grid)
    kernels = [kernel for name in _GENERATIONS for kernel in planned[name] if generation in (name, "some")]
    if generation == "some":
        rows = [factors({"spec": spec, "access": access, "arch": arch}) for (spec, access), arch, _ in kernels]
        kernels = [kernels[index] for index in covering(rows, 1)]
    verdicts = (local_memory(source, f"{spec} {access}", arch) for (spec, access), arch, source in kernels)
    bad = [line for line in verdicts if line]
    assert not bad, f"{len(bad)} of {len(kernels)} kernels use local memory:\n" + "\n".join(bad)


def _planned(grid: Grid) -> dict[str, list[tuple[Kernel, int, str]]]:
    """The kernels of each generation, with the first architecture that plans each, and their sources."""
    found: dict[str, list[tuple[Kernel, int, str]]] = {}
    earlier: set[str] = set()
    for generation, archs in _GENERATIONS.items():
        own: dict[str, tuple[Kernel, int, str]] = {}
        for arch in archs:
            for spec, access in grid(arch):
                plan = planner.plan_for(spec, access, KNOWN_DEVICES[arch])
                source = planner.source_of(spec, access, plan).text()
                own.setdefault(source, ((spec, access), arch, source))
        assert own
        found[generation] = [k for i, k in enumerate(own.values()) if k[2] not in earlier or i % 3 == 0]
        earlier |= own.keys()
    return found
