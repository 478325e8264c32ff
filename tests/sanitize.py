"""A small run of every kernel shape, to be watched by NVIDIA's compute-sanitizer; also a check by the oracle.

    compute-sanitizer --tool memcheck --error-exitcode 1 python tests/sanitize.py     (and racecheck, initcheck)

Few rows, because a sanitised kernel is hundreds of times slower, but more than one block of them. PyTorch's own kernels
run under the sanitizer too, so the reference and the yardstick are computed on the CPU. Fresh memory holds NaN, which
shows in a result that depends on it.
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
    """Family x dtype x row length, the layouts that change how a row is loaded, and full rings of slots."""
    for verb, cols in product(("layer_norm", "rms_norm"), (64, 255, 1023, 4096, 12288, 32768, 50257, 131072)):
        rows = 33 if cols <= 1023 else 5 if cols <= 12288 else 2
        for dtype, weight in ((F32, F32), (BF16, BF16), (F16, F16), (F64, F64), (BF16, F32), (BF16, None)):
            yield RowNormCase(verb, (rows, cols), dtype, weight=weight, bias=weight)
        for layout in ("padded", "unaligned"):
            yield RowNormCase(verb, (rows, cols), BF16, weight=BF16, layout=layout)
    for shape in ((3000, 4096), (600, 32768)):
        yield RowNormCase("layer_norm", shape, BF16, weight=BF16, bias=BF16)


def among_zeros(t: Tensor | None) -> Tensor | None:
    """`t`, laid out as it is, with zeros before, behind and between its rows.

    Rows are copied as the aligned units of 16 bytes that hold them, which no access can tell from the rest; `initcheck`
    would report the bytes around the tensor.
    """
    if t is None:
        return None
    memory = torch.zeros(t.untyped_storage().nbytes() // t.element_size() + 16, dtype=t.dtype, device=t.device)
    copy = memory.as_strided(t.shape, t.stride(), t.storage_offset()).copy_(t.detach())
    return copy.requires_grad_(t.requires_grad)


def run(case: RowNormCase) -> list[oracle.Comparison]:
    """Inference, forward and backward of `case` on the GPU, judged against the CPU's reference."""
    inputs = oracle.make_inputs(case, "cpu")
    device = oracle.Inputs(*map(among_zeros, vars(oracle.make_inputs(case, "cuda")).values()))
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
    torch.use_deterministic_algorithms(True)  # fills fresh memory
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
