"""A linear layer and the losses of its rows, in chunks of rows, so that all logits never exist at once.

Products are the vendor's. Each chunk makes its logits as the layer does, the row operator `token_logprob` reads them,
its backward part writes their gradient, and two products add that to the gradients of the layer. How many rows a chunk
has follows from the sizes of the layer alone, so the same call has the same bits whatever memory is free.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from kernel_fusion.backends import eager
from kernel_fusion.core.spec import compute_dtype
from kernel_fusion.operators import loader, schemas
from kernel_fusion.operators.dispatch import unavailable_reason

ACCUMULATE = ("auto", "bf16", "fp32", "recompute")
# A chunk of logits and its gradient take this many bytes each, and its rows are a multiple of `_STEP`.
_CHUNK_BYTES = 2**28
_STEP = 256
# The gradient of the weight is rounded once per chunk; with more chunks than this, "auto" adds in float32, since flat
# logits, as those of an untrained model, then have more than 1.5 times the error of one chunk.
_FEW_CHUNKS = 3
_NARROW = (torch.float16, torch.bfloat16)


def rows_per_chunk(hidden: int, classes: int, dtype: torch.dtype) -> int:
    """The rows of a chunk: as many as fit in `_CHUNK_BYTES`, but no fewer than a quarter of the hidden size.

    Each chunk reads and writes the gradient of the weight, which the products of few rows would wait for.
    """
    fitting = _CHUNK_BYTES // (classes * dtype.itemsize)
    return min(max(fitting // _STEP, -(-hidden // (4 * _STEP)), 1) * _STEP, 32 * _STEP)


class Head(NamedTuple):
    """A linear layer, its input (T, H), and the dtype of the logits if it is another than the input's."""

    input: Tensor
    weight: Tensor
    bias: Tensor | None
    logits_dtype: torch.dtype | None

    def rows(self, chunk_rows: int) -> int:
        """The rows of a chunk, as the caller wishes or by the rule."""
        return chunk_rows or rows_per_chunk(self.weight.shape[1], self.weight.shape[0], self.input.dtype)

    def chunks(self, chunk_rows: int) -> Iterator[slice]:
        """The rows of each chunk; an input without rows is one chunk."""
        rows = self.rows(chunk_rows)
        for start in range(0, max(self.input.shape[0], 1), rows):
            yield slice(start, min(start + rows, self.input.shape[0]))

    def blocks(self, chunk_rows: int) -> Iterator[slice]:
        """The classes of each block, which for all rows has as many logits as a chunk has."""
        classes = self.weight.shape[0]
        step = max(self.rows(chunk_rows) * classes // max(self.input.shape[0], 1) // _STEP, 1) * _STEP
        for start in range(0, classes, step):
            yield slice(start, min(start + step, classes))

    def widened(self) -> Head:
        """The layer itself, or in the dtype of its logits if the device has no product that widens."""
        if self.logits_dtype in (None, self.input.dtype) or self.input.is_cuda:
            return self
        return Head(self.input, self.weight.to(self.logits_dtype), self.bias, self.logits_dtype)

    def logits(self, rows: slice, classes: slice) -> Tensor:
        """The logits of some rows and classes, rounded as the layer's own."""
        x, weight = self.input[rows], self.weight[classes]
        bias = None if self.bias is None else self.bias[classes]
        if self.logits_dtype in (None, x.dtype):
            return F.linear(x, weight, bias)
        if weight.dtype == self.logits_dtype:
            return F.linear(x.to(weight.dtype), weight, None if bias is None else bias.to(weight.dtype))
        z = torch.mm(x, weight.t(), out_dtype=self.logits_dtype)
        return z if bias is None else z.add_(bias)


class Rows(NamedTuple):
    """The arguments of `token_logprob` beside the logits, for all rows."""

    ids: Tensor
    mask: Tensor | None
    temperature: Tensor | None
    weight: Tensor | None
    scale: float
    softcap: float
    ignore_index: int

    def at(self, rows: slice) -> Rows:
        """The arguments of some rows."""
        mask, temperature = (None if t is None else t[rows] for t in (self.mask, self.temperature))
        return self._replace(ids=self.ids[rows], mask=mask, temperature=temperature)


class Coefficients(NamedTuple):
    """The derivatives by which `token_logprob_bwd` makes the gradient of logits; its signature has the formula."""

    dlogprob: Tensor
    da: Tensor | None
    db: Tensor | None
    dc: Tensor | None

    def at(self, rows: slice) -> Coefficients:
        """The coefficients of some rows."""
        return Coefficients(*(None if t is None else t[rows] for t in self))  # type: ignore[arg-type]


def row_forward(logits: Tensor, rows: Rows, extra: str, predicts: bool) -> tuple[Tensor, ...]:
    """Log-probabilities of a chunk, the largest logits, the logarithms of the sums, extra and predicted classes."""
    return schemas.overload("token_logprob")(logits, *rows, extra, predicts)  # type: ignore[no-any-return]


def row_backward(logits: Tensor, rows: Rows, largest: Tensor, log_sum: Tensor, given: Coefficients) -> Tensor:
    """The gradient of a chunk of logits, by the kernels of its device or by PyTorch's operations."""
    if _has_kernel(logits.device):
        ids, *rest = rows
        part = schemas.overload("token_logprob_bwd")
        return part(logits, ids, largest, log_sum, *given, *rest)  # type: ignore[no-any-return]
    return _row_backward(logits, rows, largest, log_sum, given)


def _has_kernel(device: torch.device) -> bool:
    key = {"cpu": "CPU", "cuda": "CUDA"}.get(device.type)
    if key is None or not loader.load() or unavailable_reason(device.type, device) is not None:
        return False
    return torch._C._dispatch_has_kernel_for_dispatch_key("kernel_fusion::token_logprob_bwd", key)


def _row_backward(logits: Tensor, rows: Rows, largest: Tensor, log_sum: Tensor, given: Coefficients) -> Tensor:
    each, dlogprob = rows.ids, given.dlogprob
    if each.dim() < logits.dim():
        each, dlogprob = each.unsqueeze(-1), dlogprob.unsqueeze(-1)
    ignored = each[..., :1] == rows.ignore_index
    z = eager.logits(logits, rows.scale, rows.softcap, rows.temperature)
    logs = z - largest.unsqueeze(-1) - log_sum.unsqueeze(-1)
    left_out = ignored if rows.mask is None else ignored | ~rows.mask
    p = logs.exp().masked_fill(left_out, 0.0)
    wrong = (each < 0) | (each >= logits.shape[-1])
    total = -dlogprob.masked_fill(wrong, torch.nan).sum(-1, keepdim=True)
    dz = p * (total if given.da is None else total + given.da.unsqueeze(-1))
    if given.db is not None:
        dz += given.db.unsqueeze(-1) * (p * logs.masked_fill(p == 0.0, 0.0))
    if given.dc is not None:
        dc = given.dc.unsqueeze(-1)
        dz += (dc if rows.weight is None else dc * rows.weight.to(z.dtype)).expand_as(dz)
    dz.scatter_add_(-1, each.clamp(0, logits.shape[-1] - 1), dlogprob.to(z.dtype))
    if rows.temperature is not None:
        dz /= rows.temperature.to(z.dtype).unsqueeze(-1)
    if rows.softcap:
        dz *= 1.0 - torch.tanh(logits.to(z.dtype) * rows.scale / rows.softcap) ** 2
    return (dz * rows.scale).masked_fill_(left_out, 0.0).to(logits.dtype)


class Gradients:
    """The wanted gradients of a layer's input, weight and bias, to which chunks of rows are added."""

    def __init__(self, head: Head, wants: Sequence[bool], accumulate: str, chunk_rows: int) -> None:
        x, weight = head.input, head.weight
        self.head, (self.wants_input, self.wants_weight, self.wants_bias) = head, wants
        self.wants_bias = self.wants_bias and head.bias is not None
        self.chunk_rows = chunk_rows
        self.way = _way(head, accumulate, sum(1 for _ in head.chunks(chunk_rows)))
        self.started = False
        self.input = x.new_empty(x.shape if self.wants_input else 0)
        wide = torch.float32 if self.way == "fp32" else weight.dtype
        self.weight = weight.new_empty(weight.shape if self.wants_weight else 0, dtype=wide)
        self.bias = weight.new_zeros(weight.shape[0] if self.wants_bias else 0, dtype=compute_dtype(weight.dtype))

    @property
    def reads_rows(self) -> bool:
        """Whether chunks of rows are wanted at all; a walk through the classes makes the others."""
        return self.wants_input or self.way != "recompute"

    def add(self, rows: slice, dz: Tensor) -> None:
        """Add the gradient of a chunk of logits."""
        x = self.head.input[rows]
        dz = dz.to(x.dtype)
        if self.wants_input:
            torch.mm(dz, self.head.weight, out=self.input[rows])
        if self.way == "recompute":
            return
        if self.wants_weight:
            _add_product(self.weight, dz.t(), x, first=not self.started)
        if self.wants_bias:
            self.bias += dz.sum(0, dtype=self.bias.dtype)
        self.started = True

    def walk(self, head: Head, rows: Rows, largest: Tensor, log_sum: Tensor, given: Coefficients) -> None:
        """Make the gradients of weight and bias in blocks of classes, each a single product over all rows."""
        if self.way != "recompute" or not (self.wants_weight or self.wants_bias):
            return
        ignored, given = _outside_of_blocks(rows, given, head.weight.shape[0])
        for block in head.blocks(self.chunk_rows):
            inside, here = _of_block(rows, given, ignored, block)
            logits = head.logits(slice(None), block)
            dz = row_backward(logits, inside, largest, log_sum, here).to(head.input.dtype)
            if self.wants_weight:
                torch.mm(dz.t(), head.input, out=self.weight[block])
            if self.wants_bias:
                self.bias[block] = dz.sum(0, dtype=self.bias.dtype)

    def results(self, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        """The gradients of input, weight and bias in the layer's dtype; unwanted ones are empty."""
        return self.input, self.weight.to(dtype), self.bias.to(dtype)


def _way(head: Head, accumulate: str, chunks: int) -> str:
    """How the gradient of the weight is added up, given the wish of the caller."""
    if accumulate == "recompute" or head.weight.dtype not in _NARROW:
        return "recompute" if accumulate == "recompute" else "bf16"
    return accumulate if accumulate != "auto" else "bf16" if chunks <= _FEW_CHUNKS else "fp32"


def _add_product(into: Tensor, a: Tensor, b: Tensor, first: bool) -> None:
    """Add a product in place; the first one is written, so that `into` need not be zero."""
    beta = 0 if first else 1
    if into.dtype == a.dtype:
        torch.addmm(into, a, b, beta=beta, out=into)
    elif a.is_cuda:
        torch.ops.aten.addmm.dtype_out(into, a, b, into.dtype, beta=beta, out=into)
    else:
        torch.addmm(into, a.to(into.dtype), b.to(into.dtype), beta=beta, out=into)


def _outside_of_blocks(rows: Rows, given: Coefficients, classes: int) -> tuple[Tensor, Coefficients]:
    """Which rows are ignored, and coefficients in which the sum of `dlogprob` is in `da`.

    A block has some of a row's ids, so it cannot make the sum. An id out of range is in no block, and makes it NaN.
    """
    ids, dlogprob = rows.ids, given.dlogprob
    if ids.dim() == 1:
        ids, dlogprob = ids.unsqueeze(-1), dlogprob.unsqueeze(-1)
    ignored = ids[:, 0] == rows.ignore_index
    outside = (ids < 0) | (ids >= classes)
    total = -dlogprob.masked_fill(outside, torch.nan).sum(-1)
    return ignored, given._replace(da=total if given.da is None else total + given.da)


def _of_block(rows: Rows, given: Coefficients, ignored: Tensor, block: slice) -> tuple[Rows, Coefficients]:
    """The arguments of the row operators for a block of classes. The id -1 marks ignored rows."""
    ids, dlogprob = rows.ids, given.dlogprob
    hidden = ignored if ids.dim() == 1 else ignored.unsqueeze(-1)
    inside = (ids >= block.start) & (ids < block.stop) & ~hidden
    dlogprob = dlogprob.masked_fill(~inside, 0.0)
    ids = (ids - block.start).masked_fill(~inside, 0).masked_fill(hidden, -1)
    here = rows._replace(
        ids=ids,
        mask=None if rows.mask is None else rows.mask[:, block],
        weight=None if rows.weight is None else rows.weight[block],
        ignore_index=-1,
    )
    # The row operator subtracts the sum of its own `dlogprob`, which is in `da` already.
    assert given.da is not None
    own = dlogprob if dlogprob.dim() == 1 else dlogprob.sum(-1)
    return here, given._replace(dlogprob=dlogprob, da=given.da + own)
