"""The choices on other machines: PyTorch and the loader are made to say what they would say there."""

from __future__ import annotations

import subprocess
from collections import Counter
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support import PACKAGE, TRITON, assert_as_accurate

from kernel_fusion.backends import availability
from kernel_fusion.backends.cuda import planner
from kernel_fusion.backends.cuda.device import KNOWN_DEVICES, Device
from kernel_fusion.backends.triton import launch
from kernel_fusion.backends.triton.kernels.constants import SumPartials
from kernel_fusion.config import cxx_compiler
from kernel_fusion.errors import BuildError
from kernel_fusion.native import build
from kernel_fusion.operators import dispatch, fallback, loader

GPU = torch.device("cuda", 0)
on_cpu = pytest.mark.skipif(TRITON.device != "cpu", reason="stands in for a GPU without the extension")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A machine with a recent NVIDIA GPU, as far as anybody asks; and the means to change it before the first call."""
    fallback.define_triton()  # imports Triton, which looks for packages of its own
    for answer in ("why_not_cuda", "_has_triton", "_no_device_for_triton"):
        monkeypatch.setattr(availability, answer, cache(getattr(availability, answer).__wrapped__))
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(availability.importlib.util, "find_spec", lambda name: "found")
    return monkeypatch


def test_cuda_is_available_on_a_recent_gpu(gpu: pytest.MonkeyPatch) -> None:
    """Nothing is in the way."""
    assert dispatch.unavailable_reason("cuda", GPU) is None


_OBSTACLES: dict[str, tuple[Any, str, Any, str]] = {
    "rocm": (torch.version, "hip", "6.4", "this PyTorch is for ROCm"),
    "no device": (torch.cuda, "is_available", lambda: False, "PyTorch sees no CUDA device"),
    "old device": (torch.cuda, "get_device_capability", lambda _: (7, 5), "this device has 7.5"),
    "no cuda-bindings": (
        availability.importlib.util,
        "find_spec",
        lambda name: name[:4] != "cuda" or None,
        "cuda-bindings is not installed",
    ),
}


@pytest.mark.parametrize("obstacle", _OBSTACLES)
def test_why_cuda_is_not_available(obstacle: str, gpu: pytest.MonkeyPatch) -> None:
    """Each obstacle has its reason."""
    holder, name, value, reason = _OBSTACLES[obstacle]
    gpu.setattr(holder, name, value)
    assert reason in (dispatch.unavailable_reason("cuda", GPU) or "")


@pytest.mark.parametrize("backend", ["cuda", "triton"])
def test_a_machine_is_asked_once(backend: str, gpu: pytest.MonkeyPatch) -> None:
    """Calls that name their backend do not look for packages and devices each time."""
    asked: list[str] = []
    gpu.setattr(availability, "triton_is_interpreted", lambda: False)
    gpu.setattr(availability.importlib.util, "find_spec", lambda name: asked.append(name) or "found")
    gpu.setattr(torch.cuda, "is_available", lambda: asked.append("device") or True)
    for _ in range(3):
        assert dispatch.unavailable_reason(backend, GPU) is None
    assert "device" in asked
    assert len(asked) == len(set(asked))


def test_without_the_extension_cuda_has_no_kernels(gpu: pytest.MonkeyPatch) -> None:
    """Nothing launches them, and the answer says so."""
    gpu.setattr(loader, "load", lambda: False)
    gpu.setattr(loader, "error", lambda: "no compiler")
    assert dispatch.unavailable_reason("cuda", GPU) == (
        "what launches it is the extension, which could not be built: no compiler"
    )


def test_the_extension_serves_the_devices_that_can_run_its_kernels(gpu: pytest.MonkeyPatch) -> None:
    """If there are an old GPU and a recent one, it gets the recent one."""
    installed: list[Any] = []
    gpu.setattr(torch.cuda, "device_count", lambda: 2)
    gpu.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0) if device.index else (7, 0))
    gpu.setattr(planner, "install", lambda *args: installed.append(args))
    loader._enable_cuda("library")
    assert installed == [("library", [1])]


def test_triton_takes_over_where_cuda_cannot_run(gpu: pytest.MonkeyPatch) -> None:
    """On an AMD GPU the verbs go to Triton's kernels."""
    taken: list[str] = []
    gpu.setattr(torch.version, "hip", "6.4")
    gpu.setattr(torch.cuda, "device_count", lambda: 1)
    gpu.setattr(loader, "take_over", taken.append)
    loader._enable_cuda("library")
    assert taken == ["CUDA"]


