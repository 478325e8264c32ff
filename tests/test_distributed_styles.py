"""Parallel styles: our modules in plans of `parallelize_module` send what `torch.nn`'s do, and compute the same."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from distributed_support import since_2_13, target, whole
from ranks import Ranks, mesh
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

import kernel_fusion as kf
from kernel_fusion.distributed import (
    FeatureParallel,
    PackedColwiseParallel,
    ResidualSequenceParallel,
    fsdp_placement,
)

_WIDTH, _HIDDEN, _LENGTH = 16, 32, 8
_PACKED = PackedColwiseParallel(2, use_local_output=False)  # for FusedGatedAct
Counts = dict[str, int]


def run(module: nn.Module, *inputs: Tensor) -> tuple[Tensor, list[Tensor], Counts]:
    """The result, the gradients of inputs and parameters under a fixed cotangent, and the collectives sent."""
    inputs = tuple(t.detach().requires_grad_() for t in inputs)
    with CommDebugMode() as collectives:
        y = module(*inputs)
        local = y.to_local() if isinstance(y, DTensor) else y
        local.backward(torch.linspace(-1, 1, local.numel(), device=local.device).view_as(local))
    grads = [t.grad for t in (*inputs, *module.parameters())]
    assert all(grad is not None for grad in grads)
    return y, grads, {str(op): n for op, n in collectives.get_comm_counts().items()}  # type: ignore[return-value]


def assert_same(ours: Any, theirs: Any) -> None:
    """Equal within the rounding of float32, whether spread or not."""
    for one, other in zip(ours, theirs, strict=True):
        one, other = (whole(t) if isinstance(t, DTensor) else t for t in (one, other))
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def _mine(x: Tensor, dim: int = 1) -> Tensor:
    """This rank's part."""
    return x.chunk(dist.get_world_size(), dim)[dist.get_rank()].contiguous()


def _input(device: str, features: int = _WIDTH) -> Tensor:
    return torch.randn(2, _LENGTH * dist.get_world_size(), features, device=device)


# ---- Sequence parallel -----------------------------------------------------------------------------------------------


def _check_sequence_parallel(device: str) -> None:
    x = _mine(_input(device))
    pairs: list[tuple[type[nn.Module], type[nn.Module]]] = [
        (nn.LayerNorm, kf.FusedLayerNorm),
        (nn.RMSNorm, kf.FusedRMSNorm),
    ]
    for theirs, ours in pairs:
        with target(device).ran(1, 1):
            mine = run(parallelize_module(ours(_WIDTH).to(device), mesh(device), SequenceParallel()), x)
        plain = run(parallelize_module(theirs(_WIDTH).to(device), mesh(device), SequenceParallel()), x)
        assert_same([mine[0], *mine[1]], [plain[0], *plain[1]])
        assert mine[2] == plain[2] == {}
        assert [g.placements for g in mine[1][1:]] == [g.placements for g in plain[1][1:]]  # type: ignore[attr-defined]


def test_sequence_parallel_sends_nothing(ranks: Ranks) -> None:
    """The plain norms under PyTorch's style: our kernels, PyTorch's placements, no collectives."""
    ranks(_check_sequence_parallel)


class _TwoInputs(nn.Module):
    """Adds, then normalises, with PyTorch's modules: what the fused one replaces."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(_WIDTH)

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        y: Tensor = self.norm(x + residual)
        return y


class _FusedTwoInputs(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: Tensor, other: Tensor) -> Tensor:
        y = self.norm(x, other)
        return y[0] if isinstance(y, tuple) else y  # type: ignore[no-any-return]


def _check_residual(device: str) -> None:
    x, residual = _mine(_input(device)), _mine(_input(device))
    fused = _FusedTwoInputs(kf.FusedAddLayerNorm(_WIDTH)).to(device)
    plain = _TwoInputs().to(device)
    parallelize_module(fused, mesh(device), {"norm": ResidualSequenceParallel()})
    parallelize_module(plain, mesh(device), {"norm": SequenceParallel()})
    with target(device).ran(1, 1):
        ours = run(fused, x, residual)
    theirs = run(plain, x, residual)
    assert_same([ours[0], *ours[1]], [theirs[0], *theirs[1]])
    assert ours[2] == theirs[2] == {}


@since_2_13  # before, hooks of modules broke the gradient of a DTensor that nobody uses
def test_a_residual_is_sharded_too(ranks: Ranks) -> None:
    """The style for norms with two inputs gives what the sum and the plain norm give, and sends nothing."""
    ranks(_check_residual)


def _check_gate(device: str) -> None:
    x, gate = _mine(_input(device)), _mine(_input(device))
    norm = kf.FusedGatedRMSNorm(_WIDTH).to(device)
    expected = norm(x, gate)
    parallelize_module(norm, mesh(device), ResidualSequenceParallel(use_local_output=True))
    with target(device).ran(1, 0):
        assert torch.equal(norm(x, gate), expected)


def test_a_gate_is_sharded_too(ranks: Ranks) -> None:
    """The same style takes the gate of a gated norm."""
    ranks(_check_gate)


def _check_lost(device: str) -> None:
    x = _mine(_input(device))
    for module, name in (
        (kf.FusedAddLayerNorm(_WIDTH), "residual"),
        (kf.FusedAddRMSNorm(_WIDTH), "residual"),
        (kf.FusedGatedRMSNorm(_WIDTH), "gate"),
    ):
        parallelize_module(module.to(device), mesh(device), SequenceParallel())
        with pytest.raises(TypeError, match=f"`{name}` must be given beside a DTensor.*ResidualSequenceParallel"):
            module(x, x)


def test_a_lost_argument_is_an_error(ranks: Ranks) -> None:
    """PyTorch's style hands on one input, and a norm whose residual or gate it lost says so."""
    ranks(_check_lost)


