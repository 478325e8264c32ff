"""Train the byte-level GPT over several processes: FSDP2 over the batch, tensor and sequence parallel within a layer.

    torchrun --nproc-per-node 4 examples/train_fsdp.py --tp 2            # two shards of the batch, two of a layer
    torchrun --nproc-per-node 2 examples/train_fsdp.py --tp 1 --check    # FSDP2 alone; compared with one process

On GPUs the processes speak NCCL, without any gloo. Between layers each tensor-parallel process has some of the
positions: norms, residual additions and their gradients are local, and what is sent is what PyTorch's own modules send.
The exit status is non-zero if the loss falls by less than 30 %, or with --check if it differs in fp32 by more than 1e-4
from that of one process with the same seed and batches.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, loss_parallel, parallelize_module
from torch.nn import functional as F
from train_gpt import BATCH, BLOCKS, BYTES, CONTEXT, HEADS, WIDTH, load_text, sample_batches
from training import DTYPES, MAX_DIFFERENCE, MIN_FALL, Batch

import kernel_fusion as kf
from kernel_fusion.distributed import PackedColwiseParallel, ResidualSequenceParallel, fsdp_placement


class Block(nn.Module):
    """Attention and a gated unit, each after a norm that adds to the residual stream."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm = kf.FusedAddRMSNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.mlp_norm = kf.FusedAddRMSNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.gate = kf.FusedGatedAct("silu", features=2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor, stream: Tensor) -> tuple[Tensor, Tensor]:
        """From the last layer's output and the stream that it is not yet added to, make this layer's."""
        y, stream = self.attention_norm(x, stream)
        heads = (t.unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for t in self.qkv(y).chunk(3, -1))
        query, key, value = heads
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2).flatten(2)
        y, stream = self.mlp_norm(self.out(attended), stream)
        return self.down(self.gate(self.up(y))), stream


class GPT(nn.Module):
    """A byte-level language model: the logits of the next byte after each prefix."""

    def __init__(self) -> None:
        super().__init__()
        self.byte_embedding = nn.Embedding(BYTES, WIDTH)
        self.position_embedding = nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.norm = kf.FusedAddRMSNorm(WIDTH)
        self.head = nn.Linear(WIDTH, BYTES, bias=False)
        for embedding in (self.byte_embedding, self.position_embedding):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, text: Tensor) -> Tensor:
        """(batch, CONTEXT) bytes as int64 to (batch, CONTEXT, BYTES) logits."""
        positions = torch.arange(text.shape[1], device=text.device).expand_as(text)
        x, stream = self.byte_embedding(text), self.position_embedding(positions)
        for block in self.blocks:
            x, stream = block(x, stream)
        y, _ = self.norm(x, stream)
        logits: Tensor = self.head(y)
        return logits


def shard_layers(model: GPT, mesh: DeviceMesh) -> None:
    """Tensor parallel within a layer, and sequence parallel between layers."""
    embedding = RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1))
    norm = ResidualSequenceParallel(use_local_output=True)
    back = RowwiseParallel(output_layouts=Shard(1))
    head = ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False)
    parallelize_module(
        model,
        mesh,
        {"byte_embedding": embedding, "position_embedding": embedding, "norm": norm, "head": head},
    )
    for block in model.blocks:
        plan = {
            "attention_norm": norm,
            "qkv": PackedColwiseParallel(3, input_layouts=Shard(1)),
            "out": back,
            "mlp_norm": norm,
            "up": PackedColwiseParallel(2, input_layouts=Shard(1), use_local_output=False),
            "down": back,
        }
        parallelize_module(block, mesh, plan)


def shard_parameters(model: GPT, mesh: DeviceMesh, dtype: torch.dtype) -> None:
    """FSDP2: a block's parameters are gathered when it runs; compute in `dtype`, gradients summed in float32."""
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh, mp_policy=policy, shard_placement_fn=fsdp_placement)


def part(batch: Batch, mesh: DeviceMesh) -> Batch:
    """This process's rows of a batch."""
    given, target = (t.chunk(mesh.size())[mesh.get_local_rank()] for t in batch)
    return given, target


