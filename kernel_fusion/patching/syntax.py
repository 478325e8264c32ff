"""Reads and makes pieces of a method's syntax tree."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from kernel_fusion.patching.order import is_view

# Parts not evaluated with their statement.
_LATER = (ast.Lambda, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp, ast.stmt)


def end_of(statement: ast.stmt) -> tuple[int, int]:
    """Where a statement ends in the source."""
    return statement.end_lineno or 0, statement.end_col_offset or 0


def is_load(node: ast.AST) -> bool:
    """Whether it reads a name."""
    return isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)


def names_it(node: ast.AST, name: str) -> bool:
    """Whether it is this name."""
    return isinstance(node, ast.Name) and node.id == name


def orders(node: Any, kind: type[ast.operator]) -> list[tuple[ast.expr, ast.expr]]:
    """Both orders of the operands of a sum or a product; none of other nodes."""
    fits = isinstance(node, ast.BinOp) and isinstance(node.op, kind)
    return [(node.left, node.right), (node.right, node.left)] if fits else []


def made_call(function: str, **operands: ast.expr) -> ast.Call:
    """A call with these arguments, in the order of their places in the source."""
    keywords = [ast.keyword(name, value) for name, value in operands.items()]
    return ast.Call(ast.Name(function, ast.Load()), [], sorted(keywords, key=lambda keyword: place_of(keyword.value)))


def place_of(node: ast.expr) -> tuple[int, int]:
    """Where a node starts in the source; one made here is where the node was that it stands for, or is a constant."""
    return (0, 0) if isinstance(node, ast.Constant) else (node.lineno, node.col_offset)


def swapped(operands: Mapping[str, ast.expr] | None = None, /, **operations: bool) -> dict[str, ast.expr]:
    """An operand that names operations whose operands stand the other way round: the first decides a result's strides.

    `operands` may have such a one from before.
    """
    before: Any = (operands or {}).get("swapped")
    names = (*(before.value if before else ()), *(name for name, is_swapped in operations.items() if is_swapped))
    return {"swapped": ast.Constant(names)} if names else {}  # type: ignore[arg-type]


def as_in_source(*pair: ast.expr) -> list[ast.expr]:
    """Two arguments, evaluated in the order of the source."""
    if place_of(pair[0]) <= place_of(pair[1]):
        return [*pair]
    reverse = ast.Slice(step=ast.UnaryOp(ast.USub(), ast.Constant(1)))
    return [ast.Starred(ast.Subscript(ast.Tuple([*pair[::-1]], ast.Load()), reverse, ast.Load()), ast.Load())]


def first_of(call: ast.Call) -> ast.Subscript:
    """The first of the results of a call."""
    return ast.Subscript(call, ast.Constant(0), ast.Load())


def plain_call(node: ast.AST) -> ast.Call | None:
    """A call of a named callee with one positional argument, or None."""
    plain = isinstance(node, ast.Call) and len(node.args) == 1 and not node.keywords
    if not plain or isinstance(node.args[0], ast.Starred):  # type: ignore[attr-defined]
        return None
    callee = node.func  # type: ignore[attr-defined]
    while isinstance(callee, ast.Attribute | ast.Subscript):
        callee = callee.value
    return node if isinstance(callee, ast.Name) else None  # type: ignore[return-value]


def has_angles(call: ast.Call) -> bool:
    """Whether a plain name's call ends with `cos, sin`, or with `unsqueeze_dim` after them."""
    last = [a.id for a in call.args[-2:] if isinstance(a, ast.Name)]
    plain = isinstance(call.func, ast.Name) and not any(isinstance(a, ast.Starred) for a in call.args)
    plain = plain and len(call.args) in (3, 4) and all(k.arg == "unsqueeze_dim" for k in call.keywords)
    return plain and last == ["cos", "sin"]


