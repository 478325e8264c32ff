"""The check of a release: build wheels and source archives of both packages, look into them, install and verify.

    python tests/release_check.py [--python 3.10,3.13] [--torch 2.11.0,2.13.0]        (or: make release-check)
    python tests/release_check.py --wheel dist/NAME.whl --beside PYTHON,PYTHON [--output FILE.json]

Both archives of kernel-fusion, and of kernel-fusion-bench, must hold every file of the package that git knows, and the
wheel no other. The wheel of kernel-fusion, which works without the other, is then installed
into fresh environments outside the checkout, each with its own cache. `kernel-fusion verify --quick` builds the
extension there and judges every kernel that the machine can run. Without options every Python from 3.10 on that is
found (in PATH, or of pyenv) gets the pinned PyTorch, and the newest of them also the oldest supported one. pip's own
settings, such as PIP_EXTRA_INDEX_URL, decide where packages come from. Needs the package `build`.

The wheel for Linux, with a library for this PyTorch, must need nothing that its platform lacks. Beside
the pinned PyTorch its first calls must be quick, quiet and have the bits of the built library, without a compiler. The
second command tries a wheel that `make wheel` made beside PyTorch versions that are there. The table of
docs/stability.md is made of the file that it writes.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import statistics
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
_OLDEST = 10  # the minor version of Python
_LARGEST_WHEEL = 5e6  # bytes
_LIMITS = {"import": 0.15, "forward": 0.1, "backward": 0.1}  # seconds of CPU time, of the import beyond PyTorch's
_RUNS = 5

# What the platforms of wheels have, and what PyTorch's own process has loaded.
_NEWEST = {
    "manylinux_2_28": {"GLIBC": (2, 28), "GLIBCXX": (3, 4, 24), "CXXABI": (1, 3, 11), "GCC": (7,)},
    "manylinux_2_34": {"GLIBC": (2, 34), "GLIBCXX": (3, 4, 29), "CXXABI": (1, 3, 13), "GCC": (7,)},
}
_LIBRARIES = {"libc.so.6", "libm.so.6", "libgcc_s.so.1", "libstdc++.so.6", "libc10.so", "libtorch_cpu.so"}
_LOADERS = {"ld-linux-x86-64.so.2", "ld-linux-aarch64.so.1"}

# The first calls of a process, timed, and a digest of many results. A warning is an error.
FIRST_CALLS = """
import hashlib, json, time, warnings
import torch, numpy

warnings.simplefilter("error")

def timed(call):
    start = time.process_time()  # which other work on the machine leaves alone
    result = call()
    return time.process_time() - start, result

seconds = {}
seconds["import"], kf = timed(lambda: __import__("kernel_fusion"))
x, dy = torch.randn(2, 64, 1024).unbind()
weight = torch.randn(1024, requires_grad=True)
seconds["forward"], y = timed(lambda: kf.layer_norm(x.requires_grad_(), (1024,), weight))
seconds["backward"], _ = timed(lambda: (y * dy).sum().backward())

from kernel_fusion.operators import loader

digest = hashlib.sha256()
def add(call, *shapes, dtype):
    tensors = [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]
    torch.manual_seed(1)
    y = call(*tensors)
    dy = torch.randn(y.shape, generator=generator).to(y.dtype)
    for t in (y, *torch.autograd.grad(y, tensors, dy)):
        digest.update(t.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())

generator = torch.Generator().manual_seed(0)
for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
    for rows, cols in ((33, 96), (5, 4097), (2, 70000)):
        for norm in (kf.layer_norm, kf.rms_norm):
            add(lambda x, w: norm(x, (cols,), w), (rows, cols), (cols,), dtype=dtype)
            add(lambda x, w: norm(x, (cols,), w, activation="gelu"), (rows, cols), (cols,), dtype=dtype)
        add(lambda x, r: kf.add_rms_norm(x, r, (cols,), dropout_p=0.1).output, *[(rows, cols)] * 2, dtype=dtype)
        add(kf.softmax, (rows, cols), dtype=dtype)
        add(lambda x: kf.sum_squared(x, -1), (rows, cols), dtype=dtype)
    for activation in kf.ACTIVATIONS:
        add(lambda x, b: kf.bias_act(x, b, activation), (33, 999), (999,), dtype=dtype)
        add(lambda x, g: kf.gated_act(g, x, activation), (33, 999), (33, 999), dtype=dtype)
