"""Verbs whose options are known beforehand, for callers that run them at every step.

Each function here returns one that takes the tensors alone. With plain tensors it calls the operator at once; all else
goes to the verb. So it spares the host the checks that the operator repeats, and what never changes between calls:
both take as long as the operator itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from kernel_fusion.backends import eager
from kernel_fusion.backends.availability import PLAIN_TENSORS
from kernel_fusion.config import state
from kernel_fusion.core.stages import Given
from kernel_fusion.operators import schemas

_layer_norm, _rms_norm, _staged, _pointwise = (
    schemas.overload(name)._op for name in ("layer_norm", "rms_norm", "staged_row_norm", "pointwise")
)

Call = Callable[..., Any]


def _is_usual(x: Any) -> bool:
    """Whether the operator itself may serve calls with `x`: nobody asked for a backend. Dynamo may not trace this."""
    return type(x) in PLAIN_TENSORS and not x.is_nested and state.backend is None


def norm(verb: Call, rms: bool, weight_offset: float, out_dtype: Any, rounding: str) -> Call:
    """Bind the options of a norm.

    The result takes an input, the number of dimensions to normalise, weight, bias and eps.
    """
    if rounding != "once":
        after = _after(rms, weight_offset, out_dtype, rounding)

        def rounded(x: Tensor, num_dims: int, weight: Any, bias: Any, eps: float | None) -> Any:
            if _is_usual(x) and eps is not None:
                return _staged(x, None, num_dims, weight, bias, eps, *after)[0]
            return verb(x, x.shape[-num_dims:], weight=weight, bias=bias, eps=eps)

        return rounded
    plain = _rms_norm if rms else _layer_norm
    options = () if weight_offset == 0.0 and out_dtype is None else (weight_offset, out_dtype)

    def once(x: Tensor, num_dims: int, weight: Any, bias: Any, eps: float | None) -> Any:
        if _is_usual(x):
            return plain(x, num_dims, weight, bias, eps, *options)
        return verb(x, x.shape[-num_dims:], weight=weight, bias=bias, eps=eps)

    return once


def add_norm(verb: Call, rms: bool, weight_offset: float, out_dtype: Any, rounding: str) -> Call:
    """Bind the options of an `add_*` norm.

    The result takes the same arguments as that of :func:`norm`, with the residual second and `dropout_p` last.
    """
    after = _after(rms, weight_offset, out_dtype, rounding)
    dropping = weight_offset, out_dtype, rms, *Given()[: Given._fields.index("dropout_p")]

    def add(
        x: Tensor, residual: Tensor, num_dims: int, weight: Any, bias: Any, eps: float | None, p: float = 0.0
    ) -> Any:
        if _is_usual(x) and type(residual) in PLAIN_TENSORS and eps is not None:
            if p == 0.0:
                return _staged(x, residual, num_dims, weight, bias, eps, *after)
            return _staged(x, residual, num_dims, weight, bias, eps, *dropping, p, eager.draw_seed(x.device), rounding)
        return verb(x, residual, x.shape[-num_dims:], weight=weight, bias=bias, eps=eps, dropout_p=p)

    return add


def modulated_norm(verb: Any, add_verb: Any, rms: bool) -> Call:
    """Bind the options of a modulated norm.

    The result takes an input, a residual or None, its gate, scale, shift and eps. It returns y and h, or None if a
    vector does not broadcast to the input.

    Args:
        verb: the function without a residual, a partial with an `out_dtype`.
        add_verb: the function with a residual, a partial too.
        rms: whether they are RMSNorm.
    """
    before = 1.0, verb.keywords["out_dtype"], rms
    after = [(*before, *Given(grouped=grouped)[: Given._fields.index("residual_gate")]) for grouped in (True, False)]

    def modulate(x: Tensor, residual: Tensor | None, gate: Any, scale: Any, shift: Any, eps: float | None) -> Any:
        size, shape = x.shape, scale.shape
        if (
            len(size) == 3
            and shape == (size[0], 1, size[2])
            and _is_usual(x)
            and type(scale) in PLAIN_TENSORS
            and eps is not None
            and (shift is None or (type(shift) in PLAIN_TENSORS and shift.shape == shape))
            and (residual is None or type(residual) in PLAIN_TENSORS)
            and (gate is None or (type(gate) in PLAIN_TENSORS and gate.shape == shape))
        ):
            one = size[0] == 1  # sample, whose vectors (B, 1, N) are those of all rows, (N,)
            if one:
                scale, shift, gate = (p if p is None else p.reshape(size[2:]) for p in (scale, shift, gate))
            return _staged(x, residual, 1, scale, shift, eps, *after[one], gate)
        if not all(p is None or _broadcasts(p.shape, size) for p in (gate, scale, shift)):
            return None
        if residual is None:
            return verb(x, size[-1:], scale, shift, eps=eps), x
        return add_verb(x, residual, size[-1:], scale, shift, eps=eps, gate=gate)

    return modulate


def _broadcasts(shape: Sequence[int], size: Sequence[int]) -> bool:
    """Whether rows of this shape broadcast to an input of this size."""
    own = zip(shape[::-1], size[::-1], strict=False)
    return 0 < len(shape) <= len(size) and shape[-1] == size[-1] and all(n in (1, rows) for n, rows in own)


def gated_act(verb: Call, activation: str) -> Call:
    """Bind the activation of `kf.gated_act`; the result takes a gate and a value of the same shape."""

    def gated(gate: Tensor, value: Tensor) -> Any:
        if _is_usual(gate) and type(value) in PLAIN_TENSORS:
            return _pointwise(gate, value, "gate", activation, 1.0, 0.0, None)
        return verb(gate, value, activation)

    return gated


def _after(rms: bool, weight_offset: float, out_dtype: Any, rounding: str) -> tuple[Any, ...]:
    """The last arguments of `staged_row_norm`, without defaults at the end, which take time to pass."""
    given = Given(rounding=rounding) if rounding != "once" else ()
    return weight_offset, out_dtype, rms, *given[: Given._fields.index("rounding") + 1]
