"""Replaces what was found by one operator each: norms with the addition before them, gates, biases with activations.

A new node stands after its operands and before all readers of its results. Nothing moves across a node that is not
known to be pure (purity.py). Other readers of the sum before a norm read it from the new node.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from operator import getitem
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Graph, Node

from kernel_fusion.backends import eager
from kernel_fusion.compiler import norms
from kernel_fusion.compiler.nodes import activation, arguments, known, only_user, same_shape, value
from kernel_fusion.compiler.norms import Norm
from kernel_fusion.compiler.purity import clear_between
from kernel_fusion.core.activations import IDENTITY
from kernel_fusion.core.checks import FLOATING
from kernel_fusion.core.spec import compute_dtype
from kernel_fusion.operators import schemas

_SMALL = 1 << 21  # elements; on an H100 operators lost to Inductor at 0.5 million and won at 8


@dataclass
class Fused:
    """How much of a graph was replaced.

    Attributes:
        add_norms: norms together with the residual addition (and dropout) before them.
        norms: other norms.
        gates: products of an activation and another tensor.
        activations: activations together with the bias before them or the dropout after them.
    """

    add_norms: int = 0
    norms: int = 0
    gates: int = 0
    activations: int = 0

    def __add__(self, other: Fused) -> Fused:
        return Fused(**{name: count + getattr(other, name) for name, count in vars(self).items()})


def fuse_graph(graph: Graph, *, compiled: bool = False) -> Fused:
    """`fuse` for one graph."""
    nothing, fused = Fused(), Fused()
    _hoist_numbers(graph)
    # Norms claim dropouts, and gates activations, first.
    steps = (partial(_fuse_norm, compiled=compiled), *(() if compiled else (_fuse_gate, _fuse_activation)))
    for step in steps:
        for node in list(graph.nodes):
            if node.users:  # an erased node has no users
                fused += step(graph, node) or nothing
    return fused


def _hoist_numbers(graph: Graph) -> None:
    """Move number inputs to the beginning of a graph; Dynamo puts each at its first use."""
    inputs = graph.find_nodes(op="placeholder")
    for node in graph.find_nodes(op="call_method", target="item"):
        if node.args[0] in inputs and clear_between(inputs[-1], node):
            inputs[-1].append(node)


def _fuse_norm(graph: Graph, node: Node, compiled: bool) -> Fused | None:
    norm = norms.find(node)
    if norm is None or (compiled and (norm.weight is None or _is_small(known(norm.h)))):
        return None
    if addition := _addition(norm):
        _replace_add_norm(graph, norm, addition)
        return Fused(add_norms=1)
    if norm.is_ours or not clear_between(norm.first, norm.out):
        return None
    _replace_norm(graph, norm)
    return Fused(norms=1)


def _is_small(h: Tensor) -> bool:
    """Whether an operator would take the host longer than the norm a GPU; adds no guard."""
    return h.device.type != "cpu" and all(isinstance(n, int) for n in h.shape) and h.numel() < _SMALL


@dataclass(frozen=True)
class _Addition:
    """residual + dropout(input), of equal shapes; the operator must stand after `place`."""

    node: Node
    place: Node
    input: Node
    residual: Node
    dropout_p: float = 0.0
    dropout: tuple[Node, ...] = ()


def _addition(norm: Norm) -> _Addition | None:
    """The addition before a norm, if one operator can do both."""
    total, call = value(norm.h), arguments(norm.h, "add")
    if call is None or total is None or not clear_between(norm.h, norm.out):
        return None
    place = max((norm.h, *norm.operands))
    if not all(place < user for user in norm.h.users):
        return None
    terms = [value(call["input"]), value(call["other"])]
    if any(t is None or not _like(t, total) for t in terms):
        return None
    pairs = (call["input"], call["other"]), (call["other"], call["input"])
    found = [_with_dropout(norm.h, place, x, r) for x, r in pairs if known(r).dtype == total.dtype]
    return max(found, key=lambda addition: addition.dropout_p, default=None)


def _like(t: Tensor, other: Tensor) -> bool:
    """Whether one operator takes both: equal shapes and devices, and one compute type."""
    kinds = t.dtype in FLOATING and compute_dtype(t.dtype) == compute_dtype(other.dtype)
    return kinds and t.device == other.device and t.layout == torch.strided and same_shape(t, other)


def _with_dropout(node: Node, place: Node, x: Node, residual: Node) -> _Addition:
    """The addition, with x's dropout if only the addition reads it."""
    source, p = _dropout(x) or (x, 0.0)
    own = source is not x and only_user(x, node) is not None and clear_between(x, node)
    if own and known(source).dtype == known(x).dtype:
        return _Addition(node, place, source, residual, p, (x,))
    return _Addition(node, place, x, residual)


def _dropout(node: Node) -> tuple[Node, float] | None:
    """The argument of a dropout and its probability, 0 outside training; None for other nodes."""
    call = arguments(node, "dropout")
    if call is None or call["inplace"] or not isinstance(call["p"], int | float) or value(call["input"]) is None:
        return None
    if not isinstance(call["training"], bool):
        return None
    return call["input"], float(call["p"]) if call["training"] else 0.0


