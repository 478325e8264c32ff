"""The arguments by which operators take `Stages`. A name, flag or row is one argument; dropout is two, p and a seed."""

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
    """An argument of an operator that says something about a stage.

    Attributes:
        stage: the field of `Stages` that it decides.
        default: the value if the stage is absent.
        kind: `Names` for a name; "row", "vector" or "seed" for a tensor; None for a flag or number.
    """

    name: str
    stage: str
    type: str
    default: Any
    kind: Any = None

    @property
    def owner(self) -> str | None:
        """The name of the tensor without which this option has no meaning, or None."""
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
    """The values of all stage arguments, in the order of the operators."""

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
        """Weight, bias and the residual's gate: tensors of the shape of a row, or of one row per group."""
        return self.weight, self.bias, self.stages.residual_gate

    @property
    def arguments(self) -> tuple[Any, ...]:
        """All arguments in one tuple, as the operator takes them."""
        return *self[:FIRST], *self.stages


# The positions of arguments in `staged_row_norm`.
FIRST = NormCall._fields.index("stages")
PLACES = {each.name: FIRST + i for i, each in enumerate(ARGUMENTS) if each.type == "Tensor?"}


def norm_call(*args: Any) -> NormCall:
    """The call that these arguments of the operator make."""
    return NormCall(*args[:FIRST], Given(*args[FIRST:]))  # type: ignore[call-arg]


def of_verb(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The stage arguments of an operator, from those of a public function. A `seed` of True stands for any seed."""
    given = {each.name: each.default for each in ARGUMENTS}
    given |= {name: arguments[name] for name in given if arguments.get(name) is not None}
    return given | {"seed": True if given["dropout_p"] and arguments["training"] else None}


def compiled_in(given: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments as fields of `Stages`, for which kernels are compiled."""
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
    """The names of a given row and of an argument that does not go with it, or None. `residual` is a tensor or True."""
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
    """Whether a gate of the residual is given without a residual."""
    return given.get("residual_gate") is not None and (residual is None or residual is False)


def around(compiled: Mapping[str, Any]) -> bool:
    """Whether any of these fields of `Stages` is a stage."""
    return Stages(**{field.name: compiled[field.name] for field in fields(Stages)}).any


def rows_in(dtype: torch.dtype, given: Given) -> Given:
    """The stage arguments, with their rows and vectors converted to this dtype."""
    rows = {name: getattr(given, name) for name in (*ROWS, *VECTORS)}
    changed: Given = given._replace(**{name: t.to(dtype) for name, t in rows.items() if t is not None})
    return changed


def other_row(given: Given, residual: Tensor | None) -> Tensor | None:
    """The tensor of the input's shape beside the input: a stage's row, or the residual."""
    at = row_at(given)
    return residual if at is None else given[at]


def row_at(given: Given) -> int | None:
    """The position of the stage's row that is given, or None."""
    return next((i for i, each in enumerate(ARGUMENTS) if each.kind == "row" and given[i] is not None), None)
