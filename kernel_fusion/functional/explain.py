"""Which backend a call takes, and why."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from kernel_fusion.backends.availability import is_dtensor
from kernel_fusion.config import BACKENDS, check_backend_name, state
from kernel_fusion.core import checks
from kernel_fusion.core.quantize import Quantize
from kernel_fusion.errors import BackendUnavailableError
from kernel_fusion.functional import interop
from kernel_fusion.functional.modulated_norm import as_norm
from kernel_fusion.functional.staged_norm import sizes
from kernel_fusion.operators.dispatch import obstacle


@dataclass(frozen=True, repr=False)
class Explanation:
    """Which backend a call takes, and why the others do not.

    Attributes:
        backend: the one it takes.
        reasons: for every other backend, why not.
        plan: how the kernels run, one line each for forward and backward: of norms by "cuda", of all verbs by "triton";
            empty elsewhere. Those of "cuda" say what decided them: the rule, and rows of tables with their evidence.
    """

    backend: str
    reasons: dict[str, str]
    plan: tuple[str, ...] = ()

    def __repr__(self) -> str:
        lines = [f"backend: {self.backend}", *(f"  {line}" for line in self.plan)]
        lines += [f"not {name}: {reason}" for name, reason in self.reasons.items()]
        return "\n".join(lines)


def explain(verb: Callable[..., Any], *args: Any, **kwargs: Any) -> Explanation:
    """Say which backend `verb(*args, **kwargs)` would take and why. Nothing is computed.

    Args:
        verb: a function of this library that has `backend=`, such as `kernel_fusion.layer_norm`; one of
            `kernel_fusion.ops`; or a module of this library, such as a `kernel_fusion.FusedLayerNorm`.
        args, kwargs: the arguments of the call.

    Returns:
        An :class:`Explanation`; print it.

    Raises:
        TypeError: `verb` is none of these, or takes no such arguments.
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
    mask: Any = arguments.get("mask")
    # A boolean mask, positions and classes are read as they are; other booleans and integers are PyTorch's affair.
    tensors = [t for t in arguments.values() if isinstance(t, Tensor) and (t is not mask or t.dtype != torch.bool)]
    tensors = [t for t in tensors if not any(t is arguments.get(name) for name in ("positions", "ids", "target"))]
    spread = _has_spread_rows(arguments)
    soft = isinstance(arguments.get("target"), Tensor) and arguments["target"].is_floating_point()
    special = [what for what, there in (("group", spread), ("probabilities", soft)) if there]
    reasons: dict[str, str] = {}
    chosen = None
    for candidate in BACKENDS:
        reason = None if candidate == "eager" else obstacle(candidate, tensors)
        reason = reason or checks.without_kernels(name, candidate)
        reason = next(filter(None, (checks.without_kernels(what, candidate) for what in special)), reason)
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
    lines = _plan_lines(chosen, name, _of_part(arguments) | {"spread": True} if spread else arguments)
    return Explanation(chosen, reasons, lines)


class _VerbCalled(BaseException):
    """Carries a call out of the function that was about to make it."""


def _has_spread_rows(arguments: dict[str, Any]) -> bool:
    """Whether a norm's rows are parts: of a group's, or of a DTensor that is sharded in a normalised dimension."""
    input: Any = arguments.get("input")
    if arguments.get("group") is not None or not is_dtensor(input) or "normalized_shape" not in arguments:
        return arguments.get("group") is not None
    first: int = input.dim() - len(sizes(arguments["normalized_shape"]))
    return any(placement.is_shard() and placement.dim >= first for placement in input.placements)


def _of_part(arguments: dict[str, Any]) -> dict[str, Any]:
    """Arguments of a norm of spread rows, with this rank's parts instead of DTensors."""
    with torch.no_grad():
        parts = {name: value.to_local() if is_dtensor(value) else value for name, value in arguments.items()}
    return parts | {"normalized_shape": parts["input"].shape[-len(sizes(parts["normalized_shape"])) :]}


def _bound(verb: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """The verb's name, and its arguments by name, with defaults filled in and arrays as tensors."""
    if not _is_verb(verb):
        verb, args, kwargs = _first_call(verb, args, kwargs)
    bound = inspect.signature(verb).bind(*args, **kwargs)
    bound.apply_defaults()
    return verb.__name__, {name: interop.as_tensor(value) for name, value in bound.arguments.items()}


def _is_verb(value: Any) -> bool:
    ours = str(getattr(value, "__module__", None)).startswith("kernel_fusion.functional")
    return ours and inspect.isfunction(value) and "backend" in inspect.signature(value).parameters


def _first_call(
    function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
) -> tuple[Callable[..., Any], Sequence[Any], dict[str, Any]]:
    """The verb that a module or a function of `ops` calls first, and its arguments.

    The function runs with other globals, in which each verb notes its call and goes no further.
    """
    body, home = function, "kernel_fusion.ops"
    if isinstance(function, torch.nn.Module):
        body, args, home = type(function).forward, (function, *args), "kernel_fusion."
    if not inspect.isfunction(body) or not body.__module__.startswith(home):
        expected = "a verb of kernel_fusion, such as kf.layer_norm, a function of kf.ops or a module of kf.nn"
        raise TypeError(f"`explain`: expected {expected}, then its arguments, got {checks.described(function)}")

    def noting(verb: Callable[..., Any]) -> Callable[..., Any]:
        def note(*args: Any, **kwargs: Any) -> None:
            raise _VerbCalled(verb, args, kwargs)

        return note

    known = {name: noting(value) if _is_verb(value) else value for name, value in body.__globals__.items()}
    noted = FunctionType(body.__code__, known, body.__name__, body.__defaults__, body.__closure__)
    noted.__kwdefaults__ = body.__kwdefaults__
    try:
        noted(*args, **kwargs)
    except _VerbCalled as call:
        return call.args
    raise TypeError(f"`explain`: {function!r} calls no verb of kernel_fusion")


def _plan_lines(chosen: str, verb: str, arguments: dict[str, Any]) -> tuple[str, ...]:
    if chosen in ("cuda", "triton") and "modulated" in verb:
        arguments = as_norm(verb, arguments)
    if isinstance(arguments.get("out_dtype"), Quantize):  # of a result in the input's dtype
        arguments = arguments | {"out_dtype": None}
    if chosen == "cuda":
        from kernel_fusion.backends.cuda import explain as cuda_explain

        return cuda_explain.plan_lines(verb, arguments)
    if chosen == "triton":
        from kernel_fusion.backends.triton import explain as triton_explain

        return triton_explain.plan_lines(verb, arguments)
    return ()
