"""CUDA kernels of pointwise chains, reductions and softmax without a GPU.

They compile without spilling, and their plans and index arithmetic reach every element exactly once.
"""

from __future__ import annotations

import ctypes
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from cuda_spills import Kernel, assert_no_local_memory, each_strength
from hypothesis import given, settings
from hypothesis import strategies as st
from support import PACKAGE

from kernel_fusion.backends.cuda import planner
from kernel_fusion.backends.cuda.device import KNOWN_DEVICES
from kernel_fusion.backends.cuda.reduce import ReduceRule
from kernel_fusion.config import cxx_compiler
from kernel_fusion.core.activations import CODES
from kernel_fusion.core.fields import kinds
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
from kernel_fusion.core.spec import BITS, ITEMSIZE

_DTYPES = ("f32", "bf16", "f16", "f64")
CODE_TYPES = kinds(Codes)["code"].names
_GROUP_STEPS = kinds(GroupNormSpec)["step"].names
_SM90 = KNOWN_DEVICES[90]


def _vec(dtype: str) -> int:
    return 16 // ITEMSIZE[dtype]


# Grid rationale. Every activation in every dtype, with what takes most registers beside it: two operands and dropout,
# both gradients, the sums of columns. Then what addresses cost, for one expensive activation: operands of several
# dimensions, unaligned, of unlike dtypes, and dropout at positions that are no neighbours. Bits, written
# beside all that, and read.
def _pointwise_kernels() -> Iterator[Kernel]:
    for activation, t in product(CODES, _DTYPES):
        access = PointwiseAccess(vec=_vec(t))
        yield PointwiseSpec("gate", activation, True, t, t, y=t), access
        yield PointwiseSpec("add", activation, False, t, t, y=t), access
        backward = PointwiseSpec("gate", activation, True, t, t, dy=t, da=t, db=t)
        yield backward, access
        yield backward, replace(access, lanes=32)
    for t, lanes in product(_DTYPES, (0, 32)):
        access = PointwiseAccess(vec=_vec(t), lanes=lanes)
        yield (
            PointwiseSpec(
                "first", "leaky_relu", False, BITS, t if lanes else None, dy=t, da=t, db=t if lanes else None
            ),
            access,
        )
    for t, mode, dims in product(_DTYPES, ("vector", "broadcast", "strided", "gather"), (2, 4)):
        other, looked_up = Operand(mode, ITEMSIZE[t]), mode == "gather"
        access = PointwiseAccess(
            *(dims, _vec(t), (Operand(),) * 3 + (other, other)), divisor=int(looked_up), repeats=looked_up
        )
        yield PointwiseSpec("mul", "gelu", True, t, t, y=t), access
        yield PointwiseSpec("add", "leaky_relu", False, t, t, y=t, bits=True), access
        yield PointwiseSpec("mul", "gelu", True, t, t, dy=t, da=t, db=t), access
    rows = (Operand("vector", 16), Operand("vector", 2), Operand("broadcast", 2), Operand("gather", 2))
    for t, row, aligned in product(("bf16", "f16"), rows, (True, False)):
        beside = PointwiseAccess(2, 8, (Operand(),) * 4 + (row,), aligned_positions=aligned)
        yield PointwiseSpec("add", "gelu", True, t, t, y=t), beside
        alone = PointwiseAccess(2, 8, (Operand(),) * 3 + (row, Operand()), aligned_positions=aligned)
        yield PointwiseSpec("first", "gelu", True, t, None, y=t), alone
    for vec in (1, 2, 4):
        yield PointwiseSpec("add", "gelu", True, "bf16", None, y="bf16"), PointwiseAccess(1, vec)
        yield (
            PointwiseSpec("add", "gelu", True, "bf16", "f32", y="f32"),
            PointwiseAccess(1, vec, aligned_positions=False),
        )
        yield PointwiseSpec("add", "gelu", True, "f16", "f32", dy="f32", db="f32"), PointwiseAccess(1, vec, lanes=8)
    yield PointwiseSpec("add", "gelu", False, "bf16", "f64", y="f64"), PointwiseAccess(1, 2)
    yield PointwiseSpec("add", "gelu", False, "bf16", "f64", dy="f64", da="bf16", db="f64"), PointwiseAccess(1, 2)


