"""Softmax of scaled, masked scores, and the scores themselves."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.autograd.forward_ad import unpack_dual

from kernel_fusion.backends import eager
from kernel_fusion.backends.availability import PLAIN_TENSORS
from kernel_fusion.config import check_backend_name, state
from kernel_fusion.core import checks
from kernel_fusion.errors import BackendUnavailableError
from kernel_fusion.functional import interop
from kernel_fusion.operators.dispatch import expandable, operator

__all__ = ["attention_scores", "log_softmax", "softmax"]

# Rows that a causal product computes at a time: of 2048 columns five eighths are left.
_PANEL_ROWS = 512


def softmax(
    input: Tensor,
    dim: int = -1,
    *,
    scale: float = 1.0,
    mask: Tensor | None = None,
    causal: bool = False,
    backend: str | None = None,
) -> Tensor:
    r"""Softmax of a scaled and masked input, in one read and one write.

    .. math:: y = \mathrm{softmax}(\mathrm{scale} \cdot x + \mathrm{mask})

    Args:
        input: x, any shape; float16, bfloat16, float32 or float64.
        dim: the dimension that sums to one. The last one is fused; another is moved there and back, by a copy.
        scale: a factor.
        mask: broadcast to x. Boolean: True keeps, False leaves out. Floating point: added, and it gets gradients.
        causal: leave out columns beyond the row's own number, top-left aligned, as in scaled dot product attention;
            rows are dimension -2 and columns dimension -1, which must then be `dim`. Left out elements are not read.
        backend: "cuda", "triton", "cpu", "eager", or None for the automatic choice.

    Returns:
        Tensor of the input's shape and dtype; computed in float32 (float64 for float64). A row of which mask or
        `causal` leave nothing is zero, with zero gradients. So is what a boolean mask or `causal` leave out, also in a
        row with NaN.

    Raises:
        IndexError, RuntimeError: dimensions, shapes, dtypes and devices that don't fit; an integer mask among them.
        ValueError: `causal` with another `dim` than the last; an unknown `backend`.
        BackendUnavailableError: as for :func:`kernel_fusion.add_act`.

    Example:
        >>> import torch, kernel_fusion as kf
        >>> x = torch.randn(4, 8)
        >>> torch.allclose(kf.softmax(x, scale=0.5), torch.softmax(0.5 * x, -1))
        True
    """
    return _weights(softmax, (), input, dim, scale, mask, causal, backend)


def log_softmax(
    input: Tensor,
    dim: int = -1,
    *,
    scale: float = 1.0,
    mask: Tensor | None = None,
    causal: bool = False,
    backend: str | None = None,
) -> Tensor:
    r"""Logarithm of the softmax of a scaled and masked input, in one read and one write.

    .. math:: y = (l - \max l) - \log \sum e^{l - \max l}, \qquad l = \mathrm{scale} \cdot x + \mathrm{mask}

    Args:
        input: x, any shape; float16, bfloat16, float32 or float64.
        dim: the dimension over which the exponentials of y sum to one. The last one is fused; another is moved there
            and back, by a copy.
        scale: a factor.
        mask: broadcast to x. Boolean: True keeps, False leaves out. Floating point: added, and it gets gradients.
        causal: leave out columns beyond the row's own number, as :func:`kernel_fusion.softmax` does.
        backend: "cuda", "triton", "cpu", "eager", or None for the automatic choice.

    Returns:
        Tensor of the input's shape and dtype; computed in float32 (float64 for float64). What a boolean mask or
        `causal` leave out is -inf, also in a row with NaN, and so is a row of which nothing is left. With a mask or
        `causal`, no gradient flows through a result of -inf. Without, all is as in :func:`torch.log_softmax`: a row
        of -inf is NaN.

    Raises:
        IndexError, RuntimeError, ValueError, BackendUnavailableError: as for :func:`kernel_fusion.softmax`.

    Example:
        >>> import torch, kernel_fusion as kf
        >>> x = torch.randn(4, 8)
        >>> torch.allclose(kf.log_softmax(x, scale=0.5), torch.log_softmax(0.5 * x, -1), atol=1e-6)
        True
    """
    return _weights(log_softmax, (True,), input, dim, scale, mask, causal, backend)


def _weights(
    function: Callable[..., Tensor],
    options: tuple[bool, ...],
    input: Tensor,
    dim: int,
    scale: float,
    mask: Tensor | None,
    causal: bool,
    backend: str | None,
) -> Tensor:
    """The body of `function`, whose operator takes these further `options`."""
    verb = function.__name__
    if not interop.is_tensor(input):
        return interop.served(function, input, dim, scale=scale, mask=mask, causal=causal, backend=backend)  # type: ignore[no-any-return]
    checks.of_kind(verb, "dim", dim, checks.INT)
    dims = max(input.dim(), 1)  # a number is a row of its own
    if not -dims <= dim < dims:
        raise IndexError(f"Dimension out of range (expected to be in range of [{-dims}, {dims - 1}], but got {dim})")
    last = dim in (-1, dims - 1)
    if causal and (not last or input.dim() < 2):
        raise ValueError(
            f"`{verb}`: `causal` needs rows and columns, the last two dimensions, got dim={dim} of {input.dim()}"
        )
    if input.dim() == 0:
        return function(input[None], dim, scale=scale, mask=mask, backend=backend)[0]
    if input.is_nested and not last:
        return _across_rows(verb, input, dim, scale, mask, backend)
    if mask is not None:
        checks.mask(verb, mask)
        mask = checks.expanded_mask(verb, expandable(mask), input.shape)
    if not last:
        moved = function(
            input.movedim(dim, -1), scale=scale, mask=None if mask is None else mask.movedim(dim, -1), backend=backend
        )
        return moved.movedim(-1, dim).contiguous()
    additive = mask if mask is not None and mask.dtype != torch.bool else None
    try:
        result: Tensor = operator(verb, "softmax", backend, input, additive)(input, mask, scale, causal, *options)
    except checks.REFUSALS as error:
        checks.explain(verb, error, {"input": input, "mask": additive}, scale=scale, causal=causal)
        raise
    return result


def _across_rows(verb: str, input: Tensor, dim: int, scale: float, mask: Tensor | None, backend: str | None) -> Tensor:
    """PyTorch's function of a nested tensor over another dimension than the last, which cannot be moved."""
    if mask is not None:
        raise RuntimeError(
            f"`{verb}`: a nested `input` takes no `mask` beside dim={dim}; without a mask PyTorch serves it"
        )
    check_backend_name(backend)
    wanted = backend or state.backend
    if wanted not in (None, "eager"):
        raise BackendUnavailableError(
            f"`{verb}`: backend {wanted!r} was requested, but no kernels have rows of a nested `input` along dim={dim}"
        )
    result: Tensor = getattr(torch, verb)(input if scale == 1.0 else input * scale, dim)
    return result


