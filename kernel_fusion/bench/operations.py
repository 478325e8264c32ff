"""The operations that suites measure, as data: each verb's variants, with PyTorch's calls and ours."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import kernel_fusion as kf
from kernel_fusion.bench.workloads import DROPOUT_P, EPS, Argument, Call, Dropout, Function, Inputs, Operation, Workload
from kernel_fusion.core.activations import ACTIVATIONS
from kernel_fusion.core.spec import dtype_name
from kernel_fusion.testing import oracle, unfused
from kernel_fusion.testing.oracle import RowNormCase

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
    def two(name: str, verb: str, activation: str, arguments: Arguments = _PAIR, **options: Any) -> Operation:
        def pytorch(dropout: Dropout, a: Tensor, b: Tensor) -> Tensor:
            return unfused.pointwise(verb, a, b, activation, dropout)

        def fused(a: Tensor, b: Tensor, p: float, backend: str | None) -> Tensor:
            with_dropout = {"dropout_p": p} if verb == "bias_act" else {}
            y: Tensor = getattr(kf, verb)(a, b, activation, backend=backend, **with_dropout)
            return y

        return Operation(name, verb, arguments, pytorch, fused, **options)

    bias = two("bias+gelu", "bias_act", "gelu", _with_rows("bias"))
    gelu_dropout = replace(_activation("gelu"), name="gelu+dropout", dropout_p=DROPOUT_P, kept=_not_zero)
    return [
        two("add+relu", "add_act", "relu", backward_reads=_BITS, backward_writes=("a",)),
        two("mul+tanh", "mul_act", "tanh"),
        bias,
        replace(bias, name="bias+gelu+dropout", dropout_p=DROPOUT_P, kept=_not_zero),
        gelu_dropout,
        two("silu gate", "gated_act", "silu", _halves),
        *map(_activation, ACTIVATIONS),
    ]


def _activation(name: str) -> Operation:
    def pytorch(dropout: Dropout, x: Tensor) -> Tensor:
        return unfused.pointwise("act_dropout", x, None, name, dropout)

    def fused(x: Tensor, p: float, backend: str | None) -> Tensor:
        return kf.act_dropout(x, name, p, backend=backend)

    reads = _BITS if name in ("relu", "leaky_relu") else None
    return Operation(name, "act_dropout", _tensors("x"), pytorch, fused, backward_reads=reads)


def _not_zero(results: Mapping[str, Tensor], arguments: Mapping[str, Any]) -> Tensor:
    # A kept value in fp16 or bf16 can be exactly zero, but only a dropped one has no gradient.
    return torch.logical_or(results["y"] != 0, results["dx"] != 0)


def _row_norms() -> list[Operation]:
    def one(name: str, verb: str, parameters: Sequence[str], **stages: Any) -> Operation:
        def pytorch(_: Dropout, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
            rms = verb == "rms_norm"
            return unfused.staged_norm(x, None, x.shape[-1:], weight, bias, EPS, rms=rms, **stages)[0]

        def fused(x: Tensor, *affine: Tensor, p: float, backend: str | None) -> Tensor:
            y: Tensor = getattr(kf, verb)(x, x.shape[-1:], *affine, eps=EPS, backend=backend, **stages)
            return y

        return Operation(name, verb, _with_rows(*parameters), pytorch, fused)

    return [
        one("layer_norm", "layer_norm", ("weight", "bias")),
        one("layer_norm+relu", "layer_norm", ("weight", "bias"), activation="relu"),
        one("relu+layer_norm", "layer_norm", ("weight", "bias"), pre_activation="relu"),
        one("rms_norm", "rms_norm", ("weight",)),
    ]


def _add_norms() -> list[Operation]:
    variants = product(("layer_norm", "rms_norm"), (False, True), (False, True))
    return [_add_norm(norm, wide_residual, dropout) for norm, wide_residual, dropout in variants]


def _add_norm(norm: str, wide_residual: bool, dropout: bool) -> Operation:
    verb = f"add_{norm}"
    parameters = ("weight", "bias") if norm == "layer_norm" else ("weight",)

    def arguments(shape: Shape, dtype: torch.dtype) -> list[Argument]:
        same = _with_rows(*parameters, tensors=("x", "residual"))(shape, dtype)
        return [replace(a, dtype=torch.float32) if wide_residual and a.name == "residual" else a for a in same]

    def pytorch(
        dropout: Dropout, x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        rms = norm == "rms_norm"
        return unfused.staged_norm(x, residual, x.shape[-1:], weight, bias, EPS, rms=rms, dropout=dropout)

    def fused(x: Tensor, residual: Tensor, *weights: Tensor, p: float, backend: str | None) -> kf.NormOutput:
        options: dict[str, Any] = {"eps": EPS, "dropout_p": p, "backend": backend}
        output: kf.NormOutput = getattr(kf, verb)(x, residual, x.shape[-1:], *weights, **options)
        return output

    def kept(results: Mapping[str, Tensor], arguments: Mapping[str, Any]) -> Tensor:
        # A dropped value leaves the residual unchanged. So does a tiny one, but that one has a gradient.
        return torch.logical_or(results["h"] != arguments["residual"], results["dx"] != 0)

    parts = [f"add+{norm}", *(["fp32 residual"] if wide_residual else []), *(["dropout"] if dropout else [])]
    return Operation(
        ", ".join(parts),
        verb,
        arguments,
        pytorch,
        fused,
        results=("y", "h"),
        dropout_p=DROPOUT_P if dropout else 0.0,
        kept=kept if dropout else None,
        # h, which has the residual's size
        backward_reads=("residual", *parameters),
        backward_writes=None if dropout or wide_residual else ("residual", *parameters),
        dtypes=_HALF if wide_residual else None,
    )


def _reductions() -> list[Operation]:
    dims: dict[str, int | None] = {"last": -1, "first": 0, "all": None}

    def reduction(verb: str, which: str) -> Operation:
        def pytorch(_: Dropout, x: Tensor) -> Tensor:
            return unfused.reduce(verb, x, dims[which])

        def fused(x: Tensor, p: float, backend: str | None) -> Tensor:
            y: Tensor = getattr(kf, verb)(x, dims[which], backend=backend)
            return y

        overflows = (verb, which) == ("sum_squared", "all")  # in fp16, from 65504 normal numbers on
        dtypes = (torch.float32, torch.bfloat16) if overflows else None
        return Operation(
            f"{verb}, {which}", verb, _tensors("x"), pytorch, fused, reduces_rows=which != "last", dtypes=dtypes
        )

    return [reduction(verb, which) for verb in ("sum_squared", "mean_abs") for which in dims]


def _softmaxes() -> list[Operation]:
    scale = 0.125

    def with_mask(values: Any, moved: bool) -> Callable[[Shape, torch.dtype], list[Argument]]:
        """x and a boolean mask, True = keep. If our call is told `causal` instead, only PyTorch reads the mask."""

        def arguments(shape: Shape, dtype: torch.dtype) -> list[Argument]:
            keep = Argument("keep", shape, torch.bool, values=values, gradient=False, moved=moved)
            return [Argument("x", shape, dtype), keep]

        return arguments

    def pytorch_masked(_: Dropout, x: Tensor, keep: Tensor) -> Tensor:
        return unfused.softmax(x, scale, keep)

    def plain(x: Tensor, p: float, backend: str | None) -> Tensor:
        return kf.softmax(x, backend=backend)

    def masked(x: Tensor, keep: Tensor, p: float, backend: str | None) -> Tensor:
        return kf.softmax(x, scale=scale, mask=keep, backend=backend)

    def causal(x: Tensor, keep: Tensor, p: float, backend: str | None) -> Tensor:
        return kf.softmax(x, scale=scale, causal=True, backend=backend)

    # Backward reads y, which is as large as x.
    softmax = partial(Operation, verb="softmax", backward_reads=("x",))
    return [
        softmax("softmax", arguments=_tensors("x"), pytorch=lambda _, x: unfused.softmax(x), fused=plain),
        softmax("softmax, scale, mask", arguments=with_mask("mask", True), pytorch=pytorch_masked, fused=masked),
        softmax("softmax, scale, causal", arguments=with_mask("causal", False), pytorch=pytorch_masked, fused=causal),
    ]


def _scores() -> list[Operation]:
    def arguments(shape: Shape, dtype: torch.dtype) -> list[Argument]:
        batch, rows, cols = shape
        return [Argument("query", (batch, rows, _HEAD), dtype), Argument("key", (batch, cols, _HEAD), dtype)]

    def with_mask(shape: Shape, dtype: torch.dtype) -> list[Argument]:
        keep = Argument("keep", shape[1:], torch.bool, values="causal", shared=True, gradient=False, moved=False)
        return [*arguments(shape, dtype), keep]

    def pytorch(_: Dropout, query: Tensor, key: Tensor) -> Tensor:
        return unfused.attention_scores(query, key)

    def pytorch_weights(_: Dropout, query: Tensor, key: Tensor, keep: Tensor) -> Tensor:
        return unfused.softmax(unfused.attention_scores(query, key), mask=keep)

    def fused(query: Tensor, key: Tensor, p: float, backend: str | None) -> Tensor:
        return kf.attention_scores(query, key, backend=backend)

    def fused_weights(query: Tensor, key: Tensor, keep: Tensor, p: float, backend: str | None) -> Tensor:
        return kf.attention_scores(query, key, causal=True, normalize=True, backend=backend)

    def products(direction: str, inputs: Inputs) -> list[Call]:
        query, key, *_ = (t.detach() for t in inputs.arguments.values() if t is not None)
        (dy,) = inputs.cotangents
        if direction == "forward":
            return [partial(torch.bmm, query, key.mT)]
        return [partial(torch.bmm, dy, key), partial(torch.bmm, dy.mT, query)]

    scores = Operation("attention scores", "attention_scores", arguments, pytorch, fused, products=products, row_dims=2)
    return [
        replace(scores, has_kernels=False, product_pass=False),
        replace(
            scores, name="causal attention weights", arguments=with_mask, pytorch=pytorch_weights, fused=fused_weights
        ),
    ]


def _cupy_relu_layer_norm(cupy: Any) -> Function:
    """The calls that a user of CuPy writes: 13 passes over arrays as large as x."""

    def call(x: Any, weight: Any, bias: Any) -> Any:
        u = cupy.maximum(x, 0)
        mean = u.mean(axis=-1, keepdims=True)
        variance = u.var(axis=-1, keepdims=True)
        return (u - mean) / cupy.sqrt(variance + EPS) * weight + bias

    return call


@lru_cache
def bare_norm(verb: str, weight: torch.dtype, layout: str = "contiguous") -> Operation:
    """A norm alone, called as users call it. The few bytes of weight and bias do not count."""
    rms = verb == "rms_norm"
    own: Function = F.rms_norm if rms else F.layer_norm
    ours: Function = kf.rms_norm if rms else kf.layer_norm

    def arguments(shape: Shape, dtype: torch.dtype) -> list[Argument]:
        affine = {"weight": 1.0} if rms else {"weight": 1.0, "bias": 0.5}
        x = Argument("x", shape, dtype, 0.5, 2.0, layout)
        return [x, *(Argument(n, shape[-1:], weight, mean, shared=True, moved=False) for n, mean in affine.items())]

    def pytorch(_: Dropout, x: Tensor, *affine: Tensor) -> Any:
        if x.dtype == weight:
            return own(x, x.shape[-1:], *affine)
        # PyTorch refuses mixed dtypes, so its users compute in the widest one and round.
        wide = torch.promote_types(x.dtype, weight)
        return own(x.to(wide), x.shape[-1:], *(t.to(wide) for t in affine)).to(x.dtype)

    def fused(x: Tensor, *affine: Tensor, p: float, backend: str | None) -> Any:
        if backend is None:
            return ours(x, x.shape[-1:], *affine)
        return ours(x, x.shape[-1:], *affine, backend=backend)

    def judged(workload: Workload, inputs: Inputs) -> tuple[oracle.Reference, dict[str, Tensor]]:
        x, *affine = inputs.arguments.values()
        part = replace(case_of(workload), shape=tuple(x.shape), layout="contiguous")
        tensors = oracle.Inputs(x, *affine, *[None] * (2 - len(affine)), *inputs.cotangents)
        return oracle.reference(part, tensors), oracle.pytorch(part, tensors)

    return Operation(verb, verb, arguments, pytorch, fused, backward_writes=("x",), judged=judged, bare=True)


def case_of(workload: Workload) -> RowNormCase:
    """The oracle's case of a bare norm, with its budgets."""
    x, *affine = workload.arguments.values()
    weight, bias = [a.dtype for a in affine] + [None] * (2 - len(affine))
    return RowNormCase(workload.verb, workload.shape, workload.dtype, weight=weight, bias=bias, layout=x.layout)


