"""Train a language model of 154 M parameters from scratch, with and without this library, from several seeds.

The model is a Llama of Hugging Face's, 12 layers of 1024; the text is what every machine has, byte by byte: the sources
of Python's standard library. Both variants of a seed start from the same weights and see the same batches. The claim is
that the curves of one seed differ by less than those of two seeds do, and that a run repeats itself bit by bit.

    python benchmarks/training_run.py --output-dir OUT --seeds 0     # 2000 steps of each variant
    python benchmarks/training_run.py --output-dir OUT --seeds 1     # the table now holds both seeds
    python benchmarks/training_run.py --output-dir OUT --repeat      # each run twice: are they equal bit by bit?
    python benchmarks/training_run.py --output-dir OUT --seeds       # none: the table of the runs that lie there

Every run leaves its curve in OUT/runs; OUT/training-run.json has those of all.
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
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import kernel_fusion as kf
from kernel_fusion_bench.results import describe
from kernel_fusion_bench.step_models import hugging_face

BYTES = 256
MAX_TEXT = 16_000_000
HELD_OUT = 500_000
WARM_UP = 100
# Steps whose mean loss is a point of a curve.
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
        losses: at each tenth of the steps, in nats per byte.
        curve: mean losses of `WINDOW` steps each, one after the other.
        held_out: the loss on text that was not trained on, afterwards.
        ms_per_step: the mean, without the first steps.
        again: `losses` of a second run, if there was one.
        repeats: whether it gave the same losses and weights, bit by bit.
    """

    variant: str
    seed: int
    parameters: int
    tokens_per_step: int
    steps: int
    losses: list[float]
    curve: list[float]
    held_out: float
    ms_per_step: float
    again: list[float] | None = None
    repeats: bool | None = None

    @property
    def name(self) -> str:
        """For the table."""
        return f"{self.variant}, seed {self.seed}"


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


def train(plan: Plan, variant: str, seed: int, text: Tensor, device: torch.device) -> tuple[Run, list[Tensor]]:
    """Train one variant from a seed; also the losses of all steps, and the weights."""
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
    tenths: list[float] = []
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
        if (step + 1) % max(1, plan.steps // 10) == 0:
            tenths.append(losses[-1].item())
            print(f"{variant}, seed {seed}, step {step + 1}: {tenths[-1]:.4f}", file=sys.stderr)
    _wait(device)
    ms = 1e3 * (time.perf_counter() - start) / (plan.steps - skipped)
    window = min(WINDOW, max(1, plan.steps // 10))
    curve = torch.stack(losses[: plan.steps // window * window]).view(-1, window).mean(1).tolist()
    parameters = sum(p.numel() for p in model.parameters())
    end = held_out(called, plan, text, device)
    run = Run(variant, seed, parameters, plan.batch * plan.length, plan.steps, tenths, curve, end, ms)
    return run, [*losses, *(p.detach() for p in model.parameters())]


@torch.no_grad()
def held_out(model: Any, plan: Plan, text: Tensor, device: torch.device) -> float:
    """The mean loss of eight batches of the text that was held out, the same for all runs."""
    generator = torch.Generator().manual_seed(0)
    batches = [sample(text[-HELD_OUT:], plan, generator, device) for _ in range(8)]
    return statistics.fmean(loss_of(model, batch).item() for batch in batches)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def read_runs(folder: Path) -> list[Run]:
    """All runs whose files lie in a folder, in order."""
    runs = [Run(**json.loads(path.read_text())) for path in folder.glob("*.json")]
    return sorted(runs, key=lambda run: (list(VARIANTS).index(run.variant), run.seed))


def distance(a: Run, b: Run) -> float:
    """The root mean square of how far two curves lie apart."""
    return math.sqrt(statistics.fmean((x - y) ** 2 for x, y in zip(a.curve, b.curve, strict=True)))


def report(runs: Sequence[Run]) -> str | None:
    """Print a row per run, and how far curves lie apart; what is wrong, or None."""
    print(f"\n{'run':24}{'last loss':>11}{'held out':>11}{'ms/step':>10}{'tokens/s':>12}")
    for run in runs:
        speed = 1e3 * run.tokens_per_step / run.ms_per_step
        print(f"{run.name:24}{run.curve[-1]:>11.4f}{run.held_out:>11.4f}{run.ms_per_step:>10.2f}{speed:>12,.0f}")
    plain = [run for run in runs if run.variant == "unpatched"]
    between = [distance(a, b) for a in plain for b in plain if a.seed < b.seed]
    ours = [distance(run, p) for run in runs for p in plain if run.variant != "unpatched" and run.seed == p.seed]
    if between:
        print(f"curves of two seeds lie {min(between):.4f} apart")
    if ours:
        print(f"curves with and without us lie at most {max(ours):.4f} apart")
    for run in runs:
        if run.repeats is not None:
            print(f"{run.name}: {run.steps} steps twice, losses and weights {'equal' if run.repeats else 'DIFFER'}")
    if any(run.repeats is False for run in runs):
        return "a run does not repeat itself"
    if between and ours and max(ours) > min(between):
        return "the curves with and without us lie farther apart than those of two seeds"
    return None


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    best = "cuda" if torch.cuda.is_available() else "cpu"
    made = argparse.ArgumentParser(description="Train a language model with and without kernel_fusion.")
    made.add_argument("--output-dir", type=Path, required=True)
    made.add_argument("--seeds", type=int, nargs="*", default=[0, 1])
    made.add_argument("--variants", nargs="+", choices=VARIANTS, default=["unpatched", "patched"])
    made.add_argument("--steps", type=int, help="of each run (default 2000; with --quick 30)")
    made.add_argument("--repeat", action="store_true", help="train each variant twice, and compare the bits")
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
    steps = arguments.steps or (30 if arguments.quick else 2000)
    plan = Plan(steps, 4, 32, 1e-2, True) if arguments.quick else Plan(steps)
    text, device, folder = load_text(), arguments.device, arguments.output_dir / "runs"
    folder.mkdir(parents=True, exist_ok=True)
    for seed in arguments.seeds:
        for variant in arguments.variants:
            file = folder / f"{variant}-{seed}.json"
            run, bits = train(plan, variant, seed, text, device)
            file.write_text(json.dumps(asdict(run)) + "\n")
            if arguments.repeat:
                other, others = train(plan, variant, seed, text, device)
                same = all(torch.equal(a, b) for a, b in zip(bits, others, strict=True))
                file.write_text(json.dumps(asdict(replace(run, again=other.losses, repeats=same))) + "\n")
    runs = read_runs(folder)
    twice = {run.variant: " --repeat" if run.repeats else "" for run in runs}
    command = "python benchmarks/training_run.py --variants "
    commands = "; ".join(f"{command}{variant} --steps {steps}{repeat}" for variant, repeat in twice.items())
    method = {"losses": f"nats per byte, at each tenth of the steps; curve: means of {WINDOW} steps"}
    about = describe([device], commands, method, {}) | {"runs": [asdict(run) for run in runs]}
    (arguments.output_dir / "training-run.json").write_text(json.dumps(about, indent=1) + "\n")
    if problem := report(runs):
        sys.exit(f"FAILED: {problem}")


if __name__ == "__main__":
    main()
