"""Everything apart from our code that a result depends on: machine, versions, checkout. `info` prints it too."""

from __future__ import annotations

import platform
import re
import subprocess
from importlib import metadata
from pathlib import Path

import torch

import kernel_fusion as kf

_PACKAGE = Path(__file__).parents[1]


def versions() -> dict[str, str]:
    """The versions of everything involved that is installed."""
    found = {
        "kernel_fusion": kf.__version__,
        "git_commit": git_commit(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torch_cuda": torch.version.cuda,
        "nvrtc": nvrtc_version(),
        "cuda_bindings": installed("cuda-bindings"),
        "triton": installed("triton"),
    }
    return {name: version for name, version in found.items() if version is not None}


def cpu_model() -> str:
    """The processor's name, as the operating system tells it."""
    try:
        match = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        match = None
    return match.group(1).strip() if match else platform.processor() or platform.machine()


def gpu_driver() -> str | None:
    """The version of the NVIDIA driver, or None if unknown."""
    lines = _output(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"])
    return lines[0] if lines else None


def nvrtc_version() -> str | None:
    """The version of the CUDA run-time compiler, or None where it is missing."""
    try:
        from cuda.bindings import nvrtc

        status, major, minor = nvrtc.nvrtcVersion()
    except (ImportError, RuntimeError):
        return None
    return f"{major}.{minor}" if status == nvrtc.nvrtcResult.NVRTC_SUCCESS else None


def git_commit() -> str | None:
    """The commit of the package's checkout ("+changes" if edited), or None outside a checkout."""
    root = _PACKAGE.parent
    lines = _output(["git", "-C", str(root), "rev-parse", "--show-toplevel", "HEAD"])
    # A package installed inside another project's checkout is not part of it.
    if len(lines) != 2 or Path(lines[0]).resolve() != root.resolve():
        return None
    edited = _output(["git", "-C", str(root), "status", "--porcelain", "--", str(_PACKAGE)])
    return lines[1] + ("+changes" if edited else "")


def installed(package: str) -> str | None:
    """The version of a package; None where it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _output(command: list[str]) -> list[str]:
    """The lines that `command` prints; none if it is missing or fails."""
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return result.stdout.splitlines() if result.returncode == 0 else []
