"""The bits of a row on a GPU: the same from every executor of its tree, and wherever the row begins.

A plan is forced upon the kernels here; tests/test_cuda_kernels_offline.py checks, without a GPU, that all of them are
sound. Rows are many enough that a persistent block goes around its ring of slots more than once, where it has one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from cuda_plans import executors
from support import CUDA, call
from torch import Tensor

import kernel_fusion as kf
from kernel_fusion.backends.cuda import planner
from kernel_fusion.backends.cuda.device import Device
from kernel_fusion.backends.cuda.plan import Plan
from kernel_fusion.core.spec import Direction, RowNormSpec, dtype_name
from kernel_fusion.testing import oracle
from kernel_fusion.testing.oracle import RowNormCase
from kernel_fusion_bench import trials

pytestmark = pytest.mark.cuda
F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64


def tensors(cols: int, dtype: torch.dtype) -> list[Tensor]:
    """x, weight, bias and dy, with a mean that makes the order of summation show; the number of rows is odd."""
    rows = 2**23 // cols | 1
    shapes = ((rows, cols), (cols,), (cols,), (rows, cols))
    return [torch.randn(shape, device="cuda").add_(3).to(dtype) for shape in shapes]


def y_and_dx(verb: str, inputs: list[Tensor], *, alone: bool = False) -> list[Tensor]:
    """y and dx of one call, the gradients of weight and bias computed beside dx unless it is wanted alone."""
    leaves = [t.detach().requires_grad_(i == 0 or not alone) for i, t in enumerate(inputs[:3])]
    y = call(verb, *leaves, backend="cuda")
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    return [y.detach(), torch.autograd.grad(y, wanted, inputs[3])[0]]


@contextmanager
def forced(direction: Direction, plan: Plan) -> Iterator[None]:
    """Run the kernels of one direction by `plan`; fail if there was none to run."""
    asked = []

    def change(spec: RowNormSpec, own: Plan) -> Plan:
        if spec.direction != direction:
            return own
        asked.append(spec)
        return plan

    with trials.override_plan(change):
        yield
    assert asked, f"no kernel was planned for {direction}"


# Grid rationale. Many rows at a time (17, 255, 1023). Rows of one warp (1000) and of several, of vectors and of
# single elements (4099, 50257), in a block (3072, three rows at a time in backward; 4096), read twice (RMSNorm of
# 24576), in a cluster (24576, 32768, 65536; 12288 and, two rows at a time, 10240 in backward) and in the largest one
# (131072). From sm_90 on every backward of 256 columns or more is streamed, and the forward of a cluster. dx alone is a
# kernel of its own.
@pytest.mark.parametrize("kernel", ["forward", "backward", "dx"])
@pytest.mark.parametrize(
    ("cols", "dtype"),
    [(n, BF16) for n in (17, 255, 1000, 1023, 3072, 4096, 4099, 10240, 12288, 24576, 32768, 50257, 65536, 131072)]
    + [(n, F32) for n in (17, 4096, 32768, 131072)],
    ids=str,
)
def test_every_executor_gives_the_same_bits(verb: str, cols: int, dtype: torch.dtype, kernel: str) -> None:
    """Direct and streamed, blocks and clusters, any number of slots and of rows at a time: the same y and dx."""
    direction: Direction = "forward" if kernel == "forward" else "backward"
    inputs, alone = tensors(cols, dtype), kernel == "dx"
    expected = y_and_dx(verb, inputs, alone=alone)
    with torch.no_grad():
        assert torch.equal(call(verb, *inputs[:3], backend="cuda"), expected[0]), "inference"
    name = dtype_name(dtype)
    spec = RowNormSpec(direction, verb == "rms_norm", cols, name, name, name, name, grads=(True, not alone, not alone))
    device = Device.of(torch.cuda.current_device())
    plans = executors(spec, planner.plan_for(spec, planner.contiguous_access(spec), device), device)
    if not plans:
        pytest.skip(f"a row of {cols} fits no other executor on sm_{device.arch}")
    for plan in plans:
        with forced(direction, plan), CUDA.ran(forward=1, backward=1):
            results = y_and_dx(verb, inputs, alone=alone)
        for tensor, one, other in zip(("y", "dx"), results, expected, strict=True):
            assert torch.equal(one, other), f"{tensor} by {plan}"


# Grid rationale. Rows of one warp, of a block and of a cluster; of vectors, with the last alone (264), and of single
# elements (4099). From sm_90 on forward streams the longest, and backward all. Groups beside one another.
@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("first", [False, True], ids=["last", "first"])
@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize(
    ("cols", "dtype"), [(264, BF16), (1024, F32), (4096, BF16), (4099, BF16), (32768, BF16)], ids=str
)
def test_every_executor_of_a_gate_gives_the_same_bits(
    cols: int, dtype: torch.dtype, groups: int, first: bool, direction: Direction
) -> None:
    """A gate is read by blocks and clusters, from memory and through slots: the same y, dx and dgate."""
    rows, name = 2**22 // (cols * groups) | 1, dtype_name(dtype)
    x, gate, dy = (torch.randn(rows, groups * cols, device="cuda").add_(1).to(dtype) for _ in range(3))
    weight, bias = (torch.randn(groups * cols, device="cuda").to(dtype) for _ in range(2))

    def results() -> list[Tensor]:
        leaves = [t.detach().requires_grad_() for t in (x, gate, weight, bias)]
        options: dict[str, Any] = {"gate_first": first, "group_size": cols if groups > 1 else None, "backend": "cuda"}
        y = kf.gated_layer_norm(leaves[0], leaves[1], groups * cols, leaves[2], leaves[3], **options)
        return [y.detach(), *torch.autograd.grad(y, leaves, dy)[:2]]

    expected = results()
    stages: dict[str, Any] = {"gate": name, "gate_activation": "silu", "gate_first": first, "grouped": groups > 1}
    spec = replace(planner.family(cols, name, name, rms=False, **stages)[1], direction=direction)
    if direction == "backward":
        spec = replace(spec, dresidual=True, bias=None if first else name)
    device = Device.of(torch.cuda.current_device())
    for plan in executors(spec, planner.plan_for(spec, planner.contiguous_access(spec), device), device):
        with forced(direction, plan), CUDA.ran(forward=1, backward=1):
            again = results()
        for tensor, one, other in zip(("y", "dx", "dgate"), again, expected, strict=True):
            assert torch.equal(one, other), f"{tensor} by {plan}"


# Grid rationale. A gate that is infinite, or none, in the last of rows that share a block with some that are not there.
@pytest.mark.parametrize("cols", [64, 255, 1000])
@pytest.mark.parametrize("groups", [1, 2])
def test_a_gate_that_is_not_finite_stays_in_its_columns(cols: int, groups: int) -> None:
    """It reaches y and dx of its own group, and the gradients of weight and bias, in PyTorch's way."""
    x, gate, dy = torch.randn(3, 3, groups * cols, device="cuda").unbind()
    gate[-1, 1], gate[-1, 2] = torch.inf, torch.nan
    weight, bias = torch.randn(2, groups * cols, device="cuda").unbind()
    gradients = []
    for backend in ("cuda", "eager"):
        leaves = [t.clone().requires_grad_() for t in (x, gate, weight, bias)]
        options: dict[str, Any] = {
            "group_size": cols if groups > 1 else None,
            "gate_activation": None,
            "backend": backend,
        }
        y = kf.gated_layer_norm(leaves[0], leaves[1], groups * cols, leaves[2], leaves[3], **options)
        gradients.append([y.detach(), *torch.autograd.grad(y, leaves, dy)])
    for ours, theirs in zip(*gradients, strict=True):
        assert torch.equal(ours.isnan(), theirs.isnan())
        torch.testing.assert_close(ours, theirs, equal_nan=True)


