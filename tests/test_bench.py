"""The benchmark harness: what it times, what it refuses to time, and what it writes."""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from kernel_fusion.bench import memory, plot, providers, runner, timing
from kernel_fusion.bench.results import Results
from kernel_fusion.bench.suites import MODELS, Workload
from kernel_fusion.bench.timing import Effort
from kernel_fusion.cli import app
from kernel_fusion.native import loader
from kernel_fusion.testing.oracle import Inputs, RowNormCase

CPU = torch.device("cpu")
FP32 = torch.float32
CASE = RowNormCase("layer_norm", (48, 96), FP32, weight=FP32, bias=FP32)
EFFORT = Effort(min_rounds=2, max_rounds=2, max_seconds=0.0, replays=2, max_checked=1 << 20)
# What a result file promises for every measurement; `compare` and the documentation rely on these names.
KEYS = {
    *("configuration", "verb", "rows", "cols", "dtype", "weight_dtype", "bias_dtype", "layout", "direction"),
    *("provider", "provider_version", "median_ms", "q1_ms", "q3_ms", "iterations", "calls_per_iteration"),
    *("speedup_over_pytorch", "percent_of_floor", "training_memory_bytes"),
    *(f"max_abs_error_{name}" for name in ("y", "dx", "dweight", "dbias")),
    *(f"error_over_budget_{name}" for name in ("y", "dx", "dweight", "dbias")),
}


class Clock:
    """A clock that stands still but for the calls that it is told to charge for."""

    def __init__(self) -> None:
        self.now = 0.0
        self.order: list[str] = []

    def __call__(self) -> float:
        """The time in seconds."""
        return self.now

    def work(self, name: str, *seconds: float) -> Callable[[], None]:
        """A call that takes `seconds` in turn, beginning anew at the end."""
        count = 0

        def call() -> None:
            nonlocal count
            self.now += seconds[count % len(seconds)]
            count += 1
            self.order.append(name)

        return call


def effort(**changes: Any) -> Effort:
    """Plenty of rounds and time, but for `changes`."""
    return replace(Effort(min_rounds=1, max_rounds=100, max_seconds=1e9, replays=1, max_checked=1), **changes)


def wrong_provider(backend: str) -> providers.Provider:
    """PyTorch's numbers, one of them wrong by a thousandth, in our name."""

    def forward(case: RowNormCase, inputs: Inputs) -> Tensor:
        scale = torch.ones(case.shape[-1])
        scale[3] = 1.001
        return providers.pytorch().forward(case, inputs) * scale

    return providers.Provider(f"kf-{backend}", "0", forward)


def bench(*arguments: str) -> Any:
    """Run `bench models --quick` on the CPU with small shapes."""
    return CliRunner().invoke(app, ["bench", "models", "--quick", "--device", "cpu", *arguments])


def read(folder: Path) -> dict[str, Any]:
    """The JSON file of a quick run."""
    return json.loads((folder / "models-quick.json").read_text())


def test_median_and_quartiles_of_known_samples() -> None:
    """The summary of 1, 2, 3, 4, 5 ms."""
    assert timing.summarise([5.0, 1.0, 3.0, 2.0, 4.0], 7) == timing.Timing(3.0, 2.0, 4.0, 5, 7)
    assert timing.summarise([2.5], 1) == timing.Timing(2.5, 2.5, 2.5, 1, 1)


def test_cpu_times_are_those_of_the_calls() -> None:
    """Each contender gets its own times, in ms, and the warm-up call is not among them."""
    clock = Clock()
    calls = {"slow": clock.work("slow", 99.0, 0.2), "fast": clock.work("fast", 0.001)}
    timings = timing.time_cpu(calls, effort(max_rounds=1), clock)
    assert timings["slow"].median_ms == pytest.approx(200)
    assert timings["fast"].median_ms == pytest.approx(1)


def test_cpu_contenders_take_turns_at_being_first() -> None:
    """No contender always runs after the same other one, whose data may still be in the cache."""
    clock = Clock()
    timing.time_cpu({name: clock.work(name, 1.0) for name in "abc"}, effort(max_rounds=3), clock)
    assert "".join(clock.order) == "abc" + "abc" + "bca" + "cab"


