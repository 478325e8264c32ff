"""Checks of the public functions' arguments that PyTorch does not make: mixed dtypes, `weight_offset`, `out_dtype`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.overrides
from torch import Tensor

from kernel_fusion.core.activations import ACTIVATIONS, IDENTITY
from kernel_fusion.core.quantize import LARGEST, Quantize
from kernel_fusion.core.spec import ROUNDINGS, ROWS, VERBS
from kernel_fusion.core.stages import NormCall
from kernel_fusion.core.symbols import alike, broadcasts

FLOATING = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_MASKS = (torch.bool, *FLOATING)

# The error of an option that does not go with another argument, in the words of every function.
CONDITIONS = {
    ("weight_offset", "weight"): "needs a `weight`",
    ("group_size", "normalized_shape"): "goes with a `normalized_shape` of one dimension",
    ("out_dtype", "normalized_shape"): "with a scale per row or block goes with a `normalized_shape` of one dimension",
    ("out_dtype", "group"): "quantises whole rows, and does not go with a `group`",
}

# The reason that a backend lacks a function or an option.
WITHOUT_KERNELS = {
    "group": dict.fromkeys(("triton", "cpu"), "it has no kernels for rows that are spread over ranks"),
    "group_norm": dict.fromkeys(("triton", "cpu"), "it has no kernels for group norms"),
    "cross_entropy": {"triton": "it has no kernels for losses"},
    "linear_cross_entropy": {"triton": "it has no kernels for losses"},
    "token_logprob": {"triton": "it has no kernels for log-probabilities"},
    "probabilities": dict.fromkeys(("cuda", "triton", "cpu"), "it has no kernels for targets that are probabilities"),
}


def refusal(verb: str, option: str, other: str, got: str = "") -> ValueError:
    """The error that says that `option` does not go with `other`."""
    return ValueError(f"`{verb}`: `{option}` {CONDITIONS[option, other]}{got}")


def without_kernels(what: str, backend: str) -> str | None:
    """The reason that `backend` has no kernels for a function or option, or None if it has them."""
    return WITHOUT_KERNELS.get(what, {}).get(backend)


def given(verb: str, argument: str, value: object) -> None:
    """Raise if an argument is None."""
    if value is None:
        raise TypeError(f"`{verb}`: `{argument}` must be a tensor, got None")


def tensor(verb: str, argument: str, value: object) -> None:
    """Raise unless an argument is a tensor or a `torch.fx` proxy."""
    if not torch.overrides.is_tensor_like(value):
        raise TypeError(f"`{verb}`: `{argument}` must be a tensor, got {described(value)}")


def matrices(verb: str, **tensors: object) -> None:
    """Raise unless all tensors are floating-point and have at least two dimensions."""
    for name, value in tensors.items():
        if not isinstance(value, Tensor):
            tensor(verb, name, value)
        elif value.dim() < 2:
            raise RuntimeError(f"`{verb}`: `{name}` must have at least two dimensions, got shape {list(value.shape)}")
        elif value.dtype not in FLOATING:  # PyTorch would round the scale to an integer
            raise RuntimeError(f"`{verb}`: `{name}` must be {either(FLOATING)}, got {short(value.dtype)}")


def one_device(first: Tensor, *others: Tensor | None) -> None:
    """Raise, as pointwise operations do, unless all tensors are on one device. CPU numbers go with any device.

    PyTorch's matrix products and in-place masking do not check tensors on "meta".
    """
    for other in others:
        if other is None or other.device == first.device or (other.dim() == 0 and other.device.type == "cpu"):
            continue
        torch.add(first.new_empty(1), other.new_empty(1))  # raises in PyTorch's words


def mask(verb: str, mask: Tensor) -> None:
    """Raise unless the mask is boolean or floating point."""
    tensor(verb, "mask", mask)
    if mask.dtype not in _MASKS:
        raise RuntimeError(
            f"`{verb}`: `mask` must be boolean or floating point, got {short(mask.dtype)}; `mask.bool()` keeps what "
            "is not 0"
        )


def expanded_mask(verb: str, mask: Tensor, shape: Sequence[int]) -> Tensor:
    """The mask broadcast to `shape`, as a view. Raise if it cannot be broadcast."""
    try:
        return torch.broadcast_to(mask, shape)
    except RuntimeError as error:
        if _broadcast(mask.shape, shape):
            raise  # the error is about the memory of the mask
        text = f"`{verb}`: `mask` must broadcast to shape {list(shape)}, got {list(mask.shape)}: {error}"
        raise RuntimeError(text) from error


def not_float8(operation: str, *dtypes: torch.dtype) -> None:
    """Raise, in PyTorch's words, if one of the dtypes is a float8."""
    for dtype in dtypes:
        if dtype.is_floating_point and dtype.itemsize == 1:
            raise NotImplementedError(f'"{operation}" not implemented for {short(dtype)!r}')


