"""Compiles kernels for one architecture with NVRTC, and keeps them in a disk cache.

NVRTC comes with PyTorch's CUDA wheels, and kernels include only our headers, so no GPU and no CUDA toolkit is needed.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache as memoize
from pathlib import Path
from typing import Any

from kernel_fusion.core import cache
from kernel_fusion.errors import CompileError

_NATIVE = Path(__file__).parents[2] / "native"
_OPTIONS = ("-std=c++20", "fmad", "no fast math")
_importing = threading.Lock()
_log = logging.getLogger("kernel_fusion")


@dataclass
class Counters:
    """How many kernels this process compiled, and how many it found on disk."""

    compiled: int = 0
    from_disk: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, *, from_disk: bool) -> None:
        """Count one kernel."""
        with self.lock:
            if from_disk:
                self.from_disk += 1
            else:
                self.compiled += 1


counters = Counters()


def cubin(source: str, arch: int, name: str | None = None) -> bytes:
    """Machine code of `source` for sm_`arch`, from the disk cache or compiled.

    The logger "kernel_fusion" reports compilations, by `name`, at level INFO.

    Raises:
        CompileError: NVRTC is missing or refuses the source.
    """
    entry = key("cubin", source, arch)
    stored = cache.CUBINS.read(entry)
    counters.add(from_disk=stored is not None)
    if stored is not None:
        return stored
    start = time.perf_counter()
    code, _ = compile_source(source, arch)
    _log.info("compiled %s for sm_%d in %.2f s", name or "a kernel", arch, time.perf_counter() - start)
    cache.CUBINS.write(entry, code)
    return code


def key(kind: str, source: str, arch: int, *more: str) -> str:
    """The cache key of a source: a digest of the source, all headers, the compiler's options, and `more`."""
    return cache.digest(kind, source, str(arch), *_OPTIONS, _headers_digest(), *more)


def compile_source(source: str, arch: int, *, verbose: bool = False, no_cache: bool = False) -> tuple[bytes, str]:
    """Compile `source`. Return the machine code and the compiler's log, which has registers and spills if `verbose`.

    `no_cache` keeps NVRTC from its own cache, to measure its time.

    Raises:
        CompileError: NVRTC is missing or refuses the source.
    """
    try:
        with _importing:  # otherwise another thread could see a package that is half imported
            from cuda.bindings import nvrtc
    except ImportError as error:
        problem = f"compiling CUDA kernels needs cuda-bindings (pip install cuda-bindings): {error}"
        raise CompileError(problem) from error
    options = [f"-arch=sm_{arch}".encode(), b"--std=c++20", b"--include-path=" + os.fsencode(_NATIVE)]
    options += [b"--ptxas-options=-v"] * verbose + [b"--no-cache"] * no_cache
    log = b""
    try:
        program = _result(nvrtc.nvrtcCreateProgram(source.encode(), b"default_program", 0, [], []))
        try:
            compiled = nvrtc.nvrtcCompileProgram(program, len(options), options)
            log = _filled(program, nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog)
            _result(compiled)
            code = _filled(program, nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN)
        finally:
            nvrtc.nvrtcDestroyProgram(program)
    except Exception as error:  # a library that is not found has a type of its own
        problem = f"NVRTC could not compile a kernel for sm_{arch}: {error}\n{_text(log)}"
        raise CompileError(problem) from error
    return code, _text(log)


def _result(answer: tuple[Any, ...]) -> Any:
    """What a function of NVRTC answers after its status, or an error."""
    status, *values = answer
    if status:
        raise RuntimeError(status.name)
    return values[0] if values else None


def _filled(program: Any, size: Callable[[Any], Any], fill: Callable[[Any, bytes], Any]) -> bytes:
    """The bytes that `fill` writes for a program, as many as `size` says."""
    content = bytes(_result(size(program)))
    _result(fill(program, content))  # the bindings write into the memory of these bytes
    return content


def _text(log: bytes) -> str:
    return log.decode(errors="replace").rstrip("\0")


@memoize
def _headers_digest() -> str:
    folders = (_NATIVE / "kernels", _NATIVE / "shared")
    paths = sorted(path for folder in folders for path in folder.iterdir() if path.is_file())
    return cache.digest(*(part for path in paths for part in (path.name, path.read_bytes())))
