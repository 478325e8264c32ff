"""Rewrites methods that gate, add or rotate: `act(gate) * value`, `h = a + b` before `norm(h)`, `f(q, k, cos, sin)`.

A method's source is parsed, these expressions become calls of `sites.py` and `rotary.py`, and the result is compiled
with the method's own globals. The rest, and decorators, stay. A method without source, or in a wrapper that cannot be
copied, is left.
"""

from __future__ import annotations

import ast
import functools
import inspect
import linecache
import textwrap
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from kernel_fusion.patching import decorators, sites
from kernel_fusion.patching.rotary import turned
from kernel_fusion.patching.swap import original_class

_GATED, _ADD_NORM, _TURNED, _SUM = "_kf_gated", "_kf_add_norm", "_kf_turned", "_kf_normed"


@dataclass
class Found:
    """A method, what its decorators call, and the texts of activations, norms and functions of angles to replace.

    The last come with the number of tensors that they turn.
    """

    method: types.FunctionType
    function: types.FunctionType
    acts: set[str] = field(default_factory=set)
    norms: set[str] = field(default_factory=set)
    rotary: set[tuple[str, int]] = field(default_factory=set)


def methods_of(kind: type[nn.Module]) -> dict[str, types.FunctionType]:
    """The methods of a class, with inherited ones from its own file; libraries' base classes hold no layers."""
    found: dict[str, types.FunctionType] = {}
    for base in reversed(kind.__mro__):
        if base.__module__ == kind.__module__ and issubclass(base, nn.Module):
            found |= {name: f for name, f in vars(base).items() if isinstance(f, types.FunctionType)}
    return found


@functools.cache
def search(kind: Any) -> dict[str, Found]:
    """The methods to rewrite, and what in them."""
    result = {}
    for name, method in methods_of(kind).items():
        function = decorators.inside(method)
        if name.startswith("__") or (tree := _parse(function)) is None:
            continue
        found = Found(method, function)
        _Rewriter(found.acts.add, found.norms.add, found.rotary.add).body(tree)
        if found.acts or found.norms or found.rotary:
            result[name] = found
    return result


def rewritten(found: Found, form: RewriteForm) -> Any:
    """The method with expressions replaced: those gated, normalised or turned by what the form names."""
    function = found.function
    acts = {text: (known, name) for text, known, name in form.acts}
    tree = _parse(function)
    assert tree is not None
    _Rewriter(*(members.__contains__ for members in (acts, form.norms, form.rotary))).body(tree)
    _strip(tree)
    free = [*function.__code__.co_freevars, _GATED, _ADD_NORM, _TURNED]
    factory = ast.parse(f"def factory({', '.join(free)}):\n    return None")
    outer = factory.body[0]
    assert isinstance(outer, ast.FunctionDef)
    outer.body = [tree, ast.Return(ast.Name(tree.name, ast.Load()))]
    file = f"<kernel_fusion {function.__module__}.{function.__qualname__} {form}>"
    text = ast.unparse(ast.fix_missing_locations(factory))
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    code = next(c for c in compile(text, file, "exec").co_consts if isinstance(c, types.CodeType))
    closure = [cell.cell_contents for cell in function.__closure__ or ()]
    made = types.FunctionType(code, function.__globals__)(*closure, sites.gated_by(acts), sites.add_norm, turned)
    made.__defaults__, made.__kwdefaults__ = function.__defaults__, function.__kwdefaults__
    made.__module__, made.__qualname__, made.__doc__ = function.__module__, function.__qualname__, function.__doc__
    made.__annotations__ = function.__annotations__
    vars(made).update(vars(function))
    return decorators.around(found.method, made)


def _parse(function: types.FunctionType) -> ast.FunctionDef | None:
    """The syntax tree of a method, if its source is there and runs."""
    if hasattr(function, "__wrapped__") or set(function.__code__.co_freevars) - {"__class__"}:
        return None
    try:
        text = textwrap.dedent(inspect.getsource(function))
        tree = ast.parse(text).body[0]
    except (OSError, TypeError, SyntaxError):
        return None
    if not isinstance(tree, ast.FunctionDef) or _mangles(tree):
        return None
    same = tree.name == function.__code__.co_name and tuple(_names(tree)) == _arguments(function)
    return tree if same else None


def _strip(tree: ast.FunctionDef) -> None:
    """Remove what a definition evaluates; the compiled function gets the old values."""
    tree.returns, tree.decorator_list = None, []
    for argument in ast.walk(tree.args):
        if isinstance(argument, ast.arg):
            argument.annotation = None
    tree.args.defaults = [ast.Constant(None) for _ in tree.args.defaults]
    tree.args.kw_defaults = [value and ast.Constant(None) for value in tree.args.kw_defaults]


def _mangles(tree: ast.AST) -> bool:
    """Whether a name in a method depends on its class (`__name`)."""
    names = [n.attr if isinstance(n, ast.Attribute) else getattr(n, "id", "") for n in ast.walk(tree)]
    return any(name.startswith("__") and not name.endswith("__") for name in names)


