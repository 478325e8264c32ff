"""The user's table of tuned plans: how the planner obeys it, and what `explain` says of it and of other tables."""

from __future__ import annotations

import importlib
import json
import warnings
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from cuda_plans import anywhere
from tune_support import H200, NAME, kernels, written

import kernel_fusion as kf
from kernel_fusion.backends.cuda import explain, planner, user_table
from kernel_fusion.backends.cuda.device import KNOWN_DEVICES, Device
from kernel_fusion.backends.cuda.plan_backward import plan_backward
from kernel_fusion.backends.cuda.row_norm_plan import plan_row_norm, planned
from kernel_fusion.backends.cuda.tuned import Facts
from kernel_fusion.core.spec import RowNormSpec
from kernel_fusion_bench import trials
from kernel_fusion_bench import tune as tuning
from kernel_fusion_bench.trials import Kernel

# The module, not the function of the same name that the package exports.
bound = importlib.import_module("kernel_fusion.functional.explain")._bound
BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of this test's own."""
    monkeypatch.setenv("KERNEL_FUSION_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_rows_are_for_one_kernel() -> None:
    """Every field of a spec is a condition, by its name or in parts.

    Codes share the plan of their y, and a table is not asked for passes over pieces of rows.
    """
    named = {"dtype": "x", "dx": "grads", "dweight": "grads", "dbias": "grads"}
    conditions = {named.get(name, name) for names in user_table.CONDITIONS.values() for name in names}
    assert {field.name for field in fields(RowNormSpec)} - conditions == {"direction", "codes", "passes"}


def test_a_table_comes_back_and_counts() -> None:
    """A written table is read again and decides the plan of its kernel, before the shipped tables, and no other."""
    kernel = kernels(4096, "forward")[0]
    shipped = plan_row_norm(*kernel)
    path = written(kernel, {"parameters": 4, "bound": False})
    table = user_table.read(path, NAME)
    assert table == trials.with_rows({}, kernel, {"parameters": 4, "bound": False}, "measured") | {"backward": {}}
    plan = plan_row_norm(*kernel)
    assert plan == trials.plans([kernel], {"parameters": 4, "bound": False})[0] != shipped
    sources = {planner.source_of(kernel.spec, kernel.access, each).text() for each in (plan, shipped)}
    assert len(sources) == 2, "both would have one key in the cache"
    training = kernels(4096, "forward")[1]
    assert plan_row_norm(*training) == plan != plan_row_norm(*training[:2], KNOWN_DEVICES[90])
    others: dict[str, Any] = {"cols": 8192, "rms": False, "x": "f16", "passes": "second"}
    for other in (
        kernel._replace(device=KNOWN_DEVICES[90]),
        kernel._replace(access=anywhere(kernel.spec)),
        *(kernel._replace(spec=replace(kernel.spec, **{name: value})) for name, value in others.items()),
    ):
        assert plan_row_norm(*other) == plan_row_norm(*other[:2], KNOWN_DEVICES[90])


def test_rows_that_change_the_order_do_not_count() -> None:
    """A table whose knobs do nothing but that leaves every plan as it was, whoever wrote it."""
    kernel = kernels(768, "backward")[0]
    table = trials.with_rows({}, kernel, {"groups": 1}, "by hand")
    shipped = plan_row_norm(*kernel)
    assert planned(*kernel, table["backward"])[0] == shipped
    assert plan_backward(Facts(*kernel, table["backward"])) != shipped


def test_a_table_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many kernels are planned; where there is none it is looked for once."""
    opened = []
    known = user_table.open_private
    monkeypatch.setattr(user_table, "open_private", lambda path: opened.append(path) or known(path))
    for cols in (1024, 4096, 8192):
        plan_row_norm(*kernels(cols, "forward")[0])
    assert opened == [user_table.path_of(NAME)]


def test_tables_can_be_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    """With KERNEL_FUSION_TUNED=0 no file is opened."""
    kernel = kernels(4096, "forward")[0]
    shipped = plan_row_norm(*kernel[:2], KNOWN_DEVICES[90])
    written(kernel, {"parameters": 4})
    monkeypatch.setenv("KERNEL_FUSION_TUNED", "0")
    monkeypatch.setattr(user_table, "open_private", None)
    assert plan_row_norm(*kernel) == shipped
    monkeypatch.undo()


def broken(kernel: Kernel) -> Iterator[tuple[str, Callable[[Path], object], str]]:
    """Broken tables: a name, how to break one, and a part of the warning."""
    table = trials.with_rows({}, kernel, {"parameters": 4}, "")
    good = json.loads(json.dumps({"device": NAME, **table, "backward": {}}))
    conditions = good["forward"]["parameters"][0][1]

    def with_forward(knobs: Any) -> Callable[[Path], object]:
        return lambda path: path.write_text(json.dumps(good | {"forward": knobs}))

    yield "torn", lambda path: path.write_text(path.read_text()[:-20]), "Expecting"
    yield "not text", lambda path: path.write_bytes(b"\xff\xfe\x00"), ""
    yield "a list", lambda path: path.write_text("[]"), "not a table that"
    yield "deep", lambda path: path.write_text("[" * 100_000), ""
    yield "another device", lambda path: path.write_text(json.dumps(good | {"device": "NVIDIA A100"})), "NVIDIA A100"
    yield "no knobs", with_forward(None), "not a table that"
    yield "an unknown knob", with_forward({"thread_bytes": [[32, conditions, ""]]}), "not a table that"
    yield "an unknown value", with_forward({"parameters": [[5, conditions, ""]]}), "no such row"
    yield "a list of knobs", with_forward([1]), "not a table that"
    yield "rows that are none", with_forward({"parameters": 4}), "not a table that"
    yield "a fraction for a number", with_forward({"parameters": [[4.0, conditions, ""]]}), "no such row"
    yield "a flag for a number", with_forward({"helpers": [[True, conditions, ""]]}), "no such row"
    yield "a number for a flag", with_forward({"parameters": [[4, conditions | {"rms": 1}, ""]]}), "no such row"
    yield "a flag for a length", with_forward({"parameters": [[4, conditions | {"cols": True}, ""]]}), "no such row"
    yield "no conditions", with_forward({"parameters": [[4, {}, ""]]}), "no such row"
    yield "a strange condition", with_forward({"parameters": [[4, conditions | {"cols": [1]}, ""]]}), "no such row"
    yield "no evidence", with_forward({"parameters": [[4, conditions]]}), "unpack"
    yield "others may write", lambda path: path.chmod(0o666), "not a file of this user alone"
    yield "a link", lambda path: (path.rename(path.parent / "x"), path.symlink_to(path.parent / "x")), ""


@pytest.mark.parametrize("name", [name for name, *_ in broken(kernels(4096, "forward")[0])])
def test_a_broken_table_is_ignored(name: str) -> None:
    """With one warning that names it, and the shipped plans."""
    kernel = kernels(4096, "forward")[0]
    path = written(kernel, {"parameters": 4})
    breaking, words = next(rest for each, *rest in broken(kernel) if each == name)
    breaking(path)
    with pytest.warns(UserWarning, match=f"ignores the table of tuned plans {path}: .*{words}"):
        plan = plan_row_norm(*kernel)
    assert plan == plan_row_norm(*kernel[:2], KNOWN_DEVICES[90])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plan_row_norm(*kernel)


def call(verb: str, **options: Any) -> dict[str, Any]:
    """The complete arguments of a norm of 4096 columns, by name."""
    x = torch.ones(2, 4096, dtype=BF16)
    given = {"input": x, "normalized_shape": 4096, "weight": x[0]} | ({"residual": x} if "add" in verb else {})
    arguments: dict[str, Any] = bound(getattr(kf, verb), (), given | options)[1]
    return arguments


@pytest.mark.parametrize("verb", tuning.VERBS)
@pytest.mark.parametrize("stages", [{}, {"activation": "gelu"}, {"pre_activation": "relu"}], ids=str)
def test_explain_has_a_plan_for_every_norm(verb: str, stages: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A line per direction, with the results file of each table row that decided something."""
    monkeypatch.setattr(Device, "of", lambda index: H200)
    lines = explain.plan_lines(verb, call(verb, **stages))
    assert [line.partition(":")[0] for line in lines] == ["forward", "backward"]
    assert all("; by the rule" in line for line in lines)
    assert "nvidia-h200/" in "".join(lines)


def test_explain_names_the_users_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the value that it set and its evidence."""
    monkeypatch.setattr(Device, "of", lambda index: H200)
    _, training = kernels(4096, "forward")
    path = written(training, {"parameters": 4}, "twice as fast")
    forward, backward = explain.plan_lines("rms_norm", call("rms_norm"))
    assert f"parameters = 4 ({path}: twice as fast)" in forward
    assert str(path) not in backward


def test_explain_takes_the_stages_of_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Residual, dropout, offset and bias are those of the kernels that the call launches."""
    monkeypatch.setattr(Device, "of", lambda index: H200)
    asked: list[RowNormSpec] = []
    known = explain.planned

    def noted(spec: RowNormSpec, *rest: Any) -> Any:
        asked.append(spec)
        return known(spec, *rest)

    monkeypatch.setattr(explain, "planned", noted)
    x = torch.ones(2, 4096)
    explain.plan_lines("add_rms_norm", call("add_rms_norm", residual=x, dropout_p=0.5, bias=x[0], weight_offset=1.0))
    forward, backward = asked
    assert (forward.residual, forward.bias, forward.offset, forward.dropout) == ("f32", "f32", True, True)
    assert (backward.dh, backward.dresidual, backward.grads) == (True, True, (True, True, True))
    explain.plan_lines("add_rms_norm", call("add_rms_norm", dropout_p=0.5, training=False, weight=None))
    assert not asked[2].dropout
    assert asked[3].grads == (True, False, False)
    assert not asked[3].dresidual, "one tensor is the gradient of both"
