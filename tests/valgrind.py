"""Every verb on small tensors, forward and backward, under valgrind's memcheck.

    python tests/valgrind.py        (apt-get install valgrind)

Memcheck sees what is read or written beside a tensor, and what is decided by memory that nobody wrote. The interpreter
and PyTorch have findings of their own, so an error counts if our extension is on the stack: where it happened, or where
the memory was allocated whose values were missing. Leaks are not looked for. One error is made on purpose, and must be
found. Valgrind knows no AVX-512, so it is the AVX2 build that runs. The exit code is 0 if nothing but the deliberate
error was found. It takes about six minutes.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections import Counter
from itertools import product
from pathlib import Path

import torch
from support import CPU
from verbs import VERBS, Verb, cotangents, gradients, results

from kernel_fusion.cli.machine import versions
from kernel_fusion.core.spec import dtype_name
from kernel_fusion.operators import loader
from kernel_fusion_bench.results import machine

# One element; no whole vector; whole vectors and a tail, in several blocks of rows; a row longer than a stretch; one of
# which two threads share the stretches.
SHAPES = ((1, 1), (3, 17), (64, 255), (5, 4099), (1, 16390))
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_DELIBERATE = "kf_use_cpu_variant"
# An allocator that valgrind sees, also for what Python allocates.
_ENVIRONMENT = {"ATEN_CPU_CAPABILITY": "avx2", "OMP_NUM_THREADS": "1", "PYTHONMALLOC": "malloc"}


def run(verb: Verb, rows: int, cols: int, dtype: torch.dtype) -> None:
    """Inference, training forward and backward, and a decision on every value of the results."""
    leaves = verb.leaves(CPU, rows, cols, dtype)
    with torch.no_grad():
        inference = results(verb.on(CPU)(*leaves))
    with verb.ran(CPU, forward=None, backward=None):
        outputs = verb.on(CPU)(*leaves)
        grads = gradients(outputs, leaves, cotangents(outputs))
    for t in (*inference, *results(outputs), *grads):
        bool(t.isfinite().all())


def make_an_error() -> None:
    """Have the extension read a name that nothing terminates, beyond the end of its memory."""
    libc = ctypes.CDLL(None)
    libc.malloc.restype = ctypes.c_void_p
    name = ctypes.c_void_p(libc.malloc(4))
    ctypes.memset(name, ord("A"), 4)
    loader.library().kf_use_cpu_variant(name)


def run_everything() -> None:
    """Make every call that valgrind watches."""
    assert loader.cpu_variant() == "AVX2", loader.cpu_variant()
    for verb, (rows, cols), dtype in product(VERBS.values(), SHAPES, DTYPES):
        torch.set_num_threads(2 if cols > 8192 else 1)  # valgrind runs one at a time
        run(verb, rows, cols, dtype)
    make_an_error()


def watch(report: Path) -> None:
    """Run everything under valgrind, which writes its findings to `report`."""
    # XML brings leaks along, whatever --leak-check says.
    options = ["--show-leak-kinds=none", "--track-origins=yes", "--error-limit=no", "--num-callers=40"]
    command = ["valgrind", *options, "--xml=yes", f"--xml-file={report}", sys.executable, __file__, "--watched"]
    subprocess.run(command, check=True, env=os.environ | _ENVIRONMENT)


def errors(report: Path) -> tuple[list[str], Counter[str]]:
    """The errors with our extension on a stack, in words, and how many others there are of each kind."""
    libraries = Path(loader.library()._name).resolve().parent  # this process may have another one than the watched
    ours, others = [], Counter[str]()
    for error in ElementTree.parse(report).getroot().iter("error"):
        kind = str(error.findtext("kind"))
        if any(Path(str(frame.findtext("obj"))).parent == libraries for frame in error.iter("frame")):
            frames = (str(frame.findtext("fn")) for frame in error.iter("frame"))
            what = error.findtext("what") or error.findtext("xwhat/text")
            ours.append("\n    ".join([f"{kind}: {what}", *frames]))
        else:
            others[kind] += 1
    return ours, others


def main() -> int:
    """Build the extension, have it watched, and print what was found; the number of errors that count."""
    assert loader.load(), loader.error()
    version = subprocess.run(["valgrind", "--version"], capture_output=True, text=True, check=True).stdout.strip()
    facts = {"valgrind": version} | machine(torch.device("cpu")) | versions()
    print("python tests/valgrind.py", *(f"{name}: {fact}" for name, fact in facts.items()), sep="\n", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        watch(Path(folder, "report.xml"))
        ours, others = errors(Path(folder, "report.xml"))
    found = [error for error in ours if _DELIBERATE not in error]
    count = len(VERBS) * len(SHAPES) * len(DTYPES)
    print(f"{count} calls: {', '.join(VERBS)}; {SHAPES}; {', '.join(map(dtype_name, DTYPES))}")
    print("each in inference, in training and backward")
    print(f"errors without our extension on the stack, not counted: {dict(others)}")
    print(f"the deliberate error was {'found' if len(ours) > len(found) else 'NOT FOUND'}")
    print("\n".join([f"{len(found)} errors with our extension on the stack", *found]))
    return len(found) + (len(ours) == len(found))


if __name__ == "__main__":
    if sys.argv[1:] == ["--watched"]:
        run_everything()
    else:
        sys.exit(min(main(), 1))
