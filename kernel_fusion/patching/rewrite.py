"""Rewrites methods that gate, add or rotate: `act(gate) * value`, `h = a + b` before `norm(h)`, `f(q, k, cos, sin)`.

A method's source is parsed, these expressions become calls of `sites.py` and `rotary.py`, and the result is compiled
with the method's own globals. The rest, and decorators, stay. A method without source, or in a wrapper that cannot be
copied, is left.
"""

from __future__ import annotations
import __future__

import ast
import functools
import inspect
import linecache
import textwrap
import types
import weakref
from collections.abc import Callable, Iterator, Set
from dataclasses import dataclass, field
from typing import Any, TypeVar

from torch import nn

from kernel_fusion.patching import rewriter as names
from kernel_fusion.patching import sites
from kernel_fusion.patching.rewriter import Rewriter, Site
from kernel_fusion.patching.rotary import turned
from kernel_fusion.patching.sites import Act
from kernel_fusion.patching.swap import Plan, Whole
from kernel_fusion.patching.wrappers import around, closure, inside

T = TypeVar("T")
_SITES = {
    names.ADD_NORM: sites.add_norm,
    names.DROP_ADD_NORM: sites.drop_add_norm,
    names.MODULATED: sites.modulated,
    names.ADD_MODULATED: sites.add_modulated,
    names.TURNED: turned,
}
_ORIGINAL, _METHOD = "_kf_original", "_kf_method"
UNKNOWN = object()  # the value of an expression that cannot be told


def _weakly(ask: Callable[[types.FunctionType], T]) -> Callable[[types.FunctionType], T]:
    """Remember the answer about a function as long as that lives, which is until its module is loaded again."""
    known: weakref.WeakKeyDictionary[types.FunctionType, T] = weakref.WeakKeyDictionary()

    @functools.wraps(ask)
    def answer(function: types.FunctionType) -> T:
        if function not in known:
            known[function] = ask(function)
        return known[function]

    return answer


@dataclass
class Found:
    """A method, what its decorators call, and activations, sites of norms and functions of angles to replace, by texts.

    The last come with the number of tensors that they turn. `refused` has those that the order of evaluation forbids.
    """

    method: types.FunctionType
    function: types.FunctionType
    acts: set[str] = field(default_factory=set)
    sites: set[Site] = field(default_factory=set)
    rotary: set[tuple[str, int]] = field(default_factory=set)
    refused: set[str | Site] = field(default_factory=set)


def methods_of(kind: type[nn.Module]) -> dict[str, types.FunctionType]:
    """The methods of a class from its file and from its forward's; libraries' base classes hold no layers."""
    found: dict[str, types.FunctionType] = {}
    files = {kind.__module__, next(base for base in kind.__mro__ if "forward" in vars(base)).__module__}
    for base in reversed(kind.__mro__):
        if base.__module__ in files and issubclass(base, nn.Module) and base is not nn.Module:
            found |= {name: f for name, f in vars(base).items() if isinstance(f, types.FunctionType)}
    return {name: f for name, f in found.items() if inspect.getattr_static(kind, name) is f}


def search(kind: Any) -> dict[str, Found]:
    """The methods to rewrite, and what is to be replaced in each."""
    result = {}
    for name, method in methods_of(kind).items():
        function = inside(method)
        if name.startswith("__") or (tree := _parse(function)) is None:
            continue
        found = Found(method, function)
        rewriter = Rewriter(found.acts.add, found.sites.add, found.rotary.add)
        rewriter.body(tree)
        found.refused |= rewriter.refused
        if any(site.modulated for site in found.sites):  # sums before those
            tree = _parse(function)
            assert tree is not None

            def note(site: Site, known: set[Site] = found.sites) -> bool:
                known.add(site)
                return site.modulated and not site.adds

            rewriter = Rewriter(_no, note, _no)
            rewriter.body(tree)
            found.refused |= rewriter.refused
        if (found.acts or found.sites or found.rotary or found.refused) and _is_current(function):
            result[name] = found
    return result


