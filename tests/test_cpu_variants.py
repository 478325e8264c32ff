"""The builds of the CPU kernels, one per instruction set: each is right, and each can be chosen."""

from __future__ import annotations

import pytest
import torch
from support import CPU, call, python, skip_unless_cpu_runs

from kernel_fusion.native import build, loader

# PyTorch's word for each build; PyTorch itself keeps to the limit too.
_LIMITS = {"DEFAULT": "default", "AVX2": "avx2", "AVX512": None}


@pytest.mark.slow
@pytest.mark.parametrize("variant", build.cpu_variants())
def test_every_build_keeps_the_budgets(variant: str) -> None:
    """`verify` passes in a process of its own: every verb, dtype, direction and activation, with the same dropout."""
    skip_unless_cpu_runs(variant)
    code = """
    import sys
    from kernel_fusion.cli import app
    from kernel_fusion.native import loader
    assert loader.cpu_variant() == sys.argv[1], loader.cpu_variant()
    app(["verify", "--quick", "--device", "cpu"])
    """
    python(code, variant, env={"ATEN_CPU_CAPABILITY": _LIMITS[variant]}, timeout=600)


def test_a_build_can_be_chosen_for_a_process() -> None:
    """The portable one runs at once, in every thread; a build that is none, or beyond this machine, changes nothing."""
    before = loader.cpu_variant()
    try:
        loader.use_cpu_variant("DEFAULT")
        assert loader.cpu_variant() == "DEFAULT"
        with CPU.ran(forward=1):
            call("layer_norm", torch.randn(3, 17), backend="cpu")
        with pytest.raises(ValueError, match="a build of the CPU kernels that this machine can run, got 'AVX1024'"):
            loader.use_cpu_variant("AVX1024")
        assert loader.cpu_variant() == "DEFAULT"
    finally:
        loader.use_cpu_variant(before)
