"""The rotary embedding as suites measure it: rows are tokens, columns all heads of the query, each of 128 columns."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

import kernel_fusion as kf
from kernel_fusion.bench.workloads import EPS, Argument, Dropout, Operation
from kernel_fusion.functional.rotary import rotate
from kernel_fusion.testing import unfused

_HEAD = 128


def _arguments(keys: int | None, normed: bool) -> Callable[[tuple[int, ...], torch.dtype], Sequence[Argument]]:
    """Heads of a query, and of a key that has one for `keys` of them; weights, and angles in the dtype of both."""

    def arguments(shape: tuple[int, ...], dtype: torch.dtype) -> Sequence[Argument]:
        tokens, columns = shape
        heads = columns // _HEAD
        given = [Argument("query", (tokens, heads, _HEAD), dtype)]
        if keys is not None:
            given.append(Argument("key", (tokens, max(1, heads // keys), _HEAD), dtype))
        if normed:
            given += [Argument(f"{of}_weight", (_HEAD,), dtype, 1.0, shared=True) for of in ("query", "key")]
        return [*given, *(Argument(name, (tokens, _HEAD // 2), dtype, gradient=False) for name in ("cos", "sin"))]

    return arguments


def _turned(n: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return unfused.rope(n, cos[:, None], sin[:, None])


def _rope() -> Operation:
    def pytorch(_: Dropout, query: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return _turned(query, cos, sin)

    def fused(query: Tensor, cos: Tensor, sin: Tensor, p: float, backend: str | None) -> Tensor:
        return kf.rope(query, cos, sin, backend=backend)  # of (tokens, heads, columns) dimension 1 counts heads

    return Operation("rope", "rope", _arguments(None, False), pytorch, fused, backward_reads=("cos", "sin"))


def _rope_of_both(name: str, keys: int) -> Operation:
    """Query and key in one launch, as `kf.patch` has a model turn them."""

    def pytorch(_: Dropout, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return _turned(query, cos, sin), _turned(key, cos, sin)

    def fused(
        query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, p: float, backend: str | None
    ) -> tuple[Tensor, Tensor]:
        turned = rotate([query, key], cos, sin, interleaved=False, unsqueeze_dim=1, backend=backend)
        return turned[0], turned[1]

    reads = "cos", "sin"
    return Operation(name, "rope", _arguments(keys, False), pytorch, fused, ("y", "y_key"), backward_reads=reads)


def _qk_norm_rope(name: str, keys: int) -> Operation:
    def pytorch(
        _: Dropout, query: Tensor, key: Tensor, query_weight: Tensor, key_weight: Tensor, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor]:
        normed = (
            unfused.norm(x, x.shape[-1:], weight, None, EPS, rms=True)
            for x, weight in ((query, query_weight), (key, key_weight))
        )
        of_query, of_key = (_turned(n, cos, sin) for n in normed)
        return of_query, of_key

    def fused(*tensors: Tensor, p: float, backend: str | None) -> tuple[Tensor, Tensor]:
        query, key, query_weight, key_weight, cos, sin = tensors
        return kf.qk_norm_rope(query, key, query_weight, key_weight, cos, sin, EPS, backend=backend)

    return Operation(name, "qk_norm_rope", _arguments(keys, True), pytorch, fused, ("y", "y_key"))


ROPE = _rope()
# 32 heads of the query and 8 of the key, as in Qwen3 8B; 24 of each, as in video models.
_FEWER, _EQUAL = "query and fewer keys", "query and key"
ROPE_OF_BOTH = _rope_of_both(f"rope of {_FEWER}", 4), _rope_of_both(f"rope of {_EQUAL}", 1)
_NORMED = _qk_norm_rope(f"norm+rope of {_FEWER}", 4), _qk_norm_rope(f"norm+rope of {_EQUAL}", 1)
# Keys are tokens and columns.
OPERATIONS: dict[tuple[int, int], tuple[Operation, ...]] = {
    (4096, 32 * _HEAD): (ROPE, ROPE_OF_BOTH[0], _NORMED[0]),
    (27030, 24 * _HEAD): (ROPE, ROPE_OF_BOTH[1], _NORMED[1]),
}
