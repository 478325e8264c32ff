"""`kernel-fusion bench`: what it writes, what it shows, and that its exit code tells success from failure."""

from __future__ import annotations

import csv
import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from bench_support import scaled
from typer.testing import CliRunner

from kernel_fusion.cli.app import app
from kernel_fusion.cli.common import parse_dtypes
from kernel_fusion.operators import loader
from kernel_fusion_bench import peers, providers, results, run_suite, runner, timing
from kernel_fusion_bench.results import Results
from kernel_fusion_bench.suites import SUITES
from kernel_fusion_bench.timing import QUICK, Setup


@pytest.fixture(autouse=True)
def on_a_busy_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Noisy times count: beside other work all may be."""
    monkeypatch.setattr(timing, "_NOISY", float("inf"))


# The keys of a result file for every checked and timed contender; `compare` relies on these names.
KEYS = {
    *("configuration", "verb", "rows", "cols", "dtype", "weight_dtype", "bias_dtype", "layout", "direction"),
    *("device", "threads", "page_faults"),
    *("provider", "provider_version", "median_ms", "q1_ms", "q3_ms", "iterations", "calls_per_iteration"),
    *("speedup_over_pytorch", "percent_of_floor", "gigabytes_per_second", "bytes_moved", "training_memory_bytes"),
    *(f"max_abs_error_{name}" for name in ("y", "dx", "dweight", "dbias")),
    *(f"error_over_budget_{name}" for name in ("y", "dx", "dweight", "dbias")),
}


def bench(*arguments: str) -> Any:
    """Run `bench models --quick` on the CPU with small shapes."""
    return CliRunner().invoke(app, ["bench", "models", "--quick", "--device", "cpu", *arguments])


def read(folder: Path) -> dict[str, Any]:
    """The JSON file of a quick run."""
    return json.loads((folder / "models-quick.json").read_text())


def test_bench_writes_all_its_files(tmp_path: Path) -> None:
    """JSON with every promised key, CSV with the same records, Markdown tables, and the command that does it again."""
    assert loader.load(), loader.error()
    arguments = ["--backends", "cpu,eager", "--dtypes", "fp32,bf16", "--shape", "64x96", "--shape", "32x255"]
    result = bench(*arguments, "--output-dir", str(tmp_path))
    assert result.exit_code == 0, result.output
    data = read(tmp_path)
    assert data["command"] == (
        "kernel-fusion bench models --quick --device cpu --dtypes fp32,bf16 --verbs layer_norm "
        "--directions forward,backward,forward+backward --backends cpu,eager --shape 64x96 --shape 32x255"
    )
    assert {"cpu", "torch_threads", "os", "load_average_at_start"} <= data["machine"].keys()
    assert {"kernel_fusion", "torch", "python"} <= data["versions"].keys()
    assert {"time", "floor", "training_memory", "errors"} <= data["method"].keys()
    assert not data["interrupted"]
    # shapes × dtypes × directions × (floor, PyTorch and two of ours)
    assert len(data["measurements"]) == 2 * 2 * 3 * 4
    assert all(record.keys() == KEYS for record in data["measurements"] if record["provider"] != "floor")
    with (tmp_path / "models-quick.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [float(row["median_ms"]) for row in rows] == [record["median_ms"] for record in data["measurements"]]
    markdown = (tmp_path / "models-quick.md").read_text()
    assert "| 64×96 | " in markdown
    assert data["command"] in markdown
    plots = {
        f"models-quick-layer_norm-{dtype}-{kind}.png" for dtype in ("fp32", "bf16") for kind in ("speedup", "time")
    }
    assert {path.name for path in tmp_path.glob("*.png")} == plots


def test_derived_values_follow_from_the_medians(tmp_path: Path) -> None:
    """Speedup and share of the floor are ratios of medians of one cell; errors and memory stand with their provider."""
    assert loader.load(), loader.error()
    assert bench("--shape", "64x96", "--output-dir", str(tmp_path)).exit_code == 0
    cell = {r["provider"]: r for r in read(tmp_path)["measurements"] if r["direction"] == "backward"}
    ours = cell["kf-cpu"]
    assert ours["speedup_over_pytorch"] == pytest.approx(cell["pytorch"]["median_ms"] / ours["median_ms"], rel=1e-4)
    assert ours["percent_of_floor"] == pytest.approx(100 * cell["floor"]["median_ms"] / ours["median_ms"], rel=1e-4)
    assert ours["q1_ms"] <= ours["median_ms"] <= ours["q3_ms"]
    assert ours["training_memory_bytes"] > 2 * 4 * 64 * 96
    assert 0 < ours["max_abs_error_dx"] < 1e-4
    assert ours["error_over_budget_dx"] <= 1
    assert "max_abs_error_y" not in cell["floor"]


@pytest.mark.usefixtures("every_variant")
def test_devices_and_threads_stand_side_by_side(tmp_path: Path) -> None:
    """Each cell in every place, a table of all of them, plots, and the command that does it again."""
    assert loader.load(), loader.error()
    # To PyTorch, two devices.
    command = ["bench", "cpu", "--quick", "--device", "cpu,cpu:0", "--threads", "1,2", "--shape", "64x96"]
    result = CliRunner().invoke(app, [*command, "--directions", "forward", "--output-dir", str(tmp_path)])
    assert result.exit_code == 0, result.output
    data = json.loads((tmp_path / "cpu-quick.json").read_text())
    assert data["command"] == (
        "kernel-fusion bench cpu --quick --device cpu,cpu:0 --threads 1,2 --dtypes fp32 --verbs layer_norm "
        "--directions forward --backends cpu --peers portable --shape 64x96"
    )
    assert {"time", "memory_of_results"} <= data["method"].keys()
    places = [(device, threads) for device in ("cpu", "cpu:0") for threads in (1, 2)]
    assert [(r["device"], r["threads"]) for r in data["measurements"] if r["provider"] == "kf-cpu"] == places
    assert all(record["reused_median_ms"] > 0 for record in data["measurements"])
    assert {r["provider"] for r in data["measurements"]} == {"floor", "pytorch", "kf-cpu", "portable"}
    assert "layer_norm, fp32, forward, side by side" in (tmp_path / "cpu-quick.md").read_text()
    assert (tmp_path / "cpu-quick-layer_norm-fp32-speedup.png").exists()


def test_the_cpu_suite_has_one_thread_and_all(tmp_path: Path) -> None:
    """The suite runs with one thread and with all, unless these are the same."""
    arguments = ["--quick", "--shape", "8x16", "--directions", "forward", "--peers", "none"]
    result = CliRunner().invoke(app, ["bench", "cpu", "--device", "cpu", *arguments, "--output-dir", str(tmp_path)])
    assert result.exit_code == 0, result.output
    records = json.loads((tmp_path / "cpu-quick.json").read_text())["measurements"]
    assert {record["threads"] for record in records} == {1, torch.get_num_threads()}


def test_sweep_draws_bandwidth_beside_what_is_absent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All backends of the suite take part; one that cannot run is named, and is no part of the command."""
    both = replace(SUITES["sweep"], backends={"cpu": ("cpu", "cuda")})
    monkeypatch.setitem(SUITES, "sweep", both)
    command = ["bench", "sweep", "--quick", "--device", "cpu", "--shape", "8x16", "--shape", "8x32"]
    result = CliRunner().invoke(app, [*command, "--output-dir", str(tmp_path)])
    assert result.exit_code == 0, result.output
    assert "kf-cuda: absent: the input is on cpu" in result.output
    data = json.loads((tmp_path / "sweep-quick.json").read_text())
    assert data["peers"] == {"kf-cuda": "absent: the input is on cpu"}
    assert "--backends cpu --shape 8x16" in data["command"]
    assert {r["provider"] for r in data["measurements"]} == {"floor", "pytorch", "kf-cpu"}
    assert {path.name for path in tmp_path.glob("*.png")} == {
        f"sweep-quick-layer_norm-{name}.png" for name in ("bandwidth", "fp32-speedup")
    }
    assert "| kf-cpu GB/s | PyTorch GB/s | kf-cpu % of PyTorch's copy |" in (tmp_path / "sweep-quick.md").read_text()


