"""All configuration, and the only module that reads the environment.

Every variable is optional. `KERNEL_FUSION_DISABLE=1` sends calls that name no backend to PyTorch's operations.
`KERNEL_FUSION_CACHE_DIR` moves the caches (default: by `XDG_CACHE_HOME`). `CXX` names the C++ compiler and may add
arguments. `KERNEL_FUSION_BUILD=1` builds the C++ extension even if the wheel brings it. `KERNEL_FUSION_TUNED=0` ignores
the tables of `kernel-fusion tune`. PyTorch's `ATEN_CPU_CAPABILITY` also
limits the instruction set of our CPU kernels. Triton's `TRITON_INTERPRET` runs our Triton kernels on the CPU, slowly,
for tests.
"""

from __future__ import annotations

import os
import shlex
import shutil
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kernel_fusion.errors import KernelFusionError

_ON, _OFF = ("1", "true", "on", "yes", "y"), ("0", "false", "off", "no", "n")
BACKENDS = ("cuda", "triton", "cpu", "eager")


def default_backend() -> str | None:
    """The backend of calls that name none: "eager" if the library is switched off, else the automatic choice."""
    return "eager" if os.environ.get("KERNEL_FUSION_DISABLE", "").lower() in _ON else None


class _State(threading.local):
    """Per-thread settings. `threading.local`, because `contextvars` break torch.compile's tracing."""

    def __init__(self) -> None:  # called by every thread; torch.compile would guard a class default
        self.backend: str | None = default_backend()


state = _State()


def check_backend_name(name: str | None) -> None:
    """Raise ValueError unless `name` is a backend or None."""
    if name is not None and name not in BACKENDS:
        choices = ", ".join(repr(b) for b in BACKENDS)
        raise ValueError(f"`backend` must be one of {choices} or None, got {name!r}")


@contextmanager
def use_backend(name: str | None) -> Iterator[None]:
    """Make `name` the backend of every call in this thread that names none itself.

    Args:
        name: "cuda", "triton", "cpu", "eager", or None for the automatic choice.

    Raises:
        ValueError: `name` is not a backend.

    Example:
        >>> import torch, kernel_fusion as kf
        >>> with kf.use_backend("eager"):
        ...     y = kf.layer_norm(torch.randn(4, 8), (8,))
    """
    check_backend_name(name)
    previous, state.backend = state.backend, name or default_backend()
    try:
        yield
    finally:
        state.backend = previous


def cache_dir() -> Path:
    """The folder of the compiled extension and kernels, an absolute path; it may not exist yet.

    Raises:
        KernelFusionError: a variable names the home of an unknown user.
    """
    chosen = _folder("KERNEL_FUSION_CACHE_DIR")
    if chosen is not None:
        return chosen.absolute()
    base = _folder("XDG_CACHE_HOME")
    if base is None or not base.is_absolute():  # XDG's specification ignores relative paths
        base = Path(os.path.expanduser("~/.cache"))
    if not base.is_absolute():  # the user has no home
        return Path(tempfile.gettempdir(), f"kernel_fusion-{os.getuid()}").absolute()
    return base / "kernel_fusion"


def uses_tuned_tables() -> bool:
    """Whether plans follow the tables that `kernel-fusion tune` wrote to the cache folder."""
    return os.environ.get("KERNEL_FUSION_TUNED", "").lower() not in _OFF


def builds_anyway() -> bool:
    """Whether the C++ extension is built here though the wheel may bring it."""
    return os.environ.get("KERNEL_FUSION_BUILD", "").lower() in _ON


def _folder(variable: str) -> Path | None:
    value = os.environ.get(variable)
    if not value:
        return None
    folder = os.path.expanduser(value)
    if folder.startswith("~") and folder.split("/")[0] != "~":  # or a folder of that name would be made
        raise KernelFusionError(f"{variable} is {value!r}, but no user of that name has a home on this machine")
    return Path(folder)


_COMPILERS = ("g++", "clang++", "c++")


def cxx_compiler() -> tuple[str, ...] | None:
    """The C++ compiler's command, a program and its first arguments, or None if it does not exist."""
    chosen = os.environ.get("CXX", "").strip()
    if not chosen:
        found = next(filter(None, map(shutil.which, _COMPILERS)), None)
        return (found,) if found else None
    for words in ([chosen], _words(chosen)):  # a path may contain spaces
        if program := words and shutil.which(words[0]):
            return (program, *words[1:])
    return None


def compilers_tried() -> str:
    """The places where `cxx_compiler` looks, for error messages."""
    chosen = os.environ.get("CXX", "").strip()
    if chosen:
        return f"CXX is {chosen!r}, which names no program here"
    return f"CXX is not set, and PATH has none of {', '.join(_COMPILERS)}"


def _words(command: str) -> list[str]:
    try:
        return shlex.split(command)
    except ValueError:  # an unclosed quotation
        return []


def environment(**changes: str) -> dict[str, str]:
    """The environment of a process that we start."""
    return {**os.environ, **changes}


def triton_is_interpreted() -> bool:
    """Whether Triton runs kernels in its interpreter, on CPU tensors too."""
    return os.environ.get("TRITON_INTERPRET", "").lower() in _ON
