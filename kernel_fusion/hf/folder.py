"""The folder for an upload to the Hugging Face Hub: our Python sources, as kernels without compiled code.

The Hub requires pure Python, the package's own name in every import, and a unique operator namespace. So the folder
holds the layers, the definition, which a CPU gets, and the Triton kernels, under a name derived from their contents.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from kernel_fusion.core import cache
from kernel_fusion.hf.layers import LAYERS

_PACKAGE = Path(__file__).parents[1]
# The parts of the package that the layers need.
_SOURCES = ("errors.py", "config.py", "core", "backends", "operators", "functional", "hf/layers.py")
_WITHOUT = ("backends/cuda",)
_INIT = '"""Fused norms and activations for PyTorch, as Triton kernels."""\n\nfrom kernel_fusion.hf import layers\n'
_NO_EXTENSION = '''"""Stands for the C++ extension, which this build has not."""

from kernel_fusion.errors import BuildError


def open_prebuilt():
    """Return None: there is no library."""


def open_built(because):
    """Raise, so that Triton serves."""
    raise BuildError("this build has the Triton kernels alone")
'''
_CARD = """---
license: mit
tags:
- kernels
---

# kernel_fusion

Fused norms and activations for PyTorch, as Triton kernels: {layers}.
"""


def write_folder(path: str | Path, backends: Sequence[str] = ("cuda", "rocm", "xpu")) -> Path:
    """Write the folder, for `kernels.LocalLayerRepository` or an upload.

    Args:
        path: created if missing.
        backends: by their names in `kernels`; each gets a build.

    Raises:
        FileExistsError: the folder already has builds or a README.md.
    """
    root = Path(path)
    builds, card = root / "build", root / "README.md"
    if builds.exists():
        raise FileExistsError(f"{builds} exists; write to a new folder, so that it holds one build of each backend")
    if card.exists():
        raise FileExistsError(f"{card} exists, and would be overwritten; write to a new folder")
    files = dict(_files())
    digest = cache.digest(*(part for name, text in sorted(files.items()) for part in (name, text)))[:12]
    for backend in backends:
        name = f"_kernel_fusion_{backend}_{digest}"
        for relative, text in files.items():
            target = builds / f"torch-{backend}" / relative
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(re.sub(r"\bkernel_fusion\b", name, text))
        metadata = {"id": name, "name": "kernel-fusion", "version": 1, "license": "MIT"}
        metadata |= {"python-depends": [], "backend": {"type": backend}}
        (builds / f"torch-{backend}" / "metadata.json").write_text(json.dumps(metadata, indent=2) + "\n")
    card.write_text(_CARD.format(layers=", ".join(LAYERS)))
    return root


def _files() -> Iterator[tuple[str, str]]:
    """The sources of a build, with their paths in it."""
    for source in (_PACKAGE / each for each in _SOURCES):
        for file in [source] if source.is_file() else sorted(source.rglob("*.py")):
            relative = file.relative_to(_PACKAGE).as_posix()
            if not relative.startswith(_WITHOUT):
                yield relative, file.read_text()
    yield "__init__.py", _INIT
    yield "hf/__init__.py", '"""The layers."""\n'
    yield "native/__init__.py", '"""Nothing compiled."""\n'
    yield "native/library.py", _NO_EXTENSION