def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch, layers: DeviceMesh | None = None) -> Tensor:
    """One training step; the mean loss of the rows that were given. `layers` is the mesh of tensor parallelism."""
    given, target = batch
    with nullcontext() if layers is None else loss_parallel():
        loss = F.cross_entropy(model(given).float().flatten(0, 1), target.flatten())
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.full_tensor().detach() if isinstance(loss, DTensor) else loss.detach()


def train(model: GPT, batches: Sequence[Batch], mesh: DeviceMesh) -> list[float]:
    """The loss of every step, over the whole batch, of a model that is sharded over the mesh."""
    layers = mesh["tp"] if mesh["tp"].size() > 1 else None
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for batch in batches:
        loss = step(model, optimizer, part(batch, mesh["dp"]), layers)
        dist.all_reduce(loss, group=mesh["dp"].get_group())
        losses.append(loss.item() / mesh["dp"].size())
    return losses


def tell(model: GPT, batch: Batch, mesh: DeviceMesh) -> None:
    """Print on rank 0 a process's share of the parameters and what it sends in a step, of which no loss is kept."""
    with CommDebugMode() as counted, nullcontext() if mesh["tp"].size() == 1 else loss_parallel():
        given, target = part(batch, mesh["dp"])
        F.cross_entropy(model(given).float().flatten(0, 1), target.flatten()).backward()
    model.zero_grad()
    if dist.get_rank() != 0:
        return
    everything = sum(parameter.numel() for parameter in model.parameters())
    mine = sum(p.to_local().numel() if isinstance(p, DTensor) else p.numel() for p in model.parameters())
    print(f"parameters: {mine} of {everything} on this process, and as many gradients and twice as many moments")
    for operation, count in sorted(counted.get_comm_counts().items(), key=str):
        print(f"collectives of a forward and a backward: {count:4} {operation}")


def alone(batches: Sequence[Batch], seed: int, device: torch.device) -> list[float]:
    """The losses of one process."""
    torch.manual_seed(seed)
    model = GPT().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return [step(model, optimizer, batch).item() for batch in batches]


def judge(losses: Sequence[float], expected: Sequence[float] | None) -> None:
    """Exit with an error if the loss hardly fell, or is not that of one process."""
    print(f"loss: {losses[0]:.5f} at first, {losses[-1]:.5f} after {len(losses)} steps")
    if expected is not None:
        apart = max(abs(one - other) for one, other in zip(losses, expected, strict=True))
        print(f"largest difference from one process: {apart:.1e}")
        if not apart <= MAX_DIFFERENCE:  # also where it is NaN
            sys.exit(f"FAILED: the losses differ by more than {MAX_DIFFERENCE:.0e}")
    if not losses[-1] <= (1 - MIN_FALL) * losses[0]:
        sys.exit(f"FAILED: the loss fell by less than {MIN_FALL:.0%}")


def main() -> None:
    """Train over all processes and judge the losses."""
    parser = argparse.ArgumentParser(description="Train a small GPT with FSDP2 and sequence parallelism.")
    parser.add_argument("--tp", type=int, default=1, help="processes that share a layer (default 1)")
    parser.add_argument("--steps", type=int, default=60, help="training steps (default 60)")
    parser.add_argument("--dtype", choices=DTYPES, default="fp32", help="that FSDP2 computes in (default fp32)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=0, help="of the weights and the batches (default 0)")
    parser.add_argument("--check", action="store_true", help="train in one process too, and compare the losses")
    arguments = parser.parse_args()
    if arguments.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    device = torch.device(arguments.device)
    dist.init_process_group("nccl" if arguments.device == "cuda" else "gloo")
    shape = dist.get_world_size() // arguments.tp, arguments.tp
    mesh = init_device_mesh(arguments.device, shape, mesh_dim_names=("dp", "tp"))

    batches = sample_batches(load_text(), arguments.steps, arguments.seed, device)
    torch.manual_seed(arguments.seed)
    model = GPT().to(device)
    if arguments.tp > 1:
        shard_layers(model, mesh["tp"])
    shard_parameters(model, mesh["dp"], DTYPES[arguments.dtype])
    tell(model, batches[0], mesh)
    losses = train(model, batches, mesh)
    if dist.get_rank() == 0:
        print(f"{BLOCKS} blocks, {BATCH} x {CONTEXT} bytes a step, {shape[0]} x {shape[1]} processes on {device}")
        judge(losses, alone(batches, arguments.seed, device) if arguments.check else None)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