def children(node: ast.AST, kind: type[Any]) -> Iterator[tuple[tuple[ast.AST, str, int | None], Any]]:
    """The expressions of a kind that a statement evaluates once, innermost first, with places; none if it writes."""
    if isinstance(node, ast.stmt) and any(map(_writes, ast.walk(node))):
        return
    for name, value in ast.iter_fields(node):
        if isinstance(node, ast.stmt) and name in ("body", "orelse", "finalbody", "handlers", "cases"):
            continue
        for index, child in enumerate(value if isinstance(value, list) else [value]):
            if isinstance(child, ast.AST) and not isinstance(child, _LATER):
                yield from children(child, kind)
                if isinstance(child, kind):
                    yield (node, name, index if isinstance(value, list) else None), child


def _writes(node: ast.AST) -> bool:
    """Whether it calls a method that writes in place, by its name, or names a value within an expression."""
    in_place = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr.endswith("_")
    return in_place or isinstance(node, ast.NamedExpr)


def stores(statement: ast.stmt, name: str) -> bool:
    """Whether a statement binds a name anywhere."""
    return any(
        isinstance(n, ast.Name) and n.id == name and not isinstance(n.ctx, ast.Load) for n in ast.walk(statement)
    )


def addition_before(block: list[ast.stmt], index: int, name: str) -> tuple[ast.Assign | None, set[str]]:
    """The statement `name = a + b` before that at `index`, and all its names; copies of names may come between."""
    copies: list[tuple[str, str]] = []
    for earlier in reversed(block[:index]):
        if not isinstance(earlier, ast.Assign) or len(earlier.targets) != 1:
            break
        target = earlier.targets[0]
        if not isinstance(target, ast.Name):
            break
        if target.id == name and orders(earlier.value, ast.Add):
            names = {name}
            for copied, source in reversed(copies):
                names |= {copied} if source in names else set()
            return earlier, names
        if not isinstance(earlier.value, ast.Name):
            break
        copies.append((target.id, earlier.value.id))
        name = earlier.value.id if target.id == name else name
    return None, set()


def is_optional(statement: ast.stmt, node: ast.AST) -> bool:
    """Whether a condition within a statement decides if a node is evaluated."""
    parts: list[ast.expr] = []
    for n in ast.walk(statement):
        parts += [n.body, n.orelse] if isinstance(n, ast.IfExp) else n.values[1:] if isinstance(n, ast.BoolOp) else []
    return any(n is node for part in parts for n in ast.walk(part))


def may_come_earlier(expressions: Iterable[ast.expr], block: list[ast.stmt], to: ast.stmt, statement: ast.stmt) -> bool:
    """Whether these have the same values at `to`: views of names, none of which is assigned from there on."""
    nodes = [node for each in expressions for node in ast.walk(each)]
    if any(isinstance(n, ast.Call) and not is_view(n) for n in nodes):
        return False
    between = block[block.index(to) : block.index(statement)]
    return not any(is_load(n) and stores(each, n.id) for n in nodes for each in between)  # type: ignore[attr-defined]


def modulation_of(node: ast.AST) -> tuple[ast.expr, ...] | None:
    """x, scale and, if there is one, shift of `x * (1 + scale) + shift`, in any order of operands."""
    of_sum = ((*scaled, shift) for part, shift in orders(node, ast.Add) if (scaled := _scaled(part)))
    return next(of_sum, None) or _scaled(node)


def _scaled(node: ast.AST) -> tuple[ast.expr, ast.expr] | None:
    """x and scale of `x * (1 + scale)`."""
    both = orders(node, ast.Mult)
    return next(((x, scale) for x, factor in both if (scale := _above_one(factor)) is not None), None)


def _above_one(node: ast.AST) -> ast.expr | None:
    """scale of `1 + scale`, or of an indexed one."""
    if isinstance(node, ast.Subscript):
        inner = _above_one(node.value)
        return None if inner is None else ast.copy_location(ast.Subscript(inner, node.slice, ast.Load()), node)
    both = orders(node, ast.Add)
    return next((other for one, other in both if isinstance(one, ast.Constant) and one.value == 1), None)


def replace_value(block: list[ast.stmt], old: ast.expr, new: ast.expr) -> None:
    """Put another value into the assignment of this one."""
    for statement in block:
        if isinstance(statement, ast.Assign) and statement.value is old:
            statement.value = new
