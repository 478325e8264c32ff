"""Losses over classes, such as the tokens of a vocabulary."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernel_fusion.backends import eager
from kernel_fusion.config import check_backend_name, state
from kernel_fusion.core import checks
from kernel_fusion.core.losses import NOTHING_IGNORED
from kernel_fusion.core.spec import compute_dtype
from kernel_fusion.errors import BackendUnavailableError
from kernel_fusion.functional import interop
from kernel_fusion.functional.results import CrossEntropyOutput, TokenLogprobOutput
from kernel_fusion.operators.dispatch import expandable, operator
from kernel_fusion.operators.linear_losses import factors_of

__all__ = ["cross_entropy", "token_logprob"]

_REDUCTIONS = ("mean", "sum", "none")


def cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    *,
    z_loss: float = 0.0,
    softcap: float | None = None,
    scale: float = 1.0,
    divisor: float | Tensor | None = None,
    stats: bool = False,
    backend: str | None = None,
) -> Tensor | CrossEntropyOutput:
    r"""Cross entropy of logits and targets, in one read of the logits, and in backward one read and one write.

    .. math::
        z = \mathrm{cap}(\mathrm{scale} \cdot x), \qquad \mathrm{cap}(v) = c \tanh(v / c), \qquad
        \mathrm{lse} = \log \sum_j e^{z_j}

        l = (1 - \alpha)\, w_t\, (\mathrm{lse} - z_t) + \frac{\alpha}{C} \sum_j w_j\, (\mathrm{lse} - z_j)
        + \zeta\, \mathrm{lse}^2

    Arguments and shapes are those of :func:`torch.nn.functional.cross_entropy`. Autograd keeps the logits and two
    numbers per row; neither the logits nor an incoming gradient is written.

    Args:
        input: x, the logits of C classes: (C), (N, C) or (N, C, d1, ...); float16, bfloat16, float32 or float64. Rows
            (N, C) are read where they lie, also a part of the columns of a larger tensor. From (N, C, d1, ...) a copy
            is made in which a row's classes lie side by side.
        target: the class t of each row, integers of the input's shape without C. Or probabilities of the classes,
            floating point of the input's shape: these are computed by PyTorch's operations.
        weight: w, (C,), a factor for each class; it has no gradient.
        ignore_index: rows with this target count for nothing, even if they have a NaN.
        reduction: "mean" over the rows that count, with a weight divided by the sum of w_t; "sum"; or "none".
        label_smoothing: alpha, between 0 and 1.
        z_loss: zeta, the factor of the squared lse, which is in the loss of every row that counts, and so in its mean.
        softcap: c, a positive number; None leaves scale * x as it is.
        scale: a factor.
        divisor: a number or a tensor that "mean" divides the sum by, instead of the rows that count: for a batch that
            comes in pieces, the count of the whole batch.
        stats: also return lse, the predicted classes and whether they are right, from the same read. For rows that
            are ignored they are 0, -1 and False.
        backend: "cuda", "cpu", "eager", or None for the automatic choice. "triton" has no kernels of this function, so
            on GPUs of other makers PyTorch's operations compute it.

    Returns:
        The loss in float32 (float64 for float64), which is also the compute type; with `stats` a
        :class:`CrossEntropyOutput`. If no row counts, the mean is NaN, the sum 0, and the gradient 0.

    Raises:
        IndexError: a target is no class. On a GPU the loss and the gradient of such a row are NaN instead, because
            the host does not wait for the targets.
        RuntimeError: shapes, dtypes or devices that don't fit.
        ValueError: an option out of its range; `divisor` without "mean"; an unknown `backend`.
        BackendUnavailableError: `backend` was given and cannot serve this call.

    Example:
        >>> import torch, kernel_fusion as kf
        >>> logits, target = torch.randn(4, 10), torch.tensor([1, 9, -100, 0])
        >>> torch.allclose(kf.cross_entropy(logits, target), torch.nn.functional.cross_entropy(logits, target))
        True
    """
    if not interop.is_tensor(input):
        options: dict[str, Any] = {"z_loss": z_loss, "softcap": softcap, "scale": scale, "divisor": divisor}
        options |= {"stats": stats, "backend": backend}
        return interop.served(  # type: ignore[no-any-return]
            cross_entropy, input, target, weight, ignore_index, reduction, label_smoothing, **options
        )
    plain = weight is None and softcap is None and divisor is None and label_smoothing == 0.0 and z_loss == 0.0
    if not (plain and _is_usual(input, target, ignore_index, reduction, scale)):
        numbers = (ignore_index, reduction, label_smoothing, z_loss, softcap, scale, divisor)
        check("cross_entropy", input, target, weight, *numbers)
        target = target if target.is_floating_point() else target.to(torch.int64)
    soft = target.is_floating_point()
    if input.dim() > 2:
        input, target = input.movedim(1, -1), target.movedim(1, -1) if soft else target
    cap = 0.0 if softcap is None else float(softcap)
    factor = None
    if soft:
        gain, largest, log_sum, predicted = _of_probabilities(
            input, target, weight, scale, cap, label_smoothing, backend
        )
    else:
        if weight is not None:
            weight = weight.detach()
            factor = factors_of(weight, target, ignore_index, compute_dtype(input.dtype))
        extra, of_extra = ("none", None) if label_smoothing == 0.0 else ("sum", weight)
        call = operator("cross_entropy", "token_logprob", backend, input, weight)
        gain, largest, log_sum, total, predicted = call(
            input, target, None, None, of_extra, scale, cap, ignore_index, extra, stats
        )
        gain = gain if factor is None else gain * factor
        if label_smoothing != 0.0:
            gain = (1.0 - label_smoothing) * gain + (label_smoothing / input.shape[-1]) * total
    lse = largest + log_sum if stats or z_loss != 0.0 else gain
    if z_loss != 0.0:
        gain = gain - z_loss * lse.square()
    # The sign changes last, since each operation costs a call of a small loss as much as the kernel does.
    loss = _reduced(gain, target, factor, ignore_index, reduction, divisor)
    if not stats:
        return loss
    right = predicted == target.argmax(-1) if soft else (predicted == target) & (target != ignore_index)
    return CrossEntropyOutput(loss, lse, predicted, right)


def token_logprob(
    logits: Tensor,
    ids: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    softcap: float | None = None,
    scale: float = 1.0,
    mask: Tensor | None = None,
    entropy: bool = False,
    backend: str | None = None,
) -> Tensor | TokenLogprobOutput:
    r"""Log-probabilities of chosen classes, such as the tokens of a rollout, in one read of the logits.

    .. math::
        z = \mathrm{cap}(\mathrm{scale} \cdot x) / T, \qquad \mathrm{cap}(v) = c \tanh(v / c), \qquad
        \log p_j = (z_j - \max z) - \log \sum_k e^{z_k - \max z}, \qquad H = -\sum_j p_j \log p_j

    Autograd keeps the logits and two numbers per row, and entropy; backward reads the logits once and writes their
    gradient. Neither the logits nor an incoming gradient is written.

    Args:
        logits: x, (..., V); float16, bfloat16, float32 or float64. Rows are read where they lie if the classes of a row
            lie side by side.
        ids: the classes, integers of shape (...), or (..., K) for K classes of each row.
        temperature: T, a positive number, or a tensor of one for each row, which broadcasts to (...). It has no
            gradient.
        softcap: c, a positive number; None leaves scale * x as it is.
        scale: a factor.
        mask: boolean, broadcast to the logits. A class where it is False has probability 0: it is left out of the sum
            and of the entropy, its log-probability is -inf, and no gradient flows to it.
        entropy: also return H of each row. It is differentiable, and finite also beside logits of -inf.
        backend: "cuda", "cpu", "eager", or None for the automatic choice. "triton" has no kernels of this function.

    Returns:
        The log-probabilities in float32 (float64 for float64), which is also the compute type, with the shape of
        `ids`; with `entropy` a :class:`TokenLogprobOutput`. Equal logits give equal bits, in any batch, with and
        without a gradient, and with and without `entropy`.

    Raises:
        IndexError: an id is no class. On a GPU the log-probability and the gradient of such a row are NaN instead,
            because the host does not wait for the ids.
        RuntimeError: shapes, dtypes or devices that don't fit.
        ValueError: an option out of its range; an unknown `backend`.
        BackendUnavailableError: `backend` was given and cannot serve this call.

    Example:
        >>> import torch, kernel_fusion as kf
        >>> logits, ids = torch.randn(2, 5, 10), torch.randint(10, (2, 5))
        >>> chosen = kf.token_logprob(logits, ids)
        >>> torch.allclose(chosen, logits.log_softmax(-1).gather(-1, ids[..., None])[..., 0], atol=1e-6)
        True
    """
    verb = "token_logprob"
    if not interop.is_tensor(logits):
        options: dict[str, Any] = {"temperature": temperature, "softcap": softcap, "scale": scale, "mask": mask}
        return interop.served(token_logprob, logits, ids, **options, entropy=entropy, backend=backend)  # type: ignore[no-any-return]
    _check_logits(verb, "logits", logits, {"scale": scale}, softcap)
    checks.tensor(verb, "ids", ids)
    rows, cap = logits.shape[:-1], 0.0 if softcap is None else float(softcap)
    if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        raise RuntimeError(f"`{verb}`: `ids` must be of integers, got {checks.short(ids.dtype)}")
    if not checks.shaped(rows, ids if ids.dim() < logits.dim() or not ids.shape[-1] else ids.select(-1, 0)):
        raise RuntimeError(
            f"`{verb}`: `ids` must have shape {list(rows)} or {[*rows, 'K']} for `logits` of shape "
            f"{list(logits.shape)}, got {list(ids.shape)}"
        )
    of_rows = None
    if isinstance(temperature, Tensor):
        of_rows = _of_rows(verb, temperature, logits)
    else:
        checks.of_kind(verb, "temperature", temperature, checks.NUMBER)
        if not temperature > 0.0:
            raise ValueError(f"`{verb}`: `temperature` must be positive, got {temperature}")
        scale, cap = scale / temperature, cap / temperature
    if mask is not None:
        checks.mask(verb, mask)
        if mask.dtype != torch.bool:
            raise RuntimeError(f"`{verb}`: `mask` must be boolean, got {checks.short(mask.dtype)}")
        mask = checks.expanded_mask(verb, expandable(mask), logits.shape)
    _one_device(verb, "logits", logits, ids=ids, mask=mask)
    call = operator(verb, "token_logprob", backend, logits, of_rows)
    extra, ids = "entropy" if entropy else "none", ids.to(torch.int64)
    logprob, _, _, spread, _ = call(logits, ids, mask, of_rows, None, scale, cap, NOTHING_IGNORED, extra, False)
    return TokenLogprobOutput(logprob, spread) if entropy else logprob


def _reduced(
    gain: Tensor,
    target: Tensor,
    factor: Tensor | None,
    ignore_index: int,
    reduction: str,
    divisor: float | Tensor | None,
) -> Tensor:
    """The loss of rows whose losses are `-gain`."""
    if reduction == "none":
        return -gain
    total = gain.sum()
    if reduction == "sum":
        return -total
    if divisor is not None:
        return total / -divisor
    if factor is not None:
        return total / -factor.sum()
    if target.is_floating_point():
        return total / -gain.numel()
    return total / ((target == ignore_index).sum() - target.numel())


def _of_rows(verb: str, temperature: Tensor, logits: Tensor) -> Tensor:
    """The temperatures of all rows."""
    rows = logits.shape[:-1]
    if not temperature.is_floating_point():
        raise RuntimeError(f"`{verb}`: `temperature` must be floating point, got {checks.short(temperature.dtype)}")
    _one_device(verb, "logits", logits, temperature=temperature)
    try:
        return expandable(temperature).detach().expand(rows)  # type: ignore[no-any-return]
    except RuntimeError as error:
        raise RuntimeError(
            f"`{verb}`: `temperature` must broadcast to the rows of `logits`, {list(rows)}, got "
            f"{list(temperature.shape)}"
        ) from error


def _of_probabilities(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    scale: float,
    softcap: float,
    smoothing: float,
    backend: str | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Minus the losses of rows whose targets are probabilities, m, log s and the likeliest classes."""
    check_backend_name(backend)
    wanted = backend or state.backend
    if wanted is not None and (reason := checks.without_kernels("probabilities", wanted)):
        raise BackendUnavailableError(f"`cross_entropy`: backend {wanted!r} was requested, but {reason}")
    z = eager.logits(logits, scale, softcap)
    largest, wide = z.detach().amax(-1), target.to(z.dtype)
    if smoothing != 0.0:
        wide = wide * (1.0 - smoothing) + smoothing / z.shape[-1]
    if weight is not None:
        wide = wide * weight.detach().to(z.dtype)
    log_sum = torch.logsumexp(z - largest.unsqueeze(-1), -1)
    return (wide * torch.log_softmax(z, -1)).sum(-1), largest, log_sum, z.argmax(-1)


