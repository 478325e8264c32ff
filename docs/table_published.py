"""Tables that put published figures beside those of the result files."""

from __future__ import annotations

from collections.abc import Iterator

from table_parts import RESULTS, Cell, cells_of, table


def _speedup(cell: Cell) -> str:
    ours = next(name for name in cell if name.startswith("kf-"))
    return f"{cell['pytorch']['median_ms'] / cell[ours]['median_ms']:.2f}"


# System A's own: PyTorch's and its time in ms, the speedup, and the memory saved.
_A = {
    "BERT-Base": ("0.124", "0.142", "0.87", "22 %"),
    "BERT-Large": ("0.156", "0.169", "0.92", "23 %"),
    "GPT-2 Medium": ("0.089", "0.098", "0.91", "23 %"),
    "GPT-2 Large": ("0.072", "0.076", "0.95", "24 %"),
    "GPT-2 XL": ("0.058", "0.059", "0.98", "24 %"),
    "GPT-3 Small": ("0.092", "0.071", "1.30", "25 %"),
    "GPT-3 Medium": ("0.247", "0.172", "1.434", "25 %"),
    "GPT-3 XL": ("0.287", "0.196", "1.461", "25 %"),
    "GPT-3 Large": ("0.359", "0.267", "1.343", "25 %"),
    "GPT-3 XXL": ("0.542", "0.392", "1.383", "26 %"),
    "GPT-3 175B": ("0.623", "0.465", "1.339", "26 %"),
}


def a() -> Iterator[str]:
    """Each model beside what is published, and the memory of a block."""
    cells = cells_of("models.json", "verb", "dtype", "direction", "configuration")
    rows = []
    for model, theirs in _A.items():
        row = []
        for dtype in ("f32", "bf16"):
            forward, both = (cells["layer_norm", dtype, d, model] for d in ("forward", "forward+backward"))
            row += [f"{forward['kf-cuda']['median_ms']:.4f}", _speedup(forward), _speedup(both)]
        rows.append([f"{model}, {forward['floor']['rows']}×{forward['floor']['cols']}", *theirs, *row])
    there = ["theirs: PyTorch ms", "fused ms", "speedup", "memory saved"]
    here = [f"{dtype}: {name}" for dtype in ("fp32", "bf16") for name in ("ours ms", "speedup", "with backward")]
    yield from table(["model, rows × hidden", *there, *here], rows)
    yield "[`models.json`](../benchmarks/results/nvidia-h200/models.json): NVIDIA H200, torch 2.11.0+cu130."
    yield ""
    cells = cells_of("memory.json", "verb", "dtype", "configuration")
    rows = []
    for batch in (32, 64, 128):
        row = [str(batch)]
        for verb in ("block", "block_dropout"):
            cell = cells[verb, "bf16", f"batch {batch}"]
            for fact in ("saved_bytes", "training_memory_bytes"):
                theirs, ours = cell["pytorch"][fact], cell["kf-cuda"][fact]
                row.append(f"{theirs / 1e6:.0f} → {ours / 1e6:.0f} ({ours / theirs:.2f})")
        rows.append(row)
    yield "Memory of the elementwise part of a pre-norm block, bf16, MB, PyTorch → ours:"
    yield ""
    head = ["saved for backward", "peak of a step"]
    yield from table(["batch", *head, *(f"{name}, with dropout" for name in head)], rows)
    yield "[`memory.json`](../benchmarks/results/nvidia-h200/memory.json): NVIDIA H200, torch 2.11.0+cu130."
    yield ""


def b() -> Iterator[str]:
    """GB/s of forward over the lengths of system B's plot."""
    cells = cells_of("sweep.json", "verb", "direction", "dtype", "cols")
    providers = {"floor": "copy", "pytorch": "PyTorch", "kf-triton": "Triton, ours", "kf-cuda": "CUDA, ours"}
    rows = []
    for power in range(8, 16):
        row = [str(1 << power)]
        for dtype in ("f32", "bf16"):
            cell = cells["layer_norm", "forward", dtype, 1 << power]
            row += [f"{cell[provider]['gigabytes_per_second']:.0f}" for provider in providers]
        rows.append(row)
    first, *others = providers.values()
    yield from table(["N", f"fp32: {first}", *others, f"bf16: {first}", *others], rows)
    yield "[`sweep.json`](../benchmarks/results/nvidia-h200/sweep.json): NVIDIA H200, torch 2.11.0+cu130, Triton 3.6.0."
    yield ""


# System C's own, in ms: PyTorch's, and its kernels' best time.
_C = {
    ("100x512", "forward"): ("0.0", "0.3"),
    ("100x512", "backward"): ("0.1", "0.5"),
    ("1000x1024", "forward"): ("0.4", "6.2"),
    ("1000x1024", "backward"): ("1.9", "9.4"),
    ("5000x256", "forward"): ("0.6", "7.7"),
    ("5000x256", "backward"): ("2.2", "11.5"),
    ("10000x10000", "forward + backward"): ("364", "1620"),
}


def c() -> Iterator[str]:
    """LayerNorm in fp32 on a CPU, with two threads here."""
    file = "amd-epyc-zen5-2-cores/cpu.json"
    cells = cells_of(file, "threads", "verb", "dtype", "configuration", "direction", folder=RESULTS)
    rows = []
    for (shape, directions), theirs in _C.items():
        found = [cells[2, "layer_norm", "f32", shape, direction] for direction in directions.split(" + ")]
        pytorch, ours = (sum(cell[name]["median_ms"] for cell in found) for name in ("pytorch", "kf-cpu"))
        measured = [f"{pytorch:.3g}", f"{ours:.3g}", f"{pytorch / ours:.2f}"]
        rows.append([f"{shape.replace('x', '×')}, {directions}", *theirs, *measured])
    yield from table(["call", "theirs: PyTorch ms", "optimised", "here: PyTorch ms", "ours", "speedup"], rows)
    yield (f"[`{file}`](../benchmarks/results/{file}): AMD EPYC, 2 cores of a virtual machine, torch 2.13.0+cpu.")
    yield ""


def d() -> Iterator[str]:
    """ReLU and LayerNorm at 4096×1024 in fp32: theirs, and everybody here."""
    (cell,) = cells_of("relu-layernorm.json", "configuration").values()
    names = {"cupy": "CuPy, here", "pytorch": "PyTorch, here", "kf-cuda": "ours", "floor": "floor"}
    measured = [cell[name] for name in names]
    slowest = cell["pytorch"]["median_ms"]
    yield from table(
        ["operation", "launched apart there", "fused there", *names.values()],
        [
            ["ms", "1.034", "0.194", *(f"{one['median_ms']:.3g}" for one in measured)],
            ["MB moved", "134.2", "33.6", *(f"{one['bytes_moved'] / 1e6:.1f}" for one in measured)],
            ["GB/s", "130", "173", *(f"{one['gigabytes_per_second']:.0f}" for one in measured)],
            ["speedup", "1.00", "5.32", *(f"{slowest / one['median_ms']:.2f}" for one in measured)],
        ],
    )
    yield "[`relu-layernorm.json`](../benchmarks/results/nvidia-h200/relu-layernorm.json): NVIDIA H200, CuPy 14.2.0."
    yield ""
