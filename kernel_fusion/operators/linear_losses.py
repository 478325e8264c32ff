"""The operators of linear layers with a loss: one call for tracers, a loop over chunks inside.

`linear_token_logprob` gives what `token_logprob` gives of the layer's result, and its backward makes the logits again.
`linear_cross_entropy` is called if a sum or mean of losses needs a gradient, and makes it with the loss, from the same
logits; backward only multiplies it by the incoming gradient.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kernel_fusion.core import arguments, checks
from kernel_fusion.core.spec import compute_dtype
from kernel_fusion.operators.linear_chunks import (
    ACCUMULATE,
    Coefficients,
    Gradients,
    Head,
    Rows,
    row_backward,
    row_forward,
)
from kernel_fusion.operators.schemas import library, overload

_HEAD = "Tensor input, Tensor linear_weight, Tensor? linear_bias, ScalarType? logits_dtype"
_ROWS = "Tensor ids, Tensor? mask, Tensor? temperature, Tensor? weight, float scale, float softcap, int ignore_index"
_WAY = "str accumulate, int chunk_rows"
_GRADIENTS = "Tensor dinput, Tensor dlinear_weight, Tensor dlinear_bias"
_SCHEMAS = {
    "linear_token_logprob": f"({_HEAD}, {_ROWS}, str extra, bool predicts, {_WAY}) -> "
    "(Tensor logprob, Tensor largest, Tensor log_sum, Tensor extra, Tensor predicted)",
    "linear_token_logprob_bwd": f"({_HEAD}, {_ROWS}, Tensor largest, Tensor log_sum, Tensor dlogprob, Tensor? da, "
    f"Tensor? db, Tensor? dc, {_WAY}, bool[3] output_mask) -> ({_GRADIENTS})",
    "linear_cross_entropy": f"({_HEAD}, {_ROWS}, Tensor? divisor, bool mean, float label_smoothing, float z_loss, "
    f"bool predicts, {_WAY}, bool[3] output_mask) -> (Tensor loss, Tensor largest, Tensor log_sum, Tensor predicted, "
    f"{_GRADIENTS})",
    "linear_scaled": f"(Tensor dloss, {_GRADIENTS}) -> ({_GRADIENTS})",
}
_NUM_HEAD, _NUM_ROWS = 4, 7


def losses_of(
    logprob: Tensor,
    lse: Tensor | None,
    total: Tensor,
    factors: Tensor | None,
    classes: int,
    label_smoothing: float,
    z_loss: float,
) -> Tensor:
    """The cross entropy of each row, from the results of `token_logprob`; `factors` are the weights of the targets."""
    losses = -logprob if factors is None else -logprob * factors
    if label_smoothing:
        losses = (1.0 - label_smoothing) * losses - (label_smoothing / classes) * total
    return losses if not z_loss or lse is None else losses + z_loss * lse * lse


def factors_of(weight: Tensor | None, target: Tensor, ignore_index: int, dtype: torch.dtype) -> Tensor | None:
    """The weight of each row's target, 0 for ignored rows. The row operator sees to targets out of range."""
    if weight is None:
        return None
    chosen = weight.detach().to(dtype).take(target.clamp(0, weight.shape[0] - 1))
    return chosen.masked_fill(target == ignore_index, 0.0)


def _coefficients(
    rows: Rows, log_sum: Tensor, largest: Tensor, step: Tensor, classes: int, label_smoothing: float, z_loss: float
) -> Coefficients:
    """The derivatives of `step` times the losses."""
    factors = factors_of(rows.weight, rows.ids, rows.ignore_index, log_sum.dtype)
    one = step.expand(rows.ids.shape)
    dlogprob = -(1.0 - label_smoothing) * (one if factors is None else one * factors)
    da = dc = None
    if label_smoothing:
        dc = -(label_smoothing / classes) * one
        da = -dc * (classes if rows.weight is None else rows.weight.to(dc.dtype).sum())
    if z_loss:
        through = 2.0 * z_loss * (largest + log_sum) * step
        da = through if da is None else da + through
    return Coefficients(dlogprob, da, None, dc)


def _linear_token_logprob(*args: Any) -> tuple[Tensor, ...]:
    head, rows, (extra, predicts, _, chunk_rows) = _parts(args)
    head = head.widened()
    with torch.autocast(head.input.device.type, enabled=False):
        found = [
            row_forward(head.logits(at, slice(None)), rows.at(at), extra, predicts) for at in head.chunks(chunk_rows)
        ]
    return tuple(map(_joined, zip(*found, strict=True)))