def without_text(kind: Any) -> str | None:
    """The method of a class whose text is not at hand, as of code that was compiled from a string, or None."""
    for name, method in methods_of(kind).items():
        try:
            source(inside(method))
        except (OSError, TypeError):
            if not name.startswith("__"):
                return name
    return None


def _no(_: Any) -> bool:
    return False


def taken(found: Found, allowed: Set[Site]) -> set[Site]:
    """The allowed sites that a method gets; some overlap."""
    tree = _parse(found.function)
    assert tree is not None
    result: set[Site] = set()

    def take(site: Site) -> bool:
        if site in allowed:
            result.add(site)
        return site in allowed

    Rewriter(_no, take, _no).body(tree)
    return result


def rewritten(name: str, found: Found, form: RewriteForm, original: type[nn.Module], whole: Whole) -> Any:
    """The method with expressions replaced: those gated, normalised or turned by what the form names.

    Once the class has another method of the name, that one runs: `whole` and `original` are for this check.
    """
    function = found.function
    plain = found.method is function
    acts = {act.text for act in form.acts}
    tree = _parse(function)
    assert tree is not None
    Rewriter(*(members.__contains__ for members in (acts, form.sites, form.rotary))).body(tree)
    _strip(tree)
    if plain:
        tree.body.insert(0, _unless_replaced(tree.args, name))
    gates = dict(zip(names.GATES, sites.gates_by(form.acts), strict=True))
    free = [*function.__code__.co_freevars, _ORIGINAL, _METHOD, *gates, *_SITES]
    factory = ast.parse(f"def factory({', '.join(free)}):\n    return None")
    outer = factory.body[0]
    assert isinstance(outer, ast.FunctionDef)
    outer.body = [tree, ast.Return(ast.Name(tree.name, ast.Load()))]
    file = f"<kernel_fusion {function.__module__}.{function.__qualname__} {form}>"
    text = ast.unparse(ast.fix_missing_locations(factory))
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    code = next(c for c in compile(text, file, "exec").co_consts if isinstance(c, types.CodeType))
    own = (*closure(function), original, found.method)
    made = types.FunctionType(code, function.__globals__)(*own, *gates.values(), *_SITES.values())
    made.__defaults__, made.__kwdefaults__ = function.__defaults__, function.__kwdefaults__
    made.__module__, made.__qualname__, made.__doc__ = function.__module__, function.__qualname__, function.__doc__
    made.__annotations__ = function.__annotations__
    vars(made).update(vars(function))
    return made if plain else _current(name, found.method, around(found.method, made, whole[name]), original)


def _unless_replaced(arguments: ast.arguments, name: str) -> ast.stmt:
    """The statement that calls the class's method with the same arguments if it is another now."""
    given: list[ast.expr] = [ast.Name(a.arg, ast.Load()) for a in (*arguments.posonlyargs, *arguments.args)]
    if arguments.vararg is not None:
        given.append(ast.Starred(ast.Name(arguments.vararg.arg, ast.Load()), ast.Load()))
    named = [ast.keyword(a.arg, ast.Name(a.arg, ast.Load())) for a in arguments.kwonlyargs]
    if arguments.kwarg is not None:
        named.append(ast.keyword(None, ast.Name(arguments.kwarg.arg, ast.Load())))
    method = ast.Attribute(ast.Name(_ORIGINAL, ast.Load()), name, ast.Load())
    other = ast.Compare(method, [ast.IsNot()], [ast.Name(_METHOD, ast.Load())])
    return ast.If(other, [ast.Return(ast.Call(method, given, named))], [])


