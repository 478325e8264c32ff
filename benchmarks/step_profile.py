"""Where a training step spends its time: kernels by kind, and the longest that are left to fuse.

    python benchmarks/step_profile.py --output-dir OUT --model llama-3-8b
    python benchmarks/step_profile.py --output-dir OUT --model bert-large --contenders pytorch,kf-graph,liger

Models and contenders are those of `kernel-fusion bench steps`. A kernel's name tells its kind. On a CPU, operators
without those that they call stand for kernels.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from kernel_fusion.cli.table import Table
from kernel_fusion_bench.peers import PEERS, find
from kernel_fusion_bench.providers import ours
from kernel_fusion_bench.results import describe
from kernel_fusion_bench.step_models import ARCHITECTURES, Step
from kernel_fusion_bench.steps import Trainee, Training, trainees
from kernel_fusion_bench.summary import heading
from kernel_fusion_bench.tables import markdown
from kernel_fusion_bench.timing import synchronize

# The first pattern that is found in a name decides.
DONE = {
    "fused": r"^kf_|sum_partials|kernel_fusion::|^_\w+_kernel$|^_triton_rope",
    "attention": r"flash|fmha|attention|sdpa|cudnn::fusion",
    "matrix products": r"gemm|nvjet|cutlass|xmma|cublas|splitK|aten::(mm|addmm|bmm|linear|mkldnn)|convolution",
    "optimizer": r"multi_tensor|adam",
}
LEFT = {
    "loss": r"SoftMax|nll_loss|log_softmax",
    "embedding": r"embedding|vectorized_gather|compute_grad_weight|sum_and_scatter|radix_sort|RadixSort",
    "additions": r"CUDAFunctor_add|aten::add",
    "copies, conversions": r"^Mem(cpy|set)|CatArray|copy|aten::cat",
    "other": r"",
}
KINDS = DONE | LEFT
STEPS, WARM_UP, LONGEST = 3, 3, 12


@dataclass(frozen=True)
class Kernel:
    """A kernel of a step: how often it runs in one, and for how long in all."""

    contender: str
    kind: str
    name: str
    count: float
    ms: float


def kind_of(name: str) -> str:
    """A kernel's kind, by its name; "other" is elementwise work, reductions and norms."""
    return next(kind for kind, pattern in KINDS.items() if re.search(pattern, name))


def kernels(training: Training, trainee: Trainee) -> list[Kernel]:
    """The kernels of a step, the longest first."""
    on_gpu = training.device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    for _ in range(WARM_UP):
        training.train(trainee)
    with profile(activities=activities, acc_events=True) as profiler:
        for _ in range(STEPS):
            training.train(trainee)
        synchronize(training.device)
    found = []
    for event in profiler.key_averages():
        us = event.self_device_time_total if on_gpu else event.self_cpu_time_total
        # On a GPU operators and ranges have the time of their kernels as well, which then counts twice.
        if us and (not on_gpu or event.device_type == DeviceType.CUDA) and not event.is_user_annotation:
            found.append(Kernel(trainee.name, kind_of(event.key), event.key, event.count / STEPS, us / 1e3 / STEPS))
    return sorted(found, key=lambda kernel: -kernel.ms)


def by_kind(found: Sequence[Kernel], model: str) -> Table:
    """Milliseconds of a step for each contender, by kind."""
    contenders = list(dict.fromkeys(kernel.contender for kernel in found))
    spent = {(c, k): sum(n.ms for n in found if (n.contender, n.kind) == (c, k)) for c in contenders for k in KINDS}
    rows = [(kind, *(f"{spent[c, kind]:.2f}" for c in contenders)) for kind in KINDS]
    rows.append(("all", *(f"{sum(spent[c, k] for k in KINDS):.2f}" for c in contenders)))
    return Table(f"{model}, ms of a step", ("kind", *contenders), tuple(rows))


def longest(found: Sequence[Kernel], contender: str) -> Table:
    """The longest kernels that are left to fuse."""
    rest = [kernel for kernel in found if kernel.contender == contender and kernel.kind in LEFT][:LONGEST]
    rows = [(kernel.name[:90], f"{kernel.count:g}", f"{kernel.ms:.3f}") for kernel in rest]
    return Table(f"{contender}: left to fuse", ("kernel", "per step", "ms per step"), tuple(rows))


def main() -> None:
    """Profile, print and write."""
    parser = argparse.ArgumentParser(description="What a training step spends its time on.")
    parser.add_argument("--output-dir", type=Path, required=True)
    parser.add_argument("--model", choices=ARCHITECTURES, default="llama-3-8b")
    parser.add_argument("--contenders", default="pytorch,kf-patch,kf-graph,liger", help="those of `bench steps`")
    parser.add_argument("--device", type=torch.device, default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--quick", action="store_true", help="a tiny model, for a CPU")
    arguments = parser.parse_args()
    device: torch.device = arguments.device
    wanted = arguments.contenders.split(",")
    step = Step(
        ARCHITECTURES[arguments.model], torch.bfloat16 if device.type == "cuda" else torch.float32, arguments.quick
    )
    training = Training(step, device)
    peers, _ = find(list(dict.fromkeys(n for w in wanted for n in PEERS if w.startswith(n))), device)
    providers = [ours(device.type).name, *(peer.name for peer in peers)]
    found: list[Kernel] = []
    for name, make in trainees(training, providers).items():
        if name in wanted:
            found += kernels(training, make())
    contenders = list(dict.fromkeys(kernel.contender for kernel in found))
    tables = [by_kind(found, str(step)), *(longest(found, contender) for contender in contenders)]
    method = {"trace": f"torch.profiler over {STEPS} steps after {WARM_UP}; kinds by the names of kernels"}
    command = f"python benchmarks/step_profile.py --model {arguments.model} --contenders {arguments.contenders}"
    about = describe([device], command, method, {peer.name: peer.version for peer in peers})
    arguments.output_dir.mkdir(parents=True, exist_ok=True)
    path = arguments.output_dir / f"step-profile-{arguments.model}"
    lines = [
        *heading("What a training step spends its time on", about),
        *(line for t in tables for line in markdown(t)),
    ]
    path.with_suffix(".md").write_text("\n".join(lines) + "\n")
    path.with_suffix(".json").write_text(json.dumps(about | {"kernels": [asdict(k) for k in found]}, indent=1) + "\n")
    print("\n".join(line for table in tables for line in markdown(table)))


if __name__ == "__main__":
    main()
