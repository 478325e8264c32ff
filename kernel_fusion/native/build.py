"""Builds the C++ extension with the C++ compiler alone: no CUDA toolkit, no ninja, no manual step.

A library has the CPU kernels for this machine's best instruction set; one built ahead has all. An atomic rename stores
a library, so nobody loads what a killed builder left. `torch.utils.cpp_extension` needs ninja, and its lock file blocks
forever after a killed build.
"""

from __future__ import annotations

import os
import platform
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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

# For several PyTorch versions and compilers.
_KEPT = 16
# With this many cores, long files are compiled alone, the others in fours.
_MANY_CORES, _TOGETHER = 6, 4
_LONG = {"node", "dispatch", "activation_loops", "row_norm_fwd", "row_norm_bwd", "row_norm_bwd_own"}
_LONG |= {"row_norm_bwd_staged", "row_norm_bwd_staged_fp16_fp64"}

NATIVE = Path(__file__).parent
_SOURCES = NATIVE / "extension"
_CPU_KERNELS = _SOURCES / "cpu" / "kernels"
_SUFFIXES = (".cpp", ".h", ".cuh", ".digest")

# No flag changes NaN or Inf, and nothing is contracted: a * b - round(a * b) must be 0. The operators loop over no
# elements: -O2 would compile them for twice as long, and make no call quicker. The CPU kernels override it.
_FLAGS = [
    *("-std=c++20", "-O1", "-fPIC", "-fvisibility=hidden", "-w"),
    *("-fno-math-errno", "-ffp-contract=off"),
    f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
    "-DAT_PER_OPERATOR_HEADERS",
    "--param=ggc-min-heapsize=700000",  # kB; collecting garbage takes time
]
# Ours run where PyTorch's AVX2 kernels do. CPU_CAPABILITY names their namespaces: else the linker would keep one
# variant's inline functions.
_X86_VARIANTS = {
    "DEFAULT": ["-O2"],  # -O3 doubles the build time
    "AVX2": ["-O3", "-mavx2", "-mfma", "-mf16c"],
    "AVX512": ["-O3", "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mfma", "-mf16c"],
}
TORCH = Path(torch.__file__).parent
Variants = Mapping[str, Sequence[str]]


def variants_of(machine: str) -> Variants:
    """The instruction sets that CPU kernels can have on a machine, with the compiler's flags for each."""
    return _X86_VARIANTS if machine in ("x86_64", "AMD64") else {"DEFAULT": ["-O3"]}


_VARIANTS = variants_of(platform.machine())


def cpu_variants() -> list[str]:
    """Instruction sets that CPU kernels can have here."""
    return list(_VARIANTS)


def own_variants() -> list[str]:
    """This process's, as in extension/cpu/variant.cpp."""
    best = torch.backends.cpu.get_cpu_capability()
    return [best if best in _VARIANTS else "DEFAULT"]


def cpu_flags(variant: str, torch_folder: Path = TORCH, variants: Variants = _VARIANTS) -> list[str]:
    """A variant's compiler flags."""
    names = [f"-DCPU_CAPABILITY={variant}", f"-DCPU_CAPABILITY_{variant}"]
    return [*include_flags(torch_folder), *names, *variants[variant]]


def link_flags() -> list[str]:
    """Linker flags for the libraries of this process's PyTorch, after the objects.

    PyTorch's C++ library comes first: beside it, a static one would format numbers with its tables and crash.
    """
    return [*_loaded_cxx_library(), f"-L{TORCH / 'lib'}", "-lc10", "-ltorch_cpu", "-ldl"]


def _loaded_cxx_library() -> list[str]:
    try:
        maps = Path("/proc/self/maps").read_text()
    except OSError:
        return []
    paths = (line.split(maxsplit=5)[-1] for line in maps.splitlines() if "/libstdc++.so" in line)
    return list(paths)[:1]


def source_files() -> list[Path]:
    """Every native source, in a fixed order, and the digest of the headers that a build writes."""
    paths = (os.path.join(folder, name) for folder, _, names in os.walk(NATIVE) for name in names)
    return [Path(path) for path in sorted(paths) if path.endswith(_SUFFIXES)]


