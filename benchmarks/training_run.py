"""Train a language model of 154 M parameters from scratch, with and without this library, from several seeds.

The model is a Llama of Hugging Face's, 12 layers of 1024; the text is what every machine has, byte by byte: the sources
of Python's standard library. Both variants of a seed start from the same weights and see the same batches. The claim is
that the curves of one seed differ by less than those of two seeds do.

    python benchmarks/training_run.py --output-dir OUT --seeds 0        # 2000 steps of each variant
    python benchmarks/training_run.py --output-dir OUT --seeds 1        # the table and the plot now hold both seeds
    python benchmarks/training_run.py --output-dir OUT --repeat 30      # each variant twice: are they equal bit by bit?

Every run leaves its losses in OUT as JSON, and the table and the plot are of all runs that lie there.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import sysconfig
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import kernel_fusion as kf
from kernel_fusion.bench.machine import machine, versions
from kernel_fusion.bench.step_models import hugging_face

BYTES = 256
MAX_TEXT = 16_000_000
HELD_OUT = 500_000
WARM_UP = 100
# Steps that smooth the curves, and whose mean is the table's last loss.
WINDOW = 50
SIZES = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 12, "num_attention_heads": 16}
QUICK_SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}


@dataclass(frozen=True)
class Plan:
    """The model to train, and how long."""

    steps: int = 2000
    batch: int = 16
    length: int = 512
    lr: float = 6e-4
    quick: bool = False

    def model(self) -> nn.Module:
        """A fresh model; `torch.manual_seed` decides about its weights."""
        sizes = QUICK_SIZES if self.quick else SIZES
        more = {"vocab_size": BYTES, "max_position_embeddings": self.length, "num_key_value_heads": None}
        made: nn.Module = hugging_face("LlamaForCausalLM", "LlamaConfig", sizes | more)
        return made

    def rate(self, step: int) -> float:
        """The share of the learning rate in a step: linear up, then a cosine down to a tenth."""
        up = min(WARM_UP, self.steps // 5)
        if step < up:
            return (step + 1) / up
        return 0.55 + 0.45 * math.cos(math.pi * (step - up) / max(1, self.steps - up))


@dataclass(frozen=True)
class Run:
    """A trained model: what the files hold.

    Attributes:
        losses: of every step, in nats per byte.
        held_out: of text that was not trained on, afterwards.
        ms_per_step: the mean, without the first steps.
    """

    variant: str
    seed: int
    parameters: int
    tokens_per_step: int
    losses: list[float]
    held_out: float
    ms_per_step: float

    @property
    def name(self) -> str:
        """For the table and the plot."""
        return f"{self.variant}, seed {self.seed}"

    @property
    def last(self) -> float:
        """The mean loss of the last steps."""
        return statistics.fmean(self.losses[-WINDOW:])

    def smooth(self) -> list[float]:
        """Means over `WINDOW` steps, one after the other."""
        window = min(WINDOW, max(1, len(self.losses) // 10))
        starts = range(0, len(self.losses) - window + 1, window)
        return [statistics.fmean(self.losses[start : start + window]) for start in starts]


def _patched(model: nn.Module) -> nn.Module:
    kf.patch(model)
    return model


VARIANTS: dict[str, Callable[[nn.Module], Any]] = {
    "unpatched": lambda model: model,
    "patched": _patched,
    "graph": lambda model: torch.compile(model, backend=kf.compiler.backend("eager")),
}


def load_text() -> Tensor:
    """The standard library's modules as one uint8 tensor."""
    library = Path(sysconfig.get_path("stdlib"))
    left_out = ("site-packages", "dist-packages", "test", "tests", "idle_test")
    files = [f for f in sorted(library.rglob("*.py")) if not set(f.relative_to(library).parts) & set(left_out)]
    text = b"\n".join(file.read_bytes() for file in files)[:MAX_TEXT]
    if len(text) < 4 * HELD_OUT:
        sys.exit(f"training_run: only {len(text)} bytes of text in {library}")
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def sample(text: Tensor, plan: Plan, generator: torch.Generator, device: torch.device) -> Tensor:
    """Random windows of the text, (batch, length + 1)."""
    starts = torch.randint(len(text) - plan.length - 1, (plan.batch, 1), generator=generator)
    return text[starts + torch.arange(plan.length + 1)].long().to(device, non_blocking=True)


