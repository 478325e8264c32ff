"""Pictures of the documentation, drawn from result files. `python docs/pictures.py` draws them anew.

They are bars of speed-ups, as SVG: small, sharp at any size, and the same bytes from the same file on every machine, so
that tests/test_documents.py can compare them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import jinja2
from table_parts import H200, RESULTS, ROOT, cells_of

_FOLDER = ROOT / "docs" / "pictures"
_COLORS = "#0969da", "#8250df"
# Pixels; the last is the width of the bars' part. A phone shows the whole picture, so it must stay narrow.
_LEFT, _TOP, _ROW, _PLOT = 190, 60, 40, 290

# The operation of the suite `fused-ops`, its shape, and what the reader knows it as.
_CHAINS = (
    ("layer_norm", "8192x8192", "LayerNorm"),
    ("add+rms_norm", "8192x8192", "add, RMSNorm"),
    ("add+layer_norm, dropout", "8192x8192", "dropout, add, LayerNorm"),
    ("silu gate", "8192x8192", "SwiGLU gate"),
    ("bias+gelu+dropout", "8192x8192", "bias, GELU, dropout"),
    ("sum_squared, last", "8192x8192", "sum of squares"),
    ("softmax, scale, causal", "8192x8192", "causal softmax"),
    ("causal attention weights", "16x2048x2048", "causal attention weights"),
)


def _bars(title: str, subtitle: str, source: str, rows: Sequence[tuple[str, Sequence[float]]], legend: str) -> str:
    """Horizontal bars in groups; a longer bar is better."""
    highest = int(max(max(values) for _, values in rows)) + 1
    scale = _PLOT / highest
    bottom = _TOP + _ROW * len(rows)
    groups = []
    for index, (name, values) in enumerate(rows):
        y = _TOP + _ROW * index + 5
        bars = [
            {"y": y + 14 * place, "width": round(scale * value, 1), "color": color, "label": f"{value:.1f}×"}
            for place, (value, color) in enumerate(zip(values, _COLORS, strict=False))
        ]
        groups.append({"name": name, "y": y, "bars": bars})
    entries = [
        {"name": name, "color": color, "x": _LEFT + 110 * place}
        for place, (name, color) in enumerate(zip(legend.split(", "), _COLORS, strict=False))
    ]
    template = jinja2.Template((ROOT / "docs" / "templates" / "bars.svg").read_text(), autoescape=True)
    return str(
        template.render(
            title=title,
            subtitle=subtitle,
            source=source,
            groups=groups,
            legend=entries,
            ticks=[{"value": value, "x": round(_LEFT + scale * value, 1)} for value in range(highest + 1)],
            left=_LEFT,
            top=_TOP,
            bottom=bottom,
            width=_LEFT + _PLOT + 35,
            height=bottom + 76,
        )
    )


def _source(file: Path) -> str:
    """Machine, version and day of a file, and the file."""
    run = json.loads(file.read_text())
    machine = run["machine"]
    parts = machine.get("gpu") or machine["cpu"], f"torch {run['versions']['torch']}", run["date"][:10]
    return ", ".join(parts) + f"; {file.relative_to(RESULTS)}"


def speedup() -> str:
    """PyTorch's time over ours for chains of every kind, forward and backward."""
    file = "families/fused-ops.json"
    cells = cells_of(file, "operation", "configuration", "dtype", "direction")
    rows = []
    for operation, shape, name in _CHAINS:
        found = [cells[operation, shape, "bf16", direction] for direction in ("forward", "backward")]
        rows.append((name, [cell["pytorch"]["median_ms"] / cell["kf-cuda"]["median_ms"] for cell in found]))
    subtitle = "bf16, 8192×8192 (attention 16×2048×2048); higher is better"
    source = _source(H200 / file)
    return _bars("Speed-up over PyTorch, NVIDIA H200", subtitle, source, rows, "forward, backward")


def models() -> str:
    """PyTorch's time over ours for the LayerNorms of eleven models."""
    cells = cells_of("models.json", "verb", "dtype", "configuration", "direction")
    names = [key[2] for key in cells if key[:2] == ("layer_norm", "bf16") and key[3] == "forward"]
    rows = []
    for name in names:
        found = [cells["layer_norm", "bf16", name, direction] for direction in ("forward", "backward")]
        measured = found[0]["floor"]
        times = [cell["pytorch"]["median_ms"] / cell["kf-cuda"]["median_ms"] for cell in found]
        rows.append((f"{name}, {measured['rows']}×{measured['cols']}", times))
    title, subtitle = "LayerNorm of eleven models, NVIDIA H200", "speed-up over PyTorch, bf16; higher is better"
    return _bars(title, subtitle, _source(H200 / "models.json"), rows, "forward, backward")


def cpu() -> str:
    """PyTorch's time over ours for LayerNorm on two cores of a CPU."""
    file = RESULTS / "amd-epyc-zen5-2-cores" / "cpu.json"
    keys = "threads", "verb", "dtype", "direction", "configuration"
    cells = cells_of(str(file.relative_to(RESULTS)), *keys, folder=RESULTS)
    shapes = [key[4] for key in cells if key[:4] == (2, "layer_norm", "f32", "forward")]
    rows = []
    for shape in shapes:
        found = [cells[2, "layer_norm", "f32", direction, shape] for direction in ("forward", "backward")]
        times = [cell["pytorch"]["median_ms"] / cell["kf-cpu"]["median_ms"] for cell in found]
        rows.append((shape.replace("x", "×"), times))
    title, subtitle = "LayerNorm on two cores of a CPU", "speed-up over PyTorch, fp32, 2 threads; higher is better"
    return _bars(title, subtitle, _source(file), rows, "forward, backward")


PICTURES = {"speedup.svg": speedup, "models.svg": models, "cpu.svg": cpu}

if __name__ == "__main__":
    _FOLDER.mkdir(exist_ok=True)
    for name, draw in PICTURES.items():
        (_FOLDER / name).write_text(draw() + "\n")
