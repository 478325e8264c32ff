"""Programs that leave Python: named trees, packages of AOTInductor, and the extension in a process without us."""

from __future__ import annotations

import io
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from support import CPU, python
from torch import Tensor, nn

import kernel_fusion as kf
from kernel_fusion.native import build
from kernel_fusion.operators import loader


class _Block(nn.Module):
    """Norms that hand a NormOutput from one module to another, and return one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = kf.FusedAddLayerNorm(8), kf.FusedAddRMSNorm(8)
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor, stream: Tensor) -> kf.NormOutput:
        """Two norms of one stream."""
        y, h = self.first(x, stream)
        result: kf.NormOutput = self.second(self.linear(y), h)
        return result


def assert_equal_outputs(ours: Any, theirs: kf.NormOutput) -> None:
    """Both are NormOutputs of the same bits."""
    assert type(ours) is kf.NormOutput
    assert all(map(torch.equal, ours, theirs))


def test_a_saved_program_returns_a_norm_output(tmp_path: Path) -> None:
    """In a fresh process a saved program gives a NormOutput of the same bits."""
    block, inputs = _Block(), torch.randn(2, 3, 8)
    torch.export.save(torch.export.export(block, tuple(inputs)), tmp_path / "program.pt2")
    torch.save((inputs, tuple(block(*inputs))), tmp_path / "expected.pt")
    code = """
        import sys, warnings, torch
        import kernel_fusion as kf
        inputs, expected = torch.load(sys.argv[2])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PyTorch's own deprecations
            result = torch.export.load(sys.argv[1]).module()(*inputs)
        print(type(result) is kf.NormOutput, all(map(torch.equal, result, expected)))
    """
    assert python(code, tmp_path / "program.pt2", tmp_path / "expected.pt").stdout.split() == ["True", "True"]


@pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node:UserWarning")
def test_module_calls_keep_their_signatures() -> None:
    """A program whose module calls are preserved is saved, loaded and unflattened into modules again."""
    block, inputs = _Block(), torch.randn(2, 3, 8)
    names = ("first", "second")
    program = torch.export.export(block, tuple(inputs), preserve_module_call_signature=names, strict=False)
    buffer = io.BytesIO()
    torch.export.save(program, buffer)
    buffer.seek(0)
    unflattened = torch.export.unflatten(torch.export.load(buffer))
    assert_equal_outputs(unflattened(*inputs), block(*inputs))
    assert_equal_outputs(unflattened.first(*inputs), block.first(*inputs))


def test_the_extension_alone_defines_the_operators(tmp_path: Path) -> None:
    """Opened by itself, as a C++ program opens it, the extension has schemas and CPU kernels, forward and backward."""
    loader.library()
    x, dy, weight = torch.randn(3, 64, requires_grad=True), torch.randn(3, 64), torch.randn(64)
    with CPU.ran(backward=1):
        y = kf.layer_norm(x, 64, weight)
        (dx,) = torch.autograd.grad(y, x, dy)
    torch.save((x, dy, weight, y, dx), tmp_path / "expected.pt")
    code = """
        import sys, torch
        torch.ops.load_library(sys.argv[1])
        x, dy, weight, y, dx = torch.load(sys.argv[2])
        ours = torch.ops.kernel_fusion.layer_norm(x, 1, weight)
        gradient = torch.autograd.grad(ours, x, dy)[0]
        print("kernel_fusion" in sys.modules, torch.equal(ours, y), torch.equal(gradient, dx))
    """
    library = build.built_library(print)
    assert python(code, library, tmp_path / "expected.pt").stdout.split() == ["False", "True", "True"]


# The program of docs/interop.md: a package, then the extension, then a file for the results.
_PROGRAM = r"""
#include <dlfcn.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <torch/torch.h>

#include <fstream>
#include <iostream>

int main(int, char** argv) {
  c10::InferenceMode mode;
  if (!dlopen(argv[2], RTLD_NOW | RTLD_GLOBAL)) {
    std::cerr << dlerror() << "\n";
    return 1;
  }
  torch::inductor::AOTIModelPackageLoader loader(argv[1]);
  const auto x = torch::arange(24, torch::kFloat).view({3, 8}), stream = torch::ones({3, 8});
  const auto bytes = torch::pickle_save(loader.run({x, stream}));
  std::ofstream(argv[3], std::ios::binary).write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
}
"""


def _compiled(tmp_path: Path) -> Path:
    """`_PROGRAM`, linked against this PyTorch."""
    source, program = tmp_path / "program.cpp", tmp_path / "program"
    source.write_text(_PROGRAM)
    flags = [*build.include_flags(), "-O0"]
    command = [
        *build.required_compiler(),
        *flags,
        str(source),
        "-Wl,--no-as-needed",
        *build.link_flags(),
        f"-Wl,-rpath,{build.TORCH / 'lib'}",
        "-o",
        str(program),
    ]
    subprocess.run(command, check=True)
    return program


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning:torch._inductor")
def test_a_package_runs_with_and_without_python(tmp_path: Path) -> None:
    """AOTInductor packages a model of ours; it gives the model's bits in Python and in a C++ program."""
    block = _Block().eval()
    inputs = torch.arange(24.0).view(3, 8), torch.ones(3, 8)
    program = torch.export.export(block, inputs)
    with torch.no_grad():
        package = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "model.pt2"))
        theirs = block(*inputs)
        ours = torch._inductor.aoti_load_package(package)(*inputs)
    assert type(ours) is kf.NormOutput
    torch.testing.assert_close(tuple(ours), tuple(theirs))
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    command = [_compiled(tmp_path), package, build.built_library(print), tmp_path / "results.pt"]
    subprocess.run(command, check=True, env=environment)
    for one, other in zip(torch.load(tmp_path / "results.pt", weights_only=False), ours, strict=True):
        assert torch.equal(one, other)
