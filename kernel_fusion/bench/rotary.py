"""The rotary embedding as suites measure it: rows are tokens, columns all heads of the query, each of 128 columns."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

import kernel_fusion as kf
from kernel_fusion.bench.workloads import EPS, Argument, Dropout, Operation
from kernel_fusion.functional.rotary import rotate
from kernel_fusion.testing import unfused

_HEAD = 128


def _operation(name: str, keys: int | None = None, normed: bool = False) -> Operation:
    """The embedding, perhaps of heads' norms: of a query, or in one launch also of a key.

    The key has a head for `keys` heads of the query. `kf.patch` has a model turn both together.
    """

    def arguments(shape: tuple[int, ...], dtype: torch.dtype) -> Sequence[Argument]:
        tokens, columns = shape
        heads = columns // _HEAD
        given = [Argument("query", (tokens, heads, _HEAD), dtype)]
        if keys is not None:
            given.append(Argument("key", (tokens, max(1, heads // keys), _HEAD), dtype))
        if normed:
            given += [Argument(f"{of}_weight", (_HEAD,), dtype, 1.0, shared=True) for of in ("query", "key")]
        return [*given, *(Argument(name, (tokens, _HEAD // 2), dtype, gradient=False) for name in ("cos", "sin"))]

    def pytorch(_: Dropout, *tensors: Tensor) -> tuple[Tensor, ...]:
        *rows, cos, sin = tensors
        if normed:
            pairs = zip(rows[:2], rows[2:], strict=True)
            rows = [unfused.norm(x, x.shape[-1:], weight, None, EPS, rms=True) for x, weight in pairs]
        return tuple(unfused.rope(x, cos[:, None], sin[:, None]) for x in rows)

    def fused(*tensors: Tensor, p: float, backend: str | None) -> Tensor | tuple[Tensor, ...]:
        if normed:
            query, key, query_weight, key_weight, cos, sin = tensors
            return kf.qk_norm_rope(query, key, query_weight, key_weight, cos, sin, EPS, backend=backend)
        *rows, cos, sin = tensors
        if keys is None:
            return kf.rope(rows[0], cos, sin, backend=backend)  # of (tokens, heads, columns) dimension 1 counts heads
        return tuple(rotate(rows, cos, sin, interleaved=False, unsqueeze_dim=1, backend=backend))

    verb, reads = ("qk_norm_rope", None) if normed else ("rope", ("cos", "sin"))
    results = ("y",) if keys is None else ("y", "y_key")
    return Operation(name, verb, arguments, pytorch, fused, results, backward_reads=reads)


ROPE = _operation("rope")
# 32 heads of the query and 8 of the key, as in Qwen3 8B; 24 of each, as in video models.
_FEWER, _EQUAL = "query and fewer keys", "query and key"
ROPE_OF_BOTH = _operation(f"rope of {_FEWER}", 4), _operation(f"rope of {_EQUAL}", 1)
_NORMED = _operation(f"norm+rope of {_FEWER}", 4, True), _operation(f"norm+rope of {_EQUAL}", 1, True)
# Keys are tokens and columns.
OPERATIONS: dict[tuple[int, int], tuple[Operation, ...]] = {
    (4096, 32 * _HEAD): (ROPE, ROPE_OF_BOTH[0], _NORMED[0]),
    (27030, 24 * _HEAD): (ROPE, ROPE_OF_BOTH[1], _NORMED[1]),
}