def _replace_add_norm(graph: Graph, norm: Norm, addition: _Addition) -> None:
    with graph.inserting_before(addition.place.next):
        staged, y = _staged(graph, norm, addition.input, addition.residual, addition.dropout_p)
        h = _call(graph, getitem, (staged, 1), addition.node)
    staged.meta["example_value"] = (value(norm.out), value(addition.node))
    norm.out.replace_all_uses_with(y)
    addition.node.replace_all_uses_with(h)
    _erase(graph, (*addition.dropout, addition.node, *norm.inner, norm.out))


def _replace_norm(graph: Graph, norm: Norm) -> None:
    with graph.inserting_before(norm.out):
        if norm.rounding == "once":
            plain = schemas.overload("rms_norm" if norm.rms else "layer_norm")
            y = _call(graph, plain, (norm.h, *norm.affine), norm.out)
        else:
            staged, y = _staged(graph, norm, norm.h, None, 0.0)
            staged.meta["example_value"] = (value(norm.out), known(norm.h).new_empty(0))
    norm.out.replace_all_uses_with(y)
    _erase(graph, (*norm.inner, norm.out))


def _staged(graph: Graph, norm: Norm, x: Node, residual: Node | None, dropout_p: float) -> tuple[Node, Node]:
    """Insert the operator of staged norms; returns it and its first result."""
    seed = _seed(graph, x) if dropout_p > 0.0 else None
    stages = (IDENTITY, norm.activation, dropout_p, seed, norm.rounding)
    args = (x, residual, *norm.affine, norm.rms, *stages)
    staged = _call(graph, schemas.overload("staged_row_norm"), args, norm.out)
    return staged, _call(graph, getitem, (staged, 0), norm.out)


def _fuse_gate(graph: Graph, node: Node) -> Fused | None:
    call, result = arguments(node, "mul"), value(node)
    if call is None or result is None:
        return None
    for act, other in ((call["input"], call["other"]), (call["other"], call["input"])):
        found, tensor = activation(act), value(other)
        if found is None or tensor is None or other is act or not only_user(act, node) or not clear_between(act, node):
            continue
        name, gate = found
        if result.dtype in FLOATING and all(_equal(t, result) for t in (value(gate), tensor)):
            _replace_chain(graph, node, (gate, other, "gate", name, 1.0, 0.0, None), (act,))
            return Fused(gates=1)
    return None


def _equal(t: Tensor | None, other: Tensor) -> bool:
    """Whether two tensors agree in shape, dtype and device."""
    return t is not None and t.dtype == other.dtype and _like(t, other)


def _fuse_activation(graph: Graph, node: Node) -> Fused | None:
    found, result = activation(node), value(node)
    if found is None or result is None or result.dtype not in FLOATING:
        return None
    name, x = found
    last, dropout_p = _dropped(node)
    if not _equal(value(x), result):
        return None
    biased = _biased(graph, x, node)
    if biased is None and dropout_p == 0.0:
        return None
    first, bias, inner = biased or (x, None, ())
    with graph.inserting_before(last):
        seed = _seed(graph, first) if dropout_p > 0.0 else None
    chain = (first, bias, "first" if bias is None else "add", name, 1.0, dropout_p, seed)
    _replace_chain(graph, last, chain, (*inner, *((node,) if last is not node else ())))
    return Fused(activations=1)


def _dropped(node: Node) -> tuple[Node, float]:
    """A node's dropout, if that is its only reader, and the probability; else the node and 0."""
    after = only_user(node)
    found = _dropout(after) if after is not None else None
    if after is None or found is None or found[1] == 0.0 or not clear_between(node, after):
        return node, 0.0
    return after, found[1]


def _biased(graph: Graph, x: Node, act: Node) -> tuple[Node, Node, tuple[Node, ...]] | None:
    """The input of a bias addition, the bias, and the replaced nodes; a linear layer with a bias loses it."""
    if only_user(x, act) is None or not clear_between(x, act):
        return None
    if call := arguments(x, "add"):
        for first, bias in ((call["input"], call["other"]), (call["other"], call["input"])):
            if _equal(value(first), known(x)) and _is_bias(bias, known(x)):
                return first, bias, (x,)
        return None
    call = arguments(x, "linear")
    if call is None or not _is_bias(call["bias"], known(x)):
        return None
    with graph.inserting_before(x):
        return _call(graph, F.linear, (call["input"], call["weight"]), x), call["bias"], (x,)


def _is_bias(node: Any, total: Tensor) -> bool:
    """Whether a node has one number per column, in the dtype of the sum."""
    bias = value(node)
    return bias is not None and bias.dtype == total.dtype and bias.shape == total.shape[-1:]


def _replace_chain(graph: Graph, last: Node, chain: tuple[Any, ...], inner: Sequence[Node]) -> None:
    with graph.inserting_before(last):
        y = _call(graph, schemas.overload("pointwise"), chain, last)
    last.replace_all_uses_with(y)
    _erase(graph, (*inner, last))


def _seed(graph: Graph, x: Node) -> Node:
    return graph.call_function(eager.draw_seed, (known(x).device,))


def _call(graph: Graph, target: Any, args: tuple[Any, ...], like: Node) -> Node:
    """Insert a call whose result looks like that of another node."""
    made = graph.call_function(target, args)
    made.meta = dict(like.meta)
    return made


def _erase(graph: Graph, nodes: Sequence[Node]) -> None:
    """Erase unread nodes, readers before what they read."""
    for node in sorted(set(nodes), reverse=True):
        if not node.users:
            graph.erase_node(node)
