"""Whether an operation of a method may run later, or earlier, than its source says: the one rule for all rewriting.

An operation reads its operands. It may change places with other expressions unless these write to what it reads. A
call that is not known to be pure is taken to write to all that it can reach, whatever its name. It cannot reach a
result on its way from one operation to the next, nor a tensor that only names of the method lead to.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Set

# Methods of tensors that write nothing and draw nothing. No submodule has the name of one of the first: modules have
# such methods themselves, or it says that a tensor comes. A submodule named as one of the others is given a tensor.
_OF_TENSORS = frozenset({"bfloat16", "double", "expand_as", "float", "half", "to", "type", "type_as", "view_as"})
_METHODS = _OF_TENSORS | frozenset(
    """chunk clone contiguous detach dim expand mean movedim permute repeat reshape size split squeeze sum transpose
    unbind unflatten unsqueeze view""".split()  # noqa: SIM905
)
_OF_SHAPES = frozenset({"device", "dtype", "ndim", "shape"})  # attributes of tensors that are none
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
    if not isinstance(callee, ast.Attribute) or callee.attr not in _METHODS:
        return False
    if isinstance(callee.value, ast.Name) and callee.value.id == "self":
        return False
    given = [*call.args, *(keyword.value for keyword in call.keywords)]
    return callee.attr in _OF_TENSORS or not any(map(_may_be_a_tensor, given))


def _may_be_a_tensor(node: ast.expr) -> bool:
    """Whether an argument may be a tensor, or have one in it: a name, or the result of a call."""
    if isinstance(node, ast.Attribute):
        return node.attr not in _OF_SHAPES
    if isinstance(node, ast.Subscript):
        return _may_be_a_tensor(node.value)
    parts = [each for each in ast.iter_child_nodes(node) if isinstance(each, ast.expr)]
    return any(map(_may_be_a_tensor, parts)) if parts else not isinstance(node, ast.Constant)


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
