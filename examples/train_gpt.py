"""Train a small byte-level GPT twice, with PyTorch's normalisation and with the fused one, and compare.

Everything but the norms is plain torch.nn. Both models start from the same seed and see the same batches, and they
train in turns, a step of one and then a step of the other: whatever disturbs the machine disturbs both. The text is
what every machine has: this project's documentation and the sources of Python's standard library.

    python examples/train_gpt.py                    # the best device: fp32 on a CPU, bf16 autocast on a GPU
    python examples/train_gpt.py --norm rms --dtype fp32 --output-dir results

The exit status is non-zero if the loss falls by less than 30 %, or if the two loss curves differ in fp32 by more than
1e-4 at any step.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import sysconfig
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from rich.progress import track
from torch import Tensor, nn
from torch.nn import functional as F

import kernel_fusion as kf

MAX_DIFFERENCE = 1e-4
MIN_FALL = 0.30

BATCH, CONTEXT = 8, 128
WIDTH, HEADS, BLOCKS = 128, 4, 4
BYTES = 256
MAX_TEXT = 2_000_000

# What to compare: PyTorch's module and its drop-in; and the verb behind the latter.
NORMS: dict[str, tuple[type[nn.Module], type[nn.Module], Callable[..., Tensor]]] = {
    "layer": (nn.LayerNorm, kf.FusedLayerNorm, kf.layer_norm),
    "rms": (nn.RMSNorm, kf.FusedRMSNorm, kf.rms_norm),
}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}

Norm = Callable[[int], nn.Module]


class Block(nn.Module):
    """A pre-norm transformer block: x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, norm: Norm) -> None:
        super().__init__()
        self.attention_norm = norm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        self.mlp_norm = norm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor, causal_mask: Tensor) -> Tensor:
        """(batch, time, width) to the same."""
        h = self.attention_norm(x)
        attended, _ = self.attention(h, h, h, attn_mask=causal_mask, is_causal=True, need_weights=False)
        x = x + attended
        mixed: Tensor = self.mlp(self.mlp_norm(x))
        return x + mixed


class GPT(nn.Module):
    """A byte-level language model: the logits of the next byte after each prefix."""

    causal_mask: Tensor

    def __init__(self, norm: Norm) -> None:
        super().__init__()
        self.byte_embedding = nn.Embedding(BYTES, WIDTH)
        self.position_embedding = nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(Block(norm) for _ in range(BLOCKS))
        self.norm = norm(WIDTH)
        self.head = nn.Linear(WIDTH, BYTES, bias=False)
        mask = nn.Transformer.generate_square_subsequent_mask(CONTEXT)
        self.register_buffer("causal_mask", mask, persistent=False)
        for embedding in (self.byte_embedding, self.position_embedding):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, text: Tensor) -> Tensor:
        """(batch, CONTEXT) bytes as int64 to (batch, CONTEXT, BYTES) logits."""
        positions = torch.arange(text.shape[1], device=text.device)
        x = self.byte_embedding(text) + self.position_embedding(positions)
        for block in self.blocks:
            x = block(x, self.causal_mask)
        logits: Tensor = self.head(self.norm(x))
        return logits


@dataclass
class Run:
    """One model in training, and what was measured of it."""

    name: str
    model: GPT
    optimizer: torch.optim.Optimizer
    dtype: torch.dtype
    losses: list[float] = field(default_factory=list)
    step_ms: list[float] = field(default_factory=list)

    def loss(self, batch: Tensor) -> Tensor:
        """Mean cross-entropy of the next byte, in nats; `batch` is (batch, CONTEXT + 1)."""
        text, target = batch[:, :-1], batch[:, 1:]
        with torch.autocast(batch.device.type, self.dtype, enabled=self.dtype != torch.float32):
            logits = self.model(text)
        return F.cross_entropy(logits.float().flatten(0, 1), target.flatten())

    def step(self, batch: Tensor) -> None:
        """One timed training step. Reading the loss waits for the GPU, and synchronising does so for the update."""
        start = time.perf_counter()
        loss = self.loss(batch)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses.append(loss.item())
        if batch.is_cuda:
            torch.cuda.synchronize()
        self.step_ms.append(1e3 * (time.perf_counter() - start))


def make_run(norm: type[nn.Module], seed: int, device: torch.device, dtype: torch.dtype) -> Run:
    """A fresh model with norms of type `norm`, initialised from `seed`, and its optimizer."""
    torch.manual_seed(seed)
    model = GPT(norm).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return Run(norm.__name__, model, optimizer, dtype)


def load_text() -> Tensor:
    """The project's documentation and the standard library's top-level modules as one uint8 tensor."""
    project = Path(__file__).parents[1]
    library = Path(sysconfig.get_path("stdlib"))
    files = [*sorted(project.glob("*.md")), *sorted(project.glob("docs/*.md")), *sorted(library.glob("*.py"))]
    text = b"\n".join(file.read_bytes() for file in files)[:MAX_TEXT]
    if len(text) < MAX_TEXT // 10:
        sys.exit(f"train_gpt: only {len(text)} bytes of text in {project} and {library}")
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def sample_batches(text: Tensor, steps: int, seed: int, device: torch.device) -> list[Tensor]:
    """For every step, BATCH random windows of CONTEXT + 1 bytes; the same on every device."""
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(text) - CONTEXT, (steps, BATCH, 1), generator=generator)
    return list(text[starts + torch.arange(CONTEXT + 1)].long().to(device))


