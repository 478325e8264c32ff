"""What a first call builds lacks the CPU kernels for gradients of norms: the first backward builds and opens them."""

from __future__ import annotations

import ctypes
import shlex
from pathlib import Path

import pytest
import torch
from support import CPU, python

import kernel_fusion as kf
from kernel_fusion.config import cxx_compiler
from kernel_fusion.errors import BuildError
from kernel_fusion.native import build, library

# A forward, the files of the cache, a backward that the compiler refuses, several at once, the files again.
_STEPS = """
    import sys, threading, torch, kernel_fusion as kf
    from pathlib import Path
    x, dy, out, refuse = *torch.load(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
    count = lambda: print(len(list(Path(sys.argv[4]).glob("extension/*.so"))))
    steps = [kf.layer_norm(x.requires_grad_(), 64, activation=a) for a in ("identity", "gelu", "identity", "gelu")]
    count()
    refuse.touch()
    try:
        steps[0].backward(dy, retain_graph=True)
    except RuntimeError as error:
        print(error, file=sys.stderr)
    refuse.unlink()
    grads = [None] * 4
    def backward(i): grads[i] = torch.autograd.grad(steps[i], x, dy)[0]
    threads = [threading.Thread(target=backward, args=(i,)) for i in range(4)]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
    torch.save(grads, out)
    count()
"""


@pytest.mark.slow
def test_the_first_backward_builds_its_kernels(tmp_path: Path) -> None:
    """A refused build is an error that says why; the next backward tries again, and has the whole library's bits."""
    compiler = cxx_compiler()
    assert compiler is not None
    wrapper, refuse, data, out = (tmp_path / name for name in ("g++", "refuse", "data.pt", "out.pt"))
    wrapper.write_text(
        f'#!/bin/sh\n[ ! -e "{refuse}" ] || {{ echo no space >&2; exit 1; }}\nexec {shlex.join(compiler)} "$@"\n'
    )
    wrapper.chmod(0o700)
    x, dy = torch.randn(33, 64), torch.randn(33, 64)
    torch.save((x, dy), data)
    env = {"CXX": str(wrapper), "KERNEL_FUSION_CACHE_DIR": str(tmp_path / "cache")}
    first = python(_STEPS, data, out, refuse, tmp_path / "cache", env=env)
    assert first.stdout.split() == ["1", "2"]
    assert "there are no CPU kernels for the gradients of norms: BuildError: the C++ compiler failed" in first.stderr
    grads = torch.load(out)
    with CPU.ran(forward=2, backward=2):
        for i, activation in enumerate(("identity", "gelu")):
            y = kf.layer_norm(x.requires_grad_(), 64, activation=activation)
            (expected,) = torch.autograd.grad(y, x, dy)
            assert torch.equal(grads[i], expected)
            assert torch.equal(grads[i + 2], expected)
    assert python(_STEPS, data, out, refuse, tmp_path / "cache", env=env).stderr == ""


def test_an_error_is_told_as_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """What goes wrong in Python while C++ waits is not raised, but answered."""

    def fail(*_: object) -> None:
        raise BuildError("no space")

    monkeypatch.setattr(build, "load_gradients", fail)
    table, error = ctypes.c_void_p(), ctypes.c_char_p()
    library._opener(ctypes.byref(table), ctypes.byref(error))
    assert (table.value, error.value) == (None, b"BuildError: no space")