def shaped(shape: Sequence[Any], *tensors: Tensor | None) -> bool:
    """Whether all these tensors, as far as they are given, have this shape."""
    return all(t is None or alike(t.shape, shape) for t in tensors)


def parameter_shape(input: Tensor, num_dims: int, grouped: bool, *parameters: Tensor | None) -> list[int]:
    """The shape that parameters must have: the normalised shape, with the dimensions of groups before it."""
    shape = list(input.shape[max(0, input.dim() - num_dims) :])
    given = next((p for p in parameters if p is not None), None)
    if not grouped or given is None or not num_dims <= given.dim() <= input.dim():
        return shape
    leading = zip(given.shape, input.shape[input.dim() - given.dim() : input.dim() - num_dims], strict=False)
    fits = all(broadcasts(size, rows) for size, rows in leading)
    return list(given.shape) if fits and alike(given.shape[given.dim() - num_dims :], shape) else shape


def row_norm(
    verb: str,
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    weight_offset: float,
    out_dtype: torch.dtype | None,
) -> None:
    """Raise unless devices and dtypes fit; `weight_offset` needs a weight."""
    companions(verb, input, weight=weight, bias=bias)
    _check_mix(verb, "out_dtype", out_dtype, input.dtype)
    if weight is None and weight_offset != 0.0:
        raise refusal(verb, "weight_offset", "weight", f", got weight_offset={weight_offset} without one")


def staged_row_norm(c: NormCall) -> None:
    """Raise unless the tensors and stages of a call fit. Only the shape of the other row is checked here."""
    rows = {"residual": c.residual} | {name: getattr(c.stages, name) for name in ROWS}
    prefixes = [VERBS[name] for name, row in rows.items() if row is not None]
    verb = "".join(prefixes[-1:]) + ("rms_norm" if c.rms else "layer_norm")
    row_norm(verb, c.input, c.weight, c.bias, c.weight_offset, c.out_dtype)
    for name, row in rows.items():
        other_row(verb, name, c.input, row)
    companions(verb, c.input, residual_gate=c.stages.residual_gate)


def companions(verb: str, input: Tensor, **others: Tensor | None) -> None:
    """Raise unless the others, by name, have the input's device, and dtypes that may be mixed with its dtype."""
    for name, other in others.items():
        if other is not None:
            _check_companion(verb, name, other, input)


def other_row(verb: str, argument: str, input: Tensor, other: Tensor | None) -> None:
    """Raise unless `other` has the shape and device of the input, and a dtype that may be mixed with its dtype."""
    if other is None:
        return
    if not alike(other.shape, input.shape):
        raise RuntimeError(
            f"`{verb}`: `{argument}` must have the shape of `input`, {list(input.shape)}, got {list(other.shape)}"
        )
    _check_companion(verb, argument, other, input)


