"""Operators called as nobody should call them: see hostile.py for the arguments and what a call may do."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import hostile
import pytest
import torch
from support import CPU, EAGER, TRITON, Target
from torch import Tensor
from verbs import Verb, gradients, results, verbs_where

import kernel_fusion as kf
from kernel_fusion.config import cxx_compiler
from kernel_fusion.operators import fallback, loader, schemas, stubs

_STUBS = dict.fromkeys(schemas.VERBS, stubs._verb_stub) | dict.fromkeys(schemas.QUANTIZED, stubs._quantized_stub)


@pytest.fixture(autouse=True)
def _filled_memory() -> Iterator[None]:
    """Fresh memory holds NaN, or the largest integer, so that a result that nobody wrote shows."""
    with hostile.filled_memory():
        yield


@pytest.mark.filterwarnings("ignore::UserWarning")  # PyTorch's remarks on what is nested, sparse or quantized
@pytest.mark.parametrize(
    ("operator", "argument"),
    [
        # Triton's interpreter, and definitions, which are judged by themselves.
        pytest.param(*pair, marks=pytest.mark.slow if pair[0].endswith(("_on_gpu", "_reference")) else ())
        for pair in hostile.operators()
    ],
)
def test_hostile_arguments(operator: str, argument: str, target: Target) -> None:
    """Every value of an argument gives what the definition gives, or a sentence; then a right call works."""
    _check(operator, argument, target)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(("operator", "argument"), [pair for pair in hostile.operators() if pair[0] in _STUBS])
def test_hostile_arguments_without_the_extension(operator: str, argument: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stubs, which serve calls where there is no compiler, check as much as the extension does."""
    stub = _STUBS[operator](operator)
    monkeypatch.setattr(loader, "is_loaded", lambda: False)
    monkeypatch.setattr(loader, "load", lambda: False)
    for _, call in hostile.hostile_calls(operator, argument, "cpu"):
        filled = {name: _filled(value) for name, value in call.items()}  # by the dispatcher, before it calls a stub
        given = schemas.bind(schemas.overload(operator), (), filled)
        assert hostile.judge(operator, call, partial(stub, *given)) in ("served", "refused")


def _filled(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) and value._is_zerotensor() else value


def test_every_operator_has_right_calls() -> None:
    """A new operator of the dispatcher, quantised or not, ours or Triton's, stands in the table of hostile.py too."""
    fallback.define_triton()
    assert sorted(hostile.right_calls("cpu")) == hostile.registered()
    assert sorted(hostile.right_triton_calls("cpu")) == hostile.registered(triton=True)


# On a GPU these are tests of its kernels; without one, of the interpreter's.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("operator", hostile.right_triton_calls("cpu"))
def test_hostile_arguments_of_triton(operator: str) -> None:
    """The same of every operator of the Triton backend."""
    fallback.define_triton()
    for call in hostile.right_triton_calls(TRITON.device)[operator]:
        assert hostile.judge(operator, call) == "served"
    for argument in hostile.argument_types(operator):
        _check(operator, argument, TRITON)


def _check(operator: str, argument: str, target: Target) -> None:
    right = hostile.right_calls(target.device)["layer_norm"][0]
    failed = {}
    outcomes = Counter[str]()
    for name, call in hostile.hostile_calls(operator, argument, target.device):
        try:
            outcomes[hostile.judge(operator, call)] += 1
            assert hostile.judge("layer_norm", right) == "served"
        except AssertionError as error:
            failed[name] = str(error)
    assert not failed
    assert outcomes.total() > 1


_NO_MEMORY = "its data is not allocated yet|are out of bounds for storage"


def _free(t: Tensor, kept: int) -> None:
    t.untyped_storage().resize_(kept)


_exact = verbs_where(lambda verb: verb.exact)  # a product's operands are PyTorch's affair


@_exact
@pytest.mark.parametrize("part", [0.0, 0.5])
def test_freed_arguments(operation: Verb, part: float, target: Target) -> None:
    """A tensor whose storage was freed, before the call or before its backward, raises where it would be read."""
    for place in range(len(operation.leaves(target))):
        leaves = [t.detach().requires_grad_() for t in operation.leaves(target)]
        y = operation.on(target)(*leaves)
        dys = [torch.ones_like(one) for one in results(y)]
        expected = gradients(y, leaves, dys, retain_graph=True)
        _free(leaves[place], int(part * leaves[place].nbytes))
        with pytest.raises(RuntimeError, match=_NO_MEMORY):
            operation.on(target)(*leaves)
        try:
            found = gradients(y, leaves, dys)
        except RuntimeError as error:
            assert re.search(_NO_MEMORY, str(error))  # noqa: PT017
        else:
            torch.testing.assert_close(found, expected)


