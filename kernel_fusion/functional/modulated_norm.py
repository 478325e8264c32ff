"""The modulated norms, AdaLN of diffusion transformers: a norm whose weight and bias vary over the rows.

norm(x) * (1 + scale) + shift is a norm with weight `scale`, offset 1 and bias `shift`. What is left to do here is to
bring both into a shape whose groups of rows the operator knows, and to multiply a weight of the norm's own into them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from kernel_fusion.backends.availability import PLAIN_TENSORS
from kernel_fusion.core import checks, groups
from kernel_fusion.core.quantize import Quantize
from kernel_fusion.core.spec import compute_dtype
from kernel_fusion.core.symbols import known
from kernel_fusion.functional import quantized
from kernel_fusion.functional.results import NormOutput
from kernel_fusion.functional.staged_norm import Norm, num_normalized_dims, resolved, sizes, staged
from kernel_fusion.operators import schemas
from kernel_fusion.operators.dispatch import expandable


def modulated_layer_norm(
    input: Tensor,
    normalized_shape: int | Sequence[int],
    scale: Tensor,
    shift: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    pre_activation: str | None = None,
    activation: str | None = None,
    weight_offset: float = 0.0,
    out_dtype: torch.dtype | Quantize | None = None,
    backend: str | None = None,
) -> Tensor:
    r"""Layer normalisation, scaled and shifted by other numbers for every sample or row, in one pass.

    .. math::
        y = n(x) \cdot (1 + s) + t, \qquad n(x) = \frac{x - \mathrm{E}[x]}{\sqrt{\mathrm{Var}[x] + \epsilon}}

    and with a weight and a bias of the norm, n(x) · (offset + w) + b in place of n(x).

    Args:
        input: x, shape (\*, \*normalized_shape), as for :func:`layer_norm`.
        normalized_shape, eps: as for :func:`layer_norm`.
        scale: s, which ends with `normalized_shape` and broadcasts to the input's leading dimensions: per sample
            (B, 1, N), per token (B, L, N), or (N,). In a dtype of its own: any of fp16/bf16/fp32 for such inputs
            (float64 for float64). It is read where it lies, so a chunk of a wider projection needs no copy.
        shift: t, of a shape and dtype that `scale` may have, or None for 0.
        weight, bias: as for :func:`layer_norm`.
        weight_offset: as for :func:`layer_norm`; (offset + w)(1 + s) and b(1 + s) + t are computed first, in the
            compute type and in the shape that scale and shift have together.
        pre_activation, activation, out_dtype: as for :func:`layer_norm`.
        backend: "cuda", "triton", "cpu", "eager", or None for the automatic choice.

    Returns:
        Tensor of the input's shape, contiguous. Accumulated in float32 (float64 for float64 input), rounded once.

    Raises:
        TypeError: `scale` is None or no tensor, or another argument has another type than PyTorch's call takes.
        RuntimeError: shapes, devices or dtypes that don't fit; a nested `input` with a `scale` that varies over rows.
        ValueError: `weight_offset` without `weight`, an unknown activation or `backend`.
        BackendUnavailableError: `backend` was given and cannot serve this call.

    Backward is one pass as well; the gradients of `scale` and `shift` are summed over the rows that share them, in a
    fixed order. Where they vary, are the same, and vary again along the leading dimensions, as (B, 1, H, N) does for an
    input (B, L, H, N), both are copied once for each index of the outermost dimension that they lack.

    Source: Peebles, Xie: Scalable Diffusion Models with Transformers, arXiv:2212.09748 (adaLN); Perez et al.: FiLM,
    arXiv:1709.07871.

    Example:
        >>> import torch, kernel_fusion as kf
        >>> x, (shift, scale) = torch.randn(2, 8, 16), torch.randn(2, 32).chunk(2, -1)
        >>> y = kf.modulated_layer_norm(x, 16, scale[:, None], shift[:, None])
        >>> torch.allclose(y, kf.layer_norm(x, 16) * (1 + scale[:, None]) + shift[:, None], atol=1e-5)
        True
    """
    norm = normalized_shape, weight, bias, eps, weight_offset, out_dtype
    options: dict[str, Any] = {"scale": scale, "shift": shift}
    options |= {"pre_activation": pre_activation, "activation": activation}
    return staged(modulated_layer_norm, {"input": input}, norm, options, backend, arrange=_modulated)[0]


def modulated_rms_norm(
    input: Tensor,
    normalized_shape: int | Sequence[int],
    scale: Tensor,
    shift: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float | None = None,
    *,
    pre_activation: str | None = None,
    activation: str | None = None,
    weight_offset: float = 0.0,
    out_dtype: torch.dtype | Quantize | None = None,
    backend: str | None = None,
) -> Tensor:
    r"""Root-mean-square normalisation, scaled and shifted by other numbers for every sample or row, in one pass.

    .. math:: y = n(x) \cdot (1 + s) + t, \qquad n(x) = \frac{x}{\sqrt{\mathrm{E}[x^2] + \epsilon}}

    Args, returns, raises: as for :func:`modulated_layer_norm`, with `eps` as for :func:`rms_norm`.

    Example:
        >>> import torch, kernel_fusion as kf
        >>> x, scale = torch.randn(2, 8, 16), torch.randn(2, 1, 16)
        >>> y = kf.modulated_rms_norm(x, 16, scale)
        >>> torch.allclose(y, kf.rms_norm(x, 16) * (1 + scale), atol=1e-5)
        True
    """
    norm = normalized_shape, weight, bias, eps, weight_offset, out_dtype
    options: dict[str, Any] = {"scale": scale, "shift": shift}
    options |= {"pre_activation": pre_activation, "activation": activation}
    return staged(modulated_rms_norm, {"input": input}, norm, options, backend, arrange=_modulated)[0]


def add_modulated_layer_norm(
    input: Tensor,
    residual: Tensor,
    normalized_shape: int | Sequence[int],
    scale: Tensor,
    shift: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    gate: Tensor | None = None,
    dropout_p: float = 0.0,
    training: bool = True,
    pre_activation: str | None = None,
    activation: str | None = None,
    weight_offset: float = 0.0,
    out_dtype: torch.dtype | Quantize | None = None,
    backend: str | None = None,
) -> NormOutput:
    r"""A gated residual addition, and the modulated layer normalisation of the sum, in one pass.

    .. math:: h = r + g \cdot x, \qquad y = n(h) \cdot (1 + s) + t

    Args:
        input: x, shape (\*, \*normalized_shape), as for :func:`layer_norm`.
        residual, dropout_p, training: as for :func:`add_layer_norm`.
        normalized_shape, scale, shift, weight, bias, eps: as for :func:`modulated_layer_norm`.
        gate: g, which broadcasts to the input as `scale` does, in a dtype of its own, or None for 1. With
            `pre_activation` or dropout, it multiplies what they make of x.
        pre_activation, activation, weight_offset, out_dtype, backend: as for :func:`modulated_layer_norm`.

    Returns:
        :class:`NormOutput`: y, in the input's dtype, and h.

    Raises:
        TypeError, RuntimeError, ValueError, BackendUnavailableError: as for :func:`modulated_layer_norm`; RuntimeError
            where `residual` has another shape than `input`; ValueError where `dropout_p` is no probability.

    Backward is one pass as well, and the gradient of `gate` is summed as those of `scale` and `shift` are. Where one of
    the three varies over more rows than another, the gradient of the latter takes PyTorch another sum.

    Example:
        >>> import torch, kernel_fusion as kf
        >>> x, r = torch.randn(2, 2, 8, 16)
        >>> shift, scale, gate = torch.randn(2, 1, 48).chunk(3, -1)
        >>> y, h = kf.add_modulated_layer_norm(x, r, 16, scale, shift, gate=gate)
        >>> torch.allclose(h, r + gate * x, atol=1e-6)
        True
    """
    checks.dropout_p("add_modulated_layer_norm", "dropout_p", dropout_p)
    norm = normalized_shape, weight, bias, eps, weight_offset, out_dtype
    rows, p = {"input": input, "residual": residual}, dropout_p if training else 0.0
    options: dict[str, Any] = {"scale": scale, "shift": shift, "gate": gate}
    options |= {"pre_activation": pre_activation, "activation": activation}
    return staged(add_modulated_layer_norm, rows, norm, options, backend, arrange=_modulated, dropout_p=p)  # type: ignore[return-value]


def add_modulated_rms_norm(
    input: Tensor,
    residual: Tensor,
    normalized_shape: int | Sequence[int],
    scale: Tensor,
    shift: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float | None = None,
    *,
    gate: Tensor | None = None,
    dropout_p: float = 0.0,
    training: bool = True,
    pre_activation: str | None = None,
    activation: str | None = None,
    weight_offset: float = 0.0,
    out_dtype: torch.dtype | Quantize | None = None,
    backend: str | None = None,
) -> NormOutput:
    r"""A gated residual addition, and the modulated root-mean-square normalisation of the sum, in one pass.

    .. math:: h = r + g \cdot x, \qquad y = n(h) \cdot (1 + s) + t

    Args, returns, raises: as for :func:`add_modulated_layer_norm`, with `eps` as for :func:`rms_norm`.

    Example:
        >>> import torch, kernel_fusion as kf
        >>> x, r = torch.randn(2, 2, 8, 16)
        >>> y, h = kf.add_modulated_rms_norm(x, r, 16, torch.zeros(2, 1, 16))
        >>> torch.allclose(y, kf.rms_norm(r + x, 16), atol=1e-6)
        True
    """
    checks.dropout_p("add_modulated_rms_norm", "dropout_p", dropout_p)
    norm = normalized_shape, weight, bias, eps, weight_offset, out_dtype
    rows, p = {"input": input, "residual": residual}, dropout_p if training else 0.0
    options: dict[str, Any] = {"scale": scale, "shift": shift, "gate": gate}
    options |= {"pre_activation": pre_activation, "activation": activation}
    return staged(add_modulated_rms_norm, rows, norm, options, backend, arrange=_modulated, dropout_p=p)  # type: ignore[return-value]


def _modulated(
    verb: str, rows: dict[str, Any], norm: Norm, options: dict[str, Any], stages: dict[str, Any]
) -> tuple[Sequence[Tensor | None], tuple[Any, ...]]:
    """The tensors of the operator, with scale and shift as weight and bias, and the residual's gate as a stage."""
    input, residual, scale, gate = rows["input"], rows.get("residual"), options["scale"], options.get("gate")
    vectors: Sequence[Tensor | None] = (scale, options["shift"], gate)
    if _are_usual(verb, input, residual, norm, vectors):
        if input.shape[0] == 1:  # one sample, whose vectors are those of all rows
            vectors = [p if p is None else p.reshape(input.shape[2:]) for p in vectors]
        else:
            stages["grouped"] = True
        if gate is not None:
            stages["residual_gate"] = vectors[2]
        own_eps = schemas.default_eps(input) if norm[3] is None else norm[3]
        return (input, residual), (input, residual, 1, *vectors[:2], own_eps, 1.0)
    if scale is None:
        without = verb.replace("modulated_", "")
        raise TypeError(f"`{verb}`: `scale` must be a tensor, got None; without one the verb is `{without}`")
    shape, eps = resolved(verb, input, norm, affine=True)
    for name in ("scale", "shift", "gate"):
        checks.modulation(verb, name, options.get(name), input, len(shape))
    checks.other_row(verb, "residual", input, residual)
    checks.row_norm(verb, input, norm[1], norm[2], norm[4], quantized.apart(norm[5])[0])
    weight, bias, offset = _affine(input, norm, scale, options["shift"])
    (weight, bias, gate), grouped = _in_groups(verb, input, shape, [*map(expandable, (weight, bias, gate))])  # type: ignore[assignment]
    if gate is not None:
        stages["residual_gate"] = gate
    if grouped:
        stages["grouped"] = True
    return (input, residual, scale), (input, residual, len(shape), weight, bias, eps, offset)


