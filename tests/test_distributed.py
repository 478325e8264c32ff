"""Operators on DTensors: each rank runs our kernels on its part, and nothing is sent that need not be.

The ranks are processes with gloo, two of them for the quick tests; marked `cuda`, the same runs on all GPUs with NCCL.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from distributed_support import cotangents_like, since_2_13, spread, target, whole
from ranks import Ranks, mesh
from support import EAGER, Draw, Target, assert_draws_as_accurate
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.experimental import implicit_replication
from verbs import VERBS, Verb, gradients, results

import kernel_fusion as kf

_ROWS, _COLS = 5, 16  # an uneven number of rows for any even number of ranks
_DRAWS = 8  # PyTorch's largest error among a few elements says little


def _row_dims(verb: Verb) -> list[int | None]:
    """For each argument, the dimension that has as many elements as there are rows."""
    shapes = [(shape(_ROWS, _COLS), shape(_ROWS + 1, _COLS)) for shape in verb.arguments.values()]
    return [next((d for d, (m, n) in enumerate(zip(a, b, strict=True)) if m != n), None) for a, b in shapes]


def _check_rows(device: str, name: str) -> None:
    assert_draws_as_accurate([_draw(VERBS[name], target(device)) for _ in range(_DRAWS)])


def _draw(verb: Verb, kernels: Target) -> Draw:
    """One call of random arguments, whose rows are spread: results and gradients, and what they are compared with."""
    plain = verb.leaves(kernels, _ROWS, _COLS)
    dims = _row_dims(verb)
    spreads = [spread(t, Replicate() if d is None else Shard(d)) for t, d in zip(plain, dims, strict=True)]
    expected = results(verb.on(kernels)(*plain))
    dys = [torch.randn_like(y) for y in expected]
    with CommDebugMode() as collectives, verb.ran(kernels, 1, 1):
        ys = results(verb.ours(*spreads))
        grads = gradients(ys, list(spreads), cotangents_like(ys, dys))
    assert collectives.get_total_counts() == 0, collectives.get_comm_counts()
    assert [grad.placements for grad in grads] == [(Partial() if dim is None else Shard(dim),) for dim in dims]
    for y, same in zip(ys, expected, strict=True):
        if y.placements[0].is_shard() and verb.exact:
            assert torch.equal(whole(y), same)

    def pytorch(*tensors: Tensor) -> list[Tensor]:
        outputs = verb.pytorch(*tensors)
        return [*results(outputs), *gradients(outputs, list(tensors), dys)]

    return [*map(whole, ys), *map(whole, grads)], pytorch, tuple(plain)


@pytest.mark.parametrize("name", VERBS)
def test_rows_stay_where_they_are(ranks: Ranks, name: str) -> None:
    """Ranks with some of the rows run their kernels and send nothing; gradients of what they share are partial."""
    ranks(_check_rows, name)


def _check_samples(device: str) -> None:
    x, dy = torch.randn(2, 4, 6, _COLS, device=device).unbind()
    leaves = [x.requires_grad_(), *(torch.randn(4, 1, _COLS, device=device, requires_grad=True) for _ in range(2))]
    for placements in ((Shard(0), Shard(0), Shard(0)), (Shard(1), Replicate(), Replicate())):
        spreads = [spread(t, placement) for t, placement in zip(leaves, placements, strict=True)]
        with target(device).ran(2, 2):
            y, _ = kf.add_modulated_layer_norm(spreads[0], spreads[0], _COLS, *spreads[1:], gate=spreads[1])
            grads = torch.autograd.grad(y, spreads, spread(dy, placements[0]))
            plain, _ = kf.add_modulated_layer_norm(leaves[0], leaves[0], _COLS, *leaves[1:], gate=leaves[1])
            expected = torch.autograd.grad(plain, leaves, dy)
        assert torch.equal(whole(y), plain)
        for ours, theirs in zip(grads, expected, strict=True):
            torch.testing.assert_close(whole(ours), theirs)


def test_samples_and_their_rows_stay(ranks: Ranks) -> None:
    """A scale and a gate per sample go with its samples; where the rows of one are spread, their gradient is a sum."""
    ranks(_check_samples)


def _check_images(device: str) -> None:
    plain = [torch.randn(*shape, device=device) for shape in ((5, 6, 3, 4), (6,), (5, 6))]
    spreads = [spread(t, p) for t, p in zip(plain, (Shard(0), Replicate(), Shard(0)), strict=True)]
    made = []
    for tensors in (spreads, plain):
        x, weight, embedding = leaves = [t.requires_grad_() for t in tensors]
        y = kf.group_norm(x, 2, weight, add=embedding, activation="silu")
        made.append([y, *torch.autograd.grad(y.square().sum(), leaves)])
    for one, other in zip(*made, strict=True):
        torch.testing.assert_close(whole(one), other)


def test_samples_of_images_stay(ranks: Ranks) -> None:
    """A group norm of a batch that is spread is that of the whole, with all gradients."""
    ranks(_check_images)


def _check_losses(device: str) -> None:
    logits, target = torch.randn(5, 7, device=device), torch.tensor([0, -100, 6, 2, 3], device=device)
    keep = torch.rand(5, 7, device=device) < 0.9
    made = []
    for placement in (None, Shard(0), Shard(1)):
        of_rows: Placement = placement if placement == Shard(0) else Replicate()
        x, t, mask = (logits.clone(), target, keep) if placement is None else (
            spread(logits, placement), spread(target, of_rows), spread(keep, placement)
        )  # fmt: skip
        x.requires_grad_()
        loss = kf.cross_entropy(x, t, label_smoothing=0.1, z_loss=1e-2)
        _, entropy = kf.token_logprob(x, t.clamp(0)[:, None], mask=mask, entropy=True)
        made.append([loss, entropy, *torch.autograd.grad(loss + entropy.sum(), x)])
    for others in made[1:]:
        for one, other in zip(others, made[0], strict=True):
            torch.testing.assert_close(whole(one), other)


def test_losses_of_spread_logits(ranks: Ranks) -> None:
    """Rows and vocabularies that are spread give the loss, the entropy and the gradient of the whole."""
    ranks(_check_losses)


def _check_single(device: str) -> None:
    plain = [torch.randn(*shape, device=device) for shape in ((4, 3, _COLS), (4, 1, _COLS), (1, _COLS))]
    spreads = [spread(t, Shard(d)) for t, d in zip(plain, (0, 1, 0), strict=True)]
    made = []
    for tensors in (spreads, plain):
        x, scale, mask = (t.requires_grad_() for t in tensors)
        y = kf.modulated_rms_norm(x, _COLS, scale, scale)
        z = kf.softmax(x, mask=mask)
        made.append([y, z, *torch.autograd.grad(y.square().sum() + z.square().sum(), [x, scale, mask])])
    for one, other in zip(*made, strict=True):
        torch.testing.assert_close(whole(one), other)


def test_a_shard_of_a_single_row(ranks: Ranks) -> None:
    """What broadcasts may be sharded along the dimension of size 1 that does, as PyTorch's operations allow."""
    ranks(_check_single)


