"""Norms of rows that are spread over ranks: one all-reduce in each direction, the numbers of the whole rows."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed_support import since_2_13, spread, whole
from ranks import Ranks, mesh
from support import Draw, assert_draws_as_accurate
from torch import Tensor
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import parallelize_module

import kernel_fusion as kf
from kernel_fusion.core.autocast import widens
from kernel_fusion.distributed import FeatureParallel
from kernel_fusion.errors import BackendUnavailableError
from kernel_fusion.testing import unfused
from kernel_fusion.testing.launches import launches
from kernel_fusion.testing.oracle import RowNormCase, judge, tensors

_ROWS, _COLS, _DRAWS = 6, 40, 8
_KERNELS = 5  # of CUDA: either direction before and after the sums join, and the one that adds partial rows


def _collectives(mode: CommDebugMode) -> dict[str, int]:
    """How often each collective ran, by its name, which two of PyTorch's libraries spell differently."""
    return {str(op).split(".")[1].replace("_", ""): count for op, count in mode.get_comm_counts().items()}


def _one_all_reduce(mode: CommDebugMode) -> None:
    assert _collectives(mode) == {"allreduce": 1}


def _draw(device: str, verb: str, dtype: torch.dtype, rounding: str) -> Draw:
    added, rms = verb.startswith("add_"), verb.endswith("rms_norm")
    rows = [torch.randn(_ROWS, _COLS, device=device, dtype=dtype) for _ in range(1 + added)]
    parameters = [torch.randn(_COLS, device=device, dtype=dtype) for _ in range(2)]
    plain = tuple(t.requires_grad_() for t in (*rows, *parameters))
    dys = [torch.randn_like(rows[0]) for _ in range(1 + added)]
    spreads = [spread(t, Shard(t.dim() - 1)) for t in plain]
    *x, weight, bias = spreads
    with CommDebugMode() as forward:
        y = getattr(kf, verb)(*x, _COLS, weight, bias=bias, eps=1e-5, rounding=rounding)
    _one_all_reduce(forward)
    ys = list(y) if added else [y]
    with CommDebugMode() as backward:
        grads = torch.autograd.grad(ys, spreads, [spread(dy, Shard(1)) for dy in dys])
    _one_all_reduce(backward)
    assert {g.placements for g in grads} == {(Shard(1),), (Shard(0),)}  # type: ignore[attr-defined]

    def pytorch(*tensors: Tensor) -> list[Tensor]:
        *x, weight, bias = tensors
        residual = x[1] if added else None
        y, h = unfused.staged_norm(x[0], residual, (_COLS,), weight, bias, 1e-5, rms=rms, rounding=rounding)
        outputs = [y, h] if added else [y]
        return [
            *outputs,
            *torch.autograd.grad(outputs, tensors, [dy.to(o) for dy, o in zip(dys, outputs, strict=True)]),
        ]

    return [*map(whole, ys), *map(whole, grads)], pytorch, plain


def _check_verb(device: str, *call: Any) -> None:
    before = launches("cuda").get("cuda_launch", 0)
    assert_draws_as_accurate([_draw(device, *call) for _ in range(_DRAWS)])
    assert launches("cuda").get("cuda_launch", 0) - before == (_KERNELS * _DRAWS if device == "cuda" else 0)