@_exact
@pytest.mark.parametrize("way", ["eager", "func"])
def test_freed_arguments_of_the_definition(operation: Verb, way: str) -> None:
    """The definition is made of operations that look at no memory, so its arguments are looked at before."""
    for place in range(len(operation.leaves(CPU))):
        leaves = operation.leaves(CPU)
        _free(leaves[place], 0)
        with pytest.raises(RuntimeError, match=_NO_MEMORY):
            operation.on(EAGER)(*leaves) if way == "eager" else torch.func.vjp(operation.on(CPU), *leaves)


@verbs_where(lambda verb: verb.exact and not verb.name.startswith("cross_entropy"))  # PyTorch changes its sign, last
def test_freed_cotangents_of_a_differentiated_backward(operation: Verb, target: Target) -> None:
    """Nor do the operations of a backward that is itself differentiated."""
    leaves = [t.detach().requires_grad_() for t in operation.leaves(target)]
    y = operation.on(target)(*leaves)
    dys = [torch.ones_like(one) for one in results(y)]
    _free(dys[0], 0)
    with pytest.raises(RuntimeError, match=_NO_MEMORY):
        gradients(y, leaves, dys, create_graph=True)


def test_freed_weight_raises_as_in_pytorch(verb: str, target: Target) -> None:
    """A weight without memory is PyTorch's error, of LayerNorm in its words; it is not taken for an absent one."""
    x, weight, on_cpu = torch.randn(4, 8, device=target.device), torch.ones(8, device=target.device), torch.ones(8)
    _free(weight, 0)
    _free(on_cpu, 0)
    with pytest.raises(RuntimeError) as theirs:
        torch.nn.functional.layer_norm(torch.randn(4, 8), (8,), on_cpu)
    with pytest.raises(RuntimeError) as ours:
        getattr(kf, verb)(x, (8,), weight)
    assert str(theirs.value).startswith(str(ours.value))


# PyTorch's own classes come without the type information that `vptr` asks for. With -O3 it takes the compiler too long.
_SANITIZERS = ["-fsanitize=address,undefined", "-fno-sanitize=vptr", "-fno-omit-frame-pointer", "-g1", "-O1"]
_OPTIONS = {
    "ASAN_OPTIONS": "detect_leaks=0",  # Python and PyTorch keep what they have until the process ends
    "UBSAN_OPTIONS": "halt_on_error=1:print_stacktrace=1",
}


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_sanitizers_find_nothing(tmp_path: Path) -> None:
    """Under AddressSanitizer and UBSan every hostile call passes; an error that is made on purpose is found."""
    compiler = cxx_compiler()
    if compiler is None or not any("g++" in word for word in compiler):
        pytest.skip("g++ is not the compiler here")
    wrapper = tmp_path / "g++"  # so that these flags come last
    wrapper.write_text(f'#!/bin/sh\nexec {shlex.join(compiler)} "$@" {" ".join(_SANITIZERS)}\n')
    wrapper.chmod(0o700)
    find = [[*compiler, f"-print-file-name={library}"] for library in ("libasan.so", "libstdc++.so")]
    runtime = [subprocess.run(each, check=True, capture_output=True, text=True).stdout.strip() for each in find]
    env = os.environ | {"CXX": str(wrapper), "KERNEL_FUSION_CACHE_DIR": str(tmp_path / "cache"), "OMP_NUM_THREADS": "2"}
    built = "from kernel_fusion.native import build; build.built_library(print)"
    subprocess.run([sys.executable, "-c", built], check=True, env=env)
    script = str(Path(hostile.__file__))
    result = subprocess.run(
        [sys.executable, script, "cpu"],
        env=env | _OPTIONS | {"LD_PRELOAD": " ".join(runtime)},
        capture_output=True,
        text=True,
    )
    assert "every call passed" in result.stdout, result.stdout[-2000:] + result.stderr[-8000:]
    assert "runtime error" not in result.stderr
    assert "AddressSanitizer" in result.stderr
    assert "kf_use_cpu_variant" in result.stderr
