"""The schemas of `torch.ops.kernel_fusion.*`, and the definitions as operators.

Import defines them and builds nothing, so `torch.export.load` works in a fresh process.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from kernel_fusion.backends import eager
from kernel_fusion.core import arguments, stages

# Operators take the number of normalised dimensions instead of their shape, so a new number of rows needs no new trace.
_PLAIN = "int num_dims, Tensor? weight=None, Tensor? bias=None, float eps=1e-05, float weight_offset=0., "
_PLAIN += "ScalarType? out_dtype=None"
_AFFINE = re.sub("=[^,]*", "", _PLAIN) + ", bool rms"
# The arguments are described in core/rotary.py.
_ROTARY = "Tensor? query_weight, Tensor? key_weight, Tensor cos, Tensor sin, Tensor? positions, float? eps, "
_ROTARY += "float weight_offset, bool interleaved, str rounding"
_CHAIN = "Tensor? b, str combine, str activation, float scale, float dropout_p, Tensor? seed"
VERBS = {
    "layer_norm": f"(Tensor input, {_PLAIN}) -> Tensor",
    "rms_norm": f"(Tensor input, {_PLAIN.replace('float eps=1e-05', 'float? eps=None')}) -> Tensor",
    # The result `residual` is h, or empty. If `grouped`, weight, bias and residual_gate have leading dimensions, which
    # broadcast to the input's.
    "staged_row_norm": f"(Tensor input, Tensor? residual, {_AFFINE}, {stages.SCHEMA}) "
    "-> (Tensor output, Tensor residual)",
    # dropout(scale * f(a, b)), as backends/eager/pointwise.py defines it.
    "pointwise": f"(Tensor a, {_CHAIN}) -> Tensor",
    "reduce": "(Tensor input, int[] dim, bool keepdim, str kind, ScalarType? dtype) -> Tensor",
    "softmax": "(Tensor input, Tensor? mask, float scale, bool causal) -> Tensor",
    # With an `eps`, each head is normalised by RMSNorm before. Results have their dimensions in the order of their
    # arguments'
    # strides.
    "qk_norm_rope": f"(Tensor query, Tensor? key, {_ROTARY}) -> (Tensor query, Tensor key)",
}
# The parts below autograd. `stats` holds mean and rstd as (2, *rows) in fp32 (fp64 for fp64), for RMSNorm rstd as (1,
# *rows): one allocation. Unwanted results are empty. Backward normalises `input`: h with a residual, else x. It takes
# x, too, if a residual meets a pre-activation or a gate, and bias with an activation or a gate. `dresidual` is the
# residual's or gate's gradient, `dgate` that of the residual's gate.
PARTS = {
    # PyTorch's cached graphs call these by position, so new arguments are appended.
    "row_norm_fwd": f"(Tensor input, {_AFFINE}, Tensor? residual=None, {stages.SCHEMA}) "
    "-> (Tensor y, Tensor stats, Tensor h)",
    "row_norm_bwd": "(Tensor dy, Tensor input, Tensor stats, int num_dims, Tensor? weight, ScalarType? bias_dtype, "
    "float weight_offset, bool rms, bool[5] output_mask, ScalarType? x_dtype=None, Tensor? dh=None, Tensor? x=None, "
    f"Tensor? bias=None, bool has_residual=False, {stages.SCHEMA}) "
    "-> (Tensor dx, Tensor dweight, Tensor dbias, Tensor dresidual, Tensor dgate)",
    # `bits` say which of two slopes each element has. Backward takes them, or a result that determines the slope.
    "pointwise_fwd": f"(Tensor a, {_CHAIN}) -> (Tensor y, Tensor bits)",
    "pointwise_bwd": f"(Tensor dy, Tensor a, {_CHAIN}, bool[2] output_mask) -> (Tensor da, Tensor db)",
    "softmax_bwd": "(Tensor dy, Tensor y, float scale, bool leaves_out=False) -> Tensor",
    # With a norm, backward computes the statistics again.
    "qk_norm_rope_bwd": f"(Tensor dy, Tensor? dy_key, Tensor? query, Tensor? key, {_ROTARY}, "
    "bool[4] output_mask) -> (Tensor dquery, Tensor dkey, Tensor dquery_weight, Tensor dkey_weight)",
}
# A verb that needs a gradient calls its own operator, then `quantize`. `block` columns share a scale, 0: a row. With
# `scale` given, the second result is empty. `keeps` asks for the result in its own dtype.
_CODES = "ScalarType dtype, Tensor? scale, int block"
QUANTIZED = {
    "quantize": f"(Tensor input, {_CODES}) -> (Tensor values, Tensor scale)",
    "quantized_row_norm": f"(Tensor input, Tensor? residual, {_CODES}, bool keeps, {_AFFINE}, {stages.SCHEMA}) "
    "-> (Tensor values, Tensor scale, Tensor output, Tensor residual)",
    "quantized_gate": f"(Tensor gate, Tensor value, str activation, {_CODES}, bool keeps) "
    "-> (Tensor values, Tensor scale, Tensor output)",
}
ALL = VERBS | PARTS | QUANTIZED
# The definitions as operators, which C++ calls and tracers decompose.
_REFERENCES: dict[str, tuple[str, Callable[..., Any]]] = {
    "staged_row_norm_reference": (VERBS["staged_row_norm"], eager.staged_row_norm),
    "pointwise_reference": (VERBS["pointwise"], eager.pointwise),
    "reduce_reference": (VERBS["reduce"], eager.reduce),
    "softmax_reference": (VERBS["softmax"], eager.softmax),
    "qk_norm_rope_reference": (VERBS["qk_norm_rope"], eager.qk_norm_rope),
}

library = torch.library.Library("kernel_fusion", "DEF")


def overload(name: str) -> Any:
    """The overload of an operator, which is what tracers know."""
    return getattr(torch.ops.kernel_fusion, name).default


for _name, _schema in ALL.items():
    library.define(_name + _schema, tags=torch.Tag.pt2_compliant_tag)
for _name, (_schema, _definition) in _REFERENCES.items():
    library.define(_name + _schema, tags=torch.Tag.pt2_compliant_tag)
    library.impl(_name, arguments.checked(overload(_name), _definition), "CompositeImplicitAutograd")


def default_eps(input: Tensor) -> float:
    """The value of rms_norm's `eps=None`: the compute type's epsilon, as a literal: Dynamo makes globals inputs."""
    return 2.0**-52 if input.dtype == torch.float64 else 2.0**-23


def reference_call(name: str, *args: Any) -> Any:
    """Call the definition of an operator with the operator's arguments."""
    if f"{name}_reference" in _REFERENCES:
        definition: Any = _REFERENCES[f"{name}_reference"][1]
        return definition(*args)
    input, num_dims, weight, bias, eps, weight_offset, out_dtype = args
    if eps is None:
        eps = default_eps(input)
    return eager.row_norm(input, num_dims, weight, bias, eps, weight_offset, out_dtype, name == "rms_norm")


def bind(operator: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
    """All arguments of a call by position, with the defaults that the dispatcher omits."""
    arguments = operator._schema.arguments
    defaults = {a.name: a.default_value for a in arguments if a.has_default_value()}
    bound = defaults | dict(zip((a.name for a in arguments), args, strict=False)) | kwargs
    return [bound[a.name] for a in arguments]