bits, from_wheel = digest.hexdigest(), loader.is_from_wheel()
print(json.dumps({"seconds": seconds, "bits": bits, "from_wheel": from_wheel, "torch": torch.__version__}))
"""


def build(project: Path, folder: Path) -> tuple[Path, Path]:
    """The wheel and the source archive of a project, in a new folder."""
    subprocess.run([sys.executable, "-m", "build", "--outdir", folder, project], check=True, stdout=subprocess.DEVNULL)
    (wheel,), (source,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    return wheel, source


def differences(project: Path, package: str, wheel: Path, source: Path) -> list[str]:
    """Files that the archives lack, and files that the wheel should not have."""
    listed = subprocess.run(["git", "ls-files", package], cwd=project, check=True, capture_output=True, text=True)
    wanted = set(listed.stdout.split())
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if ".dist-info/" not in name}
    with tarfile.open(source) as archive:
        unpacked = {member.name.partition("/")[2] for member in archive.getmembers() if member.isfile()}
    for path in (wheel, source):
        print(f"{path.name}: {path.stat().st_size / 1e3:.0f} KB")
    print(f"the wheel has {len(packed)} files")
    found = [f"missing in the wheel: {name}" for name in sorted(wanted - packed)]
    found += [f"not of the package, in the wheel: {name}" for name in sorted(packed - wanted)]
    found += [f"missing in the source archive: {name}" for name in sorted({*wanted, "README.md", "LICENSE"} - unpacked)]
    return found


def problems(library: Path) -> list[str]:
    """Libraries and folders that a library of the wheel needs, and that its platform need not have."""
    dynamic = _readelf(library, "--dynamic")
    needed = set(re.findall(r"\(NEEDED\).*\[(.*)\]", dynamic)) - _LIBRARIES - _LOADERS
    found = [f"needs {name}" for name in sorted(needed) if not name.startswith("kernel_fusion-kernels-")]
    found += [f"looks into {path}" for path in re.findall(r"\((?:RUNPATH|RPATH)\).*\[(.*)\]", dynamic)]
    return [f"{library.name} {problem}" for problem in found]


def too_new(library: Path, tag: str) -> list[str]:
    """Versions of symbols that a platform lacks, which come from the system that compiled a library."""
    versions = set(re.findall(r"Name: (\w+?)_([\d.]+)", _readelf(library, "--version-info")))
    newest = _NEWEST[tag]
    newer = [(name, number) for name, number in versions if tuple(map(int, number.split("."))) > newest[name]]
    return [f"{library.name} needs {name}_{number}" for name, number in sorted(newer)]


def _readelf(library: Path, option: str) -> str:
    command = ["readelf", "--wide", option, str(library)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def problems_of_wheel(wheel: Path) -> Iterator[str]:
    """The same of all its libraries, and whether it is too large."""
    tag = next(name for name in _NEWEST if name in wheel.name)
    if wheel.stat().st_size > _LARGEST_WHEEL:
        yield f"{wheel.name} has {wheel.stat().st_size / 1e6:.1f} MB"
    with tempfile.TemporaryDirectory() as name, zipfile.ZipFile(wheel) as archive:
        for each in archive.namelist():
            if each.endswith(".so"):
                library = Path(archive.extract(each, name))
                yield from problems(library) + too_new(library, tag)


def first_calls(python: str, wheel: Path, folder: Path, *, compares: bool) -> dict[str, Any]:
    """What `FIRST_CALLS` says of a wheel beside a PyTorch, without a compiler, and whether a build has its bits."""
    environment = {**os.environ, "KERNEL_FUSION_CACHE_DIR": str(folder / "cache"), "PYTHONPATH": str(folder / "site")}
    environment["OMP_WAIT_POLICY"] = "passive"  # threads that wait take no time
    for name in ("KERNEL_FUSION_BUILD", "PYTHONDONTWRITEBYTECODE"):  # without bytecode every import compiles 70 files
        environment.pop(name, None)
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder / "site")]
    subprocess.run([*install, str(wheel)], env=environment, check=True)

    def run(**changes: str) -> dict[str, Any]:
        command, settings = [python, "-c", FIRST_CALLS], environment | changes
        ran = subprocess.run(command, cwd=folder, env=settings, check=True, capture_output=True, text=True)
        return dict(json.loads(ran.stdout)) | {"stderr": ran.stderr}

    runs = [run(PATH="/nonexistent", CXX="") for _ in range(_RUNS)]
    answer = runs[0] | {"seconds": {name: [each["seconds"][name] for each in runs] for name in _LIMITS}}
    return answer | {"same_bits": run(KERNEL_FUSION_BUILD="1")["bits"] == answer["bits"] if compares else None}


def shortcomings(answer: Mapping[str, Any]) -> list[str]:
    """What is wrong with first calls."""
    seconds = {name: statistics.median(runs) for name, runs in answer["seconds"].items()}
    found = [f"{name} took {seconds[name] * 1e3:.0f} ms" for name, limit in _LIMITS.items() if seconds[name] > limit]
    found += ["another library ran"] * (not answer["from_wheel"]) + [answer["stderr"]] * bool(answer["stderr"])
    return found + ["other bits than those of the built library"] * (answer["same_bits"] is False)


def _saved(answers: list[dict[str, Any]], wheel: Path) -> dict[str, Any]:
    """What a run found, with all that it depends on."""
    from kernel_fusion.cli.machine import versions
    from kernel_fusion_bench.results import load_average, machine

    torches = ", ".join(answer["torch"] for answer in answers)
    return {
        "command": f"python tests/release_check.py --wheel {wheel.name} --beside PYTHON,PYTHON --output FILE.json",
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "machine": machine() | {"load_average_at_end": load_average()},
        "versions": versions() | {"torch": torches},
        "method": "CPU seconds of each of several processes; same_bits: of norms, chains, reductions and softmax of "
        "four dtypes and their gradients, with the library that the same wheel builds beside this PyTorch",
        "wheel": {"name": wheel.name, "bytes": wheel.stat().st_size},
        "first_calls": answers,
    }


def beside(pythons: list[str], wheel: Path, *, compares: bool = True, output: Path | None = None) -> int:
    """Try a wheel beside the PyTorch of each interpreter; 1 if something is wrong."""
    failed = list(problems_of_wheel(wheel))
    print(f"{wheel.name}: {wheel.stat().st_size / 1e6:.2f} MB, {'; '.join(failed) or 'needs what its platform has'}")

    def tried(python: str) -> dict[str, Any]:
        with tempfile.TemporaryDirectory() as folder:
            return first_calls(os.path.abspath(python), wheel, Path(folder), compares=compares)

    with ThreadPoolExecutor(max(1, len(pythons))) as pool:
        answers = list(pool.map(tried, pythons))
    for answer in answers:
        wrong = shortcomings(answer)
        same = f"same bits as a build's: {answer['same_bits']}"
        print(f"torch {answer['torch']}: {'; '.join(wrong) or 'good'}, {answer['seconds']}, {same}", flush=True)
        failed += wrong
    if output:
        output.write_text(json.dumps(_saved(answers, wheel), indent=1) + "\n")
    return int(bool(failed))


def pythons() -> dict[str, str]:
    """Interpreters by their version, such as 3.11."""
    root = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    found = {}
    for minor in range(_OLDEST, sys.version_info.minor + 10):
        there = shutil.which(f"python3.{minor}")
        of_pyenv = sorted(root.glob(f"versions/3.{minor}.*/bin/python"))
        if of_pyenv or there:
            found[f"3.{minor}"] = str(of_pyenv[-1]) if of_pyenv else str(there)
    return found


def passes(python: str, torch: str, wheel: Path, folder: Path) -> bool:
    """Install the pure wheel beside this PyTorch and verify; the end of what failed is printed."""
    environment = {**os.environ, "KERNEL_FUSION_CACHE_DIR": str(folder / "cache")}
    environment.pop("PYTHONPATH", None)
    of_venv = folder / "venv" / "bin"
    commands = [
        [python, "-m", "venv", str(folder / "venv")],
        [str(of_venv / "python"), "-m", "pip", "install", "--quiet", f"torch=={torch}", f"{wheel}[cli]"],
        [str(of_venv / "kernel-fusion"), "verify", "--quick"],
    ]
    for command in commands:
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            print(f"{' '.join(command)}\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
            return False
    return True


def _for_linux(pure: Path, folder: Path) -> int:
    """Make the wheel for Linux with a library for this interpreter's PyTorch, and try it beside that."""
    import release_wheel

    sealed = dict(release_wheel.libraries_here())
    return beside([sys.executable], release_wheel.with_libraries(pure, sealed, platform.machine(), folder))


