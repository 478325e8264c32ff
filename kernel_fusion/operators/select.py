"""Which backend serves a call, and why.

The automatic choice is made by PyTorch's dispatcher (see `operators/stubs.py`). Here are the explicit requests, which
get the backend they name or an error that says why not; the rule for tensor subclasses; and the explanations.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from kernel_fusion.backends import availability, eager, interop, triton
from kernel_fusion.config import BACKENDS, check_backend_name, state
from kernel_fusion.errors import BackendUnavailableError
from kernel_fusion.operators import loader, schemas
from kernel_fusion.operators.fallback import LAUNCHED_FROM_PYTHON, define_triton

Operator = Callable[..., Any]

_OVERLOADS: dict[str, Any] = {name: schemas.operator(name) for name in schemas.VERBS}
_OPTIONAL_TENSOR = (Tensor, type(None))


def call(
    verb: str,
    backend: str | None,
    input: Tensor,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float | None,
    weight_offset: float,
    out_dtype: torch.dtype | None,
) -> Tensor:
    """Serve a row norm that is not the plain case: an explicit backend, an unusual tensor, or arguments that don't fit.

    Raises:
        ValueError: `backend` is not a backend.
        BackendUnavailableError: the requested backend cannot serve this input; the message says why.
    """
    shape = (normalized_shape,) if isinstance(normalized_shape, int) else normalized_shape
    if not num_normalized_dims(input, shape):
        check_backend_name(backend)
        if not interop.is_tensor(input):
            if not hasattr(input, "__dlpack__"):
                raise TypeError(f"{verb}(): argument 'input' (position 1) must be Tensor, not {type(input).__name__}")

            def with_tensors(x: Tensor, w: Tensor | None, b: Tensor | None) -> Tensor:
                return call(verb, backend, x, shape, w, b, eps, weight_offset, out_dtype)

            return interop.with_tensors(verb, with_tensors, input, weight, bias)  # type: ignore[no-any-return]
        if availability.is_foreign(input) or not _ends_with(input, shape):
            rms = verb == "rms_norm"
            return eager.pytorch_row_norm(input, shape, weight, bias, eps, weight_offset, out_dtype, rms)
    norm = operator(verb, verb, backend, input)
    return norm(input, len(shape), weight, bias, eps, weight_offset, out_dtype)  # type: ignore[no-any-return]


def num_normalized_dims(input: Tensor, normalized_shape: int | Sequence[int]) -> int:
    """How many dimensions `normalized_shape` has, or 0 where anything about the call needs a closer look."""
    if type(input) not in availability.PLAIN_TENSORS or input.is_nested:
        return 0
    shape = input.shape
    expected = (normalized_shape,) if isinstance(normalized_shape, int) else normalized_shape
    # One dimension, the usual case, without slicing the shape: that costs 0.2 µs.
    if len(expected) == 1:
        return 1 if shape and isinstance(expected[0], int) and shape[-1] == expected[0] else 0
    return len(expected) if shape[len(shape) - len(expected) :] == tuple(expected) else 0


def _ends_with(input: Tensor, shape: Sequence[int]) -> bool:
    integers = all(isinstance(size, (int, torch.SymInt)) for size in shape)
    return integers and 0 < len(shape) <= input.dim() and input.shape[input.dim() - len(shape) :] == tuple(shape)


def operator(verb: str, name: str, backend: str | None, *tensors: Any) -> Operator:
    """What serves a call of `verb`: the operator `name`, which chooses by device, or the definition.

    Args:
        backend: as the user gave it; None takes that of `use_backend`.
        tensors: all that the verb reads, or None. What kernels do not take goes to the definition, unless a backend was
            named.

    Raises:
        TypeError: something among `tensors` is none.
        ValueError: `backend` is not a backend.
        BackendUnavailableError: the requested backend cannot serve these tensors; the message says why.
    """
    if backend is None and state.backend is None and all(map(_is_plain, tensors)):
        return _found(name)
    check_backend_name(backend)
    backend = backend or state.backend
    for tensor in tensors:
        if not isinstance(tensor, _OPTIONAL_TENSOR):
            raise TypeError(f"`{verb}`: beside a tensor, arguments must be tensors, got {type(tensor).__name__}")
    if backend is None:
        takes = all(t is None or availability.refusal(t) is None for t in tensors)
        return _found(name) if takes else partial(schemas.reference_call, name)
    if backend == "eager":
        return partial(schemas.reference_call, name)
    reason = _obstacle(backend, verb, tensors)
    if reason:
        raise BackendUnavailableError(f"`{verb}`: backend {backend!r} was requested, but {reason}")
    return partial(triton.serve, name) if backend == "triton" else _found(name)


def _found(name: str) -> Operator:
    """The operator `name`, which chooses by device."""
    # The object behind an overload costs 0.5 µs less to call, and torch.compile knows the overload alone.
    overload = _OVERLOADS[name]
    return overload if is_dynamo_compiling() else overload._op  # type: ignore[no-any-return]


def _obstacle(backend: str, verb: str, tensors: Sequence[Tensor | None]) -> str | None:
    """Why `backend`, one with kernels of ours, cannot serve `verb` of these tensors, or None if it can."""
    device = None
    for tensor in tensors:
        if tensor is None:
            continue
        if device is None or tensor.device != device:
            if device is not None and tensor.dim() > 0:
                continue  # tensors on several devices are an error of their own
            reason = unavailable_reason(backend, tensor.device, verb)
            if reason:
                return reason
            device = device or tensor.device
        reason = availability.refusal(tensor)
        if reason:
            return reason
    return None


def _is_plain(tensor: Any) -> bool:
    """Whether the operators themselves know what to do with an argument: PyTorch's own tensors, and None."""
    return tensor is None or (type(tensor) in availability.PLAIN_TENSORS and not tensor.is_nested)


