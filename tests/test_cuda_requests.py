"""The planner's callback, as the launcher calls it, without a GPU: rows of numbers in, machine code or an error out."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from kernel_fusion.backends.cuda import planner, requests
from kernel_fusion.backends.cuda.device import KNOWN_DEVICES, Device
from kernel_fusion.core.activations import CODES
from kernel_fusion.core.families import (
    COMBINES,
    DROPOUTS,
    MAPS,
    MODES,
    Operand,
    PointwiseAccess,
    PointwiseSpec,
    ReduceAccess,
    ReduceSpec,
    RowAccess,
    SoftmaxAccess,
    SoftmaxBwdSpec,
    SoftmaxSpec,
)
from kernel_fusion.core.spec import DTYPES, Access, RowNormSpec, SumPartialsSpec

FLAG = requests.RowNormFlag
F16, BF16, F32, _ = range(len(DTYPES))
NONE = -1
SILU = list(CODES).index("silu")
GELU = list(CODES).index("gelu")
RELU = list(CODES).index("relu")
BITS = len(DTYPES)

NORM = {"cols": 96, "rms": 0, "x": BF16, "y": BF16, "weight": F32, "bias": NONE, "residual": NONE}
ALIGNED = {f"align_{name}": 16 for name in ("x", "y", "weight", "dx", "residual", "pre_x")}
# Number of the kernel, fields, and what they stand for: of each kernel one call, no two fields with one meaning alike.
REQUESTS: dict[str, tuple[int, ctypes.Structure, Any, Any]] = {
    "inference": (
        0,
        requests.RowNormFields(**NORM, **ALIGNED | {"align_x": 2}, flags=FLAG.OFFSET | FLAG.STRIDED_X),
        RowNormSpec("inference", False, 96, "bf16", "bf16", "f32", None, True, (False, False, False)),
        Access(x=2, strided_x=True),
    ),
    "forward": (
        0,
        requests.RowNormFields(
            **NORM | {"residual": F32, "rms": 1},
            **ALIGNED | {"align_y": 4, "align_residual": 8},
            flags=FLAG.STATS | FLAG.DROPOUT | FLAG.STRIDED_RESIDUAL,
            pre_activation=SILU,
            activation=GELU,
        ),
        RowNormSpec(
            *("forward", True, 96, "bf16", "bf16", "f32", None, False, (False, False, False)),
            residual="f32",
            pre_activation="silu",
            activation="gelu",
            dropout=True,
        ),
        Access(y=4, residual=8, strided_residual=True),
    ),
    "backward": (
        1,
        requests.RowNormFields(
            **NORM | {"residual": F32},
            **ALIGNED | {"align_dx": 8, "align_pre_x": 2, "align_weight": 4},
            flags=FLAG.DX | FLAG.DWEIGHT | FLAG.DH | FLAG.DRESIDUAL | FLAG.STRIDED_Y | FLAG.STRIDED_PRE_X,
        ),
        RowNormSpec(
            *("backward", False, 96, "bf16", "bf16", "f32", None, False, (True, True, False)),
            residual="f32",
            dh=True,
            dresidual=True,
        ),
        Access(weight=4, dx=8, pre_x=2, strided_y=True, strided_pre_x=True),
    ),
    "backward_weight": (
        2,
        requests.RowNormFields(**NORM, **ALIGNED, flags=FLAG.DWEIGHT | FLAG.DBIAS),
        RowNormSpec("backward_weight", False, 96, "bf16", "bf16", "f32", None, False, (False, True, True)),
        Access(),
    ),
    "sum_partials": (
        3,
        requests.SumPartialsFields(96, F32, BF16, NONE),
        SumPartialsSpec(96, "f32", "bf16", None),
        Access(),
    ),
    "pointwise": (
        4,
        requests.PointwiseFields(
            *(COMBINES.index("gate"), SILU, DROPOUTS.index("aligned"), 2, 8, 0),
            (BF16, NONE, NONE, BF16, F32),
            (*(0,) * 4, MODES.index("strided")),
            (*(16,) * 4, 4),
        ),
        PointwiseSpec("gate", "silu", True, "bf16", "f32", y="bf16"),
        PointwiseAccess(2, 8, (*(Operand(),) * 4, Operand("strided", 4))),
    ),
    "pointwise_bwd": (
        5,
        requests.PointwiseFields(
            *(COMBINES.index("add"), GELU, DROPOUTS.index("none"), 1, 4, 32),
            (F32, F16, BF16, F32, F16),
            (0,) * 5,
            (16,) * 5,
        ),
        PointwiseSpec("add", "gelu", False, "f32", "f16", dy="bf16", da="f32", db="f16"),
        PointwiseAccess(1, 4, lanes=32, aligned_positions=False),
    ),
    "pointwise_fwd": (
        4,
        requests.PointwiseFields(
            *(COMBINES.index("first"), RELU, DROPOUTS.index("none"), 1, 8, 0),
            (BF16, BITS, NONE, BF16, NONE),
            (0,) * 5,
            (16,) * 5,
        ),
        PointwiseSpec("first", "relu", False, "bf16", None, y="bf16", bits=True),
        PointwiseAccess(1, 8, aligned_positions=False),
    ),
    "pointwise_bwd_bits": (
        5,
        requests.PointwiseFields(
            *(COMBINES.index("first"), RELU, DROPOUTS.index("none"), 1, 4, 0),
            (F32, NONE, F32, BITS, NONE),
            (0,) * 5,
            (16,) * 5,
        ),
        PointwiseSpec("first", "relu", False, "b1", None, dy="f32", da="f32"),
        PointwiseAccess(1, 4, aligned_positions=False),
    ),
    "reduce": (
        6,
        requests.ReduceFields(MAPS.index("abs"), BF16, F16, F32, 8, 256, 64, 4, 0, 1, 0, 2, 4),
        ReduceSpec("abs", "bf16", "f16", "f32"),
        ReduceAccess(4, 8, 256, 64, False, True, False, 2, 4),
    ),
    "softmax": (
        7,
        requests.SoftmaxFields(BF16, len(DTYPES), 1, 8, 64, 1, 0, 1, 16, 2),
        SoftmaxSpec("bf16", "b8", True),
        SoftmaxAccess(8, 64, RowAccess(16), RowAccess(2, True), True),
    ),
    "softmax_bwd": (
        8,
        requests.SoftmaxBwdFields(F32, BF16, F16, 1, 8, 64, 1, 0, 4, 16),
        SoftmaxBwdSpec("f32", "bf16", "f16", True),
        SoftmaxAccess(8, 64, RowAccess(16), RowAccess(4, True)),
    ),
}


def request(kernel: int, fields: ctypes.Structure) -> requests.Request:
    """What the launcher would ask of device 0."""
    made = requests.Request(0, kernel)
    ctypes.memmove(made.fields, ctypes.addressof(fields), ctypes.sizeof(fields))
    return made


def answer(to: requests.Request) -> planner.Answer:
    """What the launcher would get."""
    given = planner.Answer()
    planner._callback(ctypes.byref(to), ctypes.byref(given))
    return given


@pytest.mark.parametrize("name", REQUESTS)
def test_requests_are_decoded(name: str) -> None:
    """Every field of every kernel's request means what the launcher meant."""
    kernel, fields, spec, access = REQUESTS[name]
    assert requests.decode(request(kernel, fields)) == (spec, access)
    assert set(requests.DECODERS) == {kernel for kernel, *_ in REQUESTS.values()}


