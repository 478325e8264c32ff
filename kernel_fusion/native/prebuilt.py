"""The libraries that a wheel for Linux brings, so that a first call needs no compiler.

There is one for each minor version of PyTorch, since a release's objects keep their layout within it, and one with the
CPU kernels of all instruction sets, which depend on no version. The first finds the second by its name among the loaded
libraries. They are trusted by the rules of the cache.
"""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TypeVar

import torch

from kernel_fusion.config import builds_anyway
from kernel_fusion.core import cache
from kernel_fusion.native import build

Library = TypeVar("Library")

FOLDER = build.NATIVE / "prebuilt"
KERNELS = "kernels"  # the name of the library with the CPU kernels; others have PyTorch's minor version
# An alpha, a nightly or a vendor's build may lay its objects out in another way.
_RELEASE = re.compile(r"(\d+\.\d+)\.\d+(\+(cpu|cu\d+|rocm\d+(\.\d+)*|xpu))?")


def path_of(name: str) -> Path:
    """A library's file."""
    return FOLDER / f"{name}.so"


def key_of(name: str, machine: str, sources: str) -> str:
    """The key that a library is sealed with."""
    return cache.digest("prebuilt", name, machine, sources)


def name_here() -> str | None:
    """The library for this PyTorch, such as 2.13, or None if this package has none at all.

    Raises:
        OSError: the package has libraries, but none for this PyTorch, or KERNEL_FUSION_BUILD has them ignored.
    """
    there = sorted(path.stem for path in FOLDER.glob("*.so") if path.stem != KERNELS)
    if not there:
        return None
    if builds_anyway():
        raise OSError("KERNEL_FUSION_BUILD is set")
    release = _RELEASE.fullmatch(torch.__version__)
    if release is None or release[1] not in there:
        raise OSError(f"there is one for PyTorch's releases {', '.join(there)}, and this is {torch.__version__}")
    return release[1]


def _open_files(name: str) -> list[int]:
    """Descriptors of both libraries, or OSError."""
    sources, machine = build.sources_digest(), platform.machine()
    with ExitStack() as stack:
        files = []
        for each in (KERNELS, name):
            file, _ = cache.open_sealed(path_of(each), key_of(each, machine, sources), installed=True)
            stack.callback(os.close, file)
            files.append(file)
        stack.pop_all()
    return files


def usable_library() -> tuple[Path | None, str | None]:
    """The library for this PyTorch, or why there is none; both None if this package has none. Loads nothing."""
    try:
        if (name := name_here()) is None:
            return None, None
        for file in _open_files(name):
            os.close(file)
        return path_of(name), None
    except OSError as error:
        return None, str(error)


def load(load: Callable[[int], Library]) -> Library | None:
    """`load` the library for this PyTorch, or None if this package has none; `load` owns a descriptor.

    Raises:
        OSError: there are libraries, but none that can be used here.
    """
    if (name := name_here()) is None:
        return None
    kernels, own = _open_files(name)
    try:
        load(kernels)
        return load(own)  # a library that is open keeps the name of its descriptor, so none is closed
    except OSError as error:
        raise OSError(f"{path_of(name)} cannot be loaded: {error}") from error