def test_why_triton_is_not_available(gpu: pytest.MonkeyPatch) -> None:
    """Outside its interpreter it needs a GPU, and tensors that lie on one."""
    gpu.setattr(availability, "triton_is_interpreted", lambda: False)
    gpu.setattr(torch.xpu, "is_available", lambda: False)
    assert availability.why_not_triton(GPU) is None
    assert "in the interpreter alone" in (availability.why_not_triton(torch.device("cpu")) or "")
    assert availability.why_not_triton(torch.device("meta")) == "the input is on meta"
    assert availability.why_not_triton(torch.device("xpu")) == "PyTorch sees no xpu device"
    gpu.setattr(torch.cuda, "is_available", lambda: False)
    assert availability.why_not_triton(None) == "PyTorch sees no cuda or xpu device"


@pytest.mark.parametrize("cores", [2, 16])
def test_every_source_is_in_a_unit(cores: int) -> None:
    """On few cores and on many, each file is compiled once."""
    units = [*build.host_units(cores), *build.kernel_units(["DEFAULT"], cores)]
    extension = PACKAGE / "native" / "extension"
    folders = (".", "cpu", "cuda", "cpu/kernels")
    sources = Counter(path.name for folder in folders for path in (extension / folder).glob("*.cpp"))
    assert Counter(file.name for files, _ in units for file in files) == sources


def test_each_header_has_a_name_of_its_own() -> None:
    """Quotes find a file of the includer's folder first, so a second header of one name would hide the other."""
    names = Counter(path.name for path in (PACKAGE / "native").rglob("*.h"))
    assert [name for name, count in names.items() if count > 1] == []


def test_without_a_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who needs the library gets what is known."""
    monkeypatch.setattr(loader, "_library", None)
    monkeypatch.setattr(loader, "_error", "for another machine")
    with pytest.raises(BuildError, match="for another machine"):
        loader.library()


def test_what_no_one_foresaw_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a machine lacks for the extension, calls go on without it."""

    def fail(*_: Any) -> Any:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(loader, "_library", None)
    monkeypatch.setattr(loader, "_error", None)
    monkeypatch.setattr(build, "load_library", fail)
    with pytest.warns(UserWarning, match="could not be built: RuntimeError: can't start new thread"):
        assert not loader.load()


def test_a_device_is_described_by_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    """An H100, from the properties that PyTorch reports."""
    properties = SimpleNamespace(major=9, minor=0, shared_memory_per_block_optin=232448, name="NVIDIA H100")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    assert Device.of(0) == replace(KNOWN_DEVICES[90], name="NVIDIA H100")


class _Kernel:
    """Stands in for one of Triton's, and remembers with which options it was launched."""

    fn = SimpleNamespace(__name__="row_norm_bwd")
    options: dict[str, Any]

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *args, **options: self.__dict__.update(options=options)


@pytest.mark.parametrize("traced", [False, True])
def test_options_of_nvidias_devices(traced: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bound on registers is asked of Triton where it is wanted; Inductor does not know it."""
    kernel = _Kernel()
    seen = _Kernel() if traced else kernel
    monkeypatch.setattr(launch, "INTERPRETED", False)
    monkeypatch.setattr(torch.library, "wrap_triton", lambda kernel: seen)
    x = torch.zeros(1)
    constants = SumPartials(wide=False, rows=1, block=16, pair=False, many=False)
    for registers in (128, None):
        launch.launch(kernel, (1,), x, constants=constants, warps=8, registers=registers)
        bound = {} if traced or registers is None else {"maxnreg": registers}
        assert seen.options == {"C": constants, "num_warps": 8, **bound}


def _norm(dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    return [torch.randn(shape).to(dtype) for shape in ((6, 32), (32,), (32,))]


@on_cpu
def test_without_the_extension_triton_serves_other_gpus() -> None:
    """Triton's kernels serve what they take, the definition the rest."""
    x, weight, bias = _norm()
    with TRITON.ran():
        y = fallback.serve_on_gpu("layer_norm", x, 1, weight, bias, 1e-5, 0.0, None)
    assert_as_accurate(y, lambda *args: F.layer_norm(args[0], (32,), *args[1:]), x, weight, bias)
    with pytest.raises(RuntimeError, match="normalized_shape"):
        fallback.serve_on_gpu("layer_norm", x, 1, weight[:5], bias, 1e-5, 0.0, None)
    ones = torch.ones(3, dtype=torch.int64)
    assert fallback.serve_on_gpu("reduce", ones, [0], False, "sum_squared", None) == 3


def test_a_compiler_with_a_static_cxx_library(tmp_path: Path) -> None:
    """The linked library formats numbers by the C++ library that PyTorch has loaded, and brings no second one."""
    compiler = cxx_compiler()
    assert compiler is not None
    source, library = tmp_path / "format.cpp", tmp_path / "format.so"
    source.write_text("#include <ostream>\nvoid write(std::ostream& out, double number) { out << number; }\n")
    command = [*compiler, "-shared", "-fPIC", "-static-libstdc++", str(source), *build.link_flags(), "-o", str(library)]
    subprocess.run(command, check=True)
    defined = subprocess.run(["nm", "--defined-only", library], capture_output=True, text=True, check=True).stdout
    assert "write" in defined
    assert "_M_insertId" not in defined
