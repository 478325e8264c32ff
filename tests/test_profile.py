"""`kernel-fusion profile`: traces that hold our launches or are errors, and what is read from them."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from bench_support import NORM
from support import CPU as TARGET_CPU
from support import TRITON, Target
from typer.testing import CliRunner

from kernel_fusion.cli.app import app
from kernel_fusion.operators import loader
from kernel_fusion_bench import operations, providers, trace
from kernel_fusion_bench.trace import Launch, Trace
from kernel_fusion_bench.workloads import Inputs


def profile(*arguments: str) -> Any:
    """Run the command at a small shape on the CPU."""
    return CliRunner().invoke(app, ["profile", *arguments, "--shape", "8x32", "--device", "cpu"])


def event(cat: str, name: str, ts: float, dur: float, tid: int = 1) -> dict[str, Any]:
    """A complete event of a Chrome trace."""
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "tid": tid}


def written(path: Path, events: Sequence[dict[str, Any]]) -> Path:
    """A trace of a forward from 0 to 100 and a backward from 100 to 200, with these events."""
    ranges = [event("user_annotation", "forward", 0, 100), event("user_annotation", "backward", 100, 100)]
    path.write_text(json.dumps({"traceEvents": [*ranges, *events, {"ph": "M", "name": "process_name"}]}))
    return path


def test_every_contender_has_a_trace_and_a_summary(tmp_path: Path) -> None:
    """The files hold both directions and our operator; tables and Markdown say what was launched, and where."""
    assert loader.load(), loader.error()
    result = profile("layer_norm", "--output-dir", str(tmp_path))
    assert result.exit_code == 0, result.output
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "cpu_profile.json",
        "profile.md",
        "pytorch_profile.json",
    ]
    ours = trace.read(tmp_path / "cpu_profile.json", "cpu")
    assert [launch.direction for launch in ours if launch.name == "kernel_fusion::layer_norm"] == ["forward"] * 10
    assert [launch.direction for launch in ours if launch.name == "RowNormBackward"] == ["backward"] * 10
    theirs = trace.read(tmp_path / "pytorch_profile.json", "cpu")
    assert not any("kernel_fusion" in launch.name for launch in theirs)
    assert all(launch.microseconds >= 0 for launch in (*ours, *theirs))
    markdown = (tmp_path / "profile.md").read_text()
    command = "kernel-fusion profile layer_norm --shape 8x32 --dtype fp32 --device cpu --backends cpu"
    assert markdown.startswith(f"# Profile of layer_norm\n\n`{command}`")
    assert "- torch: " in markdown
    for text in (result.output, markdown):
        assert re.search(r"forward +\|? +kernel_fusion::layer_norm +\|? +1 ", text)
        assert re.search(r"backward +\|? +all of it", text)
    assert "ncu" not in result.output


# One of each family; the vendor's product alone, which has no kernel of ours to show; arguments that are not moved.
_CASES = ["rms_norm", "bias+gelu", "sum_squared, last", "softmax, scale, causal", "attention scores"]


@pytest.mark.parametrize("case", _CASES)
@pytest.mark.parametrize("target", [TARGET_CPU, TRITON], ids=lambda target: target.backend)
def test_every_operation_can_be_traced(target: Target, case: str, tmp_path: Path) -> None:
    """The command itself finds our launches; a product shows none, and needs none."""
    command = ["profile", case, "--shape", "8x32", "--dtype", "fp32", "--output-dir", str(tmp_path)]
    options = ["--device", target.device, "--backends", target.backend]
    result = CliRunner().invoke(app, [*command, *options])
    assert result.exit_code == 0, result.output
    launches = trace.read(tmp_path / f"{target.backend}_profile.json", target.device)
    if case == "attention scores":
        with pytest.raises(ValueError, match="shows no launch"):
            trace._ours(launches, target.backend, target.device, tmp_path)


def test_cases_are_the_norms_and_all_operations() -> None:
    """Each can be made, at the shape asked for, and is what its name says."""
    for name in operations.CASES:
        workload = operations.case_workload(name, (6, 4), torch.bfloat16)
        assert workload.facts.get("operation") in (name, None)
        assert workload.facts["cols"] == 4
        assert workload.verb == name or name not in ("layer_norm", "rms_norm")


def test_operators_have_the_time_that_is_their_own(tmp_path: Path) -> None:
    """Without those within them on the same thread; what is outside both directions does not count."""
    events = [
        event("cpu_op", "outer", 10, 50),
        event("cpu_op", "inner", 20, 10),
        event("cpu_op", "innermost", 22, 3),
        event("cpu_op", "inner", 40, 5),
        event("cpu_op", "elsewhere", 15, 20, tid=2),
        event("cpu_op", "after", 110, 7),
        event("cpu_op", "too late", 300, 7),
        event("kernel", "of a device", 20, 10),
    ]
    launches = trace.read(written(tmp_path / "t.json", events), "cpu")
    assert [(launch.direction, launch.name, launch.microseconds) for launch in launches] == [
        ("forward", "outer", 35.0),
        ("forward", "elsewhere", 20.0),
        ("forward", "inner", 7.0),
        ("forward", "innermost", 3.0),
        ("forward", "inner", 5.0),
        ("backward", "after", 7.0),
    ]


def gpu_events(backward: str) -> list[dict[str, Any]]:
    """The events of a GPU's trace: kernels, the copies of the ranges on the device's own line, calls of the driver."""
    return [
        event("cpu_op", "kernel_fusion::layer_norm", 5, 20),
        event("cuda_driver", "cuLaunchKernelEx", 10, 2),
        event("gpu_user_annotation", "forward", 15, 20, tid=7),
        event("kernel", "kf_layer_norm_forward_96_f32", 15, 20, tid=7),
        event("kernel", backward, 120, 30, tid=7),
        event("kernel", "sum_partials", 150, 10, tid=7),
    ]


def test_on_a_gpu_kernels_are_read_and_ours_must_be_among_them(tmp_path: Path) -> None:
    """Our kernels are known by their names, in both directions; the summary has their bandwidth, `ncu` their names."""
    path = written(tmp_path / "t.json", gpu_events("kf_layer_norm_backward_96_f32"))
    launches = trace.read(path, "cuda")
    names = ["kf_layer_norm_forward_96_f32", "kf_layer_norm_backward_96_f32", "sum_partials"]
    assert [launch.name for launch in launches] == names
    assert trace._ours(launches, "cuda", "cuda", path) == names
    assert trace._ours(launches, None, "cuda", path) == []
    only_forward = [launch for launch in launches if launch.direction == "forward"] + [Launch("backward", "copy", 1.0)]
    with pytest.raises(ValueError, match="shows no launch of backend 'cuda' in backward, but copy"):
        trace._ours(only_forward, "cuda", "cuda", path)
    taken = Trace(providers.ours("cuda"), path, 1, launches, names)
    rows = trace.summary(taken, NORM).rows
    assert rows[0] == ("forward", names[0], "1", "20.0", "20.0", "100%", "", "")
    # 48 × 96 elements of 4 bytes, read and written in 20 µs
    assert rows[1] == ("forward", "all of it", "", "", "20.0", "", "0.04", "1.84")
    assert [row[1] for row in rows[2:]] == [names[1], "sum_partials", "all of it"]
    command = trace.ncu_command(taken, ["python", "run.py"])
    assert command[0] == "ncu"
    assert f"regex:^({'|'.join(names)})$" in command
    assert command[-2:] == ["python", "run.py"]


def test_triton_kernels_are_known_by_the_names_launched(tmp_path: Path) -> None:
    """Only names launched by this process count."""
    trace.make_calls(providers.ours("triton"), NORM, torch.device(TRITON.device))
    launches = [Launch("forward", "row_norm_fwd", 1.0), Launch("backward", "row_norm_bwd", 1.0)]
    assert trace._ours(launches, "triton", "cuda", tmp_path) == ["row_norm_fwd", "row_norm_bwd"]
    with pytest.raises(ValueError, match="in forward, but row_norm_other"):
        trace._ours([replace(launches[0], name="row_norm_other")], "triton", "cuda", tmp_path)


def test_small_operators_are_summed_up() -> None:
    """Operators below one per cent share one row."""
    launches = [Launch("forward", "large", 1000.0), *(Launch("forward", f"small {i}", 1.0) for i in range(3))]
    rows = trace.summary(Trace(providers.pytorch(), Path("t"), 1, launches, []), NORM).rows
    assert [(row[1], row[4]) for row in rows[:3]] == [("large", "1000"), ("3 others", "3.00"), ("all of it", "1003")]


def test_a_trace_without_our_launch_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command says so, exits with 1, and keeps the other traces."""
    assert loader.load(), loader.error()
    monkeypatch.setattr(
        trace, "read", lambda path, device: [Launch(d, "aten::add", 1.0) for d in ("forward", "backward")]
    )
    result = profile("layer_norm", "--output-dir", str(tmp_path))
    assert result.exit_code == 1
    assert "NOT TRACED: kf-cpu: ValueError" in result.output
    assert "shows no launch of backend 'cpu' in forward, but aten::add" in result.output
    assert "PyTorch, 8x32" in result.output