def unavailable_reason(name: str, device: torch.device | None = None, verb: str = "layer_norm") -> str | None:
    """Why backend `name` cannot run `verb` on `device` (default: at all, on this machine), or None if it can."""
    if name == "eager":
        return None
    if name == "cpu":
        if device is not None and device.type != "cpu":
            return f"the input is on {device}"
        return None if loader.load() else f"its extension could not be built: {loader.error()}"
    if name == "cuda":
        reason = availability.why_not_cuda(device)
        if reason is None and verb not in LAUNCHED_FROM_PYTHON and not loader.load():
            reason = f"what launches it is the extension, which could not be built: {loader.error()}"
        return reason
    reason = availability.why_not_triton(device)
    if reason is None:
        define_triton()  # here, where no tracer follows
    return reason


# What torch.compiler.assume_constant_result does, without importing the compiler: a tracer that followed this function
# would end up in the loader.
setattr(unavailable_reason, "_dynamo_marked_constant", True)  # noqa: B010


@dataclass(frozen=True)
class Explanation:
    """Which backend a call takes, and why the others do not.

    Attributes:
        backend: the one it takes.
        reasons: for every other backend, why not.
        plan: how the kernels of "cuda" and "triton" run, one line each for forward and backward; empty elsewhere.
    """

    backend: str
    reasons: dict[str, str]
    plan: tuple[str, ...] = ()

    def __str__(self) -> str:
        lines = [f"backend: {self.backend}", *(f"  {line}" for line in self.plan)]
        lines += [f"not {name}: {reason}" for name, reason in self.reasons.items()]
        return "\n".join(lines)


def explain(verb: Callable[..., Any], *args: Any, **kwargs: Any) -> Explanation:
    """Say which backend `verb(*args, **kwargs)` would take and why. Nothing is computed.

    Args:
        verb: a function of this library that has `backend=`, such as `kernel_fusion.layer_norm`.
        args, kwargs: the arguments of the call.

    Returns:
        An :class:`Explanation`; print it.

    Raises:
        TypeError: `verb` is no verb, or has no such arguments.
        ValueError: `backend` is not a backend.
        BackendUnavailableError: the requested backend cannot serve the call, which would raise the same.

    Example:
        >>> import torch, kernel_fusion as kf
        >>> explanation = kf.explain(kf.layer_norm, torch.randn(4, 16), (16,))
    """
    name, arguments = _bound(verb, args, kwargs)
    wanted = arguments.pop("backend") or state.backend
    check_backend_name(wanted)
    if name == "attention_scores" and not arguments["normalize"]:
        no_kernel = "without `normalize` there is only the matrix product, which is the vendor library's"
        return Explanation("eager", {backend: no_kernel for backend in BACKENDS if backend != "eager"})
    tensors = [value for value in arguments.values() if interop.is_tensor(value)]
    reasons: dict[str, str] = {}
    chosen = None
    for candidate in BACKENDS:
        reason = None if candidate == "eager" else _why_not(candidate, name, arguments.get("mask"), tensors)
        if reason is None and wanted not in (None, candidate):
            reason = f"{wanted!r} was requested"
        if reason is None and wanted is None and candidate == "triton" and tensors[0].device.type == "cpu":
            reason = "its interpreter serves CPU tensors on request alone"
        if reason is None and chosen is not None:
            reason = f"{chosen!r} comes first"
        if reason is None:
            chosen = candidate
        else:
            reasons[candidate] = reason
    if chosen is None:
        raise BackendUnavailableError(f"`{name}`: backend {wanted!r} was requested, but {reasons[wanted or 'eager']}")
    return Explanation(chosen, reasons, _plan_lines(chosen, name, arguments))


def _bound(verb: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """The verb's name, and its arguments by name, with defaults filled in and arrays as tensors."""
    if not str(getattr(verb, "__module__", None)).startswith("kernel_fusion.functional"):
        raise TypeError(f"`explain`: expected a verb of kernel_fusion, such as kf.layer_norm, got {verb!r}")
    bound = inspect.signature(verb).bind(*args, **kwargs)
    bound.apply_defaults()
    return verb.__name__, {name: interop.as_tensor(value) for name, value in bound.arguments.items()}


def _why_not(backend: str, verb: str, mask: Tensor | None, tensors: Sequence[Tensor]) -> str | None:
    """Why `backend`, one with kernels of ours, does not serve `verb` of these tensors, `mask` among them."""
    for tensor in tensors:
        reason = unavailable_reason(backend, tensor.device, verb)
        # A boolean mask is read as it is; other booleans are PyTorch's affair.
        if reason is None and not (tensor is mask and tensor.dtype == torch.bool):
            reason = availability.refusal(tensor)
        if reason:
            return reason
    return None


def _plan_lines(chosen: str, verb: str, arguments: dict[str, Any]) -> tuple[str, ...]:
    if chosen == "cuda":
        from kernel_fusion.backends.cuda import explain as cuda_explain

        return cuda_explain.plan_lines(verb, arguments)
    if chosen == "triton":
        from kernel_fusion.backends.triton import explain as triton_explain

        return triton_explain.plan_lines(verb, arguments)
    return ()
