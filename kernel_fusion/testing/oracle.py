"""The oracle: every result is compared with a float64 evaluation of the eager definition.

The budget is derived, never tuned: an element may be off by twice (the largest error of the same PyTorch call in the
same dtype + one rounding of the element to the output dtype). Where PyTorch refuses a mix of dtypes, its call is made
on inputs widened to float32 and the result rounded, which is what its users write. float64 itself is compared with the
formulas in NumPy's long double. PyTorch's error is a random variable: short rows, whose few values may all happen to
round well, are drawn several times and the errors pooled.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

import kernel_fusion as kf
from kernel_fusion.backends import eager
from kernel_fusion.core.spec import compute_dtype, dtype_name


@dataclass(frozen=True)
class RowNormCase:
    """One call of a row-norm verb, forward and backward.

    Attributes:
        verb: "layer_norm" or "rms_norm".
        shape: of the input.
        num_dims: how many last dimensions are normalised.
        dtype: of the input.
        weight, bias: their dtypes, or None.
        out_dtype: as in the verb.
        weight_offset: as in the verb.
        layout: "contiguous"; "padded" (rows of a wider tensor); "unaligned" (storage offset of one element);
            "transposed" (leading dimensions permuted, the normalised ones contiguous).
        mean, std: of the input's values.
    """

    verb: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    num_dims: int = 1
    weight: torch.dtype | None = None
    bias: torch.dtype | None = None
    out_dtype: torch.dtype | None = None
    weight_offset: float = 0.0
    layout: str = "contiguous"
    mean: float = 0.5
    std: float = 2.0

    @property
    def normalized_shape(self) -> tuple[int, ...]:
        """The sizes of the normalised dimensions."""
        return self.shape[len(self.shape) - self.num_dims :]

    @property
    def result_dtype(self) -> torch.dtype:
        """The dtype of y."""
        return self.out_dtype or self.dtype

    def __str__(self) -> str:
        shape = "x".join(map(str, self.shape))
        parts = [self.verb, shape, dtype_name(self.dtype)]
        parts += [f"{name}={dtype_name(d)}" for name, d in (("w", self.weight), ("b", self.bias)) if d]
        parts += [f"out={dtype_name(self.out_dtype)}"] if self.out_dtype else []
        parts += [f"dims={self.num_dims}"] if self.num_dims != 1 else []
        parts += [f"offset={self.weight_offset:g}"] if self.weight_offset else []
        parts += [self.layout] if self.layout != "contiguous" else []
        parts += [f"mean={self.mean:g}"] if self.mean != 0.5 else []
        parts += [f"std={self.std:g}"] if self.std != 2.0 else []
        return "-".join(parts)


@dataclass
class Inputs:
    """The tensors of a case: leaves of the autograd graph, and the cotangent dy."""

    x: Tensor
    weight: Tensor | None
    bias: Tensor | None
    dy: Tensor


@dataclass(frozen=True)
class Comparison:
    """One tensor against its float64 reference, in absolute terms.

    Attributes:
        name: "y", "dx", "dweight" or "dbias".
        error, pytorch_error: largest absolute errors, ours and PyTorch's.
        excess: largest error over its budget; at most 1 passes. NaN where only one of the two is NaN.
    """

    name: str
    error: float
    pytorch_error: float
    excess: float

    @property
    def ok(self) -> bool:
        """Whether the tensor is within its budget."""
        return self.excess <= 1.0


def lay_out(values: Tensor, layout: str) -> Tensor:
    """A tensor equal to `values` that lies in memory as `layout` says."""
    if layout == "contiguous":
        return values.clone(memory_format=torch.contiguous_format)
    if layout == "padded":
        wide = values.new_empty(*values.shape[:-1], values.shape[-1] + 1)
        return wide[..., :-1].copy_(values)
    if layout == "unaligned":
        flat = values.new_empty(values.numel() + 1)
        return flat[1:].view(values.shape).copy_(values)
    if layout == "transposed":
        permuted = values.movedim(0, 1).contiguous()
        return permuted.movedim(0, 1)
    raise ValueError(f"unknown layout {layout!r}")


def make_inputs(case: RowNormCase, device: torch.device | str, seed: int = 0) -> Inputs:
    """Random tensors for `case`, drawn on the CPU so that every device sees the same values."""
    generator = torch.Generator().manual_seed(seed)

    def random(shape: tuple[int, ...], dtype: torch.dtype, mean: float = 0.0, std: float = 1.0) -> Tensor:
        draw = torch.randn(shape, generator=generator, dtype=torch.float64) * std + mean
        return draw.to(dtype).to(device)

    def parameter(dtype: torch.dtype | None, mean: float) -> Tensor | None:
        return None if dtype is None else random(case.normalized_shape, dtype, mean).requires_grad_()

    x = lay_out(random(case.shape, case.dtype, case.mean, case.std), case.layout)
    dy = random(case.shape, case.result_dtype)
    weight, bias = parameter(case.weight, 1.0 - case.weight_offset), parameter(case.bias, 0.5)
    return Inputs(x.requires_grad_(), weight, bias, lay_out(dy, case.layout))


def run(case: RowNormCase, inputs: Inputs, backend: str | None) -> dict[str, Tensor]:
    """y and the gradients, by our verb on `backend`."""
    options: dict[str, Any] = {"weight_offset": case.weight_offset, "out_dtype": case.out_dtype, "backend": backend}
    if case.verb == "layer_norm":
        y = kf.layer_norm(inputs.x, case.normalized_shape, inputs.weight, inputs.bias, **options)
    else:
        y = kf.rms_norm(inputs.x, case.normalized_shape, inputs.weight, bias=inputs.bias, **options)
    return _with_gradients(y, inputs)


Array = np.ndarray[tuple[int, ...], np.dtype[np.floating[Any]]]
Reference = dict[str, Array]


def reference(case: RowNormCase, inputs: Inputs) -> Reference:
    """y and the gradients in float64 by the eager definition, or in long double for float64 inputs."""
    if case.dtype == torch.float64:
        return _reference_long_double(case, inputs)
    return {name: tensor.numpy() for name, tensor in _reference_float64(case, inputs).items()}


def _reference_float64(case: RowNormCase, inputs: Inputs) -> dict[str, Tensor]:
    wide = Inputs(*(None if t is None else t.detach().cpu().double() for t in vars(inputs).values()))  # type: ignore[arg-type]
    for tensor in (wide.x, wide.weight, wide.bias):
        if tensor is not None:
            tensor.requires_grad_()
    y = eager.row_norm(
        wide.x,
        case.num_dims,
        wide.weight,
        wide.bias,
        default_eps(case),
        case.weight_offset,
        None,
        case.verb == "rms_norm",
    )
    return _with_gradients(y, wide)


def pytorch(case: RowNormCase, inputs: Inputs) -> dict[str, Tensor]:
    """y and the gradients by PyTorch's own call."""
    dtypes = {t.dtype for t in (inputs.x, inputs.weight, inputs.bias) if t is not None}
    compute = case.dtype if len(dtypes) == 1 else torch.float32
    weight = None if inputs.weight is None else inputs.weight.to(compute)
    if weight is not None and case.weight_offset:
        weight = weight + case.weight_offset
    bias = None if inputs.bias is None else inputs.bias.to(compute)
    x = inputs.x.to(compute)
    if case.verb == "layer_norm":
        y = torch.nn.functional.layer_norm(x, case.normalized_shape, weight, bias, default_eps(case))
    else:
        y = torch.nn.functional.rms_norm(x, case.normalized_shape, weight, default_eps(case))
        y = y if bias is None else y + bias
    return _with_gradients(y.to(case.result_dtype), inputs)


