"""Pictures of results: each kind shows every steady point where it belongs, and says by whom and when it was taken."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from bench_support import measured, run
from typer.testing import CliRunner

from kernel_fusion.cli.app import app
from kernel_fusion_bench import plot
from kernel_fusion_bench.plot import styles
from kernel_fusion_bench.results import Measurement, Results

CONTENDERS = ("floor", "pytorch", "kf-cuda", "kf-triton", "torch.compile")
LENGTHS = (256, 384, 512)
MB = 10**6


def swept(**more: Any) -> Results:
    """Each contender at each length: MB times the length's place, at 1 ms, 2 ms, ... in the order of contenders."""
    return run(
        *(
            replace(measured(name, float(at), configuration=f"8x{cols}", cols=cols, bytes_moved=place * MB, **more))
            for place, cols in enumerate(LENGTHS, 1)
            for at, name in enumerate(CONTENDERS, 1)
        )
    )


def figure(results: Results, kind: Any, name: str) -> Any:
    """The only picture of that kind."""
    ((found, only),) = plot.pictures(results, [kind])
    assert found == name
    return only


def lines(axes: Any) -> dict[str, tuple[list[float], list[float]]]:
    """The points of each line by the label that the legend has."""
    found = (line for line in axes.lines if not str(line.get_label()).startswith("_"))
    return {str(line.get_label()): (list(line.get_xdata()), list(line.get_ydata())) for line in found}


def widths(axes: Any) -> dict[str, list[float]]:
    """The lengths of the bars of each contender."""
    return {bars.get_label(): [bar.get_width() for bar in bars] for bars in axes.containers}


def test_speedups_are_over_pytorch_and_come_first() -> None:
    """A bar per contender and cell; PyTorch is the line at 1; the axis says which way is better."""
    assert next(iter(plot.KINDS)) == "speedup"
    (axes,) = figure(swept(), "speedup", "layer_norm-bf16-speedup").axes
    ratios = {"kf-cuda": 2 / 3, "kf-triton": 2 / 4, "torch.compile": 2 / 5}
    assert widths(axes) == {name: pytest.approx([ratio] * 3) for name, ratio in ratios.items()}
    assert [list(line.get_xdata()) for line in axes.lines] == [[1.0, 1.0]]
    assert axes.get_xlabel() == "times as fast as PyTorch (higher is better)"
    assert [tick.get_text() for tick in axes.get_yticklabels()] == ["8x256, 32×256", "8x384, 32×384", "8x512, 32×512"]
    assert axes.yaxis_inverted()
    assert list(plot.pictures(run(measured("pytorch", 1.0), measured("floor", 1.0)), ["speedup"])) == []


def test_directions_share_a_scale() -> None:
    """Panels of one picture, so that lengths can be compared across them."""
    forward, backward = swept(), swept(direction="backward")
    drawn = figure(run(*forward.measurements, *backward.measurements), "speedup", "layer_norm-bf16-speedup")
    assert [axes.get_title(loc="left") for axes in drawn.axes] == ["forward", "backward"]
    assert len({axes.get_xlim() for axes in drawn.axes}) == 1


def test_many_operations_are_dots_that_no_line_joins() -> None:
    """On a logarithmic scale where they lie far apart."""
    times = {"pytorch": 20.0, "kf-cuda": 1.0}
    cells = [measured(name, ms if at else 1.0, operation=f"op{at}") for at in range(20) for name, ms in times.items()]
    (axes,) = figure(run(*cells), "speedup", "32x64-bf16-speedup").axes
    assert lines(axes)["kf-cuda"] == ([1.0] + [20.0] * 19, list(range(20)))
    assert axes.lines[0].get_linestyle() == "None"
    assert axes.get_xscale() == "log"
    assert not axes.containers


def test_noisy_times_are_left_out_and_marked() -> None:
    """No bar, a word in its place, and their number in the title."""
    cells = [measured(name, 1.0, rows) for rows in (32, 64) for name in ("pytorch", "kf-cuda")]
    cells[-1] = measured("kf-cuda", 1.0, 64, spread=0.2)
    drawn = figure(run(*cells), "speedup", "layer_norm-bf16-speedup")
    (axes,) = drawn.axes
    assert widths(axes) == {"kf-cuda": [1.0]}
    assert [(text.get_text(), text.get_position()[1]) for text in axes.texts if text.get_text() == "noisy"] == [
        ("noisy", 1)
    ]
    assert drawn.get_suptitle().endswith("1 noisy times left out")


