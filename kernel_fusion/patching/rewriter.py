"""Replaces expressions in a method's syntax tree by calls of `sites.py` and `rotary.py`."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

GATED, ADD_NORM, DROP_ADD_NORM, TURNED = "_kf_gated", "_kf_add_norm", "_kf_drop_add_norm", "_kf_turned"
MODULATED, ADD_MODULATED = "_kf_modulated", "_kf_add_modulated"
_SUM = "_kf_normed"
# Parts not evaluated with their statement, and statements without others in them.
_LATER = (ast.Lambda, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp, ast.stmt)
_SIMPLE = (ast.Assign, ast.AnnAssign, ast.Return, ast.Expr)


class Site(NamedTuple):
    """A norm and the operations around it: the texts of the norm, and of a dropout of a term of the sum before it."""

    norm: str
    adds: bool
    modulated: bool = False
    dropout: str = ""

    def __str__(self) -> str:
        around = ["addition before"] if self.adds else []
        around += ["modulation after"] if self.modulated else []
        return f"{'dropout and ' if self.dropout else ''}{' and '.join(around)} {self.norm}"


class Rewriter:
    """Replaces expressions in a function; asks `acts`, `sites` and `rotary`, with the callees' texts, whether to.

    If `ask` returns None, nothing is replaced, so it may just collect.
    """

    def __init__(
        self,
        acts: Callable[[str], Any],
        sites: Callable[[Site], Any],
        rotary: Callable[[tuple[str, int]], Any],
    ) -> None:
        self.acts, self.sites, self.rotary, self.count = acts, sites, rotary, 0

    def body(self, function: ast.FunctionDef) -> None:
        """Rewrite a function in place."""
        inner = [node for node in ast.walk(function) if isinstance(node, ast.FunctionDef | ast.Lambda)]
        hidden = {id(n) for node in inner if node is not function for n in ast.walk(node)}
        self.loads = [(n.id, (n.lineno, n.col_offset)) for n in ast.walk(function) if _is_load(n)]  # type: ignore[attr-defined]
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
        self._modulations(block, in_loop)
        self._sums(block, in_loop)
        self._rotations(block)

    def _gates(self, block: list[ast.stmt], in_loop: bool) -> None:
        """`act(gate) * value`, even if the activated gate was named before."""
        for index, statement in enumerate(block):
            for holder, product in list(_children(statement, ast.BinOp)):
                for one, other in _orders(product, ast.Mult):
                    call = _call(one) or (self._named(block[:index], one) if not in_loop else None)
                    if call is None or not self.acts(ast.unparse(call.func)):
                        continue
                    gate, text = call.args[0], ast.Constant(ast.unparse(call.func))
                    if call is not one:  # keep the name, now for the gate
                        _replace_value(block[:index], call, gate)
                        gate = one
                    act = ast.parse(ast.unparse(call.func), mode="eval").body
                    self._put(holder, product, _made(GATED, text, act, gate, other))
                    break

    def _named(self, before: list[ast.stmt], operand: ast.expr) -> ast.Call | None:
        """The call that a name stands for, if this block assigns it and only the product reads it."""
        if not isinstance(operand, ast.Name) or operand.id in self.captured:
            return None
        for earlier in reversed(before):
            if _stores(earlier, operand.id):
                if not isinstance(earlier, ast.Assign) or not isinstance(earlier.targets[0], ast.Name):
                    return None
                if sum(name == operand.id and place > _end(earlier) for name, place in self.loads) != 1:
                    return None
                call = _call(earlier.value)
                # Statements between may write into a named tensor, or a view of one, but not into a layer's result.
                between = before[before.index(earlier) + 1 :]
                gate = call.args[0] if call else None
                kept = not between or isinstance(gate, ast.Call)
                if isinstance(gate, ast.Call) and not ast.unparse(gate.func).startswith("self."):
                    kept = not any(_may_write(n) for each in between for n in ast.walk(each))
                return call if kept and len(earlier.targets) == 1 else None
        return None

    def _modulations(self, block: list[ast.stmt], in_loop: bool) -> None:
        """`norm(x) * (1 + scale) + shift`, even if `norm(x)` was named in the statement before; shift may be absent."""
        for statement in list(block):
            done: set[int] = set()
            for holder, whole in reversed(list(_children(statement, ast.BinOp))):  # sums before their products
                found = _modulation(whole) if id(whole) not in done else None
                if found is None:
                    continue
                normed: Any = found[0]
                call = normed if isinstance(normed, ast.Call) else self._just_before(block, statement, normed, in_loop)
                if call is None or _call(call) is None or not self.sites(Site(ast.unparse(call.func), False, True)):
                    continue
                x = call.args[0]
                if call is not normed:  # keep the name, now for what is normalised
                    _replace_value(block, call, x)
                    x = normed
                self._put(holder, whole, _made(MODULATED, call.func, x, *found[1:]))
                done |= {id(node) for node in ast.walk(whole)}

    def _sums(self, block: list[ast.stmt], in_loop: bool) -> None:
        """`h = a + b` with `norm(h)` in the next statement (copies of h may come between), and `norm(a + b)`."""
        for statement in list(block):
            done: list[ast.AST] = []  # calls made before
            for holder, call in list(_children(statement, ast.Call)):
                done.append(call)
                if (normed := _normed(call)) is None:
                    continue
                norm, argument, *vectors = normed
                if _orders(argument, ast.Add):
                    made = self._fused(block, statement, norm, argument, vectors, in_loop)
                    if made is not None:
                        self._put(holder, call, ast.Subscript(made, ast.Constant(0), ast.Load()))
                elif isinstance(argument, ast.Name) and isinstance(statement, _SIMPLE):
                    if _reads(done[:-1], argument.id) or _is_optional(statement, call):
                        continue
                    addition = _addition(block, block.index(statement), argument.id)
                    if addition is None or not _may_come_earlier(vectors, block, addition, statement):
                        continue
                    made = self._fused(block, addition, norm, addition.value, vectors, in_loop)
                    if made is not None:
                        self._split(block, addition, made, statement, (holder, call))

    def _fused(
        self,
        block: list[ast.stmt],
        statement: ast.stmt,
        norm: ast.expr,
        total: Any,
        vectors: list[ast.expr],
        in_loop: bool,
    ) -> ast.Call | None:
        """The call for a norm and the sum that `statement` computes, with a term's dropout or gate if there is one."""
        text, modulated = ast.unparse(norm), bool(vectors)
        for term, other in _orders(total, ast.Add):
            whole: Any = term if not isinstance(term, ast.Name) else self._just_before(block, statement, term, in_loop)
            # A call in the other term might draw random numbers, at another time then.
            if whole is None or any(isinstance(n, ast.Call) for n in ast.walk(other)):
                continue
            if modulated and _orders(whole, ast.Mult) and self.sites(Site(text, True, True)):
                if whole is not term:
                    block[block.index(statement) - 1] = ast.Pass()
                return _made(ADD_MODULATED, norm, other, whole.left, whole.right, *vectors)
            drops = not modulated and isinstance(whole, ast.Call) and whole.args
            if drops and self.sites(Site(text, True, dropout=ast.unparse(whole.func))):
                x, *args = whole.args
                if whole is not term:  # keep the name, now for what is dropped
                    _replace_value(block, whole, x)
                    x = term
                callee = ast.Name(DROP_ADD_NORM, ast.Load())
                return ast.Call(callee, [norm, other, x, whole.func, *args], whole.keywords)
        if not self.sites(Site(text, True, modulated)):
            return None
        if modulated:
            return _made(ADD_MODULATED, norm, total.left, total.right, ast.Constant(None), *vectors)
        return _made(ADD_NORM, norm, total.left, total.right)

    def _just_before(self, block: list[ast.stmt], statement: ast.stmt, operand: ast.expr, in_loop: bool) -> Any:
        """The call or product whose result the statement before names, if only `operand` in `statement` reads it."""
        index = block.index(statement)
        before = block[index - 1] if index else None
        if not isinstance(operand, ast.Name) or not isinstance(before, ast.Assign) or len(before.targets) != 1:
            return None
        name, target = operand.id, before.targets[0]
        if not isinstance(target, ast.Name) or target.id != name or not isinstance(before.value, ast.Call | ast.BinOp):
            return None
        return before.value if self._reads_last(statement, name, in_loop) else None

    def _reads_last(self, statement: ast.stmt, name: str, in_loop: bool) -> bool:
        """Whether a statement reads a name once, and nothing reads that value after it."""
        once = sum(_is_load(n) and n.id == name for n in ast.walk(statement)) == 1  # type: ignore[attr-defined]
        if name in self.captured or not once or not isinstance(statement, _SIMPLE):
            return False
        if isinstance(statement, ast.Assign) and any(_names_it(target, name) for target in statement.targets):
            return True
        return not in_loop and all(other != name or place <= _end(statement) for other, place in self.loads)

    def _split(
        self, block: list[ast.stmt], addition: ast.Assign, made: ast.Call, statement: ast.stmt, place: tuple[Any, Any]
    ) -> None:
        """Make one call for norm and sum where the sum was; the norm's place uses it."""
        self.count += 1
        name = f"{_SUM}{self.count}"
        target = ast.Tuple([ast.Name(name, ast.Store()), addition.targets[0]], ast.Store())
        block[block.index(addition)] = ast.Assign([target], made, lineno=0)
        self._put(*place, ast.Name(name, ast.Load()))
        if not isinstance(statement, ast.Return):  # release it as early as before
            block.insert(block.index(statement) + 1, ast.Delete([ast.Name(name, ast.Del())]))

    def _rotations(self, block: list[ast.stmt]) -> None:
        """`f(q, k, cos, sin)` and `f(x, cos, sin)`, whatever f is; it is tried out before anything is replaced."""
        for statement in block:
            for holder, call in list(_children(statement, ast.Call)):
                if _has_angles(call) and self.rotary((ast.unparse(call.func), len(call.args) - 2)):
                    callee = ast.Name(TURNED, ast.Load())
                    self._put(holder, call, ast.Call(callee, [call.func, *call.args], call.keywords))

    @staticmethod
    def _put(holder: Any, old: ast.expr, new: ast.expr) -> None:
        parent, name, index = holder
        if index is None:
            setattr(parent, name, new)
        else:
            getattr(parent, name)[index] = new


