"""The cost of a norm of spread rows on each rank: its local work, and the collective.

    python benchmarks/spread_rows.py --output-dir OUTPUT_DIR                         # local work: one rank
    torchrun --nproc-per-node 4 benchmarks/spread_rows.py --output-dir OUTPUT_DIR    # with the collective

Every rank has 4096 columns of 8192 rows, as one of four shards of 16384. Calls rotate over inputs that no cache holds;
on a GPU they are one CUDA graph, so that the host's time does not count. The floor is PyTorch's `neg` (forward) and
`add` (backward) of the bytes that a kernel must move. Rank 0 writes `spread-rows-WORLD.json` with the machine, the
versions and this command.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import kernel_fusion as kf
from kernel_fusion.cli.machine import versions
from kernel_fusion_bench.results import machine
from kernel_fusion_bench.timing import rotating_calls, synchronize

ROUNDS = 21
Call = Callable[[int], Any]  # on the inputs of this number


def calls_on(device: torch.device, rows: int, cols: int, sets: int) -> dict[str, Call]:
    """Each contender by its name."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    xs = [torch.randn(rows, cols, device=device, dtype=dtype, requires_grad=True) for _ in range(sets)]
    dys = [torch.randn(rows, cols, device=device, dtype=dtype) for _ in range(sets)]
    weight, bias = (torch.randn(cols, device=device, dtype=dtype, requires_grad=True) for _ in range(2))
    group = dist.group.WORLD

    def grads(y: torch.Tensor, i: int) -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(y, [xs[i], weight], dys[i], retain_graph=True)

    verbs: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "spread layer_norm": lambda x: kf.layer_norm(x, cols, weight, bias, group=group),
        "spread rms_norm": lambda x: kf.rms_norm(x, cols, weight, group=group),
        "layer_norm of the columns alone": lambda x: kf.layer_norm(x, cols, weight, bias),
        "rms_norm of the columns alone": lambda x: kf.rms_norm(x, cols, weight),
    }
    calls: dict[str, Call] = {
        "floor, forward": lambda i: torch.neg(dys[i]),
        "floor, backward": lambda i: torch.add(dys[i], xs[i].detach()),
    }
    for name, verb in verbs.items():
        results = [verb(x) for x in xs]
        calls[f"{name}, forward"] = lambda i, verb=verb: verb(xs[i].detach())  # type: ignore[misc]
        calls[f"{name}, backward"] = lambda i, results=results: grads(results[i], i)  # type: ignore[misc]
    return calls


def captured(call: Call, sets: int) -> Callable[[], None]:
    """All calls of a contender as one CUDA graph, on the current stream, to which its backward belongs, too."""
    call(0)
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):  # NCCL has a thread that asks CUDA
        results = [call(i) for i in range(sets)]
    del results  # kept until now, so that no call wrote to the memory of another's results
    return graph.replay


def launched(call: Call, sets: int) -> Callable[[], None]:
    """All calls of a contender, one after the other."""

    def run() -> None:
        for i in range(sets):
            call(i)

    return run


def measure(calls: dict[str, Call], sets: int, device: torch.device) -> dict[str, float]:
    """The median ms of each call; ranks take the same calls in the same order, as collectives ask for."""
    prepare = captured if device.type == "cuda" else launched
    runs = {name: prepare(call, sets) for name, call in calls.items()}
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for round in range(ROUNDS + 1):
        for name, run in runs.items():
            dist.barrier()
            synchronize(device)
            start = time.perf_counter()
            run()
            synchronize(device)
            if round:  # the first compiles, where nothing was captured
                samples[name].append((time.perf_counter() - start) / sets * 1e3)
    return {name: statistics.median(taken) for name, taken in samples.items()}


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description="What a norm of rows that are spread over ranks costs.")
    parser.add_argument("--rows", type=int, default=8192)
    parser.add_argument("--cols", type=int, default=4096, help="of each rank (default 4096)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--output-dir", type=Path, required=True)
    arguments = parser.parse_args()
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    device = torch.device(arguments.device)
    if device.type == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    backend = "nccl" if device.type == "cuda" else "gloo"
    if "RANK" in os.environ:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=torch._C._distributed_c10d.HashStore(), rank=0, world_size=1)
    sets = rotating_calls(4 * arguments.rows * arguments.cols)
    with torch.cuda.stream(torch.cuda.Stream()) if device.type == "cuda" else nullcontext():
        medians = measure(calls_on(device, arguments.rows, arguments.cols, sets), sets, device)
    if rank == 0:
        print(f"{world} ranks, {arguments.rows} rows of {arguments.cols} columns on each, {device}")
        for name, ms in medians.items():
            floor = medians[f"floor, {name.rpartition(', ')[2]}"]
            print(f"{name:50} {ms:9.4f} ms {ms / floor:7.2f} of the floor")
        arguments.output_dir.mkdir(parents=True, exist_ok=True)
        record: dict[str, Any] = {
            "command": f"{'python' if world == 1 else f'torchrun --nproc-per-node {world}'} benchmarks/spread_rows.py",
            "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "machine": machine(device),
            "versions": versions(),
            "median_ms": medians,
        }
        record |= {"world": world, "rows": arguments.rows, "cols": arguments.cols}
        (arguments.output_dir / f"spread-rows-{world}.json").write_text(json.dumps(record, indent=1, default=str))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
