"""The tables of tuned values: rows are well formed, name what shows them, and each decides some plan."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from cuda_plans import anywhere

from kernel_fusion.backends.cuda import planner, tuned
from kernel_fusion.backends.cuda.device import KNOWN_DEVICES, Device
from kernel_fusion.backends.cuda.plan import Plan
from kernel_fusion.backends.cuda.row_norm_plan import plan_row_norm
from kernel_fusion.core.spec import Access, RowNormSpec

_ROOT = Path(__file__).parents[1]
_ROWS = [
    (direction, knob, row)
    for path in sorted(tuned.TABLES.glob("*.json"))
    for direction, knobs in json.loads(path.read_text()).items()
    for knob, rows in knobs.items()
    for row in rows
]
_Call = tuple[RowNormSpec, Access, Device]


# Grid rationale. Every natural alignment of rows of part of a warp, of one, of a block and of clusters;
# the mixes that training has and y of another type by itself; stages that a table asks about.
_LENGTHS = (17, 130, 255, 510, 768, 1023, 1032, 1170, 1280, 1408, 1600, 2048, 2304, 3000, 3072, 4096, 4099, 5120, 6661)
_LENGTHS += (8192, 9216, 10002, 10007, 10240, 12288, 12672, 16382, 16383, 20480, 24576, 28672, 32768, 40962, 50002)
_LENGTHS += (50257, 57344, 65532, 65536, 98304, 131071, 131072, 168832, 262143)
_MIXES = (
    ("bf16", "bf16", "bf16"),
    ("bf16", "f32", "bf16"),
    ("bf16", "bf16", "f32"),
    ("f32", "f32", "f32"),
    ("f32", "f32", "bf16"),
    ("f64", "f64", "f64"),
)
_STAGES: tuple[dict[str, Any], ...] = (
    {},
    *({"activation": name} for name in ("relu", "gelu", "mish", "sigmoid", "hardswish")),
    *({"pre_activation": name} for name in ("relu", "gelu")),
    {"residual": "bf16"},
    {"residual": "f32"},
    {"residual": "bf16", "dropout": True},
    {"dropout": True},
    {"rounding": "hf"},
    {"rounding": "hf", "activation": "silu"},
    {"gate": "bf16", "gate_activation": "silu"},
    {"gate": "f32", "gate_activation": "silu"},
    {"gate": "f32", "gate_activation": "silu", "gate_first": True, "rounding": "hf"},
    {"grouped": True},
    {"residual": "bf16", "grouped": True},
    {"residual": "bf16", "residual_gate": "bf16", "grouped": True},
)


def _sample() -> Iterator[_Call]:
    """Calls on sm_90 and on a device without a table or clusters; those that no table asks about are not sorted out."""
    for cols, (x, weight, y), rms, stages in product(_LENGTHS, _MIXES, (False, True), _STAGES):
        if x == "f64" and not {"residual", "gate"}.isdisjoint(stages):
            continue
        for spec in planner.family(cols, x, weight, rms=rms, y=y, **stages)[1:]:
            for access in (planner.contiguous_access(spec), anywhere(spec)):
                yield spec, access, KNOWN_DEVICES[90]
            yield spec, planner.contiguous_access(spec), KNOWN_DEVICES[80]
        if rms and not stages:  # an absent weight, and one more bias
            for spec in planner.family(cols, x, weight, rms=True, y=y)[1:]:
                yield replace(spec, bias=weight), planner.contiguous_access(spec), KNOWN_DEVICES[90]
                yield replace(spec, weight=None), planner.contiguous_access(spec), KNOWN_DEVICES[90]


class _Asked:
    """The plan of each call of the sample, and for each row the calls that it counts for."""

    def __init__(self) -> None:
        self.calls = [*_sample()]
        self.plans: list[Plan] = []
        self.counts: dict[str, list[int]] = {}
        patch = pytest.MonkeyPatch()
        known = tuned.Facts.tuned

        def tuned_and_noted(facts: tuned.Facts, knob: str, rule: Any) -> Any:
            facts.came_from.pop(knob, None)
            value = known(facts, knob, rule)
            if knob in facts.came_from:
                direction = "backward" if facts.spec.direction == "backward" else "forward"
                key = _key(direction, knob, facts.came_from[knob])
                self.counts.setdefault(key, []).append(len(self.plans))
            return value

        patch.setattr(tuned.Facts, "tuned", tuned_and_noted)
        for call in self.calls:
            self.plans.append(plan_row_norm(*call))
        patch.undo()


def _key(direction: str, knob: str, row: Any) -> str:
    return json.dumps([direction, knob, *row])


@pytest.mark.slow
def test_every_row_decides_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it some call of the sample has another plan: no row repeats others or the rule."""
    asked = _Asked()

    def decides(direction: str, knob: str, row: list[Any]) -> bool:
        with monkeypatch.context() as without:
            for arch in (80, 90):
                rows = tuned.table(arch, direction).get(knob, [])
                without.setitem(tuned.table(arch, direction), knob, [each for each in rows if list(each) != row])
            calls = asked.counts.get(_key(direction, knob, row), [])
            return any(plan_row_norm(*asked.calls[index]) != asked.plans[index] for index in calls)

    assert [row for row in _ROWS if not decides(*row)] == []


def test_rows_name_what_shows_them() -> None:
    """A results file, the page of the notebook that tells of the trials, or the compiler, which spills otherwise."""
    folders = _ROOT / "benchmarks" / "results", _ROOT / "docs" / "notebook"
    for row in _ROWS:
        _, conditions, shown = row[-1]
        assert isinstance(conditions, dict), row
        assert shown == "spills" or any((folder / shown).is_file() for folder in folders), row


def test_rows_of_an_architecture_come_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then those of any; the first whose conditions hold counts, and without one the rule."""
    for name, rows in {
        "any": [[1, {}, "spills"]],
        "sm_90": [
            [2, {"activation": "gelu"}, ""],
            [3, {"not activation": ["identity", "relu"], "cols": [None, 8]}, ""],
            [4, {"cols": [16, 32], "rms": True}, ""],
        ],
    }.items():
        (tmp_path / f"{name}.json").write_text(json.dumps({"forward": {"knob": rows}}))
    monkeypatch.setattr(tuned, "TABLES", tmp_path)
    tuned.table.cache_clear()
    try:
        spec = RowNormSpec("forward", True, 16, "bf16", "bf16")
        changes = ({}, {"cols": 33}, {"rms": False}, {"activation": "gelu"}, {"activation": "silu", "cols": 8})
        specs = [replace(spec, **change) for change in changes]
        facts = [tuned.Facts(each, Access(), KNOWN_DEVICES[90], {}) for each in specs]
        assert [each.tuned("knob", 0) for each in facts] == [4, 1, 1, 2, 3]
        assert tuned.Facts(spec, Access(), KNOWN_DEVICES[80], {}).tuned("knob", 0) == 1
        assert facts[0].tuned("another", 0) == 0
    finally:
        tuned.table.cache_clear()
