"""The CUDA kernels' own elementary functions, measured on the host over every argument that 16 bits can hold.

Their instructions are replaced by ones as inexact as the PTX ISA allows, upwards or downwards, so the measurement
bounds the hardware. g++ compiles the very header that the kernels include.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import torch
from support import PACKAGE

from kernel_fusion.config import cxx_compiler
from kernel_fusion.core.activations import CODES

_SOURCE = Path(__file__).with_name("cuda_math.cpp")
# The contract of native/kernels/math.cuh.
_ELEMENTARY = {
    "exp": 2**-18,
    "tanh": 2**-17,
    "expm1": 2**-17,
    "log1p": 2**-17,
    "normal_cdf": 2**-20,
    "fp32.normal_cdf": 2**-22,
    "fp32.power": 2**-21,
}
# The share of half an ulp of the result's type, for values and slopes of activations.
_SHARE = 0.15


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[float, str]]:
    """The largest error of every function, and its argument, by name."""
    compiler = cxx_compiler()
    if compiler is None:
        pytest.skip("there is no C++ compiler")
    folder = tmp_path_factory.mktemp("math")
    bits = torch.arange(-(2**15), 2**15).to(torch.int16)
    arguments = torch.cat([bits.view(dtype).float() for dtype in (torch.float16, torch.bfloat16)])
    arguments.numpy().tofile(folder / "arguments")
    program = str(folder / "cuda_math")
    options = ["-std=c++20", "-O1", "-ffp-contract=off", f"-I{PACKAGE / 'native'}"]
    subprocess.run([*compiler, *options, str(_SOURCE), "-o", program], check=True)
    result = subprocess.run([program, str(folder / "arguments")], check=True, capture_output=True, text=True)
    errors: dict[str, tuple[float, str]] = {}
    for line in result.stdout.splitlines():
        name, error, argument = line.split()
        errors[name] = max((float(error), argument), errors.get(name, (0.0, "")))
    return errors


@pytest.mark.parametrize("name", _ELEMENTARY)
def test_elementary_functions_keep_their_contract(name: str, measured: dict[str, tuple[float, str]]) -> None:
    """They err no more than the header says: relatively, or those of a normal distribution absolutely."""
    error, argument = measured[name]
    assert 0 < error < _ELEMENTARY[name], f"at {argument}"


@pytest.mark.parametrize("name", [*(f"fp16.{name}" for name in CODES), "bf16.gelu"])
def test_activations_err_less_than_their_rounding(name: str, measured: dict[str, tuple[float, str]]) -> None:
    """Value and slope of every activation err by a fraction of half an ulp; NaN and infinities are right."""
    for part in ("value", "slope"):
        error, argument = measured[f"{name}.{part}"]
        assert error < _SHARE, f"{part} at {argument}"