# Grid rationale. Rows of few warps, of a block and of clusters, with even and odd numbers of chunks per warp. Odd
# lengths make rows begin everywhere within a sector.
@pytest.mark.parametrize("dtype", [F16, BF16, F32], ids=str)
@pytest.mark.parametrize("cols", [1025, 2049, 4099, 16383, 20001, 32769, 50257, 131071])
def test_stores_by_whole_sectors_give_the_same_bits(verb: str, cols: int, dtype: torch.dtype) -> None:
    """Single elements shifted to where sectors of memory begin, or stored as they come: the same y, all of it."""
    x, weight, bias, _ = tensors(cols, dtype)
    results = []
    for shifted in (False, True):
        changed = trials.override_plan(lambda _, plan, shifted=shifted: replace(plan, shifted=shifted))
        with changed, torch.no_grad(), CUDA.ran(forward=1):
            results.append(call(verb, x, weight, bias, backend="cuda"))
    assert torch.equal(*results)


# Grid rationale. Twelve rows at a time in three slots (768), several in four, by two blocks to a multiprocessor (1280)
# or one; vectors that rows end among (1600); one row at a time (6144).
@pytest.mark.parametrize("cols", [768, 1280, 1600, 2048, 6144])
def test_few_rows_have_the_same_bits(verb: str, cols: int) -> None:
    """Backward has the same results by the loop for few rows and by that for many, up to where it takes over."""
    spec = RowNormSpec("backward", verb == "rms_norm", cols, "bf16", "bf16", "bf16", "bf16", grads=(True, True, True))
    device = Device.of(torch.cuda.current_device())
    plan = planner.plan_for(spec, planner.contiguous_access(spec), device)
    assert (plan.variant == "few") == (device.arch == 90)
    if plan.variant != "few":
        pytest.skip(f"few rows have no loop of their own on sm_{device.arch}")
    groups = torch.cuda.get_device_properties().multi_processor_count * plan.per_block
    for rows in (1, groups // 2, groups + 1, plan.ring.slots * groups, plan.ring.slots * groups + 1, 8 * groups + 5):
        x, dy = (torch.randn(rows, cols, device="cuda").add_(3).to(BF16) for _ in range(2))
        results = []
        for variant in ("few", ""):
            leaves = [x.clone(), *(torch.ones(cols, dtype=BF16, device="cuda") for _ in range(2))]
            with forced("backward", replace(plan, variant=variant)), CUDA.ran(forward=1, backward=1):
                y = call(verb, *(leaf.requires_grad_() for leaf in leaves), backend="cuda")
                results.append(torch.autograd.grad(y, leaves, dy))
        for one, other in zip(*results, strict=True):
            assert torch.equal(one, other), rows


# Grid rationale. Lengths of many rows at a time (254, 255), in a block, read twice (RMSNorm of 24576) or in a cluster,
# and of single elements in either. "padded" rows have a stride of N + 1, so that each begins at another alignment;
# "unaligned" ones a storage offset of one element.
_ANYWHERE = list(product((F16, BF16, F32, F64), (254, 255, 4096, 24576, 32768, 32769, 50257), ("padded", "unaligned")))


@pytest.mark.parametrize(("dtype", "cols", "layout"), _ANYWHERE, ids=str)
def test_rows_that_begin_anywhere_have_the_same_bits(verb: str, dtype: torch.dtype, cols: int, layout: str) -> None:
    """Neither a row stride of N + 1 nor a storage offset changes a bit of y or dx."""
    x, weight, bias, dy = tensors(cols, dtype)
    moved = [oracle.lay_out(x, layout), weight, bias, oracle.lay_out(dy, layout)]
    with CUDA.ran(forward=2, backward=2):
        expected, results = (y_and_dx(verb, inputs) for inputs in ([x, weight, bias, dy], moved))
    for tensor, one, other in zip(("y", "dx"), results, expected, strict=True):
        assert torch.equal(one, other), tensor


@pytest.mark.parametrize(("dtype", "cols", "layout"), _ANYWHERE, ids=str)
def test_rows_that_begin_anywhere_are_within_budget(verb: str, dtype: torch.dtype, cols: int, layout: str) -> None:
    """Results and all gradients of such rows are right, the sums over rows among them."""
    case = RowNormCase(verb, (9, cols), dtype, weight=dtype, bias=dtype, layout=layout)
    with CUDA.ran(forward=None, backward=None):
        failed = [c for c in oracle.compare(case, "cuda", "cuda") if not c.ok]
    assert not failed, failed


# Grid rationale. Rows that are held, of vectors and of single elements, read twice (RMSNorm of 24576), and streamed
# through a cluster.
@pytest.mark.parametrize("cols", [4096, 4099, 24576, 32768, 65536])
def test_squares_that_overflow_give_zeros(verb: str, cols: int) -> None:
    """Wherever in a row the number is: the root of its variance is infinite, and nothing else."""
    x = torch.randn(3, cols, dtype=BF16, device="cuda")
    x[0, 1], x[1, -1] = 1e30, 1e30
    with CUDA.ran(forward=1):
        y = call(verb, x, None, None, backend="cuda")
    assert y[:2].count_nonzero() == 0
    assert y[2].isfinite().all()


# Grid rationale. The weight of a thread's columns is kept in registers, in shared memory or nowhere, as there is room,
# and an fp32 weight takes twice as much of it.
@pytest.mark.parametrize("cols", [768, 4096, 12288, 131072])
def test_f32_weight_beside_bf16(verb: str, cols: int) -> None:
    """bf16 rows with float32 weight and bias are within budget."""
    case = RowNormCase(verb, (2**19 // cols, cols), BF16, weight=F32, bias=F32)
    with CUDA.ran(forward=None, backward=None):
        failed = [c for c in oracle.compare(case, "cuda", "cuda") if not c.ok]
    assert not failed, failed


# Grid rationale. Rows of one block and of a cluster, one at a time, so that column sums go straight to memory. Two
# lanes store those of fp16 and bf16 rows together; here the last vector has no second, and some warps have no last one.
@pytest.mark.parametrize("cols", [6152, 12296])
def test_sums_of_an_odd_number_of_vectors(verb: str, cols: int) -> None:
    """dweight and dbias are within budget to the last column, and so is everything else."""
    case = RowNormCase(verb, (2**19 // cols, cols), BF16, weight=BF16, bias=BF16)
    with CUDA.ran(forward=None, backward=None):
        failed = [c for c in oracle.compare(case, "cuda", "cuda") if not c.ok]
    assert not failed, failed