@pytest.mark.parametrize("rounding", ["once", "hf"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("name", ["layer_norm", "rms_norm", "add_layer_norm", "add_rms_norm"])
def test_one_all_reduce_each_way(ranks: Ranks, name: str, dtype: torch.dtype, rounding: str) -> None:
    """Nothing but one all-reduce is sent in either direction, and the budget of the unsharded norm holds."""
    ranks(_check_verb, name, dtype, rounding)


def _check_float64_far_from_zero(device: str, mean: float) -> None:
    cols, world, rank = 96, dist.get_world_size(), dist.get_rank()
    x = torch.randn(_ROWS, cols, device=device, dtype=torch.float64) + mean
    weight, dy = torch.randn(cols, device=device, dtype=torch.float64), torch.randn_like(x)
    first, last = (cols * r * r // world**2 for r in (rank, rank + 1))  # unequal parts
    part, own = (t[..., first:last].contiguous().requires_grad_() for t in (x, weight))
    y = kf.layer_norm(part, last - first, own, group=dist.group.WORLD)
    ours = [y.detach(), torch.autograd.grad(y, part, dy[:, first:last].contiguous())[0]]
    near_zero = (x - mean).requires_grad_()  # without any rounding
    theirs = torch.nn.functional.layer_norm(near_zero, (cols,), weight)
    (dx,) = torch.autograd.grad(theirs, near_zero, dy)
    case = RowNormCase("layer_norm", (_ROWS, cols), torch.float64, weight=torch.float64)
    wanted = case.long_double(tensors(x, weight, None, dy))
    for name, result, by_pytorch in zip(("y", "dx"), ours, (theirs, dx), strict=True):
        columns = slice(first, last)
        judged = judge(name, [(result, wanted[name][:, columns], by_pytorch.detach()[:, columns])])
        assert judged.ok, judged


@pytest.mark.parametrize("mean", [1e12, 1e8, 0.5])
def test_float64_far_from_zero(ranks: Ranks, mean: float) -> None:
    """LayerNorm of float64 rows far from zero has the budget of the same rows near zero: no digit of x is lost."""
    ranks(_check_float64_far_from_zero, mean)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["layer_norm", "add_rms_norm"])
def test_four_ranks(four_ranks: Ranks, name: str) -> None:
    """The same with four parts of a row."""
    four_ranks(_check_verb, name, torch.float32, "once")


def _check_group(device: str, cols: int) -> None:
    x, residual = torch.randn(2, _ROWS, cols, device=device)
    weight = torch.randn(cols, device=device)
    rank, world = dist.get_rank(), dist.get_world_size()
    first, last = (cols * r // world for r in (rank, rank + 1))  # unequal parts
    stages = {"pre_activation": "gelu", "activation": "silu"}
    expected = kf.add_layer_norm(x, residual, cols, weight, weight, **stages)
    x, residual, weight = (t[..., first:last].contiguous().requires_grad_() for t in (x, residual, weight))
    size = last - first
    with CommDebugMode() as collectives:
        y, h = kf.add_layer_norm(x, residual, size, weight, weight, **stages, group=dist.group.WORLD)
    _one_all_reduce(collectives)
    torch.testing.assert_close(y, expected.output[..., first:last])
    torch.testing.assert_close(h, expected.residual[..., first:last])
    plain = kf.rms_norm(x.detach(), size, group=dist.group.WORLD)
    torch.testing.assert_close(plain, kf.rms_norm(_whole_row(x.detach(), cols), cols)[..., first:last])


def _whole_row(part: Tensor, cols: int) -> Tensor:
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, part.cpu())
    row = torch.cat(parts, -1).to(part.device)
    assert row.shape[-1] == cols
    return row


@pytest.mark.parametrize("cols", [40, 41, 1])
def test_plain_tensors_and_a_group(ranks: Ranks, cols: int) -> None:
    """`group=` norms plain tensors that are a rank's columns; ranks may have different numbers of them, or none."""
    ranks(_check_group, cols)


def _check_length(device: str, cols: int) -> None:
    x, residual, dy, dh = torch.randn(4, 5, cols, device=device)
    weight, bias = torch.randn(2, cols, device=device)
    plain = [t.requires_grad_() for t in (x, residual, weight, bias)]

    def made(tensors: list[Any], dys: list[Any]) -> list[Any]:
        x, residual, weight, bias = tensors
        results = kf.add_layer_norm(x, residual, cols, weight, bias, pre_activation="silu")
        gated = kf.gated_rms_norm(x, residual, cols, weight)
        return [*results, gated, *torch.autograd.grad([*results, gated], tensors, [*dys, dys[0]])]

    spreads = [spread(t, Shard(t.dim() - 1)) for t in plain]
    ours = made(spreads, [spread(t, Shard(1)) for t in (dy, dh)])
    for one, other in zip(ours, made(plain, [dy, dh]), strict=True):
        torch.testing.assert_close(whole(one), other, rtol=1e-4, atol=1e-4)


# Grid rationale. The CUDA kernels take several rows to a warp, single elements, a block to a row, and a cluster.
@pytest.mark.parametrize("cols", [64, 510, 8192, 8198, 65536])
def test_lengths(ranks: Ranks, cols: int) -> None:
    """Parts of every length give the numbers of the whole rows, in both directions."""
    ranks(_check_length, cols)


def _check_traced(device: str) -> None:
    """The operator of spread rows on tensors without memory, in any process group."""
    x, residual, weight, gate = (
        torch.randn(*shape, device="meta", dtype=torch.bfloat16, requires_grad=True)
        for shape in ((2, 3, 32), (2, 3, 32), (32,), (32,))
    )
    plain = 1, weight, None, 1e-5, 0.0, torch.float32, True
    with CommDebugMode() as forward:
        spread_row_norm = torch.ops.kernel_fusion.spread_row_norm
        y, h = spread_row_norm(x, residual, *plain, dist.group.WORLD.group_name, residual_gate=gate)
    _one_all_reduce(forward)
    assert [(t.dtype, *t.shape) for t in (y, h)] == [(torch.float32, 2, 3, 32), (torch.bfloat16, 2, 3, 32)]
    leaves = [x, residual, weight, gate]
    with CommDebugMode() as backward:
        grads = torch.autograd.grad([y, h], leaves, [torch.empty_like(t) for t in (y, h)], create_graph=True)
    _one_all_reduce(backward)
    assert [(g.dtype, g.shape) for g in grads] == [(t.dtype, t.shape) for t in leaves]
    with pytest.raises(RuntimeError, match="gradients of gradients"):
        grads[0].sum().backward()
    y, _ = spread_row_norm(x.detach(), None, *plain, dist.group.WORLD.group_name)
    with CommDebugMode() as nothing:  # the gradient of the weight alone reads no row as a whole
        torch.autograd.grad(y.sum(), weight)
    assert _collectives(nothing) == {}


def test_traced(ranks: Ranks) -> None:
    """On a GPU one operator has all of the norm; without one, tracing it shows its shapes and what it sends."""
    ranks(_check_traced)


def _check_far_from_zero(device: str) -> None:
    x = 1e4 + torch.randn(64, 256, device=device)
    y = whole(kf.layer_norm(spread(x, Shard(1)), 256))
    exact = torch.nn.functional.layer_norm(x.double(), (256,))
    theirs = torch.nn.functional.layer_norm(x, (256,))
    assert (y - exact).abs().max() <= 2 * ((theirs - exact).abs().max() + torch.finfo(x.dtype).eps)
    mean, scale = torch.tensor([0.0, 1e3], device=device), torch.tensor([1e-3, 1e3], device=device)
    parts = (mean[:, None] + scale[:, None] * torch.randn(2, 128, device=device)).flatten()[None]
    y = whole(kf.layer_norm(spread(parts, Shard(1)), 256))
    torch.testing.assert_close(y, torch.nn.functional.layer_norm(parts, (256,)))


def test_statistics_are_merged_stably(ranks: Ranks) -> None:
    """Rows far from zero, and parts that differ by six orders of magnitude, lose no digits."""
    ranks(_check_far_from_zero)


def _check_batch(device: str) -> None:
    x, dy = torch.randn(2, 33, 256, device=device)
    for verb in (kf.layer_norm, kf.rms_norm):
        results = []
        for rows in (33, 7, 1):
            part = spread(x[:rows].requires_grad_(), Shard(1))
            y = verb(part, 256)
            results.append((y.to_local(), torch.autograd.grad(y, part, spread(dy[:rows], Shard(1)))[0].to_local()))
        for several in results[1:]:
            for one, of_all in zip(several, results[0], strict=True):
                assert torch.equal(one, of_all[: len(one)])


def test_a_row_does_not_depend_on_the_others(ranks: Ranks) -> None:
    """The bits of y and dx of a row are the same in calls of other numbers of rows."""
    ranks(_check_batch)


def _check_gated(device: str) -> None:
    x, gate, weight, dy = (torch.randn(*shape, device=device) for shape in ((4, 32), (4, 32), (32,), (4, 32)))
    for first in (False, True):
        plain = [t.clone().requires_grad_() for t in (x, gate, weight)]
        spreads = [spread(t, Shard(t.dim() - 1)) for t in plain]
        y = kf.gated_rms_norm(spreads[0], spreads[1], 32, spreads[2], gate_first=first)
        expected = kf.gated_rms_norm(*plain[:2], 32, plain[2], gate_first=first)
        grads = torch.autograd.grad(y, spreads, spread(dy, Shard(1)))
        for one, other in zip(grads, torch.autograd.grad(expected, plain, dy), strict=True):
            torch.testing.assert_close(whole(one), other)
        torch.testing.assert_close(whole(y), expected)
    with CommDebugMode() as collectives:
        y = kf.gated_rms_norm(*(spread(t, Shard(t.dim() - 1)) for t in (x, gate)), 32, group_size=4)
    assert _collectives(collectives) == {}
    torch.testing.assert_close(whole(y), kf.gated_rms_norm(x, gate, 32, group_size=4))


def test_gates(ranks: Ranks) -> None:
    """A gate is spread as the row is; of groups of columns that are on one rank nothing is sent."""
    ranks(_check_gated)


def _check_modulated(device: str) -> None:
    shapes = (2, 3, 32), (2, 1, 32), (2, 1, 32), (2, 3, 32), (2, 1, 32)
    plain = [torch.randn(*shape, device=device).requires_grad_() for shape in shapes]
    spreads = [spread(t, Shard(2)) for t in plain]
    dy, dh = torch.randn(2, 2, 3, 32, device=device)
    y = kf.modulated_layer_norm(spreads[0], 32, *spreads[1:3])
    grads = torch.autograd.grad(y, spreads[:3], spread(dy, Shard(2)))
    expected = kf.modulated_layer_norm(plain[0], 32, *plain[1:3])
    for one, other in zip((y, *grads), (expected, *torch.autograd.grad(expected, plain[:3], dy)), strict=True):
        torch.testing.assert_close(whole(one), other)

    def added(tensors: list[Tensor]) -> Any:
        x, scale, shift, residual, gate = tensors
        return kf.add_modulated_rms_norm(x, residual, 32, scale, shift, gate=gate, pre_activation="gelu")

    results, expected = added(spreads), added(plain)
    grads = torch.autograd.grad(results, spreads, [spread(dy, Shard(2)), spread(dh, Shard(2))])
    theirs = torch.autograd.grad(expected, plain, [dy, dh])
    for one, other in zip((*results, *grads), (*expected, *theirs), strict=True):
        torch.testing.assert_close(whole(one), other)


def test_modulation(ranks: Ranks) -> None:
    """Scale, shift and the gate of the residual, of each example, are spread as its rows are."""
    ranks(_check_modulated)


def _check_weights(device: str) -> None:
    x, weight, dy = torch.randn(4, 32, device=device), torch.randn(32, device=device), torch.randn(4, 32, device=device)
    weight.requires_grad_()
    everywhere = spread(weight, Replicate())
    with CommDebugMode() as collectives:
        y = kf.rms_norm(spread(x, Shard(1)), 32, everywhere)
        (dweight,) = torch.autograd.grad(y, everywhere, spread(dy, Shard(1)))
    _one_all_reduce(collectives)
    assert dweight.placements == (Partial(),)
    expected = torch.autograd.grad(kf.rms_norm(x, 32, weight), weight, dy)[0]
    torch.testing.assert_close(whole(dweight), expected)
    y = kf.rms_norm(spread(x, Replicate()), 32, spread(weight, Shard(0)))
    assert y.placements == (Replicate(),)  # type: ignore[attr-defined]
    assert torch.equal(whole(y), kf.rms_norm(x, 32, weight))


def test_a_weight_that_all_ranks_have(ranks: Ranks) -> None:
    """Its gradient is a partial sum, and nothing is gathered; a sharded one of whole rows is, as PyTorch does."""
    ranks(_check_weights)


def _check_rows_and_columns(device: str) -> None:
    of = mesh(device, 2, 2)
    x, weight, dy = (torch.randn(*shape, device=device).requires_grad_() for shape in ((4, 32), (32,), (4, 32)))
    y = kf.layer_norm(x, 32, weight)
    expected = torch.autograd.grad(y, [x, weight], dy)
    spreads = [spread(x, Shard(0), Shard(1), of=of), spread(weight, Replicate(), Shard(0), of=of)]
    with CommDebugMode() as collectives:
        ours = kf.layer_norm(spreads[0], 32, spreads[1])
        grads = torch.autograd.grad(ours, spreads, spread(dy, Shard(0), Shard(1), of=of))
    assert _collectives(collectives) == {"allreduce": 2}
    assert grads[1].placements == (Partial(), Shard(0))
    for one, other in zip((ours, *grads), (y, *expected), strict=True):
        torch.testing.assert_close(whole(one), other)


@pytest.mark.slow
def test_rows_and_columns(four_ranks: Ranks) -> None:
    """Data-parallel rows of spread columns: the all-reduce is among the ranks of a row."""
    four_ranks(_check_rows_and_columns)


def _check_module(device: str) -> None:
    norm = kf.FusedAddRMSNorm(32).to(device)
    x, residual = torch.randn(2, 4, 32, device=device)
    expected = norm(x, residual)
    parallelize_module(norm, mesh(device), FeatureParallel())
    parts = [t.chunk(dist.get_world_size(), -1)[dist.get_rank()] for t in (x, residual)]
    y, h = norm(*parts)
    for one, whole_one in zip((y, h), expected, strict=True):
        torch.testing.assert_close(one, whole_one.chunk(dist.get_world_size(), -1)[dist.get_rank()])
    assert norm.weight.placements == (Shard(0),)


def test_feature_parallel_norm(ranks: Ranks) -> None:
    """A residual norm under `FeatureParallel` norms the whole rows of its parts."""
    ranks(_check_module)


def _changes_nothing(graph: torch.fx.GraphModule) -> list[str]:
    """Conversions in the graphs of autograd functions whose result has the dtype that its operand has."""
    bodies = [m for name, m in graph.named_modules() if "_body_" in name and isinstance(m, torch.fx.GraphModule)]
    operators = [node for node in graph.graph.nodes if str(node.target).startswith("kernel_fusion.spread_")]
    # A GPU's kernels stand in the graph as one operator, which has its gradient in C++.
    assert bodies or operators, graph.print_readable(print_output=False)
    calls = (node for body in bodies for node in body.graph.nodes if node.op == "call_method" and node.target == "to")
    dtypes = ((str(node), *(n.meta["example_value"].dtype for n in (node, node.args[0]))) for node in calls)
    return [name for name, result, operand in dtypes if result == operand]


def _check_compiled(device: str, dtype: torch.dtype, rounding: str) -> None:
    graphs = []

    def compiler(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return graph

    def function(*tensors: Tensor) -> list[Tensor]:
        x, residual, weight = tensors
        how: dict[str, Any] = {"group": dist.group.WORLD, "rounding": rounding}
        y, h = kf.add_rms_norm(x, residual, 16, weight, **how)
        return [y, h, kf.layer_norm(h, 16, weight, **how)]

    tensors = [torch.randn(*shape, 16, device=device, dtype=dtype, requires_grad=True) for shape in ((4,), (4,), ())]
    dys = [torch.randn(4, 16, device=device, dtype=dtype) for _ in range(3)]
    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True, backend=compiler)
    made = []
    for call in (compiled, function):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # Dynamo's own
            ys = call(*tensors)
        made.append([*ys, *torch.autograd.grad(ys, tensors, dys)])
    for one, other in zip(*made, strict=True):
        torch.testing.assert_close(one, other)
    assert [node for graph in graphs for node in _changes_nothing(graph)] == []


@pytest.mark.parametrize("rounding", ["once", "hf"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_compiled(ranks: Ranks, dtype: torch.dtype, rounding: str) -> None:
    """A full graph has the eager gradients, and no conversion behind which PyTorch 2.11 would lose them."""
    ranks(_check_compiled, dtype, rounding)


def _check_autocast(device: str) -> None:
    x = torch.randn(4, 32, device=device, dtype=torch.bfloat16)
    with torch.autocast(device, torch.bfloat16):
        ys = kf.rms_norm(spread(x, Shard(1)), 32), kf.rms_norm(x, 32, group=dist.group.WORLD), kf.rms_norm(x, 32)
    assert {y.dtype for y in ys} == {torch.float32 if widens("rms_norm", device) else torch.bfloat16}


def test_autocast(ranks: Ranks) -> None:
    """Under autocast the result has the dtype of the unsharded norm's."""
    ranks(_check_autocast)


def _check_refusals(device: str) -> None:
    x = spread(torch.randn(4, 32, device=device), Shard(1)).requires_grad_()
    other = "triton" if device == "cuda" else "cpu"
    with pytest.raises(BackendUnavailableError, match=f"'{other}' was requested, but it has no kernels for rows"):
        kf.layer_norm(x, 32, backend=other)
    with pytest.raises(TypeError, match="`rms_norm`: `group` goes with tensors that are a rank's columns"):
        kf.rms_norm(x, 32, group=dist.group.WORLD)
    chosen = "cuda" if device == "cuda" else "eager"
    with pytest.raises(RuntimeError, match="weight"):
        kf.rms_norm(x.to_local(), x.to_local().shape[1], torch.ones(1, device=device), group=dist.group.WORLD)
    assert kf.explain(kf.layer_norm, x, 32).backend == chosen
    assert kf.explain(kf.layer_norm, x.to_local(), 16, group=dist.group.WORLD).backend == chosen
    directions = [line.partition(":")[0] for line in kf.explain(kf.layer_norm, x, 32).plan]
    passes = [f"{direction}, {which} pass" for direction in ("forward", "backward") for which in ("first", "second")]
    assert directions == (passes if device == "cuda" else [])
    (dx,) = torch.autograd.grad(kf.rms_norm(x, 32).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match=r"once_differentiable|gradients of gradients"):
        dx.sum().backward()
    empty = kf.layer_norm(spread(torch.randn(0, 32, device=device), Shard(1)), 32)
    assert empty.shape == (0, 32)


@since_2_13
def test_what_cannot_be_had_says_so(ranks: Ranks) -> None:
    """A backend without such kernels, a group beside a DTensor, and second derivatives are errors; no rows are fine."""
    ranks(_check_refusals)