def test_a_fallback_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Operators of ours whose kernels did not run are no trace of them."""
    assert loader.load(), loader.error()
    monkeypatch.setattr(loader, "launches", lambda counter: 0)
    result = profile("layer_norm", "--output-dir", str(tmp_path))
    assert result.exit_code == 1
    assert "no kernel of backend 'cpu' ran" in result.output


def test_interrupt_keeps_the_traces_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C during the second: the first is there, with its summary."""
    honest = trace.record

    def record(provider: Any, *arguments: Any) -> Trace:
        if provider.backend:
            raise KeyboardInterrupt
        return honest(provider, *arguments)

    monkeypatch.setattr(trace, "record", record)
    result = profile("layer_norm", "--output-dir", str(tmp_path), "--backends", "eager")
    assert result.exit_code == 130
    assert "Interrupted" in result.output
    assert sorted(path.name for path in tmp_path.iterdir()) == ["profile.md", "pytorch_profile.json"]


def test_calls_can_be_made_without_a_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For a profiler that looks on: forward and backward of ours, and no file."""
    made: list[Inputs] = []
    honest = Inputs.gradients
    monkeypatch.setattr(Inputs, "gradients", lambda self, results: made.append(self) or honest(self, results))
    result = profile("layer_norm", "--no-trace", "--backends", "eager", "--output-dir", str(tmp_path / "none"))
    assert result.exit_code == 0, result.output
    assert "kf-eager: made the calls" in result.output
    assert len(made) == 2
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["batch_norm"], "no case is called batch_norm; there are: 'layer_norm', 'rms_norm', 'add+relu'"),
        (["add+layer_norm, fp32 residual"], "add+layer_norm, fp32 residual has no f32"),
        (["layer_norm", "--backends", "cuda"], "the input is on cpu"),
        (["layer_norm", "--dtype", "int8"], "'int8' is no dtype"),
        (["layer_norm", "--shape", "8"], "expected rows x columns"),
    ],
)
def test_bad_options_say_what_is_expected(arguments: list[str], message: str) -> None:
    """A usage error, before anything is traced."""
    result = CliRunner().invoke(app, ["profile", "--device", "cpu", *arguments])
    assert result.exit_code == 2
    assert message in " ".join(result.output.replace("│", " ").split())


@pytest.mark.parametrize("content", ["", "[]", '{"traceEvents": [{"ph": "X"}]}', '{"traceEvents": []}'])
def test_a_file_that_is_no_trace_is_refused(content: str, tmp_path: Path) -> None:
    """An error that names the file."""
    path = tmp_path / "t.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=r"t\.json (is no Chrome trace|does not say where forward and backward are)"):
        trace.read(path, "cpu")


@pytest.mark.cuda
def test_traces_on_a_gpu(tmp_path: Path) -> None:
    """CUDA's and Triton's kernels by their names, in both directions, and how to have their counters."""
    command = ["profile", "layer_norm", "--shape", "512x1024", "--device", "cuda", "--output-dir", str(tmp_path)]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    for name, start in (("cuda", "kf_layer_norm_"), ("triton", "row_norm_")):
        launches = trace.read(tmp_path / f"{name}_profile.json", "cuda")
        assert {launch.direction for launch in launches if launch.name.startswith(start)} == {"forward", "backward"}
    assert (tmp_path / "pytorch_profile.json").exists()
    assert "--no-trace" in result.output