def _are_usual(verb: str, input: Tensor, residual: Tensor | None, norm: Norm, vectors: Sequence[Tensor | None]) -> bool:
    """Whether the operator takes all tensors as they are: of one dtype and device, vectors of samples, (B, 1, N)."""
    normalized_shape, weight, bias, eps, weight_offset, out_dtype = norm
    if weight is not None or bias is not None or weight_offset != 0.0 or out_dtype is not None:
        return False
    if num_normalized_dims(input, normalized_shape) != 1 or vectors[0] is None:
        return False
    if type(eps) is not float and (eps is not None or verb.endswith("layer_norm")):
        return False
    size = input.shape
    if len(size) != 3 or is_compiling():  # whose sizes may be symbols
        return False
    dtype, device, sample = input.dtype, input.device, (size[0], 1, size[2])
    for p, expected in ((residual, size), *((p, sample) for p in vectors)):
        if p is not None and (
            type(p) not in PLAIN_TENSORS or p.shape != expected or p.dtype is not dtype or p.device != device
        ):
            return False
    return True


def _affine(input: Tensor, norm: Norm, scale: Tensor, shift: Tensor | None) -> tuple[Tensor, Tensor | None, float]:
    """Weight, bias and offset of the norm that is modulated: those of the norm itself multiplied in.

    Vectors of every token are treated as those of a sample, though it would move fewer bytes to modulate the norm's
    result: beside a single token nothing tells the two apart, and a token's digits must not depend on the others.
    """
    _, weight, bias, _, weight_offset, _ = norm
    if weight is None and bias is None:
        return scale, shift, 1.0
    wide = compute_dtype(input.dtype)
    factor = 1.0 + scale.to(wide)
    if bias is not None:
        bias = bias.to(wide) * factor
        shift = bias if shift is None else bias + shift.to(wide)
    if weight is None:
        return scale, shift, 1.0
    return factor * (weight.to(wide) + weight_offset), shift, 0.0


