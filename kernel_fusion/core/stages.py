"""Operators' arguments for `Stages`. A name, flag or row is one argument, dropout is two."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kernel_fusion.core.fields import Names, kinds, marks
from kernel_fusion.core.spec import ALONE, ROWS, VECTORS, Stages, dtype_name


class Argument(NamedTuple):
    """An operator's argument.

    Attributes:
        stage: its field of `Stages`.
        default: an absent stage's.
        kind: `Names`, or "row", "vector" or "seed" for a tensor, else None.
    """

    name: str
    stage: str
    type: str
    default: Any
    kind: Any = None

    @property
    def owner(self) -> str | None:
        """The tensor without which this option is ignored."""
        if self.type == "float":
            return "seed"
        return next((row for row in ROWS if self.name.startswith(f"{row}_")), None)


def _arguments() -> Iterator[Argument]:
    for field in fields(Stages):
        name, kind, mark = field.name, kinds(Stages)[field.name], marks(Stages).get(field.name)
        if mark == "dropout":
            yield Argument(f"{name}_p", name, "float", 0.0)
            yield Argument("seed", name, "Tensor?", None, "seed")
        elif mark in ("row", "vector"):
            yield Argument(name, name, "Tensor?", None, mark)
        elif isinstance(kind, Names):
            yield Argument(name, name, "str", field.default, kind)
        else:
            yield Argument(name, name, "bool", field.default)


ARGUMENTS = tuple(_arguments())
TENSORS = tuple(each.name for each in ARGUMENTS if each.type == "Tensor?")
NAMES = {each.name: each.kind.names for each in ARGUMENTS if each.type == "str"}
ACTIVATIONS_OF_STAGES = tuple(each.name for each in ARGUMENTS if each.kind == kinds(Stages)["activation"])
SCHEMA = ", ".join(f"{each.type} {each.name}={each.default!r}" for each in ARGUMENTS)
_tuple_of: Any = namedtuple  # type checkers cannot follow derived names


class Given(_tuple_of("Given", [a.name for a in ARGUMENTS], defaults=[a.default for a in ARGUMENTS])):  # type: ignore[misc]
    """Stage arguments, in order."""

    __slots__ = ()


class NormCall(NamedTuple):
    """The arguments of `staged_row_norm`."""

    input: Tensor
    residual: Tensor | None
    num_dims: int
    weight: Tensor | None
    bias: Tensor | None
    eps: float
    weight_offset: float
    out_dtype: torch.dtype | None
    rms: bool
    stages: Given

    @property
    def vectors(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """The tensors of a row's shape, or of groups'."""
        return self.weight, self.bias, self.stages.residual_gate

    @property
    def arguments(self) -> tuple[Any, ...]:
        """One by one."""
        return *self[:FIRST], *self.stages


# Positions in `staged_row_norm`.
FIRST = NormCall._fields.index("stages")
PLACES = {each.name: FIRST + i for i, each in enumerate(ARGUMENTS) if each.type == "Tensor?"}


def norm_call(*args: Any) -> NormCall:
    """The call with these arguments."""
    return NormCall(*args[:FIRST], Given(*args[FIRST:]))  # type: ignore[call-arg]


def of_verb(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """An operator's arguments from a verb's; `seed` True stands for one."""
    given = {each.name: each.default for each in ARGUMENTS}
    given |= {name: arguments[name] for name in given if arguments.get(name) is not None}
    return given | {"seed": True if given["dropout_p"] and arguments["training"] else None}


def compiled_in(given: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments as fields of `Stages`."""
    found = {}
    for each in ARGUMENTS:
        value = given.get(each.name, each.default)
        if each.owner is not None and given.get(each.owner) is None:
            value = each.default
        if each.kind == "seed":
            value = value is not None
        elif each.type == "Tensor?" and value is not None:
            value = dtype_name(value.dtype)
        if each.type != "float":
            found[each.stage] = value
    return found


def conflict(given: Mapping[str, Any], residual: object) -> tuple[str, str] | None:
    """A given row, and an argument that does not go with it; `residual` is a tensor or True."""
    for row, goes_with in ALONE.items():
        if given.get(row) is None:
            continue
        if residual is not None and residual is not False:
            return "residual", row
        for each in ARGUMENTS:
            its_own = row in (each.name, each.owner) or each.name in goes_with
            if not its_own and each.type != "float" and given.get(each.name, each.default) != each.default:
                return each.name, row
    return None


def lacks_residual(given: Mapping[str, Any], residual: object) -> bool:
    """Whether a residual's gate is given alone."""
    return given.get("residual_gate") is not None and (residual is None or residual is False)


def around(compiled: Mapping[str, Any]) -> bool:
    """Whether these fields hold a stage."""
    return Stages(**{field.name: compiled[field.name] for field in fields(Stages)}).any


def rows_in(dtype: torch.dtype, given: Given) -> Given:
    """`given`, its tensors in this dtype."""
    rows = {name: getattr(given, name) for name in (*ROWS, *VECTORS)}
    changed: Given = given._replace(**{name: t.to(dtype) for name, t in rows.items() if t is not None})
    return changed


def other_row(given: Given, residual: Tensor | None) -> Tensor | None:
    """The given one of `ROWS`, or the residual."""
    at = row_at(given)
    return residual if at is None else given[at]


def row_at(given: Given) -> int | None:
    """Its position, or None."""
    return next((i for i, each in enumerate(ARGUMENTS) if each.kind == "row" and given[i] is not None), None)
