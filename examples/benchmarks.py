"""The benchmark harness from Python: an operation of one's own, measured like those of `kernel-fusion bench`.

An operation is PyTorch's calls, our call and the arguments of both. That is all the harness needs: it compares results
and gradients with PyTorch's in float64, counts the bytes that must move, times both against each other and against the
floor, and writes tables and plots. Here it is a residual addition, an RMSNorm and a SiLU.

    python examples/benchmarks.py                                         # the best device, small sizes, a few seconds
    python examples/benchmarks.py --shape 16384x4096 --shape 4096x16384 --dtype bf16 --output-dir results
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

import kernel_fusion as kf
from kernel_fusion_bench import providers, run_suite
from kernel_fusion_bench.suite import Operations, Shape, Suite
from kernel_fusion_bench.timing import QUICK, Setup
from kernel_fusion_bench.workloads import Argument, Dropout, Operation

EPS = 1e-6
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def arguments(shape: tuple[int, ...], dtype: torch.dtype) -> list[Argument]:
    """The arguments of both calls, in order: two tensors of the result's shape, and a parameter that all rows share."""
    weight = Argument("weight", shape[-1:], dtype, mean=1.0, shared=True)
    return [Argument("x", shape, dtype), Argument("residual", shape, dtype), weight]


def pytorch(dropout: Dropout, x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """The calls of PyTorch's users; there is no dropout here."""
    h = residual + x
    return F.silu(F.rms_norm(h, h.shape[-1:], weight, EPS)), h


def fused(x: Tensor, residual: Tensor, weight: Tensor, p: float, backend: str | None) -> kf.NormOutput:
    """The call of our users."""
    return kf.add_rms_norm(x, residual, x.shape[-1:], weight, EPS, activation="silu", backend=backend)


OPERATION = Operation(
    "add+rms_norm+silu",
    "add_rms_norm",
    arguments,
    pytorch,
    fused,
    results=("y", "h"),
    # Backward reads h, which is no argument but has the size of one, and writes one gradient for both terms of the sum.
    backward_reads=("residual", "weight"),
    backward_writes=("residual", "weight"),
)


def suite(shapes: Sequence[str], dtype: torch.dtype) -> Suite:
    """OPERATION at every shape."""
    sizes = [tuple(map(int, shape.split("x"))) for shape in shapes]
    part = Operations((OPERATION,), lambda *_: [Shape(*named) for named in zip(shapes, sizes, strict=True)], False)
    return Suite("own-operation", "Your operation", "one, beside PyTorch", (part,), dtypes={"cpu": [dtype]})


def setup(device: torch.device) -> Setup:
    """Who is measured, in turns: PyTorch and ours; the floor is always there."""
    backend = kf.explain(kf.layer_norm, torch.empty(1, 1, device=device), 1).backend
    return Setup([providers.pytorch(), providers.ours(backend)], device, ("forward", "backward"), QUICK)


def main() -> None:
    """Measure, print the tables and write the files; an error if something could not be measured."""
    best = "cuda" if torch.cuda.is_available() else "cpu"
    parser = argparse.ArgumentParser(description="Measure an operation of one's own beside PyTorch and the floor.")
    parser.add_argument("--shape", action="append", help="rows x columns, repeatable (default: 256x1024 and 1024x1024)")
    parser.add_argument("--dtype", choices=DTYPES, default="fp32", help="of the data (default fp32)")
    parser.add_argument("--device", default=best, type=torch.device, help=f"a PyTorch device (here by default {best})")
    parser.add_argument("--output-dir", type=Path, default=Path("demo-results"), help="(default demo-results)")
    wanted = parser.parse_args()

    measured = suite(wanted.shape or ["256x1024", "1024x1024"], DTYPES[wanted.dtype])
    found, files = run_suite(measured, [setup(wanted.device)], wanted.output_dir, command=shlex.join(sys.argv))
    print(next(path.read_text() for path in files if path.suffix == ".md"))
    print(*files, sep="\n")
    if found.failures:
        sys.exit("FAILED: " + "; ".join(map(str, found.failures)))


if __name__ == "__main__":
    main()