def test_titles_say_machine_versions_date_and_interruption() -> None:
    """Every picture's title has them."""
    results = swept()
    results.interrupted = True
    for _, drawn in plot.pictures(results):
        assert drawn.get_suptitle().split("\n")[1] == "A CPU · torch 2 · 2026-01-01 · INTERRUPTED"


@pytest.mark.parametrize(("device", "name"), [("cuda", "floor"), ("cpu", "PyTorch's copy")])
def test_times_are_over_the_floor_or_pytorchs_copy(device: str, name: str) -> None:
    """On a CPU it is no floor and is not called one."""
    (axes,) = figure(swept(device=device), "time", "layer_norm-bf16-time").axes
    assert widths(axes)["kf-cuda"] == [3.0] * 3
    assert axes.get_xlabel() == f"time ÷ {name} (lower is better)"
    assert lines(axes)[name][0] == [1.0, 1.0]


def test_one_operation_has_a_bar_per_contender() -> None:
    """With time and bandwidth, the floor among them."""
    cells = [
        measured(name, ms, operation="gelu", bytes_moved=MB) for name, ms in (("floor", 0.001), ("kf-cuda", 0.002))
    ]
    (axes,) = figure(run(*cells), "time", "32x64-bf16-time").axes
    texts = {text.get_text() for text in axes.texts}
    assert texts == {"1 µs, 1000 GB/s", "2 µs, 500 GB/s"}
    assert axes.get_xlabel() == "time in µs (lower is better)"


def test_bandwidth_is_drawn_over_the_row_length() -> None:
    """A line per contender through all of its points, the floor dashed, a panel per direction."""
    forward, backward = swept(), swept(direction="backward")
    drawn = figure(run(*forward.measurements, *backward.measurements), "bandwidth", "layer_norm-bandwidth")
    assert [axes.get_title(loc="left") for axes in drawn.axes] == ["bf16, forward", "bf16, backward"]
    for axes in drawn.axes:
        shown = lines(axes)
        assert list(shown) == ["floor", "kf-cuda", "kf-triton", "PyTorch", "torch.compile"]
        for at, name in enumerate(("floor", "PyTorch", *CONTENDERS[2:]), 1):
            where, speeds = shown[name]
            assert where == [*LENGTHS]
            assert speeds == pytest.approx([place / at for place in (1, 2, 3)])
        assert {line.get_linestyle() for line in axes.lines if len(line.get_xdata()) == 3} == {"-", "--"}
        assert (axes.get_xlabel(), axes.get_ylabel()) == ("row length N, 32 rows", "GB/s (higher is better)")
        assert [tick.get_text() for tick in axes.get_xticklabels()] == ["256", "512"]


def test_bandwidth_is_over_bytes_where_a_length_comes_twice() -> None:
    """And no line joins the points where a size comes twice."""
    cells = [measured("kf-cuda", 1.0, rows, bytes_moved=size * MB) for rows, size in ((8, 1), (16, 2), (32, 2))]
    (axes,) = figure(run(*cells), "bandwidth", "layer_norm-bandwidth").axes
    assert lines(axes) == {"kf-cuda": ([1.0, 2.0, 2.0], pytest.approx([1.0, 2.0, 2.0]))}
    assert axes.lines[0].get_linestyle() == "None"
    assert axes.get_xlabel() == "MB per call"


def test_memory_has_bars_of_peaks_and_what_was_saved() -> None:
    """PyTorch and ours each have both, in a fitting unit."""

    def trained(provider: str, rows: int, peak: int, saved: int | None) -> Measurement:
        saved_bytes = None if saved is None else saved * MB
        return measured(provider, None, rows, training_memory_bytes=peak * MB, saved_bytes=saved_bytes)

    cells = [trained("pytorch", 32, 6, 4), trained("kf-cuda", 32, 3, 1), trained("kf-cuda", 64, 5, 0)]
    (axes,) = figure(run(*cells), "memory", "layer_norm-bf16-memory").axes
    assert widths(axes) == {"kf-cuda": [3.0, 5.0], "PyTorch": [6.0]}
    assert sorted(line.get_xdata()[0] for line in axes.lines) == [0.0, 1.0, 4.0]
    assert [line.get_label() for line in axes.lines].count("saved for backward") == 1
    assert axes.get_xlabel() == "peak of a training step in MB (lower is better)"
    (axes,) = figure(run(trained("pytorch", 32, 6000, None)), "memory", "layer_norm-bf16-memory").axes
    assert not axes.lines
    assert widths(axes) == {"PyTorch": [6.0]}
    assert axes.get_xlabel() == "peak of a training step in GB (lower is better)"