def _check_groups(device: str) -> None:
    of = mesh(device, 1, dist.get_world_size())
    x, gate, weight = (torch.randn(*shape, device=device) for shape in ((4, 8), (4, 8), (8,)))
    for rows in ((Shard(0), Replicate()), (Shard(1), Shard(1))):
        spreads = [*(spread(t, *rows, of=of) for t in (x, gate)), spread(weight, Shard(0), Shard(0), of=of)]
        made = []
        for x_, gate_, weight_ in (spreads, (x, gate, weight)):
            tensors = [t.detach().requires_grad_() for t in (x_, gate_, weight_)]
            y = kf.gated_rms_norm(tensors[0], tensors[1], 8, tensors[2], group_size=4)
            made.append([y, *torch.autograd.grad(y.square().sum(), tensors)])
        for one, other in zip(*made, strict=True):
            torch.testing.assert_close(whole(one), other)


def test_groups_of_columns_on_two_dimensions_of_a_mesh(ranks: Ranks) -> None:
    """With `group_size`, several dimensions of the mesh may shard the columns and a weight."""
    ranks(_check_groups)


def _check_columns(device: str) -> None:
    x, bias, gate = torch.randn(4, _COLS), torch.randn(_COLS), torch.randn(4, _COLS)
    x, bias, gate = (t.to(device).requires_grad_() for t in (x, bias, gate))
    dy = torch.randn_like(x)
    calls: list[tuple[Any, ...]] = [
        (lambda x, b: kf.bias_act(x, b, "gelu"), (x, Shard(1)), (bias, Replicate())),
        (lambda x, b: kf.bias_act(x, b, "gelu"), (x, Replicate()), (bias, Shard(0))),
        (lambda x, g: kf.gated_act(x, g, "silu"), (x, Shard(1)), (gate, Shard(1))),
    ]
    for call, *arguments in calls:
        spreads = [spread(t, placement) for t, placement in arguments]
        with CommDebugMode() as collectives, target(device).ran(1, 1):
            y = call(*spreads)
            y.backward(spread(dy, Shard(1)))
        gathers = sum(p == Replicate() and t is x for t, p in arguments) if dist.get_world_size() > 1 else 0
        assert collectives.get_total_counts() == gathers
        assert torch.equal(whole(y), call(*(t for t, _ in arguments)))


