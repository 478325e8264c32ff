"""Time the parts of the wait for a process's first kernels on a GPU.

    python benchmarks/first_kernel.py --output-dir benchmarks/results/<device>

The wheel for Linux must be installed, and the working folder be another one than the clone's. Writes
`first-kernel.json`. Each case is a process of its own: "empty" has an empty cache of kernels, "filled" the cache that
the process before it filled. Times are wall milliseconds, the median of three processes. PyTorch's own start comes
before and is not counted.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

PROCESSES = 3


def one_process() -> dict[str, float]:
    """The milliseconds of each part in this process, which must not have imported kernel_fusion before."""
    times: dict[str, float] = defaultdict(float)

    def timed(name: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        try:
            return function(*args, **kwargs)
        finally:
            times[name] += (time.perf_counter() - start) * 1e3

    def wrap(module: Any, name: str, part: str) -> None:
        function = getattr(module, name)
        setattr(module, name, lambda *args, **kwargs: timed(part, function, *args, **kwargs))

    def waited(function: Callable[[], Any]) -> Any:
        result = function()
        torch.cuda.synchronize()
        return result

    x, dy = (torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    weight, bias = (torch.ones(4096, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
    # PyTorch's own start, of a loss and its gradients too.
    waited(lambda: (torch.nn.functional.layer_norm(x.requires_grad_(), (4096,), weight, bias) * dy).sum().backward())
    kf = timed("import kernel_fusion", __import__, "kernel_fusion")
    from kernel_fusion.backends.cuda import compile as compiler
    from kernel_fusion.backends.cuda import planner
    from kernel_fusion.operators import loader

    timed("open the extension, import the planner", loader.load)
    wrap(planner, "plan_for", "plan and source")
    wrap(planner, "source_of", "plan and source")
    compile_source = compiler.compile_source

    def compiled(*args: Any, **kwargs: Any) -> Any:
        timed("import NVRTC's bindings", __import__, "cuda.bindings.nvrtc")
        return timed("NVRTC", compile_source, *args, **kwargs)

    setattr(compiler, "compile_source", compiled)  # noqa: B010
    y = timed("first forward", waited, lambda: kf.layer_norm(x, (4096,), weight, bias))
    forward = dict(times)
    timed("first backward", waited, (y * dy).sum().backward)
    parts = ("plan and source", "import NVRTC's bindings", "NVRTC")
    for name in parts:
        times[f"first forward: {name}"] = forward.get(name, 0.0)
        times[f"first backward: {name}"] = times.pop(name, 0.0) - forward.get(name, 0.0)
    timed("second forward", waited, lambda: kf.layer_norm(x, (4096,), weight, bias))
    assert loader.is_from_wheel(), loader.why_not_from_wheel() or "the wheel is not installed"
    return dict(times)


def main() -> None:
    """Start the processes and write down the medians."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output-dir", type=Path, required=True)
    folder = parser.parse_args().output_dir
    answers: dict[str, list[Any]] = {"empty": [], "filled": []}
    with tempfile.TemporaryDirectory() as caches:
        for number in range(PROCESSES):
            cache = Path(caches) / str(number)
            own = {"KERNEL_FUSION_CACHE_DIR": str(cache / "ours"), "CUDA_CACHE_PATH": str(cache / "nvidia")}
            for found in answers.values():
                script = "import json, first_kernel; print(json.dumps(first_kernel.one_process()))"
                here = os.pathsep.join((str(Path(__file__).resolve().parent), os.environ.get("PYTHONPATH", "")))
                environment = {**os.environ, **own, "PYTHONPATH": here}
                ran = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
                assert ran.returncode == 0, ran.stderr
                found.append(json.loads(ran.stdout.splitlines()[-1]))
    from kernel_fusion.cli.machine import versions
    from kernel_fusion_bench.results import machine

    results: dict[str, Any] = {
        "command": "python " + " ".join(sys.argv),
        "machine": machine(torch.device("cuda")),
        "versions": versions(),
        "processes": PROCESSES,
        "milliseconds": {
            name: {part: round(statistics.median(answer[part] for answer in found), 2) for part in found[0]}
            for name, found in answers.items()
        },
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "first-kernel.json").write_text(json.dumps(results, indent=2) + "\n")
    print(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
