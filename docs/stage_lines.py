"""Lines of code for each stage of the row norms: those that name its fields, or what kernels call it, by place.

`python docs/stage_lines.py` prints the table. Comments, docstrings of one line and generated files do not count.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import fields

from table_parts import ROOT

from kernel_fusion.core.spec import Stages

# The files of row norms, by place.
PLACES = {
    "operators": ("core/*.py", "operators/*.py", "native/extension/row_norm*.cpp", "native/extension/row_norm.h"),
    "definition": ("backends/eager/*.py",),
    "CPU": ("native/extension/cpu/row_norm*.h", "native/extension/cpu/kernels/row_norm*.cpp"),
    "CUDA": ("native/kernels/row_norm*.cuh", "native/kernels/stages.cuh", "native/kernels/gradients.cuh"),
    "Triton": ("backends/triton/kernels/row_norm*.py",),
    "verbs, modules": ("functional/*norm.py", "nn/*norm.py", "nn/stages.py"),
}
# Names that kernels have for a stage, beside those of its fields.
_CALLED = {
    "dropout": r"\w*drop\w*|seed|threshold",
    "rounding": r"k?Hf|is_hf|\w*[rR]ound(?:s|ed|ings)?\w*",
    "gate": r"\w*[fF]actor\w*|gated?_\w+|kGate\w*",
    "grouped": r"\w*[gG]roups?\w*|runs?",
    "residual_gate": r"\w*[rR]esidual_?[gG]ate\w*|gates_residual|(?:load|before)_gate|gate_(?:ptr|pitch)|kDGate|dgate",
}
_COMMENT = re.compile(r'^\s*(?:#|//|""")')


def stages() -> list[str]:
    """The fields of the list that are no options of another one."""
    names = [field.name for field in fields(Stages)]
    return [name for name in names if not any(name.startswith(f"{other}_") for other in names)]


def lines(stage: str) -> Iterator[int]:
    """How many lines of each place name a stage."""
    constant = "k" + stage.title().replace("_", "")
    named = re.compile(rf"\b(?:{stage}|{constant}|{_CALLED.get(stage, stage)})\b")
    for patterns in PLACES.values():
        files = (path for pattern in patterns for path in (ROOT / "kernel_fusion").glob(pattern))
        code = (line for path in files for line in path.read_text().splitlines() if not _COMMENT.match(line))
        yield sum(named.search(line) is not None for line in code)


def main() -> None:
    """Print the table."""
    print(f"{'':16}" + "".join(f"{place:>17}" for place in (*PLACES, "all")))
    for stage in stages():
        counts = [*lines(stage)]
        print(f"{stage:16}" + "".join(f"{count:17}" for count in (*counts, sum(counts))))


if __name__ == "__main__":
    main()