def _names(tree: ast.FunctionDef) -> list[str]:
    arguments = tree.args
    return [a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]


def _arguments(function: types.FunctionType) -> tuple[str, ...]:
    code = function.__code__
    return code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]


class _Rewriter:
    """Replaces expressions in a function; asks `acts`, `norms` and `rotary`, with the callee's text, whether to.

    If `ask` returns None, nothing is replaced, so it may just collect.
    """

    def __init__(
        self, acts: Callable[[str], Any], norms: Callable[[str], Any], rotary: Callable[[tuple[str, int]], Any]
    ) -> None:
        self.acts, self.norms, self.rotary, self.count = acts, norms, rotary, 0

    def body(self, function: ast.FunctionDef) -> None:
        """Rewrite a function in place."""
        inner = [node for node in ast.walk(function) if isinstance(node, ast.FunctionDef | ast.Lambda)]
        hidden = {id(n) for node in inner if node is not function for n in ast.walk(node)}
        self.loads = [(n.id, n.lineno) for n in ast.walk(function) if _is_load(n)]  # type: ignore[attr-defined]
        self.captured = {n.id for n in ast.walk(function) if _is_load(n) and id(n) in hidden}  # type: ignore[attr-defined]
        self._block(function.body, in_loop=False)

    def _block(self, block: list[ast.stmt], in_loop: bool) -> None:
        for statement in block:
            if isinstance(statement, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
                continue
            loop = in_loop or isinstance(statement, ast.For | ast.While)
            for name in ("body", "orelse", "finalbody"):
                self._block(getattr(statement, name, []), loop)
        self._gates(block, in_loop)
        self._sums(block)
        self._rotations(block)

    def _gates(self, block: list[ast.stmt], in_loop: bool) -> None:
        """`act(gate) * value`, even if the activated gate was named before."""
        for index, statement in enumerate(block):
            for holder, product in list(_children(statement, ast.BinOp)):
                if not isinstance(product.op, ast.Mult):
                    continue
                for one, other in ((product.left, product.right), (product.right, product.left)):
                    call = _call(one) or (self._named(block[:index], one) if not in_loop else None)
                    if call is None or not self.acts(ast.unparse(call.func)):
                        continue
                    gate, text = call.args[0], ast.Constant(ast.unparse(call.func))
                    if call is not one:  # keep the name, now for the gate
                        _replace_value(block[:index], call, gate)
                        gate = one
                    act = ast.parse(ast.unparse(call.func), mode="eval").body
                    self._put(holder, product, _made(_GATED, text, act, gate, other))
                    break

    def _named(self, before: list[ast.stmt], operand: ast.expr) -> ast.Call | None:
        """The call that a name stands for, if this block assigns it and only the product reads it."""
        if not isinstance(operand, ast.Name) or operand.id in self.captured:
            return None
        for earlier in reversed(before):
            if _stores(earlier, operand.id):
                if not isinstance(earlier, ast.Assign) or not isinstance(earlier.targets[0], ast.Name):
                    return None
                last = earlier.end_lineno or 0
                if sum(name == operand.id and line > last for name, line in self.loads) != 1:
                    return None
                call = _call(earlier.value)
                # Statements between may write into a named tensor, but not into the result of a call.
                kept = call is not None and (isinstance(call.args[0], ast.Call) or earlier is before[-1])
                return call if kept and len(earlier.targets) == 1 else None
        return None

    def _sums(self, block: list[ast.stmt]) -> None:
        """`h = a + b` with `norm(h)` in the next statement (copies of h may come between), and `norm(a + b)`."""
        for statement in list(block):
            for holder, call in list(_children(statement, ast.Call)):
                if _call(call) is None:
                    continue
                argument = call.args[0]
                if _is_sum(argument) and self.norms(ast.unparse(call.func)):
                    made = _made(_ADD_NORM, call.func, argument.left, argument.right)
                    self._put(holder, call, ast.Subscript(made, ast.Constant(0), ast.Load()))
                elif isinstance(argument, ast.Name) and isinstance(statement, ast.Assign | ast.Return | ast.Expr):
                    addition = _addition(block, block.index(statement), argument.id)
                    if addition is not None and self.norms(ast.unparse(call.func)):
                        self._split(block, addition, statement, holder, call)

    def _split(
        self, block: list[ast.stmt], addition: ast.Assign, statement: ast.stmt, holder: Any, call: ast.Call
    ) -> None:
        """Make one call for norm and sum where the sum was; the norm's place uses it."""
        self.count += 1
        name = f"{_SUM}{self.count}"
        sum_ = addition.value
        assert isinstance(sum_, ast.BinOp)
        made = _made(_ADD_NORM, call.func, sum_.left, sum_.right)
        target = ast.Tuple([ast.Name(name, ast.Store()), addition.targets[0]], ast.Store())
        block[block.index(addition)] = ast.Assign([target], made, lineno=0)
        self._put(holder, call, ast.Name(name, ast.Load()))
        if not isinstance(statement, ast.Return):  # release it as early as before
            block.insert(block.index(statement) + 1, ast.Delete([ast.Name(name, ast.Del())]))

    def _rotations(self, block: list[ast.stmt]) -> None:
        """`f(q, k, cos, sin)` and `f(x, cos, sin)`, whatever f is; it is tried out before anything is replaced."""
        for statement in block:
            for holder, call in list(_children(statement, ast.Call)):
                if _has_angles(call) and self.rotary((ast.unparse(call.func), len(call.args) - 2)):
                    callee = ast.Name(_TURNED, ast.Load())
                    self._put(holder, call, ast.Call(callee, [call.func, *call.args], call.keywords))

    @staticmethod
    def _put(holder: Any, old: ast.expr, new: ast.expr) -> None:
        parent, name, index = holder
        if index is None:
            setattr(parent, name, new)
        else:
            getattr(parent, name)[index] = new


def _is_load(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)


def _is_sum(node: ast.AST) -> bool:
    return isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add)


