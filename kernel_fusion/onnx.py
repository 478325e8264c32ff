"""`export` writes a model that calls our functions as ONNX. Importing this needs the package onnxscript.

The plain norms are translated, a LayerNorm into one node. Other operators are first decomposed, staged norms into a
plain norm and its stages, so that runtimes find the patterns that they can fuse.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from os import PathLike
from typing import Any

import torch
from onnxscript import ir
from onnxscript import opset18 as op
from onnxscript import opset23 as op23
from onnxscript.onnx_types import TensorType
from torch import Tensor, nn

from kernel_fusion import operators
from kernel_fusion.core.activations import IDENTITY, formula
from kernel_fusion.core.checks import FLOATING
from kernel_fusion.core.spec import compute_dtype
from kernel_fusion.core.stages import TENSORS, Given
from kernel_fusion.operators import schemas

_RMS_OPSET = 23  # the first with RMSNormalization


def export(
    model: nn.Module,
    args: Sequence[Any],
    path: str | PathLike[str] | None = None,
    *,
    opset_version: int = 18,
    **options: Any,
) -> torch.onnx.ONNXProgram:
    """Export a model that calls our functions and modules to ONNX.

    Args:
        model: in evaluation mode, because dropout would become the many operations of its generator.
        args: example inputs, as `torch.export.export` takes them.
        path: the file to write, or None to write none.
        opset_version: of the file, 18 or newer. From 23 on a plain RMSNorm is one node.
        options: others of `torch.export.export`, such as `dynamic_shapes`.

    Returns:
        PyTorch's program, which can be called, saved and looked at.

    Example:
        >>> import torch, kernel_fusion as kf, kernel_fusion.onnx
        >>> program = kf.onnx.export(kf.FusedAddLayerNorm(8).eval(), (torch.randn(4, 8), torch.randn(4, 8)))
        >>> [node.op_type for node in program.model.graph]
        ['Add', 'LayerNormalization']
    """
    exported = torch.export.export(model, tuple(args), **options).run_decompositions(decompositions())
    table = translation_table(opset_version)
    program = torch.onnx.export(exported, custom_translation_table=table, opset_version=opset_version, verbose=False)
    assert program is not None
    if path is not None:
        program.save(path)
    return program


def decompositions() -> dict[Any, Callable[..., Any]]:
    """The argument of `ExportedProgram.run_decompositions` before an export: all operators but the plain norms.

    Also `hypot`, which "squareplus" calls and the exporter does not know.
    """
    table = operators.decompositions()
    for name in ("layer_norm", "rms_norm"):
        del table[schemas.overload(name)]
    return table | {schemas.overload("staged_row_norm"): _staged_row_norm, torch.ops.aten.hypot.default: _hypot}


def translation_table(opset_version: int = 18) -> dict[Any, Callable[..., Any]]:
    """The argument `custom_translation_table` of `torch.onnx.export`: the plain norms, in the export's opset.

    A LayerNorm becomes one LayerNormalization; with mixed dtypes it computes in float32, between casts. An RMSNorm
    becomes one RMSNormalization from opset 23 on. Before, it becomes the nodes, in float32, that ONNX Runtime fuses
    into one SimplifiedLayerNormalization.
    """
    rms_norm = _rms_norm if opset_version >= _RMS_OPSET else _rms_norm_of_primitives
    return {schemas.overload("layer_norm"): _layer_norm, schemas.overload("rms_norm"): rms_norm}


def _staged_row_norm(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    """A plain norm between its stages; a gate, dropout or another rounding goes to the definition."""
    given = schemas.bind(schemas.overload("staged_row_norm"), args, kwargs)
    x, residual, num_dims, weight, bias, eps, offset, out_dtype, rms, *stages = given
    s = Given(*stages)
    before, after = s.pre_activation, s.activation
    tensors = any(getattr(s, name) is not None for name in TENSORS)
    if tensors or Given(before, after) != s or x.dtype not in FLOATING:
        return schemas.reference_call("staged_row_norm", *given)  # type: ignore[no-any-return]
    wide, out_dtype = compute_dtype(x.dtype), out_dtype or x.dtype
    h, summed = x, x.new_empty(0)
    if before != IDENTITY:
        h = formula(before)(h.to(wide))
    if residual is not None:
        h = summed = (h.to(wide) + residual.to(wide)).to(residual.dtype)
    norm = schemas.overload("rms_norm" if rms else "layer_norm")
    y = norm(h, num_dims, weight, bias, eps, offset, out_dtype if after == IDENTITY else wide)
    return formula(after)(y).to(out_dtype), summed


def _hypot(a: Tensor, b: Tensor) -> Tensor:
    a, b = a.abs(), b.abs()
    longer, shorter = torch.maximum(a, b), torch.minimum(a, b)
    ratio = shorter / longer
    exact = (longer == 0) | torch.isinf(longer)  # 0 / 0 or inf / inf
    return torch.where(exact, longer, longer * torch.sqrt(1 + ratio * ratio))


def _layer_norm(
    input: TensorType,
    num_dims: int,
    weight: TensorType | None = None,
    bias: TensorType | None = None,
    eps: float = 1e-5,
    weight_offset: float = 0.0,
    out_dtype: int | None = None,
) -> Any:
    x, w, b, dtype, out = _in_one_dtype(input, num_dims, weight, bias, weight_offset, out_dtype)
    y, _, _ = op.LayerNormalization(x, w, b, axis=-num_dims, epsilon=eps)
    return _cast(y, dtype, out)


def _rms_norm(
    input: TensorType,
    num_dims: int,
    weight: TensorType | None = None,
    bias: TensorType | None = None,
    eps: float | None = None,
    weight_offset: float = 0.0,
    out_dtype: int | None = None,
) -> Any:
    x, w, b, dtype, out = _in_one_dtype(input, num_dims, weight, bias, weight_offset, out_dtype)
    y = op23.RMSNormalization(x, w, axis=-num_dims, epsilon=_eps(input, eps))
    return _cast(y if b is None else op.Add(y, b), dtype, out)


def _rms_norm_of_primitives(
    input: TensorType,
    num_dims: int,
    weight: TensorType | None = None,
    bias: TensorType | None = None,
    eps: float | None = None,
    weight_offset: float = 0.0,
    out_dtype: int | None = None,
) -> Any:
    wide, out = _wide(input.dtype), input.dtype if out_dtype is None else ir.DataType(out_dtype)
    x, w, b = (_cast(v, None if v is None else v.dtype, wide) for v in (input, weight, bias))
    axes: Any = op.Constant(value_ints=list(range(-num_dims, 0)))
    mean = op.ReduceMean(op.Pow(x, _number(2.0, wide)), axes, keepdims=1)
    y = op.Div(x, op.Sqrt(op.Add(mean, _number(_eps(input, eps), wide))))
    if w is not None:
        y = op.Mul(y, op.Add(w, _number(weight_offset, wide)) if weight_offset else w)
    return _cast(y if b is None else op.Add(y, b), wide, out)


def _in_one_dtype(
    input: TensorType,
    num_dims: int,
    weight: TensorType | None,
    bias: TensorType | None,
    weight_offset: float,
    out_dtype: int | None,
) -> tuple[Any, Any, Any, Any, Any]:
    """Input, weight (ones if there is none) and bias in the dtype to compute in, this dtype, and the result's."""
    out = input.dtype if out_dtype is None else ir.DataType(out_dtype)
    alike = all(v is None or v.dtype == input.dtype for v in (weight, bias)) and out == input.dtype
    dtype = input.dtype if alike and not weight_offset else _wide(input.dtype)
    x, w, b = (_cast(v, None if v is None else v.dtype, dtype) for v in (input, weight, bias))
    if w is None:
        w = op.Expand(_number(1.0, dtype), op.Shape(x, start=-num_dims))
    if weight_offset:
        w = op.Add(w, _number(weight_offset, dtype))
    return x, w, b, dtype, out


def _wide(dtype: Any) -> ir.DataType:
    """The dtype that the kernels compute in."""
    return ir.DataType.DOUBLE if dtype == ir.DataType.DOUBLE else ir.DataType.FLOAT


def _cast(value: Any, dtype: Any, to: Any) -> Any:
    return value if value is None or dtype == to else op.Cast(value, to=to)


def _number(value: float, dtype: Any) -> Any:
    constant: Any = ir.tensor(value, dtype=dtype)
    return op.Constant(value=constant)


def _eps(input: TensorType, eps: float | None) -> float:
    """`eps=None` is the machine epsilon of the dtype that the kernels compute in."""
    if eps is not None:
        return eps
    return torch.finfo(torch.float64 if input.dtype == ir.DataType.DOUBLE else torch.float32).eps