def test_columns_of_pointwise_chains_stay(ranks: Ranks) -> None:
    """Columns are spread as freely as rows; only the gradient of a large tensor that all had is gathered."""
    ranks(_check_columns)


def _check_axes(device: str, shape: tuple[int, ...], placements: tuple[tuple[Placement, ...], ...]) -> None:
    of = mesh(device, *shape)
    x, residual, dy = torch.randn(3, 4, 6, _COLS, device=device)
    weight = torch.randn(_COLS, device=device, requires_grad=True)
    x.requires_grad_()
    y, h = kf.add_rms_norm(x, residual, _COLS, weight)
    expected = torch.autograd.grad(y, [x, weight], dy)
    for placement in placements:
        a, r = (spread(t, *placement, of=of) for t in (x, residual))
        w = spread(weight, *[Replicate()] * of.ndim, of=of)
        with CommDebugMode() as collectives, target(device).ran(1, 1):
            ours = kf.add_rms_norm(a, r, _COLS, w)
            grads = torch.autograd.grad(ours.output, [a, w], spread(dy, *placement, of=of))
        assert collectives.get_total_counts() == 0
        assert ours.output.placements == placement
        assert grads[1].placements == tuple(Partial() if p.is_shard() else p for p in placement)
        assert torch.equal(whole(ours.output), y)
        assert torch.equal(whole(ours.residual), h)
        assert torch.equal(whole(grads[0]), expected[0])
        torch.testing.assert_close(whole(grads[1]), expected[1])


def test_batch_and_sequence(ranks: Ranks) -> None:
    """A norm is computed where its rows are, whichever leading dimension is spread, and where all ranks have all."""
    ranks(_check_axes, (), ((Shard(0),), (Shard(1),), (Replicate(),)))


@pytest.mark.slow
def test_a_mesh_of_two_dimensions(four_ranks: Ranks) -> None:
    """Batch and sequence, one of them, or the same dimension twice, over data- and tensor-parallel ranks."""
    pairs = ((Shard(0), Shard(1)), (Shard(0), Replicate()), (Replicate(), Shard(1)), (Shard(1), Shard(1)))
    four_ranks(_check_axes, (2, 2), pairs)


def _check_reductions(device: str, rows: int) -> None:
    x = torch.randn(rows, _COLS, device=device, requires_grad=True)
    for verb in (kf.sum_squared, kf.mean_abs):
        for dim, placement in ((None, Shard(0)), (None, Shard(1)), (0, Shard(0)), (1, Shard(1)), (0, Shard(1))):
            spreading = spread(x, placement)
            y = verb(spreading, dim)
            is_share = dim is None or Shard(dim) == placement
            assert y.placements == (Partial() if is_share else Shard(0),)
            expected = verb(x, dim)
            dy = torch.randn_like(expected)
            torch.testing.assert_close(whole(y), expected)
            (dx,) = torch.autograd.grad(y, spreading, *cotangents_like_of(y, dy))
            torch.testing.assert_close(whole(dx), torch.autograd.grad(expected, x, dy)[0])


def cotangents_like_of(y: Any, dy: Tensor) -> list[Any]:
    """The cotangent of one result."""
    return list(cotangents_like([y], [dy]))


@pytest.mark.parametrize("rows", [6, 5, 1])
def test_reductions_give_shares_of_sums(ranks: Ranks, rows: int) -> None:
    """A sum over a spread dimension is a partial sum; so is a mean of unequal parts, or of none."""
    ranks(_check_reductions, rows)