@lru_cache
def compiler_version(compiler: tuple[str, ...]) -> str:
    """The output of `compiler --version`."""
    command = [*compiler, "--version"]
    with no_fork:
        return subprocess.run(command, capture_output=True, text=True, errors="replace", check=True).stdout


def _key(compiler: tuple[str, ...], variants: Sequence[str], sources: str | None = None) -> str:
    flags = repr((compiler[1:], _FLAGS, {variant: _VARIANTS[variant] for variant in variants}))
    sources = sources or sources_digest()
    return cache.digest(torch.__version__, compiler_version(compiler), flags, platform.machine(), sources)


def exported_key(sources: str | None = None) -> str:
    """The key of an exported library, by any compiler."""
    return cache.digest("exported", torch.__version__, platform.machine(), sources or sources_digest())


def sources_digest() -> str:
    """A digest of every native source."""
    prefix = f"{NATIVE}{os.sep}"
    return cache.digest(
        *(part for path in source_files() for part in (str(path).removeprefix(prefix), path.read_bytes()))
    )


def _keys() -> Iterator[str]:
    """This process's keys, with a compiler, and an exported library's."""
    sources = sources_digest()
    if compiler := cxx_compiler():
        for variants in (cpu_variants(), own_variants()):
            yield _key(compiler, variants, sources)
    yield exported_key(sources)


def kept_library() -> Path | None:
    """A cached library for this process, or None."""
    with suppress(OSError, subprocess.SubprocessError, BuildError):
        for key in _keys():
            if cache.EXTENSIONS.read(key) is not None:
                return cache.EXTENSIONS.path(key)
    return None


def built_library(say: Say, *, every_variant: bool = False) -> Path:
    """The cached library for this PyTorch and machine, built if missing.

    Args:
        say: gets a line before and after a build, and every few seconds.
        every_variant: include other machines' CPU kernels.

    Raises:
        BuildError: there is no compiler, it failed, or the library cannot be stored.
    """
    if not every_variant and (kept := kept_library()) is not None:
        return kept
    with _errors_of_builds():
        variants = cpu_variants() if every_variant else own_variants()
        key = _key(required_compiler(), variants)
        if cache.EXTENSIONS.read(key) is None:
            if problem := _no_folder():
                raise BuildError(problem)
            os.close(_build(key, variants, say))
        return cache.EXTENSIONS.path(key)


def load_library(load: Callable[[int], Library], say: Say) -> Library:
    """`load` the library for this PyTorch and machine, built if missing.

    Args:
        load: owns a descriptor; raises OSError if loading fails. A cached library is then built again, once.
        say: as for `built_library`.

    Raises:
        BuildError: there is no compiler, it failed, or loading does.
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
        variants = own_variants()
        file = _build(_key(required_compiler(), variants), variants, say)
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


def required_compiler() -> tuple[str, ...]:
    """The C++ compiler's command, or BuildError."""
    compiler = cxx_compiler()
    if compiler is None:
        raise BuildError(f"no C++ compiler was found: {compilers_tried()}")
    return compiler


def _no_folder() -> str | None:
    try:
        cache.EXTENSIONS.folder()
    except OSError as error:
        return f"nothing can be kept in {cache.EXTENSIONS.path('').parent}: {error}"
    return None


