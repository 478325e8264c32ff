"""Values read from files: each is checked once, and an error names its field."""

from __future__ import annotations

import dataclasses
import reprlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

_LONGEST_NAME = 200
_LARGEST_COUNT = 2**63
_SHORTEST_MS, _LONGEST_MS = 1e-9, 1e12


class Rule(NamedTuple):
    """A condition on a value, in words and as a test."""

    expected: str
    holds: Callable[[Any], bool]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_text(value: Any) -> bool:
    # JSON can spell half a surrogate pair, which no file or terminal accepts.
    return isinstance(value, str) and not any("\ud800" <= character <= "\udfff" for character in value)


NAME = Rule(
    f"a printable text of 1 to {_LONGEST_NAME} characters",
    lambda value: isinstance(value, str) and value.isprintable() and 0 < len(value) <= _LONGEST_NAME,
)
TEXT = Rule("a text", _is_text)
FLAG = Rule("true or false", lambda value: isinstance(value, bool))
COUNT = Rule(
    "a whole number from 0 on, below 2^63",
    lambda value: _is_number(value) and isinstance(value, int) and 0 <= value < _LARGEST_COUNT,
)
AMOUNT = Rule("a number from 0 on, below 2^63", lambda value: _is_number(value) and 0 <= value < _LARGEST_COUNT)
TIME = Rule(
    f"a number of milliseconds from {_SHORTEST_MS:g} to {_LONGEST_MS:g}",
    lambda value: _is_number(value) and _SHORTEST_MS <= value <= _LONGEST_MS,
)
# A peer's error can be infinite or NaN.
ERROR = Rule("a number from 0 on, or NaN", lambda value: isinstance(value, float | int) and not value < 0)
FACT = Rule("a text, a number, true, false or null", lambda v: v is None or isinstance(v, int | float) or _is_text(v))
OBJECT = Rule("an object", lambda value: isinstance(value, dict))
LIST = Rule("a list", lambda value: isinstance(value, list))

_BY_TYPE = {"str": NAME, "int": COUNT, "float": AMOUNT}
_REQUIRED, _OPTIONAL = object(), " | None"


@dataclass(frozen=True)
class Fields:
    """An object read from a file.

    Attributes:
        where: the prefix of a name in errors, such as "measurements[3].".
    """

    values: dict[str, Any]
    where: str = ""

    def get(self, name: str, rule: Rule, default: Any = _REQUIRED) -> Any:
        """The value called `name`; ValueError if `rule` fails, or it is missing and has no default."""
        value = self.values.get(name)
        if value is None and default is not _REQUIRED:
            return default
        if name not in self.values:
            raise ValueError(f"`{self.where}{name}` is missing")
        return checked(value, rule, self.where + name)

    def object(self, name: str) -> Fields:
        """The object called `name`."""
        return Fields(self.get(name, OBJECT), f"{self.where}{name}.")

    def objects(self, name: str) -> Iterator[Fields]:
        """The objects of the list called `name`."""
        for index, value in enumerate(self.get(name, LIST)):
            where = f"{self.where}{name}[{index}]"
            yield Fields(checked(value, OBJECT, where), f"{where}.")

    def facts(self, name: str) -> dict[str, Any]:
        """The values of the object called `name`; all can be printed."""
        found = self.object(name)
        for key in found.values:
            checked(key, NAME, f"{self.where}{name}")
            checked(found.values[key], FACT, found.where + key)
        return found.values

    def of(self, kind: type, *names: str) -> dict[str, Any]:
        """The fields `names` of the dataclass `kind`; optional ones may be missing."""
        found = {}
        for name, annotation in ((f.name, str(f.type)) for f in dataclasses.fields(kind) if f.name in names):
            rule = TIME if name.endswith("_ms") else _BY_TYPE[annotation.removesuffix(_OPTIONAL)]
            found[name] = self.get(name, rule, None if annotation.endswith(_OPTIONAL) else _REQUIRED)
        return found


def checked(value: Any, rule: Rule, where: str) -> Any:
    """The value, or a ValueError that says `where` it stands and what `rule` expects."""
    if not rule.holds(value):
        raise ValueError(f"`{where}` must be {rule.expected}, got {reprlib.repr(value)}")
    return value