def step_memory(run: Run, batch: Tensor) -> int:
    """Bytes that forward and backward need on top of weights and optimizer state.

    On a GPU the peak that PyTorch's allocator saw; elsewhere what autograd keeps between forward and backward, each
    storage counted once and the weights left out.
    """
    if batch.is_cuda:
        resting = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        run.loss(batch).backward()
        peak = torch.cuda.max_memory_allocated() - resting
        run.optimizer.zero_grad()
        return peak
    weights = {parameter.untyped_storage().data_ptr() for parameter in run.model.parameters()}
    saved: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        loss = run.loss(batch)
    # The graph behind `loss` holds the tensors until here: no address was given out twice.
    del loss
    return sum(saved.values())


def report(ours: Run, theirs: Run, memory: tuple[int, int], memory_kind: str) -> None:
    """Print the two curves side by side, step times and memory."""
    names = (theirs.name, ours.name)
    steps = len(ours.losses)
    print(f"\n{'step':>6}{names[0]:>18}{names[1]:>18}{'difference':>14}")
    for i in sorted({*range(0, steps, math.ceil(steps / 12)), steps - 1}):
        a, b = theirs.losses[i], ours.losses[i]
        print(f"{i + 1:>6}{a:>18.5f}{b:>18.5f}{abs(a - b):>14.1e}")
    times = [statistics.median(run.step_ms) for run in (theirs, ours)]
    print(f"\n{'':34}{names[0]:>16}{names[1]:>18}")
    print(f"{'median step, ms':34}{times[0]:>16.2f}{times[1]:>18.2f}")
    print(f"{memory_kind + ', MB':34}{memory[0] / 1e6:>16.2f}{memory[1] / 1e6:>18.2f}")


def plot(runs: tuple[Run, Run], folder: Path) -> None:
    """Draw both loss curves into `folder`, or say that matplotlib is missing."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print("no plot: matplotlib is not installed (pip install 'kernel-fusion[bench]')")
        return
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    # The second curve is thin and dark on a wide light one: where they agree, both stay visible.
    for run, width, color in zip(runs, (5, 1), ("tab:cyan", "black"), strict=True):
        axes.plot(range(1, len(run.losses) + 1), run.losses, linewidth=width, color=color, label=run.name)
    axes.set(xlabel="step", ylabel="loss (nats per byte)", title="Byte-level GPT, same seed, same batches")
    axes.legend()
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "train_gpt.png"
    figure.savefig(path, dpi=150)
    print(f"plot: {path}")


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    best = "cuda" if torch.cuda.is_available() else "cpu"
    parser = argparse.ArgumentParser(description="Train a small GPT with torch.nn's norms and with the fused ones.")
    parser.add_argument("--steps", type=int, default=60, help="training steps of each model (default 60)")
    parser.add_argument("--device", default=best, help=f"a PyTorch device (here by default {best})")
    parser.add_argument("--dtype", choices=DTYPES, help="bf16 means autocast (default: bf16 on a GPU, fp32 on a CPU)")
    parser.add_argument("--norm", choices=NORMS, default="layer", help="LayerNorm (default) or RMSNorm")
    parser.add_argument("--seed", type=int, default=0, help="of the weights and the batches (default 0)")
    parser.add_argument("--output-dir", type=Path, help="where to put a plot of the curves")
    arguments = parser.parse_args()
    if arguments.steps < 2:
        parser.error("--steps must be at least 2")
    return arguments


def main() -> None:
    """Train both models, print the comparison and judge it."""
    arguments = parse_arguments()
    device = torch.device(arguments.device)
    dtype = DTYPES[arguments.dtype or ("bf16" if device.type == "cuda" else "fp32")]
    their_norm, our_norm, verb = NORMS[arguments.norm]
    theirs, ours = (make_run(norm, arguments.seed, device, dtype) for norm in (their_norm, our_norm))
    text = load_text()
    batches = sample_batches(text, arguments.steps, arguments.seed, device)

    backend = kf.explain(verb, torch.empty(1, WIDTH, device=device), WIDTH).backend
    parameters = sum(parameter.numel() for parameter in ours.model.parameters())
    print(
        f"{BLOCKS} blocks, width {WIDTH}, {parameters / 1e6:.2f} M parameters, {len(text) / 1e6:.1f} MB of text\n"
        f"{arguments.steps} steps of {BATCH} x {CONTEXT} bytes on {device} in {dtype}, PyTorch {torch.__version__}\n"
        f"{ours.name} runs on the backend {backend!r}"
    )
    for batch in track(batches, "training both", transient=True):
        theirs.step(batch)
        ours.step(batch)

    memory_kind = "peak of a step" if device.type == "cuda" else "saved for backward"
    report(ours, theirs, (step_memory(theirs, batches[0]), step_memory(ours, batches[0])), memory_kind)
    if arguments.output_dir:
        plot((theirs, ours), arguments.output_dir)

    difference = max(abs(a - b) for a, b in zip(theirs.losses, ours.losses, strict=True))
    fall = 1 - ours.losses[-1] / ours.losses[0]
    print(f"\nlargest difference of the curves: {difference:.1e}; the loss fell by {fall:.0%}")
    # Negated comparisons: a NaN must fail too.
    if dtype == torch.float32 and not difference <= MAX_DIFFERENCE:
        sys.exit(f"FAILED: the curves differ by more than {MAX_DIFFERENCE:.0e}")
    if not fall >= MIN_FALL:
        sys.exit(f"FAILED: the loss fell by less than {MIN_FALL:.0%}")


if __name__ == "__main__":
    main()