# ---- Columnwise, rowwise ---------------------------------------------------------------------------------------------


class _Gated(nn.Module):
    """A gated unit of two projections and PyTorch's operations."""

    def __init__(self, packed: nn.Linear, down: nn.Linear) -> None:
        super().__init__()
        self.gate, self.value = (nn.Linear(_WIDTH, _HIDDEN, device=packed.weight.device) for _ in range(2))
        self.down = copy.deepcopy(down)
        with torch.no_grad():
            for mine, name in ((self.gate, 0), (self.value, 1)):
                mine.weight.copy_(packed.weight.chunk(2)[name])
                mine.bias.copy_(packed.bias.chunk(2)[name])

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(F.silu(self.gate(x)) * self.value(x))
        return y


def _packed(device: str, bias: bool = True) -> nn.Sequential:
    up, down = nn.Linear(_WIDTH, 2 * _HIDDEN, bias=bias), nn.Linear(_HIDDEN, _WIDTH)
    return nn.Sequential(up, kf.FusedGatedAct("silu", features=_HIDDEN), down).to(device)


def _check_packed(device: str) -> None:
    x = _input(device)
    model = _packed(device)
    apart = _Gated(model[0], model[2])  # type: ignore[arg-type]
    plain = run(copy.deepcopy(model), x)
    parallelize_module(model, mesh(device), {"0": _PACKED, "2": RowwiseParallel()})
    colwise = {"gate": ColwiseParallel(), "value": ColwiseParallel(), "down": RowwiseParallel()}
    parallelize_module(apart, mesh(device), colwise)
    with target(device).ran(1, 1):
        ours = run(model, x)
    theirs = run(apart, x)
    assert_same([ours[0], *ours[1]], [plain[0], *plain[1]])
    assert sum(ours[2].values()) <= sum(theirs[2].values()), (ours[2], theirs[2])


@since_2_13
def test_a_packed_projection(ranks: Ranks) -> None:
    """Ranks have the same part of gate and value: the unsharded results, no more collectives than two projections."""
    ranks(_check_packed)


def _check_halves_of_a_part(device: str, grad: bool) -> None:
    x = _input(device)
    model = _packed(device)
    expected = model(x)
    with torch.set_grad_enabled(grad):
        for style in (ColwiseParallel(use_local_output=False), ColwiseParallel(output_layouts=Replicate())):
            up = parallelize_module(copy.deepcopy(model[0]), mesh(device), style)
            down = parallelize_module(copy.deepcopy(model[2]), mesh(device), RowwiseParallel(input_layouts=Replicate()))
            assert_same([down(model[1](up(x)))], [expected])
        parallelize_module(model, mesh(device), {"0": ColwiseParallel(), "2": RowwiseParallel()})
        message = f"must have 2 .* = {2 * _HIDDEN} elements .* got {2 * _HIDDEN // dist.get_world_size()}; .*Packed"
        with pytest.raises(RuntimeError, match=message):
            model(x)
        model[1].features = None  # type: ignore[assignment]
        known = pytest.raises(RuntimeError, match="this rank's part of a DTensor")
        with known if grad else pytest.warns(UserWarning, match="cannot tell a rank's part .*`features=n`"):
            y = model[0](x)
            model[1](y)


@pytest.mark.parametrize("grad", [True, False])
def test_halves_of_a_part_are_refused(ranks: Ranks, grad: bool) -> None:
    """Under `ColwiseParallel` a rank's columns are no gate and value: an error, right of a DTensor and of the whole."""
    if ranks.world < 2:
        pytest.skip("a single rank has all columns")
    ranks(_check_halves_of_a_part, grad)


