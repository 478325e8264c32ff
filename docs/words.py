"""Checks of the words: how many a page has, how long its sentences are, and turns of phrase that slow a reader down.

`python docs/words.py` lists what is over a bar and fails where something is; `--all` prints every count. Code in fences
has no words here, a formula counts as one, and a word has at least one letter. `make lint` runs it.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]

SENTENCE = 18  # words, on the average of a page
PAGE = 1200
MANUAL = 24_000  # all pages of docs together, except REFERENCE
PAGES = {"README.md": 900, "ARCHITECTURE.md": 2000, "CONTRIBUTING.md": 2000, "CHANGELOG.md": 2000}
REFERENCE = {
    "verbs.md",
    "modules.md",
    "ops.md",
    "command_line.md",
    "faults.md",
    "measured.md",
    "models_checked.md",
    "plans.md",
    "promises.md",
    "results.md",
}
FOR_TOOLS = re.compile(r"(?:#|//) *(?:type: ignore|noqa|fmt:|pragma:|namespace)[^#\n]*")  # no words

COMMON = {
    r"(?:^|(?<=[.!?] ))(?:Of|By) ": "begins with a headless Of or By",
    r"\bbut for\b": "say 'except'",
    r"\bas ever\b": "say 'as usual', or nothing",
    r"\bso many\b": "say how many",
}
# A comment may be a title ("What a plan knows"), and names bits of numbers.
DIALECT = COMMON | {
    r"(?:^|(?<=[.!?] ))What (?![^.!?]*\?)": "begins with a headless What",
    r"\b16[- ]bits?\b(?! (?:integer|float|word|half|halves))": "say 'fp16 and bf16'",
    r"\bbehind (?:an? |the )?(?:activation|norm|`?relu|`?gelu|`?silu|`?mish)": "say 'after'",
}


def prose(text: str) -> str:
    """The words of a page: without code, comments and link targets; a formula is one word."""
    text = re.sub(r"^(```+|~~~+).*?^\1\s*$", "", text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
    text = re.sub(r"\$\$.*?\$\$|\$[^$\n]+\$", "x", text, flags=re.DOTALL)
    text = re.sub(r"!\[[^\]]*\]\([^)]*\)", "", text)
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)
    return re.sub(r"`[^`\n]*`", "code", text)


def words(text: str) -> int:
    """How many words a text has."""
    return sum(any(letter.isalpha() for letter in word) for word in text.split())


def sentences(text: str) -> Iterator[str]:
    """The sentences of paragraphs and list items; headings and tables have none."""
    for block in re.split(r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.) )", text):
        line = re.sub(r"^\s*(?:[-*]|\d+\.)\s+", "", " ".join(block.split())).replace("**", "")
        if line and not line.startswith(("#", "|", ">")):
            yield from (part for part in re.split(r"(?<=[.!?])\s+(?=[\w`*(])", line) if words(part) > 1)


def pages() -> Iterator[tuple[str, int, str]]:
    """Every page that is held to a bar: its name, its bar and its words."""
    for name, bar in PAGES.items():
        yield name, bar, prose((ROOT / name).read_text())
    for path in sorted((ROOT / "docs").glob("*.md")):
        yield f"docs/{path.name}", 10**6 if path.name in REFERENCE else PAGE, prose(path.read_text())


def comments_of_python(text: str) -> str:
    """Comments and docstrings."""
    found = [t.string for t in tokenize.generate_tokens(io.StringIO(text).readline) if t.type == tokenize.COMMENT]
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            found.append(ast.get_docstring(node) or "")
    return FOR_TOOLS.sub("", "\n".join(found))


def comments_of_cpp(text: str) -> str:
    """The texts after `//`, and between `/*` and `*/`."""
    return FOR_TOOLS.sub("", "\n".join(re.findall(r"//[^\n]*|/\*.*?\*/", text, re.DOTALL)))


def sources() -> list[Path]:
    """The source files of both packages."""
    paths = sorted(path for folder in ("kernel_fusion", "bench") for path in (ROOT / folder).rglob("*"))
    return [path for path in paths if path.suffix in (".py", ".cpp", ".h", ".cuh")]


def comments(path: Path) -> str:
    """The comments and docstrings of a source file, without their marks."""
    text = path.read_text()
    found = comments_of_python(text) if path.suffix == ".py" else comments_of_cpp(text)
    return re.sub(r"^(?:#|//) ?", "", found, flags=re.MULTILINE)


def main(everything: bool) -> int:
    """Print what is over a bar, or everything; return how many things are over."""
    over, manual = [], 0
    for name, bar, text in pages():
        count, parts = words(text), list(sentences(text))
        mean = sum(map(words, parts)) / max(len(parts), 1)
        manual += count if name.startswith("docs/") and name[5:] not in REFERENCE else 0
        if everything:
            print(f"{name:32} {count:6} words, {mean:5.1f} to a sentence")
        over += [f"{name}: {count} words, at most {bar}"] if count > bar else []
        over += [f"{name}: {mean:.1f} words to a sentence, at most {SENTENCE}"] if mean > SENTENCE else []
        over += [
            f"{name}: {why}: {part[:90]}"
            for part in parts
            for rule, why in DIALECT.items()
            if part.endswith((".", ":", "!")) and re.search(rule, part)
        ]
    over += [f"docs: {manual} words, at most {MANUAL}"] if manual > MANUAL else []
    over += [
        f"{path.relative_to(ROOT)}: {why}: {found[0]}"
        for path in sources()
        for rule, why in COMMON.items()
        for found in re.finditer(rf"(?:{rule}).*", comments(path), re.MULTILINE)
    ]
    if everything:
        print(f"{'docs, without reference':32} {manual:6} words")
    print("\n".join(over))
    return len(over)


if __name__ == "__main__":
    sys.exit(1 if main("--all" in sys.argv[1:]) else 0)
