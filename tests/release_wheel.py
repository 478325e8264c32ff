"""The wheel for Linux: the pure one, and the libraries that `kernel_fusion/native/prebuilt.py` opens.

    python tests/release_wheel.py [--torch 2.11.0,2.13.0] [--machine aarch64]        (or: make wheel)

A library is compiled for each version of PyTorch, against the headers of its own wheel, which pip downloads into
`build/torch` unless this interpreter has that version; all of its minor version's releases take it. One more library
has the CPU kernels of every instruction set. They name no folder of this machine, and need nothing beyond what the
platform of the wheel's name has, and PyTorch; tests/release_symbols.h makes a newer system's compiler do so.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import platform
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch

from kernel_fusion.core import cache
from kernel_fusion.native import build, jobs, prebuilt

ROOT = Path(__file__).parents[1]
VERSIONS = ("2.11.0", "2.12.1", "2.13.0", "2.14.1", "2.15.0")
# PyTorch's libraries bring what GCC 11 added to libstdc++; their stand-ins for another machine do not.
PLATFORMS = {"x86_64": "manylinux_2_28", "aarch64": "manylinux_2_34"}
_SYMBOLS = ROOT / "tests" / "release_symbols.h"
_NEEDED = ("torch/lib/libc10.so", "torch/lib/libtorch_cpu.so")
_DOWNLOADS = ROOT / "build" / "torch"
_INSIDE = "kernel_fusion/native/prebuilt"  # a folder of the wheel


def torch_folder(version: str, downloads: Path) -> Path:
    """The folder `torch` of a version: this interpreter's, or what is needed of the one that pip finds."""
    if torch.__version__.partition("+")[0] == version:
        return build.TORCH
    folder = downloads / version
    if not (folder / _NEEDED[-1]).exists():
        with tempfile.TemporaryDirectory() as name:
            options = [
                "--no-deps",
                "--only-binary=:all:",
                "--python-version=3.12",
                f"--dest={name}",
                f"torch=={version}",
            ]
            subprocess.run([sys.executable, "-m", "pip", "download", "--quiet", *options], check=True)
            (wheel,) = Path(name).glob("*.whl")
            with zipfile.ZipFile(wheel) as archive:
                wanted = [each for each in archive.namelist() if each in _NEEDED or each.startswith("torch/include/")]
                archive.extractall(folder, sorted(wanted, key=_NEEDED.__contains__))
    return folder / "torch"


def _compiler(machine: str) -> list[str]:
    if machine == platform.machine():
        return list(build.required_compiler())
    return [f"{machine}-linux-gnu-g++"]


def _stand_ins(libraries: Sequence[Path], machine: str, folder: Path) -> Path:
    """Empty libraries of another machine in the place of PyTorch's: a link asks them for their names alone."""
    for path in libraries:
        command = [*_compiler(machine), "-shared", "-x", "c++", "/dev/null", f"-Wl,-soname,{path.name}"]
        subprocess.run([*command, "-o", str(folder / path.name)], check=True)
    return folder


def libraries(folders: Mapping[str, Path], machine: str, variants: Sequence[str]) -> Iterator[tuple[str, bytes]]:
    """The sealed libraries by their names in the package.

    Args:
        folders: the folder `torch` for each minor version; the newest has the headers of the CPU kernels.
        machine: as `uname -m` names it.
        variants: the instruction sets.
    """
    compiler, sources = _compiler(machine), build.sources_digest()
    cores, all_variants = jobs.num_cores(), build.variants_of(machine)
    soname = f"kernel_fusion-kernels-{sources[:16]}.so"
    newest = list(folders.values())[-1]
    with tempfile.TemporaryDirectory() as name:
        kernels: list[str] = []
        for each, torch_at in ((prebuilt.KERNELS, newest), *folders.items()):
            folder = Path(name, each)
            folder.mkdir()
            lib = torch_at / "lib"
            if machine != platform.machine():
                lib = _stand_ins([torch_at.parent / path for path in _NEEDED], machine, folder)
            if each == prebuilt.KERNELS:
                units = build.kernel_units(variants, cores, torch_at, all_variants)
            else:
                units = build.host_units(cores, torch_at)
            maps = [f"-ffile-prefix-map={path}={path.name}" for path in (torch_at, build.NATIVE, folder)]
            own = soname if each == prebuilt.KERNELS else f"kernel_fusion-{each}.so"
            # The symbols of the kernels are weak, and stand-ins have none.
            link = [
                "-Wl,--no-as-needed",
                *kernels,
                f"-L{lib}",
                "-lc10",
                "-ltorch_cpu",
                "-s",
                "-Wl,-z,now",
                f"-Wl,-soname,{own}",
            ]
            command = [*compiler, *maps, "-include", str(_SYMBOLS)]
            made = build.compile_library(command, units, link, folder, print)
            kernels = kernels or [str(made)]
            yield each, cache.seal(made.read_bytes(), prebuilt.key_of(each, machine, sources))


