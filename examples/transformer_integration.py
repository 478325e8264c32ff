"""A pre-norm transformer block beside `nn.MultiheadAttention`, in three stages of fusion that share one state dict.

1. unfused: `torch.nn` alone. Two residual additions, two norms, and the gate of the MLP, each a kernel of its own.
2. drop-in: the same code, its norms built with `kf.FusedLayerNorm`.
3. fused: `kf.FusedAddLayerNorm` adds and normalises in one pass, `kf.FusedGatedAct` is the gate.

In the third, a block hands on two tensors: what its last sublayer computed, and the residual stream, to which that is
yet to be added; the norm that comes next adds it. Everything else stays as it was, the names of the parameters too, so
that all three start from the same weights. The task is to sort: from a sequence of random tokens, name them in order.

    python examples/transformer_integration.py                    # the best device: fp32 on a CPU, bf16 on a GPU
    python examples/transformer_integration.py --norm rms --dtype fp32

The exit status is non-zero if the loss falls by less than 30 %, or if the loss curves differ in fp32 by more than 1e-4
at any step.
"""

from __future__ import annotations

import torch
import training
from torch import Tensor, nn
from torch.nn import functional as F
from training import Batch, Run

import kernel_fusion as kf

BATCH, TIME, TOKENS = 32, 32, 32
WIDTH, HEADS, BLOCKS, HIDDEN = 128, 4, 2, 256

# Unfused, its drop-in, and the one that adds.
NORMS: dict[str, tuple[type[nn.Module], type[nn.Module], type[nn.Module]]] = {
    "layer": (nn.LayerNorm, kf.FusedLayerNorm, kf.FusedAddLayerNorm),
    "rms": (nn.RMSNorm, kf.FusedRMSNorm, kf.FusedAddRMSNorm),
}


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)), where mlp(h) = down(silu(gate) * value), (gate, value) = up(h)."""

    def __init__(self, norm: type[nn.Module]) -> None:
        super().__init__()
        self.attention_norm = norm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        self.mlp_norm = norm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, time, width) to the same."""
        h = self.attention_norm(x)
        x = x + self.attention(h, h, h, need_weights=False)[0]
        gate, value = self.up(self.mlp_norm(x)).chunk(2, dim=-1)
        mixed: Tensor = self.down(F.silu(gate) * value)
        return x + mixed


class FusedBlock(Block):
    """The same with fewer passes over memory; `norm` adds and normalises."""

    def __init__(self, norm: type[nn.Module]) -> None:
        super().__init__(norm)
        self.gated_act = kf.FusedGatedAct("silu")

    def forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """From an output and the stream that it is not yet added to, make this block's: all (batch, time, width)."""
        h, residual = self.attention_norm(x, residual)
        h, residual = self.mlp_norm(self.attention(h, h, h, need_weights=False)[0], residual)
        return self.down(self.gated_act(self.up(h))), residual


class Sorter(nn.Module):
    """Embeddings, blocks, a last norm, and the logits of each token."""

    def __init__(self, norm: type[nn.Module], block: type[Block] = Block) -> None:
        super().__init__()
        self.token_embedding = nn.Embedding(TOKENS, WIDTH)
        self.position_embedding = nn.Embedding(TIME, WIDTH)
        self.blocks = nn.ModuleList(block(norm) for _ in range(BLOCKS))
        self.norm = norm(WIDTH)
        self.head = nn.Linear(WIDTH, TOKENS, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """(batch, TIME) int64 to (batch, TIME, TOKENS)."""
        x = self.token_embedding(tokens) + self.position_embedding.weight
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


class FusedSorter(Sorter):
    """The same of fused blocks; the sum of both embeddings is the first that is computed within a norm."""

    def __init__(self, norm: type[nn.Module]) -> None:
        super().__init__(norm, FusedBlock)

    def forward(self, tokens: Tensor) -> Tensor:
        """As `Sorter`."""
        x = self.token_embedding(tokens)
        residual = self.position_embedding.weight.expand_as(x)
        for block in self.blocks:
            x, residual = block(x, residual)
        logits: Tensor = self.head(self.norm(x, residual)[0])
        return logits


def sample_batches(steps: int, seed: int, device: torch.device) -> list[Batch]:
    """For every step random tokens, and the same in order; the same on every device."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(TOKENS, (steps, BATCH, TIME), generator=generator).to(device)
    return list(zip(tokens, tokens.sort(dim=-1).values, strict=True))


def main() -> None:
    """Train the three, print the comparison and judge it."""
    arguments = training.parser("Train a transformer in three stages of fusion.", NORMS).parse_args()
    device, dtype = arguments.device, training.chosen_dtype(arguments)
    plain, drop_in, adding = NORMS[arguments.norm]
    torch.manual_seed(arguments.seed)
    models = {"unfused": Sorter(plain), "drop-in": Sorter(drop_in), "fused": FusedSorter(adding)}
    for model in models.values():
        model.load_state_dict(models["unfused"].state_dict())
    runs = [Run.of(name, model.to(device), dtype) for name, model in models.items()]
    batches = sample_batches(arguments.steps, arguments.seed, device)

    backend = kf.explain(kf.gated_act, *torch.empty(2, 1, HIDDEN, device=device), "silu").backend
    print(
        f"{BLOCKS} blocks, width {WIDTH}, norms {plain.__name__}, {drop_in.__name__} and {adding.__name__}\n"
        f"{arguments.steps} steps of {BATCH} x {TIME} tokens on {device} in {dtype}, PyTorch {torch.__version__}\n"
        f"the fused operations run on the backend {backend!r}"
    )
    training.train(runs, batches)
    training.report(runs, batches[0])
    training.judge(runs)


if __name__ == "__main__":
    main()
