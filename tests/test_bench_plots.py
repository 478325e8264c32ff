"""Plots of results: each kind shows every point that was measured, where it belongs, or nothing where there is none."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from bench_support import measured, run
from typer.testing import CliRunner

from kernel_fusion.bench import plot
from kernel_fusion.bench.plot_panels import styles
from kernel_fusion.bench.results import Measurement, Results
from kernel_fusion.bench.timing import Timing
from kernel_fusion.cli import app

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
    handles, labels = axes.get_legend_handles_labels()
    data = (handle[0] if isinstance(handle, tuple) else handle for handle in handles)
    return {name: (list(d.get_xdata()), list(d.get_ydata())) for name, d in zip(labels, data, strict=True)}


def heights(axes: Any) -> dict[str, list[float]]:
    """The heights of the bars of each contender."""
    return {bars.get_label(): [bar.get_height() for bar in bars] for bars in axes.containers}


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
        assert (axes.get_xlabel(), axes.get_ylabel()) == ("row length N, 32 rows", "GB/s")
        assert [tick.get_text() for tick in axes.get_xticklabels()] == ["256", "512"]


def test_bandwidth_is_over_bytes_where_a_length_comes_twice() -> None:
    """And no line joins the points where a size comes twice."""
    cells = [measured("kf-cuda", 1.0, rows, bytes_moved=size * MB) for rows, size in ((8, 1), (16, 2), (32, 2))]
    (axes,) = figure(run(*cells), "bandwidth", "layer_norm-bandwidth").axes
    assert lines(axes) == {"kf-cuda": ([1.0, 2.0, 2.0], pytest.approx([1.0, 2.0, 2.0]))}
    assert axes.lines[0].get_linestyle() == "None"
    assert axes.get_xlabel() == "MB per call"


def test_speedups_are_over_pytorch() -> None:
    """A bar per contender and cell; PyTorch is the line at 1."""
    (axes,) = figure(swept(), "speedup", "layer_norm-forward-speedup").axes
    ratios = {"kf-cuda": 2 / 3, "kf-triton": 2 / 4, "torch.compile": 2 / 5}
    assert heights(axes) == {name: pytest.approx([ratio] * 3) for name, ratio in ratios.items()}
    assert [list(line.get_ydata()) for line in axes.lines] == [[1.0, 1.0]]
    assert list(plot.pictures(run(measured("pytorch", 1.0), measured("floor", 1.0)), ["speedup"])) == []


def test_share_of_the_floor_is_a_map_of_shapes_by_dtype_and_direction() -> None:
    """A panel for each contender; what was not measured is empty."""
    once = (measured(name, ms, 64, dtype="f32") for name, ms in (("floor", 1.0), ("kf-cuda", 2.0)))
    drawn = figure(run(*swept().measurements, *once), "floor", "layer_norm-floor")
    panels = {axes.get_title(loc="left"): axes for axes in drawn.axes if axes.get_visible()}
    assert list(panels) == ["kf-cuda", "kf-triton", "PyTorch", "torch.compile"]
    texts = {name: [text.get_text() for text in axes.texts] for name, axes in panels.items()}
    assert texts == {
        "kf-cuda": ["33"] * 3 + ["50"],
        "kf-triton": ["25"] * 3,
        "PyTorch": ["50"] * 3,
        "torch.compile": ["20"] * 3,
    }
    labels = [
        [tick.get_text() for tick in axis.get_ticklabels()] for axis in (panels["kf-cuda"].xaxis, drawn.axes[0].yaxis)
    ]
    assert labels == [
        ["bf16\nforward", "f32\nforward"],
        ["8x256, 32×256", "8x384, 32×384", "8x512, 32×512", "64×64"],
    ]


def test_roofline_has_a_measured_roof() -> None:
    """Its slope is the shortest floor, its flat part the fastest; a computed floor is no part of it."""
    computed = measured("floor", None, 64, bytes_moved=MB, timing=Timing(1e-3, 1e-3, 1e-3, 0, 0))
    slow = measured("floor", 6.0, 128, bytes_moved=12 * MB)
    axes, empty = figure(run(*swept().measurements, computed, slow), "roofline", "roofline").axes, []
    shown = lines(axes[0])
    assert shown.pop("roof: shortest and fastest floor") == ([1.0, 2.0, 3.0, 12.0], pytest.approx([1.0, 2.0, 3.0, 3.0]))
    assert shown["kf-cuda"] == ([1.0, 2.0, 3.0], pytest.approx([1 / 3, 2 / 3, 1.0]))
    assert shown.keys() == {"kf-cuda", "kf-triton", "PyTorch", "torch.compile"}
    assert list(plot.pictures(run(measured("kf-cuda", 1.0, bytes_moved=MB)), ["roofline"])) == empty


def test_memory_has_bars_of_peaks_and_what_was_saved() -> None:
    """Of PyTorch and ours, in MB."""

    def trained(provider: str, rows: int, peak: int, saved: int | None) -> Measurement:
        saved_bytes = None if saved is None else saved * MB
        return measured(provider, None, rows, training_memory_bytes=peak * MB, saved_bytes=saved_bytes)

    cells = [trained("pytorch", 32, 6, 4), trained("kf-cuda", 32, 3, 1), trained("kf-cuda", 64, 5, 0)]
    (axes,) = figure(run(*cells), "memory", "layer_norm-memory").axes
    assert heights(axes) == {"kf-cuda": [3.0, 5.0], "PyTorch": [6.0]}
    assert [list(line.get_ydata()) for line in axes.lines] == [[1.0, 0.0], [4.0]]
    assert axes.get_ylabel() == "peak of a training step (MB)"
    (axes,) = figure(run(trained("pytorch", 32, 6, None)), "memory", "layer_norm-memory").axes
    assert not axes.lines


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
    # Of another place, and so in another panel.
    elsewhere = [replace(measured(name, 0.01 * at), device="cuda:1") for at, name in enumerate(names, 1)]
    (path,) = plot.plot(run(*cells, *elsewhere, measured("gone", None)), tmp_path, ["time"])
    assert path.name == "large-layer_norm-forward.png"
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
    assert (tmp_path / "large-layer_norm-training-forward.png").exists()
    elsewhere = tmp_path / "a"
    result = CliRunner().invoke(app, ["plot", str(path), "--format", "svg", "--output-dir", str(elsewhere)])
    assert result.exit_code == 0, result.output
    drawn = ["large-layer_norm-training-forward-speedup.svg", "large-layer_norm-training-forward.svg"]
    assert sorted(file.name for file in elsewhere.iterdir()) == drawn
    assert (elsewhere / drawn[1]).read_text().count("time (µs)") >= 1


def test_plot_command_says_what_there_is_nothing_of(tmp_path: Path) -> None:
    """A kind that the results have nothing for, and a kind that does not exist."""
    path = run(measured("kf-cuda", 0.2)).write_json(tmp_path)
    result = CliRunner().invoke(app, ["plot", str(path), "--kind", "memory,roofline"])
    assert result.exit_code == 0
    assert "has nothing to plot of memory,roofline" in result.output
    result = CliRunner().invoke(app, ["plot", str(path), "--kind", "pie"])
    assert result.exit_code == 2
    assert "there are: time, bandwidth" in " ".join(result.output.replace("│", " ").split())


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