# Every number of lanes and of loads in flight; rows with a stride, in chunks, of two coordinates and at any alignment;
# results in other dtypes.
def _reduce_kernels() -> Iterator[Kernel]:
    for kind, t in product(("square", "abs", "none"), _DTYPES):
        spec = ReduceSpec(kind, t, t, "f64" if t == "f64" else "f32")
        for capacity in (1, 2, 8, 64, 128, 256, 512, 1024, 4096):
            yield spec, ReduceAccess(capacity=capacity)
        for lanes, vec in product((1, 8, 16, 64), {1, _vec(t)}):
            for threads in (64,) if lanes == 64 else (256, 512):
                yield spec, ReduceAccess(vec, lanes=lanes, threads=threads, align_out=ITEMSIZE[t])
    for capacity, contiguous, nested in product((8, 128, 4096), (True, False), (True, False)):
        whole = ReduceAccess(capacity=capacity, contiguous=contiguous, chunked=capacity == 4096, nested=nested)
        for access in (whole, replace(whole, align=2)):
            yield ReduceSpec("square", "bf16", "f32", "f32"), access
            yield ReduceSpec("abs", "f16", "f64", "f64"), access


# Every way of spreading a row: lanes of a warp, blocks, the largest block with more elements a thread, rows read twice.
_CAPACITIES = (1, 3, 8, 64, 128, 192, 1024, 3072, 4096, 6144, 8192, 16384, 32768, 49152)


def _softmax_kernels() -> Iterator[Kernel]:
    for t, capacity in product(_DTYPES, _CAPACITIES):
        for vec in {1, _vec(t)}:
            x = RowAccess(min(16, vec * ITEMSIZE[t]))
            for leaves_out in (False, True):
                yield SoftmaxBwdSpec(t, t, t, leaves_out), SoftmaxAccess(vec, capacity, x, x)
            yield SoftmaxBwdSpec(t, t, t, True, log=True), SoftmaxAccess(vec, capacity, x, x)
            yield SoftmaxSpec(t), SoftmaxAccess(vec, capacity, x)
            yield SoftmaxSpec(t, log=True), SoftmaxAccess(vec, capacity, x)
            yield SoftmaxSpec(t, "b8", True), SoftmaxAccess(vec, capacity, x, RowAccess(1, True))
            additive = SoftmaxSpec(t, "f32" if t != "f64" else t, True)
            for spec in (additive, replace(additive, log=True)):
                yield spec, SoftmaxAccess(vec, capacity, RowAccess(ITEMSIZE[t], True), RowAccess(8, True))
            if capacity >= 4096:  # longer rows take other plans where there is but a mask, or a diagonal
                yield SoftmaxSpec(t, None, True), SoftmaxAccess(vec, capacity, x)
                yield replace(additive, causal=False), SoftmaxAccess(vec, capacity, x, RowAccess(8, True))
    yield SoftmaxSpec("bf16", "bf16"), SoftmaxAccess(8, 512, mask_repeats=True)
    yield SoftmaxBwdSpec("f32", "bf16", "bf16"), SoftmaxAccess(8, 512)


# Both directions with nothing else, and with all options at once; each extra; lanes of a warp, and the largest block.
def _token_logprob_kernels() -> Iterator[Kernel]:
    some = {"scaled": True, "capped": True}
    weighted, masked = {"extra": "sum", "weighted": True, **some}, {"masked": True, **some}
    forward = ({}, {"extra": "entropy", **masked}, {"predicts": True, **weighted})
    backward = ({}, {"scaled": True}, {"extra": "sum", **masked}, weighted)
    for t, capacity in product(_DTYPES, (3, 64, 16384)):
        for vec in {1, _vec(t)}:
            x = RowAccess(min(16, vec * ITEMSIZE[t]))
            for chosen, is_backward in (*product(forward, (False,)), *product(backward, (True,))):
                other = RowAccess(vec if t == "bf16" else 1, True)
                yield TokenLogprobSpec(t, is_backward, **chosen), SoftmaxAccess(vec, capacity, x, other)
    plain = SoftmaxAccess(8, 16384, RowAccess(2, True), mask_repeats=True)
    yield TokenLogprobSpec("bf16", masked=True, predicts=True), plain
    yield TokenLogprobSpec("bf16", True, masked=True), plain


