"""Dataclasses that cross to C++ as rows of integers. native/headers.py makes the C++ structs.

The annotation of a field is its kind: int, bool, `Names`, a tuple of these, or another such dataclass.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from functools import cache
from types import NoneType
from typing import Any, NamedTuple, get_args, get_type_hints


class Names(NamedTuple):
    """An enumeration. The code of a name is its position.

    Attributes:
        cpp: the name of the enumeration in C++, or None.
        enumerators: the names in C++, if they differ from those in Python.
        optional: whether None is allowed; its code is -1.
    """

    cpp: str | None
    names: tuple[str, ...]
    enumerators: tuple[str, ...] = ()
    optional: bool = False

    def code(self, name: str | None) -> int:
        """The code of a name."""
        return -1 if name is None else self.names.index(name)

    def name(self, code: int) -> str | None:
        """The name that has this code."""
        return None if code < 0 else self.names[code]

    def enumerator(self, name: str | None) -> str:
        """The enumerator of a name in C++, such as "kFromTanh" for "from_tanh"."""
        if name is None:
            return "kAbsent"
        return constant(self.enumerators[self.code(name)] if self.enumerators else name)

    def literal(self, name: str | None) -> str:
        """A name as an expression in C++."""
        return f"{self.cpp}::{self.enumerator(name)}" if self.cpp else str(self.code(name))


# The kinds of kernels whose launches the extension counts.
COUNTERS = Names("Counter", ("cpu_forward", "cpu_backward", "cuda_launch"))


class Several(NamedTuple):
    """A number of fields of one kind. `tuple[int, int]` means the same as two of int."""

    kind: Any
    length: int


def is_struct(kind: Any) -> bool:
    """Whether a kind is a dataclass."""
    return dataclasses.is_dataclass(kind)


def constant(name: str) -> str:
    """The name of a constant in C++, such as "kAlignedPositions" for "aligned_positions"."""
    return "k" + "".join(word[0].upper() + word[1:] for word in name.split("_"))


@cache
def kinds(owner: type) -> dict[str, Any]:
    """The kind of each field of a dataclass, in order."""
    hints = get_type_hints(owner, include_extras=True)
    return {field.name: _kind(hints[field.name]) for field in dataclasses.fields(owner)}


@cache
def marks(owner: type) -> dict[str, Any]:
    """What `Annotated` adds to the annotation of a field, for the fields that have it."""
    found = {}
    for name, hint in get_type_hints(owner, include_extras=True).items():
        args = get_args(hint)
        said: tuple[Any, ...] = getattr(args[0] if NoneType in args else hint, "__metadata__", ())
        if len(said) > 1:
            found[name] = said[1]
    return found


def _kind(hint: Any) -> Any:
    if hint in (int, bool) or is_struct(hint):
        return hint
    if marks := getattr(hint, "__metadata__", None):
        return marks[0]
    args = get_args(hint)
    if NoneType in args:
        return _kind(args[0])
    return Several(_kind(args[0]), len(args)) if args else hint


def flags(owner: Any) -> list[str]:
    """The names of the fields that are true or false, of a dataclass or of one of its objects."""
    return [name for name, kind in kinds(owner if isinstance(owner, type) else type(owner)).items() if kind is bool]


def numbers(kind: Any, value: Any) -> list[int]:
    """The integers that stand for a value of this kind. The kind may be a base class of the value's class."""
    if is_struct(kind):
        return [n for name, each in kinds(kind).items() for n in numbers(each, getattr(value, name))]
    if isinstance(kind, Several):
        return [n for each in value for n in numbers(kind.kind, each)]
    return [kind.code(value) if isinstance(kind, Names) else int(value)]


def read(kind: Any, row: Iterator[int]) -> Any:
    """The value of this kind that the next integers of `row` stand for."""
    if is_struct(kind):
        return kind(**{name: read(each, row) for name, each in kinds(kind).items()})
    if isinstance(kind, Several):
        return tuple(read(kind.kind, row) for _ in range(kind.length))
    return kind.name(next(row)) if isinstance(kind, Names) else kind(next(row))


def count(kind: Any) -> int:
    """How many integers a value of this kind takes."""
    if is_struct(kind):
        return sum(map(count, kinds(kind).values()))
    return kind.length * count(kind.kind) if isinstance(kind, Several) else 1


def literal(kind: Any, value: Any) -> str:
    """A value of this kind as an expression in C++."""
    return kind.literal(value) if isinstance(kind, Names) else str(int(value))


def constants(of: Any, *names: str) -> dict[str, str]:
    """Fields as constants of C++, such as {"kVec": "8", "kCombine": "kf::Combine::kAdd"}."""
    values = {constant(name): literal(kinds(of.__class__)[name], getattr(of, name)) for name in names}
    return {name: f"kf::{value}" if "::" in value else value for name, value in values.items()}
