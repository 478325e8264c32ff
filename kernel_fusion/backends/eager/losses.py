"""Log-probabilities of classes, of which the losses are made.

For logits z = cap(scale x) / temperature, with m = max z and s = sum e^(z - m), the logarithm of a probability is
(z - m) - log s. The logarithm of the sum of all e^z is m + log s; it is kept as two numbers, since one loses digits.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kernel_fusion.core import checks
from kernel_fusion.core.spec import compute_dtype

__all__ = ["logits", "token_logprob"]


def logits(input: Tensor, scale: float, softcap: float, temperature: Tensor | None = None) -> Tensor:
    """The input in the compute type: times `scale`, then capped unless `softcap` is 0, then divided by temperatures."""
    z = input.to(compute_dtype(input.dtype)) * scale
    if softcap != 0.0:
        z = softcap * torch.tanh(z / softcap)
    return z if temperature is None else z / temperature.to(z.dtype).unsqueeze(-1)


def token_logprob(
    input: Tensor,
    ids: Tensor,
    mask: Tensor | None,
    temperature: Tensor | None,
    weight: Tensor | None,
    scale: float,
    softcap: float,
    ignore_index: int,
    extra: str,
    predicts: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Log-probabilities of the classes `ids`, and m, log s, `extra` and the likeliest class of each row.

    A boolean mask leaves out classes where it is False: their log-probability is -inf, without a gradient. `extra` is
    the weighted sum of all log-probabilities, the entropy, or none. A row whose first id is `ignore_index` counts for
    nothing: its results are 0 (-1 for the class) and its gradient is 0, also beside NaN. The gradient of `log_sum` is
    that of m + log s, since m is a constant. An id out of range raises on a CPU, where its value is known; elsewhere
    its log-probability and the gradient of its row are NaN.
    """
    _check(input, ids, mask, temperature, weight)
    each = ids if ids.dim() == input.dim() else ids.unsqueeze(-1)
    ignored = each[..., :1] == ignore_index
    dead, unread = ignored, ignored
    if mask is not None:
        dead, unread = ignored | ~mask.any(-1, keepdim=True), ignored | ~mask
    z = logits(input.masked_fill(unread, 0.0), scale, softcap, temperature)
    if mask is not None:
        z = z.masked_fill(unread & ~dead, -math.inf)
    largest = z.detach().amax(-1, keepdim=True)
    exponentials = torch.exp(z - largest.masked_fill(largest == -math.inf, 0.0))
    log_sum = exponentials.sum(-1, keepdim=True).log()
    logprob = _at(each, z - largest - log_sum, ignored).masked_fill(ignored, 0.0)
    if mask is not None:
        classes = input.shape[-1]
        kept = mask.expand(input.shape).gather(-1, each.clamp(0, classes - 1)) | (each < 0) | (each >= classes)
        logprob = logprob.masked_fill(~(kept | ignored), -math.inf)
        log_sum = log_sum.masked_fill(dead, 0.0)
        largest = largest.masked_fill(dead & ~ignored, -math.inf)
    found = input.new_empty(0, dtype=z.dtype)
    if extra == "sum":
        terms = z - largest - log_sum
        found = (terms if weight is None else terms * weight.to(terms.dtype)).sum(-1).masked_fill(dead.squeeze(-1), 0.0)
    elif extra == "entropy":
        p = exponentials / exponentials.sum(-1, keepdim=True)
        logs = (z - largest - log_sum).masked_fill(p == 0.0, 0.0)
        found = -(p * logs).sum(-1).masked_fill(dead.squeeze(-1), 0.0)
    predicted = ids.new_empty(0)
    if predicts:
        predicted = z.argmax(-1).masked_fill(ignored.squeeze(-1), -1)
    largest, log_sum = (t.masked_fill(ignored, 0.0).squeeze(-1) for t in (largest, log_sum))
    return logprob.view(ids.shape), largest, log_sum, found, predicted


def _at(ids: Tensor, logs: Tensor, ignored: Tensor) -> Tensor:
    """The elements of `logs` at the ids; NaN, with a gradient of NaN, at ids that are no classes of rows that count."""
    classes = logs.shape[-1]
    wrong = ((ids < 0) | (ids >= classes)) & ~ignored
    if _has_values(ids) and bool(wrong.any()):
        first = ids[wrong][0].item()
        raise IndexError(f"Target {first} is out of bounds: there are {classes} classes")
    factor = torch.ones_like(wrong, dtype=logs.dtype).masked_fill(wrong, math.nan)
    return logs.gather(-1, ids.clamp(0, classes - 1)) * factor


def _has_values(ids: Tensor) -> bool:
    """Whether the values of a tensor lie on the CPU, and nobody traces."""
    return (
        ids.device.type == "cpu"
        and type(ids) is Tensor
        and not torch.compiler.is_compiling()
        and not torch._C._functorch.is_functorch_wrapped_tensor(ids)
        and torch._C._len_torch_dispatch_stack() == 0
    )


def _check(input: Tensor, ids: Tensor, mask: Tensor | None, temperature: Tensor | None, weight: Tensor | None) -> None:
    """Raise unless the tensors fit."""
    name = "kernel_fusion::token_logprob"
    if input.dim() == 0 or input.dtype not in checks.FLOATING:
        raise RuntimeError(f"{name}: `input` must be floating point and have a dimension of classes")
    rows = list(input.shape[:-1])
    if ids.dtype != torch.int64 or not checks.shaped(rows, ids if ids.dim() < input.dim() else ids[..., 0]):
        raise RuntimeError(
            f"{name}: `ids` must be int64 of shape {rows} or {[*rows, 'K']}, got {ids.dtype} {list(ids.shape)}"
        )
    if mask is not None and (mask.dtype != torch.bool or not checks.shaped(input.shape, mask)):
        raise RuntimeError(f"{name}: `mask` must be boolean and have the shape of `input`, {list(input.shape)}")
    if temperature is not None and not checks.shaped(rows, temperature):
        raise RuntimeError(f"{name}: `temperature` must have shape {rows}, got {list(temperature.shape)}")
    if weight is not None and not checks.shaped(input.shape[-1:], weight):
        raise RuntimeError(f"{name}: `weight` must have shape {list(input.shape[-1:])}, got {list(weight.shape)}")