def modulation(verb: str, argument: str, value: Tensor | None, input: Tensor, num_dims: int) -> None:
    """Raise unless a tensor broadcasts to the input and ends with the normalised dimensions."""
    if value is None:
        return
    tensor(verb, argument, value)
    shape, leading = list(input.shape[input.dim() - num_dims :]), value.dim() - num_dims
    own = zip(reversed(value.shape[: max(0, leading)]), reversed(input.shape[: input.dim() - num_dims]), strict=False)
    fits = 0 <= leading <= input.dim() - num_dims and alike(value.shape[leading:], shape)
    if not fits or not all(broadcasts(size, rows) for size, rows in own):
        of_samples = [input.shape[0], *[1] * (input.dim() - num_dims - 1), *shape]
        hint = f"; for one per sample, view it as {of_samples}" if list(value.shape) == [input.shape[0], *shape] else ""
        raise RuntimeError(
            f"`{verb}`: `{argument}` must end with `normalized_shape`, {shape}, and broadcast to the shape of `input`, "
            f"{list(input.shape)}, got {list(value.shape)}{hint}"
        )
    _check_companion(verb, argument, value, input)


def activation(verb: str, argument: str, name: str | None) -> str:
    """The name of an activation, "identity" for None. Raise if there is none of that name."""
    if name is None or name == IDENTITY:
        return IDENTITY
    if not isinstance(name, str) or name not in ACTIVATIONS:
        choices = ", ".join(repr(choice) for choice in ACTIVATIONS)
        raise ValueError(f"`{verb}`: `{argument}` must be one of {choices}, got {name!r}")
    return name


def group_size(verb: str, shape: Sequence[int], size: int) -> None:
    """Raise unless `size` divides the one normalised dimension."""
    if len(shape) != 1:
        raise refusal(verb, "group_size", "normalized_shape", f", got {list(shape)}")
    if size < 1 or shape[0] % size:
        raise ValueError(f"`{verb}`: `group_size` must divide the length of a row, N = {shape[0]}, got {size}")


def rounding(verb: str, rounding: str, *others: str) -> None:
    """Raise unless `rounding` is "once", "hf" or one of `others`."""
    choices = (*others, *ROUNDINGS)
    if rounding not in choices:
        raise ValueError(f"`{verb}`: `rounding` must be one of {', '.join(map(repr, choices))}, got {rounding!r}")


def dropout_p(verb: str, argument: str, p: float) -> None:
    """Raise unless p is a probability."""
    try:
        fits = 0.0 <= p <= 1.0
    except TypeError:
        of_kind(verb, argument, p, NUMBER)
        raise
    if not fits:
        raise ValueError(f"`{verb}`: `{argument}` must be a probability between 0 and 1, got {p}")


def _is_size(value: Any) -> bool:
    if isinstance(value, Tensor):  # a tensor also has an `__index__`
        return value.dim() == 0
    several = hasattr(value, "__iter__") and not isinstance(value, str)
    return hasattr(value, "__index__") or (several and all(hasattr(size, "__index__") for size in value))


REFUSALS = (TypeError, RuntimeError, AttributeError)

# The name of a kind in errors, and the test for it. The test looks at types first, because Dynamo cannot ask a symbol
# for attributes.
_Kind = tuple[str, Callable[[Any], bool]]
NUMBER: _Kind = ("a number", lambda v: isinstance(v, (int, float)) or hasattr(v, "__float__"))
INT: _Kind = ("an int", lambda v: isinstance(v, int) or hasattr(v, "__index__"))
BOOL: _Kind = ("a bool", lambda v: hasattr(v, "__bool__"))
DTYPE: _Kind = ("a torch.dtype or None", lambda v: v is None or isinstance(v, torch.dtype))
CODES: _Kind = ("a Quantize or None", lambda v: v is None or isinstance(v, Quantize))
RESULT_DTYPE: _Kind = ("a torch.dtype, a Quantize or None", lambda v: DTYPE[1](v) or CODES[1](v))
_KINDS: dict[str, _Kind] = {
    "eps": NUMBER,
    "weight_offset": NUMBER,
    "scale_offset": NUMBER,
    "num_groups": INT,
    "scale": NUMBER,
    "normalized_shape": ("an int or a sequence of ints", _is_size),
    "group_size": ("an int or None", lambda v: v is None or hasattr(v, "__index__")),
    "dim": ("an int, a sequence of ints or None", lambda v: v is None or _is_size(v)),
    "keepdim": BOOL,
    "causal": BOOL,
    "out_dtype": RESULT_DTYPE,
    "dtype": DTYPE,
    "group": ("a torch.distributed.ProcessGroup or None", lambda v: v is None or hasattr(v, "allreduce")),
}


