"""The tables of operations: the suites `fused-ops`, `rope` and `quantised`."""

from __future__ import annotations

from collections.abc import Iterator

from table_parts import H100, H200, Cell, best_peer, cells_of, digits, over_floor, sources, table

# The operations of each page.
PAGES = {
    "pointwise": ("add_act", "mul_act", "bias_act", "act_dropout", "gated_act"),
    "stages": ("layer_norm", "rms_norm", "add_layer_norm", "add_rms_norm"),
    "reductions": ("sum_squared", "mean_abs"),
    "softmax": ("softmax", "attention_scores"),
}
_FUSED, _BESIDE = "families/fused-ops.json", "fused-ops.json"
_SOURCE = (
    f"[`{_FUSED}`](../benchmarks/results/nvidia-h200/{_FUSED}): NVIDIA H200, torch 2.11.0+cu130, by `kernel-fusion"
    " bench fused-ops --device cuda --directions forward,backward --peers none`"
)


def fused(page: str) -> Iterator[str]:
    """Time of each operation of a page, over the floor and beside PyTorch; torch.compile is from a run of its own."""
    keys = "configuration", "direction", "operation", "dtype"
    cells, beside = cells_of(_FUSED, *keys), cells_of(_BESIDE, *keys)
    ours = [key for key, cell in cells.items() if cell["kf-cuda"]["verb"] in PAGES[page]]
    for shape in sorted({key[0] for key in ours} - {"2048x2048"}):
        for direction in ("forward", "backward"):
            rows = []
            for operation in dict.fromkeys(key[2] for key in ours if key[0] == shape):
                row = [operation]
                for dtype in ("f32", "bf16"):
                    key = shape, direction, operation, dtype
                    row += _figures(cells[key], beside[key]) if key in cells else ["–"] * 4
                rows.append(row)
            yield f"{shape.replace('x', '×')}, {direction}:"
            yield ""
            figures = ("÷ floor", "PyTorch ÷ ours", "torch.compile ÷ ours")
            yield from table(["operation", "fp32 µs", *figures, "bf16 µs", *figures], rows)
    yield (
        f"{_SOURCE}; 2048×2048 is in the same file."
        f" torch.compile beside ours of that day: [`{_BESIDE}`](../benchmarks/results/nvidia-h200/{_BESIDE}),"
        " the same with `--peers torch.compile`."
    )
    yield ""


def _figures(cell: Cell, beside: Cell) -> list[str]:
    """µs, over the floor, and how many times as long PyTorch takes, and torch.compile in the other run."""
    compiled = _times(beside, "torch.compile") if "torch.compile" in beside else "–"
    time = digits(cell["kf-cuda"]["median_ms"] * 1e3)
    return [time, over_floor(cell, "kf-cuda"), _times(cell, "pytorch"), compiled]


def _times(cell: Cell, other: str, ours: str = "kf-cuda") -> str:
    return f"{cell[other]['median_ms'] / cell[ours]['median_ms']:.2f}"


# The tables of other suites: the page and the file.
NEWEST = {
    "rotary embedding": ("rope", H200 / "rope.json"),
    "quantised results": ("quantized", H100 / "quantised.json"),
    "quantised results, H200": ("quantized", H200 / "quantised.json"),
    "gated and modulated norms": ("modulation", H200 / "stages.json"),
}