def test_a_suite_is_run_from_python(tmp_path: Path) -> None:
    """The function of the command line returns results and the paths of all files, and reports from the first to the
    last.

    The file that exists before the run is complete says so.
    """
    suite = replace(SUITES["models"], plots=()).with_shapes([(8, 16), (4, 32)])
    setup = Setup([providers.pytorch(), providers.ours("eager")], torch.device("cpu"), ("forward",), QUICK)
    reports: list[tuple[int, int, str]] = []
    on_the_way = []

    def report(*what: Any) -> None:
        reports.append(what)
        on_the_way.extend(results.read(path).interrupted for path in (tmp_path / "new").glob("*.json"))

    found, paths = run_suite(
        suite,
        [setup],
        tmp_path / "new",
        verbs=["rms_norm"],
        dtypes=[torch.float32],
        command="what it was",
        peers={"other": "absent: nowhere"},
        report=report,
    )
    assert set(on_the_way) == {True}
    assert not results.read(paths[0]).interrupted
    assert [path.name for path in paths] == ["models.json", "models.csv", "models.md"]
    assert {*paths} == {*(tmp_path / "new").iterdir()}
    assert [m.cell for m in results.read(paths[0]).measurements] == [m.cell for m in found.measurements]
    assert {(m.configuration, m.provider) for m in found.measurements} == {
        (shape, name) for shape in ("8x16", "4x32") for name in ("floor", "pytorch", "kf-eager")
    }
    assert (found.about["command"], found.about["peers"]) == ("what it was", {"other": "absent: nowhere"})
    assert [(done, of) for done, of, _ in reports] == sorted((done, of) for done, of, _ in reports)
    assert reports[0][:2] == (0, 2)
    assert reports[-1][:2] == (2, 2)
    assert all("rms_norm fp32" in what for *_, what in reports)


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
    assert (tmp_path / "models-quick-layer_norm-fp32-time.png").exists()