def _check_unequal(device: str) -> None:
    world = dist.get_world_size()
    with pytest.raises(ValueError, match=f"must be a multiple of 3 parts times {world} ranks, got {3 * world + 1}"):
        parallelize_module(nn.Linear(4, 3 * world + 1, device=device), mesh(device), PackedColwiseParallel(3))
    with pytest.raises(NotImplementedError, match=r"for nn\.Linear, got Embedding"):
        parallelize_module(nn.Embedding(4, 4, device=device), mesh(device), PackedColwiseParallel(2))


@since_2_13
def test_unequal_parts_are_refused(ranks: Ranks) -> None:
    """A packed projection that ranks cannot share equally, and a module that is none, are errors."""
    ranks(_check_unequal)


def _check_bias(device: str) -> None:
    x = _input(device)
    first, second = nn.Linear(_WIDTH, _HIDDEN), nn.Linear(_HIDDEN, _WIDTH)
    theirs = nn.Sequential(first, nn.GELU(), second).to(device)
    ours = nn.Sequential(
        nn.Linear(_WIDTH, _HIDDEN, bias=False), kf.FusedBiasAct(_HIDDEN, "gelu"), copy.deepcopy(second)
    ).to(device)
    with torch.no_grad():
        ours[0].weight.copy_(first.weight)  # type: ignore[operator]
        ours[1].bias.copy_(first.bias)  # type: ignore[operator]
    parallelize_module(theirs, mesh(device), {"0": ColwiseParallel(), "2": RowwiseParallel()})
    parallelize_module(ours, mesh(device), {"0": ColwiseParallel(), "1": FeatureParallel(), "2": RowwiseParallel()})
    with target(device).ran(1, 1):
        mine = run(ours, x)
    plain = run(theirs, x)
    assert_same([mine[0], *mine[1]], [plain[0], *plain[1]])
    assert mine[2] == plain[2]


def test_a_bias_between_linear_layers(ranks: Ranks) -> None:
    """FusedBiasAct between a columnwise and a rowwise layer: as the bias of the layer, with the same collectives."""
    ranks(_check_bias)


def _check_dropout_of_parts(device: str) -> None:
    act = kf.FusedBiasAct(256 * dist.get_world_size(), None, dropout=0.5).to(device)
    parallelize_module(act, mesh(device), FeatureParallel())
    y = act(torch.ones(2, 256, device=device))
    others = [torch.empty_like(y) for _ in range(dist.get_world_size())]
    dist.all_gather(others, y.detach())
    assert len(others) == 1 or not torch.equal(others[0], others[1])
    with pytest.raises(TypeError, match="inputs must be tensors, got NoneType"):
        act(None)


def test_columns_of_ranks_drop_independently(ranks: Ranks) -> None:
    """Ranks with one seed have different masks for their columns."""
    ranks(_check_dropout_of_parts)


# ---- Beside PyTorch's other pieces -----------------------------------------------------------------------------------


class _Head(nn.Module):
    """The end of a language model: norm, then logits."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm
        self.head = nn.Linear(_WIDTH, _HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.norm(x))
        return logits


def _check_loss_parallel(device: str) -> None:
    x, labels = _input(device), torch.randint(_HIDDEN, (2 * _LENGTH * dist.get_world_size(),), device=device)
    seen = []
    for norm in (nn.LayerNorm(_WIDTH), kf.FusedLayerNorm(_WIDTH)):
        torch.manual_seed(1)
        model = _Head(norm).to(device)
        head = ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False)
        parallelize_module(model, mesh(device), {"norm": SequenceParallel(), "head": head})
        part = _mine(x).requires_grad_()
        with CommDebugMode() as collectives, loss_parallel():
            loss = F.cross_entropy(model(part).flatten(0, 1), labels)
            loss.backward()
        assert part.grad is not None
        seen.append((whole(loss), part.grad, dict(collectives.get_comm_counts())))
    assert_same(seen[1][:2], seen[0][:2])
    assert seen[1][2] == seen[0][2]


def test_loss_parallel(ranks: Ranks) -> None:
    """A sharded norm before logits that are spread over the vocabulary: PyTorch's loss, gradients and collectives."""
    ranks(_check_loss_parallel)


def _check_prepared_input(device: str) -> None:
    x, residual = _mine(_input(device)), _mine(_input(device))
    norm = kf.FusedAddRMSNorm(_WIDTH).to(device)
    expected = norm(x, residual)
    layouts = (Shard(1), Shard(1))
    style = PrepareModuleInput(input_layouts=layouts, desired_input_layouts=layouts, use_local_output=True)
    parallelize_module(norm, mesh(device), style)
    for one, other in zip(norm(x, residual), expected, strict=True):
        assert torch.equal(one, other)


