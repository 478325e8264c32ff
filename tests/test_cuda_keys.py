"""The keys of kernels, from a struct that C++ fills to machine code, without a GPU."""

from __future__ import annotations

import ctypes
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kernel_fusion.backends.cuda import planner
from kernel_fusion.backends.cuda.device import KNOWN_DEVICES, Device
from kernel_fusion.backends.cuda.source import Launch
from kernel_fusion.config import cxx_compiler
from kernel_fusion.core.fields import Several, is_struct, kinds, literal, numbers
from kernel_fusion.core.other_specs import (
    GroupNormAccess,
    GroupNormSpec,
    Operand,
    PointwiseAccess,
    PointwiseSpec,
    QuantizeAccess,
    QuantizeSpec,
    ReduceAccess,
    ReduceSpec,
    RotaryAccess,
    RotarySpec,
    RowAccess,
    SoftmaxAccess,
    SoftmaxBwdSpec,
    SoftmaxSpec,
    TokenLogprobSpec,
)
from kernel_fusion.core.quantize import Codes
from kernel_fusion.core.spec import Access, RowNormSpec, SumPartialsSpec
from kernel_fusion.native import build, headers
from kernel_fusion_bench import trials

# One key per kind of kernel; no two fields of one meaning are equal.
KEYS: dict[str, tuple[Any, Any]] = {
    "inference": (
        RowNormSpec("inference", False, 96, "bf16", "f16", "f32", None, True, (False, False, False), rounding="hf"),
        Access(x=2, strided_x=True),
    ),
    "forward": (
        RowNormSpec(
            *("forward", True, 96, "bf16", "bf16", "f32", None, False, (False, False, False), "f32"),
            pre_activation="silu",
            activation="gelu",
            dropout=True,
        ),
        Access(y=4, residual=8, strided_residual=True),
    ),
    "backward": (
        RowNormSpec(*("backward", False, 96, "bf16", "bf16", "f32", "f16", False, (True, True, False), "f32"), dh=True),
        Access(weight=4, dx=8, pre_x=2, strided_y=True, strided_pre_x=True),
    ),
    "backward_weight": (
        RowNormSpec("backward_weight", False, 96, "bf16", "bf16", grads=(False, True, True), dresidual=True),
        Access(),
    ),
    "sum_partials": (SumPartialsSpec(96, "f32", "bf16", None), Access()),
    "group_norm": (
        GroupNormSpec("apply", "bf16", "f32", "f16", add="bf16", activation="silu", channels_last=True),
        GroupNormAccess(8, 16, 256, 8, 16),
    ),
    "group_norm_bwd": (GroupNormSpec("row_bwd", "f32", "f32", scale="bf16", sums_x=True), GroupNormAccess(1, 64, 128)),
    "pointwise": (
        PointwiseSpec("gate", "silu", True, "bf16", "f32", y="bf16"),
        PointwiseAccess(2, 8, (*(Operand(),) * 4, Operand("strided", 4)), divisor=2, repeats=True),
    ),
    "pointwise_fwd": (
        PointwiseSpec("first", "relu", False, "bf16", None, y="bf16", bits=True),
        PointwiseAccess(1, 8, aligned_positions=False),
    ),
    "pointwise_bwd": (
        PointwiseSpec("add", "gelu", False, "f32", "f16", dy="bf16", da="f32", db="f16"),
        PointwiseAccess(1, 4, lanes=32, aligned_positions=False),
    ),
    "pointwise_bwd_bits": (
        PointwiseSpec("first", "relu", False, "b1", None, dy="f32", da="f32"),
        PointwiseAccess(1, 4, aligned_positions=False),
    ),
    "quantize": (
        QuantizeSpec(96, "bf16", "bf16", "silu", Codes("float8_e5m2", "block", keeps=True)),
        QuantizeAccess(RowAccess(8, True), RowAccess(4)),
    ),
    "reduce": (ReduceSpec("abs", "bf16", "f16", "f32"), ReduceAccess(4, 8, 256, 64, False, True, False, 2, 4)),
    "rotary": (
        RotarySpec(x="bf16", angles="f32", cols=64, half=24, interleaved=True, backward=True),
        RotaryAccess(8, 128, 4, 8, 16, 4),
    ),
    "rotary_norm": (
        RotarySpec(x="bf16", cols=64, half=24, norm=True, query_weight="f16", key_weight="f32", offset=True, sums=True),
        RotaryAccess(8, 0, 8, 8, 16, 4, 2),
    ),
    "softmax": (SoftmaxSpec("bf16", "b8", True), SoftmaxAccess(8, 64, RowAccess(16), RowAccess(2, True), True)),
    "softmax_bwd": (
        SoftmaxBwdSpec("f32", "bf16", "f16", True, True),
        SoftmaxAccess(8, 64, RowAccess(16), RowAccess(4, True)),
    ),
    "token_logprob": (
        TokenLogprobSpec("bf16", False, True, True, True, True, "entropy", True),
        SoftmaxAccess(8, 64, RowAccess(16), RowAccess(1, True)),
    ),
}


def key(name: str) -> list[int]:
    """The launcher's question for device 0."""
    spec, access = KEYS[name]
    kernel = planner.KERNELS[type(spec)]
    return [0, list(planner.KERNELS).index(type(spec)), *numbers(type(spec), spec), *numbers(kernel.access, access)]


