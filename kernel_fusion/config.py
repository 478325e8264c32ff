"""Everything that can be configured, and the only module that reads the environment.

Two environment variables exist, both optional: `KERNEL_FUSION_CACHE_DIR` moves the caches (the default follows
`XDG_CACHE_HOME`), `CXX` names the C++ compiler. `ATEN_CPU_CAPABILITY` is PyTorch's own; PyTorch says which instruction
set our CPU kernels have, so that it limits them too. `TRITON_INTERPRET` is Triton's own: with it our Triton kernels run
on the CPU, slowly, for tests.
"""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

BACKENDS = ("cuda", "triton", "cpu", "eager")


class _State(threading.local):
    """Per-thread settings. `threading.local`, because `contextvars` break torch.compile's tracing."""

    def __init__(self) -> None:  # by every thread; not a default of the class, which torch.compile would guard against
        self.backend: str | None = None


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
    previous, state.backend = state.backend, name
    try:
        yield
    finally:
        state.backend = previous


def cache_dir() -> Path:
    """The folder of the compiled extension and kernels; it need not exist."""
    chosen = os.environ.get("KERNEL_FUSION_CACHE_DIR")
    if chosen:
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "kernel_fusion"


def cxx_compiler() -> str | None:
    """The C++ compiler's path, or None where there is none."""
    chosen = os.environ.get("CXX")
    return shutil.which(chosen) if chosen else shutil.which("g++") or shutil.which("clang++")


def triton_is_interpreted() -> bool:
    """Whether Triton runs kernels in its interpreter, on CPU tensors too."""
    return os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "on", "yes", "y")