def _end(statement: ast.stmt) -> tuple[int, int]:
    return statement.end_lineno or 0, statement.end_col_offset or 0


def _is_load(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)


def _names_it(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name


def _orders(node: Any, kind: type[ast.operator]) -> list[tuple[ast.expr, ast.expr]]:
    """Both orders of the operands of a sum or a product; none of other nodes."""
    fits = isinstance(node, ast.BinOp) and isinstance(node.op, kind)
    return [(node.left, node.right), (node.right, node.left)] if fits else []


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


def _normed(call: ast.Call) -> list[ast.expr] | None:
    """Norm, input, and scale and shift if it is modulated, of a call that may be one of a norm."""
    if _names_it(call.func, MODULATED):
        return call.args
    return None if _call(call) is None else [call.func, call.args[0]]


def _has_angles(call: ast.Call) -> bool:
    """Whether a plain name's call ends with `cos, sin`, or with `unsqueeze_dim` after them."""
    last = [a.id for a in call.args[-2:] if isinstance(a, ast.Name)]
    plain = isinstance(call.func, ast.Name) and not any(isinstance(a, ast.Starred) for a in call.args)
    plain = plain and len(call.args) in (3, 4) and all(k.arg == "unsqueeze_dim" for k in call.keywords)
    return plain and last == ["cos", "sin"]


def _children(node: ast.AST, kind: type[Any]) -> Iterator[tuple[tuple[ast.AST, str, int | None], Any]]:
    """The expressions of a kind that a statement evaluates once, innermost first, with places; none if it writes."""
    if isinstance(node, ast.stmt) and any(map(_writes, ast.walk(node))):
        return
    for name, value in ast.iter_fields(node):
        if isinstance(node, ast.stmt) and name in ("body", "orelse", "finalbody", "handlers", "cases"):
            continue
        for index, child in enumerate(value if isinstance(value, list) else [value]):
            if isinstance(child, ast.AST) and not isinstance(child, _LATER):
                yield from _children(child, kind)
                if isinstance(child, kind):
                    yield (node, name, index if isinstance(value, list) else None), child


def _writes(node: ast.AST) -> bool:
    """Whether it calls a method that writes in place, by its name, or names a value within an expression."""
    in_place = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr.endswith("_")
    return in_place or isinstance(node, ast.NamedExpr)


def _may_write(node: ast.AST) -> bool:
    """Whether it writes into a tensor, or binds a name anew."""
    stores = isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store)
    return stores or isinstance(node, ast.AugAssign) or _writes(node)


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
        if target.id == name and _orders(earlier.value, ast.Add):
            return earlier
        if not isinstance(earlier.value, ast.Name):
            return None
        name = earlier.value.id if target.id == name else name
    return None