def _linear_token_logprob_bwd(*args: Any) -> tuple[Tensor, ...]:
    head, rows, (largest, log_sum, *coefficients, accumulate, chunk_rows, wants) = _parts(args)
    given, dtype = Coefficients(*coefficients), head.weight.dtype
    gradients = Gradients(head, wants, accumulate, chunk_rows)
    head = head.widened()
    with torch.autocast(head.input.device.type, enabled=False):
        for at in head.chunks(chunk_rows) if gradients.reads_rows else ():
            dz = row_backward(head.logits(at, slice(None)), rows.at(at), largest[at], log_sum[at], given.at(at))
            gradients.add(at, dz)
        gradients.walk(head, rows, largest, log_sum, given)
    return gradients.results(dtype)


def _linear_cross_entropy(*args: Any) -> tuple[Tensor, ...]:
    head, rows, (divisor, mean, smoothing, z_loss, predicts, accumulate, chunk_rows, wants) = _parts(args)
    classes, dtype = head.weight.shape[0], head.weight.dtype
    gradients = Gradients(head, wants, accumulate, chunk_rows)
    head = head.widened()
    wide = compute_dtype(head.logits_dtype or head.input.dtype)
    factors = factors_of(rows.weight, rows.ids, rows.ignore_index, wide)
    if mean and divisor is None:
        divisor = (rows.ids != rows.ignore_index).sum() if factors is None else factors.sum()
    step = rows.ids.new_ones((), dtype=wide)
    if divisor is not None:
        step = step / divisor
    extra, options = "sum" if smoothing else "none", (classes, smoothing, z_loss)
    found = []
    with torch.autocast(head.input.device.type, enabled=False):
        for at in head.chunks(chunk_rows):
            here, logits = rows.at(at), head.logits(at, slice(None))
            logprob, largest, log_sum, *others = row_forward(logits, here, extra, predicts)
            found.append((logprob, largest, log_sum, *others))
            if gradients.reads_rows:
                given = _coefficients(here, log_sum, largest, step, *options)
                gradients.add(at, row_backward(logits, here, largest, log_sum, given))
            del logits  # its memory is the next chunk's
        logprob, largest, log_sum, total, predicted = map(_joined, zip(*found, strict=True))
        gradients.walk(head, rows, largest, log_sum, _coefficients(rows, log_sum, largest, step, *options))
    loss = losses_of(logprob, largest + log_sum, total, factors, *options).sum()
    loss = loss if divisor is None else loss / divisor
    return loss, largest, log_sum, predicted, *gradients.results(dtype)


def _linear_scaled(dloss: Tensor, *gradients: Tensor) -> tuple[Tensor, ...]:
    return tuple(_scaled(each, dloss, torch.empty_like(each)) for each in gradients)


def _scaled(gradient: Tensor, factor: Tensor, into: Tensor) -> Tensor:
    """Write a gradient times a number to `into`, in the compute type; a number without dimensions would be rounded."""
    factor = factor.reshape(1)
    # On a CPU, PyTorch makes copies in the compute type, which are kept small.
    pieces = (gradient, into) if gradient.is_cuda or gradient.dim() < 2 else (gradient.split(1024), into.split(1024))
    for source, result in [pieces] if isinstance(pieces[0], Tensor) else zip(*pieces, strict=True):
        torch.mul(source, factor.expand([1] * source.dim()), out=result)
    return into


def _parts(args: Any) -> tuple[Head, Rows, Any]:
    """The arguments of an operator: the layer, the rows, and others."""
    x, weight, bias, logits_dtype, *rest = args
    return Head(x, weight, bias, logits_dtype), Rows(*rest[:_NUM_ROWS]), rest[_NUM_ROWS:]


def _joined(parts: Any) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _checked(name: str, kernel: Callable[..., Any]) -> Callable[..., Any]:
    """An operator that refuses, in a sentence, arguments that are not as the public functions give them."""
    parameters = [argument.split()[-1] for argument in _SCHEMAS[name].split(" -> ")[0].strip("()").split(", ")]

    def serve(*args: Any) -> Any:
        given = dict(zip(parameters, args, strict=True))
        arguments.check(name, given)
        arguments.require(name, [t for t in args if isinstance(t, Tensor)], takes=True)
        wrong = _misfit(**given) if "input" in given else "dloss" if given["dloss"].dim() else None
        if wrong is not None:
            raise RuntimeError(f"kernel_fusion::{name}: `{wrong}` is not as the others need it")
        return kernel(*args)

    return serve