def loss_of(model: Any, window: Tensor) -> Tensor:
    """Mean cross-entropy of every next byte; matrix products in bf16 on a GPU."""
    with torch.autocast(window.device.type, torch.bfloat16, enabled=window.is_cuda):
        logits = model(input_ids=window[:, :-1]).logits
    return nn.functional.cross_entropy(logits.float().flatten(0, 1), window[:, 1:].flatten())


def train(plan: Plan, variant: str, seed: int, text: Tensor, device: torch.device) -> tuple[Run, nn.Module]:
    """Train one variant from a seed; the model, too."""
    torch.manual_seed(seed)
    with device:
        model = plan.model()
    called = VARIANTS[variant](model)
    decayed = [
        {"params": [p for p in model.parameters() if (p.dim() > 1) is wide], "weight_decay": 0.1 * wide}
        for wide in (True, False)
    ]
    optimizer = torch.optim.AdamW(decayed, lr=plan.lr, betas=(0.9, 0.95), fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, plan.rate)
    generator = torch.Generator().manual_seed(seed)
    losses: list[Tensor] = []
    start, skipped = time.perf_counter(), min(20, plan.steps // 2)
    for step in range(plan.steps):
        if step == skipped:  # what is compiled is compiled
            _wait(device)
            start = time.perf_counter()
        loss = loss_of(called, sample(text[:-HELD_OUT], plan, generator, device))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
        if (step + 1) % 200 == 0:
            print(f"{variant}, seed {seed}, step {step + 1}: {losses[-1].item():.4f}", file=sys.stderr)
    _wait(device)
    seconds = time.perf_counter() - start
    values = torch.stack(losses).tolist()
    parameters = sum(p.numel() for p in model.parameters())
    ms = 1e3 * seconds / (plan.steps - skipped)
    run = Run(variant, seed, parameters, plan.batch * plan.length, values, held_out(called, plan, text, device), ms)
    return run, model


@torch.no_grad()
def held_out(model: Any, plan: Plan, text: Tensor, device: torch.device) -> float:
    """The mean loss of eight batches of the text that was held out, the same for all runs."""
    generator = torch.Generator().manual_seed(0)
    batches = [sample(text[-HELD_OUT:], plan, generator, device) for _ in range(8)]
    return statistics.fmean(loss_of(model, batch).item() for batch in batches)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def repeats(plan: Plan, variants: Sequence[str], text: Tensor, device: torch.device) -> bool:
    """Train each variant twice; whether losses and weights are equal bit by bit."""
    same = True
    for variant in variants:
        (first, one), (second, other) = (train(plan, variant, 0, text, device) for _ in range(2))
        weights = all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))
        equal = weights and first.losses == second.losses
        print(f"{variant}: {plan.steps} steps twice, losses and weights {'equal' if equal else 'DIFFER'}")
        same &= equal
    return same


def read_runs(folder: Path) -> list[Run]:
    """All runs whose files lie in a folder, in order."""
    names = set(Run.__dataclass_fields__)
    found = [json.loads(path.read_text()) for path in sorted(folder.glob("run-*.json"))]
    runs = [Run(**{name: value for name, value in each.items() if name in names}) for each in found]
    return sorted(runs, key=lambda run: (list(VARIANTS).index(run.variant), run.seed))


def distance(a: Run, b: Run) -> float:
    """The root mean square of how far two smoothed curves lie apart."""
    return math.sqrt(statistics.fmean((x - y) ** 2 for x, y in zip(a.smooth(), b.smooth(), strict=True)))


def report(runs: Sequence[Run]) -> bool:
    """Print a row per run, and how far curves lie apart; False where ours is farther from PyTorch's than seeds are."""
    print(f"\n{'run':24}{'last loss':>11}{'held out':>11}{'ms/step':>10}{'tokens/s':>12}")
    for run in runs:
        speed = 1e3 * run.tokens_per_step / run.ms_per_step
        print(f"{run.name:24}{run.last:>11.4f}{run.held_out:>11.4f}{run.ms_per_step:>10.2f}{speed:>12,.0f}")
    plain = [run for run in runs if run.variant == "unpatched"]
    between = [distance(a, b) for a in plain for b in plain if a.seed < b.seed]
    ours = [distance(run, p) for run in runs for p in plain if run.variant != "unpatched" and run.seed == p.seed]
    if between:
        print(f"curves of two seeds lie {min(between):.4f} apart")
    if ours:
        print(f"curves with and without us lie at most {max(ours):.4f} apart")
    return not between or not ours or max(ours) <= min(between)


