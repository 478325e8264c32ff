"""Training over several processes: the losses are those of one, and the kernels are ours on every rank.

The model is that of examples/train_fsdp.py, with residual norms, packed gates and packed projections.
"""

from __future__ import annotations

import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from distributed_support import since_2_13, target
from ranks import Ranks, mesh
from support import ROOT
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.nn.parallel import DistributedDataParallel

_STEPS = 100
_NORMS, _GATES = 9, 4  # of the model, each one kernel forward and one backward
_MAX_DIFFERENCE = 1e-4  # as examples/training.py has it, for float32


def _example() -> Any:
    """The module of the example."""
    sys.path.insert(0, str(ROOT / "examples"))
    import train_fsdp

    return train_fsdp


def _batches(example: Any, device: str, steps: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    text = torch.randint(97, 123, (8, example.CONTEXT + 1), generator=generator)  # to be learned by heart
    return [(text[:, :-1].to(device), text[:, 1:].to(device))] * steps


def _model(example: Any, device: str) -> Any:
    torch.manual_seed(0)
    return example.GPT().to(device)


@cache
def _losses_of_one(device: str) -> list[float]:
    """Those of one process, the test's own."""
    example = _example()
    return example.alone(_batches(example, device, _STEPS), 0, torch.device(device))


def _assert_close(losses: list[float], expected: list[float]) -> None:
    assert max(abs(one - other) for one, other in zip(losses, expected, strict=True)) <= _MAX_DIFFERENCE
    assert losses[-1] < 0.7 * losses[0]


def _check_sharded(device: str, expected: list[float], tp: int, checkpointing: bool) -> None:
    example = _example()
    batches = _batches(example, device, _STEPS)
    model, of = _model(example, device), mesh(device, dist.get_world_size() // tp, tp)
    if tp > 1:
        example.shard_layers(model, of["tp"])
    if checkpointing:
        apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, example.Block))
    example.shard_parameters(model, of["dp"], torch.float32)
    again = 12 if checkpointing else 0  # kernels of the blocks that run once more in backward
    with target(device).ran((_NORMS + _GATES + again) * _STEPS, (_NORMS + _GATES) * _STEPS):
        losses = example.train(model, batches, of)
    _assert_close(losses, expected)


@since_2_13
@pytest.mark.slow
@pytest.mark.parametrize("tp", [1, 2])
def test_fsdp_or_tensor_and_sequence_parallel(ranks: Ranks, tp: int) -> None:
    """100 steps under FSDP2, or with layers and sequence sharded, give the losses of one process."""
    ranks(_check_sharded, _losses_of_one(ranks.device), tp, False)


@since_2_13
@pytest.mark.slow
def test_fsdp_and_tensor_and_sequence_parallel(four_ranks: Ranks) -> None:
    """The same with both, over two by two ranks, and with activation checkpointing."""
    four_ranks(_check_sharded, _losses_of_one(four_ranks.device), 2, True)


