"""`info`: what the machine has, which backends can run, and why others cannot. Builds nothing unless asked to."""

from __future__ import annotations

from typing import Annotated

import torch
import typer
from rich.table import Table

from kernel_fusion.backends.availability import why_not_cuda
from kernel_fusion.backends.cuda import tuned, user_table
from kernel_fusion.backends.cuda.device import Device
from kernel_fusion.cli import machine
from kernel_fusion.cli.common import CACHES, cache_facts, console
from kernel_fusion.cli.units import size
from kernel_fusion.config import BACKENDS, compilers_tried, cxx_compiler, uses_tuned_tables
from kernel_fusion.native import build, prebuilt
from kernel_fusion.operators import loader
from kernel_fusion.operators.dispatch import unavailable_reason


def info(
    build_extension: Annotated[bool, typer.Option("--build", help="Build and load the extension first.")] = False,
) -> None:
    """Show devices, backends, versions, the extension and the caches."""
    built = not build_extension or loader.load()
    out = console()
    for title, facts in {
        "Devices": _devices(),
        "Backends": {name: _backend_state(name) for name in BACKENDS},
        "Versions": machine.versions() | {"gpu driver": machine.gpu_driver() or "none"},
        "Extension": {
            "compiler": " ".join(cxx_compiler() or ("none:", compilers_tried())),
            "state": _extension_state(),
        },
        "Plans": _plans(),
        "Caches": {cache.kind: ", ".join(cache_facts(cache)) for cache in CACHES},
    }.items():
        table = Table(title=title, title_justify="left", show_header=False, box=None, padding=(0, 2))
        for name, value in facts.items():
            table.add_row(name, value)
        out.print(table)
        out.print()
    if not built:
        raise typer.Exit(1)


def _devices() -> dict[str, str]:
    devices = {"cpu": f"{machine.cpu_model()}, {torch.get_num_threads()} threads"}
    for index in range(torch.cuda.device_count()):  # pragma: gpu
        properties = torch.cuda.get_device_properties(index)
        name = f"{properties.name}, sm_{properties.major}{properties.minor}, {size(properties.total_memory)}"
        devices[f"cuda:{index}"] = name
    if torch.backends.mps.is_available():
        devices["mps"] = "Apple GPU, served by the eager backend"
    return devices


def _plans() -> dict[str, str]:
    """Which tuned table the CUDA plans follow, per device."""
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return {f"cuda:{index}": _tables(name, Device.of(index).arch) for index, name in enumerate(names)} or {
        "cuda": "no device here; `kernel-fusion tune` keeps what it measures on one in "
        + str(user_table.path_of("").parent)
    }


def _tables(name: str, arch: int) -> str:
    shipped = " and ".join(path.name for path in tuned.shipped_tables(arch))
    path = user_table.path_of(name)
    if not uses_tuned_tables():
        return f"the rule, {shipped}; KERNEL_FUSION_TUNED has {path} ignored"
    try:
        own = user_table.read(path, name)
    except FileNotFoundError:
        return f"the rule, {shipped}; `kernel-fusion tune` would write {path}"
    except (OSError, ValueError) as error:
        return f"the rule, {shipped}; {path} is ignored: {error}"
    count = sum(len(listed) for knobs in own.values() for listed in knobs.values())
    return f"the rule, {shipped}; before these, {count} rows of {path}"


def _backend_state(name: str) -> str:
    # Asking for more would build the extension.
    unloaded = name in ("cpu", "cuda") and not loader.is_loaded() and loader.error() is None
    reason = why_not_cuda(None) if name == "cuda" else None
    if unloaded and reason is None:
        return f"not loaded yet; the extension is {_extension_state()}"
    reason = reason or unavailable_reason(name)
    return f"not available: {reason}" if reason else "available"


def _extension_state() -> str:
    """Which library runs, or would run, and from where; if the wheel's is not it, why."""
    prebuilt_path, why_not = prebuilt.usable_library()
    if loader.error():
        return f"could not be built: {loader.error()}"
    if loader.is_from_wheel():
        return f"loaded, {prebuilt_path}, of the wheel"
    built = build.kept_library()
    if loader.is_loaded():
        state = f"loaded, {built or 'from a folder that is not cached'}"
    elif prebuilt_path:
        return f"in the wheel, {prebuilt_path}"
    else:
        state = f"built, {built}" if built else "not built; the first call or `info --build` builds it"
    reason = loader.why_not_from_wheel() or why_not
    return f"{state}; the wheel's is not used: {reason}" if reason else state
