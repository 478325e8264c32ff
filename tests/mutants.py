"""Plants faults, one at a time, and runs the tests that should find them: proof that these can fail.

    python tests/mutants.py --list                         # the faults of mutant_list.py, and who catches them
    python tests/mutants.py --output FILE.json             # those that tests without a GPU catch
    python tests/mutants.py --cuda --output FILE.json      # those that only tests on an NVIDIA GPU catch
    python tests/mutants.py --only NAME                    # one of them, whatever it needs

Each fault is planted in a copy of the tree, with a cache of its own, which begins with the libraries in the user's: a
fault in their sources has another key. The tests that are to catch it run first in a copy without faults, where they
must pass. The exit code is 0 if every fault was caught.

Compiling the extension for each fault would take most of the time, so CXX names this file, which remembers objects: an
object is made anew if its command or a file of the tree that it includes has changed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
_UNNEEDED = shutil.ignore_patterns(".*", "__pycache__", "results", "_build")
# Variables for the caching compiler: the tree, the folder of objects, and the compiler itself.
_TREE, _OBJECTS, _COMPILER = "MUTANTS_TREE", "MUTANTS_OBJECTS", "MUTANTS_COMPILER"


@dataclass(frozen=True)
class Mutant:
    """A fault.

    Attributes:
        name: what the fault is; its first word is the layer that has it.
        file: the file in which `old`, which stands there exactly once, is replaced by `new`.
        tests: what must catch it: the id of a test function, and perhaps `-k` with a part of its parameters' ids.
        cuda: whether these tests need an NVIDIA GPU.
    """

    name: str
    file: str
    old: str
    new: str
    tests: str
    cuda: bool = False

    def planted(self, text: str) -> str:
        """The text of the file with the fault."""
        count = text.count(self.old)
        if count != 1 or self.old == self.new:
            raise ValueError(f"{self.name}: {self.old!r} must stand in {self.file} exactly once, it does {count} times")
        return text.replace(self.old, self.new)


@dataclass(frozen=True)
class _Outcome:
    """The exit code and the output of pytest, and the CPU time that it took with all that it started."""

    code: int
    output: str
    seconds: float


def _tested(tree: Path, work: Path, tests: list[str], *, cuda: bool) -> _Outcome:
    """Run pytest in a tree, with a cache that has built libraries and no more."""
    from kernel_fusion.config import cache_dir  # not for the compiler, which runs without packages

    marks = "cuda" if cuda else "not slow and not cuda"
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-rf", "--tb=no", "-p", "no:cacheprovider", "-m", marks]
    with tempfile.TemporaryDirectory(dir=work) as cache, tempfile.TemporaryFile("w+") as output:
        if (built := cache_dir() / "extension").exists():
            shutil.copytree(built, Path(cache, "extension"))
        environment = {
            **os.environ,
            _TREE: str(tree),
            _OBJECTS: str(work / "objects"),
            _COMPILER: os.environ.get("CXX") or shutil.which("g++") or "clang++",
            "CXX": str(work / "compiler"),
            "KERNEL_FUSION_CACHE_DIR": cache,
            "TMPDIR": cache,
            "PYTHONPATH": str(tree),
            "OMP_WAIT_POLICY": "passive",
            "COLUMNS": "400",  # or the words of a failure are cut off
        }
        process = subprocess.Popen(
            [*command, *tests], cwd=tree, env=environment, stdout=output, stderr=subprocess.STDOUT, text=True
        )
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        output.seek(0)
        return _Outcome(process.returncode, output.read(), round(usage.ru_utime + usage.ru_stime, 1))


def _copy(work: Path, name: str) -> Path:
    """The tree, without what was generated in it."""
    return Path(shutil.copytree(ROOT, work / name, ignore=_UNNEEDED))


def run(mutant: Mutant, work: Path) -> dict[str, Any]:
    """Plant a fault and run its tests: which one failed, and in which words."""
    tree = _copy(work, hashlib.sha256(mutant.name.encode()).hexdigest()[:12])
    try:
        file = tree / mutant.file
        file.write_text(mutant.planted(file.read_text()))
        outcome = _tested(tree, work, shlex.split(mutant.tests), cuda=mutant.cuda)
    finally:
        shutil.rmtree(tree)
    failed = re.search(r"^FAILED (\S+?\.py::.*?)(?: - (.*))?$", outcome.output, re.MULTILINE)
    test, words = (failed[1], (failed[2] or "")[:160]) if failed else (None, "")
    if outcome.code != (1 if failed else 0):  # the fault was not planted where tests run: it does not compile, say
        test, words = None, f"pytest ended with {outcome.code}: {outcome.output[-3000:]}"
    return {"name": mutant.name, "file": mutant.file, "test": test, "words": words, "cpu_seconds": outcome.seconds}


def _together(mutants: list[Mutant]) -> Iterator[tuple[list[str], bool]]:
    """The tests that catch the mutants, grouped into as few runs of pytest as choose the same tests."""
    for cuda in (False, True):
        selections = {mutant.tests for mutant in mutants if mutant.cuda == cuda}
        chosen = {selection for selection in selections if "-k" in selection}
        yield from ((shlex.split(selection), cuda) for selection in sorted(chosen))
        if selections - chosen:
            yield sorted(selections - chosen), cuda


def run_all(mutants: list[Mutant], jobs: int, work: Path, output: Path | None) -> list[dict[str, Any]]:
    """Run the tests without a fault, where all must pass, and then with each; record each result as it comes."""
    for mutant in mutants:
        mutant.planted((ROOT / mutant.file).read_text())
    script = f'#!/bin/sh\nexec "{sys.executable}" -S "{__file__}" --compile "$@"\n'
    (work / "compiler").write_text(script)
    (work / "compiler").chmod(0o755)
    (work / "objects").mkdir(exist_ok=True)
    for tests, cuda in _together(mutants):
        tree = _copy(work, "whole")
        outcome = _tested(tree, work, [*tests, "-n", str(jobs if jobs > 1 else 0)], cuda=cuda)
        shutil.rmtree(tree)
        summary = outcome.output.strip().splitlines()[-1]
        if outcome.code != 0 or " passed" not in summary:
            raise RuntimeError(f"{tests} fail without a fault, exit code {outcome.code}:\n{outcome.output[-3000:]}")
        print(f"without a fault: {summary}", flush=True)

    recording = threading.Lock()

    def reported(mutant: Mutant) -> dict[str, Any]:
        result = run(mutant, work)
        verdict = f"caught by {result['test']}" if result["test"] else f"SURVIVED {result['words']}"
        print(f"{mutant.name}: {verdict} ({result['cpu_seconds']:.0f} s of CPU time)", flush=True)
        if output:
            with recording:
                _record(output, result)
        return result

    with ThreadPoolExecutor(jobs) as pool:
        return list(pool.map(reported, mutants))


# ---- The compiler that remembers -------------------------------------------------------------------------------------


def _digest(*parts: bytes) -> str:
    return hashlib.sha256(b"".join(len(part).to_bytes(8, "little") + part for part in parts)).hexdigest()


def compile_remembering(arguments: list[str]) -> int:
    """Do what the compiler would do; an object that was made before is copied."""
    tree, objects = os.environ[_TREE], os.environ[_OBJECTS]
    compiler = shlex.split(os.environ[_COMPILER])
    if "-c" not in arguments:
        return subprocess.run([*compiler, *arguments]).returncode
    source, out = (arguments[arguments.index(option) + 1] for option in ("-c", "-o"))
    command = [*compiler, *(argument for argument in arguments if argument not in (source, out))]
    key = _digest(*(text.replace(tree, "").encode() for text in (*command, Path(source).read_text())))
    included = Path(objects, f"{key}.included")

    def remembered() -> Path:
        files = included.read_text().splitlines()
        return Path(objects, _digest(key.encode(), *(Path(tree, file).read_bytes() for file in files)) + ".o")

    if not (included.exists() and remembered().exists()):
        listed = f"{out}.included"
        code = subprocess.run([*compiler, *arguments, "-MMD", "-MF", listed]).returncode
        if code != 0:
            return code
        words = Path(listed).read_text().replace("\\\n", " ").split()
        files = sorted({os.path.relpath(word, tree) for word in words if word.startswith(f"{tree}/")})
        _write(included, "\n".join(files).encode())
        _write(remembered(), Path(out).read_bytes())
    shutil.copyfile(remembered(), out)
    return 0


def _write(path: Path, content: bytes) -> None:
    """Whole or not at all, since others read at the same time."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    temporary.write_bytes(content)
    temporary.replace(path)


