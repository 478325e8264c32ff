"""`kernel-fusion tune`: what it tries, what it takes, and what it writes."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cuda_plans import assert_sound
from tune_support import H200, NAME, kernels, written
from typer.testing import CliRunner

import kernel_fusion as kf
from kernel_fusion.backends.cuda import planner, user_table
from kernel_fusion.backends.cuda.device import KNOWN_DEVICES, Device
from kernel_fusion.backends.cuda.plan import Plan
from kernel_fusion.backends.cuda.plan_backward import plan_backward
from kernel_fusion.backends.cuda.plan_forward import plan_forward
from kernel_fusion.backends.cuda.row_norm_plan import plan_row_norm
from kernel_fusion.backends.cuda.tuned import Facts
from kernel_fusion.cli.app import app
from kernel_fusion.core.spec import RowNormSpec
from kernel_fusion.operators.dispatch import unavailable_reason
from kernel_fusion_bench import trials
from kernel_fusion_bench import tune as tuning
from kernel_fusion_bench.timing import FULL, Effort, Timing
from kernel_fusion_bench.trials import Choice, Kernel
from kernel_fusion_bench.tune import Cell, Outcome, Times

# The modules, not the commands of the same names that the package exports.
info = importlib.import_module("kernel_fusion.cli.info")
command = importlib.import_module("kernel_fusion_bench.commands.tune")
BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of this test's own."""
    monkeypatch.setenv("KERNEL_FUSION_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.mark.slow
@pytest.mark.parametrize("direction", tuning.DIRECTIONS)
@pytest.mark.parametrize("cols", [255, 4096, 32768, 50257])
def test_trials_compile(cols: int, direction: str) -> None:
    """For sm_90; what spills is dropped where it would run."""
    for kernel in kernels(cols, direction):
        for choice in trials.neighbours([kernel], {}):
            (plan,) = trials.plans([kernel], choice)
            code, _ = planner.compiler.compile_source(planner.source_of(kernel.spec, kernel.access, plan).text(), 90)
            assert code.startswith(b"\x7fELF")


# Grid rationale. Tiled rows (255), one warp, several, a block, those that share one in backward (768), clusters in
# vectors and in single elements (50257); bare and with a residual; an architecture with a table, and one without
# clusters.
_GRID = list(product((64, 255, 768, 1024, 4096, 12288, 32768, 50257), ("forward", "backward"), (False, True)))


@pytest.mark.parametrize("arch", [80, 90])
@pytest.mark.parametrize(("cols", "direction", "rms"), _GRID)
def test_trials_are_sound_and_keep_the_order(cols: int, direction: str, rms: bool, arch: int) -> None:
    """Two steps from the present plan: plans of their own that the kernels can run, with the present order of sums."""
    for stages in ({}, {"residual": "bf16"}):
        asked = kernels(cols, direction, rms, device=KNOWN_DEVICES[arch], **stages)
        present = trials.plans(asked, {})
        assert present == tuple(plan_row_norm(*kernel) for kernel in asked)
        first = list(trials.neighbours(asked, {}))
        assert first or present[0].kernel == "row_norm_fwd_tile"  # no knob changes its plan
        assert len({present, *(trials.plans(asked, choice) for choice in first)}) == 1 + len(first)
        second = [choice for step in (*first[:1], *first[-1:]) for choice in trials.neighbours(asked, step)]
        for choice in (*first, *second):
            for (spec, access, device), plan, own in zip(asked, trials.plans(asked, choice), present, strict=True):
                assert plan.order(spec) == own.order(spec)
                assert_sound(spec, access, plan, device)


@pytest.mark.parametrize(
    ("cols", "direction", "knob", "values"),
    [
        (4096, "forward", "thread_bytes", (64, 128)),
        (12288, "forward", "twice", (True,)),
        (12288, "forward", "elements", (32,)),
        (768, "backward", "groups", (1, 2, 8)),
        (4099, "backward", "singles", (5, 9)),
    ],
)
def test_another_order_is_no_trial(
    cols: int, direction: str, knob: str, values: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Values that would change the order of a sum leave the plan as it is, though rules would follow them."""
    monkeypatch.setattr(user_table, "KNOBS", user_table.KNOBS)
    monkeypatch.setitem(user_table.KNOBS, direction, {knob: values})
    asked = kernels(cols, direction)
    rule: Callable[[Facts], Plan] = plan_backward if direction == "backward" else plan_forward
    present = plan_row_norm(*asked[0])
    followed = [rule(Facts(*asked[0], {knob: [(value, {}, "")]})) for value in values]
    assert any(plan.order(asked[0].spec) != present.order(asked[0].spec) for plan in followed)
    assert all(
        trials.plans(asked, {knob: value})[0].order(asked[0].spec) == present.order(asked[0].spec) for value in values
    )


def timing(ms: float, spread: float = 0.001) -> Timing:
    """A time with quartiles so far from the median, as a share of it."""
    return Timing(ms, ms * (1 - spread), ms * (1 + spread), 11, 1)


class Clock:
    """Stands for a GPU: the product of what each value of a choice is worth, at two numbers of rows."""

    def __init__(self, worth: dict[tuple[str, Any], Any], spread: float = 0.001) -> None:
        self.worth, self.spread = worth, spread
        self.asked: list[Choice] = []

    def __call__(self, choices: Sequence[Choice], effort: Effort) -> list[Times]:
        """The times of all of them."""
        assert choices[0] == {}, "the present plan is measured beside every trial"
        self.asked += choices
        return [self.times(choice, effort) for choice in choices]

    def times(self, choice: Choice, effort: Effort) -> Times:
        """The times of one choice; for the value None it does not fit."""
        few = many = 0.1
        for each in choice.items():
            worth = self.worth.get(each, 1.0)
            if worth is None:
                return []
            worth = worth[effort is FULL] if isinstance(worth, list) else worth
            of_few, of_many = worth if isinstance(worth, tuple) else (worth, worth)
            few, many = few * of_few, many * of_many
        return [timing(few, self.spread), timing(many, self.spread)]


@pytest.mark.parametrize(
    ("worth", "spread", "best"),
    [
        ({}, 0.001, {}),
        ({("parameters", 4): 0.9}, 0.001, {"parameters": 4}),
        ({("parameters", 4): 0.9, ("bound", True): 0.95}, 0.001, {"parameters": 4, "bound": True}),
        ({("parameters", 4): 0.9, ("parameters", 32): 0.8}, 0.001, {"parameters": 32}),
        ({("parameters", 4): None, ("bound", True): 0.95}, 0.001, {"bound": True}),
        ({("parameters", 4): 0.985}, 0.001, {}),
        ({("parameters", 4): 0.95}, 0.1, {}),
        ({("parameters", 4): (0.8, 1.05)}, 0.001, {}),
        ({("parameters", 4): (0.9, 1.0)}, 0.001, {"parameters": 4}),
        ({("parameters", 4): [0.9, 0.99]}, 0.001, {}),
    ],
    ids=[
        "nothing",
        "one",
        "two",
        "better of two",
        "one that fails",
        "small",
        "noise",
        "slower elsewhere",
        "equal",
        "luck",
    ],
)
def test_what_is_taken(worth: dict[tuple[str, Any], Any], spread: float, best: Choice) -> None:
    """A plan is taken if it is 2 % faster, beyond noise, nowhere slower, and so again when measured for longer."""
    clock = Clock(worth, spread)
    choice, present, times, count = tuning.climb(kernels(4096, "forward", rms=False), clock)
    assert choice == best
    assert [each.median_ms for each in present] == pytest.approx([0.1, 0.1])
    assert times == (clock.times(best, FULL) if best else present)
    assert (
        count == len([each for each in clock.asked if each]) - sum(each == best for each in clock.asked[-1:]) or count
    )


class FakeGPU:
    """Runs the plans of one kernel: those in `worth` in that share of the time, all else as its attributes say."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, kernel: Kernel, worth: dict[Plan, float]) -> None:
        self.kernel, self.worth = kernel, worth
        self.bits: dict[Plan, float] = {}
        self.local_bytes: dict[Plan, int] = {}
        self.blocks: dict[Plan, int] = {}
        self.refuses: set[Plan] = set()
        self.timed: list[Plan] = []
        monkeypatch.setattr(Device, "of", lambda index: H200)
        monkeypatch.setattr(tuning, "_MANY_ELEMENTS", 2**15)
        monkeypatch.setattr(tuning.timing, "rotating_calls", lambda num_bytes: 2)
        monkeypatch.setattr(tuning.compiler, "cubin", lambda source, arch: source.encode())
        monkeypatch.setattr(tuning.loaded, "Kernel", self.load)
        monkeypatch.setattr(tuning.providers, "ours", lambda backend: self)
        monkeypatch.setattr(tuning.timing, "time_cuda", self.time)

    def planned(self) -> Plan:
        """The launcher's plan at a first use."""
        plan: Plan = planner.plan_for(*self.kernel)
        return plan

    def load(self, plan: Plan, name: str, code: bytes, index: int) -> Any:
        """A loaded kernel."""
        assert f"{plan.kernel}.cuh" in code.decode()
        if plan in self.refuses:
            raise RuntimeError("too many resources requested")
        return SimpleNamespace(max_blocks=self.blocks.get(plan, 132), local_bytes=self.local_bytes.get(plan, 0))

    def prepare(self, direction: str, workload: Any, inputs: Any) -> Callable[[], torch.Tensor]:
        """A call, with results that are its plan's."""
        result = torch.tensor(self.bits.get(self.planned(), 1.0))
        return lambda: result

    def time(self, contenders: dict[str, Callable[[], Any]], effort: Effort, device: torch.device) -> dict[str, Any]:
        """The time of each, by the plan that holds while it is prepared."""
        outcomes: dict[str, Any] = {}
        for name, make in contenders.items():
            try:
                assert len(make()) == 2
            except ValueError as error:
                outcomes[name] = str(error)
                continue
            self.timed.append(self.planned())
            outcomes[name] = timing(0.1 * self.worth.get(self.timed[-1], 1.0))
        return outcomes


@pytest.mark.parametrize("direction", tuning.DIRECTIONS)
def test_a_cell_from_end_to_end(direction: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fastest plan that fits, keeps the bits and sums by as many blocks as the present one; the others are out."""
    asked = kernels(4096, direction)
    choices = list(trials.neighbours(asked, {}))
    slow, fast, other_bits, spills, more_blocks = (trials.plans(asked, choice)[0] for choice in choices[:5])
    speeds = {slow: 0.97, fast: 0.9, other_bits: 0.5, spills: 0.4, more_blocks: 0.3 if direction == "backward" else 1.0}
    gpu = FakeGPU(monkeypatch, asked[0], speeds)
    gpu.bits, gpu.local_bytes, gpu.blocks = {other_bits: 1.5}, {spills: 8}, {more_blocks: 264}
    outcome = tuning.tune(Cell("rms_norm", direction, 4096, BF16), torch.device("cpu", 0))
    assert outcome.kernel == asked[0]
    assert outcome.choice == choices[1]
    assert outcome.rows == (8, 2048)
    assert outcome.ratio == pytest.approx(0.9)
    assert not {other_bits, spills} & {*gpu.timed}
    assert (more_blocks in gpu.timed) == (direction == "forward")
    assert outcome.evidence("here") == ("here: 8 rows 90.00 of 100.00 µs, 2048 rows 90.00 of 100.00 µs; ratio 0.900")


def test_a_plan_that_cannot_run_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """A failing trial is left out; the present plan must run."""
    asked = kernels(12288, "backward")
    present, refused = trials.plans(asked, {})[0], trials.plans(asked, next(trials.neighbours(asked, {})))[0]
    gpu = FakeGPU(monkeypatch, asked[0], {refused: 0.5})
    gpu.refuses = {refused}
    cell = Cell("rms_norm", "backward", 12288, BF16)
    assert tuning.tune(cell, torch.device("cpu", 0)).choice == {}
    gpu.refuses = {present}
    with pytest.raises(RuntimeError, match="too many resources"):
        tuning.tune(cell, torch.device("cpu", 0))
    gpu.refuses, known = set(), tuning.timing.time_cuda

    def failing(contenders: Any, effort: Effort, device: torch.device) -> dict[str, Any]:
        return known(contenders, effort, device) | {"0": "OutOfMemoryError: no memory"}

    monkeypatch.setattr(tuning.timing, "time_cuda", failing)
    with pytest.raises(RuntimeError, match="cannot be timed: OutOfMemoryError"):
        tuning.tune(cell, torch.device("cpu", 0))


def test_cells() -> None:
    """Without lengths those of the models; a model's number of rows, and one that fills a device."""
    every = tuning.cells(tuning.VERBS, tuning.DIRECTIONS, None, BF16)
    assert len(every) == 4 * 2 * 10
    sizes = [each.num_rows for each in Cell("add_rms_norm", "backward", 4096, BF16).workloads()]
    assert sizes == [2048, 8192]
    assert [each.verb for each in Cell("add_layer_norm", "forward", 96, BF16).workloads()] == ["add_layer_norm"]


def test_tuning_again_replaces_the_rows_of_a_kernel() -> None:
    """Rows of other kernels stay."""
    one, two = (kernels(cols, "backward")[0] for cols in (4096, 8192))
    table = trials.with_rows({}, one, {"slots": 2, "keeps_pace": False}, "a")
    table = trials.with_rows(table, two, {"slots": 3}, "b")
    table = trials.with_rows(table, one, {"slots": 3}, "c")
    assert [(row[0], row[2]) for row in table["backward"]["slots"]] == [(3, "b"), (3, "c")]
    assert table["backward"]["keeps_pace"] == []
    assert trials.with_rows(table, one, {}, "d")["backward"]["slots"] == table["backward"]["slots"][:1]


def run(*arguments: str) -> Any:
    """Run the command line in this process."""
    return CliRunner().invoke(app, list(arguments))


@pytest.mark.skipif(unavailable_reason("cuda") is None, reason="there is a GPU")
def test_without_a_gpu() -> None:
    """One sentence, and exit code 1."""
    result = run("tune", "--hidden", "4096")
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith("tune: it measures CUDA kernels, which cannot run here: ")
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    "arguments",
    [("--hidden", "big"), ("--hidden", "0"), ("--verbs", "softmax"), ("--directions", "up"), ("--dtypes", "int8")],
    ids=" ".join,
)
def test_arguments_that_make_no_sense(arguments: tuple[str, ...]) -> None:
    """Exit code 2, before anything is measured; the message has what came."""
    result = run("tune", *arguments)
    assert result.exit_code == 2
    assert arguments[1] in result.stderr


@pytest.fixture
def fake_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that is an H200 as far as names go, on which one plan of N = 4096 is faster."""
    monkeypatch.setattr(command, "unavailable_reason", lambda backend: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: NAME)
    monkeypatch.setattr(Device, "of", lambda index: H200)

    def tune(cell: Cell, device: torch.device) -> Outcome:
        if cell.cols == 1:
            raise torch.cuda.OutOfMemoryError("no memory")
        if cell.cols == 2:
            raise KeyboardInterrupt
        best = 0.009 if cell.cols == 4096 else 0.01
        choice = {"parameters": 4} if cell.cols == 4096 else {}
        return Outcome(kernels(cell.cols, cell.direction)[0], (2048,), [timing(0.01)], [timing(best)], choice, 7)

    monkeypatch.setattr(tuning, "tune", tune)


@pytest.mark.usefixtures("fake_gpu")
def test_the_command_writes_a_table(tmp_path: Path) -> None:
    """To the cache folder, where a later run adds to it, or to a file; the evidence is in each row."""
    result = run("tune", "--hidden", "4096,8192", "--verbs", "rms_norm", "--directions", "forward")
    assert result.exit_code == 0, result.output
    path = user_table.path_of(NAME)
    assert path.name == "nvidia-h200.json"
    assert "10.00" in result.stdout
    assert "9.00" in result.stdout
    assert "0.900" in result.stdout
    assert "parameters = 4" in result.stdout
    assert f"1 of 2 are faster by other plans: {path}" in result.stdout
    ((value, conditions, shown),) = user_table.read(path, NAME)["forward"]["parameters"]
    assert (value, conditions["cols"]) == (4, 4096)
    assert shown.startswith(f"{NAME}, kernel_fusion {kf.__version__}, torch {torch.__version__}")
    assert shown.endswith("2048 rows 9.00 of 10.00 µs; ratio 0.900")
    assert run("tune", "--hidden", "8192", "--directions", "forward").exit_code == 0
    assert user_table.read(path, NAME)["forward"]["parameters"]
    file = tmp_path / "new" / "table.json"
    assert run("tune", "--hidden", "4096", "--directions", "forward", "--output", str(file)).exit_code == 0
    assert json.loads(file.read_text())["device"] == NAME


@pytest.mark.usefixtures("fake_gpu")
def test_what_is_measured_is_kept() -> None:
    """One cell fails, which the exit code tells; or Ctrl-C ends the command."""
    result = run("tune", "--hidden", "4096,1,2", "--verbs", "rms_norm", "--directions", "forward")
    assert result.exit_code == 130
    assert "not tuned: rms_norm forward, N = 1, bf16: OutOfMemoryError: no memory" in result.stdout
    assert user_table.read(user_table.path_of(NAME), NAME)["forward"]["parameters"]
    assert run("tune", "--hidden", "1", "--verbs", "rms_norm").exit_code == 1


@pytest.mark.usefixtures("fake_gpu")
def test_info_says_what_plans_follow(monkeypatch: pytest.MonkeyPatch) -> None:
    """The shipped tables; the user's, how many rows it has, and why it is ignored."""
    path = user_table.path_of(NAME)
    assert info._plans() == {"cuda:0": f"the rule, sm_90.json and any.json; `kernel-fusion tune` would write {path}"}
    written(kernels(4096, "forward")[0], {"parameters": 4, "bound": False})
    assert info._plans()["cuda:0"].endswith(f"any.json; before these, 2 rows of {path}")
    path.write_text("[]")
    assert f"{path} is ignored: it is not a table" in info._plans()["cuda:0"]
    monkeypatch.setenv("KERNEL_FUSION_TUNED", "off")
    assert info._plans()["cuda:0"].endswith(f"KERNEL_FUSION_TUNED has {path} ignored")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert str(path.parent) in info._plans()["cuda"]


# Grid rationale. Few trials of quick kernels, and the many of rows that stream.
@pytest.mark.cuda
@pytest.mark.slow
@pytest.mark.parametrize("cols", [255, 1024])
def test_tuned_plans_have_the_same_bits(cols: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One small norm from end to end; then each trial of it, kept in a table: its plan is used, and no bit differs."""
    knobs = {"forward": ("ahead", "bound", "parameters"), "backward": ("threads", "slots")}
    fewer = {part: {knob: user_table.KNOBS[part][knob] for knob in knobs[part]} for part in knobs}
    monkeypatch.setattr(trials, "KNOBS", fewer)  # the rest would take minutes to compile
    result = run("tune", "--hidden", str(cols), "--verbs", "rms_norm")
    assert result.exit_code == 0, result.output
    x, dy = torch.randn(2, 999, cols, device="cuda", dtype=BF16)
    weight = torch.randn(cols, device="cuda", dtype=BF16, requires_grad=True)
    x.requires_grad_()

    def results() -> list[torch.Tensor]:
        y = kf.rms_norm(x, cols, weight, backend="cuda")
        with torch.no_grad():
            alone = kf.rms_norm(x, cols, weight, backend="cuda")
        return [alone, y.detach(), *torch.autograd.grad(y, (x, weight), dy)]

    index = torch.cuda.current_device()
    by_tune = results()
    monkeypatch.setenv("KERNEL_FUSION_TUNED", "0")
    planner.forget_kernels()
    shipped = results()
    monkeypatch.delenv("KERNEL_FUSION_TUNED")
    assert all(map(torch.equal, by_tune, shipped))
    name = torch.cuda.get_device_name(index)
    for direction in tuning.DIRECTIONS:
        asked = kernels(cols, direction, device=Device.of(index))
        fits = tuning._Fits(asked, index)
        choices = [{}, *trials.neighbours(asked, {})]
        for position in fits.among(choices)[1:]:
            choice = choices[position]
            table = trials.with_rows({}, asked[0], choice, "a trial")
            trials.write(user_table.path_of(name), name, table)
            seen: list[tuple[RowNormSpec, Plan]] = []
            with trials.override_plan(lambda spec, plan, seen=seen: seen.append((spec, plan)) or plan):
                assert all(map(torch.equal, results(), shipped)), choice
            used = [plan for spec, plan in seen if spec.direction == asked[0].spec.direction]
            assert used == [trials.plans(asked, choice)[0]], f"{choice} did not count"
