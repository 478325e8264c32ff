"""The builds of the CPU kernels, one per instruction set: each is right, and each can be chosen."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import torch
from support import CPU, call, python, skip_unless_cpu_runs

from kernel_fusion.native import build
from kernel_fusion.operators import loader
from kernel_fusion_bench import peers

# PyTorch's word for each build; PyTorch itself keeps to the limit too.
_LIMITS = {"DEFAULT": "default", "AVX2": "avx2", "AVX512": None}
_BEST = torch.backends.cpu.get_cpu_capability()


@pytest.mark.usefixtures("every_variant")
@pytest.mark.parametrize("variant", build.cpu_variants())
def test_every_build_keeps_the_budgets(variant: str) -> None:
    """`verify` passes in a process of its own: every verb, dtype, direction and activation, with the same dropout."""
    skip_unless_cpu_runs(variant)
    code = """
    import sys
    from kernel_fusion.cli.app import app
    from kernel_fusion.operators import loader
    assert loader.cpu_variant() == sys.argv[1], loader.cpu_variant()
    app(["verify", "--quick", "--device", "cpu"])
    """
    python(code, variant, env={"ATEN_CPU_CAPABILITY": _LIMITS[variant]})


def _variants_in(library: Path) -> set[str]:
    symbols = subprocess.run(["nm", library], capture_output=True, text=True, check=True).stdout
    return set(re.findall(r"^[0-9a-f]+ . kf_cpu_kernels_(\w+)$", symbols, re.MULTILINE))


@pytest.mark.usefixtures("every_variant")
def test_a_library_for_any_processor() -> None:
    """It has every build, and a process that finds it in the cache takes what it may of them."""
    library = build.built_library(print, every_variant=True)
    assert _variants_in(library) == {*build.cpu_variants()}
    for variant in build.cpu_variants():
        code = "from kernel_fusion.operators import loader; print(loader.cpu_variant())"
        ran = python(code, env={"ATEN_CPU_CAPABILITY": _LIMITS[variant]})
        assert ran.stdout.strip() == min(variant, _BEST, key=build.cpu_variants().index)
        assert not ran.stderr  # nothing was built


@pytest.mark.usefixtures("every_variant")
@pytest.mark.parametrize("variant", build.cpu_variants())
def test_what_is_built_is_what_runs(variant: str) -> None:
    """Building and loading go by PyTorch's word, here for processors that this one need not be; less may be chosen."""
    code = """
    import sys
    from kernel_fusion.native import build
    from kernel_fusion.operators import loader
    assert [loader.cpu_variant()] == build.own_variants() == sys.argv[1:], loader.cpu_variant()
    chosen = [bool(loader.library().kf_use_cpu_variant(name.encode())) for name in build.cpu_variants()]
    assert chosen == sorted(chosen, reverse=True)
    assert sum(chosen) == build.cpu_variants().index(sys.argv[1]) + 1, chosen
    """
    python(code, variant, env={"ATEN_CPU_CAPABILITY": variant.lower()})


@pytest.mark.parametrize("cores", [2, 64])
def test_a_library_of_our_own(cores: int) -> None:
    """What a process builds for itself has its best kernels alone."""
    flags = {flag for _, flags in build.kernel_units(build.own_variants(), cores) for flag in flags}
    assert {flag for flag in flags if flag.startswith("-DCPU_CAPABILITY=")} == {f"-DCPU_CAPABILITY={_BEST}"}


def test_the_benchmark_builds_what_it_compares_with(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the extension is loaded, the portable build is asked for."""
    asked: list[bool] = []
    monkeypatch.setattr(loader, "is_loaded", lambda: False)
    monkeypatch.setattr(build, "built_library", lambda _, every_variant: asked.append(every_variant))
    peers.prepare(["portable"])
    peers.prepare(["torch.compile"])
    assert asked == [True]


@pytest.mark.usefixtures("every_variant")
def test_a_build_can_be_chosen_for_a_process() -> None:
    """The portable one runs at once, in every thread; a build that is none, or beyond this machine, changes nothing."""
    before = loader.cpu_variant()
    try:
        loader.use_cpu_variant("DEFAULT")
        assert loader.cpu_variant() == "DEFAULT"
        with CPU.ran(forward=1):
            call("layer_norm", torch.randn(3, 17), backend="cpu")
        with pytest.raises(ValueError, match=r"that this machine can run and the extension has .*, got 'AVX1024'"):
            loader.use_cpu_variant("AVX1024")
        assert loader.cpu_variant() == "DEFAULT"
    finally:
        loader.use_cpu_variant(before)
