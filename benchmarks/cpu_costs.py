"""The parts of a norm's cost on a CPU: reading, storing, page faults, and the computation per element.

    python benchmarks/cpu_costs.py --output-dir benchmarks/results/<device>

Writes `cpu-costs.json`: every figure with its unit, machine, versions and this command. docs/cpu.md explains them.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import mmap
import statistics
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import kernel_fusion as kf
from kernel_fusion.cli.machine import versions
from kernel_fusion.core.spec import dtype_name
from kernel_fusion_bench import page_faults, timing
from kernel_fusion_bench.results import load_average, machine
from kernel_fusion_bench.timing import FULL, Timing
from kernel_fusion_bench.workloads import Call

CPU = torch.device("cpu")
ROWS, COLS = 4096, 4096  # 64 MB in fp32, which no cache of a core complex holds
FEW_ROWS, FEW_COLS = 64, 1024  # 256 KB in fp32: x and y fit the caches of a core
PAUSE_S, PAUSED_CALLS = 4.0, 7
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def measure(calls: Mapping[str, Call]) -> dict[str, Timing]:
    """The times of calls that take turns."""
    outcomes = timing.time_calls({name: partial(_itself, call) for name, call in calls.items()}, FULL, CPU)
    failed = [outcome for outcome in outcomes.values() if isinstance(outcome, str)]
    if failed:
        raise RuntimeError("; ".join(failed))
    return {name: outcome for name, outcome in outcomes.items() if isinstance(outcome, Timing)}


def _itself(call: Call) -> Call:
    return call


def _record(timings: Mapping[str, Timing]) -> dict[str, Any]:
    return {name: {key: v for key, v in asdict(t).items() if v is not None} for name, t in timings.items()}


def memory() -> dict[str, Any]:
    """Passes over 64 MB, into memory that the process has and into memory that is new to it, in small or huge pages."""
    x, y = torch.randn(ROWS, COLS), torch.empty(ROWS, COLS)
    norms: dict[str, Call] = {
        "layer_norm": lambda: kf.layer_norm(x, (COLS,), backend="cpu"),
        "PyTorch layer_norm": lambda: F.layer_norm(x, (COLS,)),
    }
    reused: dict[str, Call] = {
        "read": x.sum,
        "store": y.zero_,
        "read and store in place": lambda: torch.neg(y, out=y),
        "read and store": lambda: torch.neg(x, out=y),
        **norms,
    }
    new: dict[str, Call] = {
        "read and store": lambda: torch.neg(x),
        "read and store, huge pages": lambda: torch.neg(x, out=huge(x)),
        **norms,
    }
    with page_faults.reused():
        warm = measure(reused)
    with page_faults.settled():
        fresh = measure(new)
    faults = fresh["read and store"].page_faults
    more = fresh["read and store"].median_ms - warm["read and store"].median_ms
    figures = {"reused_memory": _record(warm), "new_memory": _record(fresh)}
    return figures | {"us_per_page_fault": more * 1e3 / faults if faults else None}


def after_pauses() -> dict[str, float]:
    """Median ms of passes into new memory, each call some seconds after the one before, by turns.

    A hypervisor may take back what its guest has freed meanwhile ("free page reporting"), in blocks of the size of a
    huge page, and must give it again when it is touched.
    """
    x = torch.randn(ROWS, COLS)
    calls: dict[str, Call] = {
        "read and store": lambda: torch.neg(x),
        "read and store, huge pages": lambda: torch.neg(x, out=huge(x)),
    }
    ms: dict[str, list[float]] = {name: [] for name in calls}
    with page_faults.settled():
        for _ in range(PAUSED_CALLS):
            for name, call in calls.items():
                time.sleep(PAUSE_S)
                start = time.perf_counter()
                call()
                ms[name].append((time.perf_counter() - start) * 1e3)
    return {name: statistics.median(found) for name, found in ms.items()}


def huge(like: Tensor) -> Tensor:
    """A new tensor in memory that the system is advised to give in huge pages."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    out = torch.empty_like(like)
    start = -(-out.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    libc.madvise(start, out.nbytes - mmap.PAGESIZE, mmap.MADV_HUGEPAGE)
    return out


def elements() -> dict[str, dict[str, float]]:
    """Nanoseconds per element of rows in the cache, by one thread, by dtype; the cost of a call taken off.

    That is the time of 64 rows less that of one, over the elements of 63.
    """
    figures: dict[str, dict[str, float]] = {}
    for dtype in DTYPES:
        calls = {f"{name} {rows}": call for rows in (1, FEW_ROWS) for name, call in passes(rows, dtype).items()}
        with page_faults.reused():
            ms = {name: measured.median_ms for name, measured in measure(calls).items()}
        ns = 1e6 / ((FEW_ROWS - 1) * FEW_COLS)
        names = passes(1, dtype)
        figures[dtype_name(dtype)] = {name: (ms[f"{name} {FEW_ROWS}"] - ms[f"{name} 1"]) * ns for name in names}
    return figures


def passes(rows: int, dtype: torch.dtype) -> dict[str, Call]:
    """Conversions, a pass that hardly computes, and norms, over rows in the cache."""
    shape = (FEW_COLS,)
    wide = torch.randn(rows, FEW_COLS)
    x, out = wide.to(dtype, copy=True), torch.empty(rows, FEW_COLS, dtype=dtype)
    weight, bias = torch.randn(2, FEW_COLS).to(dtype)
    return {
        "to f32": partial(wide.copy_, x),
        "from f32": partial(out.copy_, wide),
        "neg": partial(torch.neg, x),
        "layer_norm": partial(kf.layer_norm, x, shape, weight, bias, backend="cpu"),
        "PyTorch layer_norm": partial(F.layer_norm, x, shape, weight, bias),
        "rms_norm": partial(kf.rms_norm, x, shape, weight, backend="cpu"),
        "PyTorch rms_norm": partial(F.rms_norm, x, shape, weight),
    }


def main() -> None:
    """Measure with one thread and with all, and write it down."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output-dir", type=Path, required=True)
    folder = parser.parse_args().output_dir
    folder.mkdir(parents=True, exist_ok=True)
    counts = dict.fromkeys((1, torch.get_num_threads()))
    results: dict[str, Any] = {
        "command": "python " + " ".join(sys.argv),
        "machine": machine(CPU) | {"load_average_at_start": round(load_average(), 2)},
        "versions": versions(),
        "method": {"time": timing.METHODS["calls"], "memory_of_results": page_faults.METHOD},
        "memory": {},
    }
    for count in counts:
        with timing.num_threads(count):
            results["memory"][f"{count} threads"] = memory()
    with timing.num_threads(1):
        results["new_memory_after_pauses_ms"] = {"pause_s": PAUSE_S, **after_pauses()}
        results["ns_per_element_in_cache"] = elements()
    text = json.dumps(results, indent=1)
    print(text)
    (folder / "cpu-costs.json").write_text(text + "\n")


if __name__ == "__main__":
    main()
