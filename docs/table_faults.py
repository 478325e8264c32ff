"""The table of planted faults, of the results that tests/mutants.py writes."""

from __future__ import annotations

import json
from collections.abc import Iterator

from table_parts import RESULTS


def planted() -> Iterator[str]:
    """Each fault with the first test that failed, by machine."""
    for file in sorted(RESULTS.glob("*/mutants.json")):
        found = json.loads(file.read_text())
        yield "| fault | planted in | caught by | CPU s |"
        yield "| --- | --- | --- | ---: |"
        for fault in found["mutants"]:
            test = fault["test"].removeprefix("tests/").partition("[")[0].replace("::", " ")
            place = fault["file"].removeprefix("kernel_fusion/")
            yield f"| {fault['name']} | {place} | {test} | {fault['cpu_seconds']:.1f} |"
        yield ""
        where, machine = file.relative_to(RESULTS), found["machine"]
        yield (
            f"[`{where}`](../benchmarks/results/{where}), by `python tests/mutants.py`:"
            f" {machine.get('gpu', machine['cpu'])}, torch {found['versions']['torch']}."
        )
        yield ""