def _build(key: str, variants: Sequence[str], say: Say) -> int:
    """A library's descriptor, built here or by another process."""
    compiler = required_compiler()
    with ExitStack() as stack:
        with suppress(OSError):  # every process then builds
            stack.enter_context(jobs.turn(cache.EXTENSIONS.folder(), say))
        if (file := cache.EXTENSIONS.open(key)) is not None:
            return file
        folder = stack.enter_context(jobs.private_folder(_workplaces()))
        command = " ".join(compiler)
        say(f"kernel_fusion: building its C++ extension with {command}, once for this PyTorch (less than a minute) ...")
        start = time.perf_counter()
        units = [*host_units(jobs.num_cores()), *kernel_units(variants, jobs.num_cores())]
        library = compile_library(compiler, units, link_flags(), folder, say)
        say(f"kernel_fusion: built in {time.perf_counter() - start:.0f} s")
        if cache.EXTENSIONS.write(key, library.read_bytes()) and (file := cache.EXTENSIONS.open(key)) is not None:
            cache.EXTENSIONS.keep(_KEPT)
            return file
        problem = _no_folder() or f"{cache.EXTENSIONS.path('').parent} cannot be written"
        say(f"kernel_fusion: the next process builds again, because {problem}")
        return os.open(library, os.O_RDONLY)


def copy_of(file: int, stack: ExitStack) -> Path:
    """A private copy of a library, until `stack` closes."""
    copy = stack.enter_context(jobs.private_folder(_workplaces())) / "kernel_fusion.so"
    copy.write_bytes(os.pread(file, os.fstat(file).st_size, 0))
    return copy


def _workplaces() -> list[Path]:
    """Safe places to build, the nearest first."""
    places = [cache.EXTENSIONS.path("").parent]
    with suppress(OSError):
        places.insert(0, Path(tempfile.gettempdir()))
    return places


Unit = tuple[list[Path], list[str]]


def host_units(cores: int, torch_folder: Path = TORCH) -> list[Unit]:
    """Files of the operators to compile together, since they share headers, and flags."""
    files = sorted(path for folder in (".", "cpu", "cuda") for path in (_SOURCES / folder).glob("*.cpp"))
    return [(part, include_flags(torch_folder)) for part in _dealt(files, 1, cores)]


def kernel_units(
    names: Iterable[str], cores: int, torch_folder: Path = TORCH, variants: Variants = _VARIANTS
) -> list[Unit]:
    """The same of the CPU kernels, for instruction sets by their `names`."""
    kernels = sorted(_CPU_KERNELS.glob("*.cpp"))
    backward = [path for path in kernels if path.stem.startswith("row_norm_bwd")]
    forward = [path for path in kernels if path not in backward]
    parts = [*_dealt(forward, 1, cores), *_dealt(backward, 2, cores)]
    return [(files, cpu_flags(name, torch_folder, variants)) for files in parts for name in names]


def _dealt(files: list[Path], count: int, cores: int) -> list[list[Path]]:
    """`files` as `count` units, on many cores as more."""
    alone: list[Path] = []
    if cores >= _MANY_CORES:
        alone = [path for path in files if path.stem in _LONG]
        files = [path for path in files if path not in alone]
        count = -(-len(files) // _TOGETHER)
    return [*([path] for path in alone), *(files[i::count] for i in range(count))]


def include_flags(torch_folder: Path = TORCH) -> list[str]:
    """Compiler flags for our headers and PyTorch's."""
    include = torch_folder / "include"
    folders = [f"-I{NATIVE}", f"-I{_SOURCES}", "-isystem", str(include)]
    return [*_FLAGS, *folders, "-isystem", str(include / "torch" / "csrc" / "api" / "include")]


def compile_library(
    compiler: Sequence[str], units: Sequence[Unit], link: Sequence[str], folder: Path, say: Say
) -> Path:
    """Compile all units in parallel, those of one long file first, and link them with the flags `link`."""
    from kernel_fusion.native import headers  # which needs all plans

    headers.write(folder)
    objects, commands = [], []
    for index, (files, flags) in enumerate(sorted(units, key=lambda unit: len(unit[0]) > 1)):
        unit, out = folder / f"{index}.cpp", folder / f"{index}.o"
        unit.write_bytes(b"".join(b'#include "%s"\n' % os.fsencode(file) for file in files))
        objects.append(str(out))
        commands.append([*compiler, *flags, f"-I{folder}", "-c", str(unit), "-o", str(out)])
    jobs.run(commands, folder, say)
    library = folder / "kernel_fusion.so"
    jobs.run([[*compiler, "-shared", *objects, *link, "-o", str(library)]], folder, say)
    return library
