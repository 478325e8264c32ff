"""Pointwise chains: two operands, an activation and dropout in one read and one write."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from kernel_fusion.backends import eager
from kernel_fusion.core import checks
from kernel_fusion.core.activations import IDENTITY
from kernel_fusion.core.quantize import Quantize
from kernel_fusion.functional import interop, quantized
from kernel_fusion.operators.dispatch import operator


def add_act(a: Tensor, b: Tensor, activation: str | None, *, backend: str | None = None) -> Tensor:
    r"""An activation of a sum, in one pass.

    .. math:: y = \mathrm{activation}(a + b)

    Args:
        a, b: any shapes that broadcast, any floating-point dtypes (float16, bfloat16, float32, float64), any strides.
        activation: one of `kernel_fusion.ACTIVATIONS`, or None.
        backend: "cuda", "triton", "cpu", "eager", or None for the automatic choice; see `kernel_fusion.explain`.

    Returns:
        Tensor of the broadcast shape, with the dtype and strides of `a + b`. Computed in float32 (float64 for float64)
        and rounded once.

    Raises:
        TypeError: an operand that is no tensor.
        RuntimeError: shapes or devices that don't fit, and dtypes that PyTorch's operations do not take either.
        ValueError: an unknown `activation` or `backend`.
        BackendUnavailableError: `backend` was given and cannot serve this call.

    Gradients are computed in one pass as well; that of an operand which was broadcast over all but its last dimension
    is summed in the same pass, in a fixed order.

    Example:
        >>> import torch, kernel_fusion as kf
        >>> a, b = torch.randn(2, 4, 8)
        >>> torch.allclose(kf.add_act(a, b, "relu"), torch.relu(a + b))
        True
    """
    return _chain("add_act", a, b, "add", activation, 0.0, backend)


def mul_act(a: Tensor, b: Tensor, activation: str | None, *, backend: str | None = None) -> Tensor:
    r"""An activation of a product, in one pass.

    .. math:: y = \mathrm{activation}(a \cdot b)

    Args, returns, raises: as for :func:`add_act`.

    Example:
        >>> import torch, kernel_fusion as kf
        >>> a, b = torch.randn(2, 4, 8)
        >>> torch.allclose(kf.mul_act(a, b, "tanh"), torch.tanh(a * b), atol=1e-6)
        True
    """
    return _chain("mul_act", a, b, "mul", activation, 0.0, backend)


def bias_act(
    input: Tensor,
    bias: Tensor | None,
    activation: str | None,
    *,
    dropout_p: float = 0.0,
    training: bool = True,
    backend: str | None = None,
) -> Tensor:
    r"""Bias, activation and dropout, in one pass: what follows a linear layer.

    .. math:: y = \mathrm{dropout}(\mathrm{activation}(x + b))

    Args:
        input: x, any shape.
        bias: b, broadcast against x; usually of shape (x.shape[-1],). None is no bias.
        activation: one of `kernel_fusion.ACTIVATIONS`, or None.
        dropout_p: probability of an element to be zeroed; the others are scaled by 1 / (1 - p). Rounded to a multiple
            of 2^-32.
        training: without it no dropout is applied.
        backend: as for :func:`add_act`.

    Returns, raises: as for :func:`add_act`. The gradient of `bias` is summed in the same pass as that of x, in a fixed
    order. Dropout follows `torch.manual_seed` and stores no mask.

    Example:
        >>> import torch, kernel_fusion as kf
        >>> x, b = torch.randn(4, 8), torch.randn(8)
        >>> torch.allclose(kf.bias_act(x, b, "gelu"), torch.nn.functional.gelu(x + b), atol=1e-6)
        True
    """
    checks.dropout_p("bias_act", "dropout_p", dropout_p)
    combine = "first" if bias is None else "add"
    return _chain("bias_act", input, bias, combine, activation, dropout_p if training else 0.0, backend)


def act_dropout(
    input: Tensor, activation: str | None, p: float = 0.5, training: bool = True, *, backend: str | None = None
) -> Tensor:
    r"""Activation and dropout, in one pass.

    .. math:: y = \mathrm{dropout}_p(\mathrm{activation}(x))

    Args:
        input: x, any shape and strides.
        activation: one of `kernel_fusion.ACTIVATIONS`, or None.
        p, training: as `dropout_p` and `training` of :func:`bias_act`.
        backend: as for :func:`add_act`.

    Returns:
        Tensor of the input's shape, dtype and strides.

    Raises: as for :func:`add_act`; ValueError where p is no probability.

    Example:
        >>> import torch, kernel_fusion as kf
        >>> x = torch.randn(4, 8)
        >>> torch.equal(kf.act_dropout(x, "relu", 0.5, training=False), torch.relu(x))
        True
    """
    checks.dropout_p("act_dropout", "p", p)
    return _chain("act_dropout", input, None, "first", activation, p if training else 0.0, backend)


def gated_act(
    gate: Tensor,
    value: Tensor,
    activation: str | None,
    *,
    out_dtype: Quantize | None = None,
    backend: str | None = None,
) -> Tensor:
    r"""A gated activation, in one pass: SwiGLU with "silu", GeGLU with "gelu", ReGLU with "relu".

    .. math:: y = \mathrm{activation}(\mathrm{gate}) \cdot \mathrm{value}

    Args:
        gate, value: as `a` and `b` of :func:`add_act`; the halves of one tensor, `x.chunk(2, -1)`, are read where they
            lie.
        activation: one of `kernel_fusion.ACTIVATIONS`, or None.
        out_dtype: a :class:`Quantize`, which asks for codes and scales along the last dimension; the result is a
            :class:`Quantized`. None: by PyTorch's rules.
        backend: as for :func:`add_act`.

    Returns, raises: as for :func:`add_act`.

    Source: Shazeer: GLU Variants Improve Transformer, arXiv:2002.05202.

    Example:
        >>> import torch, kernel_fusion as kf
        >>> gate, value = torch.randn(4, 16).chunk(2, -1)
        >>> y = kf.gated_act(gate, value, "silu")
        >>> torch.allclose(y, torch.nn.functional.silu(gate) * value, atol=1e-6)
        True
    """
    return _chain("gated_act", gate, value, "gate", activation, 0.0, backend, out_dtype)


# The operands of each verb by the names of its arguments.
_OPERANDS = {
    "add_act": ("a", "b"),
    "mul_act": ("a", "b"),
    "bias_act": ("input", "bias"),
    "act_dropout": ("input", ""),
    "gated_act": ("gate", "value"),
}


def _chain(
    verb: str,
    a: Tensor,
    b: Tensor | None,
    combine: str,
    activation: str | None,
    p: float,
    backend: str | None,
    out_dtype: Quantize | None = None,
) -> Tensor:
    name = checks.activation(verb, "activation", activation)
    if b is None and combine != "first":
        checks.given(verb, _OPERANDS[verb][1], b)
    if not interop.is_tensor(a):
        if verb == "act_dropout":
            return interop.served(act_dropout, a, activation, p, backend=backend)  # type: ignore[no-any-return]
        options: dict[str, Any] = {"dropout_p": p} if verb == "bias_act" else {}
        options |= {"out_dtype": out_dtype} if verb == "gated_act" else {}
        return interop.served(globals()[verb], a, b, activation, backend=backend, **options)  # type: ignore[no-any-return]
    if name == IDENTITY and b is None and p == 0.0:
        return a.clone()
    seed = eager.draw_seed(a.device) if p > 0.0 else None
    try:
        if out_dtype is not None:
            return quantized.gated(verb, out_dtype, backend, a, b, name)  # type: ignore[arg-type,return-value]
        chain = operator(verb, "pointwise", backend, a, b)
        result: Tensor = chain(a, b, combine, name, 1.0, p, seed)
    except checks.REFUSALS as error:
        checks.explain(verb, error, dict(zip(_OPERANDS[verb], (a, b), strict=True)), broadcast=True)
        raise
    return result
