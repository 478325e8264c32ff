"""Which classes the code of a model asks for exactly, as `type(module) is Class` does: modules of those are left.

A patched module has a subclass of its class, so such code would take another branch. The text of methods, and of the
functions in their file that they call, shows the question: a comparison, or the key of a table. `isinstance` asks for
no exact class.
"""

from __future__ import annotations

import ast
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from kernel_fusion.patching.rewrite import UNKNOWN, methods_of, source, value_of
from kernel_fusion.patching.swap import original_class
from kernel_fusion.patching.wrappers import inside

_ASKS = frozenset({"type", "__class__"})
_LOOK_UP = frozenset({"get", "index", "count", "pop", "setdefault"})  # methods of tables that take a key


@dataclass(frozen=True)
class Question:
    """The texts of an object whose class is asked for, and of what it is compared with; None if a text is missing.

    They stand in a method of the module, or in another function.
    """

    function: types.FunctionType
    in_method: bool
    subject: str | None
    other: str | None


def kept(modules: Sequence[nn.Module]) -> dict[type, str]:
    """The classes that modules must keep, because code of some module asks for them, with the reason.

    If it asks for one that its text does not show, these are the classes of all modules below it.
    """
    asks = {kind: _questions_of(kind) for kind in {original_class(type(module)) for module in modules}}
    found: dict[type, str] = {}
    for module in modules:
        for question in asks[original_class(type(module))]:
            asked = _classes_asked(module, question)
            if asked is None:
                asked = {original_class(type(each)) for each in module.modules()}
            found.update(dict.fromkeys(asked, f"`{question.function.__qualname__}` asks for its exact class"))
    return found


def _questions_of(kind: type[nn.Module]) -> list[Question]:
    """The questions that the methods of a class ask; PyTorch's own layers ask none."""
    if kind.__module__.startswith("torch."):
        return []
    methods = [inside(method) for name, method in methods_of(kind).items() if name != "__init__"]
    pending = [*methods]
    seen: set[types.CodeType] = set()
    found: list[Question] = []
    while pending:
        function = pending.pop()
        if function.__code__ in seen:
            continue
        seen.add(function.__code__)
        names = {name for code in _codes(function.__code__) for name in code.co_names}
        if names & _ASKS:
            found += (Question(function, function in methods, *texts) for texts in _questions(function))
        called = (function.__globals__.get(name) for name in names)
        pending += [f for f in called if isinstance(f, types.FunctionType) and f.__module__ == function.__module__]
    return found


def _classes_asked(module: nn.Module, question: Question) -> set[type] | None:
    """The classes that a question of this module's code is about; None if that cannot be told."""
    owner = module if question.in_method else None
    subject, other = (value_of(text, question.function, owner) for text in (question.subject, question.other))
    found = set(_classes(other))
    if found:
        return found
    if other is UNKNOWN:
        return None if subject is UNKNOWN else {original_class(type(subject))}
    return set()


def _classes(value: Any) -> Iterator[type]:
    """The classes that a value is or has in it."""
    if isinstance(value, type):
        yield value
    elif isinstance(value, dict | list | tuple | set | frozenset):
        for each in value:
            yield from _classes(each)


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """Code and the code within it."""
    yield code
    for each in code.co_consts:
        if isinstance(each, types.CodeType):
            yield from _codes(each)


def _questions(function: types.FunctionType) -> Iterator[tuple[str | None, str | None]]:
    """The questions in the text of a function: what is asked about, and what it is compared with."""
    try:
        tree = ast.parse(source(function))
    except (OSError, TypeError, SyntaxError):
        yield None, None
        return
    nodes = list(ast.walk(tree))
    named = {
        target.id: subject
        for node in nodes
        if isinstance(node, ast.Assign) and (subject := _subject(node.value, {}))
        for target in node.targets
        if isinstance(target, ast.Name)
    }

    def subject_of(node: ast.AST) -> str | None:
        return _subject(node, named)

    for node in nodes:
        yield from _asked(node, subject_of)


def _asked(node: ast.AST, subject_of: Callable[[ast.AST], str | None]) -> Iterator[tuple[str, str]]:
    """The subject of a comparison, or of a look-up in a table, and what it is compared with."""
    if isinstance(node, ast.Compare):
        operands = [node.left, *node.comparators]
        subjects = [subject for each in operands if (subject := subject_of(each))]
        others = [ast.unparse(each) for each in operands if not subject_of(each)]
        yield from ((subject, other) for subject in subjects for other in others)
    elif isinstance(node, ast.Subscript) and (subject := subject_of(node.slice)):
        yield subject, ast.unparse(node.value)
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _LOOK_UP:
        keys = map(subject_of, node.args[:1])
        yield from ((key, ast.unparse(node.func.value)) for key in keys if key)


def _subject(node: ast.AST, named: dict[str, str]) -> str | None:
    """The text of x in `type(x)` or `x.__class__`, or in a name of such; None of other nodes."""
    if isinstance(node, ast.Name):
        return named.get(node.id)
    if isinstance(node, ast.Attribute) and node.attr == "__class__":
        return ast.unparse(node.value)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "type":
        return ast.unparse(node.args[0]) if len(node.args) == 1 else None
    return None
