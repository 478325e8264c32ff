"""Wrappers of methods, as decorators make them: what they wrap, and copies of them around another function."""

from __future__ import annotations

import functools
import types
from typing import Any


def inside(method: types.FunctionType) -> types.FunctionType:
    """The function that decorators call in the end; a copy of a wrapper can call another, which its closure holds."""
    place = _place(method)
    return method if place is None else inside(closure(method)[place])


def around(method: types.FunctionType, function: Any, whole: types.CellType) -> Any:
    """The method's decorators around another function. The copies see each other, and themselves, as the originals do.

    A wrapper may ask whether it is its class's method, to know whether it is the outermost one: so the outermost one
    sees what `whole` will hold, the method of the patched class.
    """
    chain = [method]
    while (place := _place(chain[-1])) is not None:
        chain.append(closure(chain[-1])[place])
    copies: dict[int, Any] = {id(chain.pop()): function}
    originals = {id(each) for each in chain} | copies.keys()
    for each in chain:
        cells = zip(each.__closure__ or (), closure(each), strict=True)
        own = tuple(
            whole if value is method else types.CellType() if id(value) in originals else cell for cell, value in cells
        )
        copies[id(each)] = types.FunctionType(each.__code__, each.__globals__, None, each.__defaults__, own)
    for each in chain:
        made: Any = copies[id(each)]
        functools.update_wrapper(made, each)
        made.__kwdefaults__ = each.__kwdefaults__
        vars(made).update({name: copies.get(id(value), value) for name, value in vars(each).items()})
        for cell, value in zip(made.__closure__ or (), closure(each), strict=True):
            if id(value) in copies and cell is not whole:
                cell.cell_contents = copies[id(value)]
    return copies[id(method)]


def _place(method: types.FunctionType) -> int | None:
    """The variable that holds what a wrapper wraps, if no other does."""
    wrapped = getattr(method, "__wrapped__", None)
    places = [index for index, value in enumerate(closure(method)) if value is wrapped]
    held = sum(value is wrapped for value in vars(method).values())  # the compiler's has it twice
    return places[0] if isinstance(wrapped, types.FunctionType) and len(places) == held == 1 else None


def closure(method: types.FunctionType) -> list[Any]:
    """The values in a closure; None for empty variables."""
    values = []
    for cell in method.__closure__ or ():
        try:
            values.append(cell.cell_contents)
        except ValueError:
            values.append(None)
    return values