def _rotary_kernels() -> Iterator[Kernel]:
    """Every dtype of heads and angles, whole vectors and single elements, positions, both kinds of pairs.

    With a norm: heads of eight lanes, such as most models', and those of most registers; weights of two dtypes.
    """
    for t, vec, interleaved, positions in product(_DTYPES, (1, 8), (False, True), (0, 8)):
        vec = min(vec, _vec(t))
        access = RotaryAccess(vec, 256, positions, *(min(16, vec * ITEMSIZE[t]),) * 3)
        spec = RotarySpec(x=t, angles=t, cols=144, half=64, interleaved=interleaved)
        yield replace(spec, rounds=t in ("bf16", "f16")), access
        yield replace(spec, angles=t if t == "f64" else "f32", backward=True), access
        other = "f64" if t == "f64" else "f32"
        for cols, half in ((128, 64), (500, 150)) if vec > 1 else ((511, 255),):
            normed = replace(spec, cols=cols, half=half, norm=True, rounds=interleaved, query_weight=t, offset=True)
            lie = replace(access, vec=min(vec, half & -half))
            yield replace(normed, key_weight=t), lie
            yield replace(normed, key_weight=other, angles=other), lie
            yield replace(normed, key_weight=t, backward=True, sums=True), lie
            yield replace(normed, key_weight=other, angles=other, backward=True, sums=True), lie


# Grid rationale. Every step in both memory formats, with all that may stand around a norm beside a costly activation,
# and with nothing; whole vectors and single elements; lines of some lanes and of a whole block.
_AROUND = ("weight", "bias", "add", "scale", "shift")


def _group_norm_kernels() -> Iterator[Kernel]:
    for step, t, last, whole, full in product(_GROUP_STEPS, _DTYPES, *[(False, True)] * 3):
        if last and step.startswith("row"):
            continue
        around = dict.fromkeys(_AROUND, t if t == "f64" else "f32") if full else {}
        sums = full and step in ("row_bwd", "sums", "finish_bwd")
        spec = GroupNormSpec(
            step, t, t, **around, activation="gelu" if full else "silu", channels_last=last, sums_x=sums
        )
        vec, threads = _vec(t) if whole else 1, 512 if step.startswith("row") and t != "f64" else 256
        align = vec * ITEMSIZE[t]
        yield spec, GroupNormAccess(vec, 16 if last else threads, threads, align, align)
        yield spec, GroupNormAccess(vec, 32, threads, align, align)


# Grid rationale. Rows in part of a warp, in one, in several, and too long for registers; in vectors of whole blocks of
# columns and of single elements.
def _quantize_kernels() -> Iterator[Kernel]:
    """Codes of every type and scale, of rows and of a gate with an expensive activation."""
    for t, cols, code, scales in product(_DTYPES, (60, 1000, 14336, 33333), CODE_TYPES, ("given", "row", "block")):
        rows = RowAccess(min(16, ITEMSIZE[t] * (cols & -cols)))
        yield QuantizeSpec(cols, t, codes=Codes(code, scales)), QuantizeAccess(rows)
        gate = QuantizeSpec(cols, t, t, "gelu", Codes(code, scales, keeps=True))
        yield gate, QuantizeAccess(rows, RowAccess(ITEMSIZE[t], True))


@pytest.mark.parametrize("dtypes", [("bf16", "f16"), ("f16", "bf16")])
def test_arithmetic_of_unlike_gradients_suits_the_more_exact(dtypes: tuple[str, str]) -> None:
    """A bf16 and an fp16 gradient together take the formulas of fp16, whose results have more digits."""
    da, db = dtypes
    spec = PointwiseSpec("gate", "gelu", False, da, db, dy="f32", da=da, db=db)
    access = PointwiseAccess(1, 4)
    text = planner.source_of(spec, access, planner.plan_for(spec, access, _SM90)).text()
    assert "using Result = kf::f16;" in text


