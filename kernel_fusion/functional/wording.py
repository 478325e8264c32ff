"""Docstrings that refer to another one get its paragraphs: in the source each stands once, and for a reader everywhere.

An entry such as ``weight_offset, out_dtype: as for :func:`layer_norm`.`` becomes an entry for each name, with the text
that the other docstring has; what follows a semicolon is added to it. ``Args, returns: as for :func:`layer_norm`, with
`eps` as for :func:`rms_norm`.`` becomes all entries of the other docstring. Lines stay as they are, since every import
does this.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

_ARGS = re.compile(r"^ {4}Args:\n((?: {8}.*\n)+)", re.MULTILINE)
_ENTRY = re.compile(r"^ {8}(?=\S)(.*?): (.*\n(?: {12}.*\n)*)", re.MULTILINE)
_PATH = r":(?:func|class):`(?:kernel_fusion\.)?(\w+)`"
_REFERENCE = re.compile(rf"as (?:for|in) {_PATH}[.;]\s+(.*)", re.DOTALL)
_WHOLE = re.compile(rf"^ {{4}}Args, (.*?): as for {_PATH}(?:, with (.*?) as for {_PATH})?\.", re.MULTILINE)


def spell_out(namespace: Mapping[str, Any], names: Iterable[str]) -> None:
    """Write the paragraphs into the docstrings of some functions or classes.

    Args:
        namespace: these, and what they refer to, by name.
        names: which docstrings to write.
    """
    known: dict[str, dict[str, str]] = {}

    def described(name: str) -> dict[str, str]:
        if name not in known:
            known[name] = entries(_spelled_out(namespace[name].__doc__, described))
        return known[name]

    for name in names:
        if namespace[name].__doc__:  # Python leaves docstrings out under -OO
            namespace[name].__doc__ = _spelled_out(namespace[name].__doc__, described)


def _spelled_out(text: str, described: Callable[[str], dict[str, str]]) -> str:
    if whole := _WHOLE.search(text):
        rest, model, exceptions, second = whole.groups()
        own = {name: described(second)[name] for name in re.findall(r"`(\w+)`", exceptions or "")}
        lines = "".join(f"        {name}: {said}" for name, said in {**described(model), **own}.items())
        return text.replace(whole[0], f"    Args:\n{lines}\n    {rest.capitalize()}: as for :func:`{model}`.")
    part = _ARGS.search(text)
    if not part or " :" not in part[1]:
        return text
    lines = ""
    for names, said in _ENTRY.findall(part[1]):
        if reference := _REFERENCE.fullmatch(said):
            model, more = reference.groups()
            more = f"            {more[0].upper()}{more[1:]}" if more else ""
            lines += "".join(f"        {name}: {described(model)[name]}{more}" for name in names.split(", "))
        else:
            lines += f"        {names}: {said}"
    return text.replace(part[1], lines)


def entries(text: str) -> dict[str, str]:
    """The arguments that a docstring describes, and their texts."""
    part = _ARGS.search(text)
    found = _ENTRY.findall(part[1]) if part else []
    return {name: said for names, said in found for name in names.split(", ")}