def _is_usual(input: Tensor, target: Any, ignore_index: Any, reduction: Any, scale: Any) -> bool:
    """Whether these arguments need no further checks."""
    return (
        isinstance(target, Tensor)
        and input.dim() == 2
        and input.dtype in checks.FLOATING
        and input.shape[1] > 0
        and target.dim() == 1
        and target.dtype == torch.int64
        and target.device == input.device
        and target.shape[0] == input.shape[0]
        and type(ignore_index) is int
        and type(scale) is float
        and reduction in _REDUCTIONS
    )


def check(
    verb: str,
    input: Tensor,
    target: Any,
    weight: Any,
    ignore_index: Any,
    reduction: Any,
    label_smoothing: Any,
    z_loss: Any,
    softcap: Any,
    scale: Any,
    divisor: Any,
) -> None:
    """Raise unless the arguments fit."""
    checks.tensor(verb, "target", target)
    numbers = {"label_smoothing": label_smoothing, "z_loss": z_loss, "scale": scale}
    checks.of_kind(verb, "ignore_index", ignore_index, checks.INT)
    if reduction not in _REDUCTIONS:
        choices = ", ".join(map(repr, _REDUCTIONS))
        raise ValueError(f"`{verb}`: `reduction` must be one of {choices}, got {reduction!r}")
    if divisor is not None and reduction != "mean":
        raise ValueError(f"`{verb}`: `divisor` goes with reduction='mean', got {reduction!r}")
    classes = -1 if input.dim() == 1 else 1
    _check_logits(verb, "input", input, numbers, softcap, classes)
    if not 0.0 <= label_smoothing <= 1.0:
        raise ValueError(f"`{verb}`: `label_smoothing` must be between 0 and 1, got {label_smoothing}")
    rows = [*input.shape[:-1]] if input.dim() <= 2 else [input.shape[0], *input.shape[2:]]
    expected = list(input.shape) if target.is_floating_point() else rows
    if target.is_complex() or target.dtype == torch.bool:
        raise RuntimeError(
            f"`{verb}`: `target` must be of integers or floating point, got {checks.short(target.dtype)}"
        )
    if not checks.shaped(expected, target):
        raise RuntimeError(
            f"`{verb}`: `target` must have shape {expected} for an `input` of shape {list(input.shape)}, got "
            f"{list(target.shape)}"
        )
    _one_device(verb, "input", input, target=target, weight=weight)
    if weight is not None and not checks.shaped([input.shape[classes]], weight):
        raise RuntimeError(
            f"`{verb}`: `weight` must have shape (C,) = ({input.shape[classes]},), got {tuple(weight.shape)}"
        )


