"""Builds the C++ extension with the C++ compiler alone: no CUDA toolkit, no ninja, no build step by hand.

One shared library, made of the operators and of the CPU kernels, compiled for the best instruction set of this machine.
A library built ahead, for machines unknown or to compare them, has the kernels for every set; the process picks one.
Built on first use by one process at a time, in a private folder (native/jobs.py), and stored by an atomic rename, so
that parallel processes build once and a killed builder leaves nothing behind that anyone would load.
`torch.utils.cpp_extension` would need ninja, and its own lock file blocks for ever if a builder is killed.
"""

from __future__ import annotations

import os
import platform
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import lru_cache
from pathlib import Path
from typing import TypeVar

import torch

from kernel_fusion.config import compilers_tried, cxx_compiler
from kernel_fusion.core import cache
from kernel_fusion.errors import BuildError
from kernel_fusion.native import jobs
from kernel_fusion.native.forks import no_fork
from kernel_fusion.native.jobs import Say

Library = TypeVar("Library")

# Libraries that stay in the cache, those used last: of several versions of PyTorch, compilers and processors that share
# a home, or of states of the sources.
_KEPT = 8
# From as many on, headers that several units compile cost less than a long unit.
_MANY_CORES = 6
# The files that take longest beside these headers.
_LONG = ("row_norm_autograd", "pointwise_autograd", "row_norm")

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
    "-DAT_PER_OPERATOR_HEADERS",  # a header of PyTorch brings the operators that it names, not all of them
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
    """The one for this process, by PyTorch's word, which extension/cpu/variant.cpp follows too."""
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


@lru_cache
def compiler_version(compiler: tuple[str, ...]) -> str:
    """What `compiler --version` prints."""
    command = [*compiler, "--version"]
    with no_fork:
        return subprocess.run(command, capture_output=True, text=True, errors="replace", check=True).stdout


def _key(compiler: tuple[str, ...], variants: Sequence[str]) -> str:
    """What a library depends on: PyTorch, compiler, flags, machine, sources."""
    flags = repr((compiler[1:], _FLAGS, {variant: _VARIANTS[variant] for variant in variants}))
    return cache.digest(torch.__version__, compiler_version(compiler), flags, platform.machine(), *_sources())


def exported_key() -> str:
    """The key of a library that was built elsewhere: for this PyTorch, architecture and sources, by any compiler."""
    return cache.digest("exported", torch.__version__, platform.machine(), *_sources())


def _sources() -> list[str | bytes]:
    return [part for path in source_files() for part in (str(path.relative_to(NATIVE)), path.read_bytes())]


def _keys() -> list[str]:
    """Those of the libraries that serve this process: with a compiler its own, and one that was exported."""
    compiler = cxx_compiler()
    own = [_key(compiler, variants) for variants in (cpu_variants(), _own_variants())] if compiler else []
    return [*own, exported_key()]


def kept_library() -> Path | None:
    """The path of a library in the cache that serves this process, or None."""
    with suppress(OSError, subprocess.SubprocessError, BuildError):
        for key in _keys():
            if cache.EXTENSIONS.read(key) is not None:
                return cache.EXTENSIONS.path(key)
    return None


def built_library(say: Say, *, every_variant: bool = False) -> Path:
    """The path in the cache of the library for this PyTorch and machine, built if it is not there.

    Args:
        say: called with a line before and after a build, and every few seconds meanwhile.
        every_variant: with the CPU kernels for other machines too, which takes longer.

    Raises:
        BuildError: there is no compiler, or it failed, or the library cannot be kept.
    """
    if not every_variant and (kept := kept_library()) is not None:
        return kept
    with _errors_of_builds():
        variants = cpu_variants() if every_variant else _own_variants()
        key = _key(_compiler(), variants)
        if cache.EXTENSIONS.read(key) is None:
            if problem := _no_folder():
                raise BuildError(problem)
            os.close(_build(key, variants, say))
        return cache.EXTENSIONS.path(key)


def load_library(load: Callable[[int], Library], say: Say) -> Library:
    """What `load` makes of the library for this PyTorch and machine, built if it is not in the cache.

    Args:
        load: called with a descriptor, which is its own from then on; raises OSError where the library cannot be
            loaded. One that came from the cache is then built again, once.
        say: called with a line before and after a build, and every few seconds meanwhile.

    Raises:
        BuildError: there is no compiler, or it failed, or what it built cannot be loaded.
    """
    with _errors_of_builds():
        for key in _keys():
            file = cache.EXTENSIONS.open(key)
            if file is None:
                continue
            try:
                return load(file)
            except OSError as error:
                say(f"kernel_fusion: {cache.EXTENSIONS.path(key)} cannot be loaded and is built again: {error}")
                cache.EXTENSIONS.discard(key, file)
        file = _build(_key(_compiler(), _own_variants()), _own_variants(), say)
        try:
            return load(file)
        except OSError as error:
            os.close(file)
            raise BuildError(f"the extension was built but cannot be loaded: {error}") from error


@contextmanager
def _errors_of_builds() -> Iterator[None]:
    try:
        yield
    except (OSError, subprocess.SubprocessError) as error:
        raise BuildError(f"building the extension failed: {error}") from error


