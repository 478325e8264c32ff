"""Builds the C++ extension with the C++ compiler alone: no CUDA toolkit, no ninja, no build step by hand.

One shared library, made of the operators and of the CPU kernels, compiled for the best instruction set of this machine.
A library built ahead, for machines unknown or to compare them, has the kernels for every set; the process picks one.
Built on first use under a file lock, in a temporary folder, and stored by an atomic rename, so that parallel processes
build once and a killed builder leaves nothing behind that anyone would load. `torch.utils.cpp_extension` would need
ninja, and its own lock file blocks for ever if a builder is killed.
"""

from __future__ import annotations

import os
import platform
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import filelock
import torch

from kernel_fusion.config import cxx_compiler
from kernel_fusion.core import cache
from kernel_fusion.errors import BuildError

NATIVE = Path(__file__).parent
_SOURCES = NATIVE / "extension"
_CPU_KERNELS = _SOURCES / "cpu" / "kernels"
_SUFFIXES = {".cpp", ".h", ".cuh"}

# Nothing that changes NaN or Inf. No contraction, so that a * b - round(a * b) is 0 where a formula counts on it; the
# kernels say fma where they mean it.
_FLAGS = [
    *("-std=c++20", "-O2", "-fPIC", "-fopenmp", "-fvisibility=hidden", "-w"),
    *("-fno-math-errno", "-ffp-contract=off"),
    f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
]
# The names and the instructions are those of PyTorch's own kernels: where PyTorch runs its AVX2 kernels, ours run.
# A CPU_CAPABILITY of its own puts each variant into a namespace of its own. Without it all variants of at::vec's
# inline functions share one name, and the linker keeps one of them for all.
_VARIANTS = (
    {
        "DEFAULT": [],  # the baseline, without -O3, which would take twice the time to build
        "AVX2": ["-O3", "-mavx2", "-mfma", "-mf16c"],
        "AVX512": ["-O3", "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mfma", "-mf16c"],
    }
    if platform.machine() in ("x86_64", "AMD64")
    else {"DEFAULT": ["-O3"]}
)


def cpu_variants() -> list[str]:
    """The instruction sets that the CPU kernels can be compiled for on this architecture."""
    return list(_VARIANTS)


def _own_variants() -> list[str]:
    """The one for this process, by PyTorch's word, which extension/cpu_variant.cpp follows too."""
    best = torch.backends.cpu.get_cpu_capability()
    return [best if best in _VARIANTS else "DEFAULT"]


def cpu_flags(variant: str) -> list[str]:
    """The compiler's flags for the CPU kernels of a variant."""
    return [*_include_flags(), f"-DCPU_CAPABILITY={variant}", f"-DCPU_CAPABILITY_{variant}", *_VARIANTS[variant]]


def link_flags() -> list[str]:
    """The linker's flags for what uses PyTorch's libraries, after the objects.

    The C++ library that PyTorch has loaded comes first: a compiler may have a static one of its own, and with two of
    them in a process a number in an error message is formatted by one with the tables of the other, which crashes.
    """
    lib = Path(torch.__file__).parent / "lib"
    return [*_loaded_cxx_library(), f"-L{lib}", f"-Wl,-rpath,{lib}", "-lc10", "-ltorch_cpu", "-ltorch", "-ldl"]


def _loaded_cxx_library() -> list[str]:
    """The path of the libstdc++ in this process; none where the system does not say, or it is another library."""
    try:
        maps = Path("/proc/self/maps").read_text()
    except OSError:
        return []
    paths = (line.split(maxsplit=5)[-1] for line in maps.splitlines() if "/libstdc++.so" in line)
    return list(paths)[:1]


def source_files() -> list[Path]:
    """Every native source, in a fixed order."""
    return sorted(path for path in NATIVE.rglob("*") if path.suffix in _SUFFIXES)


def compiler_version(compiler: str) -> str:
    """What `compiler --version` prints."""
    return subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True).stdout


def _key(compiler: str, variants: Sequence[str]) -> str:
    """What a library depends on: PyTorch, compiler, flags, machine, sources."""
    sources = [part for path in source_files() for part in (str(path.relative_to(NATIVE)), path.read_bytes())]
    flags = repr((_FLAGS, {variant: _VARIANTS[variant] for variant in variants}))
    return cache.digest(torch.__version__, compiler_version(compiler), flags, platform.machine(), *sources)


def kept_library(compiler: str) -> Path | None:
    """The path of a library in the cache that serves this process, or None."""
    for variants in (cpu_variants(), _own_variants()):
        key = _key(compiler, variants)
        if cache.EXTENSIONS.read(key) is not None:
            return cache.EXTENSIONS.path(key)
    return None