def test_wrong_results_fail_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The table is still written, without the wrong provider, and the exit code is not zero."""
    monkeypatch.setattr(providers, "ours", lambda backend: scaled(f"kf-{backend}", 1.001, backend))
    result = bench("--backends", "eager", "--shape", "64x96", "--output-dir", str(tmp_path))
    assert result.exit_code == 1
    assert "NOT MEASURED: kf-eager, 64x96" in result.output
    data = read(tmp_path)
    assert len(data["failures"]) == 1
    assert {r["provider"] for r in data["measurements"]} == {"floor", "pytorch"}


def test_without_matplotlib_all_but_the_plots_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The message names the package to install."""
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    result = bench("--backends", "eager", "--shape", "8x16", "--output-dir", str(tmp_path))
    assert result.exit_code == 0, result.output
    assert "pip install matplotlib" in result.output
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".csv", ".json", ".md"]


def test_a_peer_that_fails_does_not_fail_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is shown as not measured, and an absent one as absent, in the output and in the file."""
    monkeypatch.setitem(peers.PEERS, "torch.compile", lambda: scaled("torch.compile", 1.5))
    options = ["--backends", "eager", "--shape", "8x16", "--peers", "all", "--directions", "forward"]
    result = bench(*options, "--output-dir", str(tmp_path))
    assert result.exit_code == 0, result.output
    assert "NOT MEASURED: torch.compile, 8x16" in result.output
    assert "liger: absent" in result.output
    data = read(tmp_path)
    assert data["peers"].keys() == peers.PEERS.keys()
    assert {r["direction"] for r in data["measurements"]} == {"forward"}


def test_a_run_that_is_killed_leaves_what_it_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file is written again after every workload, before anything is drawn."""
    monkeypatch.setattr(Results, "write", lambda self, folder: sys.exit(9))
    arguments = ["--verbs", "layer_norm,rms_norm", "--weights", "fp32", "--dtypes", "bf16"]
    assert bench(*arguments, "--backends", "eager", "--shape", "8x16", "--output-dir", str(tmp_path)).exit_code == 9
    records = read(tmp_path)["measurements"]
    assert {(r["verb"], r["dtype"], r["weight_dtype"]) for r in records} == {
        ("layer_norm", "bf16", "f32"),
        ("rms_norm", "bf16", "f32"),
    }


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--shape", "64"], "expected rows x columns"),
        (["--shape", "0x4"], "expected rows x columns"),
        (["--dtypes", "int8"], "'int8' is no dtype"),
        (["--backends", "cuda"], "the input is on cpu"),
        (["--backends", "fast"], "`backend` must be one of"),
        (["--verbs", "batch_norm"], "no verb is called batch_norm; there are: layer_norm, rms_norm"),
        (["--directions", "sideways"], "no direction is called sideways; there are: forward"),
        (["--peers", "cudnn"], "no peer is called cudnn; there are: torch.compile, portable"),
        (["--weights", "int8"], "'int8' is no dtype"),
        (["--threads", "0"], "expected numbers with commas, from 1 on, got '0'"),
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


