"""The gated norms: a norm whose result, or whose input, is multiplied by an activation of a second row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kernel_fusion.core import checks
from kernel_fusion.core.quantize import Quantize
from kernel_fusion.functional.staged_norm import Norm, resolved, staged
from kernel_fusion.operators.dispatch import in_groups


def gated_rms_norm(
    input: Tensor,
    gate: Tensor,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    bias: Tensor | None = None,
    gate_activation: str | None = "silu",
    gate_first: bool = False,
    group_size: int | None = None,
    weight_offset: float = 0.0,
    out_dtype: torch.dtype | Quantize | None = None,
    rounding: str = "once",
    backend: str | None = None,
) -> Tensor:
    r"""Root-mean-square normalisation and a gate, in one pass over both.

    .. math::
        y = (n(x) \cdot (\mathrm{offset} + w) + b) \cdot \mathrm{act}(g), \qquad
        n(u) = \frac{u}{\sqrt{\mathrm{E}[u^2] + \epsilon}}

    and with `gate_first`

    .. math:: y = n(x \cdot \mathrm{act}(g)) \cdot (\mathrm{offset} + w) + b

    Args:
        input: x, shape (\*, \*normalized_shape), as for :func:`layer_norm`.
        gate: g, of the input's shape, in a dtype of its own: any of fp16/bf16/fp32 for such inputs (float64 for
            float64). It is read where it lies, so half of a wider projection needs no copy.
        normalized_shape, weight, eps, bias: as for :func:`rms_norm`.
        gate_activation: applied to g before it multiplies: one of `kernel_fusion.ACTIVATIONS`, or None.
        gate_first: whether the gate multiplies the input, as in Mamba-2, instead of the result. The product is not
            rounded before it is normalised.
        group_size: how many neighbouring columns form a group, which is normalised by itself; w and b still have an
            element for every column. None: the whole row.
        weight_offset, out_dtype: as for :func:`rms_norm`.
        rounding: as for :func:`layer_norm`; a gate that comes last multiplies the rounded value, before y is stored.
        backend: "cuda", "triton", "cpu", "eager", or None for the automatic choice.

    Returns:
        Tensor of the input's shape, contiguous. Accumulated in float32 (float64 for float64 input).

    Raises:
        TypeError: `gate` is None or no tensor, or another argument has another type than PyTorch's call takes.
        RuntimeError: shapes, devices or dtypes that don't fit; `gate` has another shape than `input`.
        ValueError: `group_size` does not divide the row, or `normalized_shape` has several dimensions beside it;
            `weight_offset` without `weight`, an unknown activation, `rounding` or `backend`.
        BackendUnavailableError: `backend` was given and cannot serve this call.

    Backward is one pass as well; the gradient of the gate is contiguous, in the gate's dtype. Nothing is kept but the
    arguments and the statistics.

    Source: Dao, Gu: Transformers are SSMs, arXiv:2405.21060 (Mamba-2; gate first, in groups); Yang, Kautz, Hatamizadeh:
    Gated Delta Networks, arXiv:2412.06464 (gate last).

    Example:
        >>> import torch, kernel_fusion as kf
        >>> x, z = torch.randn(4, 32).chunk(2, -1)
        >>> y = kf.gated_rms_norm(x, z, 16)
        >>> torch.allclose(y, kf.rms_norm(x, 16) * torch.nn.functional.silu(z), atol=1e-6)
        True
    """
    norm = normalized_shape, weight, bias, eps, weight_offset, out_dtype
    options = {"gate_activation": gate_activation, "gate_first": gate_first, "group_size": group_size}
    options |= {"rounding": rounding}
    y = staged(gated_rms_norm, {"input": input, "gate": gate}, norm, options, backend, arrange=_gated)[0]
    return y if group_size is None else _ungrouped(y, input)


def gated_layer_norm(
    input: Tensor,
    gate: Tensor,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    gate_activation: str | None = "silu",
    gate_first: bool = False,
    group_size: int | None = None,
    weight_offset: float = 0.0,
    out_dtype: torch.dtype | Quantize | None = None,
    rounding: str = "once",
    backend: str | None = None,
) -> Tensor:
    r"""Layer normalisation and a gate, in one pass over both.

    .. math::
        y = (n(x) \cdot (\mathrm{offset} + w) + b) \cdot \mathrm{act}(g), \qquad
        n(u) = \frac{u - \mathrm{E}[u]}{\sqrt{\mathrm{Var}[u] + \epsilon}}

    and with `gate_first`

    .. math:: y = n(x \cdot \mathrm{act}(g)) \cdot (\mathrm{offset} + w) + b

    Args, returns, raises, source: as for :func:`gated_rms_norm`, with `eps` as for :func:`layer_norm`.

    Example:
        >>> import torch, kernel_fusion as kf
        >>> x, z = torch.randn(2, 4, 16)
        >>> y = kf.gated_layer_norm(x, z, 16, gate_first=True)
        >>> torch.allclose(y, kf.layer_norm(x * torch.nn.functional.silu(z), 16), atol=1e-5)
        True
    """
    norm = normalized_shape, weight, bias, eps, weight_offset, out_dtype
    options = {"gate_activation": gate_activation, "gate_first": gate_first, "group_size": group_size}
    options |= {"rounding": rounding}
    y = staged(gated_layer_norm, {"input": input, "gate": gate}, norm, options, backend, arrange=_gated)[0]
    return y if group_size is None else _ungrouped(y, input)


def _gated(
    verb: str, rows: dict[str, Any], norm: Norm, options: dict[str, Any], stages: dict[str, Any]
) -> tuple[Sequence[Tensor | None], tuple[Any, ...]]:
    """The tensors of the operator, whose rows are groups of columns where there are some, and the gate as a stage."""
    group_size, tensors = options["group_size"], (rows["input"], rows["gate"])
    shape, eps = resolved(verb, rows["input"], norm, affine=group_size is not None)
    x, gate, weight, bias = *tensors, norm[1], norm[2]
    if group_size is not None:
        checks.group_size(verb, shape, group_size)
        checks.other_row(verb, "gate", x, gate)
        groups = shape[0] // group_size
        x, gate, weight, bias = (
            None if t is None else in_groups(t, -1, groups).unflatten(-1, (-1, group_size))
            for t in (x, gate, weight, bias)
        )
        if not (weight is None and bias is None):
            stages["grouped"] = True
    stages["gate"] = gate
    return tensors, (x, None, len(shape), weight, bias, eps, norm[4])


def _ungrouped(y: Any, input: Any) -> Any:
    """A result of groups of columns, in the shape of the input; one that is no tensor has that shape already."""
    if not isinstance(y, Tensor) or not isinstance(input, Tensor):
        return y
    # Nobody else has y, so its other shape need not be a view.
    return torch.ops.aten._unsafe_view(in_groups(y, -2, y.shape[-2]).contiguous(), input.shape)
