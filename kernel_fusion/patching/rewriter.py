"""Replaces expressions in a method's syntax tree by calls of `sites.py` and `rotary.py`.

The operands of such a call are its keyword arguments, in the order of the source, so they are evaluated as before. Only
the operations move: order.py says whether they may. An expression whose operation may not is refused.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import Any, NamedTuple

from kernel_fusion.patching.order import commute, evaluated_before, is_still
from kernel_fusion.patching.syntax import (
    addition_before,
    as_in_source,
    children,
    end_of,
    first_of,
    has_angles,
    is_load,
    is_optional,
    made_call,
    may_come_earlier,
    modulation_of,
    names_it,
    orders,
    place_of,
    plain_call,
    replace_value,
    stores,
    swapped,
)

GATES = GATED, HELD, HELD_RESULT, PRODUCT = "_kf_gated", "_kf_held", "_kf_held_result", "_kf_product"
ADD_NORM, DROP_ADD_NORM, TURNED = "_kf_add_norm", "_kf_drop_add_norm", "_kf_turned"
MODULATED, ADD_MODULATED = "_kf_modulated", "_kf_add_modulated"
_SUM = "_kf_normed"
_VECTORS = ("scale", "shift")  # of a modulation
_AT_ONCE = (ast.Name, ast.Attribute, ast.Constant, ast.expr_context)  # these read no tensor
# Statements without others in them.
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

    If `ask` returns None, nothing is replaced, so it may just collect. `refused` has the texts of activations and the
    sites that the order of evaluation forbids.
    """

    def __init__(
        self,
        acts: Callable[[str], Any],
        sites: Callable[[Site], Any],
        rotary: Callable[[tuple[str, int]], Any],
    ) -> None:
        self.acts, self.sites, self.rotary, self.count = acts, sites, rotary, 0
        self.refused: set[str | Site] = set()

    def body(self, function: ast.FunctionDef) -> None:
        """Rewrite a function in place."""
        inner = [node for node in ast.walk(function) if isinstance(node, ast.FunctionDef | ast.Lambda)]
        hidden = {id(n) for node in inner if node is not function for n in ast.walk(node)}
        self.loads = [(n.id, (n.lineno, n.col_offset)) for n in ast.walk(function) if is_load(n)]  # type: ignore[attr-defined]
        self.captured = {n.id for n in ast.walk(function) if is_load(n) and id(n) in hidden}  # type: ignore[attr-defined]
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
            for holder, product in list(children(statement, ast.BinOp)):
                for one, other in orders(product, ast.Mult):
                    call = plain_call(one)
                    between: list[ast.AST] = [other] if one is product.left else []
                    if call is None and not in_loop:
                        call, between = self._named(block[:index], one)
                        between += [*evaluated_before(statement, product), other]
                    if call is None:
                        continue
                    held = self._held(call, between)
                    if held is None:
                        self.refused.add(ast.unparse(call.func))
                    elif self.acts(ast.unparse(call.func)):
                        self._gate(block[:index], holder, (call, one, other), held)
                        break

    @staticmethod
    def _held(call: ast.Call, between: list[ast.AST]) -> ast.Call | None:
        """What is evaluated in place of an activation if others are evaluated before its product, or None."""
        gate, text = call.args[0], ast.Constant(ast.unparse(call.func))
        if all(isinstance(node, _AT_ONCE) for node in between):
            return made_call(GATED, text=text, act=call.func, gate=gate)
        if commute([gate], between):
            return made_call(HELD, text=text, act=call.func, gate=gate)
        if isinstance(gate, ast.Call):  # the call will show whether anybody else can reach its result
            return ast.Call(ast.Name(HELD_RESULT, ast.Load()), [text, call.func, gate.func, *gate.args], gate.keywords)
        return None

    def _gate(self, before: list[ast.stmt], holder: Any, parts: Any, held: ast.Call) -> None:
        """Replace a product of an activation, or of its name, and a value."""
        call, one, other = parts
        if names_it(held.func, GATED):
            gate = call.args[0]
            if call is not one:  # keep the name, now for the gate
                replace_value(before, call, gate)
                gate = one
            operands = {str(keyword.arg): keyword.value for keyword in held.keywords} | {"gate": gate, "value": other}
            self._put(holder, made_call(GATED, **operands, **swapped(product=place_of(other) < place_of(one))))
            return
        order = swapped(product=place_of(other) < place_of(one))
        if call is not one:
            replace_value(before, call, held)
        held = one if call is not one else ast.copy_location(held, call)
        self._put(holder, made_call(PRODUCT, held=held, value=other, **order))

    def _named(self, before: list[ast.stmt], operand: ast.expr) -> tuple[ast.Call | None, list[ast.AST]]:
        """The call that a name stands for, if this block assigns it and only the product reads it; and what follows."""
        if not isinstance(operand, ast.Name) or operand.id in self.captured:
            return None, []
        for index in reversed(range(len(before))):
            earlier = before[index]
            if stores(earlier, operand.id):
                if not isinstance(earlier, ast.Assign) or not isinstance(earlier.targets[0], ast.Name):
                    return None, []
                if sum(name == operand.id and place > end_of(earlier) for name, place in self.loads) != 1:
                    return None, []
                call = plain_call(earlier.value) if len(earlier.targets) == 1 else None
                return call, [*before[index + 1 :]]
        return None, []

    def _modulations(self, block: list[ast.stmt], in_loop: bool) -> None:
        """`norm(x) * (1 + scale) + shift`, even if `norm(x)` was named in the statement before; shift may be absent."""
        for statement in list(block):
            done: set[int] = set()
            for holder, whole in reversed(list(children(statement, ast.BinOp))):  # sums before their products
                found = modulation_of(whole) if id(whole) not in done else None
                if found is None:
                    continue
                normed: Any = found[0]
                call = normed if isinstance(normed, ast.Call) else self._just_before(block, statement, normed, in_loop)
                if call is None or plain_call(call) is None:
                    continue
                site, x, vectors = Site(ast.unparse(call.func), False, True), call.args[0], found[1:]
                between: list[ast.AST] = [
                    each for each in vectors if call is not normed or place_of(each) > place_of(call)
                ]
                between += evaluated_before(statement, whole) if call is not normed else []
                if not commute([x, *vectors], between):
                    self.refused.add(site)
                    continue
                if not self.sites(site):
                    continue
                if call is not normed:  # keep the name, now for what is normalised
                    replace_value(block, call, x)
                    x = normed
                order = {name: place_of(each) < place_of(normed) for name, each in zip(_VECTORS, vectors, strict=False)}
                operands = dict(zip(_VECTORS, vectors, strict=False)) | swapped(**order)
                self._put(holder, made_call(MODULATED, norm=call.func, x=x, **operands))
                done |= {id(node) for node in ast.walk(whole)}

    def _sums(self, block: list[ast.stmt], in_loop: bool) -> None:
        """`h = a + b` with `norm(h)` in the next statement (copies of h may come between), and `norm(a + b)`."""
        for statement in list(block):
            for holder, call in list(children(statement, ast.Call)):
                if (normed := _normed(call)) is None:
                    continue
                norm, argument, vectors = normed
                if orders(argument, ast.Add):
                    later = [each for each in vectors.values() if place_of(each) > place_of(argument)]
                    made = self._fused(block, statement, norm, argument, vectors, in_loop, later)
                    if made is not None:
                        self._put(holder, first_of(made))
                elif isinstance(argument, ast.Name) and isinstance(statement, _SIMPLE):
                    if is_optional(statement, call):
                        continue
                    addition, names = addition_before(block, block.index(statement), argument.id)
                    if addition is None or not may_come_earlier(vectors.values(), block, addition, statement):
                        continue
                    own = names - self.captured
                    if not commute([argument, *vectors.values()], evaluated_before(statement, call), own):
                        self.refused.add(Site(ast.unparse(norm), True, bool(vectors)))
                        continue
                    made = self._fused(block, addition, norm, addition.value, vectors, in_loop, [])
                    if made is not None:
                        self._split(block, addition, made, statement, holder)

    def _fused(
        self,
        block: list[ast.stmt],
        statement: ast.stmt,
        norm: ast.expr,
        total: Any,
        vectors: dict[str, ast.expr],
        in_loop: bool,
        later: list[ast.expr],
    ) -> ast.Call | None:
        """The call for a norm and the sum that `statement` computes, with a term's dropout or gate if there is one.

        `later` of the vectors are evaluated between the sum and the norm.
        """
        text, modulated = ast.unparse(norm), bool(vectors)
        for term, other in orders(total, ast.Add):
            whole: Any = term if not isinstance(term, ast.Name) else self._just_before(block, statement, term, in_loop)
            between = [] if whole is term and term is total.right else [other]
            if modulated and orders(whole, ast.Mult) and commute([whole.left, whole.right, other], [*between, *later]):
                if not self.sites(Site(text, True, True)):
                    continue
                if whole is not term:
                    block[block.index(statement) - 1] = ast.Pass()
                operands = vectors | swapped(vectors, sum=term is total.left)
                return made_call(ADD_MODULATED, norm=norm, residual=other, x=whole.left, gate=whole.right, **operands)
            drops = not modulated and isinstance(whole, ast.Call) and whole.args
            if not drops or not all(map(is_still, [*between, *whole.args[1:], *whole.keywords])):
                continue
            if self.sites(Site(text, True, dropout=ast.unparse(whole.func))):
                x, *args = whole.args
                if whole is not term:  # keep the name, now for what is dropped
                    replace_value(block, whole, x)
                    x = term
                callee = ast.Name(DROP_ADD_NORM, ast.Load())
                left = ast.Constant(term is total.left)
                return ast.Call(callee, [norm, left, *as_in_source(other, x), whole.func, *args], whole.keywords)
        site = Site(text, True, modulated)
        if not commute([total.left, total.right], later):
            self.refused.add(site)
            return None
        if not self.sites(site):
            return None
        if modulated:
            return made_call(
                ADD_MODULATED, norm=norm, residual=total.left, x=total.right, gate=ast.Constant(None), **vectors
            )
        return made_call(ADD_NORM, norm=norm, a=total.left, b=total.right)

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
        once = sum(is_load(n) and n.id == name for n in ast.walk(statement)) == 1  # type: ignore[attr-defined]
        if name in self.captured or not once or not isinstance(statement, _SIMPLE):
            return False
        if isinstance(statement, ast.Assign) and any(names_it(target, name) for target in statement.targets):
            return True
        return not in_loop and all(other != name or place <= end_of(statement) for other, place in self.loads)

    def _split(
        self, block: list[ast.stmt], addition: ast.Assign, made: ast.Call, statement: ast.stmt, holder: Any
    ) -> None:
        """Make one call for norm and sum where the sum was; the norm's place uses it."""
        self.count += 1
        name = f"{_SUM}{self.count}"
        target = ast.Tuple([ast.Name(name, ast.Store()), addition.targets[0]], ast.Store())
        block[block.index(addition)] = ast.Assign([target], made, lineno=0)
        self._put(holder, ast.Name(name, ast.Load()))
        if not isinstance(statement, ast.Return):  # release it as early as before
            block.insert(block.index(statement) + 1, ast.Delete([ast.Name(name, ast.Del())]))

    def _rotations(self, block: list[ast.stmt]) -> None:
        """`f(q, k, cos, sin)` and `f(x, cos, sin)`, whatever f is; it is tried out before anything is replaced."""
        for statement in block:
            for holder, call in list(children(statement, ast.Call)):
                if has_angles(call) and self.rotary((ast.unparse(call.func), len(call.args) - 2)):
                    callee = ast.Name(TURNED, ast.Load())
                    self._put(holder, ast.Call(callee, [call.func, *call.args], call.keywords))

    @staticmethod
    def _put(holder: Any, new: ast.expr) -> None:
        """Put an expression in the place of another; the operands of a call are evaluated in the order of places."""
        parent, name, index = holder
        if index is None:
            setattr(parent, name, ast.copy_location(new, getattr(parent, name)))
        else:
            getattr(parent, name)[index] = ast.copy_location(new, getattr(parent, name)[index])


def _normed(call: ast.Call) -> tuple[ast.expr, ast.expr, dict[str, ast.expr]] | None:
    """Norm, input, and scale and shift if it is modulated, of a call that may be one of a norm."""
    if names_it(call.func, MODULATED):
        parts = {str(keyword.arg): keyword.value for keyword in call.keywords}
        return parts.pop("norm"), parts.pop("x"), parts
    return None if plain_call(call) is None else (call.func, call.args[0], {})