def of_kind(verb: str, argument: str, value: object, kind: _Kind, cause: Exception | None = None) -> None:
    """Raise unless the value is of this kind, a name among `_KINDS`."""
    expected, fits = kind
    if not fits(value):
        raise TypeError(f"`{verb}`: `{argument}` must be {expected}, got {described(value)}") from cause


def explain(verb: str, error: Exception, tensors: dict[str, Any], *, broadcast: bool = False, **others: Any) -> None:
    """Raise an error that names the function and the argument, if a wrong argument explains `error`.

    It is called after a call has failed with `error`, one of `REFUSALS`, and keeps the type of that error.

    Args:
        tensors: the tensors by argument name; None stands for an absent one.
        broadcast: whether their shapes must broadcast.
        others: the other arguments, by the names of `_KINDS`.
    """
    if type(error) not in (*REFUSALS, NotImplementedError) or str(error).startswith(f"{verb}()"):
        return  # the error is not about an argument, or PyTorch's text names the argument
    there = {name: value for name, value in tensors.items() if value is not None}
    of_arrays = not isinstance(next(iter(there.values()), None), Tensor)
    for name, value in there.items():
        if not (of_arrays and hasattr(value, "__dlpack__")):
            tensor(verb, name, value)
        if getattr(value, "is_nested", False):
            return
    for name, value in others.items():
        of_kind(verb, name, value, _KINDS[name], error)
    if str(error).startswith("`"):
        return  # the text is one of ours
    if broadcast and not _broadcast(*(value.shape for value in there.values())):
        names = " and ".join(f"`{name}`" for name in there)
        shapes = " and ".join(str(list(value.shape)) for value in there.values())
        raise RuntimeError(f"`{verb}`: {names} must have shapes that broadcast, got {shapes}: {error}") from error
    dtypes = {name: value for name, value in others.items() if isinstance(value, torch.dtype)}
    for name, dtype in (dtypes | {name: value.dtype for name, value in there.items()}).items():
        if short(dtype) not in map(short, FLOATING):
            raise type(error)(f"`{verb}`: `{name}` must be {either(FLOATING)}, got {short(dtype)}: {error}") from error


def _broadcast(*shapes: Sequence[int]) -> bool:
    try:
        torch.broadcast_shapes(*shapes)
    except RuntimeError:
        return False
    return True


def _check_companion(verb: str, name: str, other: Tensor, input: Tensor) -> None:
    """Raise unless `other` has the device of the input, and a dtype that may be mixed with its dtype."""
    if other.device != input.device:
        raise RuntimeError(
            f"`{verb}`: expected all tensors to be on the same device, but `{name}` is on {other.device} and "
            f"`input` is on {input.device}"
        )
    _check_mix(verb, name, other.dtype, input.dtype)


def _check_mix(verb: str, name: str, dtype: torch.dtype | None, input_dtype: torch.dtype) -> None:
    expected = FLOATING[:3] if input_dtype in FLOATING[:3] else (input_dtype,)
    if dtype is not None and dtype not in expected:
        codes = (
            f"; kf.Quantize({dtype}, per=...) gives codes with scales"
            if name == "out_dtype" and dtype in LARGEST
            else ""
        )
        raise RuntimeError(
            f"`{verb}`: `{name}` must be {either(expected)} for {short(input_dtype)} input, got {short(dtype)}{codes}"
        )


def described(value: object) -> str:
    """A value as text for an error: itself if it is short, otherwise its type."""
    return repr(value) if value is None or isinstance(value, (str, float)) else type(value).__name__


def short(dtype: object) -> str:
    """The name of a dtype for errors, such as "float32" for torch.float32."""
    return str(dtype).removeprefix("torch.")


def either(dtypes: Sequence[torch.dtype]) -> str:
    """The dtypes as text for an error, such as "float16 or bfloat16"."""
    return " or ".join(map(short, dtypes))
