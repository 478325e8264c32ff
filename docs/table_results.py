"""The list of result files, and what a call on a CPU pays for."""

from __future__ import annotations

import json
from collections.abc import Iterator
from statistics import median

from table_parts import RESULTS, digits, table


def kept() -> Iterator[str]:
    """Every result file with the day, the machine and the command that made it."""
    rows = []
    for file in sorted(RESULTS.rglob("*.json")):
        run, name = json.loads(file.read_text()), file.relative_to(RESULTS).as_posix()
        machine = run["machine"].get("gpu") or run["machine"]["cpu"].replace("(R)", "")
        versions = f"{machine}, torch {run['versions']['torch']}"
        rows.append(
            [f"[`{name}`](../benchmarks/results/{name})", run.get("date", "–")[:10], versions, f"`{run['command']}`"]
        )
    yield from table(["operation", "day", "machine", "command"], rows)


_COSTS = {
    "read": ("reused_memory", "read"),
    "read and store": ("reused_memory", "read and store"),
    "LayerNorm, ours": ("reused_memory", "layer_norm"),
    "LayerNorm, PyTorch": ("reused_memory", "PyTorch layer_norm"),
    "read and store, new memory": ("new_memory", "read and store"),
    "read and store, new memory in huge pages": ("new_memory", "read and store, huge pages"),
    "LayerNorm, ours, new memory": ("new_memory", "layer_norm"),
    "LayerNorm, PyTorch, new memory": ("new_memory", "PyTorch layer_norm"),
}


def costs() -> Iterator[str]:
    """The parts of a large norm's time on one thread."""
    file = "amd-epyc-2-cores/cpu-costs.json"
    run = json.loads((RESULTS / file).read_text())
    memory = run["memory"]["1 threads"]
    found = {name: memory[kind][call] for name, (kind, call) in _COSTS.items()}
    rows = [[name, digits(cost["median_ms"]), f"{cost['page_faults']:.0f}"] for name, cost in found.items()]
    yield from table(["operation, 4096×4096 fp32", "ms", "page faults"], rows)
    yield f"[`{file}`](../benchmarks/results/{file}): AMD EPYC, one thread, torch {run['versions']['torch']}."
    yield ""


_PARTS_OF_A_FIRST_KERNEL = (
    "import kernel_fusion",
    "open the extension, import the planner",
    "first forward",
    "first forward: import NVRTC's bindings",
    "first forward: NVRTC",
    "first backward",
    "first backward: NVRTC",
    "second forward",
)


def first_calls() -> Iterator[str]:
    """What a first import, forward and backward take with the wheel, beside each PyTorch."""
    file = "intel-xeon-2-cores/first-calls.json"
    run = json.loads((RESULTS / file).read_text())
    rows = []
    for answer in run["first_calls"]:
        times = [digits(1e3 * median(answer["seconds"][name])) for name in ("import", "forward", "backward")]
        bits = {True: "yes", False: "no", None: "not compared"}[answer["same_bits"]]
        rows.append([answer["torch"], *times, bits])
    head = ["import, ms", "first forward, ms", "first backward, ms", "bits of the built library"]
    yield from table(["operation beside PyTorch", *head], rows)
    wheel = f"`{run['wheel']['name']}`, {run['wheel']['bytes'] / 1e6:.1f} MB"
    yield f"[`{file}`](../benchmarks/results/{file}): {run['machine']['cpu']}, {wheel}."
    yield ""


def first_kernel() -> Iterator[str]:
    """The parts of the wait for a process's first kernels on a GPU."""
    file = "nvidia-h200/first-kernel.json"
    run = json.loads((RESULTS / file).read_text())
    empty, filled = run["milliseconds"]["empty"], run["milliseconds"]["filled"]
    rows = [[part, digits(empty[part]), digits(filled[part])] for part in _PARTS_OF_A_FIRST_KERNEL]
    yield from table(["operation", "empty cache, ms", "filled cache, ms"], rows)
    yield f"[`{file}`](../benchmarks/results/{file}): {run['machine']['gpu']}, torch {run['versions']['torch']}."
    yield ""
