"""The rotary embedding as suites measure it: rows are tokens, columns all heads of the query, each of 128 columns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

import kernel_fusion as kf
from kernel_fusion.bench.workloads import Argument, Dropout, Operation
from kernel_fusion.testing import unfused

_HEAD, _EPS = 128, 1e-6


def _arguments(keys: int | None, shape: tuple[int, ...], dtype: torch.dtype) -> Sequence[Argument]:
    """Heads of a query, and of a key that has one for `keys` of them; weights, and angles in the dtype of both."""
    tokens, columns = shape
    heads = columns // _HEAD
    angles = [Argument(name, (tokens, _HEAD // 2), dtype, gradient=False) for name in ("cos", "sin")]
    query = Argument("query", (tokens, heads, _HEAD), dtype)
    if keys is None:
        return [query, *angles]
    weights = [Argument(f"{of}_weight", (_HEAD,), dtype, 1.0, shared=True) for of in ("query", "key")]
    return [query, Argument("key", (tokens, max(1, heads // keys), _HEAD), dtype), *weights, *angles]


def _turned(n: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return unfused.rope(n, cos[:, None], sin[:, None])


def _rope() -> Operation:
    def pytorch(_: Dropout, query: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return _turned(query, cos, sin)

    def fused(query: Tensor, cos: Tensor, sin: Tensor, p: float, backend: str | None) -> Tensor:
        return kf.rope(query, cos, sin, backend=backend)  # of (tokens, heads, columns) dimension 1 counts heads

    return Operation(
        "rope", "rope", lambda shape, dtype: _arguments(None, shape, dtype), pytorch, fused,
        backward_reads=("cos", "sin"),
    )  # fmt: skip


def _qk_norm_rope(keys: int) -> Operation:
    def pytorch(
        _: Dropout, query: Tensor, key: Tensor, query_weight: Tensor, key_weight: Tensor, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor]:
        normed = (
            unfused.norm(x, x.shape[-1:], weight, None, _EPS, rms=True)
            for x, weight in ((query, query_weight), (key, key_weight))
        )
        of_query, of_key = (_turned(n, cos, sin) for n in normed)
        return of_query, of_key

    def fused(*tensors: Tensor, p: float, backend: str | None) -> tuple[Tensor, Tensor]:
        query, key, query_weight, key_weight, cos, sin = tensors
        return kf.qk_norm_rope(query, key, query_weight, key_weight, cos, sin, _EPS, backend=backend)

    return Operation(
        "norm+rope of query and key", "qk_norm_rope", lambda shape, dtype: _arguments(keys, shape, dtype), pytorch,
        fused, results=("y", "y_key"),
    )  # fmt: skip


_ROPE = _rope()
# Keys are tokens and columns: 32 heads of the query and 8 of the key, as in Qwen3 8B; 24 of each, as in video models.
OPERATIONS: dict[tuple[int, int], tuple[Operation, ...]] = {
    (4096, 32 * _HEAD): (_ROPE, replace(_qk_norm_rope(4), name="norm+rope of query and fewer keys")),
    (27030, 24 * _HEAD): (_ROPE, _qk_norm_rope(1)),
}
