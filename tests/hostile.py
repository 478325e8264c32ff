"""Hostile arguments of every operator: what a loaded program, or anybody's direct call, may hand in.

    python tests/hostile.py cpu         every call once, and then an error on purpose, for sanitizers to find
    compute-sanitizer --tool memcheck --error-exitcode 1 python tests/hostile.py cuda 0 14
                                        the first of 14 parts of the calls, on a GPU

Each argument of each schema in turn takes the values of `hostile_values`, beside a call that is right. A call either
raises an exception that says what is wrong in a sentence, or gives what the definition gives. Fresh memory is filled
with NaN (`torch.use_deterministic_algorithms`), so a result that nobody wrote shows.
"""

from __future__ import annotations

import ctypes
import itertools
import math
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from kernel_fusion.backends import eager
from kernel_fusion.core import arguments
from kernel_fusion.core.activations import formula
from kernel_fusion.core.group_norm import spread
from kernel_fusion.operators import loader

Arguments = dict[str, Any]

_DTYPES = [
    torch.uint8, torch.int32, torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn, torch.float16,
    torch.bfloat16, torch.float32, torch.float64,
]  # fmt: skip
_INTS = [-1, 0, 1, 2, 3, 4, 2**31, 2**62, -(2**63)]
# As an eps, -4.0 leaves the square root of a negative number in every row, and no quotient of what little is left.
_FLOATS = [float("nan"), float("inf"), -float("inf"), -4.0, 0.0, 1.0, 1.5, 1e300]
_NAMES = ["", "relu", "identity", "sign", "gelu", "from_tanh", "first", "add", "mul", "gate", "mean_abs", "sum", "\0"]
_NAMES += ["once", "hf"]
_DIMS = [[], [0], [-1], [3], [-4], [0, 0], [0, -3], [2, 0], [2**40], [-(2**63)], list(range(70))]


# ---- Values ----------------------------------------------------------------------------------------------------------


def _freed(t: Tensor, kept: int = 0) -> Tensor:
    t = t.clone()
    t.untyped_storage().resize_(kept)
    return t


def _overlapping(t: Tensor) -> Tensor:
    return t.flatten().as_strided(t.shape, (1,) * t.dim())