def _check_causal(device: str) -> None:
    x = torch.randn(2, 5, 6, device=device)
    boolean = torch.rand(5, 6, device=device) < 0.8
    additive = torch.randn(5, 6, device=device)
    x[0, 3, 2] = torch.nan
    for function, mask in product((kf.softmax, kf.log_softmax), (None, boolean, additive)):
        expected = function(x, mask=mask, causal=True)
        for placement in (Shard(0), Shard(1), Shard(2), Replicate()):
            y = function(spread(x, placement), mask=None if mask is None else spread(mask, Replicate()), causal=True)
            torch.testing.assert_close(whole(y), expected, equal_nan=True)


def test_causal_rows_know_their_numbers(ranks: Ranks) -> None:
    """A rank with some of the rows leaves out what the whole call does, beside a mask too; columns are gathered."""
    ranks(_check_causal)


def _check_scores(device: str) -> None:
    q, k = torch.randn(2, 2, 5, 8, device=device)
    for normalize in (False, True):
        expected = kf.attention_scores(q, k, causal=True, normalize=normalize)
        ours = kf.attention_scores(spread(q, Shard(0)), spread(k, Shard(0)), causal=True, normalize=normalize)
        torch.testing.assert_close(whole(ours), expected)


def test_attention_scores(ranks: Ranks) -> None:
    """Causal scores and weights of spread heads."""
    ranks(_check_scores)


def _check_dropout(device: str) -> None:
    ones = torch.ones(4, 512, device=device, requires_grad=True)
    for placement in (Shard(0), Shard(1), Replicate()):
        x = spread(ones, placement)
        y = kf.act_dropout(x, None, 0.5)
        parts = [torch.empty_like(y.to_local()) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, y.to_local().detach().contiguous())
        assert torch.equal(parts[0], parts[-1]) == (placement == Replicate() or len(parts) == 1)
        y.backward(spread(torch.ones_like(ones), *y.placements))
        assert torch.equal(whole(x.grad), whole(y))
    torch.manual_seed(1)
    first = kf.add_layer_norm(spread(ones, Shard(0)), spread(ones, Shard(0)), 512, dropout_p=0.5)
    torch.manual_seed(1)
    again = kf.add_layer_norm(spread(ones, Shard(0)), spread(ones, Shard(0)), 512, dropout_p=0.5)
    assert torch.equal(whole(first.residual), whole(again.residual))


def test_dropout_differs_between_parts_alone(ranks: Ranks) -> None:
    """Parts drop independently, copies drop the same; the same in backward, and again after the same seed."""
    ranks(_check_dropout)


def _check_sums_to_be_added(device: str) -> None:
    x, residual = torch.randn(2, 4, _COLS, device=device)
    world = dist.get_world_size()
    share = DTensor.from_local(x / world, mesh(device), [Partial()], run_check=False)
    with CommDebugMode() as collectives:
        y, _ = kf.add_rms_norm(share, spread(residual, Shard(0)), _COLS)
        kf.rms_norm(share, _COLS)
    counts = {str(op): count for op, count in collectives.get_comm_counts().items()}
    sent = {"c10d_functional.reduce_scatter_tensor": 1, "c10d_functional.all_reduce": 1}
    assert counts == (sent if world > 1 else {})  # PyTorch sends nothing to itself
    torch.testing.assert_close(whole(y), kf.add_rms_norm(x, residual, _COLS).output)


def test_a_sum_is_scattered_to_where_the_rows_are(ranks: Ranks) -> None:
    """A rowwise layer's partial sums cost a reduce-scatter beside spread rows, and else an all-reduce."""
    ranks(_check_sums_to_be_added)


