"""Finds norms: PyTorch's calls, this library's, and RMSNorms written out operation by operation.

A written-out norm is found from its `rsqrt`. The mean square of a tensor in the compute type must come before it. The
operations after it decide the rounding: a weight multiplied after conversion to the input's dtype is `rounding="hf"`
(Llama, Mistral, Qwen, T5), one multiplied before it is "once" (Gemma, OLMo).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch.fx import Node

from kernel_fusion.compiler.nodes import arguments, cast_to, known, name_of, only_user, value
from kernel_fusion.core.checks import FLOATING
from kernel_fusion.core.spec import compute_dtype
from kernel_fusion.core.stages import Given, norm_call
from kernel_fusion.operators import schemas


@dataclass(frozen=True)
class Norm:
    """A norm in the graph.

    Attributes:
        h: what is normalised.
        out: the node whose value is the result.
        inner: the other nodes that compute it. Only nodes that compute the weight have readers outside.
        rms, num_dims, weight, bias, eps, weight_offset, out_dtype, rounding, activation: as in the operator.
    """

    h: Node
    out: Node
    inner: tuple[Node, ...]
    rms: bool
    eps: float | Node
    out_dtype: torch.dtype
    num_dims: int = 1
    weight: Node | None = None
    bias: Node | None = None
    weight_offset: float = 0.0
    rounding: str = "once"
    activation: str = "identity"

    @property
    def first(self) -> Node:
        """Its first node."""
        return min((self.out, *self.inner))

    @property
    def affine(self) -> tuple[Any, ...]:
        """The operators' arguments after h."""
        return self.num_dims, self.weight, self.bias, self.eps, self.weight_offset, self.out_dtype

    @property
    def operands(self) -> list[Node]:
        """The tensors that an operator reads apart from h."""
        return [node for node in (self.weight, self.bias, self.eps) if isinstance(node, Node)]

    @property
    def is_ours(self) -> bool:
        """Whether one of our operators computes it already."""
        return any(getattr(node.target, "namespace", "") == "kernel_fusion" for node in (self.out, *self.inner))


def find(node: Node) -> Norm | None:
    """The norm that a node calls, or whose `rsqrt` it is, if our operators compute the same."""
    match name_of(node):
        case "layer_norm" | "rms_norm" as name:
            found = _called(node, name)
        case "rsqrt":
            found = _written_out(node)
        case "getitem":
            found = _staged(node)
        case _:
            found = _ours(node)
    return found if found is not None and _fits(found) else None


def _fits(norm: Norm) -> bool:
    """Whether kernels take the tensors: floating-point, on one device, parameters of the row's shape."""
    h = value(norm.h)
    if h is None or h.dtype not in FLOATING or h.layout != torch.strided or h.dim() < norm.num_dims:
        return False
    if compute_dtype(norm.out_dtype) != compute_dtype(h.dtype):
        return False
    shape = h.shape[h.dim() - norm.num_dims :]
    for parameter in (norm.weight, norm.bias):
        p = value(parameter)
        if parameter is not None and (p is None or p.shape != shape or p.device != h.device):
            return False
        if p is not None and compute_dtype(p.dtype) != compute_dtype(h.dtype):
            return False
    return True


def _called(node: Node, name: str) -> Norm | None:
    """`F.layer_norm` or `F.rms_norm`."""
    call = arguments(node, name)
    if call is None or value(call["input"]) is None or not isinstance(call["normalized_shape"], Sequence):
        return None
    affine = call["weight"], call.get("bias")
    return _plain(node, name, call["input"], len(call["normalized_shape"]), *affine, call["eps"])


def _plain(
    node: Node, name: str, h: Node, num_dims: int, weight: Any, bias: Any, eps: Any, offset: float = 0.0
) -> Norm | None:
    result, eps = value(node), _eps(h, eps)
    if result is None or eps is None:
        return None
    return Norm(h, node, (), name == "rms_norm", eps, result.dtype, num_dims, weight, bias, offset)


def _eps(h: Node, eps: Any) -> float | Node | None:
    tensor = value(h)
    if eps is None and tensor is not None and tensor.is_floating_point():
        return schemas.default_eps(tensor)
    return _number(eps)


def _number(eps: Any) -> float | Node | None:
    """A number, or a node that is one: with dynamic shapes, numbers of modules are inputs of Dynamo's graph."""
    if isinstance(eps, Node) and isinstance(eps.meta.get("example_value"), float | torch.SymFloat):
        return eps
    return float(eps) if isinstance(eps, int | float) else None


def _ours(node: Node) -> Norm | None:
    """The operator of `kf.layer_norm` or `kf.rms_norm`."""
    for name in ("layer_norm", "rms_norm"):
        if node.op == "call_function" and node.target is schemas.overload(name):
            *norm, _ = schemas.bind(node.target, node.args, dict(node.kwargs))
            return _plain(node, name, *norm)
    return None


def _staged(node: Node) -> Norm | None:
    """The first result of a norm's operator whose only stages are `rounding` and `activation`."""
    staged, index = node.args
    if index != 0 or not isinstance(staged, Node) or staged.target is not schemas.overload("staged_row_norm"):
        return None
    given: Any = norm_call(*schemas.bind(staged.target, staged.args, dict(staged.kwargs)))
    h, residual, num_dims, weight, bias, eps, offset, _, rms, stages = given
    result, kept = value(node), {"rounding": stages.rounding, "activation": stages.activation}
    if residual is not None or Given(**kept) != stages or result is None or len(staged.users) != 1:
        return None
    return Norm(h, node, (staged,), rms, eps, result.dtype, num_dims, weight, bias, offset, **kept)