# Name: a tensor like t.
_TENSORS: dict[str, Callable[[Tensor], Tensor]] = {
    "grad": lambda t: t.clone().requires_grad_(),
    "meta": lambda t: t.to("meta"),
    "other-device": lambda t: t.cpu() if t.is_cuda else t.to("meta"),
    "longer": lambda t: torch.cat([t, t], -1),
    "shorter": lambda t: t[..., :-1],
    "batched": lambda t: t[None],
    "two": lambda t: torch.stack([t, t]),
    "flat": lambda t: t.flatten(),
    "0-dim": lambda t: t.flatten()[0],
    "empty": lambda t: t.new_empty(0),
    "no-rows": lambda t: t[:0],
    "no-columns": lambda t: t[..., :0],
    "70-dims": lambda t: t.reshape((1,) * (70 - t.dim()) + t.shape),
    "sparse": lambda t: t.to_sparse(),
    "csr": lambda t: t.flatten(0, -2).to_sparse_csr() if t.dim() > 1 else t[None].to_sparse_csr(),
    "mkldnn": lambda t: t.to_mkldnn(),
    "quantized": lambda t: torch.quantize_per_tensor(t, 0.1, 0, torch.qint8),
    "nested": lambda t: torch.nested.as_nested_tensor(t),
    "jagged": lambda t: torch.nested.nested_tensor([*t], layout=torch.jagged),
    "freed": _freed,
    "half-freed": lambda t: _freed(t, t.nbytes // 2),
    "freed-strided": lambda t: _freed(torch.stack([t, t], -1))[..., 0],
    "negative": lambda t: torch._neg_view(t.clone()),
    "conjugate": lambda t: t.to(torch.complex64).conj(),
    "zero": lambda t: torch._efficientzerotensor(t.shape, dtype=t.dtype, device=t.device),
    # Ones, whose mean is exact: of other equal elements a norm multiplies the last digit of the mean by 1 / sqrt(eps).
    "expanded": lambda t: torch.ones_like(t[..., :1]).expand(t.shape),
    "overlapping": _overlapping,
    "transposed": lambda t: t.mT.contiguous().mT if t.dim() > 1 else t.repeat_interleave(2)[::2],
    "misaligned": lambda t: torch.cat([t.flatten()[:1], t.flatten()])[1:].view(t.shape),
    "nan": lambda t: torch.full_like(t, float("nan")),
    "infinite": lambda t: torch.full_like(t, float("inf")),
    **{str(dtype).removeprefix("torch."): lambda t, dtype=dtype: t.to(dtype) for dtype in _DTYPES},
}


def hostile_values(kind: str, base: Any, like: Tensor) -> Iterator[tuple[str, Any]]:
    """Values of an argument of the schema's type `kind`, each with a name; `base` is what the right call has."""
    optional = kind.endswith("?")
    if optional:
        yield "None", None
    kind = kind.removesuffix("?").replace("SymInt", "int")
    if kind == "Tensor":
        for name, make in _TENSORS.items():
            try:
                value = make(like if base is None else base)
            except (RuntimeError, NotImplementedError, IndexError, TypeError, ValueError):
                continue  # there is no such tensor of this dtype or shape
            yield name, value
        return
    values = {"int": _INTS, "float": _FLOATS, "bool": [False, True], "str": _NAMES, "int[]": _DIMS}.get(kind)
    if kind == "ScalarType":
        values = _DTYPES
    if values is None:
        size = int(kind.removeprefix("bool[").removesuffix("]") or len(base))
        values = [[i >> bit & 1 == 1 for bit in range(size)] for i in range(2**size)] + [[], [True] * (size + 1)]
    yield from ((str(value), value) for value in values)


# ---- Right calls -----------------------------------------------------------------------------------------------------


def _randn(device: str, *shape: int) -> Tensor:
    return torch.randn(shape, device=device)


def right_calls(device: str, heads: tuple[int, int, int] = (2, 4, 3)) -> dict[str, list[Arguments]]:
    """Calls of every operator that the kernels take, by its name; more of them where there are stages.

    `heads`: of a query, how many examples, tokens, and heads of a token.
    """
    x, r, dy = (_randn(device, 3, 5, 6) for _ in range(3))
    w, b = _randn(device, 6), _randn(device, 6)
    seed = torch.tensor([7], device=device)
    affine = {"num_dims": 1, "weight": w, "bias": b, "eps": 1e-5, "weight_offset": 0.5, "out_dtype": None}
    none = {"pre_activation": "identity", "activation": "identity", "dropout_p": 0.0, "seed": None, "rounding": "once",
            "gate": None, "gate_activation": "identity", "gate_first": False, "grouped": False,
            "residual_gate": None}  # fmt: skip
    some = none | {"pre_activation": "relu", "activation": "silu", "dropout_p": 0.25, "seed": seed, "rounding": "hf",
                   "residual_gate": _randn(device, 6)}  # fmt: skip
    gated = none | {"gate": _randn(device, 3, 5, 6), "gate_activation": "silu", "weight": _randn(device, 5, 6),
                    "bias": _randn(device, 5, 6), "grouped": True}  # fmt: skip
    of_samples = none | {"weight": _randn(device, 3, 1, 6), "bias": _randn(device, 3, 1, 6), "grouped": True}
    staged = [
        {"input": x, "residual": r, "rms": False, **affine, **some},
        {"input": x, "residual": None, "rms": True, **affine, **none},
        {"input": x, "residual": None, "rms": False, **affine, **gated},
        {"input": x, "residual": None, "rms": False, **affine, **of_samples},
    ]
    stats = torch.stack([x.mean(-1), (x.var(-1, correction=0) + 1e-5).rsqrt()])
    bwd = {"dy": dy, "input": x, "stats": stats, "num_dims": 1, "weight": w, "bias_dtype": torch.float32,
           "weight_offset": 0.5, "rms": False, "output_mask": [True] * 3 + [False] * 2, "x_dtype": None, "dh": None,
           "x": None, "bias": None, "has_residual": False, **none}  # fmt: skip
    bwd_staged = {"output_mask": [True] * 5, "x_dtype": torch.float32, "dh": _randn(device, 3, 5, 6), "x": r, "bias": b,
                  "has_residual": True, **some, "dropout_p": 0.0, "seed": None}  # fmt: skip
    bwd_gated = {"output_mask": [True] * 4 + [False], **gated, "gate_first": True}
    spread = [call | {"groups": ""} for call in staged]  # over the ranks of no group rows are whole
    whole = {"passes": "both", "sums": None}
    pointwise = [
        {"a": x, "b": b, "combine": "add", "activation": "tanh", "scale": 0.5, "dropout_p": 0.25, "seed": seed},
        {"a": x, "b": None, "combine": "first", "activation": "relu", "scale": 1.0, "dropout_p": 0.0, "seed": None},
        {"a": x, "b": r, "combine": "gate", "activation": "silu", "scale": 1.0, "dropout_p": 0.0, "seed": None},
    ]
    reduce = [
        {"input": x, "dim": dim, "keepdim": False, "kind": "sum_squared", "dtype": None} for dim in ([-1], [0, 2])
    ]
    keep = torch.rand(3, 5, 6, device=device) < 0.7
    masks = ((keep, True, False), (_randn(device, 6), True, True), (None, True, False), (keep, False, True))
    soft = [{"input": x, "mask": mask, "scale": 0.5, "causal": causal, "log": log} for mask, causal, log in masks]
    y = torch.softmax(x, -1)
    of_query, of_key = (*heads, 6), (*heads[:2], 1, 6)
    tables = {"cos": _randn(device, 1, 5, 2), "sin": _randn(device, 1, 5, 2),
              "positions": torch.tensor([[0, 3, 4, 1][: heads[1]]], device=device)}  # fmt: skip
    options = {"weight_offset": 0.5, "interleaved": True, "rounding": "hf"}
    bare = {"query_weight": None, "key_weight": None, "eps": None, "weight_offset": 0.0, "rounding": "once"}
    query, key = _randn(device, *of_query), _randn(device, *of_key)
    rotary = {"query": query, "key": key, "query_weight": w, "key_weight": b, **tables, "eps": 1e-5, **options}
    rotary_calls = [rotary, rotary | bare | {"key": None}]
    given = {"dy": _randn(device, *of_query), "dy_key": _randn(device, *of_key)}
    image, of_channels = _randn(device, 2, 6, 5), {"weight": w, "bias": b}
    add, scale, shift = (_randn(device, 2, 6) for _ in range(3))
    modulated = {"add": add, "scale": scale, "shift": shift, "scale_offset": 0.5, "activation": "silu"}
    groups = {"input": image, "num_groups": 3, **of_channels, **modulated, "eps": 1e-5, "out_dtype": None}
    group_norm = [groups, groups | dict.fromkeys(("weight", "bias", "add", "scale", "shift"))]
    moments = torch.stack([image.view(2, 3, 10).mean(-1), image.view(2, 3, 10).var(-1).rsqrt()])
    groups_bwd = {"dy": _randn(device, 2, 6, 5), "input": image, "stats": moments, "num_groups": 3, **of_channels,
                  **modulated, "output_mask": [True] * 6}  # fmt: skip
    ids, of_rows = torch.tensor([[1, 0, 5, 2, 2]] * 3, device=device), _randn(device, 3, 5, 5).unbind(-1)
    logits = {"input": x, "ids": ids, "mask": None, "temperature": None, "weight": None, "scale": 0.5, "softcap": 0.0,
              "ignore_index": 5}  # fmt: skip
    many = {"ids": torch.stack([ids, 5 - ids], -1), "ignore_index": -100}
    warm = {"mask": keep, "temperature": of_rows[0].abs() + 0.5, "softcap": 2.0}
    weighed = logits | {"weight": w.abs()}
    logprobs = [logits | {"extra": "none", "predicts": True}, weighed | {"extra": "sum", "predicts": False},
                logits | many | warm | {"extra": "entropy", "predicts": True}]  # fmt: skip
    given_rows = {"largest": x.amax(-1), "log_sum": of_rows[1].abs(), "dlogprob": of_rows[2], "da": None, "db": None,
                  "dc": None}  # fmt: skip
    logprobs_bwd = [logits | given_rows, weighed | given_rows | {"da": of_rows[3], "dc": of_rows[4]},
                    logits | many | warm | given_rows | {"dlogprob": _randn(device, 3, 5, 2),
                                                         "db": of_rows[3]}]  # fmt: skip
    flat = {"input": _randn(device, 5, 6), "linear_weight": _randn(device, 7, 6), "linear_bias": _randn(device, 7),
            "logits_dtype": None, "ids": ids[0], "mask": None, "temperature": None, "weight": None, "scale": 0.5,
            "softcap": 0.0, "ignore_index": 5}  # fmt: skip
    of_classes = flat | {"weight": _randn(device, 7).abs(), "linear_bias": None, "softcap": 2.0}
    way, wants = {"accumulate": "auto", "chunk_rows": 2}, {"output_mask": [True] * 3}
    linear = [flat | way | {"extra": "none", "predicts": True},
              of_classes | {"accumulate": "recompute", "chunk_rows": 0, "extra": "sum", "predicts": False}]  # fmt: skip
    linear_rows = {"largest": _randn(device, 5), "log_sum": _randn(device, 5).abs() + 2, "dlogprob": _randn(device, 5),
                   "da": _randn(device, 5), "db": None, "dc": _randn(device, 5)}  # fmt: skip
    linear_bwd = [flat | linear_rows | way | wants, of_classes | linear_rows | {"accumulate": "recompute",
                  "chunk_rows": 0, "output_mask": [True, True, False]}]  # fmt: skip
    summed = {"divisor": None, "mean": True, "label_smoothing": 0.1, "z_loss": 0.01, "predicts": True}
    linear_mean = [each | summed | way | wants for each in (flat, of_classes)]
    gradients = {"dlinear_weight": _randn(device, 7, 6), "dlinear_bias": _randn(device, 7)}
    codes = [
        {"dtype": torch.float8_e4m3fn, "scale": None, "block": 128, "keeps": True},
        {"dtype": torch.int8, "scale": torch.tensor([0.02], device=device), "block": 0, "keeps": False},
    ]
    return {
        "layer_norm": [{"input": x, **affine}],
        "rms_norm": [{"input": x, **affine}],
        **dict.fromkeys(("staged_row_norm", "staged_row_norm_reference"), staged),
        **dict.fromkeys(("spread_row_norm", "spread_row_norm_reference"), spread),
        "row_norm_fwd": [call | whole for call in staged],
        "row_norm_bwd": [each | whole for each in (bwd, bwd | bwd_staged, bwd | bwd_gated, bwd | of_samples)],
        **dict.fromkeys(("pointwise", "pointwise_reference", "pointwise_fwd"), pointwise),
        "pointwise_bwd": [
            {"dy": dy, **arguments, "output_mask": [True, arguments["b"] is not None]}
            for arguments in (pointwise[0] | {"dropout_p": 0.0, "seed": None}, *pointwise[1:])
        ],
        **dict.fromkeys(("reduce", "reduce_reference"), reduce),
        **dict.fromkeys(("softmax", "softmax_reference"), soft),
        **dict.fromkeys(("qk_norm_rope", "qk_norm_rope_reference", "qk_norm_rope_on_gpu"), rotary_calls),
        "qk_norm_rope_bwd": [
            given | rotary | {"output_mask": [True] * 4},
            given | rotary | bare | {"query": None, "key": None, "output_mask": [True, True, False, False]},
        ],
        **dict.fromkeys(("group_norm", "group_norm_reference", "group_norm_fwd"), group_norm),
        "group_norm_bwd": [groups_bwd],
        "softmax_bwd": [
            {"dy": dy, "y": y, "scale": 0.5, "leaves_out": True, "log": False},
            {"dy": dy, "y": y.log().masked_fill(~keep, -torch.inf), "scale": 0.5, "leaves_out": True, "log": True},
        ],
        **dict.fromkeys(("token_logprob", "token_logprob_reference"), logprobs),
        "token_logprob_bwd": logprobs_bwd,
        "linear_token_logprob": linear,
        "linear_token_logprob_bwd": linear_bwd,
        "linear_cross_entropy": linear_mean,
        "linear_scaled": [{"dloss": _randn(device, 1)[0], "dinput": _randn(device, 5, 6), **gradients}],
        "quantize": [{"input": x} | {name: each[name] for name in ("dtype", "scale", "block")} for each in codes],
        "quantized_row_norm": [call | each for call, each in zip(staged, itertools.cycle(codes), strict=False)],
        "quantized_gate": [{"gate": x, "value": r, "activation": "silu"} | each for each in codes],
    }


_BY_TRITON = ("staged_row_norm", "pointwise", "reduce", "softmax", "qk_norm_rope")
_BY_TRITON += ("quantize", "quantized_row_norm", "quantized_gate")


def right_triton_calls(device: str) -> dict[str, list[Arguments]]:
    """The same of the Triton backend's operators: the verbs, and those on the kernels."""
    calls = right_calls(device, heads=(1, 3, 2))  # in the interpreter every head takes long
    calls = {f"triton_{name}": calls[name] for name in _BY_TRITON} | {
        "triton_row_norm_fwd": [
            call | {"out_dtype": torch.float32, "wants_stats": True} for call in calls["staged_row_norm"]
        ],
        "triton_row_norm_bwd": [
            {"dy": call["dy"], "dh": call["dh"], "h": call["input"], "x": call["x"],
             "stats": call["stats"].flatten(1), "num_dims": 1, "weight": call["weight"], "bias": call["bias"],
             "input_dtype": torch.float32, "bias_dtype": torch.float32, "weight_offset": 0.5, "rms": False,
             "pre_activation": call["pre_activation"], "activation": call["activation"], "dropout_p": 0.0,
             "seed": None, "stored": call["has_residual"],
             "wants": [True, call["output_mask"][3], True, call["bias"] is not None, call["output_mask"][4]],
             **{name: call[name] for name in ("rounding", "gate", "gate_activation", "gate_first", "grouped",
                                              "residual_gate")}}
            for call in calls["row_norm_bwd"]
        ],
        "triton_quantized_row_norm": [call | {"out_dtype": torch.float32} for call in calls["quantized_row_norm"]],
        "triton_pointwise_fwd": [call | {"out_dtype": None} for call in calls["pointwise"]],
        "triton_pointwise_bwd": [
            {"wants" if name == "output_mask" else name: value for name, value in call.items()}
            for call in calls["pointwise_bwd"]
        ],
        "triton_reduce_fwd": [call | {"dtype": torch.float32} for call in calls["reduce"]],
        "triton_softmax_fwd": [call for call in calls["softmax"] if call["mask"] is None or call["mask"].dim() == 3],
        "triton_softmax_bwd": calls["softmax_bwd"],
        "triton_qk_norm_rope_fwd": calls["qk_norm_rope"],
        "triton_qk_norm_rope_bwd": [
            {"wants" if name == "output_mask" else name: value for name, value in call.items()}
            | ({"query": call["dy"], "key": call["dy_key"]} if call["eps"] is None else {})
            for call in calls["qk_norm_rope_bwd"]
        ],
    }  # fmt: skip
    return calls


# ---- Definitions -----------------------------------------------------------------------------------------------------


def _by_reference(name: str) -> Callable[..., Any]:
    return getattr(torch.ops.kernel_fusion, name)


def _row_norm(input: Tensor, num_dims: int, weight: Any, bias: Any, eps: Any, weight_offset: float, out_dtype: Any,
              rms: bool) -> Tensor:  # fmt: skip
    if eps is None:
        eps = torch.finfo(torch.float64 if input.dtype == torch.float64 else torch.float32).eps
    y, _ = torch.ops.kernel_fusion.staged_row_norm_reference(
        input, None, num_dims, weight, bias, eps, weight_offset, out_dtype, rms, "identity", "identity", 0.0, None
    )
    return y


def _row_norm_fwd(passes: str, sums: Tensor | None, **call: Any) -> tuple[Tensor, ...]:
    if passes == "first":  # the sums of one rank's pieces, which the tests of spread norms judge
        raise NotImplementedError
    y, h = torch.ops.kernel_fusion.staged_row_norm_reference(**call)
    bare = call | {"weight": None, "bias": None, "weight_offset": 0.0, "activation": "identity", "out_dtype": None}
    if call["gate"] is not None:
        dims, u = tuple(range(-call["num_dims"], 0)), call["input"].double()
        if call["gate_first"]:
            u = u * formula(call["gate_activation"])(call["gate"].double())
    elif call["residual"] is None:
        dims = tuple(range(-call["num_dims"], 0))
        u = torch.ops.kernel_fusion.pointwise_reference(
            call["input"].contiguous(), None, "first", call["pre_activation"], 1.0, call["dropout_p"], call["seed"]
        )
    else:
        dims, u = tuple(range(-bare["num_dims"], 0)), h
    u = u.to(torch.float64)
    if not u.isfinite().all():
        raise NotImplementedError
    mean = u.mean(dims)
    spread = (u.square() if call["rms"] else (u - mean[(..., *(None,) * len(dims))]).square()).mean(dims)
    rstd = (spread + call["eps"]).rsqrt()
    return y, torch.stack([rstd] if call["rms"] else [mean, rstd]), h


def _row_norm_bwd(passes: str, sums: Tensor | None, **call: Any) -> tuple[Any, ...]:
    """The formula, from the given statistics, without dropout or intermediate rounding."""
    if passes == "first":
        raise NotImplementedError
    rounds = call["rounding"] == "hf" and call["input"].element_size() == 2
    if rounds or (call["seed"] is not None and call["dropout_p"] != 0.0):
        raise NotImplementedError
    dims = tuple(range(-call["num_dims"], 0))
    leading = (..., *(None,) * len(dims))
    reads_bias = call["activation"] != "identity" or call["gate"] is not None
    h = call["input"].double()
    x = call["x"] if call["has_residual"] and call["x"] is not None else call["input"]
    gate = torch.ones_like(h) if call["gate"] is None else call["gate"].double().detach().requires_grad_()
    factor = gate if call["gate"] is None else formula(call["gate_activation"])(gate)
    first, last = (torch.ones_like(gate), factor)[:: -1 if call["gate_first"] else 1]
    if not call["has_residual"]:
        u_of_x = x.double().requires_grad_()
        h = formula(call["pre_activation"])(u_of_x) * first
    mean, rstd = (torch.zeros_like(call["stats"][0]), call["stats"][0]) if call["rms"] else call["stats"]
    n = ((h - mean.double()[leading]) * rstd.double()[leading]).detach().requires_grad_()
    w = (
        torch.ones(h.shape[len(h.shape) - len(dims) :], device=h.device).double()
        if call["weight"] is None
        else call["weight"].double() + call["weight_offset"]
    )
    b = torch.zeros_like(w) if call["bias"] is None or not reads_bias else call["bias"].double()
    w, b = w.detach().requires_grad_(), b.detach().requires_grad_()
    y = formula(call["activation"])(n * w + b) * last
    dn, dw, db = torch.autograd.grad(y, (n, w, b), call["dy"].double(), retain_graph=True)
    n = n.detach()
    dh = rstd.double()[leading] * (
        dn - (0 if call["rms"] else dn.mean(dims, keepdim=True)) - n * (dn * n).mean(dims, keepdim=True)
    )
    if call["dh"] is not None:
        dh = dh + call["dh"].double()
    u_of_x = x.double().detach().requires_grad_()
    absent = call["residual_gate"] is None
    of_residual = (torch.ones_like(w) if absent else call["residual_gate"].double()).detach().requires_grad_()
    u = formula(call["pre_activation"])(u_of_x) * first * of_residual
    dx, dgate = torch.autograd.grad(u, (u_of_x, of_residual), dh, retain_graph=True)
    other = dh
    if call["gate"] is not None:
        outputs = (u, dh) if call["gate_first"] else (y, call["dy"].double())
        (other,) = torch.autograd.grad(outputs[0], gate, outputs[1])
    found = dx, dw, db, other, dgate
    return tuple(t if wanted else None for t, wanted in zip(found, call["output_mask"], strict=True))


def _pointwise_bwd(**call: Any) -> tuple[Any, ...]:
    a, b = (None if call[name] is None else call[name].double().detach().requires_grad_() for name in "ab")
    if call["combine"] == "first" and b is not None:  # then b is the row that its gradient is summed to
        raise NotImplementedError
    rest = (call[name] for name in ("combine", "activation", "scale", "dropout_p", "seed"))
    y = torch.ops.kernel_fusion.pointwise_reference(a, b, *rest)
    wants = [wanted and t is not None for t, wanted in zip((a, b), call["output_mask"], strict=True)]
    found = iter(
        torch.autograd.grad(y, [t for t, wanted in zip((a, b), wants, strict=True) if wanted], call["dy"].double())
    )
    return tuple(next(found) if wanted else None for wanted in wants)


def _softmax_bwd(dy: Tensor, y: Tensor, scale: float, leaves_out: bool, log: bool = False) -> Tensor:
    g, p = dy.double(), y.double()
    gone = (y == (-torch.inf if log else 0.0)) & leaves_out
    if log:
        g, p = g.masked_fill(gone, 0.0), p.exp()
        return ((g - p * g.sum(-1, keepdim=True)) * scale).masked_fill(gone, 0.0)
    dx = (g - (g * p).sum(-1, keepdim=True)) * p * scale
    return dx.masked_fill(gone, 0.0)


def _per_group(t: Tensor, like: Tensor) -> Tensor:
    """Numbers of groups, (samples, groups), for each element."""
    depth = like.shape[1] // t.shape[1]
    return t.double().repeat_interleave(depth, 1)[(..., *(None,) * (like.dim() - 2))]


def _group_norm_fwd(**call: Any) -> tuple[Tensor, ...]:
    y = torch.ops.kernel_fusion.group_norm_reference(**call)
    x, add = call["input"].double(), call["add"]
    u = x if add is None else x + spread(add.double(), x.dim())
    rows = u.unflatten(1, (call["num_groups"], -1)).flatten(2)
    if not rows.isfinite().all():
        raise NotImplementedError
    return y, torch.stack([rows.mean(-1), (rows.var(-1, correction=0) + call["eps"]).rsqrt()])


def _group_norm_bwd(dy: Tensor, input: Tensor, stats: Tensor, num_groups: int, **call: Any) -> tuple[Any, ...]:
    """The formula, from the given statistics."""
    names = ("weight", "bias", "add", "scale", "shift")
    given = {n: None if call[n] is None else call[n].double().detach().requires_grad_() for n in names}
    weight, bias, add, scale, shift = given.values()
    x, positions = input.double(), tuple(range(2, input.dim()))
    u = x if add is None else x + spread(add.detach(), x.dim())
    mean, rstd = (_per_group(t, x) for t in stats)
    xhat = ((u - mean) * rstd).requires_grad_()
    of_channels = (-1, *[1] * len(positions))
    n = xhat if weight is None else xhat * weight.reshape(of_channels)
    n = n if bias is None else n + bias.reshape(of_channels)
    n = n if scale is None else n * (spread(scale, x.dim()) + call["scale_offset"])
    z = n if shift is None else n + spread(shift, x.dim())
    leaves = [xhat, *(t for t in (weight, bias, scale, shift) if t is not None)]
    found = dict(
        zip(map(id, leaves), torch.autograd.grad(formula(call["activation"])(z), leaves, dy.double()), strict=True)
    )
    g = found[id(xhat)]

    def mean_of(t: Tensor) -> Tensor:
        return _per_group(t.unflatten(1, (num_groups, -1)).flatten(2).mean(-1), t)

    dx = rstd * (g - mean_of(g) - xhat.detach() * mean_of(g * xhat.detach()))
    gradients = [dx, *(found.get(id(t)) for t in (weight, bias)), dx.sum(positions) if positions else dx]
    gradients += [found.get(id(t)) for t in (scale, shift)]
    present = [True, *(t is not None for t in given.values())]
    return tuple(t if p and w else None for t, p, w in zip(gradients, present, call["output_mask"], strict=True))


def _token_logprob_bwd(input: Tensor, ids: Tensor, largest: Tensor, log_sum: Tensor, dlogprob: Tensor, da: Any, db: Any,
                       dc: Any, mask: Any, temperature: Any, weight: Any, scale: float, softcap: float,
                       ignore_index: int) -> Tensor:  # fmt: skip
    """The formula, from the given numbers of rows."""
    each, given = (t if t.dim() == input.dim() else t[..., None] for t in (ids, dlogprob.double()))
    ignored = each[..., :1] == ignore_index
    wrong = (each < 0) | (each >= input.shape[-1])  # on a CPU they raise
    classes = each.where(~(ignored | wrong), 0)
    by = 1.0 if temperature is None else temperature.double()[..., None]
    slope = torch.full_like(input.double(), scale) / by
    z = input.double() * slope
    if softcap:
        t = torch.tanh(input.double() * scale / softcap)
        z, slope = softcap * t / by, slope * (1 - t * t)
    logs = z - largest.double()[..., None] - log_sum.double()[..., None]
    kept = torch.ones_like(input, dtype=torch.bool) if mask is None else mask
    given = given.where(kept.gather(-1, classes), 0.0).masked_fill(wrong & ~ignored, torch.nan)
    a, b, c = (0.0 if n is None else n.double()[..., None] for n in (da, db, dc))
    dz = logs.exp() * (a - given.sum(-1, keepdim=True) + b * logs.clamp(min=-1e4))
    dz = dz + c * (1.0 if weight is None else weight.double())
    dx = dz.scatter_add(-1, classes, given) * slope
    dead = ignored | (False if mask is None else ~kept.any(-1, keepdim=True))
    return dx.masked_fill(~kept | dead, 0.0)


_OF_LAYER = ("input", "linear_weight", "linear_bias")


def _layer(call: Arguments) -> tuple[list[Any], Tensor, Arguments]:
    """Leaves in float64 of a linear layer, its logits, and what the row operators take beside these."""
    dtype = call.pop("logits_dtype") or call["input"].dtype
    leaves = [None if (t := call.pop(name)) is None else t.detach().double().requires_grad_() for name in _OF_LAYER]
    logits = torch.nn.functional.linear(*leaves)
    call.pop("accumulate"), call.pop("chunk_rows")
    return leaves, logits + (logits.to(dtype) - logits).detach(), call


def _of_leaves(leaves: list[Any], wants: list[bool], output: Tensor, dy: Tensor) -> tuple[Any, ...]:
    present = [t for t in leaves if t is not None]
    found = iter(torch.autograd.grad(output, present, dy.to(output.dtype), allow_unused=True))
    whole = [None if t is None else next(found) for t in leaves]
    return tuple(t if wanted else None for t, wanted in zip(whole, wants, strict=True))


def _linear_token_logprob(**call: Any) -> Any:
    wide = torch.float64 if call["input"].dtype == torch.float64 else torch.float32
    _, logits, rows = _layer(call)
    found = torch.ops.kernel_fusion.token_logprob_reference(logits.detach(), **rows)
    return tuple(t if t.dtype == torch.int64 else t.to(wide) for t in found)


def _linear_token_logprob_bwd(output_mask: list[bool], **call: Any) -> tuple[Any, ...]:
    leaves, logits, rows = _layer(call)
    dz = _token_logprob_bwd(logits.detach(), **rows)
    return _of_leaves(leaves, output_mask, logits, dz)


def _linear_cross_entropy(divisor: Any, mean: bool, label_smoothing: float, z_loss: float, predicts: bool,
                          output_mask: list[bool], **call: Any) -> tuple[Any, ...]:  # fmt: skip
    wide = torch.float64 if call["input"].dtype == torch.float64 else torch.float32
    leaves, logits, rows = _layer(call)
    ids, weight, dead = rows["ids"], rows["weight"], rows["ids"] == rows["ignore_index"]
    found = torch.ops.kernel_fusion.token_logprob_reference(logits, **rows, extra="sum", predicts=predicts)
    logprob, largest, log_sum, total, predicted = found
    factor = (torch.ones_like(logprob) if weight is None else weight.double()[ids.clamp(0, 6)]).masked_fill(dead, 0.0)
    gains = (1 - label_smoothing) * factor * logprob + label_smoothing / logits.shape[1] * total
    lse = (largest + log_sum).masked_fill(dead, 0.0)
    loss = (z_loss * lse * lse - gains).sum()
    if divisor is not None or mean:
        loss = loss / (factor.sum() if divisor is None else divisor)
    row_numbers = (t.detach().to(wide) for t in (largest, log_sum))
    gradients = _of_leaves(leaves, output_mask, loss, torch.ones(()))
    return loss.detach().to(wide), *row_numbers, predicted, *gradients


def _qk_norm_rope_bwd(dy: Tensor, dy_key: Any, query: Any, key: Any, **call: Any) -> tuple[Any, ...]:
    wants = call.pop("output_mask", None) or call.pop("wants")
    if call["eps"] is None:
        query, key = torch.zeros_like(dy), None if dy_key is None else torch.zeros_like(dy_key)
    tensors = [query, key, call.pop("query_weight"), call.pop("key_weight")]
    leaves = [None if t is None else t.double().detach().requires_grad_() for t in tensors]
    for name in ("cos", "sin"):
        call[name] = call[name].double()
    outputs = torch.ops.kernel_fusion.qk_norm_rope_reference(*leaves, **call)
    pairs = [(y, d.double()) for y, d in zip(outputs, (dy, dy_key), strict=True) if d is not None]
    wanted = [t for t, wants_it in zip(leaves, wants, strict=True) if t is not None and wants_it]
    found = iter(torch.autograd.grad([y for y, _ in pairs], wanted, [d for _, d in pairs], allow_unused=True))
    return tuple(next(found) if t is not None and wants_it else None for t, wants_it in zip(leaves, wants, strict=True))


def _quantized(y: Tensor, keeps: bool, dtype: Any, scale: Any, block: int) -> tuple[Any, ...]:
    """Codes, scales unless they are given, and the result itself if it is kept."""
    if scale is not None:
        scale = scale.clone()  # a number divided by an efficient zero tensor is infinite without a sign in PyTorch
    values, scales = eager.quantize(y, dtype, scale, block)
    return values, scales if scale is None else None, y if keeps else None


def _quantized_row_norm(dtype: Any, scale: Any, block: int, keeps: bool, **call: Any) -> tuple[Any, ...]:
    y, h = torch.ops.kernel_fusion.staged_row_norm_reference(**call)
    return *_quantized(y, keeps, dtype, scale, block), h


def _quantized_gate(gate: Tensor, value: Tensor, activation: str, keeps: bool, **codes: Any) -> tuple[Any, ...]:
    y = torch.ops.kernel_fusion.pointwise_reference(gate, value, "gate", activation, 1.0, 0.0, None)
    return _quantized(y, keeps, **codes)


# Operators that only the graph of another one calls, with results that it alone knows how to read.
_WITHOUT_DEFINITION = ("pointwise_fwd", "reduce_fwd", "softmax_fwd")
_WITHOUT_DEFINITION += tuple(f"row_norm_{part}" for part in ("moments", "apply", "bwd_sums", "bwd_apply"))

# The results of operators that are not verbs. None: nobody wanted the result.
_DEFINITIONS: dict[str, Callable[..., Any]] = {
    "layer_norm": lambda **call: _row_norm(**call, rms=False),
    "rms_norm": lambda **call: _row_norm(**call, rms=True),
    **dict.fromkeys(
        ("spread_row_norm", "spread_row_norm_reference"),
        lambda groups, **call: torch.ops.kernel_fusion.staged_row_norm_reference(**call),
    ),
    "row_norm_fwd": _row_norm_fwd,
    "row_norm_bwd": _row_norm_bwd,
    "pointwise_bwd": _pointwise_bwd,
    "softmax_bwd": _softmax_bwd,
    "group_norm_fwd": _group_norm_fwd,
    "group_norm_bwd": _group_norm_bwd,
    "token_logprob_bwd": _token_logprob_bwd,
    "linear_token_logprob": _linear_token_logprob,
    "linear_token_logprob_bwd": _linear_token_logprob_bwd,
    "linear_cross_entropy": _linear_cross_entropy,
    "linear_scaled": lambda dloss, **gradients: tuple(t * dloss for t in gradients.values()),
    "qk_norm_rope_fwd": lambda **call: torch.ops.kernel_fusion.qk_norm_rope_reference(**call),
    "qk_norm_rope_on_gpu": lambda **call: torch.ops.kernel_fusion.qk_norm_rope_reference(**call),
    "qk_norm_rope_bwd": _qk_norm_rope_bwd,
    "quantize": lambda input, **codes: _quantized(input, False, **codes)[:2],
    "quantized_row_norm": _quantized_row_norm,
    "quantized_gate": _quantized_gate,
}


def _as_float32(value: Any) -> Any:
    """A number as kernels of float32 have it."""
    return ctypes.c_float(value).value if isinstance(value, float) else value


def definition(operator: str, call: Arguments) -> Any:
    """The expected results of a call, or None if the definition does not take it."""
    operator = operator.removeprefix("triton_")
    if operator.endswith("_reference") or operator in _WITHOUT_DEFINITION:
        return None
    define = _DEFINITIONS.get(operator) or getattr(torch.ops.kernel_fusion, f"{operator}_reference")
    try:
        for value in call.values():
            if isinstance(value, Tensor):
                arguments.memory(value)
        return define(**{name: _as_float32(value) for name, value in call.items()})
    except Exception:
        return None


# ---- Judgement -------------------------------------------------------------------------------------------------------

_TOLERANCE = {torch.float16: 2e-2, torch.bfloat16: 1e-1, torch.float8_e4m3fn: 0.5}


def _tolerance(tensors: list[Any]) -> float:
    return max((_TOLERANCE.get(t.dtype, 1e-4) for t in tensors if isinstance(t, Tensor)), default=1e-4)


def _overflows(call: Arguments) -> bool:
    """Whether factors of logits are infinite, or divide by 0: the order of products decides what comes."""
    if "ids" not in call:
        return False
    dense = [t for t in call.values() if isinstance(t, Tensor) and t.layout == torch.strided and not t.is_nested]
    real = [t.detach().clone() for t in dense if t.is_floating_point() and not (t.is_meta or t.is_quantized)]
    warm = call["temperature"] is not None and call["temperature"]._is_zerotensor()
    return warm or abs(_as_float32(call["scale"])) == math.inf or any(bool(t.double().isinf().any()) for t in real)


def assert_same(got: Any, want: Any, call: Arguments) -> None:
    """Fail unless the results that somebody wanted are those of the definition."""
    results, wanted = ([t] if isinstance(t, Tensor) else [*t] for t in (got, want))
    overflows = _overflows(call)
    for ours, theirs in zip(results, wanted, strict=True):
        if theirs is None:
            assert ours.numel() == 0
            continue
        assert (ours.device, ours.layout, ours.is_nested) == (theirs.device, theirs.layout, theirs.is_nested)
        if ours.is_nested or ours.is_quantized or ours.layout != torch.strided:
            continue  # the definition's own
        assert ours.shape == theirs.shape
        if ours.is_meta or overflows:
            continue
        wide = torch.complex128 if ours.is_complex() else torch.float64
        tolerance = _tolerance([ours, theirs, *call.values()])
        values = [t.detach().flatten().to(ours.dtype).to(wide) for t in (ours, theirs)]
        given = [call[name] for name in ("stats", "dy" if "num_groups" in call else "stats") if "stats" in call]
        if not all(t.isfinite().all() for t in given):
            # No forward gives such statistics, and the order of products decides between infinity and NaN. So it does
            # beside an infinite dy in a group norm, whose dscale is made of two sums.
            values = [t.where(t.isfinite(), torch.nan) for t in values]
        if ours.dtype == torch.int8:  # the last digit of what is rounded decides between two codes
            torch.testing.assert_close(*values, rtol=0, atol=1)
            continue
        torch.testing.assert_close(*values, rtol=tolerance, atol=tolerance, equal_nan=True)


def is_sentence(error: Exception) -> bool:
    """Whether an error says what is wrong."""
    if isinstance(error, NotImplementedError):  # PyTorch's, with the operator's name, of a subclass
        return True
    return not isinstance(error, (RecursionError, MemoryError, SystemError)) and len(str(error).split()) > 2


def judge(operator: str, call: Arguments, served: Callable[[], Any] | None = None) -> str:
    """Make the call; "refused", or "served" if it gave what the definition gives. AssertionError otherwise.

    Args:
        served: makes the call in place of the operator.
    """
    torch.manual_seed(0)  # dropout of a complex tensor is PyTorch's own
    try:
        got = served() if served else getattr(torch.ops.kernel_fusion, operator)(**call)
    except Exception as error:
        if not is_sentence(error):
            raise AssertionError(f"not a sentence: {error!r}") from error
        return "refused"
    torch.manual_seed(0)
    want = definition(operator, call)
    if want is not None:
        assert_same(got, want, call)
    return "served"


def hostile_calls(operator: str, argument: str, device: str) -> Iterator[tuple[str, Arguments]]:
    """The right calls of `operator` with each hostile value of `argument`, by the value's name."""
    right_calls_of = right_triton_calls if operator.startswith("triton_") else right_calls
    kind = argument_types(operator)[argument]
    like = torch.randn(3, 5, 6, device=device)
    for right in right_calls_of(device)[operator]:
        for name, value in hostile_values(kind, right[argument], like):
            yield name, right | {argument: value}


def argument_types(operator: str) -> dict[str, str]:
    """The types of an operator's arguments by their names, as its schema has them written."""
    written = str(getattr(torch.ops.kernel_fusion, operator).default._schema).split(" -> ")[0]
    return {name: kind for kind, name in re.findall(r"([\w\[\]]+\??) (\w+)[,=)]", written)}


def registered(triton: bool = False) -> list[str]:
    """The names of all our operators that the dispatcher has: Triton's, once they are defined, or the others."""
    found = (schema.name.split("::") for schema in torch._C._jit_get_all_schemas())
    ours = {name for owner, name in found if owner == "kernel_fusion" and name.startswith("triton_") == triton}
    return sorted(ours)


def operators() -> list[tuple[str, str]]:
    """Every registered operator with every argument. One without right calls is a KeyError where it is called."""
    return [(operator, argument) for operator in registered() for argument in argument_types(operator)]


@contextmanager
def filled_memory() -> Iterator[None]:
    """Have fresh memory hold NaN, or the largest integer."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def make_an_error() -> None:
    """Have the extension read a name that nothing terminates, beyond the end of its memory."""
    libc = ctypes.CDLL(None)
    libc.malloc.restype = ctypes.c_void_p
    name = ctypes.c_void_p(libc.malloc(4))
    ctypes.memset(name, ord("A"), 4)
    loader.library().kf_use_cpu_variant(name)


def main(device: str, part: int = 0, parts: int = 1) -> None:
    """Make every call, or a part of them; say which one is under way, so that a crash has a name."""
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    assert loader.load(), loader.error()
    with filled_memory():
        for operator, argument in operators()[part::parts]:
            for name, call in hostile_calls(operator, argument, device):
                print(operator, argument, name, end=" ", flush=True)
                print(judge(operator, call))
    if device == "cuda":
        torch.cuda.synchronize()
    print("every call passed", flush=True)
    if device == "cpu":
        make_an_error()


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