def answer(key: list[int]) -> tuple[Any, Any, Any, Launch]:
    """The launcher's answer: error, machine code up to its first zero, name, and the numbers of the launch."""
    error, image, name = (ctypes.c_char_p() for _ in range(3))
    launch = (ctypes.c_int * len(kinds(Launch)))()
    planner._callback((ctypes.c_int * len(key))(*key), error, image, name, launch)
    return error.value, image.value, name.value, Launch(**dict(zip(kinds(Launch), launch, strict=True)))


def test_headers_are_those_of_the_tables() -> None:
    """`python -m kernel_fusion.native.headers` would write what is there: names, and a digest that builds depend on."""
    for path, text in headers.kept().items():
        assert path.read_text() == text
        assert path in build.source_files()


def initializer(kind: Any, value: Any) -> str:
    """A value as C++ writes it, its members by their names."""
    if isinstance(kind, Several):
        return "{" + ", ".join(initializer(kind.kind, each) for each in value) + "}"
    if not is_struct(kind):
        text = literal(kind, value)
        return f"kf::{text}" if "::" in text else text
    members = [f".{name} = {initializer(each, getattr(value, name))}" for name, each in kinds(kind).items()]
    return f"kf::{kind.__name__}{{{', '.join(members)}}}"


def compiled(tmp_path: Path, includes: str, body: str) -> list[str]:
    """The lines that a C++ program prints."""
    compiler = cxx_compiler()
    if compiler is None:
        pytest.skip("no C++ compiler")
    source = tmp_path / "program.cpp"
    source.write_text(f"#include <cstddef>\n#include <cstdio>\n{includes}int main() {{\n{body}}}\n")
    headers.write(tmp_path)
    folders = [f"-I{folder}" for folder in (build.NATIVE, build.NATIVE / "extension", tmp_path)]
    subprocess.run([*compiler, "-std=c++20", *folders, str(source), "-o", str(tmp_path / "program")], check=True)
    return subprocess.run([str(tmp_path / "program")], check=True, capture_output=True, text=True).stdout.splitlines()


def test_keys_are_what_cpp_writes(tmp_path: Path) -> None:
    """Specs and accesses that C++ fills by the names of their members are decoded to the same."""
    show = """template <class T> void show(const T& t) {
        for (size_t i = 0; i < sizeof t / sizeof(int); ++i) std::printf("%d ", reinterpret_cast<const int*>(&t)[i]);
    }
    """
    lines = []
    for spec, access in KEYS.values():
        made = [initializer(type(each), each) for each in (spec, access)]
        lines.append(f'std::printf("%d ", kf::{type(spec).__name__}::kKernel);')
        lines.append(f'show({made[0]}); show({made[1]}); std::puts("");\n')
    printed = compiled(tmp_path, f'#include "cuda/specs.h"\n{show}', "".join(lines))
    for line, (name, (spec, access)) in zip(printed, KEYS.items(), strict=True):
        row = [int(number) for number in line.split()]
        assert planner.decode(iter(row)) == (spec, access), name
        assert row == key(name)[1:]
    assert {type(spec) for spec, _ in KEYS.values()} == set(planner.KERNELS)


@pytest.mark.parametrize("name", KEYS)
def test_answers_hold_machine_code(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The code is an ELF image in which the kernel of that name is; the numbers are the plan's."""
    monkeypatch.setattr(Device, "of", lambda index: KNOWN_DEVICES[90])
    error, code, kernel, launch = answer(key(name))
    assert error is None
    plan = planner.plan_for(*KEYS[name], KNOWN_DEVICES[90])
    assert (launch.threads, launch.per_block, launch.shared_bytes) == (plan.threads, plan.per_block, plan.shared_bytes)
    assert launch == planner.launch_of(plan, KNOWN_DEVICES[90])
    assert launch.dependent
    image = next(each for each in planner._kept[::-1] if each.startswith(b"\x7fELF"))
    assert image.startswith(code)
    assert kernel in image


def test_errors_are_answers() -> None:
    """Nothing is raised through C: a key of a kernel that nobody knows is answered with the error."""
    error, image, *_ = answer([0, 99])
    assert (error, image) == (b"IndexError: list index out of range", None)


def test_a_plan_can_be_overridden(monkeypatch: pytest.MonkeyPatch) -> None:
    """Within the context norms run by another plan, afterwards by their own; other kernels are not asked about."""
    forgotten: list[str] = []
    monkeypatch.setattr(planner, "forgets", [lambda: forgotten.append("kernels")])
    norm, access = KEYS["forward"]
    chain, chain_access = KEYS["pointwise"]
    device = KNOWN_DEVICES[90]
    own, others = planner.plan_for(norm, access, device), planner.plan_for(chain, chain_access, device)
    with trials.override_plan(lambda spec, plan: replace(plan, per_block=plan.per_block * 2)):
        assert planner.plan_for(norm, access, device).threads == 2 * own.threads
        assert planner.plan_for(chain, chain_access, device) == others
    assert planner.plan_for(norm, access, device) == own
    assert forgotten == ["kernels"] * 2, "the launcher would go on with those that it remembers"


def test_specs_say_what_they_are() -> None:
    """In words for explanations and test names."""
    assert str(KEYS["forward"][0]) == (
        "rms_norm.forward[N=96, x=bf16, y=bf16, weight,bias=f32,-, residual=f32, pre_activation=silu, "
        "activation=gelu, dropout]"
    )
    assert str(KEYS["sum_partials"][0]) == "sum_partials[N=96, f32 -> bf16,-]"