@pytest.mark.parametrize(("min_rounds", "max_seconds", "rounds"), [(2, 0.0, 2), (1, 4.5, 5), (1, 1e9, 10)])
def test_cpu_time_cap(min_rounds: int, max_seconds: float, rounds: int) -> None:
    """At least `min_rounds`, then until the time is up, and never more than `max_rounds`."""
    clock = Clock()
    limits = effort(min_rounds=min_rounds, max_rounds=10, max_seconds=max_seconds)
    assert timing.time_cpu({"a": clock.work("a", 1.0)}, limits, clock)["a"].iterations == rounds


@pytest.mark.parametrize("num_bytes", [100_000, 10_000_000, 10_000_000_000])
def test_rotation_touches_more_than_the_cache(num_bytes: int) -> None:
    """The inputs of one graph exceed 300 MB, in at least eight calls."""
    calls = timing.rotating_calls(num_bytes)
    assert calls >= 8
    assert calls * num_bytes >= 300_000_000


def test_models_suite_is_the_published_table() -> None:
    """Eleven configurations, by rows and hidden size, in every dtype asked for."""
    workloads = MODELS.workloads([torch.bfloat16, FP32])
    assert len(workloads) == 22
    sizes = {w.name: (w.case.shape[0] * w.case.shape[1], w.case.shape[2]) for w in workloads}
    assert sizes["BERT-Base"] == (16384, 768)
    assert sizes["GPT-3 XXL"] == (1024, 8192)
    assert sizes["GPT-3 175B"] == (512, 12288)
    assert {(w.case.dtype, w.case.weight, w.case.bias) for w in workloads} == {(d,) * 3 for d in (torch.bfloat16, FP32)}


def test_prepared_calls_do_what_their_direction_says() -> None:
    """Forward builds no graph; backward and forward+backward return the same gradients, time after time."""
    (inputs,) = providers.input_sets(CASE, CPU, 1)
    provider = providers.pytorch()
    y = provider.prepare("forward", CASE, inputs)()
    assert isinstance(y, Tensor)
    assert not y.requires_grad
    backward, both = (provider.prepare(direction, CASE, inputs) for direction in ("backward", "forward+backward"))
    expected = provider.results(CASE, inputs)
    for _ in range(2):
        torch.testing.assert_close(backward(), tuple(expected[name] for name in ("dx", "dweight", "dbias")))
        torch.testing.assert_close(both(), tuple(expected.values()))


def test_floor_moves_the_unavoidable_bytes() -> None:
    """One read and one write forward, two reads and one write backward, on contiguous tensors."""
    (inputs,) = providers.input_sets(CASE, CPU, 1)
    x = inputs.x.detach()
    torch.testing.assert_close(providers.Floor().prepare("forward", CASE, inputs)(), -x)
    torch.testing.assert_close(providers.Floor().prepare("backward", CASE, inputs)(), x + inputs.dy)
    torch.testing.assert_close(providers.Floor().prepare("forward+backward", CASE, inputs)(), (-x, x + inputs.dy))


def test_input_sets_do_not_share_memory() -> None:
    """Rotation is over different x and dy; the parameters are one pair, as in a model."""
    sets = providers.input_sets(CASE, CPU, 3)
    assert len({t.data_ptr() for s in sets for t in (s.x, s.dy)}) == 6
    assert len({id(s.weight) for s in sets}) == 1


def test_cpu_training_memory_of_pytorch() -> None:
    """y, dx, the two sums, mean and rstd; the saved input is not counted."""
    (inputs,) = providers.input_sets(CASE, CPU, 1)
    rows, cols = CASE.shape
    expected = 4 * (2 * rows * cols + 2 * cols + 2 * rows)
    assert memory.training_bytes(providers.pytorch(), CASE, inputs) == expected
    assert memory.training_bytes(providers.ours("eager"), CASE, inputs) > expected


def test_check_judges_every_result_of_ours() -> None:
    """A right provider gets its comparisons, and the kernel ran."""
    assert loader.load(), loader.error()
    before = loader.launches("cpu_backward")
    comparisons = runner.check(CASE, [providers.ours("cpu")], CPU)["kf-cpu"]
    assert not isinstance(comparisons, str)
    assert [c.name for c in comparisons] == ["y", "dx", "dweight", "dbias"]
    assert loader.launches("cpu_backward") > before


