"""The measurements behind the architecture: compile time, the reduction tree, page faults on the CPU.

    python benchmarks/experiments.py --output-dir benchmarks/results/<device>

Writes `experiments.json`: every figure with its unit, machine, versions and this command. Parts that need a GPU are
left out, by name, on a machine without one.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from cpu_costs import huge

import kernel_fusion as kf
from kernel_fusion.backends.cuda import compile as compiler
from kernel_fusion.backends.cuda.device import KNOWN_DEVICES
from kernel_fusion.backends.cuda.plan import Plan, Ring
from kernel_fusion.backends.cuda.planner import contiguous_access, family, plan_for, source_of
from kernel_fusion.cli.machine import versions
from kernel_fusion.core.spec import RowNormSpec
from kernel_fusion.operators import loader
from kernel_fusion_bench.results import machine
from kernel_fusion_bench.trials import override_plan


def compile_seconds(arch: int) -> dict[str, Any]:
    """NVRTC's time per kernel, without its cache and with the compiler loaded; the slowest kernel is named."""
    device = KNOWN_DEVICES[arch]
    times: dict[str, dict[str, float]] = {"forward": {}, "backward": {}}
    for cols in (64, 255, 1024, 4096, 12288, 32768, 131072):
        for dtype in ("bf16", "f32"):
            for spec in family(cols, dtype, dtype, rms=False)[1:]:
                access = contiguous_access(spec)
                source = source_of(spec, access, plan_for(spec, access, device)).text()
                if not times["forward"] and not times["backward"]:
                    compiler.compile_source(source, arch)  # loads the compiler
                start = time.perf_counter()
                compiler.compile_source(source, arch, no_cache=True)
                times[spec.direction][f"N={cols},{dtype}"] = time.perf_counter() - start
    return {
        direction: {
            "median_s": statistics.median(values.values()),
            "max_s": max(values.values()),
            "slowest": max(values, key=lambda name: values[name]),
        }
        for direction, values in times.items()
    }


def tree_bits() -> dict[str, Any]:
    """One reduction tree run by different executors: the row's bits, y, mean and rstd, must agree."""
    results: dict[str, Any] = {}
    for cols in (4096, 12288, 32768):
        x = torch.randn(37, cols, device="cuda")
        y0 = torch.ops.kernel_fusion.row_norm_fwd(x, 1, None, None, 1e-5, 0.0, None, False)
        for cluster in (1, 2, 4):

            def change(spec: RowNormSpec, plan: Plan, cluster: int = cluster) -> Plan:
                return dataclasses.replace(plan, kernel="row_norm_fwd", ring=Ring(), shared_bytes=0, cluster=cluster)

            with override_plan(change):
                y1 = torch.ops.kernel_fusion.row_norm_fwd(x, 1, None, None, 1e-5, 0.0, None, False)
            name = f"N={cols}: {cluster} blocks per row"
            results[name] = all(torch.equal(a, b) for a, b in zip(y0, y1, strict=True))
    return results


def cpu_memory() -> dict[str, Any]:
    """The cost of a fresh output on the CPU: 4096 x 4096 fp32 by `torch.neg`, with and without huge pages."""
    x = torch.randn(4096, 4096)
    warm = torch.empty_like(x)
    cases: dict[str, Callable[[], object]] = {
        "neg_fresh_output": lambda: torch.neg(x),
        "neg_warm_output": lambda: torch.neg(x, out=warm),
        "neg_fresh_output_huge_pages": lambda: torch.neg(x, out=huge(x)),
        "layer_norm_fresh_output": lambda: kf.layer_norm(x, (4096,), backend="cpu"),
        "pytorch_layer_norm_fresh_output": lambda: F.layer_norm(x, (4096,)),
    }
    times: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(25):
        for name, function in cases.items():
            start = time.perf_counter()
            function()
            times[name].append((time.perf_counter() - start) * 1e3)
    pages = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    figures: dict[str, Any] = {f"{name}_ms": statistics.median(values) for name, values in times.items()}
    return figures | {
        "threads": torch.get_num_threads(),
        "transparent_huge_pages": pages.read_text().strip() if pages.exists() else "unknown",
    }


def main() -> None:
    """Measure everything that this machine can, and write it down."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output-dir", type=Path, required=True)
    folder = parser.parse_args().output_dir
    folder.mkdir(parents=True, exist_ok=True)
    assert loader.load(), loader.error()
    parts: dict[str, Callable[[], Any]] = {
        "compile_sm_90": lambda: compile_seconds(90),
        "cpu_memory": cpu_memory,
    }
    if kf.CUDA_AVAILABLE:
        parts["tree_bits"] = tree_bits
    device = "cuda" if kf.CUDA_AVAILABLE else "cpu"
    command = "python " + " ".join(sys.argv)
    results: dict[str, Any] = {"command": command, "machine": machine(torch.device(device)), "versions": versions()}
    for name, part in parts.items():
        print(f"{name} ...", flush=True)
        results[name] = part()
        print(json.dumps(results[name], indent=2), flush=True)
    (folder / "experiments.json").write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
