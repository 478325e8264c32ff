"""The body of the norms: one way from the arguments of a verb to a call of the operator `staged_row_norm`.

The ten verbs differ in which stages they have, and in what is made of their tensors before the call (`Arrange`). All
else is here: it checks names, takes arrays of other libraries, resolves sizes, chooses the backend, quantises the
result where that is asked for, and raises errors that name the argument at fault.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from kernel_fusion.backends import eager
from kernel_fusion.backends.availability import PLAIN_TENSORS
from kernel_fusion.config import state
from kernel_fusion.core import checks
from kernel_fusion.core.activations import IDENTITY
from kernel_fusion.core.quantize import Quantize
from kernel_fusion.core.spec import VERBS, rounding_for
from kernel_fusion.core.stages import ARGUMENTS
from kernel_fusion.functional import interop, quantized
from kernel_fusion.functional.results import NormOutput
from kernel_fusion.operators import schemas
from kernel_fusion.operators.dispatch import operator

# normalized_shape, weight, bias, eps, weight_offset, out_dtype.
Norm = tuple[int | Sequence[int], Tensor | None, Tensor | None, float | None, float, torch.dtype | Quantize | None]
# From a verb's name, its rows, the arguments of the norm, its options and its stages, which it may add to: the tensors
# that decide on the backend, and the operator's first arguments, up to and including `weight_offset`.
Arrange = Callable[
    [str, dict[str, Any], Norm, dict[str, Any], dict[str, Any]], tuple[Sequence[Tensor | None], tuple[Any, ...]]
]

_DEFAULTS = tuple(each.default for each in ARGUMENTS)
_PLACES = {each.name: place for place, each in enumerate(ARGUMENTS)}


def _rounding(verb: str, _: str, value: str) -> str:
    checks.rounding(verb, value)
    return value


def _flag(verb: str, name: str, value: bool) -> bool:
    checks.of_kind(verb, name, value, checks.BOOL)
    return value


# What a call without a stage gives for its option, by the name of the option, and the check of other values.
_OPTIONS: dict[str, tuple[Any, Callable[[str, str, Any], Any]]] = {
    each.name: (None, checks.activation) if each.default == IDENTITY else (each.default, _rounding)
    for each in ARGUMENTS
    if each.type == "str"
} | {"gate_first": (False, _flag)}


def staged(
    verb: Callable[..., Any],
    rows: dict[str, Any],
    norm: Norm,
    options: dict[str, Any],
    backend: str | None,
    *,
    arrange: Arrange,
    dropout_p: float = 0.0,
    group: Any = None,
) -> tuple[Tensor, Tensor]:
    """A norm with stages around it: y and h, a NormOutput if there is a residual. Making one takes 1 µs.

    Args:
        verb: the function that the user called.
        rows: its arguments before `normalized_shape`, which must be tensors, by name.
        norm: the arguments that all norms have.
        options: its others by name, as they were given, without those below.
        backend, group: as the user gave them.
        arrange: what makes the operator's tensors of these.
        dropout_p: the probability of an element of the input to be dropped, 0 outside training.
    """
    name, input = verb.__name__, rows["input"]
    stages = {}
    for option, value in options.items():
        if option in _OPTIONS:
            absent, check = _OPTIONS[option]
            if value is not absent:
                stages[option] = check(name, option, value)
    if not interop.is_tensor(input):
        return _served(verb, rows, norm, options, {"dropout_p": dropout_p, "group": group, "backend": backend})
    for row, value in rows.items():
        if value is None:
            without = name.removeprefix(VERBS[row])
            raise TypeError(f"`{name}`: `{row}` must be a tensor, got None; without one the verb is `{without}`")
    try:
        tensors, args = arrange(name, rows, norm, options, stages)
        if dropout_p > 0.0:
            stages |= {"dropout_p": dropout_p, "seed": eager.draw_seed(input.device)}
        if "rounding" in stages and rounding_for("hf", (args[0] if args[1] is None else args[1]).dtype) == "once":
            del stages["rounding"]
        out_dtype = norm[5]
        plain = None if isinstance(out_dtype, Quantize) else out_dtype
        args += plain, name.endswith("rms_norm")
        if stages:  # each default that is passed costs 0.2 µs, so those at the end are left out
            given, count = [*_DEFAULTS], 0
            for stage, value in stages.items():
                place = _PLACES[stage]
                given[place] = value
                count = max(count, place + 1)
            args += tuple(given[:count])
        if isinstance(out_dtype, Quantize):
            if group is not None:
                raise checks.refusal(name, "out_dtype", "group")
            both: Any = quantized.norm(name, out_dtype, backend, args, stages.get("gate"), input.shape)
        else:
            serve = operator(name, "staged_row_norm", backend, *tensors)
            if group is not None:
                from kernel_fusion.distributed import hidden

                serve = hidden.operator_of_columns(name, backend or state.backend, group, input)
            both = serve(*args)
        return NormOutput(*both) if "residual" in rows else both
    except checks.REFUSALS as error:
        explain_norm(name, error, rows, norm, **options, group=group)
        raise


def _served(
    verb: Callable[..., Any], rows: dict[str, Any], norm: Norm, options: dict[str, Any], others: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """A call whose input is no tensor; `others` are options that only some verbs have."""
    known = inspect.signature(verb).parameters
    options = options | {name: value for name, value in others.items() if name in known}
    result = served(verb, rows.values(), norm, **options)
    return result if "residual" in rows else (result, rows["input"])


def served(verb: Callable[..., Any], rows: Any, norm: Norm, **options: Any) -> Any:
    """A call of a verb whose first argument is no tensor; `rows` come before the normalised sizes."""
    names = "weight", "bias", "eps", "weight_offset", "out_dtype"
    return interop.served(verb, *rows, norm[0], **dict(zip(names, norm[1:], strict=True)), **options)


def as_given(
    verb: str, rows: dict[str, Any], norm: Norm, options: dict[str, Any], stages: dict[str, Any]
) -> tuple[Sequence[Tensor | None], tuple[Any, ...]]:
    """An `Arrange` that takes all tensors as they are."""
    input, residual = rows["input"], rows.get("residual")
    num_dims, eps = num_normalized_dims(input, norm[0]), norm[3]
    if not num_dims:
        shape, eps = resolved(verb, input, norm)
        num_dims = len(shape)
    elif eps is None and verb.endswith("rms_norm"):
        eps = schemas.default_eps(input)
    return (input, residual), (input, residual, num_dims, norm[1], norm[2], eps, norm[4])


def sizes(normalized_shape: int | Sequence[int]) -> tuple[int, ...]:
    """The normalised sizes, of one or several dimensions."""
    return (normalized_shape,) if isinstance(normalized_shape, int) else tuple(normalized_shape)


def num_normalized_dims(input: Tensor, normalized_shape: int | Sequence[int]) -> int:
    """How many dimensions `normalized_shape` has, or 0 where anything about the call needs a closer look."""
    if type(input) not in PLAIN_TENSORS or input.is_nested:
        return 0
    shape = input.shape
    expected = (normalized_shape,) if isinstance(normalized_shape, int) else normalized_shape
    # One dimension, the usual case, without slicing the shape.
    if len(expected) == 1:
        return 1 if shape and isinstance(expected[0], int) and shape[-1] == expected[0] else 0
    return len(expected) if ends_with(input, expected) else 0


def ends_with(input: Tensor, shape: Sequence[int]) -> bool:
    """Whether the input's last dimensions are these."""
    integers = all(isinstance(size, (int, torch.SymInt)) for size in shape)
    return integers and 0 < len(shape) <= input.dim() and input.shape[input.dim() - len(shape) :] == tuple(shape)


