"""A cached artefact is found again if nothing that it depends on has changed, and made anew if anything has."""

from __future__ import annotations

import platform
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from kernel_fusion.backends.cuda import compile as compiler
from kernel_fusion.native import build

_KERNEL = '#include "kernels/types.cuh"\nextern "C" __global__ void kernel(float* p) { *p = kf::product(*p, 2.0f); }\n'


@pytest.fixture
def headers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A copy of the native sources from which kernels are compiled, beside an empty cache."""
    for folder in ("kernels", "shared"):
        shutil.copytree(build.NATIVE / folder, tmp_path / "native" / folder)
    monkeypatch.setattr(compiler, "_NATIVE", tmp_path / "native")
    monkeypatch.setenv("KERNEL_FUSION_CACHE_DIR", str(tmp_path / "cache"))
    compiler._headers_digest.cache_clear()
    yield tmp_path / "native"
    compiler._headers_digest.cache_clear()


def _append(path: Path) -> None:
    path.write_text(f"{path.read_text()}// another line\n")
    compiler._headers_digest.cache_clear()


# Every header counts, whether the kernel includes it or not.
_CHANGES: dict[str, Callable[[Path, pytest.MonkeyPatch], tuple[str, int]]] = {
    "source": lambda *_: (_KERNEL + "\n", 90),
    "architecture": lambda *_: (_KERNEL, 80),
    "options": lambda _, patch: patch.setattr(compiler, "_OPTIONS", ("other",)) or (_KERNEL, 90),
    "header": lambda native, _: _append(native / "kernels" / "types.cuh") or (_KERNEL, 90),
    "shared header": lambda native, _: _append(native / "shared" / "inline.h") or (_KERNEL, 90),
}


@pytest.mark.parametrize("change", _CHANGES)
def test_a_kernel_is_compiled_again_if_anything_changes(
    change: str, headers: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its source, the architecture, the options, any header."""
    compiled = compiler.counters.compiled
    for _ in range(2):
        compiler.cubin(_KERNEL, 90)
    assert compiler.counters.compiled == compiled + 1
    compiler.cubin(*_CHANGES[change](headers, monkeypatch))
    assert compiler.counters.compiled == compiled + 2


def test_key_of_the_extension(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch, compiler, flags, instruction sets, machine and every source are in it."""
    variants = build.cpu_variants()
    source = tmp_path / "source.h"
    shutil.copy(build.source_files()[0], source)
    monkeypatch.setattr(build, "NATIVE", tmp_path)
    monkeypatch.setattr(build, "source_files", lambda: [source])
    monkeypatch.setattr(build, "compiler_version", lambda _: "1.0")
    keys = [build._key(("c++",), variants), build._key(("c++",), variants[:1] if len(variants) > 1 else [])]
    for change in (
        lambda: monkeypatch.setattr(torch, "__version__", "2.0"),
        lambda: monkeypatch.setattr(build, "compiler_version", lambda _: "2.0"),
        lambda: monkeypatch.setattr(build, "_FLAGS", ["-O0"]),
        lambda: monkeypatch.setattr(platform, "machine", lambda: "another"),
        lambda: source.write_text("// another\n"),
    ):
        change()
        keys.append(build._key(("c++",), variants))
        assert build._key(("c++",), variants) == keys[-1]
    assert len(set(keys)) == len(keys)
