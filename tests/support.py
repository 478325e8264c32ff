"""Shared by all tests: targets, launch counters, derived budgets for any call, fresh interpreters.

A test asks for its backend by name and wraps the call in `Target.ran`, which compares the extension's launch counters
before and after: a result that came through a fallback fails, whatever its numbers are.
"""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import forked
import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

import kernel_fusion as kf
from kernel_fusion.native import build
from kernel_fusion.operators import loader
from kernel_fusion.testing import oracle, unfused

ROOT = Path(__file__).parents[1]
PACKAGE = Path(kf.__file__).parent
_COUNTERS = ("cpu_forward", "cpu_backward", "cuda_launch")
# Kernels of one backward on CUDA: dx and partial sums; the finish of the sums; for long rows, the sums on their own.
_MAX_CUDA_BACKWARD = 3


@dataclass(frozen=True)
class Target:
    """A device and the backend that a test asks for on it."""

    device: str
    backend: str

    @contextmanager
    def ran(self, forward: int | None = 1, backward: int | None = 0) -> Iterator[None]:
        """Fail unless the block ran this many forward and backward kernels of this backend; None means at least one.

        On "eager" the block must run none at all.
        """
        if self.backend in ("cpu", "cuda"):
            loader.load()  # now, since the library of a wheel is tried by a call of its kernels when it is loaded
        before = _launches()
        yield
        delta = {name: count - before[name] for name, count in _launches().items()}
        triton = delta.pop("triton")
        least = (1 if forward is None else forward) + (1 if backward is None else backward)
        if self.backend == "triton":
            assert not any(delta.values()), f"other kernels than Triton's ran: {delta}"
            assert triton >= least, f"{triton} Triton kernels ran, wanted at least {least}"
            return
        assert triton == 0, f"{triton} Triton kernels ran"
        if self.backend == "eager":
            assert not any(delta.values()), f"eager launched native kernels: {delta}"
        elif self.backend == "cpu":
            wanted = {"cpu_forward": forward, "cpu_backward": backward, "cuda_launch": 0}
            for name, count in wanted.items():
                assert delta[name] == count or (count is None and delta[name] > 0), f"{delta}, wanted {wanted}"
        else:
            assert delta["cpu_forward"] == delta["cpu_backward"] == 0, delta
            assert delta["cuda_launch"] >= least, f"{delta}, wanted at least {least} CUDA launches"
            if forward is not None and backward is not None:
                most = forward + _MAX_CUDA_BACKWARD * backward
                assert delta["cuda_launch"] <= most, f"{delta}, wanted at most {most} CUDA launches"


CPU = Target("cpu", "cpu")
CUDA = Target("cuda", "cuda")
EAGER = Target("cpu", "eager")
# On the GPU, or where there is none in Triton's interpreter (conftest.py).
TRITON = Target("cuda" if torch.cuda.is_available() else "cpu", "triton")


def _launches() -> dict[str, int]:
    counts = {name: loader.launches(name) if loader.is_loaded() else 0 for name in _COUNTERS}
    launch = sys.modules.get("kernel_fusion.backends.triton.launch")
    return counts | {"triton": sum(launch.launches.values()) if launch else 0}


def call(verb: str, x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, **options: Any) -> Tensor:
    """A verb over the last dimension, both verbs with one signature."""
    shape = options.pop("normalized_shape", x.shape[-1:])
    return getattr(kf, verb)(x, shape, weight, bias=bias, **options)


def pytorch_call(verb: str, x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
    """PyTorch's call for `call` without options, with the eps of float32 whatever the dtype."""
    rms = verb == "rms_norm"
    return unfused.norm(x, x.shape[-1:], weight, bias, torch.finfo(torch.float32).eps if rms else 1e-5, rms=rms)


def check(case: oracle.Case, target: Target) -> None:
    """Run `case` and compare its results and every gradient; where it needs no kernel, none is asked for."""
    with target.ran(forward=None, backward=None) if case.runs_kernels else nullcontext():
        comparisons = oracle.compare(case, target.device, target.backend)
    failed = [c for c in comparisons if not c.ok]
    assert not failed, failed


def widened(tree: Any) -> Any:
    """The same arguments with every floating-point tensor in float64."""

    def widen(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or not leaf.is_floating_point():
            return leaf
        return leaf.detach().double().requires_grad_(leaf.requires_grad)

    return pytree.tree_map(widen, tree)


Draw = tuple[Any, Callable[..., Any], tuple[Any, ...]]


def assert_as_accurate(ours: Any, pytorch: Callable[..., Any], *args: Any) -> None:
    """Judge every tensor of `ours` by the oracle's budget beside `pytorch(*args)`, against it on float64 arguments."""
    assert_draws_as_accurate([(ours, pytorch, args)])


def assert_draws_as_accurate(draws: list[Draw]) -> None:
    """The same of several draws of (ours, pytorch, args) together, where results are few."""
    leaves = [
        list(zip(*map(pytree.tree_leaves, (ours, pytorch(*widened(args)), pytorch(*args))), strict=True))
        for ours, pytorch, args in draws
    ]
    for index, several in enumerate(zip(*leaves, strict=True)):
        judged = oracle.judge(
            f"result {index}",
            [(one, wide.detach().cpu().numpy().astype(np.longdouble), theirs) for one, wide, theirs in several],
        )
        assert judged.ok, judged


def skip_unless_cpu_runs(variant: str) -> None:
    """Skip a test where the processor lacks the instructions of a build of the CPU kernels, and say so."""
    known, best = build.cpu_variants(), torch.backends.cpu.get_cpu_capability()
    if best in known and known.index(variant) > known.index(best):
        pytest.skip(f"this processor has no {variant}")


def run_example(monkeypatch: pytest.MonkeyPatch, name: str, *arguments: str | Path) -> None:
    """Run an example as `run_script` does."""
    run_script(monkeypatch, ROOT / "examples", name, *arguments)


def run_script(monkeypatch: pytest.MonkeyPatch, folder: Path, name: str, *arguments: str | Path) -> None:
    """Run a script in this process, so that counters and patches reach it."""
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *map(str, arguments)])
    monkeypatch.syspath_prepend(folder)
    runpy.run_path(str(folder / f"{name}.py"), run_name="__main__")


def python(
    code: str, *args: str | Path, env: Mapping[str, str | None] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run `code` in a fresh interpreter where warnings are errors; a variable set to None is removed."""
    environment = _environment(env)
    if forked.serves(environment):
        done = forked.run(textwrap.dedent(code), [*map(str, args)], environment)
    else:
        with popen(code, *args, env=env) as process:
            try:
                out, err = process.communicate()
            except BaseException:
                process.kill()
                raise
        done = subprocess.CompletedProcess(process.args, process.returncode, out, err)
    assert done.returncode == 0, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done


def popen(code: str, *args: str | Path, env: Mapping[str, str | None] | None = None) -> subprocess.Popen[str]:
    """Start `code` in a fresh interpreter, as `python` does, and return at once."""
    return subprocess.Popen(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(code), *map(str, args)],
        env=_environment(env),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def _environment(env: Mapping[str, str | None] | None) -> dict[str, str]:
    return {name: value for name, value in {**os.environ, **(env or {})}.items() if value is not None}
