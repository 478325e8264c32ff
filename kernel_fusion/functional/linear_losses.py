"""A linear layer and the loss of its rows, without all logits at once."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.forward_ad import unpack_dual

from kernel_fusion.backends.availability import PLAIN_TENSORS, is_dtensor, is_foreign
from kernel_fusion.config import check_backend_name, state
from kernel_fusion.core import checks
from kernel_fusion.core.spec import compute_dtype
from kernel_fusion.functional import interop, losses
from kernel_fusion.functional.losses import cross_entropy
from kernel_fusion.functional.results import CrossEntropyOutput
from kernel_fusion.operators.dispatch import operator
from kernel_fusion.operators.linear_chunks import ACCUMULATE
from kernel_fusion.operators.linear_losses import factors_of, losses_of
from kernel_fusion.operators.schemas import overload

__all__ = ["linear_cross_entropy"]


def linear_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    linear_bias: Tensor | None = None,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    scale: float = 1.0,
    divisor: float | Tensor | None = None,
    stats: bool = False,
    logits_dtype: torch.dtype | None = None,
    accumulate: str = "auto",
    chunk_rows: int | None = None,
    backend: str | None = None,
) -> Tensor | CrossEntropyOutput:
    r"""Cross entropy of the results of a linear layer, computed in chunks of rows, so that all logits never exist.

    .. math:: x = \mathrm{input}\, W^T + b, \qquad \mathrm{cross\_entropy}(x, \mathrm{target})

    With "mean" or "sum" and a gradient to make, forward makes it, and backward multiplies it by the incoming gradient
    on the device. With "none", and for float16, whose small gradients would vanish before the loss is scaled, backward
    makes the logits again.

    Args:
        input: (..., H); float16, bfloat16, float32 or float64. Under autocast, input, weight and bias are cast once.
        linear_weight: W, (V, H), of the input's dtype.
        target: the class of each row, integers of shape (...). Or probabilities, floating point of shape (..., V): for
            these all logits are made.
        linear_bias: b, (V,).
        weight, ignore_index, reduction, label_smoothing, z_loss, softcap, scale, divisor, stats: as in
            :func:`kernel_fusion.cross_entropy`. `divisor` gets no gradient.
        logits_dtype: None rounds the logits to the input's dtype, as the layer does; torch.float32 keeps them as the
            product accumulates them.
        accumulate: how the gradient of W is added up over chunks. "bf16" rounds it to W's dtype once per chunk; "fp32"
            adds in float32; "recompute" makes it in blocks of classes, which costs one product more, has no error of
            accumulation and takes the least memory; "auto" is "bf16" for few chunks, and then "fp32".
        chunk_rows: the rows of a chunk; None takes a number that follows from H, V and the dtype alone.
        backend: None, or "eager", which makes all logits by PyTorch's operations and has derivatives of every kind;
            "cuda" and "cpu" ask for the kernels of the input's device.

    Returns:
        The loss in float32 (float64 for float64); with `stats` a :class:`CrossEntropyOutput`. If no row counts, the
        mean is NaN, the sum 0, and the gradients 0. Gradients have the dtypes of what they belong to.

    Raises:
        IndexError: a target is no class; on a GPU the loss is NaN instead.
        RuntimeError: shapes, dtypes or devices that don't fit; a weight without elements; a second derivative.
        TypeError: a DTensor.
        ValueError: an option out of its range; an unknown `backend`.
        BackendUnavailableError: as for :func:`kernel_fusion.add_act`; "triton".

    Source: :func:`torch.nn.functional.linear_cross_entropy` of PyTorch 2.13.

    Example:
        >>> import torch, kernel_fusion as kf
        >>> hidden, head, target = torch.randn(2, 5, 16), torch.nn.Linear(16, 100), torch.randint(100, (2, 5))
        >>> loss = kf.linear_cross_entropy(hidden, head.weight, target, linear_bias=head.bias)
        >>> torch.allclose(loss, torch.nn.functional.cross_entropy(head(hidden).flatten(0, 1), target.flatten()))
        True
    """
    verb = "linear_cross_entropy"
    options: dict[str, Any] = {"softcap": softcap, "scale": scale, "stats": stats, "backend": backend}
    options |= {"z_loss": z_loss, "divisor": divisor}
    if not interop.is_tensor(input):
        return interop.served(  # type: ignore[no-any-return]
            linear_cross_entropy, input, linear_weight, target, linear_bias=linear_bias, weight=weight,
            ignore_index=ignore_index, reduction=reduction, label_smoothing=label_smoothing,
            logits_dtype=logits_dtype, accumulate=accumulate, chunk_rows=chunk_rows, **options,
        )  # fmt: skip
    input, linear_weight, linear_bias = _layer(verb, input, linear_weight, linear_bias, target)
    _check_way(verb, input, logits_dtype, accumulate, chunk_rows)
    classes = linear_weight.shape[0]
    rows = input.shape[:-1]
    whole = [*rows, classes]
    if not checks.shaped(whole if target.is_floating_point() else rows, target):
        raise RuntimeError(
            f"`{verb}`: `target` must have shape {list(rows)}, or {whole} of probabilities, got {list(target.shape)}"
        )
    flat = input.reshape(-1, input.shape[-1])
    target = target.reshape(-1, classes) if target.is_floating_point() else target.reshape(-1)
    stand_in = input.new_empty(1).expand(flat.shape[0], classes)
    losses.check(
        verb, stand_in, target, weight, ignore_index, reduction, label_smoothing, z_loss, softcap, scale, divisor
    )
    if target.is_floating_point() or _by_definition(verb, backend, flat, linear_weight, linear_bias, weight):
        logits = _all_logits(flat, linear_weight, linear_bias, logits_dtype)
        found = cross_entropy(logits, target, weight, ignore_index, reduction, label_smoothing, **options)
        return _shaped(found, rows, reduction)
    target = target.to(torch.int64)
    weight = None if weight is None else weight.detach()
    head = flat, linear_weight, linear_bias, logits_dtype
    cap = 0.0 if softcap is None else float(softcap)
    numbers = None, None, weight, float(scale), cap, ignore_index
    way = accumulate, chunk_rows or 0
    wants = [torch.is_grad_enabled() and t is not None and t.requires_grad for t in head[:3]]
    if isinstance(divisor, int | float):
        divisor = torch.full((), divisor, dtype=compute_dtype(logits_dtype or flat.dtype), device=flat.device)
    elif divisor is not None:
        divisor = _count(verb, divisor, flat, compute_dtype(logits_dtype or flat.dtype))
    if any(wants) and reduction != "none" and flat.dtype != torch.float16:
        divisor = divisor if divisor is None else divisor.detach()
        loss, largest, log_sum, predicted, *_ = overload("linear_cross_entropy")(
            *head, target, *numbers, divisor, reduction == "mean", float(label_smoothing), float(z_loss), stats, *way,
            wants,
        )  # fmt: skip
        lse = largest + log_sum if stats else loss
    else:
        logprob, largest, log_sum, total, predicted = overload("linear_token_logprob")(
            *head, target, *numbers, "sum" if label_smoothing else "none", stats, *way
        )
        factors = factors_of(weight, target, ignore_index, logprob.dtype)
        lse = largest + log_sum if stats or z_loss else None
        loss = losses_of(logprob, lse, total, factors, classes, label_smoothing, z_loss)
        if reduction != "none":
            loss = loss.sum()
        if reduction == "mean" and divisor is None:
            loss = loss / ((target != ignore_index).sum() if factors is None else factors.sum())
        elif divisor is not None:
            loss = loss / divisor
    if not stats:
        return _shaped(loss, rows, reduction)
    correct = (predicted == target) & (target != ignore_index)
    return _shaped(CrossEntropyOutput(loss, lse, predicted, correct), rows, reduction)


def _shaped(found: Tensor | CrossEntropyOutput, rows: Any, reduction: str) -> Tensor | CrossEntropyOutput:
    """Losses, and what stats there are, with the dimensions of the rows."""
    if isinstance(found, Tensor):
        return found if reduction != "none" else found.reshape(rows)
    loss = found.loss if reduction != "none" else found.loss.reshape(rows)
    return CrossEntropyOutput(loss, *(each.reshape(rows) for each in found[1:]))


def _all_logits(input: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype | None) -> Tensor:
    """The whole result of the layer. PyTorch's operations have no product that only widens its result."""
    tensors = (t if t is None or dtype is None else t.to(dtype) for t in (input, weight, bias))
    with torch.autocast(input.device.type, enabled=False):
        return F.linear(*tensors)  # type: ignore[arg-type]


