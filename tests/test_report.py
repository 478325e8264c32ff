"""`kernel-fusion report`: one file that holds everything and needs nothing."""

from __future__ import annotations

import base64
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from bench_support import measured, run
from typer.testing import CliRunner

from kernel_fusion.cli.app import app
from kernel_fusion_bench import plot, report, tables
from kernel_fusion_bench.results import Failure, Results

pytestmark = pytest.mark.slow

MB = 10**6


class Page(HTMLParser):
    """The parts of a page: its elements, what they refer to, and the texts of its table cells."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.images: list[dict[str, str | None]] = []
        self.references: list[str] = []
        self.ids: list[str | None] = []
        self.cells: list[str] = []
        self.open: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note the element."""
        given = dict(attrs)
        if tag not in ("img", "meta"):
            self.open.append(tag)
        if tag == "img":
            self.images.append(given)
        self.ids.append(given.get("id"))
        self.references += [value or "" for name, value in attrs if name in ("src", "href", "data", "action")]
        if tag in ("td", "th"):
            self.cells.append("")

    def handle_endtag(self, tag: str) -> None:
        """Every element ends where it began."""
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        """Texts of table cells."""
        if self.open and self.open[-1] in ("td", "th"):
            self.cells[-1] += data


def results() -> Results:
    """Two cells in two sizes, one of them failed in part, named so that they have to be escaped."""
    times = {"floor": 1.0, "pytorch": 3.0, "kf-cuda": 1.5}
    cells = [
        measured(name, ms, rows, bytes_moved=rows * MB, training_memory_bytes=MB)
        for rows in (32, 64)
        for name, ms in times.items()
    ]
    found = run(*cells, measured("liger", 2.0, excesses={"y": 7.0}))
    found.failures.append(Failure("apex", "<32x64>", "a & b"))
    return found


def test_report_holds_all_tables_and_plots(tmp_path: Path) -> None:
    """Every cell of every table, every picture as a PNG with a text for those who cannot see it, every fact."""
    path = tmp_path / "a" / "report.html"
    report.write([results()], path)
    text = path.read_text(encoding="utf-8")
    page = Page(text)
    assert not page.open
    expected = [value for table in tables.tables(results()) for row in (table.columns, *table.rows) for value in row]
    assert page.cells == expected
    assert len(page.images) == len(list(plot.pictures(results()))) == 4
    for image in page.images:
        kind, _, data = str(image["src"]).partition(",")
        assert kind == "data:image/png;base64"
        assert base64.b64decode(data).startswith(b"\x89PNG")
        assert str(image["alt"]).startswith("Large inputs: ")
    for fact in ("kernel-fusion bench large", "2026-01-01", "A CPU", "a clock", "absent: ModuleNotFoundError"):
        assert fact in text
    assert "apex, &lt;32x64&gt;: a &amp; b" in text
    assert "* after a time: less accurate than ours must be" in text
    sentence = "layer_norm bf16: forward 2.00× as fast as PyTorch (geometric mean of 2)"
    assert text.index("Summary") < text.index(sentence) < text.index("<img")
    assert "Interrupted" not in text
    assert [file.name for file in path.parent.iterdir()] == ["report.html"]


def test_report_refers_to_nothing_outside(tmp_path: Path) -> None:
    """No script, no style or picture from elsewhere; links lead to parts of itself."""
    path = tmp_path / "report.html"
    report.write([results(), results()], path)
    text = path.read_text(encoding="utf-8")
    page = Page(text)
    links = [reference for reference in page.references if not reference.startswith("data:image/png;base64,")]
    assert links == ["#run-1", "#run-2"]
    assert {link[1:] for link in links} <= set(page.ids)
    without_pictures = re.sub(r"data:image/png;base64,[^\"]+", "", text)
    assert not re.search(r"<script|<link|@import|url\(|https?:", without_pictures)


def test_report_command_takes_several_files(tmp_path: Path) -> None:
    """A report may mix suites; an interrupted run says so."""
    whole, part = results(), results()
    part.suite, part.title, part.interrupted = "odd", "Odd lengths", True
    files = [str(each.write_json(tmp_path)) for each in (whole, part)]
    output = tmp_path / "both.html"
    result = CliRunner().invoke(app, ["report", *files, "-o", str(output)])
    assert result.exit_code == 0, result.output
    assert f"wrote {output}" in result.output
    text = output.read_text(encoding="utf-8")
    assert "<title>kernel_fusion: Large inputs, Odd lengths</title>" in text
    assert text.count("Interrupted: what was measured until then.") == 1


def test_interrupt_leaves_the_report_of_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A report is replaced as a whole or not at all."""
    path = tmp_path / "report.html"
    path.write_text("the one before")

    def interrupted(results: Results) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(plot, "pictures", interrupted)
    file = results().write_json(tmp_path)
    assert CliRunner().invoke(app, ["report", str(file), "-o", str(path)]).exit_code != 0
    assert path.read_text() == "the one before"


def test_a_file_that_holds_no_results_is_refused(tmp_path: Path) -> None:
    """A usage error that names it, and no report."""
    path = tmp_path / "other.json"
    path.write_text("{}")
    result = CliRunner().invoke(app, ["report", str(path), "-o", str(tmp_path / "report.html")])
    assert result.exit_code == 2
    assert "holds no results of" in " ".join(result.output.replace("│", " ").split())
    assert not (tmp_path / "report.html").exists()