def _reference_long_double(case: RowNormCase, inputs: Inputs) -> Reference:
    """The formulas of the forward and backward pass, by hand, in NumPy's widest type."""

    def wide(t: Tensor | None, default: float) -> Array:
        values = np.full(case.normalized_shape, default) if t is None else t.detach().cpu().numpy()
        return values.astype(np.longdouble)

    axes = tuple(range(-case.num_dims, 0))
    rows = tuple(range(len(case.shape) - case.num_dims))
    x, dy = wide(inputs.x, 0.0), wide(inputs.dy, 0.0)
    offset = case.weight_offset if inputs.weight is not None else 0.0
    weight, bias = wide(inputs.weight, 1.0) + offset, wide(inputs.bias, 0.0)
    if x.size == 0:
        results = {"y": x, "dx": x, "dweight": 0 * weight, "dbias": 0 * bias}
    else:
        centered = x if case.verb == "rms_norm" else x - x.mean(axes, keepdims=True)
        rstd = 1 / np.sqrt((centered * centered).mean(axes, keepdims=True) + np.longdouble(default_eps(case)))
        xhat, g = centered * rstd, dy * weight
        dx = g - xhat * (g * xhat).mean(axes, keepdims=True)
        if case.verb == "layer_norm":
            dx = dx - g.mean(axes, keepdims=True)
        results = {"y": xhat * weight + bias, "dx": dx * rstd}
        results |= {"dweight": (dy * xhat).sum(rows), "dbias": dy.sum(rows)}
    absent = {"dweight"} if inputs.weight is None else set()
    absent |= {"dbias"} if inputs.bias is None else set()
    return {name: value for name, value in results.items() if name not in absent}