def libraries_here() -> Iterator[tuple[str, bytes]]:
    """Those for this interpreter's PyTorch and machine."""
    minor = ".".join(torch.__version__.split(".")[:2])
    return libraries({minor: build.TORCH}, platform.machine(), build.cpu_variants())


def with_libraries(pure: Path, sealed: Mapping[str, bytes], machine: str, outdir: Path) -> Path:
    """The wheel for one platform, made of the pure wheel."""
    tag = f"py3-none-{PLATFORMS[machine]}_{machine}"
    wheel = outdir / pure.name.replace("py3-none-any", tag)
    with zipfile.ZipFile(pure) as source:
        files = {name: source.read(name) for name in source.namelist()}
    (about,) = (name for name in files if name.endswith(".dist-info/WHEEL"))
    record = about.replace("/WHEEL", "/RECORD")
    text = files[about].decode().replace("Root-Is-Purelib: true", "Root-Is-Purelib: false")
    files[about] = text.replace("py3-none-any", tag).encode()
    files |= {f"{_INSIDE}/{name}.so": content for name, content in sealed.items()}
    del files[record]
    lines = [f"{name},sha256={_hash(content)},{len(content)}" for name, content in files.items()]
    files[record] = "\n".join([*lines, f"{record},,", ""]).encode()
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as target:
        for name, content in files.items():
            info = zipfile.ZipInfo(name)  # its date is always the same
            info.compress_type, info.external_attr = zipfile.ZIP_DEFLATED, 0o100644 << 16
            target.writestr(info, content)
    return wheel


def _hash(content: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()


def pure_wheel(folder: Path) -> Path:
    """The wheel without libraries, made of the source archive, so that nothing is left in it of an earlier build."""
    command = [sys.executable, "-m", "build", "--outdir", str(folder), str(ROOT)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    (wheel,) = folder.glob("*.whl")
    return wheel


def main() -> None:
    """Build the wheel into `dist`."""
    parser = argparse.ArgumentParser(description="Build the wheel for Linux, with libraries for versions of PyTorch.")
    parser.add_argument("--torch", default=",".join(VERSIONS), help="versions, such as 2.11.0,2.13.0")
    parser.add_argument("--machine", default=platform.machine(), help="such as aarch64, with Debian's cross compiler")
    parser.add_argument("--downloads", type=Path, default=_DOWNLOADS, help="the folder of PyTorch's headers")
    parser.add_argument("--outdir", type=Path, default=ROOT / "dist")
    given = parser.parse_args()
    versions = sorted(given.torch.split(","), key=lambda version: [int(part) for part in version.split(".")])
    folders = {version.rpartition(".")[0]: torch_folder(version, given.downloads) for version in versions}
    given.outdir.mkdir(parents=True, exist_ok=True)
    sealed = {}
    for name, content in libraries(folders, given.machine, list(build.variants_of(given.machine))):
        print(f"{name}: {len(content) / 1e6:.2f} MB", flush=True)
        sealed[name] = content
    with tempfile.TemporaryDirectory() as folder:
        wheel = with_libraries(pure_wheel(Path(folder)), sealed, given.machine, given.outdir)
    print(f"{wheel}: {wheel.stat().st_size / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