def _check_ddp(device: str, expected: list[float]) -> None:
    example = _example()
    batches = _batches(example, device, _STEPS)
    model = DistributedDataParallel(_model(example, device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    of = mesh(device)
    with target(device).ran((_NORMS + _GATES) * _STEPS, (_NORMS + _GATES) * _STEPS):
        for batch in batches:
            loss = example.step(model, optimizer, example.part(batch, of))
            dist.all_reduce(loss)
            losses.append(loss.item() / dist.get_world_size())
    _assert_close(losses, expected)


@pytest.mark.slow
def test_ddp(ranks: Ranks) -> None:
    """The same under DistributedDataParallel."""
    ranks(_check_ddp, _losses_of_one(ranks.device))


def _check_mixed_precision(device: str) -> None:
    example = _example()
    batches = _batches(example, device, 30)
    model, of = _model(example, device), mesh(device, dist.get_world_size(), 1)
    example.shard_parameters(model, of["dp"], torch.bfloat16)
    with target(device).ran((_NORMS + _GATES) * 30, (_NORMS + _GATES) * 30):
        losses = example.train(model, batches, of)
    assert losses[-1] < 0.8 * losses[0]


@pytest.mark.slow
def test_fsdp_in_bfloat16(ranks: Ranks) -> None:
    """FSDP2's mixed precision gives our kernels bf16 parameters and activations, and the model learns."""
    ranks(_check_mixed_precision)


def _check_checkpoint(device: str, folder: Path) -> None:
    example = _example()
    batches = _batches(example, device, 4)
    of = mesh(device, dist.get_world_size(), 1)

    def start() -> tuple[Any, Any]:
        model = _model(example, device)
        example.shard_parameters(model, of["dp"], torch.float32)
        return model, torch.optim.AdamW(model.parameters(), lr=1e-3)

    def steps(model: Any, optimizer: Any) -> list[Tensor]:
        return [example.step(model, optimizer, example.part(batch, of["dp"])) for batch in batches]

    model, optimizer = start()
    steps(model, optimizer)
    dcp.save(dict(zip("mo", get_state_dict(model, optimizer), strict=True)), checkpoint_id=folder)
    expected = steps(model, optimizer)
    model, optimizer = start()
    steps(model, optimizer)
    steps(model, optimizer)
    state = dict(zip("mo", get_state_dict(model, optimizer), strict=True))
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=state["m"], optim_state_dict=state["o"])
    assert steps(model, optimizer) == expected


@pytest.mark.slow
def test_training_goes_on_from_a_checkpoint(ranks: Ranks, tmp_path: Path) -> None:
    """A distributed checkpoint of parameters and optimizer under FSDP2 gives the same losses again, to the bit."""
    ranks(_check_checkpoint, tmp_path)


class _First(nn.Module):
    """The first stage of a pipeline: embeddings and half of the blocks."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, text: Tensor) -> tuple[Tensor, Tensor]:
        positions = torch.arange(text.shape[1], device=text.device).expand_as(text)
        x, stream = self.model.byte_embedding(text), self.model.position_embedding(positions)
        for block in self.model.blocks[:2]:
            x, stream = block(x, stream)
        return x, stream


class _Second(_First):
    """The rest."""

    def forward(self, x: Tensor, stream: Tensor) -> Tensor:  # type: ignore[override]
        for block in self.model.blocks[2:]:
            x, stream = block(x, stream)
        y: Tensor = self.model.head(self.model.norm(x, stream)[0])
        return y


def _check_pipeline(device: str) -> None:
    example = _example()
    ((given, wanted),) = _batches(example, device, 1)
    rank = dist.get_rank()
    whole = _model(example, device)
    expected = nn.functional.cross_entropy(whole(given).flatten(0, 1), wanted.flatten())
    expected.backward()
    parts = _model(example, device)
    half = (_Second if rank else _First)(parts)
    stage = PipelineStage(half, rank, 2, torch.device(device))
    schedule = ScheduleGPipe(
        stage, n_microbatches=2, loss_fn=lambda y, t: nn.functional.cross_entropy(y.flatten(0, 1), t.flatten())
    )
    losses: list[Tensor] = []
    if rank:
        schedule.step(target=wanted, losses=losses)
        torch.testing.assert_close(torch.stack(losses).mean(), expected)
    else:
        schedule.step(given)
    mine = {name: p.grad for name, p in parts.named_parameters() if p.grad is not None}
    assert mine
    for name, p in whole.named_parameters():
        if name in mine:
            torch.testing.assert_close(mine[name], p.grad)


@pytest.mark.slow
def test_pipeline_stages(ranks: Ranks) -> None:
    """Two stages pass x and the stream on: loss and gradients of the whole model."""
    if ranks.world != 2:
        pytest.skip("the pipeline has two stages")
    ranks(_check_pipeline)


@since_2_13
@pytest.mark.slow
@pytest.mark.parametrize("tp", ["1", "2"])
def test_example(tp: str) -> None:
    """The example under torchrun agrees with one process, and tells what is sent."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--rdzv-backend", "c10d"]
    script = [str(ROOT / "examples" / "train_fsdp.py"), "--device", "cpu", "--steps", "15", "--check", "--tp", tp]
    result = subprocess.run([*torchrun, "--rdzv-endpoint", "localhost:0", *script], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "largest difference from one process" in result.stdout
    assert "collectives of a forward and a backward" in result.stdout