def _in_groups(
    verb: str, input: Tensor, shape: tuple[int, ...], vectors: Sequence[Tensor | None]
) -> tuple[Sequence[Tensor | None], bool]:
    """Weight, bias and gate in one shape that the operator knows, and whether they vary over rows."""
    given = [p for p in vectors if p is not None]
    if all(known(size == 1) for p in given for size in p.shape[: p.dim() - len(shape)]):
        return [p if p is None else p.reshape(shape) for p in vectors], False
    if input.is_nested:
        raise RuntimeError(
            f"`{verb}`: `scale`, `shift` and `gate` must have shape {list(shape)} beside a nested `input`, got "
            f"{' and '.join(str(list(p.shape)) for p in given)}"
        )
    return groups.laid_out(input.shape, vectors, len(shape)), True


def as_norm(verb: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments of the norm that a call of a modulated one makes, for `explain`: nothing is computed."""
    input, scale, shift, gate = (arguments.get(name) for name in ("input", "scale", "shift", "gate"))
    assert input is not None
    assert scale is not None
    shape = sizes(arguments["normalized_shape"])
    made = torch.empty(scale.shape, dtype=compute_dtype(input.dtype), device="meta")
    found = arguments | {"gate": None, "rounding": "once"}
    own = arguments["weight"], arguments["bias"]
    affine = scale if own[0] is None else made, shift if own[1] is None else made
    found["weight_offset"] = 1.0 if own[0] is None else 0.0
    vectors, found["grouped"] = _in_groups(verb, input, shape, [*affine, gate])
    found |= dict(zip(("weight", "bias", "residual_gate"), vectors, strict=True))
    varying = next(t for t in vectors if t is not None)
    if found["grouped"] and (known := groups.groups_of(input.shape, varying.shape, len(shape))) is not None:
        found["groups"] = known.count
    return found