def _written_out(rsqrt: Node) -> Norm | None:
    """x * rsqrt(mean(x^2) + eps), and the weight after it."""
    found = _mean_square(rsqrt)
    if found is None:
        return None
    wide, eps, inner = found
    source = cast_to(wide)
    h = source[0] if source else wide
    tensor = value(h)
    normalized = only_user(rsqrt)
    if tensor is None or tensor.dtype not in FLOATING or normalized is None:
        return None
    call, result = arguments(normalized, "mul"), value(normalized)
    if call is None or result is None or {call["input"], call["other"]} not in ({rsqrt, wide}, {rsqrt, h}):
        return None
    dtype = compute_dtype(tensor.dtype)
    if result.dtype != dtype or result.shape != tensor.shape or known(wide).dtype != dtype:
        return None
    # Other readers keep the conversion of h.
    own = (wide,) if source and set(wide.users) <= {*inner, normalized} else ()
    plain = Norm(h, normalized, (*own, *inner, rsqrt), True, eps, dtype)
    return _with_weight(plain, tensor.dtype)


def _mean_square(rsqrt: Node) -> tuple[Node, float | Node, tuple[Node, ...]] | None:
    """x, eps and the nodes between, of rsqrt(mean(x^2, -1, keepdim=True) + eps)."""
    root = arguments(rsqrt, "rsqrt")
    plus = arguments(root["input"], "add") if root else None
    if root is None or plus is None:
        return None
    terms = (plus["input"], plus["other"])
    mean = next((t for t in terms if name_of(t) == "mean"), None)
    eps = next((number for t in terms if (number := _number(t)) is not None), None)
    call = arguments(mean, "mean")
    if (
        mean is None
        or eps is None
        or call is None
        or call["dim"] not in (-1, (-1,), [-1])
        or call["keepdim"] is not True
    ):
        return None
    squared = call["input"]
    x = _squared(squared)
    inner = (squared, mean, root["input"])
    # Each node is read by the next only.
    chain = (*inner, rsqrt)
    if x is None or any(only_user(node, user) is None for node, user in pairwise(chain)):
        return None
    return x, eps, inner


def _squared(node: Any) -> Node | None:
    """x, where a node is its square."""
    power, product = arguments(node, "pow"), arguments(node, "mul")
    if (power and power["exponent"] != 2) or (product and product["input"] is not product["other"]):
        return None
    call = arguments(node, "square") or power or product
    return call["input"] if call and isinstance(call["input"], Node) else None


def _with_weight(norm: Norm, dtype: torch.dtype) -> Norm:
    """The norm, conversion to its input's `dtype`, and weight."""
    if converted := _converted(norm, dtype):
        return _times_weight(converted, "hf") or converted
    weighted = _times_weight(norm, "once")
    return norm if weighted is None else _converted(weighted, dtype) or weighted


def _converted(norm: Norm, dtype: torch.dtype) -> Norm | None:
    """The norm and its conversion."""
    after = only_user(norm.out)
    source = cast_to(after) if after else None
    if after is None or source is None or source[1] != dtype:
        return None
    return replace(norm, out=after, inner=(*norm.inner, norm.out), out_dtype=dtype)


def _times_weight(norm: Norm, rounding: str) -> Norm | None:
    """The norm times a weight, if its only reader computes that."""
    after = only_user(norm.out)
    call, result, tensor = arguments(after, "mul"), value(after), value(norm.out)
    if after is None or call is None or result is None or tensor is None:
        return None
    factor = call["other"] if call["input"] is norm.out else call["input"]
    found = _weight(factor, exact=rounding == "once")
    if found is None or known(found[0]).shape != tensor.shape[-1:] or result.shape != tensor.shape:
        return None
    weight, offset, derived = found
    if offset and rounding == "hf":
        return None  # the graph would round weight + offset, ours does not
    return replace(
        norm,
        out=after,
        inner=(*norm.inner, norm.out, *derived),
        weight=weight,
        weight_offset=offset,
        out_dtype=result.dtype,
        # The compute type needs no rounding.
        rounding=rounding if norm.out_dtype != compute_dtype(norm.out_dtype) else "once",
    )


def _weight(factor: Any, exact: bool) -> tuple[Node, float, tuple[Node, ...]] | None:
    """From w, w.float() or 1 + w.float(): the parameter, its offset, and the sum's nodes, in the compute type."""
    offset, derived = 0.0, []
    if plus := arguments(factor, "add"):
        terms = (plus["input"], plus["other"])
        number = next((t for t in terms if isinstance(t, int | float)), None)
        wide = next((t for t in terms if isinstance(t, Node)), None)
        tensor = value(wide)
        if number is None or tensor is None or tensor.dtype != compute_dtype(tensor.dtype):
            return None
        derived.append(factor)
        offset, factor = float(number), wide
    source = cast_to(factor) if exact else None
    if source is not None and compute_dtype(known(source[0]).dtype) == source[1]:
        derived.append(factor)
        factor = source[0]
    tensor = value(factor)
    return (factor, offset, tuple(derived)) if tensor is not None and tensor.dim() == 1 else None