def _check_arriving(device: str) -> None:
    part = torch.randn(2, _COLS, device=device, requires_grad=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # newer versions have another name for it
        arriving = funcol.all_gather_tensor_autograd(part, 0, dist.group.WORLD)
    assert type(arriving) is funcol.AsyncCollectiveTensor
    weight = torch.ones(_COLS, device=device, requires_grad=True)
    with target(device).ran(2, 2):
        y = kf.layer_norm(arriving, _COLS, weight)
        z = kf.add_act(arriving, arriving, "silu")
        (y.sum() + z.sum()).backward()
    assert type(y) is Tensor
    assert part.grad is not None


def test_tensors_on_their_way_are_plain(ranks: Ranks) -> None:
    """A tensor that a collective is still writing, as PyTorch's parallel styles return it, is waited for and gets our
    kernels.
    """
    ranks(_check_arriving)


def _raises(kind: type[Exception], text: str, call: Callable[[], object]) -> None:
    with pytest.raises(kind, match=text):
        call()


def _check_errors(device: str) -> None:
    x, w = torch.randn(4, _COLS, device=device), torch.ones(_COLS, device=device)
    sx = spread(x, Shard(0))
    mixed = "got mixed torch.Tensor and DTensor"
    _raises(RuntimeError, mixed, lambda: kf.layer_norm(sx, _COLS, w))
    _raises(RuntimeError, mixed, lambda: kf.layer_norm(x, _COLS, spread(w, Replicate())))
    _raises(RuntimeError, mixed, lambda: kf.add_act(sx, x, "relu"))
    _raises(RuntimeError, "`residual` must have the shape", lambda: kf.add_rms_norm(sx, sx[:3], _COLS))
    _raises(RuntimeError, "weight to be of same shape", lambda: kf.layer_norm(sx, _COLS, spread(w[:8], Shard(0))))
    _raises(RuntimeError, "must have shapes that broadcast", lambda: kf.add_act(sx, sx[:3], "relu"))
    _raises(IndexError, "out of range", lambda: kf.sum_squared(sx, 2))
    other = mesh(device, 1, dist.get_world_size())
    _raises(RuntimeError, "one mesh", lambda: kf.add_act(sx, spread(x, Shard(0), Shard(0), of=other), "relu"))
    with implicit_replication():
        assert torch.equal(whole(kf.layer_norm(sx, _COLS, w)), kf.layer_norm(x, _COLS, w))


def test_errors_come_on_every_rank(ranks: Ranks) -> None:
    """Mixed tensors, two meshes, shapes that fit on some ranks alone: no rank goes on and waits for the others."""
    ranks(_check_errors)


def _check_backends(device: str) -> None:
    x = spread(torch.randn(4, _COLS, device=device), Shard(0))
    with target(device).ran(1, 0):
        kf.rms_norm(x, _COLS, backend=device)
    with EAGER.ran():
        kf.rms_norm(x, _COLS, backend="eager")
        with kf.use_backend("eager"):
            kf.softmax(x)
    assert kf.explain(kf.rms_norm, x, _COLS).backend == device


def test_a_backend_is_that_of_the_parts(ranks: Ranks) -> None:
    """A requested backend serves the parts, and `explain` names the one that would."""
    ranks(_check_backends)


def _check_compiled(device: str) -> None:
    def function(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        y, h = kf.add_layer_norm(x, residual, _COLS, weight, bias)
        return kf.gated_act(y, h, "silu")

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    x, residual, dy = torch.randn(3, 4, _COLS, device=device)
    weight, bias = torch.randn(2, _COLS, device=device)
    arguments = [*(spread(t, Shard(0)) for t in (x, residual)), *(spread(t, Replicate()) for t in (weight, bias))]
    for t in arguments:
        t.requires_grad_()
    results_and_gradients = []
    for call in (function, compiled):
        y = call(*arguments)
        grads = torch.autograd.grad(y, arguments, spread(dy, Shard(0)))
        assert grads[2].placements == (Partial(),)
        results_and_gradients.append([y, *grads])
    for eager, traced in zip(*results_and_gradients, strict=True):
        assert torch.equal(whole(eager), whole(traced))


@pytest.mark.slow
def test_compiled_without_a_graph_break(ranks: Ranks) -> None:
    """torch.compile takes verbs of DTensors whole, with the same bits in both directions."""
    ranks(_check_compiled)


def _check_twice(device: str) -> None:
    x, weight, dy = torch.randn(4, _COLS), torch.randn(_COLS), torch.randn(4, _COLS)
    x, weight, dy = (t.to(device).requires_grad_() for t in (x, weight, dy))

    def second(x: Tensor, weight: Tensor, dy: Tensor) -> list[Tensor]:
        y = kf.layer_norm(x, _COLS, weight, activation="tanh")
        (dx,) = torch.autograd.grad(y, x, dy, create_graph=True)
        return list(torch.autograd.grad(dx.square().sum(), [x, weight]))

    ours = second(spread(x, Shard(0)), spread(weight, Replicate()), spread(dy, Shard(0)))
    for one, same in zip(ours, second(x, weight, dy), strict=True):
        torch.testing.assert_close(whole(one), same)


@since_2_13
def test_double_backward(ranks: Ranks) -> None:
    """Gradients of gradients are those of the whole call."""
    ranks(_check_twice)