def resolved(verb: str, input: Tensor, norm: Norm, affine: bool = False) -> tuple[tuple[int, ...], float | None]:
    """The normalised sizes and eps; raises, in PyTorch's words, if input or, with `affine`, parameters have others."""
    normalized_shape, weight, bias, eps, _, _ = norm
    shape, rms = sizes(normalized_shape), verb.endswith("rms_norm")
    fits = num_normalized_dims(input, shape) or ends_with(input, shape)
    if not fits or (affine and not checks.shaped(shape, weight, bias)):
        eager.pytorch_row_norm(input, shape, weight, bias, eps, 0.0, None, rms)
    return shape, schemas.default_eps(input) if eps is None and rms else eps


# The options that are tensors, and those whose kind `checks.explain` knows.
_TENSORS, _EXPLAINED = ("scale", "shift", "gate"), ("group", "group_size")


def explain_norm(verb: str, error: Exception, rows: dict[str, Any], norm: Norm, **options: Any) -> None:
    """Raise a better error than `error`, if an argument of the norm explains it; `rows` are its tensors by name."""
    normalized_shape, weight, bias, eps, weight_offset, out_dtype = norm
    tensors = rows | {name: options[name] for name in _TENSORS if name in options} | {"weight": weight, "bias": bias}
    others = {name: options[name] for name in _EXPLAINED if name in options}
    others |= {"normalized_shape": normalized_shape, "weight_offset": weight_offset}
    if eps is not None or not verb.endswith("rms_norm"):  # where None is a number
        others["eps"] = eps
    checks.explain(verb, error, tensors, out_dtype=out_dtype, **others)