def _reads(nodes: Iterable[ast.AST], name: str) -> bool:
    """Whether one of these reads a name."""
    return any(_is_load(n) and n.id == name for node in nodes for n in ast.walk(node))  # type: ignore[attr-defined]


def _is_optional(statement: ast.stmt, node: ast.AST) -> bool:
    """Whether a condition within a statement decides if a node is evaluated."""
    parts: list[ast.expr] = []
    for n in ast.walk(statement):
        parts += [n.body, n.orelse] if isinstance(n, ast.IfExp) else n.values[1:] if isinstance(n, ast.BoolOp) else []
    return any(n is node for part in parts for n in ast.walk(part))


def _may_come_earlier(expressions: list[ast.expr], block: list[ast.stmt], to: ast.stmt, statement: ast.stmt) -> bool:
    """Whether these have the same values at `to`: views of names, none of which is assigned from there on."""
    nodes = [node for each in expressions for node in ast.walk(each)]
    if any(isinstance(n, ast.Call) and not _is_view(n) for n in nodes):
        return False
    between = block[block.index(to) : block.index(statement)]
    return not any(_is_load(n) and _stores(each, n.id) for n in nodes for each in between)  # type: ignore[attr-defined]


def _is_view(call: ast.Call) -> bool:
    return isinstance(call.func, ast.Attribute) and call.func.attr in ("unsqueeze", "view", "to", "float", "type_as")


def _modulation(node: ast.AST) -> tuple[ast.expr, ...] | None:
    """x, scale and, if there is one, shift of `x * (1 + scale) + shift`, in any order of operands."""
    of_sum = ((*scaled, shift) for part, shift in _orders(node, ast.Add) if (scaled := _scaled(part)))
    return next(of_sum, None) or _scaled(node)


def _scaled(node: ast.AST) -> tuple[ast.expr, ast.expr] | None:
    """x and scale of `x * (1 + scale)`."""
    both = _orders(node, ast.Mult)
    return next(((x, scale) for x, factor in both if (scale := _above_one(factor)) is not None), None)


def _above_one(node: ast.AST) -> ast.expr | None:
    """scale of `1 + scale`, or of an indexed one."""
    if isinstance(node, ast.Subscript):
        inner = _above_one(node.value)
        return None if inner is None else ast.Subscript(inner, node.slice, ast.Load())
    both = _orders(node, ast.Add)
    return next((other for one, other in both if isinstance(one, ast.Constant) and one.value == 1), None)


def _replace_value(block: list[ast.stmt], old: ast.expr, new: ast.expr) -> None:
    for statement in block:
        if isinstance(statement, ast.Assign) and statement.value is old:
            statement.value = new