def _current(name: str, method: Any, made: Any, original: type[nn.Module]) -> Any:
    """The same check around a decorated method, so that a method put in later runs without the decorators."""

    def current(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        now = getattr(original, name)
        return (made if now is method else now)(self, *args, **kwargs)

    functools.update_wrapper(current, made)
    current.__wrapped__ = made.__wrapped__  # type: ignore[attr-defined]
    return current


def _parse(function: types.FunctionType) -> ast.FunctionDef | None:
    """The syntax tree of a method, if its source is there."""
    if hasattr(function, "__wrapped__") or set(function.__code__.co_freevars) - {"__class__"}:
        return None
    try:
        tree = ast.parse(source(function)).body[0]
    except (OSError, TypeError, SyntaxError):
        return None
    if not isinstance(tree, ast.FunctionDef) or _mangles(tree):
        return None
    return tree


@_weakly
def source(function: types.FunctionType) -> str:
    """The text of a function, from the first column on."""
    return textwrap.dedent(inspect.getsource(function))


def value_of(text: str | None, function: types.FunctionType, module: nn.Module | None) -> Any:
    """Return the value of an expression in a method of this module, or in a function without a module; or UNKNOWN.

    The expression may use attributes of the module, and names of the function's file and of enclosing functions. One
    with a call is unknown, since the call might have an effect, and so is one with a name that the function binds.
    """
    code = function.__code__
    names = dict(zip(code.co_freevars, closure(function), strict=True))
    if module is not None and code.co_argcount:
        names[code.co_varnames[0]] = module
    local = {*code.co_varnames, *code.co_cellvars} - names.keys()
    try:
        nodes = list(ast.walk(ast.parse(str(text), mode="eval")))
        unclear = any(isinstance(n, ast.Call) or (isinstance(n, ast.Name) and n.id in local) for n in nodes)
        return UNKNOWN if text is None or unclear else eval(text, {**function.__globals__, **names})
    except Exception:  # the attribute may be missing, or a property that raises
        return UNKNOWN


@_weakly
def _is_current(function: types.FunctionType) -> bool:
    """Whether the source is what was loaded; notebooks compile a cell's statements one by one."""
    text, code = "".join(inspect.findsource(function)[0]), function.__code__
    flags = code.co_flags & __future__.annotations.compiler_flag
    if code in _codes(compile(text, "", "exec", flags, dont_inherit=True)):
        return True
    parts = [ast.Module([node], []) for node in ast.parse(text).body]
    return any(code in _codes(compile(part, "", "exec", flags, dont_inherit=True)) for part in parts)


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """The code objects within a code object, such as those of functions that it defines."""
    for each in code.co_consts:
        if isinstance(each, types.CodeType):
            yield each
            yield from _codes(each)


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


@dataclass(frozen=True)
class RewriteForm(Plan):
    """A class's expressions to replace: activations of gates, sites of norms, and functions of angles."""

    acts: tuple[Act, ...]
    sites: frozenset[Site]
    rotary: frozenset[tuple[str, int]]

    def __str__(self) -> str:
        gates = [f"gated_act, activation={name!r}" for name in sorted({act.name for act in self.acts})]
        within = {site._replace(adds=False) for site in self.sites if site.adds and site.modulated}
        around = sorted(str(site) for site in self.sites - within)
        return "; ".join([*gates, *around, *(f"rope for {name}" for name, _ in sorted(self.rotary))])

    def read(self, original: type[nn.Module]) -> tuple[Any, ...]:
        """The methods that are rewritten, and the functions of their activations."""
        acts = [act.reads.now(act.known if isinstance(act.known, type) else None) for act in self.acts]
        return (*acts, *(found.method for found in self._found(original).values()))

    def methods(self, original: type[nn.Module], whole: Whole) -> dict[str, Callable[..., Any]]:
        """The rewritten methods."""
        return {name: rewritten(name, found, self, original, whole) for name, found in self._found(original).items()}

    def _found(self, original: type[nn.Module]) -> dict[str, Found]:
        acts = {act.text for act in self.acts}
        return {
            name: found
            for name, found in search(original).items()
            if found.acts & acts or found.sites & self.sites or found.rotary & self.rotary
        }