def _misfit(input: Tensor, linear_weight: Tensor, ids: Tensor, **given: Any) -> str | None:
    """The name of an argument whose shape, dtype or value does not fit the others, or None."""
    if input.dim() != 2 or input.dtype not in checks.FLOATING:
        return "input"
    rows, classes = input.shape[0], linear_weight.shape[0] if linear_weight.dim() == 2 else 0
    if linear_weight.dtype != input.dtype or classes == 0 or linear_weight.shape[1] != input.shape[1]:
        return "linear_weight"
    if ids.dtype != torch.int64 or not 1 <= ids.dim() <= 2 or ids.shape[0] != rows:
        return "ids"
    of_row, of_class, wide = [rows], [classes], compute_dtype(given["logits_dtype"] or input.dtype)
    fits = {
        "linear_bias": (of_class, (input.dtype,)),
        "mask": ([rows, classes], (torch.bool,)),
        "temperature": (of_row, checks.FLOATING),
        "weight": (of_class, checks.FLOATING),
        "divisor": ([], (wide, torch.int64)),
        **dict.fromkeys(("largest", "log_sum", "da", "db", "dc"), (of_row, (wide,))),
        "dlogprob": ([*ids.shape], (wide,)),
    }
    for name, (shape, dtypes) in fits.items():
        value = given.get(name)
        if value is not None and (list(value.shape) != shape or value.dtype not in dtypes):
            return name
    if given["logits_dtype"] not in (None, torch.float32, input.dtype) or given["accumulate"] not in ACCUMULATE:
        return "logits_dtype" if given["accumulate"] in ACCUMULATE else "accumulate"
    if given["chunk_rows"] < 0 or given.get("extra", "none") not in ("none", "sum", "entropy"):
        return "chunk_rows" if given["chunk_rows"] < 0 else "extra"
    if len(given.get("output_mask", "...")) != 3:
        return "output_mask"
    return "ids" if "divisor" in given and ids.dim() != 1 else None


# ---- Shapes for tracing ----


def _empty_gradients(input: Tensor, weight: Tensor, bias: Any, wants: Any) -> tuple[Tensor, Tensor, Tensor]:
    return (
        input.new_empty(input.shape if wants[0] else 0),
        weight.new_empty(weight.shape if wants[1] else 0),
        weight.new_empty(weight.shape[0] if wants[2] and bias is not None else 0),
    )


def _meta_token_logprob(input: Tensor, weight: Tensor, _: Any, logits_dtype: Any, ids: Tensor, *rest: Any) -> Any:
    *_, extra, predicts, _, _ = rest
    rows = input.new_empty(input.shape[:-1], dtype=compute_dtype(logits_dtype or input.dtype))
    nothing = rows.new_empty(0)
    predicted = rows if predicts else nothing
    return (
        rows.new_empty(ids.shape),
        rows,
        torch.empty_like(rows),
        torch.empty_like(nothing if extra == "none" else rows),
        torch.empty_like(predicted, dtype=torch.int64),
    )


def _meta_cross_entropy(input: Tensor, weight: Tensor, bias: Any, logits_dtype: Any, *rest: Any) -> Any:
    rows = input.new_empty(input.shape[:-1], dtype=compute_dtype(logits_dtype or input.dtype))
    predicted = rows.new_empty(rows.shape if rest[-4] else 0, dtype=torch.int64)
    return rows.new_empty(()), rows, torch.empty_like(rows), predicted, *_empty_gradients(input, weight, bias, rest[-1])


# ---- Gradients ----


def _keep_token_logprob(ctx: Any, inputs: Any, output: Any) -> None:
    input, weight, bias, logits_dtype, *rows = inputs[: _NUM_HEAD + _NUM_ROWS]
    ids, mask, temperature, class_weight, *ctx.numbers = rows
    ctx.extra, _, *ctx.way = inputs[_NUM_HEAD + _NUM_ROWS :]
    ctx.logits_dtype = logits_dtype
    _, largest, log_sum, extra, predicted = output
    ctx.save_for_backward(input, weight, bias, ids, mask, temperature, class_weight, largest, log_sum, extra)
    ctx.mark_non_differentiable(largest, predicted, *([extra] if ctx.extra == "none" else []))
    ctx.set_materialize_grads(False)


def _token_logprob_bwd(ctx: Any, dlogprob: Any, _: Any, dlog_sum: Any, dextra: Any, __: Any) -> Any:
    input, weight, bias, ids, mask, temperature, class_weight, largest, log_sum, extra = ctx.saved_tensors
    if dlogprob is None:
        dlogprob = log_sum.new_zeros(ids.shape)
    da, db, dc = dlog_sum, None, None
    if dextra is not None and ctx.extra == "sum":
        dc = dextra
        whole = -dc * (weight.shape[0] if class_weight is None else class_weight.to(dc.dtype).sum())
        da = whole if da is None else da + whole
    elif dextra is not None:
        db, through = -dextra, -dextra * extra
        da = through if da is None else da + through
    head, rows = (input, weight, bias, ctx.logits_dtype), (ids, mask, temperature, class_weight, *ctx.numbers)
    wants = list(ctx.needs_input_grad[:3])
    found = overload("linear_token_logprob_bwd")(*head, *rows, largest, log_sum, dlogprob, da, db, dc, *ctx.way, wants)
    return _of_inputs(found, wants, len(ctx.needs_input_grad))


