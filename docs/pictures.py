"""Pictures of the documentation, drawn from result files. `python docs/pictures.py` draws them anew.

They are bars of speed-ups, as SVG whose text stays text, so that tests/test_documents.py can compare what they say.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING

from matplotlib import rc_context
from table_parts import H200, RESULTS, ROOT, Cell, cells_of

from kernel_fusion_bench.plot import speedup_picture

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_FOLDER = ROOT / "docs" / "pictures"
_DIRECTIONS = "forward", "backward"
# Text as text, and the same names of parts in each run.
_AS_TEXT = {"svg.fonttype": "none", "svg.hashsalt": "kernel_fusion"}

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


def _source(file: Path) -> str:
    """Machine, version and day of a file, and the file."""
    run = json.loads(file.read_text())
    machine = run["machine"]
    parts = machine.get("gpu") or machine["cpu"], f"torch {run['versions']['torch']}", run["date"][:10]
    return ", ".join(parts) + f"; {file.relative_to(RESULTS)}"


def _ratios(found: list[Cell], ours: str) -> dict[str, float]:
    """PyTorch's time over ours, by direction."""
    times = [cell["pytorch"]["median_ms"] / cell[ours]["median_ms"] for cell in found]
    return dict(zip(_DIRECTIONS, times, strict=True))


def speedup() -> Figure:
    """PyTorch's time over ours for chains of every kind, forward and backward."""
    file = "families/fused-ops.json"
    cells = cells_of(file, "operation", "configuration", "dtype", "direction")
    rows = {
        name: _ratios([cells[operation, shape, "bf16", direction] for direction in _DIRECTIONS], "kf-cuda")
        for operation, shape, name in _CHAINS
    }
    title = "Speed-up over PyTorch, NVIDIA H200, bf16, 8192×8192 (attention 16×2048×2048)"
    return speedup_picture(title, _source(H200 / file), rows)


def models() -> Figure:
    """PyTorch's time over ours for the LayerNorms of eleven models."""
    cells = cells_of("models.json", "verb", "dtype", "configuration", "direction")
    rows = {}
    for name in (key[2] for key in cells if key[:2] == ("layer_norm", "bf16") and key[3] == "forward"):
        found = [cells["layer_norm", "bf16", name, direction] for direction in _DIRECTIONS]
        measured = found[0]["floor"]
        rows[f"{name}, {measured['rows']}×{measured['cols']}"] = _ratios(found, "kf-cuda")
    return speedup_picture("LayerNorm of eleven models, NVIDIA H200, bf16", _source(H200 / "models.json"), rows)


def cpu() -> Figure:
    """PyTorch's time over ours for LayerNorm on two cores of a CPU."""
    file = RESULTS / "amd-epyc-zen5-2-cores" / "cpu.json"
    keys = "threads", "verb", "dtype", "direction", "configuration"
    cells = cells_of(str(file.relative_to(RESULTS)), *keys, folder=RESULTS)
    rows = {
        key[4].replace("x", "×"): _ratios(
            [cells[2, "layer_norm", "f32", each, key[4]] for each in _DIRECTIONS], "kf-cpu"
        )
        for key in cells
        if key[:4] == (2, "layer_norm", "f32", "forward")
    }
    return speedup_picture("LayerNorm on two cores of a CPU, fp32, 2 threads", _source(file), rows)


PICTURES = {"speedup.svg": speedup, "models.svg": models, "cpu.svg": cpu}


def draw(name: str, path: Path) -> None:
    """Draw a picture into a file."""
    with rc_context(_AS_TEXT):
        PICTURES[name]().savefig(path, format="svg", metadata={"Date": None})
    path.write_text("\n".join(line.rstrip() for line in path.read_text().splitlines()) + "\n")


def words(path: Path) -> list[str]:
    """The texts of a picture: its title, names and figures. Coordinates differ between versions of Matplotlib."""
    return re.findall(r"<(?:text|tspan)[^>]*>([^<]+)<", path.read_text())


if __name__ == "__main__":
    _FOLDER.mkdir(exist_ok=True)
    for each in PICTURES:
        draw(each, _FOLDER / each)