def test_prepare_module_input(ranks: Ranks) -> None:
    """PyTorch's style that lays out several inputs serves the residual norms as it is."""
    ranks(_check_prepared_input)


class _Mlp(nn.Module):
    """A residual layer such as `kf.patch` finds in models."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(_WIDTH, eps=1e-6)
        self.gate, self.up = (nn.Linear(_WIDTH, _HIDDEN, bias=False) for _ in range(2))
        self.down = nn.Linear(_HIDDEN, _WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        n = self.norm(x)
        y: Tensor = x + self.down(F.silu(self.gate(n)) * self.up(n))
        return y


def _check_patched(device: str) -> None:
    x = _mine(_input(device))
    plain = _Mlp().to(device)
    patched = copy.deepcopy(plain)
    assert {line.kind for line in kf.patch(patched).replaced} == {"RMSNorm", "_Mlp"}
    colwise = ColwiseParallel(input_layouts=Shard(1))
    styles = {"norm": SequenceParallel(use_local_output=True), "gate": colwise, "up": colwise}
    for model in (plain, patched):
        parallelize_module(model, mesh(device), styles | {"down": RowwiseParallel(output_layouts=Shard(1))})
    with target(device).ran(2, 2):
        ours = run(patched, x)
    theirs = run(plain, x)
    assert_same([ours[0], *ours[1]], [theirs[0], *theirs[1]])
    assert ours[2] == theirs[2]


def test_a_patched_model(ranks: Ranks) -> None:
    """Tensor and sequence parallel of a patched model: our kernels, and PyTorch's results and collectives."""
    ranks(_check_patched)


def _check_checkpoint(device: str, folder: Path) -> None:
    model = _packed(device)
    weights = copy.deepcopy(model.state_dict())
    parallelize_module(model, mesh(device), {"0": _PACKED, "2": RowwiseParallel()})
    dcp.save({"model": model.state_dict()}, checkpoint_id=folder, no_dist=False)
    restored = _packed(device)
    state = {"model": restored.state_dict()}
    dcp.load(state, checkpoint_id=folder, no_dist=False)
    for name, value in restored.state_dict().items():
        assert torch.equal(value, weights[name]), name
    _check_round_trip(model, weights, folder / "again")


@since_2_13
def test_packed_weights_in_checkpoints(ranks: Ranks, tmp_path: Path) -> None:
    """A distributed checkpoint has a packed weight as `nn.Linear` has it, for parallel and plain models alike."""
    ranks(_check_checkpoint, tmp_path)


def _check_round_trip(model: nn.Module, weights: dict[str, Tensor], folder: Path) -> None:
    """Through a distributed checkpoint, the parameters set to 0 in between; and in the order of the plain model."""
    dcp.save({"model": model.state_dict()}, checkpoint_id=folder, no_dist=False)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    state = {"model": model.state_dict()}
    dcp.load(state, checkpoint_id=folder, no_dist=False)
    model.load_state_dict(state["model"])
    for name, value in model.state_dict().items():
        assert torch.equal(whole(value) if isinstance(value, DTensor) else value, weights[name]), name


def _check_fsdp_of_parts(device: str, folder: Path) -> None:
    of = mesh(device, 2, 2)
    x = _input(device)
    model = _packed(device, bias=False)
    weights = copy.deepcopy(model.state_dict())
    plain = run(copy.deepcopy(model), x)
    parallelize_module(model, of["tp"], {"0": _PACKED, "2": RowwiseParallel()})
    by_rows = fully_shard(copy.deepcopy(model), mesh=of["dp"])
    with pytest.raises(RuntimeError, match=r"would be in another order; .*fsdp_placement"):
        by_rows.state_dict()
    fully_shard(model, mesh=of["dp"], reshard_after_forward=False, shard_placement_fn=fsdp_placement)
    _check_round_trip(model, weights, folder)
    inputs = x.detach().requires_grad_()
    y = model(inputs)
    y.backward(torch.linspace(-1, 1, y.numel(), device=device).view_as(y))
    assert inputs.grad is not None
    assert_same([y, inputs.grad, *(p.grad for p in model.parameters())], [plain[0], *plain[1]])


@since_2_13
@pytest.mark.slow
def test_packed_weights_under_fsdp(four_ranks: Ranks, tmp_path: Path) -> None:
    """FSDP2 over data-parallel ranks shards a packed weight once more, and checkpoints have it in its order."""
    four_ranks(_check_fsdp_of_parts, tmp_path)