def _check_logits(
    verb: str, name: str, logits: Tensor, numbers: dict[str, Any], softcap: Any, classes: int = -1
) -> None:
    """Raise unless the logits and the numbers that change them fit; `classes` is their dimension."""
    for each, value in numbers.items():
        checks.of_kind(verb, each, value, checks.NUMBER)
    if softcap is not None:
        checks.of_kind(verb, "softcap", softcap, checks.NUMBER)
        if not softcap > 0.0:
            raise ValueError(f"`{verb}`: `softcap` must be positive or None, got {softcap}")
    if logits.dtype not in checks.FLOATING:
        raise RuntimeError(
            f"`{verb}`: `{name}` must be {checks.either(checks.FLOATING)}, got {checks.short(logits.dtype)}"
        )
    if logits.dim() == 0 or logits.shape[classes] == 0:
        raise RuntimeError(f"`{verb}`: `{name}` must have a class, got shape {list(logits.shape)}")


def _one_device(verb: str, first: str, logits: Tensor, **others: Tensor | None) -> None:
    for name, other in others.items():
        if other is not None and other.device != logits.device:
            raise RuntimeError(
                f"`{verb}`: expected all tensors to be on the same device, but `{name}` is on {other.device} and "
                f"`{first}` is on {logits.device}"
            )