def _record(file: Path, result: dict[str, Any]) -> None:
    """Write a result beside those of other faults that the file has, in the order of the list."""
    from mutant_list import MUTANTS

    sys.path.insert(0, str(ROOT))
    import torch

    from kernel_fusion.cli.machine import versions
    from kernel_fusion_bench.results import machine

    before = json.loads(file.read_text())["mutants"] if file.exists() else []
    results = {each["name"]: each for each in [*before, result]}
    content = {
        "command": shlex.join(["python", *sys.argv]),
        "machine": machine(torch.device("cuda:0" if torch.cuda.is_available() else "cpu")),
        "versions": versions(),
        "mutants": [results[mutant.name] for mutant in MUTANTS if mutant.name in results],
    }
    _write(file, (json.dumps(content, indent=1) + "\n").encode())


# ---- The command -----------------------------------------------------------------------------------------------------


def main() -> int:
    """The command line."""
    if sys.argv[1:2] == ["--compile"]:
        return compile_remembering(sys.argv[2:])
    from mutant_list import MUTANTS

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--list", action="store_true", help="print the faults and run nothing")
    parser.add_argument("--only", action="append", metavar="NAME", help="this fault; may be repeated")
    parser.add_argument("--cuda", action="store_true", help="the faults that only tests on an NVIDIA GPU catch")
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 1) // 2), help="faults at a time")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write who caught what, as JSON")
    parser.add_argument("--work", type=Path, metavar="DIR", help="keep compiled objects here for the next run")
    arguments = parser.parse_args()
    unknown = set(arguments.only or ()) - {mutant.name for mutant in MUTANTS}
    if unknown:
        parser.error(f"no fault is called {', '.join(sorted(unknown))}; --list prints their names")
    chosen = [m for m in MUTANTS if (m.name in arguments.only if arguments.only else m.cuda == arguments.cuda)]
    if arguments.list:
        for mutant in MUTANTS:
            print(f"{mutant.name} ({mutant.file}): {mutant.tests}{' on a GPU' if mutant.cuda else ''}")
        return 0
    with tempfile.TemporaryDirectory(prefix="kernel_fusion-mutants-") as folder:
        work = (arguments.work or Path(folder)).resolve()
        work.mkdir(parents=True, exist_ok=True)
        results = run_all(chosen, arguments.jobs, work, arguments.output)
    caught = sum(result["test"] is not None for result in results)
    print(f"{caught} of {len(results)} caught")
    return 0 if caught == len(results) else 1


if __name__ == "__main__":
    sys.exit(main())
