"""The documents tell the truth: their Python runs, their links and paths exist, their commands exist.

`make docs` builds the site; these tests check what Sphinx does not see.
"""

from __future__ import annotations

import doctest
import json
import re
from inspect import ismodule
from pathlib import Path
from typing import Any

import pictures
import pytest
import stage_lines
import tables
import typer
from support import CPU, ROOT

import kernel_fusion as kf
from kernel_fusion.cli.app import app

PAGES = {path.relative_to(ROOT).as_posix(): path.read_text() for path in (*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"))}
NOTES = {path.relative_to(ROOT).as_posix(): path.read_text() for path in ROOT.glob("docs/notebook/*.md")}
README = PAGES["README.md"]
_NOTEBOOK = ROOT / "examples" / "quickstart.ipynb"


def blocks(page: str, language: str) -> list[str]:
    """The fenced blocks of one language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGES[page], re.MULTILINE | re.DOTALL)


def with_blocks(language: str) -> list[str]:
    """The pages that have such blocks."""
    return [page for page in PAGES if blocks(page, language)]


def test_readme_runs_kernels(capsys: pytest.CaptureFixture[str]) -> None:
    """Its Python runs on the CPU kernels, and what it prints says so."""
    with CPU.ran(forward=None, backward=None):
        test_python_blocks_run("README.md")
    assert capsys.readouterr().out.startswith("backend: cpu\n")


@pytest.mark.parametrize("page", with_blocks("python"))
def test_python_blocks_run(page: str) -> None:
    """Every block runs as it stands."""
    for block in blocks(page, "python"):
        exec(compile(block, page, "exec"), {})


@pytest.mark.slow  # it times functions
def test_the_notebook_runs() -> None:
    """The cells of the quick start run in order, and its kept results are those of a run without an error."""
    cells = [each for each in json.loads(_NOTEBOOK.read_text())["cells"] if each["cell_type"] == "code"]
    names: dict[str, Any] = {}
    for cell in cells:
        exec(compile("".join(cell["source"]), _NOTEBOOK.name, "exec"), names)
        assert cell["outputs"]
        assert not any(output["output_type"] == "error" for output in cell["outputs"])


@pytest.mark.parametrize("page", with_blocks("pycon"))
def test_sessions_print_what_they_say(page: str) -> None:
    """The sessions of a page are one, and its results are those shown."""
    session = doctest.DocTestParser().get_doctest("\n".join(blocks(page, "pycon")), {}, page, page, 0)
    assert doctest.DocTestRunner().run(session).failed == 0


# The compiler counts registers for the tables of plans, which takes it half a minute.
_TABLES = [
    pytest.param(*table, marks=pytest.mark.slow if table[0] == "docs/plans.md" else ()) for table in tables.TABLES
]


@pytest.mark.parametrize(("page", "name"), _TABLES)
def test_tables_are_those_of_their_sources(page: str, name: str) -> None:
    """`python docs/tables.py` would change nothing; and a character that is not the source's would be found."""
    text = PAGES[page]
    assert tables.written_anew(page, text) == text
    wrong = re.sub(rf"(<!-- table: {name} -->.*?\| -.*?\w)\w", r"\g<1>#", text, count=1, flags=re.DOTALL)
    assert tables.written_anew(page, wrong) == text != wrong


@pytest.mark.parametrize("name", pictures.PICTURES)
def test_pictures_are_those_of_their_sources(name: str, tmp_path: Path) -> None:
    """`python docs/pictures.py` would change no title, name or figure."""
    pictures.draw(name, tmp_path / name)
    said = pictures.words(tmp_path / name)
    assert said == pictures.words(ROOT / "docs" / "pictures" / name)
    assert sum(text.endswith("×") for text in said) > 10


def test_every_stage_has_lines_in_every_place() -> None:
    """The count of lines per stage finds the names by which each place knows it."""
    assert all(count for stage in stage_lines.stages() for count in stage_lines.lines(stage))


def test_only_sources_of_tables_are_kept() -> None:
    """The folder of results has JSON files, few of them, and nothing that is made from them."""
    files = [path for path in (ROOT / "benchmarks" / "results").rglob("*") if path.is_file()]
    assert {path.suffix for path in files} == {".json"}
    assert len(files) <= 29


@pytest.mark.parametrize("page", [*PAGES, *NOTES])
def test_links_lead_somewhere(page: str) -> None:
    """Every relative link names a file of the repository, every anchor a heading."""
    prose = re.sub(r"^```.*?^```$", "", {**PAGES, **NOTES}[page], flags=re.MULTILINE | re.DOTALL)
    links = re.findall(r"\]\((?!https?:)([^)#]+)(?:#([^)]+))?\)", prose)
    assert links, f"{page} has no relative links"
    for path, anchor in links:
        target = (ROOT / page).parent / path
        assert target.is_file(), f"{page} links to {path}"
        if anchor:
            headings = re.findall(r"^#+ (.+)$", target.read_text(), re.MULTILINE)
            anchors = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
            assert anchor in anchors, f"{path} has no #{anchor}"


def test_tests_that_a_page_names_exist() -> None:
    """A row of a table that is proved by a test names one."""
    named = set(re.findall(r"`(test_\w+)`", PAGES["docs/promises.md"]))
    defined = {
        name for path in ROOT.glob("tests/test_*.py") for name in re.findall(r"^def (test_\w+)", path.read_text(), re.M)
    }
    assert named
    assert named <= defined


def test_map_is_of_this_tree() -> None:
    """Every path in the map of the tree exists."""
    (tree,) = blocks("CONTRIBUTING.md", "text")
    missing = [line.split()[0] for line in tree.splitlines() if not (ROOT / line.split()[0]).exists()]
    assert not missing


def test_commands_exist() -> None:
    """Every `make` target and `kernel-fusion` command that the README names, or a page shows to be typed, exists."""
    shown = "\n".join([README, *(block for page in with_blocks("sh") for block in blocks(page, "sh"))])
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"(?:^|`)make ([a-z]+)", shown, re.MULTILINE)) <= targets
    commands = set(re.findall(r"(?:^|`)kernel-fusion ([a-z-]+)", shown, re.MULTILINE))
    assert commands <= set(typer.main.get_command(app).commands)


def test_tables_name_everything() -> None:
    """Every verb, every module and every activation is in the README."""
    verbs = [f"kf.{name}" for name in kf.functional.__all__ if name != "NormOutput"]
    modules = [f"kf.{name}" for name in kf.nn.__all__]
    missing = [name for name in (*verbs, *modules, *kf.ACTIVATIONS) if f"`{name}`" not in README]
    assert not missing


def test_reference_has_every_public_name() -> None:
    """Each function, class and value of the package has its entry, and each module of names is there as a whole."""
    text = "\n".join(PAGES.values())
    entries = re.findall(r"^\.\. (?:auto(?:function|class):: |py:data:: kernel_fusion\.)(\w+)$", text, re.MULTILINE)
    evaluated_when_read = ["CUDA_AVAILABLE", "EXTENSION_LOADED"]
    public = [*evaluated_when_read, *kf.__all__]
    assert sorted(entries) == sorted(name for name in public if not ismodule(getattr(kf, name)))
    modules = re.findall(r"^\.\. automodule:: kernel_fusion\.([\w.]+)$", text, re.MULTILINE)
    assert sorted(modules) == sorted(["errors", "ops", "kernels", *(f"kernels.{name}" for name in kf.kernels.__all__)])