def plot(runs: Sequence[Run], folder: Path) -> None:
    """Draw the curves over the band of PyTorch's seeds, and below how far each is from PyTorch's of the same seed."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 6.5), layout="constrained")
    above, below = figure.subplots(2, sharex=True, height_ratios=(2, 1))
    plain = {run.seed: run for run in runs if run.variant == "unpatched"}
    colors = {"unpatched": "silver", "patched": "tab:blue", "graph": "tab:orange"}
    styles = ("solid", "dashed", "dotted", "dashdot")
    curves = [plain[seed].smooth() for seed in plain]
    steps = [(at + 1) * len(runs[0].losses) / len(runs[0].smooth()) for at in range(len(runs[0].smooth()))]
    if len(curves) > 1:
        low, high = ([pick(values) for values in zip(*curves, strict=True)] for pick in (min, max))
        above.fill_between(steps, low, high, color="whitesmoke", label="between PyTorch's seeds")
        widest = [top - bottom for top, bottom in zip(high, low, strict=True)]
        below.fill_between(steps, [-w for w in widest], widest, color="lightgray", label="distance of PyTorch's seeds")
    for run in runs:
        style: dict[str, Any] = {"color": colors[run.variant], "linestyle": styles[run.seed % len(styles)]}
        # Wide below narrow: where curves agree, both stay visible.
        above.plot(steps, run.smooth(), label=run.name, linewidth=4 if run.variant == "unpatched" else 1.2, **style)
        if run.variant != "unpatched" and run.seed in plain:
            apart = [a - b for a, b in zip(run.smooth(), plain[run.seed].smooth(), strict=True)]
            below.plot(steps, apart, label=f"{run.name}, minus unpatched", linewidth=1.2, **style)
    above.set(ylabel="loss (nats per byte)", title=f"Llama of {runs[0].parameters / 1e6:.0f} M parameters")
    below.set(xlabel="step", ylabel="difference")
    for axes in (above, below):
        axes.legend(fontsize=8)
    figure.savefig(folder / "training_run.png", dpi=150)
    print(f"plot: {folder / 'training_run.png'}")


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    best = "cuda" if torch.cuda.is_available() else "cpu"
    made = argparse.ArgumentParser(description="Train a language model with and without kernel_fusion.")
    made.add_argument("--output-dir", type=Path, required=True)
    made.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    made.add_argument("--variants", nargs="+", choices=VARIANTS, default=["unpatched", "patched"])
    made.add_argument("--steps", type=int, help="of each run (default 2000; with --quick 30)")
    made.add_argument("--repeat", type=int, metavar="STEPS", help="only: take STEPS steps twice, and compare the bits")
    made.add_argument("--device", type=torch.device, default=best)
    made.add_argument("--quick", action="store_true", help="a tiny model, for a CPU")
    return made.parse_args(argv)


def main() -> None:
    """Train, write, print and judge."""
    arguments = parse()
    # cuBLAS and attention's backward also have ways whose sums depend on timing, and no run would repeat another.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    steps = arguments.repeat or arguments.steps or (30 if arguments.quick else 2000)
    plan = Plan(steps, 4, 32, 1e-2, True) if arguments.quick else Plan(steps)
    text, device = load_text(), arguments.device
    if arguments.repeat:
        sys.exit(None if repeats(plan, arguments.variants, text, device) else "FAILED: a run does not repeat itself")
    arguments.output_dir.mkdir(parents=True, exist_ok=True)
    about = {"command": " ".join(sys.argv), "machine": machine(device), "versions": versions()}
    for seed in arguments.seeds:
        for variant in arguments.variants:
            run, _ = train(plan, variant, seed, text, device)
            path = arguments.output_dir / f"run-{variant}-seed{seed}.json"
            path.write_text(json.dumps(asdict(run) | about) + "\n")
    runs = read_runs(arguments.output_dir)
    plot(runs, arguments.output_dir)
    if not report(runs):
        sys.exit("FAILED: the curves with and without us lie farther apart than those of two seeds")


if __name__ == "__main__":
    main()