_COMPILED = (
    "forward",
    "sum_partials",
    "pointwise",
    "pointwise_fwd",
    "pointwise_bwd",
    "pointwise_bwd_bits",
    "reduce",
    "softmax",
)


@pytest.mark.parametrize("name", _COMPILED)
def test_answers_hold_machine_code(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The code is an ELF image in which the kernel of that name is; the numbers are the plan's."""
    kernel, fields, spec, access = REQUESTS[name]
    monkeypatch.setattr(Device, "of", lambda index: KNOWN_DEVICES[90])
    given = answer(request(kernel, fields))
    assert given.error is None
    plan = planner.plan_for(spec, access, KNOWN_DEVICES[90])
    assert (given.threads, given.per_block, given.shared_bytes) == (plan.threads, plan.per_block, plan.shared_bytes)
    assert given.chained
    image = next(code for code in planner._kept[::-1] if code.startswith(b"\x7fELF"))
    assert given.name in image


def test_errors_are_answers() -> None:
    """Nothing is raised through C: a request that nobody decodes is answered with the error."""
    given = answer(requests.Request(0, 99))
    assert given.error == b"KeyError: 99"
    assert given.image is None


def test_a_plan_can_be_overridden(monkeypatch: pytest.MonkeyPatch) -> None:
    """Within the context norms run by another plan, afterwards by their own; other kernels are not asked about."""
    forgotten: list[str] = []
    monkeypatch.setattr(planner, "_library", SimpleNamespace(kf_forget_kernels=lambda: forgotten.append("kernels")))
    _, _, norm, access = REQUESTS["forward"]
    _, _, chain, chain_access = REQUESTS["pointwise"]
    device = KNOWN_DEVICES[90]
    own, others = planner.plan_for(norm, access, device), planner.plan_for(chain, chain_access, device)
    with planner.override_plan(lambda spec, plan: replace(plan, per_block=plan.per_block * 2)):
        assert planner.plan_for(norm, access, device).threads == 2 * own.threads
        assert planner.plan_for(chain, chain_access, device) == others
    assert planner.plan_for(norm, access, device) == own
    assert forgotten == ["kernels"] * 2, "the launcher would go on with those that it remembers"


def test_specs_say_what_they_are() -> None:
    """In words for explanations and test names."""
    assert str(REQUESTS["forward"][2]) == (
        "rms_norm.forward[N=96, x=bf16, y=bf16, weight,bias=f32,-, residual=f32, pre_activation=silu, "
        "activation=gelu, dropout]"
    )
    assert str(REQUESTS["sum_partials"][2]) == "sum_partials[N=96, f32 -> bf16,-]"