def main() -> int:
    """Check everything; 1 if something failed."""
    pinned = re.search(r"^torch==([\d.]+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    oldest = re.search(r"torch>=([\d.]+)", (ROOT / "pyproject.toml").read_text())
    assert pinned
    assert oldest
    parser = argparse.ArgumentParser(description="Build the archives of a release, look into them, install, verify.")
    parser.add_argument("--python", help="versions such as 3.10,3.13; default: all that are found")
    parser.add_argument("--torch", help="versions such as 2.11.0,2.13.0; default: the pinned one, and the oldest")
    parser.add_argument("--wheel", type=Path, help="a wheel of `make wheel` to look into instead")
    parser.add_argument(
        "--beside", help="interpreters with a PyTorch each, to try that wheel with, if it is for this machine"
    )
    parser.add_argument("--no-build", action="store_true", help="compare no bits with a library that is built there")
    parser.add_argument("--output", type=Path, help="write what was found beside them into this file")
    arguments = parser.parse_args()
    if arguments.wheel:
        interpreters, compares = arguments.beside.split(",") if arguments.beside else [], not arguments.no_build
        return beside(interpreters, arguments.wheel.resolve(), compares=compares, output=arguments.output)
    there = pythons()
    chosen = arguments.python.split(",") if arguments.python else list(there)
    if missing := set(chosen) - set(there):
        parser.error(f"no such Python here: {', '.join(sorted(missing))}; found {', '.join(there)}")
    if arguments.torch:
        pairs = [(version, torch) for version in chosen for torch in arguments.torch.split(",")]
    else:
        pairs = [*((version, pinned[1]) for version in chosen), (chosen[-1], f"{oldest[1]}.0")]
    with tempfile.TemporaryDirectory() as name:
        failed = False
        for project, package in ((ROOT / "bench", "kernel_fusion_bench"), (ROOT, "kernel_fusion")):
            wheel, source = build(project, Path(name) / package)
            failed |= bool(wrong := differences(project, package, wheel, source))
            print("\n".join(wrong) or "both archives are complete")
        failed |= bool(_for_linux(wheel, Path(name)))
        for version, torch in pairs:
            folder = Path(name) / f"{version}-{torch}"
            folder.mkdir()
            good = passes(there[version], torch, wheel, folder)
            failed |= not good
            print(f"Python {version}, torch {torch}: {'verified' if good else 'FAILED'}", flush=True)
            shutil.rmtree(folder)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
