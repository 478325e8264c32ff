"""The operations that suites measure, as data: each verb's variants, with PyTorch's calls and ours."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import kernel_fusion as kf
from kernel_fusion.core.activations import ACTIVATIONS
from kernel_fusion.core.spec import dtype_name
from kernel_fusion.testing import oracle, unfused
from kernel_fusion.testing.oracle import RowNormCase
from kernel_fusion_bench.workloads import DROPOUT_P, EPS, Argument, Call, Dropout, Function, Inputs, Operation, Workload

Shape = tuple[int, ...]
Arguments = Callable[[Shape, torch.dtype], Sequence[Argument]]

NORMS = ("layer_norm", "rms_norm")
SCORES_BATCH = 16  # scores are (batch, rows, columns)
_HEAD = 64  # the size of query and key
_HALF = (torch.float16, torch.bfloat16)
# Backward needs one bit per element beside dy if the slope has two values: next to nothing.
_BITS: tuple[str, ...] = ()


def _tensors(*names: str) -> Callable[[Shape, torch.dtype], list[Argument]]:
    """Arguments that all have the shape of the result."""
    return lambda shape, dtype: [Argument(name, shape, dtype) for name in names]


def _with_rows(*names: str, tensors: Sequence[str] = ("x",)) -> Callable[[Shape, torch.dtype], list[Argument]]:
    """Tensors of the result's shape, and parameters of a row's shape."""

    def arguments(shape: Shape, dtype: torch.dtype) -> list[Argument]:
        rows = [Argument(name, shape[-1:], dtype, 1.0 if name == "weight" else 0.5, shared=True) for name in names]
        return [*_tensors(*tensors)(shape, dtype), *rows]

    return arguments


def _halves(shape: Shape, dtype: torch.dtype) -> list[Argument]:
    return [
        Argument(name, shape, dtype, layout=f"{half} half") for name, half in (("gate", "first"), ("value", "second"))
    ]


_PAIR = _tensors("a", "b")


def _pointwise() -> list[Operation]:
    bias = _chain("bias+gelu", "bias_act", "gelu", _with_rows("bias"))
    gelu_dropout = replace(_activation("gelu"), name="gelu+dropout", dropout_p=DROPOUT_P, kept=_not_zero)
    return [
        _chain("add+relu", "add_act", "relu", backward_reads=_BITS, backward_writes=("a",)),
        _chain("mul+tanh", "mul_act", "tanh"),
        bias,
        replace(bias, name="bias+gelu+dropout", dropout_p=DROPOUT_P, kept=_not_zero),
        gelu_dropout,
        _chain("silu gate", "gated_act", "silu", _halves),
        *map(_activation, ACTIVATIONS),
    ]


def _chain(name: str, verb: str, activation: str, arguments: Arguments = _PAIR, **facts: Any) -> Operation:
    def pytorch(dropout: Dropout, a: Tensor, b: Tensor | None = None) -> Tensor:
        return unfused.pointwise(verb, a, b, activation, dropout)

    def fused(*operands: Tensor, p: float, backend: str | None, **options: Any) -> Any:
        probability = {"bias_act": {"dropout_p": p}, "act_dropout": {"p": p}}.get(verb, {})
        return getattr(kf, verb)(*operands, activation, backend=backend, **probability, **options)

    return Operation(name, verb, arguments, pytorch, fused, **facts)


def _activation(name: str) -> Operation:
    reads = _BITS if name in ("relu", "leaky_relu") else None
    return _chain(name, "act_dropout", name, _tensors("x"), backward_reads=reads)


def _not_zero(results: Mapping[str, Tensor], arguments: Mapping[str, Any]) -> Tensor:
    # A kept value in fp16 or bf16 can be exactly zero, but only a dropped one has no gradient.
    return torch.logical_or(results["y"] != 0, results["dx"] != 0)


def _norms() -> list[Operation]:
    added = product(("layer_norm", "rms_norm"), (False, True), (False, True))
    return [
        _norm("layer_norm", "layer_norm"),
        _norm("layer_norm+relu", "layer_norm", activation="relu"),
        _norm("relu+layer_norm", "layer_norm", pre_activation="relu"),
        _norm("rms_norm", "rms_norm"),
        *(_add_norm(norm, wide_residual, dropout) for norm, wide_residual, dropout in added),
    ]


def _norm(name: str, verb: str, **stages: Any) -> Operation:
    """A norm of x or, by a verb that adds, of x and a residual."""
    norm = verb.removeprefix("add_")
    rows = ("x",) if verb == norm else ("x", "residual")
    parameters = ("weight", "bias") if norm == "layer_norm" else ("weight",)

    def pytorch(dropout: Dropout, *tensors: Tensor) -> tuple[Tensor, ...]:
        t = dict(zip((*rows, *parameters), tensors, strict=True))
        affine = t["x"].shape[-1:], t["weight"], t.get("bias"), EPS
        options = {"rms": norm == "rms_norm", "dropout": dropout, **stages}
        return unfused.staged_norm(t["x"], t.get("residual"), *affine, **options)[: len(rows)]

    def fused(*tensors: Tensor, p: float, backend: str | None, **options: Any) -> Any:
        given, weights = tensors[: len(rows)], tensors[len(rows) :]
        options |= {"eps": EPS, "backend": backend, **stages} | ({"dropout_p": p} if verb != norm else {})
        return getattr(kf, verb)(*given, tensors[0].shape[-1:], *weights, **options)

    return Operation(name, verb, _with_rows(*parameters, tensors=rows), pytorch, fused, ("y", "h")[: len(rows)])


def _add_norm(norm: str, wide_residual: bool, dropout: bool) -> Operation:
    parts = [f"add+{norm}", *(["fp32 residual"] if wide_residual else []), *(["dropout"] if dropout else [])]
    plain = _norm(", ".join(parts), f"add_{norm}")
    gradients = ("residual", "weight", "bias") if norm == "layer_norm" else ("residual", "weight")

    def arguments(shape: Shape, dtype: torch.dtype) -> list[Argument]:
        same = plain.arguments(shape, dtype)
        return [replace(a, dtype=torch.float32) if wide_residual and a.name == "residual" else a for a in same]

    def kept(results: Mapping[str, Tensor], arguments: Mapping[str, Any]) -> Tensor:
        # A dropped value leaves the residual unchanged. So does a tiny one, but that one has a gradient.
        return torch.logical_or(results["h"] != arguments["residual"], results["dx"] != 0)

    return replace(
        plain,
        arguments=arguments,
        dropout_p=DROPOUT_P if dropout else 0.0,
        kept=kept if dropout else None,
        backward_reads=gradients,  # of h, which has the residual's size
        backward_writes=None if dropout or wide_residual else gradients,
        dtypes=_HALF if wide_residual else None,
    )


def _reductions() -> list[Operation]:
    dims: dict[str, int | None] = {"last": -1, "first": 0, "all": None}

    def reduction(verb: str, which: str) -> Operation:
        def pytorch(_: Dropout, x: Tensor) -> Tensor:
            return unfused.reduce(verb, x, dims[which])

        def fused(x: Tensor, p: float, backend: str | None) -> Any:
            return getattr(kf, verb)(x, dims[which], backend=backend)

        overflows = (verb, which) == ("sum_squared", "all")  # in fp16, from 65504 normal numbers on
        dtypes = (torch.float32, torch.bfloat16) if overflows else None
        return Operation(
            f"{verb}, {which}", verb, _tensors("x"), pytorch, fused, reduces_rows=which != "last", dtypes=dtypes
        )

    return [reduction(verb, which) for verb in ("sum_squared", "mean_abs") for which in dims]


def _softmax(name: str, values: Any = None, causal: bool = False) -> Operation:
    """Plain, or with a scale and a boolean mask, True = keep. If our call is told `causal`, only PyTorch reads that."""
    scale = 1.0 if values is None else 0.125

    def arguments(shape: Shape, dtype: torch.dtype) -> list[Argument]:
        x = Argument("x", shape, dtype)
        if values is None:
            return [x]
        return [x, Argument("keep", shape, torch.bool, values=values, gradient=False, moved=not causal)]

    def pytorch(_: Dropout, x: Tensor, keep: Tensor | None = None) -> Tensor:
        return torch.softmax(unfused.scaled(x, scale, keep), -1)

    def fused(x: Tensor, keep: Tensor | None = None, *, p: float, backend: str | None) -> Tensor:
        return kf.softmax(x, scale=scale, mask=None if causal else keep, causal=causal, backend=backend)

    # Backward reads y, which is as large as x.
    return Operation(name, "softmax", arguments, pytorch, fused, backward_reads=("x",))


def _scores(name: str, weights: bool, **facts: Any) -> Operation:
    """Attention scores, or the weights that a causal softmax makes of them."""

    def arguments(shape: Shape, dtype: torch.dtype) -> list[Argument]:
        batch, rows, cols = shape
        operands = [Argument("query", (batch, rows, _HEAD), dtype), Argument("key", (batch, cols, _HEAD), dtype)]
        keep = Argument("keep", shape[1:], torch.bool, values="causal", shared=True, gradient=False, moved=False)
        return [*operands, keep] if weights else operands

    def pytorch(_: Dropout, query: Tensor, key: Tensor, keep: Tensor | None = None) -> Tensor:
        scores = unfused.attention_scores(query, key)
        return torch.softmax(unfused.masked(scores, keep), -1) if weights else scores

    def fused(query: Tensor, key: Tensor, keep: Tensor | None = None, *, p: float, backend: str | None) -> Tensor:
        return kf.attention_scores(query, key, causal=weights, normalize=weights, backend=backend)

    def products(direction: str, inputs: Inputs) -> list[Call]:
        query, key, *_ = (t.detach() for t in inputs.arguments.values())
        (dy,) = inputs.cotangents
        if direction == "forward":
            return [partial(torch.bmm, query, key.mT)]
        return [partial(torch.bmm, dy, key), partial(torch.bmm, dy.mT, query)]

    return Operation(name, "attention_scores", arguments, pytorch, fused, products=products, row_dims=2, **facts)


def _cupy_relu_layer_norm(cupy: Any) -> Function:
    """The calls that a user of CuPy writes: 13 passes over arrays as large as x."""

    def call(x: Any, weight: Any, bias: Any) -> Any:
        u = cupy.maximum(x, 0)
        mean = u.mean(axis=-1, keepdims=True)
        variance = u.var(axis=-1, keepdims=True)
        return (u - mean) / cupy.sqrt(variance + EPS) * weight + bias

    return call


def _bare_norm(verb: str) -> Operation:
    """A norm alone, called as users call it. The few bytes of weight and bias do not count."""
    rms = verb == "rms_norm"
    own: Function = F.rms_norm if rms else F.layer_norm
    ours: Function = kf.rms_norm if rms else kf.layer_norm

    def arguments(shape: Shape, dtype: torch.dtype) -> list[Argument]:
        affine = {"weight": 1.0} if rms else {"weight": 1.0, "bias": 0.5}
        x = Argument("x", shape, dtype, 0.5, 2.0)
        return [x, *(Argument(n, shape[-1:], dtype, mean, shared=True, moved=False) for n, mean in affine.items())]

    def pytorch(_: Dropout, x: Tensor, *affine: Tensor) -> Any:
        if x.dtype == affine[0].dtype:
            return own(x, x.shape[-1:], *affine)
        # PyTorch refuses mixed dtypes, so its users compute in the widest one and round.
        wide = torch.promote_types(x.dtype, affine[0].dtype)
        return own(x.to(wide), x.shape[-1:], *(t.to(wide) for t in affine)).to(x.dtype)

    def fused(x: Tensor, *affine: Tensor, p: float, backend: str | None) -> Any:
        if backend is None:
            return ours(x, x.shape[-1:], *affine)
        return ours(x, x.shape[-1:], *affine, backend=backend)

    def judged(workload: Workload, inputs: Inputs) -> tuple[oracle.Reference, dict[str, Tensor]]:
        x, *affine = inputs.arguments.values()
        part = replace(case_of(workload), shape=tuple(x.shape), layout="contiguous")
        weight, bias = [*affine, None][:2]
        tensors = oracle.tensors(x, weight, bias, *inputs.cotangents)
        return oracle.reference(part, tensors), oracle.pytorch(part, tensors)

    return Operation(verb, verb, arguments, pytorch, fused, backward_writes=("x",), judged=judged, bare=True)


def case_of(workload: Workload) -> RowNormCase:
    """The oracle's case of a bare norm, with its budgets."""
    x, *affine = workload.arguments.values()
    weight, bias = [a.dtype for a in affine] + [None] * (2 - len(affine))
    return RowNormCase(workload.verb, workload.shape, workload.dtype, weight=weight, bias=bias, layout=x.layout)


