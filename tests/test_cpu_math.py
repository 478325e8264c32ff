"""The elementary functions of the CPU kernels keep the bounds that their header states, in every instruction set."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import torch
from support import skip_unless_cpu_runs

from kernel_fusion.config import cxx_compiler
from kernel_fusion.native import build

_SOURCE = Path(__file__).with_name("cpu_math.cpp")
# In ulp of the result, and of 1 for erf: the contract of native/extension/cpu/math.h; gelu has one of its own there.
_CONTRACT = {"exp": 1.5, "expm1": 1.5, "log1p": 1.5, "tanh": 1.5, "erf": 3.0, "erf_and_power": 5.0}
_ROUGH_GELU = 1 / 8  # of half an ulp of bf16


_OWN = torch.backends.cpu.get_cpu_capability()


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(variant, marks=[] if variant == _OWN else [pytest.mark.slow]) for variant in build.cpu_variants()
    ],
)
def measured(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[float, str]]:
    """The largest error of every function, and its argument, by name."""
    variant = request.param
    skip_unless_cpu_runs(variant)
    compiler = cxx_compiler()
    if compiler is None:
        pytest.skip("there is no C++ compiler")
    program = str(tmp_path_factory.mktemp("math") / "cpu_math")
    subprocess.run(
        [
            *compiler,
            *build.cpu_flags(variant),
            str(_SOURCE),
            "-o",
            program,
            *build.link_flags(),
            f"-Wl,-rpath,{build.TORCH / 'lib'}",
        ],
        check=True,
    )
    lines = subprocess.run([program], check=True, capture_output=True, text=True).stdout.splitlines()
    return {name: (float(error), argument) for name, error, argument in map(str.split, lines)}


@pytest.mark.parametrize("name", _CONTRACT)
def test_elementary_functions_keep_their_contract(name: str, measured: dict[str, tuple[float, str]]) -> None:
    """Errors are within the stated ulp; NaN and infinities are right."""
    error, argument = measured[name]
    assert 0.4 < error <= _CONTRACT[name], f"at {argument}"


def test_gelu_of_bf16_errs_less_than_its_rounding(measured: dict[str, tuple[float, str]]) -> None:
    """Gelu errs by a fraction of half an ulp at every bf16, by less where it is exact; NaN and infinities are right."""
    error, argument = measured["gelu_to_bf16"]
    assert 0 < error <= _ROUGH_GELU, f"at {argument}"
    assert (error > 0.05) == measured["gelu_is_rough"][0]
