"""Whether compiled kernels keep everything in registers: the compiler's own count, which needs no GPU.

A grid gives, for an architecture, the kernels to look at. One that several architectures of a generation plan is
compiled for the first of them. Of norms without stages and of other operations so few are compiled as have every pair
of what spec, access and plan say. Stages were seen to spill by three and more of these together, so all their kernels
are compiled. Verdicts are kept in the cache folder, by all that they depend on.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable
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
Planned = tuple[Kernel, int, Any, str]  # with an architecture, the plan and the source

# Architectures whose compilers give out registers alike; sm_90, whose plans are tightest, first.
_GENERATIONS = {"hopper": (90,), "blackwell": (100, 120), "ampere": (80, 86, 89)}
_VERDICTS = Cache("spills", ".txt")
_LOG = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")

# The kernels of a generation, or few of all that have each value of the grid once.
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


def assert_no_local_memory(grid: Grid, generation: str, *, every: bool = False) -> None:
    """The chosen kernels of the grid for the generation compile and use no local memory.

    Args:
        every: choose each kernel that no earlier generation plans; else, and of the others, those that have every pair.
    """
    if generation == "some":
        kernels = [kernel for name in _GENERATIONS for kernel in _planned(grid, name)]
        rows = [factors({"spec": spec, "access": access, "arch": arch}) for (spec, access), arch, *_ in kernels]
        kernels = [kernels[index] for index in covering(rows, 1)]
    else:
        kernels = _planned(grid, generation)
        names = [*_GENERATIONS]
        earlier = {source for name in names[: names.index(generation)] for *_, source in _planned(grid, name)}
        rows = [_demands(kernel) for kernel in kernels]
        own = {index for index, (*_, source) in enumerate(kernels) if every and source not in earlier}
        kernels = [kernels[index] for index in sorted(own.union(covering(rows)))]
    verdicts = (local_memory(source, f"{spec} {access}", arch) for (spec, access), arch, _, source in kernels)
    bad = [line for line in verdicts if line]
    assert not bad, f"{len(bad)} of {len(kernels)} kernels use local memory:\n" + "\n".join(bad)


def _planned(grid: Grid, generation: str) -> list[Planned]:
    """The different kernels of a generation, each with the first architecture that plans it."""
    found: dict[str, Planned] = {}
    for arch in _GENERATIONS[generation]:
        for spec, access in grid(arch):
            plan = planner.plan_for(spec, access, KNOWN_DEVICES[arch])
            source = planner.source_of(spec, access, plan).text()
            found.setdefault(source, ((spec, access), arch, plan, source))
    assert found
    return [*found.values()]


def _demands(kernel: Planned) -> dict[str, Hashable]:
    """The facts that decide how many registers a kernel needs and may have.

    Of the length that is what the plan makes of it; on sm_90, whose plans are tightest, also the length itself, with
    the direction as one.
    """
    (spec, access), arch, plan, _ = kernel
    row = factors({"spec": spec, "access": access, "arch": arch, "plan": plan})
    cols, _ = row.pop("spec.cols", None), row.pop("plan.shared_bytes", None)
    return row | {"length": f"{row.get('spec.direction')} {cols}"} if arch == 90 else row