@pytest.mark.parametrize(
    ("dtype", "dropout", "vectors"), [("f32", False, 2), ("f32", True, 2), ("bf16", False, 2), ("bf16", True, 4)]
)
def test_vectors_of_a_chain_that_are_on_their_way(dtype: str, dropout: bool, vectors: int) -> None:
    """A thread reads 32 bytes at a time, but 64 if it also computes dropout of fp16 or bf16."""
    spec = PointwiseSpec("first", "gelu", dropout, dtype, None, y=dtype)
    plan = planner.plan_for(spec, PointwiseAccess(1, _vec(dtype)), _SM90)
    assert plan.unroll == vectors


@pytest.mark.parametrize("repeats", [False, True])
def test_rows_that_are_not_whole_vectors(repeats: bool) -> None:
    """Operands that caches hold are looked up by element beside whole vectors; else all vectors are cut smaller."""
    spec = PointwiseSpec("add", "relu", False, "bf16", "f32", y="bf16")
    operands = (Operand(), Operand(), Operand(), Operand(), Operand("vector", 16))
    plan = planner.plan_for(spec, PointwiseAccess(2, 4, operands, divisor=2, repeats=repeats), _SM90)
    if repeats:
        assert (plan.vec, plan.operands) == (4, (*operands[:4], Operand("gather")))
    else:
        assert plan.vec == 2
        assert [each.align for each in plan.operands] == [4, 16, 16, 4, 8]  # there is no db, and no dy
    assert plan.per_block == plan.threads * plan.vec * plan.unroll


@each_strength
@pytest.mark.parametrize(
    "grid",
    [
        _group_norm_kernels,
        _pointwise_kernels,
        _quantize_kernels,
        _reduce_kernels,
        _rotary_kernels,
        _softmax_kernels,
        _token_logprob_kernels,
    ],
)
def test_no_kernel_spills(grid: Callable[[], Iterator[Kernel]], strength: int) -> None:
    """Kernels with every pair of values, an architecture of each generation among these, keep all in registers."""
    assert_no_local_memory(lambda arch: grid() if arch in (80, 90, 120) else (), strength)


