"""Results of the benchmark harness once they are measured: files read back, tables, comparisons."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from bench_support import measured, run
from support import ROOT
from typer.testing import CliRunner

from kernel_fusion.cli.app import app
from kernel_fusion_bench import results, summary, tables
from kernel_fusion_bench.changes import compare
from kernel_fusion_bench.results import Failure, Measurement, Results
from kernel_fusion_bench.timing import Timing


def table(run: Results) -> list[dict[str, str]]:
    """The rows of the first table, by column."""
    first = tables.tables(run)[0]
    return [dict(zip(first.columns, row, strict=True)) for row in first.rows]


def test_results_read_back_are_those_written(tmp_path: Path) -> None:
    """Everything but digits that are noise: times, bytes, errors, failures, and where they came from."""
    written = run(
        measured("floor", 0.0123456789),
        measured("kf-cuda", 0.015, spread=0.0, errors={"y": 1e-3}, excesses={"y": 0.5}, training_memory_bytes=123),
        measured("quack", None, saved_bytes=7, training_memory_bytes=123),
    )
    written.failures.append(Failure("apex", "32x64", "it raised"))
    back = results.read(written.write_json(tmp_path))
    assert back.measurements[0].timing.median_ms == 0.0123457
    assert back.measurements[1:] == written.measurements[1:]
    written.measurements, back.measurements = [], []
    assert back == written
    assert [path.name for path in tmp_path.iterdir()] == ["large.json"]


def test_time_table_compares_with_floor_pytorch_and_the_best_peer() -> None:
    """Times in microseconds, ratios of medians, an inaccurate peer marked, and geometric means at the end."""
    rows = table(
        run(
            measured("floor", 0.010),
            measured("pytorch", 0.030),
            measured("kf-cuda", 0.012),
            measured("quack", 0.015, excesses={"dx": 1.5}),
            measured("floor", 0.100, rows=64),
            measured("pytorch", 0.200, rows=64),
            measured("kf-cuda", 0.400, rows=64),
        )
    )
    assert rows[0] == {
        "rows × N": "32×64",
        "floor µs": "10.0",
        "kf-cuda µs": "12.0",
        "kf-cuda ÷ floor": "1.20",
        "PyTorch µs": "30.0",
        "speedup": "2.50",
        "quack µs": "15.0*",
        "best peer": "quack",
        "kf-cuda ÷ best peer": "0.80",
    }
    assert (rows[1]["quack µs"], rows[1]["best peer"], rows[1]["kf-cuda ÷ best peer"]) == ("–", "PyTorch", "2.00")
    assert rows[2]["rows × N"] == "geometric mean"
    means = {"kf-cuda ÷ floor": 1.2 * 4, "speedup": 2.5 * 0.5, "kf-cuda ÷ best peer": 0.8 * 2}
    assert {name: rows[2][name] for name in means} == {name: f"{math.sqrt(p):.2f}" for name, p in means.items()}
    assert rows[2]["quack µs"] == rows[2]["best peer"] == ""


def test_noisy_times_are_marked_and_in_no_mean() -> None:
    """Neither in the last row of a table nor in the sentence that sums a run up."""
    steady = [measured("pytorch", 0.030), measured("kf-cuda", 0.010)]
    noisy = [measured("pytorch", 0.030, 64), measured("kf-cuda", 0.001, 64, spread=0.2)]
    result = run(*steady, *noisy)
    rows = table(result)
    assert (rows[1]["kf-cuda µs"], rows[1]["speedup"]) == ("1.00~", "30.00~")
    assert rows[2]["speedup"] == "3.00"
    assert summary.sentences(result) == ["layer_norm bf16: forward 3.00× as fast as PyTorch"]
    assert summary.sentences(run(*noisy)) == ["layer_norm bf16: the times vary too much for a verdict"]


def test_sentences_name_place_and_backend_where_there_are_several() -> None:
    """Directions in one sentence; bytes where nothing was timed."""
    ours = [measured(f"kf-{name}", 0.010, direction=d) for name in ("cuda", "triton") for d in ("forward", "backward")]
    theirs = [measured("pytorch", ms, direction=d) for d, ms in (("forward", 0.020), ("backward", 0.025))]
    claims = "forward 2.00×, backward 2.50× as fast as PyTorch"
    assert summary.sentences(run(*ours, *theirs)) == [
        f"layer_norm bf16 by kf-{name}: {claims}" for name in ("cuda", "triton")
    ]
    cpu = [on_cpu("pytorch", 2.0, 2), on_cpu("kf-cpu", 4.0, 2)]
    assert summary.sentences(run(*ours, *theirs, *cpu))[-1] == (
        "layer_norm bf16 on cpu, 2 threads by kf-cpu: forward 0.50× as fast as PyTorch"
    )
    sizes = {"pytorch": 4, "kf-cuda": 3}
    bytes_alone = run(*(measured(p, None, saved_bytes=2, training_memory_bytes=n) for p, n in sizes.items()))
    said = "layer_norm bf16: saved for backward 1.00×, peak 0.75× of PyTorch's memory"
    assert summary.sentences(bytes_alone) == [said]


def test_long_times_are_in_milliseconds() -> None:
    """As soon as one of the table is 10 ms or longer."""
    (row,) = table(run(measured("pytorch", 12.0), measured("kf-cuda", 0.5)))
    assert (row["PyTorch ms"], row["kf-cuda ms"]) == ("12.0", "0.500")


def test_errors_and_memory_have_tables_of_their_own() -> None:
    """Each provider's errors; bytes with ours over PyTorch's; configurations that are no sizes keep their name."""
    named = {"configuration": "BERT", "saved_bytes": 1_000_000}
    pytorch = measured("pytorch", None, errors={"y": 2e-3}, training_memory_bytes=4_000_000, **named)
    ours = measured("kf-cuda", None, errors={"y": 1e-3}, training_memory_bytes=3_000_000, **named)
    errors, memory = tables.tables(run(pytorch, ours))
    assert errors.columns == ("configuration", "rows × N", "kf-cuda y", "PyTorch y")
    assert errors.rows == (("BERT", "32×64", "1.0e-03", "2.0e-03"),)
    saved, training = ("kf-cuda saved MB", "PyTorch saved MB"), ("kf-cuda training MB", "PyTorch training MB")
    ratios = ("kf-cuda ÷ PyTorch, saved", "kf-cuda ÷ PyTorch, training")
    assert memory.columns[2:] == (*saved, *training, *ratios)
    assert memory.rows == (("BERT", "32×64", "1.00", "1.00", "3.00", "4.00", "1.00", "0.75"),)


def on_cpu(provider: str, ms: float, threads: int, faults: float = 7.0, **more: Any) -> Measurement:
    """A time of single calls on a CPU."""
    timing = Timing(ms, ms - 0.25, ms + 0.25, 21, 1, faults, **more)
    return replace(measured(provider, None), device="cpu", threads=threads, timing=timing)


def test_places_stand_side_by_side() -> None:
    """A table of times for each place, and one of all with the improvement in per cent."""
    one = [on_cpu("pytorch", 4.0, 1), on_cpu("kf-cpu", 3.0, 1)]
    two = [on_cpu("pytorch", 2.0, 2), on_cpu("kf-cpu", 2.5, 2)]
    gpu = [measured("pytorch", 0.2), measured("kf-cuda", 0.05)]
    made = {t.title: t for t in tables.tables(run(*one, *two, *gpu))}
    name = "Large inputs: layer_norm, bf16, forward"
    assert {f"{name}, cpu, 1 thread", f"{name}, cpu, 2 threads", f"{name}, cuda"} <= made.keys()
    together = made[f"{name}, side by side"]
    assert dict(zip(together.columns, together.rows[0], strict=True)) == {
        "rows × N": "32×64",
        "PyTorch µs, cpu, 1 thread": "4000",
        "kf-cpu µs, cpu, 1 thread": "3000",
        "kf-cpu, improvement, cpu, 1 thread": "25%",
        "PyTorch µs, cpu, 2 threads": "2000",
        "kf-cpu µs, cpu, 2 threads": "2500",
        "kf-cpu, improvement, cpu, 2 threads": "-25%",
        "PyTorch µs, cuda": "200",
        "kf-cuda µs, cuda": "50.0",
        "kf-cuda, improvement, cuda": "75%",
    }


def test_the_baseline_is_no_peer() -> None:
    """The portable build has a column, and ours the improvement on it; it is never the best peer."""
    times = {"floor": 1.0, "pytorch": 4.0, "kf-cpu": 2.0, "torch.compile": 5.0, "portable": 2.5}
    row = table(run(*(on_cpu(name, ms, 2) for name, ms in times.items())))[0]
    assert (row["portable µs"], row["kf-cpu, improvement on it"]) == ("2500", "20%")
    assert (row["best peer"], row["kf-cpu ÷ best peer"]) == ("PyTorch", "0.50")


def test_single_calls_have_tables_of_their_spread_and_page_faults() -> None:
    """Quartiles and iterations of all; faults and reused memory where that was timed."""
    made = {t.title.split(", ")[-1]: t for t in tables.tables(run(on_cpu("kf-cpu", 2.0, 2)))}
    assert made["spread"].columns == ("rows × N", "kf-cpu IQR µs", "kf-cpu iterations")
    assert made["spread"].rows == (("32×64", "500 (1750–2250)", "21"),)
    assert "page faults" not in made
    with_pages = tables.tables(run(on_cpu("kf-cpu", 2.0, 2, 1000.0, reused_median_ms=0.5)))
    faults = next(t for t in with_pages if t.title.endswith("page faults"))
    assert faults.columns == ("rows × N", "kf-cpu faults", "kf-cpu µs", "kf-cpu µs, reused memory")
    assert faults.rows == (("32×64", "1000", "2000", "500"),)


def test_markdown_says_where_it_comes_from_and_what_is_missing(tmp_path: Path) -> None:
    """Command, absent peers, failures, and what the mark of an inaccurate peer means."""
    result = run(measured("pytorch", 0.03), measured("liger", 0.02, excesses={"y": 7.0}))
    result.failures.append(Failure("apex", "32x64", "it raised"))
    text = summary.write_markdown(result, tmp_path).read_text()
    assert "`kernel-fusion bench large`" in text
    assert "- quack: absent: ModuleNotFoundError" in text
    assert "- apex, 32x64: it raised" in text
    assert "- * after a time: less accurate than ours must be" in text


# The rule is: more than 2 % on a GPU (5 % on a CPU) and more than 0.3 µs, each median outside the other's quartiles.
@pytest.mark.parametrize(
    ("before", "after", "spread", "device", "verdict"),
    [
        (0.100, 0.103, 0.001, "cuda", "slower"),
        (0.100, 0.097, 0.001, "cuda:1", "faster"),
        (0.100, 0.1019, 0.001, "cuda", "same"),
        (0.100, 0.103, 0.001, "cpu", "same"),
        (0.100, 0.106, 0.001, "cpu", "slower"),
        (0.100, 0.103, 0.05, "cuda", "same"),
        (0.0030, 0.0032, 0.001, "cuda", "same"),
        (0.0030, 0.0034, 0.001, "cuda", "slower"),
    ],
)
def test_only_differences_beyond_noise_count(
    before: float, after: float, spread: float, device: str, verdict: str
) -> None:
    """Faster, slower or the same."""
    old, new = (run(measured("kf-cuda", ms, spread=spread, device=device)) for ms in (before, after))
    comparison = compare(old, new)
    assert (comparison.cells, len(comparison.faster), len(comparison.slower)) == (
        1,
        verdict == "faster",
        verdict == "slower",
    )


def test_compare_is_about_common_cells_of_ours() -> None:
    """Peers and cells of one run alone do not count; the floor tells whether the machine changed."""
    old = run(measured("floor", 0.1), measured("pytorch", 0.1), measured("kf-cuda", 0.1), measured("kf-cuda", 1, 64))
    new = run(measured("floor", 0.2), measured("pytorch", 0.9), measured("kf-cuda", 0.2), measured("kf-cuda", 1, 128))
    comparison = compare(old, new)
    assert comparison.cells == 1
    assert comparison.floor == pytest.approx(2)
    (change,) = comparison.slower
    assert (change.measurement.provider, change.ratio) == ("kf-cuda", pytest.approx(2))


def test_compare_command_fails_only_when_asked_to(tmp_path: Path) -> None:
    """The table names cell and ratio; --fail-on-slower turns a slower cell into exit code 1."""
    run(measured("kf-cuda", 0.1)).write_json(tmp_path / "a")
    run(measured("kf-cuda", 0.2)).write_json(tmp_path / "b")
    files = [str(tmp_path / name / "large.json") for name in "ab"]
    result = CliRunner().invoke(app, ["compare", *files])
    assert result.exit_code == 0, result.output
    assert "32x64, layer_norm, bf16, bf16, forward" in result.output
    assert "2.000" in result.output
    assert result.output.strip().endswith("1 cells, 0 faster, 1 slower")
    assert CliRunner().invoke(app, ["compare", "--fail-on-slower", *files]).exit_code == 1
    assert CliRunner().invoke(app, ["compare", "--fail-on-slower", *reversed(files)]).exit_code == 0


@pytest.mark.parametrize("content", [b"", b"[]", b"{}", b'{"measurements": [{}]}', b"\xff", b"[" * 100_000, b"[1" * 9])
def test_a_file_that_holds_no_results_is_refused(content: bytes, tmp_path: Path) -> None:
    """A usage error that names the file: nothing, other JSON, no text, nested too deeply, cut off."""
    path = tmp_path / "other.json"
    path.write_bytes(content)
    for command in (["compare", str(path), str(path)], ["plot", str(path)], ["report", str(path)]):
        result = CliRunner().invoke(app, command)
        assert result.exit_code == 2, result.output
        assert "holds no results of" in " ".join(result.output.replace("│", " ").split())


def with_value(tmp_path: Path, field: str, value: Any) -> Path:
    """A results file in which the field at a path has another value; with `...` it is missing."""
    path = run(measured("floor", 0.1, errors={"y": 0.5}), measured("kf-cuda", 0.1)).write_json(tmp_path)
    data = json.loads(path.read_text())
    *parts, last = field.split(".")
    where = data
    for part in parts:
        where = where[int(part)] if part.isdecimal() else where[part]
    if value is ...:
        del where[last]
    else:
        where[last] = value
    path.write_text(json.dumps(data))
    return path


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("machine", ..., "`machine` is missing"),
        ("machine", 7, "`machine` must be an object, got 7"),
        ("machine.cpu", "a\x1b[31m", "`machine.cpu` must be a printable text of 1 to 200 characters, got 'a\\x1b[31m'"),
        ("method.time", ["a"], "`method.time` must be a text, a number, true, false or null, got ['a']"),
        ("quick", "no", "`quick` must be true or false, got 'no'"),
        ("title", "", "`title` must be a printable text of 1 to 200 characters, got ''"),
        ("command", "\ud800", "`command` must be a text, got '\\ud800'"),
        ("failures", {}, "`failures` must be a list, got {}"),
        ("measurements", [1], "`measurements[0]` must be an object, got 1"),
        ("measurements.1.rows", ..., "`measurements[1].rows` is missing"),
        ("measurements.1.rows", 2.5, "`measurements[1].rows` must be a whole number from 0 on, below 2^63, got 2.5"),
        ("measurements.1.cols", 10**40, "`measurements[1].cols` must be a whole number"),
        ("measurements.1.threads", True, "`measurements[1].threads` must be a whole number"),
        ("measurements.1.verb", None, "`measurements[1].verb` must be a printable text"),
        ("measurements.1.verb", "x" * 201, "`measurements[1].verb` must be a printable text"),
        ("measurements.1.median_ms", "0.1", "`measurements[1].median_ms` must be a number of milliseconds from 1e-09"),
        ("measurements.1.median_ms", math.nan, "to 1e+12, got nan"),
        ("measurements.1.q3_ms", math.inf, "to 1e+12, got inf"),
        ("measurements.1.median_ms", 0, "to 1e+12, got 0"),
        ("measurements.1.median_ms", 1e308, "to 1e+12, got 1e+308"),
        ("measurements.1.q1_ms", ..., "`measurements[1].q1_ms` is missing"),
        ("measurements.0.max_abs_error_y", "small", "`measurements[0].max_abs_error_y` must be a number"),
    ],
)
def test_a_bad_value_is_named(field: str, value: Any, message: str, tmp_path: Path) -> None:
    """A usage error with the file, the field, what it must be and what came."""
    path = with_value(tmp_path, field, value)
    with pytest.raises(ValueError, match="holds no results of") as caught:
        results.read(path)
    assert str(path) in str(caught.value)
    assert message in str(caught.value)
    assert CliRunner().invoke(app, ["compare", str(path), str(path)]).exit_code == 2


def test_a_peer_that_is_wrong_by_infinity_is_read_back(tmp_path: Path) -> None:
    """Infinity and NaN are errors that can be measured, and no times."""
    wrong = measured("quack", 0.1, errors={"y": math.inf, "dx": math.nan}, excesses={"y": math.inf})
    (back,) = results.read(run(wrong).write_json(tmp_path)).measurements
    assert (back.errors["y"], back.excesses) == (math.inf, {"y": math.inf})
    assert math.isnan(back.errors["dx"])


def test_the_results_of_the_repository_can_be_read() -> None:
    """Also those written before a field was, which has a default then."""
    kept = [path for path in (ROOT / "benchmarks" / "results").rglob("*.json") if '"measurements"' in path.read_text()]
    assert len(kept) > 15
    for path in kept:
        run = results.read(path)
        assert tables.tables(run)
        assert summary.heading(run.title, run.about)
