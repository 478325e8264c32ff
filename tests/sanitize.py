"""A small run of every kernel shape, to be watched by NVIDIA's compute-sanitizer; also a check by the oracle.

    compute-sanitizer --tool memcheck --error-exitcode 1 python tests/sanitize.py     (and racecheck, initcheck)

Few rows, because a sanitised kernel is hundreds of times slower, but more than one block of them. PyTorch's own kernels
run under the sanitizer too, so the reference and the yardstick are computed on the CPU.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import product

import torch
from support import call
from torch import Tensor

from kernel_fusion.native import loader
from kernel_fusion.testing import oracle
from kernel_fusion.testing.oracle import RowNormCase

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64


def cases() -> Iterator[RowNormCase]:
    """Family x dtype x row length, and the layouts that change how a row is loaded."""
    for verb, cols in product(("layer_norm", "rms_norm"), (64, 255, 4096, 12288, 131072)):
        rows = 33 if cols <= 255 else 5 if cols <= 12288 else 2
        for dtype, weight in ((F32, F32), (BF16, BF16), (F16, F16), (F64, F64), (BF16, F32), (BF16, None)):
            yield RowNormCase(verb, (rows, cols), dtype, weight=weight, bias=weight)
        for layout in ("padded", "unaligned"):
            yield RowNormCase(verb, (rows, cols), BF16, weight=BF16, layout=layout)


def before_zeros(t: Tensor | None) -> Tensor | None:
    """`t` with zeros behind it in memory.

    The compiler loads the last elements of a row as the aligned 16 bytes that hold them, which no access can tell from
    the rest; `initcheck` would report the bytes behind the tensor.
    """
    if t is None or not t.is_contiguous():
        return t
    memory = torch.zeros(t.numel() + 16, dtype=t.dtype, device=t.device)
    copy = memory[: t.numel()].view(t.shape).copy_(t.detach())
    return copy.requires_grad_(t.requires_grad)


def run(case: RowNormCase) -> list[oracle.Comparison]:
    """Inference, forward and backward of `case` on the GPU, judged against the CPU's reference."""
    inputs = oracle.make_inputs(case, "cpu")
    device = oracle.make_inputs(case, "cuda")
    if case.layout == "contiguous":
        device = oracle.Inputs(*map(before_zeros, vars(device).values()))
    before = loader.launches("cuda_launch")
    with torch.no_grad():
        inference = call(case.verb, device.x, device.weight, device.bias, backend="cuda")
    ours = oracle.run(case, device, "cuda")
    assert loader.launches("cuda_launch") >= before + 3, "the kernels did not run"
    assert torch.equal(inference, ours["y"]), "inference and training differ"
    expected, theirs = oracle.reference(case, inputs), oracle.pytorch(case, inputs)
    return [oracle.judge(name, [(ours[name].cpu(), expected[name], theirs[name])]) for name in expected]


def main() -> int:
    """Run every case; the number of failures."""
    failures = 0
    for case in cases():
        failed = [c for c in run(case) if not c.ok]
        failures += bool(failed)
        print(f"{case}: {failed or 'ok'}", flush=True)
    torch.cuda.synchronize()
    print(f"{failures} cases failed")
    return failures


if __name__ == "__main__":
    sys.exit(min(main(), 1))