def test_output_is_short_and_ends_with_what_people_came_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A table of 80 columns with our times and speed-ups; the last line is the speed-up in a sentence."""
    monkeypatch.setattr(timing.Timing, "spread", 0.0)  # whatever this machine does beside the test
    result = bench("--backends", "eager", "--shape", "8x16", "--shape", "9x16", "--output-dir", str(tmp_path))
    lines = result.stdout.rstrip().splitlines()
    ratio = r"\d+\.\d\d×"
    claim = rf"layer_norm fp32: forward {ratio}, backward {ratio}, forward\+backward {ratio} as fast as PyTorch"
    assert re.fullmatch(rf"{claim} \(geometric mean of 2\)", lines[-1])
    assert "files models-quick* in" in lines[-2]
    table = [line for line in lines if line.startswith((" 8×16", " 9×16", " geometric mean"))]
    assert len(table) == 3
    assert max(len(line.rstrip()) for line in lines[:-2]) <= 80


def test_results_go_to_a_new_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every run without --output-dir has one of its own, also two in one second; nothing of the caller's is touched."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "benchmarks").mkdir()
    for _ in range(2):
        assert bench("--backends", "eager", "--shape", "8x16", "--directions", "forward").exit_code == 0
    folders = sorted(Path("kernel-fusion-results").iterdir())
    assert len(folders) == 2
    assert all((folder / "models-quick.json").exists() for folder in folders)
    assert not list((tmp_path / "benchmarks").iterdir())


def test_list_describes_the_suites_and_measures_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A line for each, in words."""
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["bench", "--list"])
    assert result.exit_code == 0
    for suite in SUITES.values():
        assert re.search(rf"^ {suite.name} +{re.escape(suite.about)}", result.stdout, re.MULTILINE), suite.name
        assert suite.about
    assert not list(tmp_path.iterdir())
    assert CliRunner().invoke(app, ["bench"]).exit_code == 2


def test_names_of_pytorch_are_taken() -> None:
    """Short and long ones, with and without the module's name."""
    expected = (torch.float16, torch.float32, torch.bfloat16, torch.float64)
    for names in ("fp16,fp32,bf16,fp64", "float16,float32,bfloat16,float64", "torch.half,torch.float,bf16,double"):
        assert parse_dtypes(names) == expected


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
        calls = record["calls_per_iteration"]
        assert calls * read_and_written >= 300e6 or calls == 256
        assert record["percent_of_floor"] > 0, record  # tests beside this one use the same GPU


@pytest.mark.cuda
def test_sweep_on_a_gpu(tmp_path: Path) -> None:
    """CUDA and Triton kernels side by side, without naming them."""
    command = ["bench", "sweep", "--quick", "--device", "cuda", "--shape", "512x1024", "--shape", "512x1536"]
    result = CliRunner().invoke(app, [*command, "--output-dir", str(tmp_path)])
    assert result.exit_code == 0, result.output
    records = json.loads((tmp_path / "sweep-quick.json").read_text())["measurements"]
    assert {r["provider"] for r in records} == {"floor", "pytorch", "kf-cuda", "kf-triton"}
    assert (tmp_path / "sweep-quick-layer_norm-bandwidth.png").exists()


@pytest.mark.cuda
def test_a_cpu_beside_a_gpu(tmp_path: Path) -> None:
    """Our kernels of each device, each on its own device alone."""
    command = ["bench", "cpu", "--quick", "--device", "cpu,cuda", "--shape", "256x512", "--output-dir", str(tmp_path)]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    records = json.loads((tmp_path / "cpu-quick.json").read_text())["measurements"]
    ours = {(r["provider"], r["device"]) for r in records if r["provider"].startswith("kf-")}
    assert ours == {("kf-cpu", "cpu"), ("kf-cuda", "cuda")}


@pytest.mark.cuda
@pytest.mark.parametrize("suite", ["host", "memory"])
def test_other_suites_on_a_gpu(suite: str, tmp_path: Path) -> None:
    """Every provider is measured, in both verbs."""
    command = ["bench", suite, "--quick", "--device", "cuda", "--verbs", "layer_norm,rms_norm", "--shape", "64x1024"]
    result = CliRunner().invoke(app, [*command, "--output-dir", str(tmp_path)])
    assert result.exit_code == 0, result.output
    records = json.loads((tmp_path / f"{suite}-quick.json").read_text())["measurements"]
    assert {(r["provider"], r["verb"]) for r in records} == {
        (provider, verb) for provider in ("pytorch", "kf-cuda") for verb in ("layer_norm", "rms_norm")
    }