def attention_scores(
    query: Tensor,
    key: Tensor,
    scale: float | None = None,
    *,
    mask: Tensor | None = None,
    causal: bool = False,
    normalize: bool = False,
    backend: str | None = None,
) -> Tensor:
    r"""Scaled, masked scores of attention, or with `normalize` its weights.

    .. math:: S = \mathrm{scale} \cdot Q K^T + \mathrm{mask}, \qquad \mathrm{softmax}(S)

    The product is the vendor library's, with the scale folded into it; mask and softmax are one more pass.

    Args:
        query: Q, shape (..., L, D).
        key: K, shape (..., S, D); leading dimensions broadcast.
        scale: None means 1 / sqrt(D).
        mask: broadcast to (..., L, S). Boolean: True keeps, False leaves out (-inf). Floating point: added.
        causal: leave out columns beyond the row's own number, top-left aligned.
        normalize: return the softmax over the last dimension; a row without anything left is zero.
        backend: of the softmax; see :func:`softmax`.

    Returns:
        Tensor of shape (..., L, S).

    Raises:
        RuntimeError: shapes, devices or dtypes that don't fit, in PyTorch's words where it has some.

    Example:
        >>> import torch, kernel_fusion as kf
        >>> q, k = torch.randn(2, 3, 8, 16)
        >>> torch.allclose(kf.attention_scores(q, k), q @ k.mT / 4, atol=1e-5)
        True
    """
    if not interop.is_tensor(query):
        options = {"mask": mask, "causal": causal, "normalize": normalize, "backend": backend}
        return interop.served(attention_scores, query, key, scale, **options)  # type: ignore[no-any-return]
    checks.matrices("attention_scores", query=query, key=key)
    if mask is not None:
        checks.mask("attention_scores", mask)
    checks.one_device(query, key, mask)
    if scale is None:
        scale = 1 / math.sqrt(query.shape[-1]) if query.shape[-1] else 1.0  # without terms the product is 0
    # The length comes last: where something records, nothing may depend on it.
    in_parts = normalize and causal and _fit(query, key) and _nothing_records(query, key)
    in_parts = in_parts and query.shape[-2] > _PANEL_ROWS
    try:
        scores = (_causal_product if in_parts else _scaled_product)(query, key, scale)
    except checks.REFUSALS as error:
        checks.explain("attention_scores", error, {"query": query, "key": key}, scale=scale)
        raise
    if mask is not None:
        mask = checks.expanded_mask("attention_scores", expandable(mask), scores.shape)
    if normalize:
        return softmax(scores, mask=mask, causal=causal, backend=backend)
    # The scores are ours alone, so they are masked in place.
    if mask is not None:
        scores = scores.masked_fill_(~mask, -math.inf) if mask.dtype == torch.bool else scores.add_(mask)
    return scores.masked_fill_(~eager.causal_mask(scores), -math.inf) if causal else scores


