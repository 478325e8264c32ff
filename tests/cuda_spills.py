"""Whether compiled kernels keep everything in registers: the compiler's own count, which needs no GPU.

A grid gives, for an architecture, the kernels to look at. One that several architectures of a generation plan is
compiled for the first of them. So few are compiled as have every pair of what spec, access, plan and architecture say.
Stages were seen to spill by three and more of these together on sm_90, whose plans are tightest, so all their kernels
are compiled there. Verdicts are kept in the cache folder, by all that they depend on.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable
from typing import Any

import pytest
from covering import covering, factors

from kernel_fusion.backends.cuda import compile, planner
from kernel_fusion.backends.cuda.device import KNOWN_DEVICES
from kernel_fusion.cli.machine import nvrtc_version
from kernel_fusion.core.cache import Cache
from kernel_fusion.errors import CompileError

Kernel = tuple[Any, Any]  # spec and access
Grid = Callable[[int], Iterable[Kernel]]
Planned = tuple[Kernel, int, Any, str]  # with an architecture, the plan and the source

# Architectures whose compilers give out registers alike.
_GENERATIONS = {"hopper": (90,), "blackwell": (100, 120), "ampere": (80, 86, 89)}
GENERATIONS = tuple(_GENERATIONS)
_VERDICTS = Cache("spills", ".txt")
_LOG = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")

# Each value once is for the quick set.
each_strength = pytest.mark.parametrize("strength", [1, pytest.param(2, marks=pytest.mark.slow)])


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


def assert_no_local_memory(grid: Grid, strength: int | None, generations: Iterable[str] = GENERATIONS) -> None:
    """The chosen kernels of the grid for the generations compile and use no local memory.

    Args:
        strength: choose so few that each value is there (1), or each pair of values (2); None: choose all.
    """
    if strength == 1:
        wanted = [(kernel, arch) for name in generations for arch in _GENERATIONS[name] for kernel in grid(arch)]
        rows = [factors({"spec": spec, "access": access, "arch": arch}) for (spec, access), arch in wanted]
        kernels = [_planned(*wanted[index]) for index in covering(rows, 1)]
    else:
        kernels = [kernel for name in generations for kernel in _distinct(grid, name)]
    if strength == 2:
        kernels = [kernels[index] for index in covering([*map(_demands, kernels)])]
    verdicts = (local_memory(source, f"{spec} {access}", arch) for (spec, access), arch, _, source in kernels)
    bad = [line for line in verdicts if line]
    assert not bad, f"{len(bad)} of {len(kernels)} kernels use local memory:\n" + "\n".join(bad)


def _planned(kernel: Kernel, arch: int) -> Planned:
    plan = planner.plan_for(*kernel, KNOWN_DEVICES[arch])
    return kernel, arch, plan, planner.source_of(*kernel, plan).text()


def _distinct(grid: Grid, generation: str) -> Iterable[Planned]:
    """The different kernels of a generation, each with the first architecture that plans it."""
    found: dict[str, Planned] = {}
    for arch in _GENERATIONS[generation]:
        for kernel in grid(arch):
            planned = _planned(kernel, arch)
            found.setdefault(planned[-1], planned)
    assert found
    return found.values()


def _demands(kernel: Planned) -> dict[str, Hashable]:
    """The facts that decide how many registers a kernel needs and may have.

    The length counts as what the plan makes of it; on sm_90, whose plans are tightest, also by itself, with the
    direction as one.
    """
    (spec, access), arch, plan, _ = kernel
    row = factors({"spec": spec, "access": access, "arch": arch, "plan": plan})
    cols, _ = row.pop("spec.cols", None), row.pop("plan.shared_bytes", None)
    return row | {"length": f"{row.get('spec.direction')} {cols}"} if arch == 90 else row
