"""The documentation site: `make docs` builds these pages, and those of the repository's root, with Sphinx.

Every page is plain Markdown that a forge renders too, with the same links between pages and to sources; so the source
folder is the repository's root. The rest is generated while Sphinx reads: the table of contents from the lists of
docs/README.md, the command line's options from the commands.
"""

from __future__ import annotations

import re
from typing import Any

import latex2mathml.converter
import typer
from docutils import nodes
from sphinx.application import Sphinx
from sphinx.writers.html5 import HTML5Translator
from typer.cli import get_docs_for_click

import kernel_fusion
from kernel_fusion.cli.app import app as command_line

project = "kernel_fusion"
version = release = kernel_fusion.__version__
root_doc = "docs/README"
include_patterns = ["*.md", "docs/*.md", "docs/notebook/*.md"]
exclude_patterns = [".*", "benchmarks", "build", "demo-results", "docs/_build", "examples", "kernel_fusion", "tests"]

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 4
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
maximum_signature_line_length = 100
napoleon_numpy_docstring = False
napoleon_use_ivar = True  # attributes of a tuple are documented once
napoleon_use_param = False  # several arguments may share a line, in signatures and descriptions alike
napoleon_use_rtype = False
default_role = "literal"

html_math_renderer = "mathml"
html_theme = "furo"
html_title = f"kernel_fusion {version}"
html_copy_source = False
html_show_copyright = False
html_static_path = ["static"]
html_css_files = ["site.css"]
# A site begins at its index.html.
templates_path = ["templates"]
html_additional_pages = {"index": "index.html"}

# Names in annotations that have no page here: PyTorch's, Python's, the harness's, and our abbreviations of types.
nitpick_ignore_regex = [
    ("py:.*", r"(torch|collections|pathlib|kernel_fusion_bench)\..*"),
    ("py:.*", r"kernel_fusion\.(?:bench|patching)\..*|Tensor|.*\._(Shape|Dims)"),
]

_OPTIONS = "<!-- the options of every command -->"


def _add_contents(app: Sphinx, docname: str, source: list[str]) -> None:
    """Turn each list of links of the first page into a part of the table of contents, under the list's heading."""
    if docname != root_doc:
        return
    for heading, body in re.findall(r"^## ([^\n]+)$(.*?)(?=^## |\Z)", source[0], re.MULTILINE | re.DOTALL):
        links = re.findall(r"^- \[(.+?)\]\(([\w./]+\.md)\)", body, re.MULTILINE)
        if links:
            entries = "\n".join(f"{text} <{page}>" for text, page in links)
            source[0] += f"\n```{{toctree}}\n:caption: {heading}\n:hidden:\n\n{entries}\n```\n"


def _leave_out_notes(app: Sphinx, docname: str, source: list[str]) -> None:
    """Say that pages of the notebook belong to no table of contents."""
    if docname.startswith("docs/notebook/"):
        source[0] = f"---\norphan: true\n---\n\n{source[0]}"


def _add_options(app: Sphinx, docname: str, source: list[str]) -> None:
    """Write out the help of every command where a page asks for it."""
    if _OPTIONS in source[0]:
        command = typer.main.get_command(command_line)
        commands = command.commands.values()  # type: ignore[attr-defined]
        context = typer.Context(command)
        texts = [get_docs_for_click(obj=c, ctx=context, indent=1, call_prefix="kernel-fusion") for c in commands]
        source[0] = source[0].replace(_OPTIONS, "\n".join(texts))


def _write_inline_math(writer: HTML5Translator, node: nodes.math) -> None:
    """A formula as MathML, which browsers draw without a script, a font or a network."""
    writer.body.append(latex2mathml.converter.convert(node.astext()))
    raise nodes.SkipNode


def _write_math(writer: HTML5Translator, node: nodes.math_block) -> None:
    """The same on a line of its own; a long one can be scrolled."""
    formula = latex2mathml.converter.convert(node.astext(), display="block")
    writer.body.append(f'<div style="overflow-x: auto; margin: 1em 0">{formula}</div>')
    raise nodes.SkipNode


def setup(app: Sphinx) -> dict[str, Any]:
    """Connect the above."""
    app.add_html_math_renderer("mathml", (_write_inline_math, None), (_write_math, None))
    app.connect("source-read", _add_contents)
    app.connect("source-read", _add_options)
    app.connect("source-read", _leave_out_notes)
    return {"parallel_read_safe": True}