BARE_NORMS = {verb: _bare_norm(verb) for verb in NORMS}
# Two-dimensional.
OPERATIONS = [
    *(*_pointwise(), *_norms(), *_reductions(), _softmax("softmax")),
    _softmax("softmax, scale, mask", "mask"),
    _softmax("softmax, scale, causal", "causal", causal=True),
]
# Shaped (batch, rows, columns).
SCORES = [
    _scores("attention scores", weights=False, has_kernels=False, product_pass=False),
    _scores("causal attention weights", weights=True),
]

BY_NAME = {operation.name: operation for operation in (*OPERATIONS, *SCORES)}

# maximum 2, mean 1, variance 2, subtraction 2, division 2, weight 2, bias 2; PyTorch: relu 2, layer_norm 2.
RELU_LAYER_NORM = replace(BY_NAME["relu+layer_norm"], passes={"pytorch": 4, "cupy": 13}, cupy=_cupy_relu_layer_norm)

# Single workloads by name: the bare norms and all operations.
CASES = tuple(dict.fromkeys((*NORMS, *BY_NAME)))


def case_workload(name: str, sizes: tuple[int, int], dtype: torch.dtype) -> Workload:
    """The workload of `CASES` called `name`, with these rows and columns; ValueError if there is none in this dtype."""
    if name not in CASES:
        raise ValueError(f"no case is called {name}; there are: {', '.join(map(repr, CASES))}")
    if name in NORMS:
        return Workload("x".join(map(str, sizes)), BARE_NORMS[name], sizes, dtype, grouped=False)
    what = BY_NAME[name]
    if what.dtypes is not None and dtype not in what.dtypes:
        raise ValueError(f"{name} has no {dtype_name(dtype)}")
    shape = (SCORES_BATCH, *sizes) if what in SCORES else sizes
    return Workload("x".join(map(str, shape)), what, shape, dtype)