def _scaled_product(query: Tensor, key: Tensor, scale: float) -> Tensor:
    if not _fit(query, key):
        return torch.matmul(query, key.mT)  # PyTorch's error
    q, k, shape = _batched(query, key)
    # beta = 0: the first argument is not read.
    return torch.baddbmm(query.new_empty(()), q, k.mT, beta=0, alpha=scale).view(shape)


def _causal_product(query: Tensor, key: Tensor, scale: float) -> Tensor:
    """The scaled product without most of what lies above the diagonal, where the result is never written."""
    q, k, shape = _batched(query, key)
    scores = q.new_empty(q.shape[0], *shape[-2:])
    for first in range(0, q.shape[1], _PANEL_ROWS):
        rows = slice(first, first + _PANEL_ROWS)
        cols = slice(0, first + _PANEL_ROWS)
        out = scores[:, rows, cols]
        torch.baddbmm(query.new_empty(()), q[:, rows], k[:, cols].mT, beta=0, alpha=scale, out=out)
    return scores.view(shape)


def _fit(query: Tensor, key: Tensor) -> bool:
    return query.shape[-1] == key.shape[-1]


def _batched(query: Tensor, key: Tensor) -> tuple[Tensor, Tensor, tuple[int, ...]]:
    """Query and key with their leading dimensions as one, and the shape that the scores have in the end."""
    batch = torch.broadcast_shapes(query.shape[:-2], key.shape[:-2])
    q, k = (t.expand(*(batch or (1,)), *t.shape[-2:]).flatten(0, -3) for t in (query, key))
    return q, k, (*batch, query.shape[-2], key.shape[-2])


def _nothing_records(*tensors: Tensor) -> bool:
    """Whether a result may be written in parts: no gradient, transform, trace or mode is to see it whole."""
    return (
        all(type(t) in PLAIN_TENSORS and not t.is_nested for t in tensors)
        and not (torch.is_grad_enabled() and any(t.requires_grad for t in tensors))
        and not torch.compiler.is_compiling()
        and not torch._C._are_functorch_transforms_active()
        and all(unpack_dual(t).tangent is None for t in tensors)
        and tensors[0].device.type in ("cpu", "cuda")
        and not torch.is_autocast_enabled(tensors[0].device.type)
        and tensors[0].dtype == tensors[1].dtype
    )