def _layer(verb: str, input: Tensor, weight: Any, bias: Any, other: Any) -> tuple[Tensor, Tensor, Tensor | None]:
    """The input, weight and bias of a layer, cast as autocast casts them. Raise unless they fit."""
    given = {"input": input, "linear_weight": weight, "linear_bias": bias}
    for name, value in given.items():
        if value is not None or name == "linear_weight":
            checks.tensor(verb, name, value)
        if is_dtensor(value):
            raise TypeError(
                f"`{verb}`: `{name}` is a DTensor, which is not supported; give the local tensors (`to_local()`, "
                "`full_tensor()`), or make the logits and call the function of logits"
            )
    if weight.numel() == 0 and weight.dim() != 2:
        raise RuntimeError(
            f"`{verb}`: `linear_weight` has no elements, shape {list(weight.shape)}; under DeepSpeed's ZeRO-3 the "
            "parameter is spread over ranks: gather it around the call (`deepspeed.zero.GatheredParameters`)"
        )
    kind = input.device.type
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        input, weight, bias = (
            t if t is None or not t.is_floating_point() or t.dtype == torch.float64 else t.to(dtype)
            for t in (input, weight, bias)
        )
    if input.dtype not in checks.FLOATING:
        raise RuntimeError(
            f"`{verb}`: `input` must be {checks.either(checks.FLOATING)}, got {checks.short(input.dtype)}"
        )
    for name, value in (("linear_weight", weight), ("linear_bias", bias)):
        if value is not None and value.dtype != input.dtype:
            raise RuntimeError(
                f"`{verb}`: `{name}` must have the dtype of `input`, {checks.short(input.dtype)}, got "
                f"{checks.short(value.dtype)}; torch.autocast casts both"
            )
    if input.dim() == 0 or not checks.shaped([weight.shape[0], input.shape[-1]] if weight.dim() else [], weight):
        raise RuntimeError(
            f"`{verb}`: `input` must have shape (..., H) and `linear_weight` (V, H), got {list(input.shape)} and "
            f"{list(weight.shape)}"
        )
    if weight.shape[0] == 0:
        raise RuntimeError(f"`{verb}`: `linear_weight` must have a class, got shape {list(weight.shape)}")
    if not checks.shaped(weight.shape[:1], bias):
        raise RuntimeError(
            f"`{verb}`: `linear_bias` must have shape (V,) = ({weight.shape[0]},), got {tuple(bias.shape)}"
        )
    for name, value in (("linear_weight", weight), ("linear_bias", bias), ("the ids of classes", other)):
        if isinstance(value, Tensor) and value.device != input.device:
            raise RuntimeError(
                f"`{verb}`: expected all tensors to be on the same device, but `{name}` is on {value.device} and "
                f"`input` is on {input.device}"
            )
    return input, weight, bias