def test_no_two_contenders_look_alike() -> None:
    """Each has a colour, a marker and a hatch of its own, with two of ours and all peers of the norms."""
    peers = [measured(name, 1.0) for name in ("liger", "quack", "apex", "flash-attn")]
    look = [style for name, style in styles(run(*swept().measurements, *peers)).items() if name != "floor"]
    assert len(look) == 8
    for kind in ("color", "marker", "hatch"):
        assert len({getattr(style, kind) for style in look}) == len(look)


def test_plot_shows_every_contender(tmp_path: Path) -> None:
    """A picture per verb and direction with the colours of the floor, PyTorch, ours and a peer."""
    from matplotlib.colors import to_rgb
    from matplotlib.image import imread

    names = ("floor", "pytorch", "kf-cuda", "apex")
    cells = [measured(name, 0.01 * at, rows) for rows in (32, 64) for at, name in enumerate(names[:3], 1)]
    # Another place, and so another panel.
    elsewhere = [replace(measured(name, 0.01 * at), device="cuda:1") for at, name in enumerate(names, 1)]
    (path,) = plot.plot(run(*cells, *elsewhere, measured("gone", None)), tmp_path, ["time"])
    assert path.name == "large-layer_norm-bf16-time.png"
    pixels = torch.from_numpy(imread(path)[..., :3].copy())
    assert min(pixels.shape[:2]) > 400
    for color in ("#999999", "#E69F00", "#0072B2", "#009E73"):
        shown = (pixels - torch.tensor(to_rgb(color))).abs().amax(-1) < 0.01
        assert shown.sum() > 100, color


def test_plot_command_draws_files_again(tmp_path: Path) -> None:
    """Beside the file or elsewhere, as PNG or SVG; host times, which have no floor, as well; the kinds asked for."""
    times = [measured(name, 0.01 * rows, rows) for name in ("pytorch", "kf-cuda") for rows in (1, 2)]
    host = [replace(m, direction="training forward") for m in times]
    path = run(*host).write_json(tmp_path)
    assert CliRunner().invoke(app, ["plot", str(path), "--kind", "time"]).exit_code == 0
    assert (tmp_path / "large-layer_norm-bf16-time.png").exists()
    elsewhere = tmp_path / "a"
    result = CliRunner().invoke(app, ["plot", str(path), "--format", "svg", "--output-dir", str(elsewhere)])
    assert result.exit_code == 0, result.output
    drawn = ["large-layer_norm-bf16-speedup.svg", "large-layer_norm-bf16-time.svg"]
    assert sorted(file.name for file in elsewhere.iterdir()) == drawn
    assert (elsewhere / drawn[1]).read_text().count("time in µs") >= 1


def test_plot_command_says_what_there_is_nothing_of(tmp_path: Path) -> None:
    """A kind that the results have nothing for, and a kind that does not exist."""
    path = run(measured("kf-cuda", 0.2)).write_json(tmp_path)
    result = CliRunner().invoke(app, ["plot", str(path), "--kind", "memory,bandwidth"])
    assert result.exit_code == 0
    assert "has nothing to plot of memory,bandwidth" in result.output
    result = CliRunner().invoke(app, ["plot", str(path), "--kind", "pie"])
    assert result.exit_code == 2
    assert "there are: speedup, time" in " ".join(result.output.replace("│", " ").split())


def test_names_in_results_are_no_paths_and_no_formulas(tmp_path: Path) -> None:
    """Every picture of names with slashes, dots and dollar signs lies in the folder, each under its own name."""
    names = (r"../$\bad$", "..-bad-")
    cells = [
        measured(f"{provider}", ms, rows, bytes_moved=rows * MB, training_memory_bytes=MB, verb=name, direction=name)
        for name in names
        for provider, ms in (("floor", 1.0), ("pytorch", 3.0), (r"kf-$\bad$", 2.0))
        for rows in (32, 64)
    ]
    hostile = run(*cells)
    hostile.suite = hostile.title = r"../$\bad$/x"
    hostile.about = hostile.about | {"machine": {"device": "cuda", "cpu": r"$\bad$"}}
    folder = tmp_path / "a" / "b"
    paths = plot.plot(hostile, folder, suffix="svg")
    assert len({*paths}) == len(paths) > 2 * len(names)
    assert {*paths} == {*folder.iterdir()} == {path for path in tmp_path.rglob("*") if path.is_file()}


def test_one_operation_with_a_name_like_a_formula_has_its_bars(tmp_path: Path) -> None:
    """The names under the bars are texts, too."""
    cells = [measured(name, 1.0, operation="$x^$") for name in ("pytorch", r"kf-$\bad$")]
    (path,) = plot.plot(run(*cells), tmp_path, ["time"])
    assert path.exists()
