"""Train a small byte-level GPT twice, with PyTorch's normalisation and with the fused one, and compare.

Everything but the norms is plain torch.nn. Both models start from the same seed and see the same batches. The text is
what every machine has: this project's documentation and the sources of Python's standard library.

    python examples/train_gpt.py                    # the best device: fp32 on a CPU, bf16 autocast on a GPU
    python examples/train_gpt.py --norm rms --dtype fp32 --output-dir results

The exit status is non-zero if the loss falls by less than 30 %, or if the two loss curves differ in fp32 by more than
1e-4 at any step.
"""

from __future__ import annotations

import sys
import sysconfig
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import training
from torch import Tensor, nn
from training import Batch, Run

import kernel_fusion as kf

BATCH, CONTEXT = 8, 128
WIDTH, HEADS, BLOCKS = 128, 4, 4
BYTES = 256
MAX_TEXT = 2_000_000

# The norms to compare: PyTorch's module, its drop-in, and the drop-in's verb.
NORMS: dict[str, tuple[type[nn.Module], type[nn.Module], Callable[..., Tensor]]] = {
    "layer": (nn.LayerNorm, kf.FusedLayerNorm, kf.layer_norm),
    "rms": (nn.RMSNorm, kf.FusedRMSNorm, kf.rms_norm),
}

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


def load_text() -> Tensor:
    """The project's documentation and the standard library's top-level modules as one uint8 tensor."""
    project = Path(__file__).parents[1]
    library = Path(sysconfig.get_path("stdlib"))
    files = [*sorted(project.glob("*.md")), *sorted(project.glob("docs/*.md")), *sorted(library.glob("*.py"))]
    text = b"\n".join(file.read_bytes() for file in files)[:MAX_TEXT]
    if len(text) < MAX_TEXT // 10:
        sys.exit(f"train_gpt: only {len(text)} bytes of text in {project} and {library}")
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def sample_batches(text: Tensor, steps: int, seed: int, device: torch.device) -> list[Batch]:
    """For every step, BATCH random windows of CONTEXT bytes, and of each byte the next; the same on every device."""
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(text) - CONTEXT, (steps, BATCH, 1), generator=generator)
    windows = text[starts + torch.arange(CONTEXT + 1)].long().to(device)
    return [(window[:, :-1], window[:, 1:]) for window in windows]


def plot(runs: Sequence[Run], folder: Path) -> None:
    """Draw both loss curves into `folder`, or say that matplotlib is missing."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print("no plot: matplotlib is not installed (pip install matplotlib)")
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


def main() -> None:
    """Train both models, print the comparison and judge it."""
    parser = training.parser("Train a small GPT with torch.nn's norms and with the fused ones.", NORMS)
    parser.add_argument("--output-dir", type=Path, help="where to put a plot of the curves")
    arguments = parser.parse_args()
    device, dtype = arguments.device, training.chosen_dtype(arguments)
    their_norm, our_norm, verb = NORMS[arguments.norm]

    def run(norm: type[nn.Module]) -> Run:
        torch.manual_seed(arguments.seed)
        return Run.of(norm.__name__, GPT(norm).to(device), dtype)

    runs = [run(their_norm), run(our_norm)]
    text = load_text()
    batches = sample_batches(text, arguments.steps, arguments.seed, device)

    backend = kf.explain(verb, torch.empty(1, WIDTH, device=device), WIDTH).backend
    parameters = sum(parameter.numel() for parameter in runs[0].model.parameters())
    print(
        f"{BLOCKS} blocks, width {WIDTH}, {parameters / 1e6:.2f} M parameters, {len(text) / 1e6:.1f} MB of text\n"
        f"{arguments.steps} steps of {BATCH} x {CONTEXT} bytes on {device} in {dtype}, PyTorch {torch.__version__}\n"
        f"{our_norm.__name__} runs on the backend {backend!r}"
    )
    training.train(runs, batches)
    training.report(runs, batches[0])
    if arguments.output_dir:
        plot(runs, arguments.output_dir)
    training.judge(runs)


if __name__ == "__main__":
    main()
