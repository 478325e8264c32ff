"""The CUDA kernels without a GPU: each compiles for every architecture without spilling, and every plan is sound.

A spill to local memory costs more bandwidth than the kernel has to spare and shows in no test of results, so the
compiler's own count is tested, for every architecture that the library knows.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from cuda_plans import anywhere, assert_sound, executors, tree
from cuda_spills import Grid, Kernel, assert_no_local_memory, each_generation, local_memory
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support import PACKAGE

from kernel_fusion.backends.cuda import planner, python_launch, requests
from kernel_fusion.backends.cuda.compile import compile_source, counters, cubin
from kernel_fusion.backends.cuda.device import KNOWN_DEVICES, Device
from kernel_fusion.backends.cuda.plan import Pace, Plan
from kernel_fusion.backends.cuda.row_norm_plan import plan_row_norm
from kernel_fusion.core.cache import CUBINS
from kernel_fusion.core.spec import ITEMSIZE, Access, RowNormSpec, SumPartialsSpec
from kernel_fusion.errors import CompileError

_CONTROL = """
extern "C" __global__ void __launch_bounds__(1024, 2) control(float* p) {
  float v[128];
#pragma unroll
  for (int i = 0; i < 128; ++i) v[i] = p[i * 1024 + threadIdx.x];
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 128; ++i) p[i * 1024 + threadIdx.x] = v[127 - i] * v[i ^ 1];
}
"""

# Grid rationale. The lengths stand for a row in part of a warp (64), of odd length, whose vectors are single elements
# (255, 1023, 4099, 32769, 50257), in one or a few warps (768, 1024, 1280, 1600, 3000, which divide in ways of their
# own), in a block that takes several rows at a time (4096; 5120, at 96 registers a thread) or one (6144, 8192), read
# twice (RMSNorm of 20480 and 24576) or in a cluster (12288, 32768, 65536; 65528 ends among a thread's vectors) that may
# take two rows at a time (9216, 10240, 20480), and in the largest one (131072). The mixes of x, parameters and y are
# those of training: one dtype throughout, bf16 with float32 parameters, and what autocast makes of it.
_LENGTHS = (64, 255, 768, 1023, 1024, 1280, 1600, 3000, 4096, 4099, 5120, 6144, 8192, 9216, 10240, 12288, 20480, 24576)
_LENGTHS += (32768, 32769, 50257, 65528, 65536, 131072)
_MIXES = (
    ("f32", "f32", "f32"),
    ("bf16", "bf16", "bf16"),
    ("f16", "f16", "f16"),
    ("bf16", "f32", "bf16"),
    ("bf16", "f32", "f32"),
    ("f64", "f64", "f64"),
)


def planned(spec: RowNormSpec, device: Device) -> Plan:
    """The plan for contiguous tensors."""
    return plan_row_norm(spec, planner.contiguous_access(spec), device)


def _norms(arch: int) -> Iterator[Kernel]:
    """Forward and backward, and what finishes the weight gradients.

    Of LayerNorm, which takes more registers, also dx alone and rows at any alignment, where loads of fewer bytes and
    the arithmetic of addresses take registers too; and of RMSNorm that is read twice, as LayerNorm is not. On sm_90,
    where plans are tightest, also inference, which lacks but one store of forward and still has spilled where that did
    not, both without a bias, and any alignment beside parameters in fp32.
    """
    for rms, cols, (x, weight, y) in product((False, True), _LENGTHS, _MIXES):
        inference, forward, backward = planner.family(cols, x, weight, rms=rms, y=y)
        specs = [forward, backward]
        if arch == 90:
            specs += [inference, *(replace(spec, bias=None) for spec in (inference, forward) if not rms)]
        wanted = [(spec, planner.contiguous_access(spec)) for spec in specs]
        one_dtype = (not rms or cols == 24576) and x == weight != "f16"
        wide_parameters = arch == 90 and not rms and (x, weight, y) == ("bf16", "f32", "bf16")
        if one_dtype:
            dx = replace(backward, grads=(True, False, False))
            wanted.append((dx, planner.contiguous_access(dx)))
        if one_dtype or wide_parameters:
            wanted += [(spec, anywhere(spec)) for spec in (forward, backward)]
        for spec, access in wanted:
            yield from _with_helpers(spec, access, arch)


def _with_helpers(spec: RowNormSpec, access: Access, arch: int) -> Iterator[Kernel]:
    for each in planner.with_helpers(spec, plan_row_norm(spec, access, KNOWN_DEVICES[arch])):
        yield each, access


# Grid rationale. What stages take registers for: an activation after the norm, cheap or not, whose argument backward
# computes again; one before it; a residual, in the type of x or wider, with a gradient of its own and one that arrives;
# dropout's random bits. Of the lengths those where a plan changes.
_STAGED_LENGTHS = (64, 255, 768, 1024, 1280, 4096, 4099, 5120, 10240, 12288, 32768, 131072)
_STAGES: dict[str, dict[str, Any]] = {
    "gelu": {"activation": "gelu"},
    "relu": {"activation": "relu"},
    "pre-relu": {"pre_activation": "relu"},
    "add": {"residual": "bf16"},
    "add-f32": {"residual": "f32"},
    "add-dropout": {"residual": "bf16", "dropout": True, "rms": True},
    "everything": {"residual": "f32", "dropout": True, "pre_activation": "gelu", "activation": "silu"},
}


def _staged_norms(arch: int) -> Iterator[Kernel]:
    """Each direction with some stages; of the architectures one of each generation."""
    if arch not in (80, 90, 120):
        return
    for cols, stages in product(_STAGED_LENGTHS, _STAGES.values()):
        for spec in planner.family(cols, "bf16", "bf16", **{"rms": False, **stages}):
            yield from _with_helpers(spec, planner.contiguous_access(spec), arch)


@each_generation
@pytest.mark.parametrize("grid", [_norms, _staged_norms])
def test_no_kernel_spills(grid: Grid, generation: str) -> None:
    """Every kernel of the grid compiles for the architectures that plan it and keeps everything in registers."""
    assert_no_local_memory(grid, generation)


def test_a_spill_is_found() -> None:
    """A kernel that needs more registers than its launch bounds allow is reported."""
    assert "spill" in (local_memory(_CONTROL, "control", 90) or "")


# Grid rationale. What decides the code of a load beside dtype and length: alignment of the rows, and strides.
@pytest.mark.parametrize("direction", ["inference", "forward", "backward", "backward_weight"])
@pytest.mark.parametrize(
    "access", [Access(2, 2, 2, 2), Access(4, 8, 16, 2, True, False), Access(strided_x=True, strided_y=True)], ids=str
)
def test_every_access_compiles(direction: str, access: Access) -> None:
    """Unaligned and strided rows have kernels too, for LayerNorm and RMSNorm."""
    for rms, cols in product((False, True), (255, 4096, 32768)):
        spec = RowNormSpec(direction, rms, cols, "bf16", "f32", "f32", None, True, (True, True, False))
        source = planner.source_of(spec, access, plan_row_norm(spec, access, KNOWN_DEVICES[90]))
        assert compile_source(source.text(), 90)[0].startswith(b"\x7fELF")


@pytest.mark.parametrize("direction", ["forward", "backward", "backward_weight"])
@pytest.mark.parametrize(
    "access", [Access(2, 2, 2, 2, True, True, 4, 2, True, True), Access(4, 8, 16, 2, residual=8)], ids=str
)
def test_every_access_compiles_with_stages(direction: str, access: Access) -> None:
    """Residuals, arriving gradients and x beside h may be unaligned and strided too."""
    for cols, dh in product((255, 4096, 32768), (False, True)):
        spec = RowNormSpec(
            direction,
            False,
            cols,
            *("bf16", "f32", "f32", "bf16", True),
            residual="f32",
            pre_activation="silu",
            activation="tanh",
            dropout=True,
            dh=dh,
            dresidual=not dh,
        )
        source = planner.source_of(spec, access, plan_row_norm(spec, access, KNOWN_DEVICES[90]))
        assert compile_source(source.text(), 90)[0].startswith(b"\x7fELF")


def test_flags_are_those_of_the_launcher() -> None:
    """The flags of a request have the same names and bits on both sides."""
    text = (PACKAGE / "native" / "extension" / "cuda" / "requests.h").read_text().partition("SumPartialsFields")[0]
    ours = {name.replace("_", ""): value for name, value in vars(requests.RowNormFlag).items() if name.isupper()}
    assert {name.upper(): int(value) for name, value in re.findall(r"\bk(\w+) = (\d+)\b", text)} == ours


def test_compile_error_holds_the_log() -> None:
    """A source that does not compile raises with the compiler's words."""
    with pytest.raises(CompileError, match=r"(?s)sm_90.*nonsense"):
        compile_source("nonsense", 90)