def test_check_refuses_results_without_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Right numbers that no kernel of the named backend computed are not timed in its name."""
    assert loader.load(), loader.error()
    monkeypatch.setattr(loader, "launches", lambda counter: 0)
    assert "no kernel of backend 'cpu' ran" in runner.check(CASE, [providers.ours("cpu")], CPU)["kf-cpu"]


def test_a_wrong_provider_is_not_timed() -> None:
    """It becomes a failure that says what is wrong; PyTorch and the floor are still measured."""
    results = Results(MODELS, CPU, "", True, {})
    contenders = [providers.pytorch(), wrong_provider("cpu")]
    assert len(list(runner.measure(Workload("a", CASE), contenders, CPU, EFFORT, results))) == runner.STEPS
    (failure,) = results.failures
    assert failure.provider == "kf-cpu"
    assert "y is " in failure.reason
    assert {m.provider for m in results.measurements} == {"floor", "pytorch"}


def test_only_so_many_rows_are_checked() -> None:
    """A quick run compares the first rows of a large case, never fewer than one."""
    assert runner.limited(CASE, 96 * 10).shape == (10, 96)
    assert runner.limited(CASE, 5).shape == (1, 96)
    assert runner.limited(CASE, 48 * 96) == CASE


def test_bench_writes_all_its_files(tmp_path: Path) -> None:
    """JSON with every promised key, CSV with the same records, Markdown tables, and the command that does it again."""
    assert loader.load(), loader.error()
    arguments = ["--backends", "cpu,eager", "--dtypes", "fp32,bf16", "--shape", "64x96", "--shape", "32x255"]
    result = bench(*arguments, "--output-dir", str(tmp_path))
    assert result.exit_code == 0, result.output
    data = read(tmp_path)
    assert data["command"] == (
        "kernel-fusion bench models --quick --device cpu --dtypes f32,bf16 --backends cpu,eager "
        "--shape 64x96 --shape 32x255"
    )
    assert {"cpu", "torch_threads", "os", "load_average_at_start"} <= data["machine"].keys()
    assert {"kernel_fusion", "torch", "python"} <= data["versions"].keys()
    assert {"time", "floor", "training_memory", "errors"} <= data["method"].keys()
    assert not data["interrupted"]
    # shapes × dtypes × directions × (floor, PyTorch and two of ours)
    assert len(data["measurements"]) == 2 * 2 * 3 * 4
    assert all(record.keys() == KEYS for record in data["measurements"])
    with (tmp_path / "models-quick.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [float(row["median_ms"]) for row in rows] == [record["median_ms"] for record in data["measurements"]]
    markdown = (tmp_path / "models-quick.md").read_text()
    assert "| 64x96 | 64×96 |" in markdown
    assert data["command"] in markdown
    assert {path.name for path in tmp_path.glob("*.png")} == {"models-quick-f32.png", "models-quick-bf16.png"}


def test_derived_values_follow_from_the_medians(tmp_path: Path) -> None:
    """Speedup and share of the floor are ratios of medians of one cell; errors and memory stand with their provider."""
    assert loader.load(), loader.error()
    assert bench("--shape", "64x96", "--output-dir", str(tmp_path)).exit_code == 0
    cell = {r["provider"]: r for r in read(tmp_path)["measurements"] if r["direction"] == "backward"}
    ours = cell["kf-cpu"]
    assert ours["speedup_over_pytorch"] == pytest.approx(cell["pytorch"]["median_ms"] / ours["median_ms"])
    assert ours["percent_of_floor"] == pytest.approx(100 * cell["floor"]["median_ms"] / ours["median_ms"])
    assert ours["q1_ms"] <= ours["median_ms"] <= ours["q3_ms"]
    assert ours["training_memory_bytes"] > 2 * 4 * 64 * 96
    assert 0 < ours["max_abs_error_dx"] < 1e-4
    assert ours["error_over_budget_dx"] <= 1
    assert cell["floor"]["max_abs_error_y"] is None


def test_interrupt_keeps_what_was_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C in the third direction: the files hold the first two and say so; the exit code is a shell's 130."""
    timed = []

    def interrupted(*arguments: Any) -> Any:
        timed.append(arguments[1])
        if len(timed) == 3:
            raise KeyboardInterrupt
        return time_direction(*arguments)

    time_direction = runner.time_direction
    monkeypatch.setattr(runner, "time_direction", interrupted)
    result = bench("--backends", "eager", "--shape", "8x16", "--output-dir", str(tmp_path))
    assert result.exit_code == 130
    assert "Interrupted" in result.output
    data = read(tmp_path)
    assert data["interrupted"]
    assert [r["direction"] for r in data["measurements"] if r["provider"] == "kf-eager"] == ["forward", "backward"]
    assert (tmp_path / "models-quick-f32.png").exists()


