"""What the documents show is true: their Python runs, their links and paths lead somewhere, their commands exist."""

from __future__ import annotations

import re

import pytest
import typer
from support import CPU, ROOT

import kernel_fusion as kf
from kernel_fusion.cli import app

README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    """The fenced blocks of one language."""
    found = re.findall(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
    assert found, f"the README has no {language} block"
    return found


def test_python_blocks_run(capsys: pytest.CaptureFixture[str]) -> None:
    """Every Python block runs as it stands, on the CPU kernels, and the last says so."""
    with CPU.ran(forward=None, backward=None):
        for block in blocks("python"):
            exec(compile(block, "README.md", "exec"), {})
    assert capsys.readouterr().out.startswith("backend: cpu\n")


_DOCUMENTS = [
    "README.md",
    "CONTRIBUTING.md",
    "ARCHITECTURE.md",
    *(f"docs/{p.name}" for p in (ROOT / "docs").glob("*.md")),
]


@pytest.mark.parametrize("document", _DOCUMENTS)
def test_links_lead_somewhere(document: str) -> None:
    """Every relative link names a file of the repository, every anchor a heading."""
    links = re.findall(r"\]\((?!https?:)([^)#]+)(?:#([^)]+))?\)", (ROOT / document).read_text())
    assert links, f"{document} has no relative links"
    for path, anchor in links:
        target = (ROOT / document).parent / path
        assert target.exists(), f"{document} links to {path}"
        if anchor:
            headings = re.findall(r"^#+ (.+)$", target.read_text(), re.MULTILINE)
            assert anchor in {heading.lower().replace(" ", "-") for heading in headings}, f"{path} has no #{anchor}"


def test_map_is_of_this_tree() -> None:
    """Every path in the map of the tree exists."""
    (tree,) = blocks("text")
    missing = [line.split()[0] for line in tree.splitlines() if not (ROOT / line.split()[0]).exists()]
    assert not missing


def test_commands_exist() -> None:
    """Every `make` target and every `kernel-fusion` command that the README names exists."""
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"(?:^|`)make ([a-z]+)", README, re.MULTILINE)) <= targets
    commands = set(re.findall(r"(?:^|`)kernel-fusion ([a-z]+)", README, re.MULTILINE))
    assert commands
    assert commands <= set(typer.main.get_command(app).commands)


def test_tables_name_everything() -> None:
    """Every verb, every module and every activation is in the README."""
    verbs = [f"kf.{name}" for name in kf.functional.__all__ if name != "NormOutput"]
    modules = [f"kf.{name}" for name in kf.nn.__all__]
    missing = [name for name in (*verbs, *modules, *kf.ACTIVATIONS) if f"`{name}`" not in README]
    assert not missing