# Two-dimensional.
OPERATIONS = [*_pointwise(), *_row_norms(), *_add_norms(), *_reductions(), *_softmaxes()]
# Shaped (batch, rows, columns).
SCORES = _scores()

_BY_NAME = {operation.name: operation for operation in OPERATIONS}

# maximum 2, mean 1, variance 2, subtraction 2, division 2, weight 2, bias 2; PyTorch: relu 2, layer_norm 2.
RELU_LAYER_NORM = replace(_BY_NAME["relu+layer_norm"], passes={"pytorch": 4, "cupy": 13}, cupy=_cupy_relu_layer_norm)

# Single workloads by name: the bare norms and all operations.
CASES = tuple(dict.fromkeys((*NORMS, *(operation.name for operation in (*OPERATIONS, *SCORES)))))


def case_workload(name: str, sizes: tuple[int, int], dtype: torch.dtype) -> Workload:
    """The workload of `CASES` called `name`, with these numbers of rows and columns.

    Raises:
        ValueError: there is none, or not in this dtype.
    """
    if name not in CASES:
        raise ValueError(f"no case is called {name}; there are: {', '.join(map(repr, CASES))}")
    if name in NORMS:
        return Workload("x".join(map(str, sizes)), bare_norm(name, dtype), sizes, dtype, grouped=False)
    what = next(operation for operation in (*OPERATIONS, *SCORES) if operation.name == name)
    if what.dtypes is not None and dtype not in what.dtypes:
        raise ValueError(f"{name} has no {dtype_name(dtype)}")
    shape = (SCORES_BATCH, *sizes) if what in SCORES else sizes
    return Workload("x".join(map(str, shape)), what, shape, dtype)
