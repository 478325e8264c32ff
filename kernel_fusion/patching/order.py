"""Whether an operation of a method may run later, or earlier, than its source says: the one rule for all rewriting.

An operation reads its operands. It may change places with other expressions unless these write to what it reads. A
call that is not known to be pure is taken to write to all that it can reach, whatever its name. It cannot reach a
result on its way from one operation to the next, nor a tensor that only names of the method lead to.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Set

# Methods of tensors that write nothing and draw nothing, by names that no submodule has.
_METHODS = frozenset(
    """bfloat16 chunk clone contiguous detach dim double expand expand_as float half mean movedim permute repeat reshape
    size split squeeze sum to transpose type type_as unbind unflatten unsqueeze view view_as""".split()  # noqa: SIM905
)
# Statements that only evaluate their expressions, and bind names.
_STATEMENTS = (ast.Expr, ast.Assign, ast.AnnAssign, ast.Return, ast.Pass, ast.If, ast.Assert, ast.Raise)
_EXPRESSIONS = (ast.NamedExpr, ast.Await, ast.Yield, ast.YieldFrom)


def commute(operands: Iterable[ast.expr], others: Iterable[ast.AST], local: Set[str] = frozenset()) -> bool:
    """Whether an operation on these operands has the same result before others are evaluated and after.

    Only the names in `local` lead to the operands that have one of these names.
    """
    others = list(others)
    if all(map(is_still, others)):
        return True
    own = all(isinstance(o, ast.BinOp | ast.Constant) or (isinstance(o, ast.Name) and o.id in local) for o in operands)
    return own and not any(isinstance(n, ast.Name) and n.id in local for other in others for n in ast.walk(other))


def is_still(node: ast.AST) -> bool:
    """Whether evaluating it writes to no tensor, and draws no random number."""
    return all(map(_is_still, ast.walk(node)))


def _is_still(node: ast.AST) -> bool:
    if isinstance(node, ast.Call):
        return is_view(node)
    if isinstance(node, ast.Attribute | ast.Subscript):
        return isinstance(node.ctx, ast.Load)
    return not isinstance(node, _EXPRESSIONS) and (isinstance(node, _STATEMENTS) or not isinstance(node, ast.stmt))


def is_view(call: ast.Call) -> bool:
    """Whether it calls a method that gives a tensor another shape or dtype, or reduces it."""
    callee = call.func
    own = isinstance(callee, ast.Attribute) and callee.attr in _METHODS
    return own and not (isinstance(callee.value, ast.Name) and callee.value.id == "self")  # type: ignore[attr-defined]


def evaluated_before(statement: ast.stmt, node: ast.AST) -> list[ast.AST]:
    """The parts of a statement that are evaluated before a node in it."""
    found: list[ast.AST] = []
    for each in _in_order(statement, node):
        if each is node:
            break
        found.append(each)
    return found


def _in_order(parent: ast.AST, until: ast.AST) -> Iterator[ast.AST]:
    """The nodes below one, after those below them; without statements, and nothing below `until`."""
    children = [parent.value, *parent.targets] if isinstance(parent, ast.Assign) else ast.iter_child_nodes(parent)
    for child in children:
        if isinstance(child, ast.stmt | ast.excepthandler | ast.match_case):
            continue
        if child is not until:
            yield from _in_order(child, until)
        yield child