@pytest.mark.parametrize("damage", ["truncated", "garbage", "foreign", "writable"])
def test_bad_cubins_are_compiled_again(damage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel on disk is used if it is whole and of its key, and compiled again otherwise."""
    monkeypatch.setenv("KERNEL_FUSION_CACHE_DIR", str(tmp_path / "cache"))
    spec = RowNormSpec("inference", False, 64, "f32", "f32")
    source = planner.source_of(spec, Access(), planned(spec, KNOWN_DEVICES[90])).text()
    start = counters.compiled, counters.from_disk
    code = cubin(source, 90)
    assert cubin(source, 90) == code
    assert (counters.compiled - start[0], counters.from_disk - start[1]) == (1, 1)
    (path,) = CUBINS.entries()
    if damage == "truncated":
        path.write_bytes(path.read_bytes()[:-7])
    elif damage == "garbage":
        path.write_bytes(b"garbage" * 1000)
    elif damage == "foreign":
        cubin(source, 80)
        (other,) = set(CUBINS.entries()) - {path}
        other.rename(path)
        start = start[0] + 1, start[1]
    else:
        path.chmod(0o666)
    assert cubin(source, 90) == code
    assert (counters.compiled - start[0], counters.from_disk - start[1]) == (2, 1)


def _members(header: Path, struct: str) -> list[str]:
    """The members of a C++ struct, in order, with its size where one is an array: "stride[3]"."""
    body = re.search(rf"struct {struct} \{{\n(.*?)^\s*\}};", header.read_text(), re.DOTALL | re.MULTILINE)
    assert body, f"no struct {struct} in {header.name}"
    declarations = re.findall(
        r"^\s+(?:const )?(?:void\*|long long|double|int32_t|unsigned|RowLayout|Kernel) ([^;({=]+)[^;(]*;",
        body[1],
        re.MULTILINE,
    )
    return [re.sub(r"^const |\s", "", name) for line in declarations for name in line.split(",")]


@pytest.mark.parametrize(
    ("header", "struct", "mirror"),
    [
        ("shared/row_norm_args.h", "RowLayout", python_launch.RowLayout),
        ("shared/row_norm_args.h", "RowNormFwdArgs", python_launch.RowNormFwdArgs),
        ("shared/row_norm_args.h", "RowNormBwdArgs", python_launch.RowNormBwdArgs),
        ("shared/row_norm_args.h", "SumPartialsArgs", python_launch.SumPartialsArgs),
        ("extension/cuda/launcher.h", "KernelRequest", requests.Request),
        ("extension/cuda/requests.h", "RowNormFields", requests.RowNormFields),
        ("extension/cuda/requests.h", "SumPartialsFields", requests.SumPartialsFields),
        ("extension/cuda/requests.h", "PointwiseFields", requests.PointwiseFields),
        ("extension/cuda/requests.h", "ReduceFields", requests.ReduceFields),
        ("extension/cuda/requests.h", "SoftmaxFields", requests.SoftmaxFields),
        ("extension/cuda/requests.h", "SoftmaxBwdFields", requests.SoftmaxBwdFields),
    ],
)
def test_python_mirrors_the_c_structs(header: str, struct: str, mirror: type[ctypes.Structure]) -> None:
    """The structures that Python fills or reads have the members of the C++ ones, in their order."""
    members = [
        f"{name}[{kind._length_}]" if issubclass(kind, ctypes.Array) else name for name, kind, *_ in mirror._fields_
    ]
    assert _members(PACKAGE / "native" / header, struct) == members


# Lengths of every natural alignment, which decides the vectors: integers alone would seldom be multiples of 64.
_any_length = st.integers(0, 12).flatmap(lambda shift: st.integers(1, 300_000 >> shift).map(lambda n: n << shift))
_fields = {
    "direction": st.sampled_from(["inference", "forward", "backward", "backward_weight"]),
    "rms": st.booleans(),
    "cols": _any_length,
    "x": st.sampled_from(list(ITEMSIZE)),
    "y": st.sampled_from(list(ITEMSIZE)),
    "weight": st.sampled_from([None, *ITEMSIZE]),
    "bias": st.sampled_from([None, *ITEMSIZE]),
    "grads": st.tuples(st.booleans(), st.booleans(), st.booleans()).filter(any),
}
_specs_of_any_length = st.builds(RowNormSpec, **_fields)
_specs_with_stages = st.builds(
    RowNormSpec,
    **_fields,
    residual=st.sampled_from([None, *ITEMSIZE]),
    pre_activation=st.sampled_from(["identity", "gelu"]),
    activation=st.sampled_from(["identity", "relu"]),
    dropout=st.booleans(),
    dh=st.booleans(),
    dresidual=st.booleans(),
).map(lambda spec: spec if spec.residual else replace(spec, dh=False, dresidual=False))
_devices = st.sampled_from(list(KNOWN_DEVICES.values()))


# The examples: rows that the warps of their cluster do not divide, of which the last block of 16 has few columns.
@given(spec=st.one_of(_specs_of_any_length, _specs_with_stages), device=_devices)
@example(spec=RowNormSpec("forward", False, 33344, "bf16", "bf16"), device=KNOWN_DEVICES[90])
@example(spec=RowNormSpec("backward", False, 106539, "bf16", "bf16", "bf16", "bf16"), device=KNOWN_DEVICES[90])
@settings(max_examples=2000, deadline=None)
def test_plans_are_sound(spec: RowNormSpec, device: Device) -> None:
    """Every plan fits its device and covers the row, whether rows are aligned or begin anywhere."""
    for access in (planner.contiguous_access(spec), anywhere(spec)):
        plan = plan_row_norm(spec, access, device)
        assert_sound(spec, access, plan, device)
        if spec.direction in ("inference", "forward") and not (plan.slots or plan.tiled):
            dtypes = filter(None, (spec.y, spec.weight, spec.bias, spec.residual))
            assert plan.vec * max(ITEMSIZE[dtype] for dtype in dtypes) <= 16


@given(spec=st.one_of(_specs_of_any_length, _specs_with_stages), device=_devices, other=_specs_of_any_length)
@settings(max_examples=500, deadline=None)
def test_the_tree_depends_on_length_and_types_alone(spec: RowNormSpec, device: Device, other: RowNormSpec) -> None:
    """Gradients, an offset and the memory layout do not change how a row is summed."""
    varied = replace(spec, grads=other.grads, offset=not spec.offset)
    moved = plan_row_norm(spec, anywhere(spec), device)
    assert tree(planned(spec, device)) == tree(planned(varied, device)) == tree(moved)


# The examples: a row that is read twice, whose weight, were it wider, would leave the cache no room for it; one that
# streams by helpers of which wider parameters ask for more; and one that streams by few warps, with parameters and
# without.
@given(spec=_specs_of_any_length, device=_devices, other=_specs_of_any_length)
@example(
    spec=RowNormSpec("forward", True, 24576, "bf16", "bf16", "bf16"),
    device=KNOWN_DEVICES[90],
    other=RowNormSpec("forward", True, 1, "f32", "f32", "f32"),
)
@example(
    spec=RowNormSpec("forward", False, 32768, "bf16", "bf16", "bf16", "bf16"),
    device=KNOWN_DEVICES[90],
    other=RowNormSpec("forward", False, 1, "f32", "f32", "f32", "f32"),
)
@example(
    spec=RowNormSpec("forward", False, 7169, "f16", "f16"),
    device=KNOWN_DEVICES[90],
    other=RowNormSpec("forward", False, 1, "f32", "f32", "f32", "f32"),
)
@settings(max_examples=500, deadline=None)
def test_other_types_than_that_of_x_decide_the_vectors_alone(
    spec: RowNormSpec, device: Device, other: RowNormSpec
) -> None:
    """The same lanes and warps share a row whatever the parameters and, forward, the output; so the tree differs only
    where vectors do. Long rows of 16 bits in narrow vectors stream by few warps on sm_90, but only where y has the type
    of x, and in vectors of two and four only where the parameters are no wider either; so those are kept there."""
    backward = spec.direction.startswith("backward")
    streams = not backward and device.arch == 90 and ITEMSIZE[spec.x] == 2 and spec.cols % 8 != 0 and spec.cols > 6656
    varied = replace(other, direction=spec.direction, rms=spec.rms, cols=spec.cols, x=spec.x)
    if backward or streams:
        varied = replace(varied, y=spec.y)
    if streams and spec.cols % 2 == 0:
        varied = replace(varied, weight=spec.weight, bias=spec.bias)
    one, two = planned(spec, device), planned(varied, device)
    assert (one.lanes, one.warps) == (two.lanes, two.warps)
    assert one.vec != two.vec or tree(one) == tree(two)


@given(spec=_specs_of_any_length, device=_devices)
@settings(max_examples=200, deadline=None)
def test_inference_and_training_share_the_tree(spec: RowNormSpec, device: Device) -> None:
    """Inference and training forward sum a row in the same order."""
    plans = [planned(replace(spec, direction=direction), device) for direction in ("inference", "forward")]
    assert tree(plans[0]) == tree(plans[1])


# Grid rationale. Both sides of every edge of the rule: RMSNorm, of full vectors, from where a block cannot hold them.
@pytest.mark.parametrize(
    ("dtype", "rms", "twice", "once"),
    [
        ("bf16", False, (), (16384, 17408, 24576, 32760, 32768, 33024, 65536, 4097, 17412, 32769, 50257)),
        ("bf16", True, (17408, 24576), (16384, 24584, 32768, 65536, 66048, 4097, 17412, 32769, 50257)),
        ("f32", False, (), (16384, 17408, 24576, 32768, 16385)),
        ("f32", True, (17408, 24576), (16384, 24580, 32768, 33280, 16385)),
    ],
)
def test_rows_that_are_read_twice(dtype: str, rms: bool, twice: tuple[int, ...], once: tuple[int, ...]) -> None:
    """On sm_90 one block reads them twice, and the first vectors that give the center are at least a ninth of a row."""
    for cols in (*twice, *once):
        plan = planned(RowNormSpec("forward", rms, cols, dtype, dtype, dtype, dtype), KNOWN_DEVICES[90])
        assert (plan.cluster == 1 and not plan.resident) == (cols in twice), cols
        if cols in twice:
            vectors = -(-cols // (plan.vec * plan.lanes * plan.warps))
            assert 9 * plan.batches[0] >= vectors >= max(plan.batches)


def _elements(plan: Plan, cols: int) -> int:
    return -(-cols // (plan.vec * plan.lanes * plan.warps)) * plan.vec


# Grid rationale. Both sides of every edge of the rule: rows of several warps of full vectors, which become up to eight,
# or sixteen.
@pytest.mark.parametrize(
    ("dtype", "half", "whole"),
    [
        ("bf16", (1536, 2048, 3000, 4096, 7936, 8192), (1024, 1792, 4608, 5120, 7168, 8704, 4100)),
        ("f32", (), (2048, 4096)),
    ],
)
def test_elements_of_a_thread_of_rms_norm(dtype: str, half: tuple[int, ...], whole: tuple[int, ...]) -> None:
    """On sm_90 threads take 16 elements of 16 bits where that pays, neither of LayerNorm nor with stages."""
    for cols in (*half, *whole):
        spec = RowNormSpec("forward", True, cols, dtype, dtype, dtype, None)
        plan = planned(spec, KNOWN_DEVICES[90])
        layer_norm = planned(replace(spec, rms=False), KNOWN_DEVICES[90])
        assert (_elements(plan, cols) < _elements(layer_norm, cols)) == (cols in half), cols
        assert tree(planned(replace(spec, activation="relu"), KNOWN_DEVICES[90])) == tree(layer_norm)
        if cols in half:
            assert _elements(plan, cols) == 16


# Grid rationale. Both sides of every edge of the rule, of whole vectors unless said otherwise: rows that end among the
# vectors of several warps (3000), five vectors of a warp (1280), eight warps of six (12288), sixteen warps (16384), in
# fp32 more than eight warps (9216) with a bound and without; vectors of four, two and one elements (1604, 4098, 5001).
_NORM = {"weight": "bf16", "bias": "bf16"}
_NORM32 = {"x": "f32", "y": "f32", "weight": "f32", "bias": "f32"}


@pytest.mark.parametrize(
    ("options", "elements"),
    [
        (_NORM, {1024: 16, 1600: 16, 5120: 16, 1280: 8, 3000: 8, 12288: 16, 16384: 8, 1604: 16, 4098: 16, 5001: 8}),
        ({"rms": True, "weight": "bf16"}, {1024: 16, 1280: 16, 5000: 16, 12288: 16, 8192: 8, 16384: 8}),
        ({**_NORM, "activation": "relu"}, {4096: 16}),
        ({**_NORM, "activation": "gelu"}, {4096: 8}),
        ({**_NORM, "pre_activation": "relu"}, {4096: 8}),
        ({"rms": True, "weight": "bf16", "activation": "gelu"}, {4096: 16}),
        ({"weight": "f32", "bias": "f32"}, {1024: 8, 1280: 8, 1600: 16, 1604: 16, 1602: 8, 4096: 8, 12288: 8}),
        ({**_NORM, "y": "f32"}, {1024: 8, 16384: 8}),
        ({**_NORM, "bias": "f32"}, {1024: 8, 16384: 8}),
        ({**_NORM, "residual": "f32", "dropout": True}, {1024: 16, 16384: 8}),
        (_NORM32, {1280: 16, 9216: 16, 16384: 16}),
        ({**_NORM32, "activation": "relu"}, {1280: 16, 9216: 4}),
    ],
)
def test_weight_and_bias_are_loaded_together(options: dict[str, Any], elements: dict[int, int]) -> None:
    """On sm_90, once the statistics are known, of 16 elements at a time where registers allow it, else of fewer."""
    for cols, each in elements.items():
        spec = RowNormSpec(**{"direction": "forward", "rms": False, "cols": cols, "x": "bf16", "y": "bf16", **options})
        plan = planned(spec, KNOWN_DEVICES[90])
        assert plan.resident
        assert plan.variant != "ahead"
        assert plan.batches[0] * plan.vec == each, cols


# Grid rationale. Each condition of either rule: rows that end among a thread's vectors (12280, 11776), wider and absent
# parameters, other dtypes, fewer registers (10240, 16384), parameters beside x (6144), rows read again (12672), an
# offset, a stage; and RMSNorm of 16 bits, which fits without.
@pytest.mark.parametrize(
    ("cols", "options", "early", "anew"),
    [
        (12288, {}, False, True), (12288, {"weight": "f32", "bias": "f32"}, False, True),
        (12288, {"bias": None}, False, True), (12288, {"rms": True, "bias": None}, False, False),
        (12672, _NORM32, False, False),
        (12288, {"weight": None, "bias": None}, False, False), (12288, {"offset": True}, False, False),
        (12288, {"activation": "relu"}, False, False), (12288, {"y": "f32"}, False, False),
        (12280, {}, False, False), (8192, {}, False, False), (12288, _NORM32, True, False),
        (12288, {**_NORM32, "rms": True, "bias": None}, True, False), (11264, _NORM32, True, False),
        (11776, _NORM32, False, False), (10240, _NORM32, False, False), (16384, _NORM32, False, False),
        (6144, _NORM32, False, False), (12288, {**_NORM32, "activation": "relu"}, False, False),
    ],
    ids=str,
)  # fmt: skip
def test_what_is_loaded_early_and_found_anew(cols: int, options: dict[str, Any], early: bool, anew: bool) -> None:
    """On sm_90, where twelve warps of fp32 have registers for it, and where eight of 16 bits have none to spare."""
    spec = RowNormSpec(
        **{"direction": "forward", "rms": False, "cols": cols, "x": "bf16", "y": "bf16", **_NORM, **options}
    )
    plan = planned(spec, KNOWN_DEVICES[90])
    assert (plan.variant == "early", plan.variant == "anew") == (early, anew)
    if anew:
        assert (plan.min_blocks, plan.threads) == (4, 256)
    if early:
        assert plan.min_blocks > 1
        assert 2**16 // (plan.min_blocks * plan.threads) >= 80
    other = planned(spec, KNOWN_DEVICES[100])
    assert other.variant not in ("early", "anew")


# Grid rationale. Single elements on both sides of every edge of the rule, and vectors of two and four, to which part
# of it applies; then what keeps rows out of it: dtypes, stages, whole vectors, other architectures.
@pytest.mark.parametrize(
    ("rms", "cols", "blocks", "warps"),
    [
        (False, 6657, 1, 8), (False, 11263, 1, 8), (False, 11265, 1, 12), (False, 14591, 1, 12), (False, 14593, 1, 14),
        (False, 16575, 1, 14), (False, 16577, 2, 8), (False, 32769, 2, 14), (False, 50257, 4, 12),
        (False, 131071, 8, 14), (False, 9474, 1, 8), (False, 10004, 1, 8), (False, 16382, 2, 8), (True, 9473, 1, 8),
        (True, 50257, 4, 12),
    ],
)  # fmt: skip
def test_narrow_vectors_stream_by_few_warps(rms: bool, cols: int, blocks: int, warps: int) -> None:
    """On sm_90 long rows of 16 bits in narrow vectors have 8, 12 or 14 warps to a block beside its two helpers."""
    plan = planned(RowNormSpec("forward", rms, cols, "bf16", "bf16", "bf16"), KNOWN_DEVICES[90])
    assert (plan.cluster, plan.warps, plan.helpers) == (blocks, blocks * warps, 2)
    assert plan.threads == 32 * (warps + 2)
    assert (plan.shifted, plan.pace is not None) == (plan.vec == 1, plan.vec > 1 or blocks > 1)


@pytest.mark.parametrize(
    ("cols", "options", "arch"),
    [
        (6655, {}, 90), (9470, {}, 90), (18946, {}, 90), (10008, {}, 90), (10007, {}, 100), (9471, {"rms": True}, 90),
        (10002, {"rms": True}, 90), (10007, {"activation": "gelu"}, 90), (10007, {"residual": "bf16"}, 90),
        (10007, {"y": "f32"}, 90), (10002, {"weight": "f32"}, 90), (10007, {"x": "f32", "y": "f32"}, 90),
    ],
    ids=str,
)  # fmt: skip
def test_other_rows_keep_as_many_warps_as_their_length_asks_for(cols: int, options: dict[str, Any], arch: int) -> None:
    """Of none of these does a block have 8, 12 or 14 warps for its columns and two helpers."""
    spec = RowNormSpec(**{"direction": "forward", "rms": False, "cols": cols, "x": "bf16", "y": "bf16", **options})
    plan = planned(spec, KNOWN_DEVICES[arch])
    assert not (plan.helpers == 2 and plan.warps // plan.cluster in (8, 12, 14))


# Grid rationale. Each condition of the rule, once: whole vectors, blocks of 16 warps and of fewer; cheap and costly
# activations, before and behind; fp32; single elements; wider parameters; what has no helpers at all.
@pytest.mark.parametrize(
    ("options", "helpers"),
    [
        ({"cols": 65536}, 1), ({"cols": 50004}, 2), ({"cols": 49152}, 2), ({"cols": 57344}, 2), ({"cols": 98304}, 2),
        ({"cols": 24576, "activation": "relu"}, 1), ({"cols": 65536, "rms": True, "weight": "bf16"}, 1),
        ({"cols": 131072, "rms": True}, 1), ({"cols": 65536, "activation": "relu"}, 1),
        ({"cols": 65536, "activation": "gelu"}, 2), ({"cols": 65536, "rms": True, "activation": "silu"}, 1),
        ({"cols": 65536, "pre_activation": "relu"}, 1), ({"cols": 65536, "rms": True, "pre_activation": "silu"}, 2),
        ({"cols": 50257, "activation": "gelu"}, 2), ({"cols": 65536, "weight": "f32"}, 2),
        ({"cols": 65536, "weight": "f32", "activation": "relu"}, 0), ({"cols": 65536, "y": "f32"}, 2),
        ({"cols": 65536, "rms": True, "weight": "f32"}, 1),
        ({"cols": 32768, "x": "f32", "y": "f32", "activation": "relu"}, 0),
        ({"cols": 65536, "residual": "bf16"}, 0), ({"cols": 65536, "dropout": True}, 0),
        ({"cols": 65536, "x": "f32", "y": "f32"}, 2), ({"cols": 65536, "x": "f32", "y": "f32", "rms": True}, 0),
        ({"cols": 50257, "x": "f32", "y": "f32"}, 2), ({"cols": 50257, "x": "f32", "y": "f32", "rms": True}, 0),
        ({"cols": 65536, "x": "f32", "y": "f32", "activation": "gelu"}, 2),
    ],
    ids=str,
)  # fmt: skip
def test_helpers_of_streamed_rows(options: dict[str, Any], helpers: int) -> None:
    """On sm_90 a streamed forward has a combiner and a producer where they pay, and elsewhere nobody has."""
    spec = RowNormSpec(**{"direction": "forward", "rms": False, "x": "bf16", "y": "bf16", **options})
    assert planned(spec, KNOWN_DEVICES[90]).helpers == helpers
    assert planned(spec, KNOWN_DEVICES[100]).helpers == 0


def test_no_helpers_beside_wide_parameters_where_rows_begin_anywhere() -> None:
    """Where blocks have 16 warps: with helpers these spill. Blocks of fewer warps have registers for them."""
    for cols, helpers in ((65536, 0), (57344, 2)):
        spec = RowNormSpec("forward", False, cols, "bf16", "bf16", "f32", "f32")
        for x in (2, 8):
            access = replace(planner.contiguous_access(spec), x=x)
            assert plan_row_norm(spec, access, KNOWN_DEVICES[90]).helpers == helpers


# Grid rationale. Each tolerance of either direction, and both sides of what decides it: norms, dtypes, whole vectors,
# helpers, rows at a time, blocks to a row, stages.
@pytest.mark.parametrize(
    ("options", "pace"),
    [
        ({"cols": 65536}, Pace(8)), ({"cols": 32768}, Pace(7)), ({"cols": 57344}, Pace(6)), ({"cols": 50257}, Pace(6)),
        ({"cols": 50257, "rms": True}, Pace(7)), ({"cols": 10007}, None), ({"cols": 10002}, Pace(6)),
        ({"cols": 65536, "rms": True}, Pace(7)), ({"cols": 65536, "activation": "gelu"}, Pace(8)),
        ({"cols": 65536, "x": "f32", "y": "f32"}, Pace(6)), ({"cols": 65536, "residual": "bf16"}, Pace(8)),
        ({"cols": 131072, "residual": "bf16"}, None),
        ({"direction": "backward", "cols": 4096}, Pace(8)), ({"direction": "backward", "cols": 1024}, Pace(9)),
        ({"direction": "backward", "cols": 1024, "rms": True}, Pace(8)),
        ({"direction": "backward", "cols": 768}, Pace(8)),
        ({"direction": "backward", "cols": 32768}, Pace(9)), ({"direction": "backward", "cols": 12288}, None),
        ({"direction": "backward", "cols": 4096, "x": "f32", "y": "f32"}, Pace(7, 7)),
        ({"direction": "backward", "cols": 4099, "x": "f32", "y": "f32"}, Pace(8, 7)),
        ({"direction": "backward", "cols": 4096, "x": "f32", "y": "f32", "activation": "relu"}, Pace(8, 7)),
        ({"direction": "backward", "cols": 65536}, None),
        ({"direction": "backward", "cols": 4096, "activation": "relu"}, None),
    ],
    ids=str,
)  # fmt: skip
def test_pace_of_streamed_rows(options: dict[str, Any], pace: Pace | None) -> None:
    """On sm_90; elsewhere a forward that streams goes apart, and a backward that keeps together does so as it did."""
    spec = RowNormSpec(**{"direction": "forward", "rms": False, "x": "bf16", "y": "bf16", "weight": "bf16", **options})
    plan = planned(spec, KNOWN_DEVICES[90])
    assert (plan.slots > 0, plan.pace) == (True, pace)
    assert planned(spec, KNOWN_DEVICES[100]).pace in ((None, Pace()) if spec.direction == "backward" else (None,))


def test_finish_of_few_columns_has_more_threads() -> None:
    """Up to 256 columns a block of 1024 threads adds the partial rows."""
    specs = [SumPartialsSpec(cols, "f32", "bf16", "bf16") for cols in (1, 256, 257)]
    assert [planner.plan_for(spec, Access(), KNOWN_DEVICES[90]).threads for spec in specs] == [1024, 1024, 256]


# Grid rationale. Each tensor by itself; rows of part of a warp, a warp, a block, and of clusters, which stream; vectors
# of four elements by nature (1604).
@pytest.mark.parametrize("wider", [{"weight": "f32"}, {"bias": "f32"}, {"y": "f32"}, {"residual": "f32"}], ids=str)
@pytest.mark.parametrize("cols", [64, 768, 1604, 4096, 16384, 24576, 65536])
def test_no_vector_of_forward_has_more_than_16_bytes(wider: dict[str, str], cols: int) -> None:
    """By the same threads; where rows stream, whose parameters stay in registers, that is asked of y alone."""
    spec = RowNormSpec("forward", False, cols, "bf16", "bf16", "bf16", "bf16", residual=wider.get("residual"))
    device = KNOWN_DEVICES[90]
    plan = planned(replace(spec, **wider), device)
    same = planned(replace(spec, residual=spec.residual and "bf16"), device)
    assert plan.vec == (8 if plan.slots and "y" not in wider else 4)
    assert (plan.lanes, plan.warps) == (same.lanes, same.warps)


@pytest.mark.parametrize(
    ("cols", "vec", "rows"), [(1024, 4, 8), (5120, 4, 2), (5000, 8, 1), (3000, 8, 4), (768, 4, 12)]
)
def test_backward_beside_dy_of_fp32(cols: int, vec: int, rows: int) -> None:
    """On sm_90 vectors of dy have 16 bytes, but where rows end among them; no block has 20 warps there, which spill."""
    plan = planned(RowNormSpec("backward", False, cols, "bf16", "f32", "f32", "f32"), KNOWN_DEVICES[90])
    assert (plan.vec, plan.per_block) == (vec, rows)


@pytest.mark.parametrize(("cols", "rows"), [(640, 7), (768, 7), (1408, 3), (2944, 1)])
def test_rows_of_large_slots(cols: int, rows: int) -> None:
    """On sm_90 backward beside a residual of fp32 takes as many rows at a time as have four slots each."""
    spec = RowNormSpec("backward", True, cols, "bf16", "bf16", "bf16", None, residual="f32", dh=True, dresidual=True)
    plan = planned(spec, KNOWN_DEVICES[90])
    assert (plan.per_block, plan.slots) == (rows, 4)


@pytest.mark.parametrize("cols", [1152, 1280])
@pytest.mark.parametrize(
    ("change", "bound"),
    [
        ({}, True),
        ({"weight": "f32"}, True),
        ({"y": "f32"}, False),
        ({"residual": "bf16"}, True),
        ({"residual": "f32"}, False),
        ({"residual": "bf16", "dropout": True}, False),
    ],
)
def test_five_vectors_of_a_warp_are_bound(change: dict[str, Any], bound: bool, cols: int) -> None:
    """On sm_90 to the registers of 1024 threads, where that takes no spills."""
    spec = RowNormSpec("forward", False, cols, "bf16", "bf16", "bf16", "bf16")
    assert (planned(replace(spec, **change), KNOWN_DEVICES[90]).min_blocks > 1) == bound


@pytest.mark.parametrize("cols", [9216, 10240, 12288, 16384])
def test_large_blocks_of_fp32_are_bound(cols: int) -> None:
    """On sm_90 to the registers of 1024 threads, where vectors are aligned and nothing but the norm takes registers."""
    device, spec = KNOWN_DEVICES[90], RowNormSpec("forward", False, cols, "f32", "f32", "f32", "f32")
    bound = planned(spec, device)
    assert bound.min_blocks == 1024 // bound.threads > 1
    free = [planned(replace(spec, activation="relu"), device), plan_row_norm(spec, anywhere(spec), device)]
    assert all(plan.min_blocks == 1 and plan.batches == (1,) for plan in free)


# Grid rationale. Both sides of every edge of the rule: one warp with two, three vectors, or more of them.
@pytest.mark.parametrize(
    ("dtype", "three", "other"),
    [("bf16", (520, 640, 768), (512, 516, 776, 1536)), ("f32", (260, 384), (256, 388, 768))],
)
def test_backward_of_three_vectors(dtype: str, three: tuple[int, ...], other: tuple[int, ...]) -> None:
    """On sm_90 twelve rows of a warp with three vectors a thread share a block, with the weight in registers."""
    for cols in (*three, *other):
        spec = RowNormSpec("backward", False, cols, dtype, dtype, dtype, dtype)
        plan = planned(spec, KNOWN_DEVICES[90])
        assert ((plan.per_block, plan.slots) == (12, 3)) == (cols in three), cols
        if cols in three:
            assert (plan.keeps, plan.pace is not None, plan.threads) == ("weight", True, 384)
            assert planned(replace(spec, activation="gelu"), KNOWN_DEVICES[90]).per_block != 12


@pytest.mark.parametrize(("dtype", "cols"), [("bf16", 50002), ("bf16", 64000), ("bf16", 128000), ("f32", 32000)])
def test_rows_of_clusters_stream(dtype: str, cols: int) -> None:
    """Lengths that more elements to a thread would divide are streamed like their neighbours."""
    plan = planned(RowNormSpec("forward", False, cols, dtype, dtype, dtype, dtype), KNOWN_DEVICES[90])
    assert plan.slots > 1
    assert _elements(plan, cols) <= 32


# Grid rationale. Both sides of every edge of the rule: vectors of 2 bytes up to 1024 columns, of 4 bytes up to 192 of
# them, never wider ones.
@pytest.mark.parametrize(
    ("dtype", "tiled", "not_tiled"),
    [
        ("bf16", (1, 3, 17, 255, 1023, 130, 382), (4, 252, 256, 1025, 386)),
        ("f32", (1, 17, 191), (2, 193, 255)),
        ("f64", (), (1, 17)),
    ],
)
def test_rows_taken_many_at_a_time(dtype: str, tiled: tuple[int, ...], not_tiled: tuple[int, ...]) -> None:
    """Short rows of narrow vectors, from sm_90 on and without a residual."""
    for cols in (*tiled, *not_tiled):
        spec = RowNormSpec("forward", False, cols, dtype, dtype, dtype, dtype)
        assert planned(spec, KNOWN_DEVICES[90]).tiled == (cols in tiled), cols
        assert not planned(spec, KNOWN_DEVICES[80]).tiled
        assert not planned(replace(spec, residual=dtype), KNOWN_DEVICES[90]).tiled


@given(spec=_specs_of_any_length.filter(lambda spec: spec.direction != "backward_weight"), device=_devices)
@example(RowNormSpec("inference", False, 16577, "f16", "f16"), KNOWN_DEVICES[90])  # six slots, fewer helpers
@example(RowNormSpec("backward", False, 8, "f16", "f32", None, "f64"), KNOWN_DEVICES[90])  # backward reads no such bias
@example(RowNormSpec("backward", False, 272, "f16", "f16"), KNOWN_DEVICES[90])  # `few` needs three slots
@settings(max_examples=200, deadline=None)
def test_executors_are_sound(spec: RowNormSpec, device: Device) -> None:
    """The plans that test_cuda_executors.py forces upon a GPU are sound and keep the tree."""
    plan, access = planned(spec, device), planner.contiguous_access(spec)
    for other in executors(spec, plan, device):
        assert_sound(spec, access, other, device)
        assert tree(other) == tree(plan)


# Grid rationale. Through shared memory go rows that need a cluster in forward, and all of 256 columns or more in
# backward, several at a time. Four slots let a test try two, three and four.
@pytest.mark.parametrize(("direction", "cols"), [("forward", 65536), ("backward", 1024), ("backward", 4096)])
def test_executors_of_streamed_rows(direction: str, cols: int) -> None:
    """On sm_90 a streamed plan has direct executors, and streamed ones with every number of slots, and all compile."""
    spec, device = RowNormSpec(direction, False, cols, "bf16", "bf16", "bf16", "bf16"), KNOWN_DEVICES[90]
    plan, access = planned(spec, device), planner.contiguous_access(spec)
    plans = executors(spec, plan, device)
    assert {other.slots for other in [plan, *plans]} == {0, 2, 3, 4}
    for other in plans:
        assert compile_source(planner.source_of(spec, access, other).text(), 90)[0].startswith(b"\x7fELF")