def newest(name: str) -> Iterator[str]:
    """Time over the floor, and how many times as long others take, of each operation in bf16."""
    _, file = NEWEST[name]
    cells = cells_of(file.name, "configuration", "operation", "direction", folder=file.parent)
    directions = list(dict.fromkeys(direction for *_, direction in cells))
    rows = []
    for shape, operation in dict.fromkeys(key[:2] for key in cells):
        row = [f"{operation}, {shape.replace('x', '×')}"]
        for direction in directions:
            cell = cells[shape, operation, direction]
            peer = best_peer(cell)
            row += [
                digits(cell["kf-cuda"]["median_ms"] * 1e3),
                over_floor(cell, "kf-cuda"),
                _times(cell, "pytorch"),
                f"{_times(cell, peer)} {peer}" if peer else "–",
            ]
        rows.append(row)
    figures = ("µs", "÷ floor", "PyTorch ÷ ours", "best peer ÷ ours")
    head = [f"{direction}, {figure}" for direction in directions for figure in figures]
    yield from table(["operation", *head], rows)
    yield sources(file.name, folder=file.parent)
    yield ""


# Chains, and their bytes per element in bf16, counted: forward of PyTorch's operators and fused, then backward.
_COUNTED = {
    "`relu`": ("relu", 4, 4, 6, 4.1),
    "LayerNorm": ("layer_norm", 4, 4, 6, 6),
    "LayerNorm, ReLU": ("layer_norm+relu", 8, 4, 12, 6),
    "addition, LayerNorm": ("add+layer_norm", 10, 8, 12, 8),
    "dropout, addition, LayerNorm": ("add+layer_norm, dropout", 15, 8, 17, 10),
    "bias, GELU": ("bias+gelu", 8, 4, 8, 6),
    "bias, GELU, dropout": ("bias+gelu+dropout", 13, 4, 13, 6),
    "SiLU gate": ("silu gate", 10, 6, 18, 10),
    "squares, sum": ("sum_squared, last", 6, 2, 12, 4),
    "scale, mask, softmax": ("softmax, scale, mask", 13, 5, 15, 6),
    "scale, causal mask, softmax": ("softmax, scale, causal", 13, 3, 15, 6),
}


def bytes_moved() -> Iterator[str]:
    """Bytes of chains, as counted, and how many times as long PyTorch takes."""
    cells = cells_of(_FUSED, "operation", "configuration", "dtype", "direction")
    rows = []
    for title, (operation, *counts) in _COUNTED.items():
        row = [title]
        for direction, (apart, together) in {"forward": counts[:2], "backward": counts[2:]}.items():
            cell = cells[operation, "8192x8192", "bf16", direction]
            row += [f"{apart:g}", f"{together:g}", f"{apart / together:.2f}", _times(cell, "pytorch")]
        rows.append(row)
    head = ["fused", "ratio", "PyTorch's time ÷ ours"]
    yield from table(["chain", "forward, bytes: PyTorch", *head, "backward, bytes: PyTorch", *head], rows)
    yield f"{_SOURCE}."
    yield ""


# System E's own: PyTorch's and its time in ms, and the speedup; and where it is measured here.
_PUBLISHED_E = {
    "add + relu": ("1.23", "0.84", "1.46", "add+relu", "2048x2048"),
    "layer norm + relu": ("2.45", "1.67", "1.47", "layer_norm+relu", "2048x2048"),
    "bias + gelu": ("0.98", "0.71", "1.38", "bias+gelu", "2048x2048"),
    "attention scores": ("3.21", "2.18", "1.47", "attention scores", "16x2048x2048"),
}


def published_e() -> Iterator[str]:
    """Four chains of fp32 beside what is published of them, in ms."""
    cells = cells_of(_FUSED, "operation", "configuration", "dtype", "direction")
    rows = []
    for title, (*theirs, operation, shape) in _PUBLISHED_E.items():
        cell = cells[operation, shape, "f32", "forward"]
        pytorch, ours, floor = (f"{cell[name]['median_ms']:.4f}" for name in ("pytorch", "kf-cuda", "floor"))
        rows.append([title, *theirs, shape.replace("x", "×"), pytorch, ours, _times(cell, "pytorch"), floor])
    head = ["theirs: PyTorch", "fused", "speedup", "shape here", "PyTorch", "ours", "speedup", "floor"]
    yield from table(["operation", *head], rows)
    yield f"{_SOURCE}."
    yield ""