def _compiler() -> tuple[str, ...]:
    compiler = cxx_compiler()
    if compiler is None:
        raise BuildError(f"no C++ compiler was found: {compilers_tried()}")
    return compiler


def _no_folder() -> str | None:
    """Why nothing can be kept, or None."""
    try:
        cache.EXTENSIONS.folder()
    except OSError as error:
        return f"nothing can be kept in {cache.EXTENSIONS.path('').parent}: {error}"
    return None


def _build(key: str, variants: Sequence[str], say: Say) -> int:
    """A descriptor of the library, built by this process or by the one it waited for, and kept where it can be."""
    compiler = _compiler()
    with ExitStack() as stack:
        with suppress(OSError):  # without a folder to meet in, every process builds
            stack.enter_context(jobs.turn(cache.EXTENSIONS.folder(), say))
        if (file := cache.EXTENSIONS.open(key)) is not None:
            return file
        folder = stack.enter_context(jobs.private_folder(_workplaces()))
        command = " ".join(compiler)
        say(f"kernel_fusion: building its C++ extension with {command}, once for this PyTorch (less than a minute) ...")
        start = time.perf_counter()
        library = _compile(compiler, variants, folder, say)
        say(f"kernel_fusion: built in {time.perf_counter() - start:.0f} s")
        if cache.EXTENSIONS.write(key, library.read_bytes()) and (file := cache.EXTENSIONS.open(key)) is not None:
            cache.EXTENSIONS.keep(_KEPT)
            return file
        problem = _no_folder() or f"{cache.EXTENSIONS.path('').parent} cannot be written"
        say(f"kernel_fusion: the next process builds again, because {problem}")
        return os.open(library, os.O_RDONLY)


def copy_of(file: int, stack: ExitStack) -> Path:
    """A copy of a library, in a folder of our own until `stack` is left."""
    copy = stack.enter_context(jobs.private_folder(_workplaces())) / "kernel_fusion.so"
    copy.write_bytes(os.pread(file, os.fstat(file).st_size, 0))
    return copy


def _workplaces() -> list[Path]:
    """The places to build in: temporary files are nearer than a home often is, unless others can change them there."""
    places = [cache.EXTENSIONS.path("").parent]
    with suppress(OSError):
        places.insert(0, Path(tempfile.gettempdir()))
    return places


def _units(variants: Sequence[str], cores: int) -> list[tuple[list[Path], list[str]]]:
    """What is compiled together, and with which flags; the longest first.

    Files that include the same headers share the time these take. So with many cores, where the longest unit decides,
    only the long files stand alone; on few cores there are few units.
    """
    files = sorted(_SOURCES.glob("*.cpp"))
    autograd = [path for path in files if path.stem.endswith("_autograd") or path.stem == "node"]
    cpu = [path for path in files if path.stem.endswith("_cpu")] + sorted((_SOURCES / "cpu").glob("*.cpp"))
    cuda = [path for path in files if path.stem.endswith("_cuda")] + sorted((_SOURCES / "cuda").glob("*.cpp"))
    operators = [path for path in files if path not in (*autograd, *cpu, *cuda)]
    kernels = sorted(_CPU_KERNELS.glob("*.cpp"))
    backward = [path for path in kernels if path.stem.startswith("row_norm_bwd")]
    forward = [path for path in kernels if path.stem in ("row_norm_fwd", "activation_loops")]
    short = [path for path in kernels if path not in (*backward, *forward)]
    if cores >= _MANY_CORES:
        alone = [path for path in autograd + operators if path.stem in _LONG]
        together = [[path for path in unit if path not in alone] for unit in (autograd, operators)]
        host_units = [*([path] for path in alone), *together, cpu, cuda]
        kernel_units = [*([path] for path in backward + forward), short]
    else:
        host_units = [autograd + operators + cpu + cuda]
        kernel_units = [backward, forward, short]
    units = [(files, cpu_flags(variant)) for files in kernel_units for variant in variants]
    return [(files, _include_flags()) for files in host_units] + units


def _include_flags() -> list[str]:
    """Those that every unit has."""
    include = Path(torch.__file__).parent / "include"
    folders = [f"-I{NATIVE}", f"-I{_SOURCES}", "-isystem", str(include)]
    return [*_FLAGS, *folders, "-isystem", str(include / "torch" / "csrc" / "api" / "include")]


def _compile(compiler: Sequence[str], variants: Sequence[str], folder: Path, say: Say) -> Path:
    """Compile every unit in parallel and link them."""
    objects, commands = [], []
    for index, (files, flags) in enumerate(_units(variants, jobs.num_cores())):
        unit, out = folder / f"{index}.cpp", folder / f"{index}.o"
        unit.write_bytes(b"".join(b'#include "%s"\n' % os.fsencode(file) for file in files))
        objects.append(str(out))
        commands.append([*compiler, *flags, "-c", str(unit), "-o", str(out)])
    jobs.run(commands, folder, say)
    library = folder / "kernel_fusion.so"
    jobs.run([[*compiler, "-shared", "-fopenmp", *objects, *link_flags(), "-o", str(library)]], folder, say)
    return library