@pytest.fixture(scope="module")
def division(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """`divide(n, fast_divisor(d))` of shared/pointwise_args.h, compiled."""
    compiler = cxx_compiler()
    if compiler is None:
        pytest.skip("no C++ compiler")
    folder = tmp_path_factory.mktemp("division")
    source: Path = folder / "division.cpp"
    source.write_text(
        '#include "shared/pointwise_args.h"\n'
        'extern "C" unsigned quotient(unsigned n, unsigned d) { return kf::divide(n, kf::fast_divisor(d)); }\n'
    )
    library = folder / "division.so"
    command = [*compiler, "-std=c++20", "-shared", "-fPIC", f"-I{PACKAGE / 'native'}", str(source), "-o", str(library)]
    subprocess.run(command, check=True)
    return ctypes.CDLL(str(library)).quotient


_below_2_31 = st.integers(0, 31).flatmap(lambda bits: st.integers((1 << bits) >> 1, (1 << bits) - 1))


@given(n=_below_2_31, d=_below_2_31.filter(bool), step=st.integers(-1, 1))
@settings(max_examples=2000, deadline=None)
def test_fast_division(division: Any, n: int, d: int, step: int) -> None:
    """The quotient by multiplication is the quotient, for all below 2^31, and around multiples of the divisor."""
    near = min(max(n // d * d + step, 0), 2**31 - 1)
    assert division(n, d) == n // d
    assert division(near, d) == near // d


def test_fast_division_beside_powers_of_two(division: Any) -> None:
    """The same where factor and shift change."""
    edges = sorted({(1 << bits) + step for bits in range(31) for step in (-1, 0, 1)})
    assert all(division(n, d) == n // d for n, d in product(edges, filter(bool, edges)))


@given(
    size=st.integers(1, 10_000),
    vec=st.sampled_from([1, 2, 4, 8]),
    dtype=st.sampled_from(_DTYPES),
    binary=st.booleans(),
    backward=st.booleans(),
)
@settings(max_examples=100, deadline=None)
def test_pointwise_reaches_every_element_once(size: int, vec: int, dtype: str, binary: bool, backward: bool) -> None:
    """Blocks, threads and vectors of an iteration: `over_vectors` of kernels/operands.cuh."""
    b = dtype if binary else None
    spec = PointwiseSpec("add" if binary else "first", "relu", False, dtype, b, y=dtype)
    if backward:
        spec = replace(spec, y=None, dy=dtype, da=dtype)
    plan = planner.plan_for(spec, PointwiseAccess(vec=vec), _SM90)
    assert plan.per_block == plan.threads * vec * plan.unroll
    reached: Counter[int] = Counter()
    for block, thread in product(range(-(-size // plan.per_block)), range(plan.threads)):
        for first in range(block * plan.per_block + thread * vec, (block + 1) * plan.per_block, plan.threads * vec):
            reached.update(range(first, min(first + vec, size)))
    assert len(reached) == size
    assert set(reached.values()) == {1}


@given(size=st.integers(1, 5_000), vec=st.sampled_from([1, 2, 4, 8]), unroll=st.sampled_from([2, 3, 4]))
@settings(max_examples=100, deadline=None)
def test_bits_are_written_whole(size: int, vec: int, unroll: int) -> None:
    """Every byte is stored once, with the bits of its eight elements: `store_bits` of kernels/vectors.cuh.

    A warp comes together as long as its first lane's vector begins before the end (`over_vectors`).
    """
    span, stored = 128 * vec, Counter[int]()
    for start in range(0, -(-size // (span * unroll)) * span * unroll, 32 * vec):
        if start >= size:
            continue
        held = [{first + e: first % 8 + e for e in range(vec)} for first in range(start, start + 32 * vec, vec)]
        lanes = 1
        while lanes < 8 // vec:  # each lane's byte becomes that of both
            held = [held[lane] | held[lane ^ lanes] for lane in range(32)]
            lanes *= 2
        for lane, bits in enumerate(held):
            if (first := start + lane * vec) % 8 == 0 and first < size:
                assert bits == {first + e: e for e in range(8)}
                stored[first // 8] += 1
    assert stored == Counter(range(-(-size // 8)))


@given(reduced=st.integers(0, 70_000), dtype=st.sampled_from(_DTYPES), rows=st.integers(1, 40))
@settings(max_examples=100, deadline=None)
def test_row_reductions_reach_every_element_once(reduced: int, dtype: str, rows: int) -> None:
    """Chunks, lanes, vectors and the tail of a row, and which block takes which rows: kernels/reduce_rows.cuh."""
    vec, chunk = _vec(dtype), ReduceRule().chunk_bytes // ITEMSIZE[dtype]
    chunks = max(1, -(-reduced // chunk))
    capacity = 1 << (max(1, -(-min(reduced, chunk) // vec)) - 1).bit_length()
    plan = planner.plan_for(ReduceSpec("square", dtype, dtype, dtype), ReduceAccess(capacity=capacity), _SM90)
    assert plan.vec == vec
    groups = plan.threads // plan.lanes
    assert plan.lanes & (plan.lanes - 1) == 0
    assert plan.per_block == groups * plan.each
    assert plan.lanes <= 32 or groups == plan.each == 1
    assert chunks == 1 or plan.per_block == 1
    units = rows * chunks
    taken = Counter(
        unit
        for block, group, k in product(range(-(-units // plan.per_block)), range(groups), range(plan.each))
        if (unit := block * plan.per_block + group + k * groups) < units
    )
    assert taken == Counter(range(units))
    for length in {min(chunk, reduced - c * chunk) for c in range(chunks)}:
        vectors, tail = divmod(length, vec)
        own = [range(lane, vectors, plan.lanes) for lane in range(plan.lanes)]
        after = [lane + len(vs) * plan.lanes for lane, vs in enumerate(own)]  # where each lane's way ends
        assert sum(map(len, own)) * vec + after.count(vectors) * tail == length


# Grid rationale. Lengths of vocabularies; what the two directions hold; short vectors of bf16, which are read twice.
@pytest.mark.parametrize(
    ("spec", "vec", "capacity", "reading"),
    [
        (SoftmaxSpec("bf16"), 8, 2048, "resident"),
        (SoftmaxSpec("bf16"), 8, 4096, "streamed"),
        (SoftmaxSpec("bf16"), 8, 32768, "streamed"),
        (SoftmaxSpec("bf16"), 1, 65536, "streamed"),
        (SoftmaxSpec("bf16"), 4, 16384, "twice"),
        (SoftmaxSpec("f32"), 1, 65536, "streamed"),
        (SoftmaxSpec("f64"), 2, 4096, "twice"),
        (SoftmaxBwdSpec("bf16", "bf16", "bf16"), 8, 4096, "resident"),
        (SoftmaxBwdSpec("bf16", "bf16", "bf16"), 1, 65536, "streamed"),
    ],
)
def test_softmax_reads_long_rows_once(spec: Any, vec: int, capacity: int, reading: str) -> None:
    """On sm_90 rows that a cluster holds are read once from memory; without clusters they are read twice."""
    access = SoftmaxAccess(vec, capacity)
    assert planner.plan_for(spec, access, _SM90).reading == reading
    if reading == "streamed":
        assert planner.plan_for(spec, access, KNOWN_DEVICES[80]).reading in ("resident", "twice")


_capacities = st.integers(0, 16).flatmap(lambda k: st.sampled_from([1 << k, 3 << k]))


@given(
    capacity=_capacities,
    dtype=st.sampled_from(_DTYPES),
    vec=st.sampled_from([1, 2, 4, 8]),
    backward=st.booleans(),
    arch=st.sampled_from([80, 90, 120]),
)
@settings(max_examples=500, deadline=None)
def test_softmax_plans_are_sound(capacity: int, dtype: str, vec: int, backward: bool, arch: int) -> None:
    """A row of every length has threads for all its vectors, within what registers and shared memory hold."""
    vec = min(vec, _vec(dtype))
    spec = SoftmaxBwdSpec(dtype, dtype, dtype) if backward else SoftmaxSpec(dtype)
    device = KNOWN_DEVICES[arch]
    plan = planner.plan_for(spec, SoftmaxAccess(vec, capacity), device)
    workers = plan.threads - 32 * plan.ring.helpers
    assert plan.lanes & (plan.lanes - 1) == 0
    assert plan.threads % 32 == 0
    assert plan.threads <= 1024
    assert plan.min_blocks * plan.threads <= (2048 if arch == 90 else 1536)
    assert plan.min_blocks <= 32
    assert plan.per_block * plan.lanes * plan.warps == workers * plan.cluster
    assert plan.lanes == 32 or plan.warps == 1
    assert plan.per_block == 1 or plan.warps == 1
    assert plan.persistent == (plan.reading == "streamed")
    if plan.reading == "twice":
        assert plan.warps == (16 if dtype == "f64" else 32)
        assert capacity * vec > 32 * plan.warps * 7  # a row that is read twice is a long one
        return
    # Any row of this capacity fits, and each warp has some of it.
    assert 32 * plan.warps * plan.vectors >= capacity if plan.warps > 1 else plan.lanes * plan.vectors >= capacity
    assert plan.vectors * vec * (2 if backward else 1) * max(1, ITEMSIZE[dtype] // 4) <= 128
    if plan.reading == "streamed":
        assert device.has_clusters
        assert dtype != "f64"
        assert plan.ring.slots >= 2
        assert -(-(capacity * 2 // 3 + 1) // 32) >= plan.warps
        slot = sum(plan.vectors * workers * vec * ITEMSIZE[dtype] + 16 for _ in range(1 + backward))
        assert plan.ring.slots * slot <= plan.shared_bytes
        assert plan.shared_bytes + 4 * plan.warps * 8 + 512 <= device.shared_bytes


@given(capacity=_capacities, dtype=st.sampled_from(_DTYPES), vec=st.sampled_from([1, 2, 4, 8]))
@settings(max_examples=200, deadline=None)
def test_logprob_plans_are_sound(capacity: int, dtype: str, vec: int) -> None:
    """Rows are read once by a power of two of threads, which makes their sum a butterfly, and few have no vector."""
    vec = min(vec, _vec(dtype))
    for backward in (False, True):
        plan = planner.plan_for(TokenLogprobSpec(dtype, backward), SoftmaxAccess(vec, capacity), _SM90)
        assert (plan.reading, plan.cluster, plan.persistent) == ("once", 1, False)
        lanes = plan.lanes * plan.warps
        assert lanes & (lanes - 1) == 0
        assert lanes * plan.per_block == plan.threads <= 1024
        assert plan.per_block == 1 or plan.warps == 1
        assert lanes == 512 or lanes * plan.unroll >= capacity
        assert lanes == 1 or lanes // 2 * plan.unroll < capacity
