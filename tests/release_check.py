"""The check of a release: build the wheel and the source archive, look into them, install and verify.

    python tests/release_check.py [--python 3.10,3.13] [--torch 2.11.0,2.13.0]        (or: make release-check)

Both archives must hold every file of the package that git knows, and the wheel no other. The wheel is then installed
into fresh environments outside the checkout, each with its own cache. `kernel-fusion verify --quick` builds the
extension there and judges every kernel that the machine can run. Without options every Python from 3.10 on that is
found (in PATH, or of pyenv) gets the pinned PyTorch, and the newest of them also the oldest supported one. pip's own
settings, such as PIP_EXTRA_INDEX_URL, decide where packages come from. Needs the package `build`.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
_OLDEST = 10  # the minor version of Python


def build(folder: Path) -> tuple[Path, Path]:
    """The wheel and the source archive."""
    subprocess.run([sys.executable, "-m", "build", "--outdir", folder, ROOT], check=True, stdout=subprocess.DEVNULL)
    (wheel,), (source,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    return wheel, source


def differences(wheel: Path, source: Path) -> list[str]:
    """Files that the archives lack, and files that the wheel should not have."""
    listed = subprocess.run(["git", "ls-files", "kernel_fusion"], cwd=ROOT, check=True, capture_output=True, text=True)
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
    """Install the wheel beside this PyTorch and verify; the end of what failed is printed."""
    environment = {**os.environ, "KERNEL_FUSION_CACHE_DIR": str(folder / "cache")}
    environment.pop("PYTHONPATH", None)
    of_venv = folder / "venv" / "bin"
    commands = [
        [python, "-m", "venv", str(folder / "venv")],
        [str(of_venv / "python"), "-m", "pip", "install", "--quiet", f"torch=={torch}", str(wheel)],
        [str(of_venv / "kernel-fusion"), "verify", "--quick"],
    ]
    for command in commands:
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            print(f"{' '.join(command)}\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
            return False
    return True


def main() -> int:
    """Check everything; 1 if something failed."""
    pinned = re.search(r"^torch==([\d.]+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    oldest = re.search(r"torch>=([\d.]+)", (ROOT / "pyproject.toml").read_text())
    assert pinned
    assert oldest
    parser = argparse.ArgumentParser(description="Build the archives of a release, look into them, install, verify.")
    parser.add_argument("--python", help="versions such as 3.10,3.13; default: all that are found")
    parser.add_argument("--torch", help="versions such as 2.11.0,2.13.0; default: the pinned one, and the oldest")
    arguments = parser.parse_args()
    there = pythons()
    chosen = arguments.python.split(",") if arguments.python else list(there)
    if missing := set(chosen) - set(there):
        parser.error(f"no such Python here: {', '.join(sorted(missing))}; found {', '.join(there)}")
    if arguments.torch:
        pairs = [(version, torch) for version in chosen for torch in arguments.torch.split(",")]
    else:
        pairs = [*((version, pinned[1]) for version in chosen), (chosen[-1], f"{oldest[1]}.0")]
    with tempfile.TemporaryDirectory() as name:
        wheel, source = build(Path(name))
        failed = bool(wrong := differences(wheel, source))
        print("\n".join(wrong) or "both archives are complete")
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