def _keep_cross_entropy(ctx: Any, inputs: Any, output: Any) -> None:
    input, weight, bias, logits_dtype, *rows = inputs[: _NUM_HEAD + _NUM_ROWS]
    *_, predicts, accumulate, chunk_rows, wants = inputs
    ctx.rest = (logits_dtype, rows[4:], [accumulate, chunk_rows], wants)
    _, largest, log_sum, predicted, *gradients = output
    # Only a caller who gets log_sum can send a gradient for it, which reads the layer again.
    again = [input, weight, bias, *rows[:4], largest, log_sum] if predicts else []
    ctx.save_for_backward(*gradients, *again)
    ctx.mark_non_differentiable(largest, predicted, *gradients)
    ctx.set_materialize_grads(False)


def _cross_entropy_bwd(ctx: Any, dloss: Any, _: Any, dlog_sum: Any, *__: Any) -> Any:
    logits_dtype, numbers, way, wants = ctx.rest
    saved = ctx.saved_tensors  # read once, because they may be overwritten
    gradients: list[Any] = list(saved[:3])
    if dloss is not None and _may_overwrite(gradients):
        gradients = [_scaled(each, dloss, each) for each in gradients]
    elif dloss is not None:
        gradients = overload("linear_scaled")(dloss, *gradients)
    else:
        gradients = [None] * 3
    if dlog_sum is not None:
        input, weight, bias, *rows, largest, log_sum = saved[3:]
        nothing = torch.zeros_like(log_sum)
        others = overload("linear_token_logprob_bwd")(
            input,
            weight,
            bias,
            logits_dtype,
            *rows,
            *numbers,
            largest,
            log_sum,
            nothing,
            dlog_sum,
            None,
            None,
            *way,
            wants,
        )
        gradients = [b if a is None else a + b for a, b in zip(gradients, others, strict=True)]
    return _of_inputs(gradients, wants, len(ctx.needs_input_grad))


def _may_overwrite(gradients: Any) -> bool:
    """Whether this backward pass is the last that can read the saved gradients, and nothing records it."""
    return (
        not torch.is_grad_enabled()
        and not torch.compiler.is_compiling()
        and all(type(each) is Tensor for each in gradients)
        and not torch._C._autograd._get_current_graph_task_keep_graph()
    )


def _of_inputs(gradients: Any, wants: Any, count: int) -> tuple[Tensor | None, ...]:
    """The gradients of all arguments of an operator."""
    found = [each if wanted else None for each, wanted in zip(gradients, wants, strict=True)]
    return *found, *[None] * (count - len(found))


def _keep_nothing(ctx: Any, inputs: Any, output: Any) -> None:
    """Keep nothing for a backward that raises."""


def _refuse(*_: Any) -> None:
    raise RuntimeError(
        "the gradient of a linear loss has no gradient; for a second derivative call the function with "
        "backend='eager', which makes all logits"
    )


def _first_recorded(name: str, backward: Callable[..., Any], keep: Callable[..., Any]) -> Callable[..., Any]:
    """The kernel of the first call above autograd, which registers the backward and calls again.

    PyTorch makes classes for a backward. For all of these together they would take a seventh of the time of import.
    """

    def serve(*args: Any) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PyTorch warns that this kernel is replaced
            torch.library.register_autograd(f"kernel_fusion::{name}", backward, setup_context=keep, lib=library)
        return overload(name)(*args)

    return serve


_FUNCTIONS: dict[str, tuple[Any, Any, Any, Any]] = {
    "linear_token_logprob": (_linear_token_logprob, _meta_token_logprob, _token_logprob_bwd, _keep_token_logprob),
    "linear_token_logprob_bwd": (
        _linear_token_logprob_bwd,
        lambda input, weight, bias, *rest: _empty_gradients(input, weight, bias, rest[-1]),
        _refuse,
        _keep_nothing,
    ),
    "linear_cross_entropy": (_linear_cross_entropy, _meta_cross_entropy, _cross_entropy_bwd, _keep_cross_entropy),
    "linear_scaled": (
        _linear_scaled,
        lambda _, *gradients: tuple(map(torch.empty_like, gradients)),
        _refuse,
        _keep_nothing,
    ),
}
for _name, (_kernel, _meta, _backward, _keep) in _FUNCTIONS.items():
    library.define(_name + _SCHEMAS[_name], tags=torch.Tag.pt2_compliant_tag)
    library.impl(_name, _checked(_name, _kernel), "CompositeExplicitAutograd")
    library.impl(_name, _checked(_name, _meta), "Meta")
    library.impl(_name, _first_recorded(_name, _backward, _keep), "Autograd")