def compare(case: RowNormCase, device: torch.device | str, backend: str | None, seed: int = 0) -> list[Comparison]:
    """Run `case` on `backend` and judge y and every gradient."""
    cols = max(1, math.prod(case.normalized_shape))
    draws = []
    few = max(64 // cols, 512 // max(1, math.prod(case.shape)))
    for draw in range(max(1, min(64, few))):
        inputs = make_inputs(case, device, seed + draw)
        draws.append((reference(case, inputs), pytorch(case, inputs), run(case, inputs, backend)))
    return [
        judge(name, [(ours[name], wide[name], theirs[name]) for wide, theirs, ours in draws]) for name in draws[0][0]
    ]


def judge(name: str, draws: list[tuple[Tensor, Any, Tensor]]) -> Comparison:
    """Judge draws of (our result, its reference, PyTorch's result) under the budget of this module."""
    errors, roundings, pytorch_error = [], [], 0.0
    for ours, expected, theirs in draws:
        if ours.shape != expected.shape or ours.dtype != theirs.dtype:
            raise AssertionError(
                f"{name}: got {ours.dtype} of shape {tuple(ours.shape)}, expected {theirs.dtype} of {expected.shape}"
            )
        if expected.size == 0:
            return Comparison(name, 0.0, 0.0, 0.0)
        info = torch.finfo(ours.dtype)
        errors.append(np.abs(_wide(ours) - expected))
        roundings.append(np.maximum(np.abs(expected) * (info.eps / 2), info.tiny))
        pytorch_error = max(pytorch_error, float(np.nan_to_num(np.abs(_wide(theirs) - expected)).max()))
    worst = [
        float((error / (2 * (pytorch_error + rounding))).max())
        for error, rounding in zip(errors, roundings, strict=True)
    ]
    excess = math.inf if any(map(math.isnan, worst)) else max(worst)
    return Comparison(name, max(float(error.max()) for error in errors), pytorch_error, excess)


def _wide(t: Tensor) -> Array:
    """In float64, which a long double reference widens further."""
    return t.detach().cpu().double().numpy()


def default_eps(case: RowNormCase) -> float:
    """PyTorch's default: 1e-5 for LayerNorm, the machine epsilon of the compute type for RMSNorm."""
    return 1e-5 if case.verb == "layer_norm" else torch.finfo(compute_dtype(case.dtype)).eps


def _with_gradients(y: Tensor, inputs: Inputs) -> dict[str, Tensor]:
    leaves = {"dx": inputs.x, "dweight": inputs.weight, "dbias": inputs.bias}
    wanted = {name: leaf for name, leaf in leaves.items() if leaf is not None}
    gradients = torch.autograd.grad(y, list(wanted.values()), inputs.dy.to(y.device))
    return {"y": y.detach()} | dict(zip(wanted, gradients, strict=True))
