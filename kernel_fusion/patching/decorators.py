"""Puts another function inside a method's decorators.

Transformers wraps the forward of many layers, say to take an argument by its old name. Such a wrapper keeps the
function in a variable of its closure, so a copy can call another.
"""

from __future__ import annotations

import functools
import types
from typing import Any


def inside(method: types.FunctionType) -> types.FunctionType:
    """The function that the decorators call in the end; a wrapper that cannot be copied is the end."""
    place = _place(method)
    return method if place is None else inside(_cells(method)[place])


def around(method: types.FunctionType, function: Any) -> Any:
    """The method's decorators around another function."""
    place = _place(method)
    if place is None:
        return function
    cells = list(method.__closure__ or ())
    wrapped = around(_cells(method)[place], function)
    cells[place] = types.CellType(wrapped)
    made = types.FunctionType(method.__code__, method.__globals__, None, method.__defaults__, tuple(cells))
    functools.update_wrapper(made, method)
    made.__kwdefaults__ = method.__kwdefaults__
    made.__wrapped__ = wrapped  # type: ignore[attr-defined]
    return made


def _place(method: types.FunctionType) -> int | None:
    """The variable that holds what a wrapper wraps, if no other does."""
    wrapped = getattr(method, "__wrapped__", None)
    places = [index for index, value in enumerate(_cells(method)) if value is wrapped]
    held = sum(value is wrapped for value in vars(method).values())  # the compiler's has it twice
    return places[0] if isinstance(wrapped, types.FunctionType) and len(places) == held == 1 else None


def _cells(method: types.FunctionType) -> list[Any]:
    """The values in a closure; None for empty variables."""
    values = []
    for cell in method.__closure__ or ():
        try:
            values.append(cell.cell_contents)
        except ValueError:
            values.append(None)
    return values