def _count(verb: str, divisor: Any, input: Tensor, dtype: torch.dtype) -> Tensor:
    """A divisor that is a tensor, as one number of the compute type."""
    checks.tensor(verb, "divisor", divisor)
    if divisor.numel() != 1:
        raise RuntimeError(f"`{verb}`: `divisor` must be one number, got shape {list(divisor.shape)}")
    return divisor.detach().reshape(()).to(input.device, dtype)  # type: ignore[no-any-return]


def _check_way(verb: str, input: Tensor, logits_dtype: Any, accumulate: Any, chunk_rows: Any) -> None:
    if accumulate not in ACCUMULATE:
        choices = ", ".join(map(repr, ACCUMULATE))
        raise ValueError(f"`{verb}`: `accumulate` must be one of {choices}, got {accumulate!r}")
    if chunk_rows is not None:
        checks.of_kind(verb, "chunk_rows", chunk_rows, checks.INT)
        if chunk_rows < 1:
            raise ValueError(f"`{verb}`: `chunk_rows` must be positive or None, got {chunk_rows}")
    if logits_dtype not in (None, torch.float32, input.dtype):
        raise ValueError(
            f"`{verb}`: `logits_dtype` must be None, torch.float32 or the input's dtype, got {logits_dtype}"
        )


def _by_definition(verb: str, backend: str | None, *tensors: Tensor | None) -> bool:
    """Whether all logits are to be made, by PyTorch's operations. Raise if the backend cannot serve the call."""
    wanted = backend or state.backend
    if wanted is not None:
        check_backend_name(wanted)
        if wanted == "eager":
            return True
        operator(verb, "token_logprob", wanted, *tensors)
    if torch.compiler.is_compiling():
        return False
    if torch._C._are_functorch_transforms_active():
        return True
    return any(
        t is not None and ((type(t) not in PLAIN_TENSORS and is_foreign(t)) or unpack_dual(t).tangent is not None)
        for t in tensors
    )
