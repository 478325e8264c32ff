"""Operations as transformers have them: gated and modulated norms, rotary embeddings, the elementwise part of a block.

Sizes are (rows, columns), of each sample where there are several.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import kernel_fusion as kf
from kernel_fusion.functional.rotary import rotate
from kernel_fusion.testing import unfused
from kernel_fusion_bench.workloads import DROPOUT_P, EPS, Argument, Dropout, Operation

BATCH = 2  # samples, each with numbers of its own
# Rows of a sample, and columns, of an image's and a video's tokens.
SIZES = ((2304, 3072), (8192, 4096), (37800, 5120))
# Rows and columns of what is gated: heads of linear attention, and hidden states.
GATED_SIZES = ((1_000_000, 128), (65536, 4096))


def _chunks(shape: tuple[int, ...], dtype: torch.dtype, *names: str) -> list[Argument]:
    """A row for each sample; the first two are halves of one projection."""
    halves = ("first half", "second half", "contiguous")
    return [
        Argument(name, (shape[0], 1, shape[-1]), dtype, std=0.5, layout=layout)
        for name, layout in zip(names, halves, strict=False)
    ]


def _modulated(norm: str) -> Operation:
    def arguments(shape: tuple[int, ...], dtype: torch.dtype) -> list[Argument]:
        return [Argument("x", shape, dtype), *_chunks(shape, dtype, "scale", "shift")]

    def pytorch(_: Dropout, x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        y = unfused.norm(x, x.shape[-1:], None, None, EPS, rms=norm == "rms_norm")
        return unfused.modulated(y, scale, shift)

    def fused(x: Tensor, scale: Tensor, shift: Tensor, p: float, backend: str | None) -> Any:
        return getattr(kf, f"modulated_{norm}")(x, x.shape[-1:], scale, shift, eps=EPS, backend=backend)

    return Operation(f"modulated {norm}", f"modulated_{norm}", arguments, pytorch, fused)


def _add_modulated() -> Operation:
    def arguments(shape: tuple[int, ...], dtype: torch.dtype) -> list[Argument]:
        tensors = [Argument(name, shape, dtype) for name in ("x", "residual")]
        return [*tensors, *_chunks(shape, dtype, "scale", "shift", "gate")]

    def pytorch(_: Dropout, x: Tensor, residual: Tensor, scale: Tensor, shift: Tensor, gate: Tensor) -> Any:
        h = residual + gate * x
        return unfused.modulated(unfused.norm(h, x.shape[-1:], None, None, EPS, rms=False), scale, shift), h

    def fused(x: Tensor, residual: Tensor, scale: Tensor, *rest: Tensor, p: float, backend: str | None) -> Any:
        shift, gate = rest
        options: dict[str, Any] = {"eps": EPS, "gate": gate, "backend": backend}
        return kf.add_modulated_layer_norm(x, residual, x.shape[-1:], scale, shift, **options)

    name, verb = "gated addition, modulated layer_norm", "add_modulated_layer_norm"
    return Operation(name, verb, arguments, pytorch, fused, ("y", "h"))


def _gated() -> Operation:
    def arguments(shape: tuple[int, ...], dtype: torch.dtype) -> list[Argument]:
        weight = Argument("weight", shape[-1:], dtype, 1.0, shared=True)
        return [Argument("x", shape, dtype), Argument("gate", shape, dtype), weight]

    def pytorch(_: Dropout, x: Tensor, gate: Tensor, weight: Tensor) -> Tensor:
        return unfused.gated_norm(x, gate, x.shape[-1:], weight, None, EPS, rms=True)

    def fused(x: Tensor, gate: Tensor, weight: Tensor, p: float, backend: str | None) -> Tensor:
        return kf.gated_rms_norm(x, gate, x.shape[-1:], weight, EPS, backend=backend)

    return Operation("gated rms_norm", "gated_rms_norm", arguments, pytorch, fused)


GATED = (_gated(),)
MODULATED = (_modulated("layer_norm"), _add_modulated())
MODULATED_RMS = (_modulated("rms_norm"),)  # at one size: its kernel is that of LayerNorm

_HEAD = 128  # columns


def _rotary(name: str, keys: int | None = None, normed: bool = False) -> Operation:
    """The rotary embedding, perhaps of heads' norms: of a query, or in one launch also of a key.

    Rows are tokens, columns all heads of the query. The key has a head for `keys` heads of the query. `kf.patch` has a
    model turn both together.
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


ROPE = _rotary("rope")
# 32 heads of the query and 8 of the key, as in Qwen3 8B; 24 of each, as in video models.
_FEWER, _EQUAL = "query and fewer keys", "query and key"
ROPE_OF_BOTH = _rotary(f"rope of {_FEWER}", 4), _rotary(f"rope of {_EQUAL}", 1)
_NORMED = _rotary(f"norm+rope of {_FEWER}", 4, True), _rotary(f"norm+rope of {_EQUAL}", 1, True)
ROTARY: dict[tuple[int, int], tuple[Operation, ...]] = {  # by tokens and columns
    (4096, 32 * _HEAD): (ROPE, ROPE_OF_BOTH[0], _NORMED[0]),
    (27030, 24 * _HEAD): (ROPE, ROPE_OF_BOTH[1], _NORMED[1]),
}

# The elementwise part of a pre-norm block. Copies, which keep nothing for backward, replace attention and products.
#
#     h = residual + dropout(x);   n = layer_norm(h);    x = attention(n)
#     h = h + dropout(x);          n = layer_norm(h);    x = down(silu(gate(n)) * value(n))
_UP = 7  # gate and value together, in hidden sizes, as in Llama 3 8B


def _block_arguments(shape: tuple[int, ...], dtype: torch.dtype) -> list[Argument]:
    tensors = [Argument(name, shape, dtype) for name in ("x", "residual")]
    parameters = (("weight1", 1.0), ("bias1", 0.5), ("weight2", 1.0), ("bias2", 0.5))
    return tensors + [Argument(name, shape[-1:], dtype, mean, shared=True) for name, mean in parameters]


def _up(n: Tensor) -> tuple[Tensor, Tensor]:
    # An odd width leaves a column over. Split, not slices: backward of each slice would fill a tensor of the whole
    # width.
    gate, value, *_ = n.repeat(1, _UP).split(_UP * n.shape[-1] // 2, -1)
    return gate, value


def _down(m: Tensor, cols: int) -> Tensor:
    return m[:, :cols].clone()


def _unfused_block(
    dropout: Dropout, x: Tensor, residual: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor
) -> tuple[Tensor, Tensor]:
    shape = x.shape[-1:]
    h = residual + dropout(x)
    attended = F.layer_norm(h, shape, w1, b1).clone()
    h = h + dropout(attended)
    gate, value = _up(F.layer_norm(h, shape, w2, b2))
    return _down(F.silu(gate) * value, shape[0]), h


def _fused_block(
    x: Tensor, residual: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor, p: float, backend: str | None
) -> tuple[Tensor, Tensor]:
    shape = x.shape[-1:]
    n, h = kf.add_layer_norm(x, residual, shape, w1, b1, dropout_p=p, backend=backend)
    n, h = kf.add_layer_norm(n.clone(), h, shape, w2, b2, dropout_p=p, backend=backend)
    gate, value = _up(n)
    return _down(kf.gated_act(gate, value, "silu", backend=backend), shape[0]), h


BLOCK = Operation("pre-norm block", "block", _block_arguments, _unfused_block, _fused_block, ("y", "h"))
BLOCK_WITH_DROPOUT = replace(BLOCK, name="pre-norm block, dropout", verb="block_dropout", dropout_p=DROPOUT_P)
