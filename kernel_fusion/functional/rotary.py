"""The rotary embedding, alone or after the RMSNorm of each head of query and key."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from kernel_fusion.core import checks
from kernel_fusion.functional import interop
from kernel_fusion.operators import schemas
from kernel_fusion.operators.dispatch import operator


def rope(
    input: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    interleaved: bool = False,
    positions: Tensor | None = None,
    unsqueeze_dim: int = 1,
    backend: str | None = None,
) -> Tensor:
    r"""Rotary position embedding: rotates pairs of columns of each head by the angles of its token, in one pass.

    .. math:: y_1 = x_1 \cos_i - x_2 \sin_i, \qquad y_2 = x_2 \cos_i + x_1 \sin_i

    Pair i of the first R columns, R = 2 cos.shape[-1], is columns i and i + R / 2; the other columns are copied.

    Args:
        input: x, shape (B, H, L, D), H heads of L tokens, or (B, L, H, D): see `unsqueeze_dim`. B may be left out.
            float16, bfloat16, float32 or float64; read where it lies if columns lie side by side, such as heads in the
            result of a fused projection.
        cos, sin: shape (L, R / 2) or (B, L, R / 2): one value for each pair, so `cos[..., : cos.shape[-1] // 2]` of the
            doubled tensors of Transformers, and `cos[..., ::2]` of the interleaved ones of Diffusers. Any of
            fp16/bf16/fp32 (float64 for float64 input).
        interleaved: pair i is columns 2 i and 2 i + 1, as in GPT-J and Diffusers.
        positions: int32 or int64, shape (L,) or (B, L): the rows of cos and sin, then tables (M, R / 2), that tokens
            have. A position outside the table is an error on the CPU, and gives NaN on a GPU.
        unsqueeze_dim: the dimension of `input` that counts heads, along which cos and sin are repeated. 1 is that of
            (B, H, L, D), 2 that of (B, L, H, D); as in Transformers.
        backend: "cuda", "triton", "cpu", "eager", or None for the automatic choice.

    Returns:
        Tensor of the input's shape and dtype, dense, in the order of the input's strides. Computed in float32 (float64
        for float64 input) and rounded once.

    Raises:
        RuntimeError: shapes, devices or dtypes that don't fit.
        IndexError: `unsqueeze_dim` or, on the CPU, a position is out of range.
        ValueError: `unsqueeze_dim` is a dimension of tokens or columns; an unknown `backend`.
        BackendUnavailableError: `backend` was given and cannot serve this call.

    Backward turns the gradient by the same angles the other way, and keeps nothing but cos, sin and positions. If cos
    or sin require gradients, the definition serves the call.

    Source: Su et al.: RoFormer, arXiv:2104.09864.

    Example:
        >>> import torch, kernel_fusion as kf
        >>> angles = torch.arange(5)[:, None] * 10000 ** -(torch.arange(0, 8, 2) / 8)
        >>> x = torch.randn(2, 3, 5, 8)  # two examples, three heads, five tokens
        >>> y = kf.rope(x, angles.cos(), angles.sin())
        >>> torch.allclose(y.norm(dim=-1), x.norm(dim=-1), atol=1e-5)
        True
    """
    options: dict[str, Any] = {"interleaved": interleaved, "unsqueeze_dim": unsqueeze_dim, "backend": backend}
    if not interop.is_tensor(input):
        return interop.served(rope, input, cos, sin, positions=positions, **options)  # type: ignore[no-any-return]
    _check_tensors("rope", {"cos": cos, "sin": sin}, positions)
    return rotate([input], cos, sin, positions, **options)[0]


def rotate(
    heads: Sequence[Tensor],
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None = None,
    *,
    interleaved: bool,
    unsqueeze_dim: int,
    rounding: str = "once",
    backend: str | None = None,
) -> tuple[Tensor, ...]:
    """:func:`rope` of a query, or of query and key in one pass, with the roundings of :func:`qk_norm_rope`."""
    q, k = (*(_tokens_first("rope", "input", x, unsqueeze_dim) for x in heads), None)[:2]
    serve = operator("rope", "qk_norm_rope", backend, q, k, cos, sin)
    results = serve(q, k, None, None, *_tables(cos, sin, positions), None, 0.0, interleaved, rounding)
    return tuple(_as_given(y, x, unsqueeze_dim) for y, x in zip(results, heads, strict=False))


def qk_norm_rope(
    query: Tensor,
    key: Tensor,
    query_weight: Tensor | None,
    key_weight: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    eps: float | None = None,
    *,
    interleaved: bool = False,
    positions: Tensor | None = None,
    unsqueeze_dim: int = 1,
    weight_offset: float = 0.0,
    rounding: str = "once",
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    r"""RMSNorm of each head of query and key, then the rotary embedding, of both in one pass.

    .. math:: \mathrm{rope}\left(\frac{x}{\sqrt{\mathrm{E}[x^2] + \epsilon}} \cdot (\mathrm{offset} + w)\right)

    Args:
        query: shape (B, H, L, D) or (B, L, H, D), as for :func:`rope`.
        key: of the query's shape, dtype and device, but it may have another number of heads.
        query_weight, key_weight: w, shape (D,), or None for ones; any of fp16/bf16/fp32 (float64 for float64).
        cos, sin, interleaved, positions, unsqueeze_dim: as for :func:`rope`.
        eps: as for :func:`rms_norm`.
        weight_offset: added to both weights in the compute type; 1 for Gemma's.
        rounding: "once", at the store; or "hf", where Qwen3's code in Transformers rounds: the normalised value to the
            input's dtype, its product with the weight to the promoted dtype of the two, and products, sum and
            difference of the rotation to the promoted dtype of that and cos. Gradients pass straight through.
        backend: as for :func:`rope`; heads of more than 512 columns have Triton's kernels instead of CUDA's.

    Returns:
        Query and key, each as :func:`rope` returns it. Accumulated in float32 (float64 for float64 input).

    Raises:
        RuntimeError: shapes, devices or dtypes that don't fit; `weight_offset` without weights.
        IndexError, BackendUnavailableError: as for :func:`rope`.
        ValueError: as for :func:`rope`; an unknown `rounding`.

    Backward is one pass as well. It keeps nothing but the arguments: a head's statistics are computed again. The
    gradients of the weights are sums in an order that the shape alone decides.

    Source: Henry et al.: Query-Key Normalization for Transformers, arXiv:2010.04245; Su et al.: RoFormer,
    arXiv:2104.09864.

    Example:
        >>> import torch, kernel_fusion as kf
        >>> q, k, v = torch.randn(1, 5, 3 * 16).chunk(3, -1)  # as projected; 2 heads of 8
        >>> q, k = (t.unflatten(-1, (2, 8)) for t in (q, k))
        >>> angles = torch.arange(5)[:, None] * 10000 ** -(torch.arange(0, 8, 2) / 8)
        >>> q, k = kf.qk_norm_rope(q, k, torch.ones(8), torch.ones(8), angles.cos(), angles.sin(), unsqueeze_dim=2)
        >>> q.shape
        torch.Size([1, 5, 2, 8])
    """
    if not interop.is_tensor(query):
        options: dict[str, Any] = {"interleaved": interleaved, "unsqueeze_dim": unsqueeze_dim, "backend": backend}
        options |= {"weight_offset": weight_offset, "rounding": rounding}
        given = query, key, query_weight, key_weight, cos, sin
        return interop.served(qk_norm_rope, *given, eps, positions=positions, **options)  # type: ignore[no-any-return]
    _check_tensors("qk_norm_rope", {"key": key, "cos": cos, "sin": sin}, positions)
    checks.rounding("qk_norm_rope", rounding)
    q, k = (_tokens_first("qk_norm_rope", n, x, unsqueeze_dim) for n, x in (("query", query), ("key", key)))
    if eps is None:
        eps = schemas.default_eps(query)
    serve = operator("qk_norm_rope", "qk_norm_rope", backend, q, k, query_weight, key_weight, cos, sin)
    tables = _tables(cos, sin, positions)
    q, k = serve(q, k, query_weight, key_weight, *tables, eps, weight_offset, interleaved, rounding)
    return _as_given(q, query, unsqueeze_dim), _as_given(k, key, unsqueeze_dim)


def _check_tensors(verb: str, tensors: dict[str, Any], positions: Any) -> None:
    for name, value in tensors.items():
        checks.tensor(verb, name, value)
    if positions is not None:
        checks.tensor(verb, "positions", positions)


def _tokens_first(verb: str, name: str, x: Tensor, unsqueeze_dim: int) -> Tensor:
    """A view (B, L, H, D) of query or key for the operator; raises if `unsqueeze_dim` is no dimension of heads."""
    dims = x.dim()
    if dims not in (3, 4):
        raise RuntimeError(
            f"`{verb}`: `{name}` must have three or four dimensions, heads, tokens and columns, got shape "
            f"{list(x.shape)}"
        )
    checks.of_kind(verb, "unsqueeze_dim", unsqueeze_dim, checks.INT)
    if not -dims <= unsqueeze_dim < dims:
        raise IndexError(
            f"Dimension out of range (expected to be in range of [{-dims}, {dims - 1}], but got {unsqueeze_dim})"
        )
    if unsqueeze_dim % dims not in (dims - 3, dims - 2):
        raise ValueError(
            f"`{verb}`: `unsqueeze_dim` must be the dimension of heads, {dims - 3} or {dims - 2} of {dims}, got "
            f"{unsqueeze_dim}"
        )
    x = x if unsqueeze_dim % dims == dims - 2 else x.transpose(-2, -3)
    return x if dims == 4 else x.unsqueeze(0)


def _as_given(y: Tensor, x: Tensor, unsqueeze_dim: int) -> Tensor:
    """A result of the operator, (B, L, H, D), with its dimensions in the order of those of x."""
    y = y if x.dim() == 4 else y.squeeze(0)
    return y if unsqueeze_dim % x.dim() == x.dim() - 2 else y.transpose(-2, -3)


def _tables(cos: Tensor, sin: Tensor, positions: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Cos, sin and positions with a first dimension for examples, as the operator takes them."""
    with_examples = [t[None] if t.dim() == 2 else t for t in (cos, sin)]
    if positions is not None and positions.dim() == 1:
        positions = positions[None]
    return with_examples[0], with_examples[1], positions