def built_library(say: Callable[[str], None], *, every_variant: bool = False) -> Path:
    """The path of the library for this PyTorch and machine, built if it is not in the cache.

    Args:
        say: called with a line before and after a build.
        every_variant: with the CPU kernels for other machines too, which takes longer.

    Raises:
        BuildError: there is no compiler, or it failed.
    """
    compiler = cxx_compiler()
    if compiler is None:
        raise BuildError("no C++ compiler was found (looked for $CXX, g++ and clang++)")
    try:
        if not every_variant and (kept := kept_library(compiler)) is not None:
            return kept
        variants = cpu_variants() if every_variant else _own_variants()
        key = _key(compiler, variants)
        with _lock(cache.EXTENSIONS.path(key), say):
            if cache.EXTENSIONS.read(key) is not None:
                return cache.EXTENSIONS.path(key)
            return _build(compiler, key, variants, say)
    except (OSError, subprocess.CalledProcessError) as error:
        raise BuildError(f"building the extension failed: {error}") from error


def _build(compiler: str, key: str, variants: Sequence[str], say: Callable[[str], None]) -> Path:
    say(f"kernel_fusion: building its C++ extension with {compiler}, once for this PyTorch (less than a minute) ...")
    start = time.perf_counter()
    folder = Path(tempfile.mkdtemp(prefix="kernel_fusion-build-"))
    try:
        library = _compile(compiler, variants, folder)
        stored = cache.EXTENSIONS.write(key, library.read_bytes())
    except BaseException:
        _remove(folder)
        raise
    say(f"kernel_fusion: built in {time.perf_counter() - start:.0f} s")
    if stored is None:
        # Nowhere to keep it: this process uses the library where it was built.
        say(f"kernel_fusion: {cache.EXTENSIONS.path(key).parent} cannot be written, so the next process builds again")
        return library
    _remove(folder)
    return stored


def _units(variants: Sequence[str]) -> list[tuple[list[Path], list[str]]]:
    """What is compiled together, and with which flags; the longest first.

    PyTorch's headers take most of the time, and several files that include the same ones share it.
    """
    autograd = sorted(_SOURCES.glob("*autograd.cpp"))
    operators = sorted({*_SOURCES.glob("*.cpp"), *(_SOURCES / "cuda").glob("*.cpp")} - {*autograd})
    chains = [_CPU_KERNELS / "pointwise.cpp", _CPU_KERNELS / "softmax.cpp"]
    others = sorted({*_CPU_KERNELS.glob("*.cpp")} - {*chains})
    host = _include_flags()
    kernels = [(files, cpu_flags(variant)) for variant in variants for files in (chains, others)]
    return [(operators, host), (autograd, host), *kernels]


def _include_flags() -> list[str]:
    """Those that every unit has."""
    include = Path(torch.__file__).parent / "include"
    folders = [f"-I{NATIVE}", f"-I{_SOURCES}", "-isystem", str(include)]
    return [*_FLAGS, *folders, "-isystem", str(include / "torch" / "csrc" / "api" / "include")]


def _compile(compiler: str, variants: Sequence[str], folder: Path) -> Path:
    """Compile every unit in parallel and link them."""
    objects, commands = [], []
    for index, (files, flags) in enumerate(_units(variants)):
        unit, out = folder / f"{index}.cpp", folder / f"{index}.o"
        unit.write_text("".join(f'#include "{file}"\n' for file in files))
        objects.append(out)
        commands.append([compiler, *flags, "-c", str(unit), "-o", str(out)])
    with ThreadPoolExecutor(max_workers=max(2, os.cpu_count() or 1)) as pool:
        list(pool.map(_run, commands))
    library = folder / "kernel_fusion.so"
    _run([compiler, "-shared", "-fopenmp", *map(str, objects), *link_flags(), "-o", str(library)])
    return library


def _run(command: list[str]) -> None:
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        raise BuildError(f"the C++ compiler failed:\n{' '.join(command)}\n{_head(result.stderr)}")


@contextmanager
def _lock(path: Path, say: Callable[[str], None]) -> Iterator[None]:
    """A lock that the operating system drops with its holder; none where the folder cannot hold one."""
    lock = filelock.FileLock(path.with_suffix(".lock"))
    try:
        cache.make_private_dir(path.parent)
        try:
            lock.acquire(timeout=0)
        except filelock.Timeout:
            say("kernel_fusion: waiting for another process to build the extension ...")
            lock.acquire()
    except OSError:
        lock.release()
    try:
        yield
    finally:
        lock.release()


def _remove(folder: Path) -> None:
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()


def _head(text: str) -> str:
    """The first errors; what follows them is mostly their echo."""
    return "\n".join(text.splitlines()[:20])