def test_wrong_results_fail_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The table is still written, without the wrong provider, and the exit code is not zero."""
    monkeypatch.setattr(providers, "ours", wrong_provider)
    result = bench("--backends", "eager", "--shape", "64x96", "--output-dir", str(tmp_path))
    assert result.exit_code == 1
    assert "NOT TIMED: kf-eager, 64x96" in result.output
    data = read(tmp_path)
    assert len(data["failures"]) == 1
    assert {r["provider"] for r in data["measurements"]} == {"floor", "pytorch"}


def test_without_matplotlib_all_but_the_plots_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The message names the extra to install."""
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    result = bench("--backends", "eager", "--shape", "8x16", "--output-dir", str(tmp_path))
    assert result.exit_code == 0, result.output
    assert "pip install 'kernel-fusion[bench]'" in result.output
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".csv", ".json", ".md"]


def test_plot_shows_every_contender(tmp_path: Path) -> None:
    """The picture has a sensible size and contains the colours of the floor, PyTorch and ours."""
    from matplotlib.colors import to_rgb
    from matplotlib.image import imread

    results = Results(MODELS, CPU, "", True, {})
    for workload in MODELS.with_shapes([(8, 16), (16, 16)]).workloads([FP32]):
        for _ in runner.measure(workload, [providers.pytorch(), providers.ours("eager")], CPU, EFFORT, results):
            pass
    (path,) = plot.plot(results, tmp_path)
    pixels = torch.from_numpy(imread(path)[..., :3].copy())
    height, width, _ = pixels.shape
    assert min(height, width) > 400
    for color in ("#999999", "#E69F00", "#0072B2"):
        shown = (pixels - torch.tensor(to_rgb(color))).abs().amax(-1) < 0.01
        assert shown.sum() > 500, color


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--shape", "64"], "expected rows x columns"),
        (["--shape", "0x4"], "expected rows x columns"),
        (["--dtypes", "int8"], "'int8' is no dtype"),
        (["--backends", "cuda"], "the input is on cpu"),
        (["--backends", "fast"], "`backend` must be one of"),
    ],
)
def test_bad_options_say_what_is_expected(arguments: list[str], message: str) -> None:
    """A usage error, before anything is measured."""
    result = bench(*arguments)
    assert result.exit_code == 2
    assert message in " ".join(result.output.replace("│", " ").split())


def test_unknown_suite_names_those_there_are() -> None:
    """The suites are listed."""
    result = CliRunner().invoke(app, ["bench", "modles"])
    assert result.exit_code == 2
    assert "there are: models" in result.output


@pytest.mark.cuda
def test_bench_on_a_gpu(tmp_path: Path) -> None:
    """Graph replays of every direction give times at which no kernel could beat the floor twice over."""
    command = ["bench", "models", "--quick", "--device", "cuda", "--shape", "4096x1024", "--shape", "255x255"]
    result = CliRunner().invoke(app, [*command, "--output-dir", str(tmp_path)])
    assert result.exit_code == 0, result.output
    data = read(tmp_path)
    assert len(data["measurements"]) == 2 * 2 * 3 * 3
    for record in data["measurements"]:
        assert record["median_ms"] > 0
        read_and_written = 2 * {"bf16": 2, "f32": 4}[record["dtype"]] * record["rows"] * record["cols"]
        assert record["calls_per_iteration"] * read_and_written >= 300e6
        assert record["percent_of_floor"] < 200, record