def _made(function: str, *args: ast.expr) -> ast.Call:
    return ast.Call(ast.Name(function, ast.Load()), list(args), [])


def _call(node: ast.AST) -> ast.Call | None:
    """A call of a named callee with one positional argument, or None."""
    plain = isinstance(node, ast.Call) and len(node.args) == 1 and not node.keywords
    if not plain or isinstance(node.args[0], ast.Starred):  # type: ignore[attr-defined]
        return None
    callee = node.func  # type: ignore[attr-defined]
    while isinstance(callee, ast.Attribute | ast.Subscript):
        callee = callee.value
    return node if isinstance(callee, ast.Name) else None  # type: ignore[return-value]


def _has_angles(call: ast.Call) -> bool:
    """Whether a plain name's call ends with `cos, sin`, or with `unsqueeze_dim` after them."""
    last = [a.id for a in call.args[-2:] if isinstance(a, ast.Name)]
    plain = isinstance(call.func, ast.Name) and not any(isinstance(a, ast.Starred) for a in call.args)
    plain = plain and len(call.args) in (3, 4) and all(k.arg == "unsqueeze_dim" for k in call.keywords)
    return plain and last == ["cos", "sin"]


def _children(node: ast.AST, kind: type[Any]) -> Iterator[tuple[tuple[ast.AST, str, int | None], Any]]:
    """The expressions of a kind that a statement evaluates once, innermost first, with places."""
    for name, value in ast.iter_fields(node):
        if isinstance(node, ast.stmt) and name in ("body", "orelse", "finalbody", "handlers", "cases"):
            continue
        for index, child in enumerate(value if isinstance(value, list) else [value]):
            if isinstance(child, ast.AST) and not isinstance(child, ast.Lambda | ast.comprehension | ast.stmt):
                yield from _children(child, kind)
                if isinstance(child, kind):
                    yield (node, name, index if isinstance(value, list) else None), child


def _stores(statement: ast.stmt, name: str) -> bool:
    """Whether a statement binds a name anywhere."""
    return any(
        isinstance(n, ast.Name) and n.id == name and not isinstance(n.ctx, ast.Load) for n in ast.walk(statement)
    )


def _addition(block: list[ast.stmt], index: int, name: str) -> ast.Assign | None:
    """The statement `name = a + b` before that at `index`; copies of names may come between."""
    for earlier in reversed(block[:index]):
        if not isinstance(earlier, ast.Assign) or len(earlier.targets) != 1:
            return None
        target = earlier.targets[0]
        if not isinstance(target, ast.Name):
            return None
        if target.id == name:
            return earlier if _is_sum(earlier.value) else None
        if not isinstance(earlier.value, ast.Name):
            return None
    return None


def _replace_value(block: list[ast.stmt], old: ast.expr, new: ast.expr) -> None:
    for statement in block:
        if isinstance(statement, ast.Assign) and statement.value is old:
            statement.value = new


@dataclass(frozen=True)
class RewriteForm:
    """A class's expressions to replace: activations with identity and name, norms, and functions of angles."""

    acts: tuple[tuple[str, Any, str], ...]
    norms: frozenset[str]
    rotary: frozenset[tuple[str, int]]

    def __deepcopy__(self, memo: Any) -> RewriteForm:
        return self

    def __str__(self) -> str:
        gates = [f"gated_act, activation={name!r}" for name in sorted({name for _, _, name in self.acts})]
        additions = [f"addition before {norm}" for norm in sorted(self.norms)]
        return "; ".join([*gates, *additions, *(f"rope for {name}" for name, _ in sorted(self.rotary))])

    def methods(self, original: type[nn.Module]) -> dict[str, Callable[..., Any]]:
        """The rewritten methods."""
        acts = {text for text, _, _ in self.acts}
        return {
            name: rewritten(found, self)
            for name, found in search(original_class(original)).items()
            if found.acts & acts or found.norms & self.norms or found.rotary & self.rotary
        }
