"""Chooses what serves a call: an explicitly requested backend, or something else for tensors that no kernel reads.

For all other calls PyTorch's dispatcher chooses among the operator's kernels and stubs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from kernel_fusion.backends import availability, triton
from kernel_fusion.backends.availability import PLAIN_TENSORS, is_dtensor, refusal
from kernel_fusion.config import check_backend_name, state
from kernel_fusion.core import arguments, checks
from kernel_fusion.errors import BackendUnavailableError
from kernel_fusion.operators import jagged, loader, schemas
from kernel_fusion.operators.fallback import define_triton

_OVERLOADS = {name: schemas.overload(name) for name in schemas.VERBS}
_OPTIONAL_TENSOR = (Tensor, type(None))


def operator(verb: str, name: str, backend: str | None, *tensors: Any) -> Callable[..., Any]:
    """Return the operator `name`, or the callable that serves a call of `verb` in its place.

    Args:
        backend: as the user gave it; None means that of `use_backend`.
        tensors: all tensors that the function reads; None stands for an absent one.

    Raises:
        TypeError: a member of `tensors` is no tensor.
        ValueError: `backend` is not a backend.
        BackendUnavailableError: `backend` cannot serve these tensors.
    """
    if backend is None and state.backend is None and all(map(_is_plain, tensors)):
        return _by_device(name)
    check_backend_name(backend)
    backend = backend or state.backend
    for tensor in tensors:
        if not isinstance(tensor, _OPTIONAL_TENSOR):
            raise TypeError(f"`{verb}`: beside a tensor, arguments must be tensors, got {type(tensor).__name__}")
    if any(map(is_dtensor, tensors)):
        return _on_parts(verb, name, backend, tensors)
    choose = partial(_chosen, verb, name, backend)
    return partial(jagged.serve, name, choose, tensors) if any(map(jagged.has_rows, tensors)) else choose(*tensors)


def _chosen(verb: str, name: str, backend: str | None, *tensors: Tensor | None) -> Callable[..., Any]:
    if backend is None and any(t is not None and refusal(t) for t in tensors):
        backend = "eager"
    if backend == "eager":
        definition = partial(schemas.reference_call, name)
        return definition if is_dynamo_compiling() else arguments.checked(name, definition)
    if backend is not None and (reason := obstacle(backend, tensors) or checks.without_kernels(verb, backend)):
        raise BackendUnavailableError(f"`{verb}`: backend {backend!r} was requested, but {reason}")
    return partial(triton.serve, name) if backend == "triton" else _by_device(name)


def _on_parts(verb: str, name: str, backend: str | None, tensors: Sequence[Tensor | None]) -> Callable[..., Any]:
    from kernel_fusion.distributed.serve import serve  # imports torch.distributed.tensor

    with torch.no_grad():
        parts = [t.to_local() if is_dtensor(t) else t for t in tensors]  # type: ignore[union-attr]
    return partial(serve, name, operator(verb, name, backend, *parts), backend)


def expandable(tensor: Any) -> Any:
    """A tensor that broadcasts, or None; where DTensors are sharded along a dimension of size 1, all ranks get it."""
    if not is_dtensor(tensor):
        return tensor
    from kernel_fusion.distributed.shards import gathered  # imports torch.distributed.tensor

    return gathered(tensor, lambda dim: tensor.shape[dim] == 1)


def in_groups(tensor: Any, dim: int, groups: int) -> Any:
    """A tensor of which a dimension is or becomes groups of columns; DTensors whose ranks have parts of one get all."""
    if not is_dtensor(tensor):
        return tensor
    dim %= tensor.dim()
    ranks = [tensor.device_mesh.size(i) for i, p in enumerate(tensor.placements) if p.is_shard(dim)]
    if len(ranks) == 0 or (len(ranks) == 1 and groups % ranks[0] == 0):
        return tensor
    from kernel_fusion.distributed.shards import gathered  # imports torch.distributed.tensor

    return gathered(tensor, lambda d: d == dim)


def _is_plain(tensor: Any) -> bool:
    return tensor is None or (type(tensor) in PLAIN_TENSORS and not tensor.is_nested)


def _by_device(name: str) -> Callable[..., Any]:
    # Calling an overload's inner object is faster, but torch.compile knows only overloads.
    overload = _OVERLOADS[name]
    return overload if is_dynamo_compiling() else overload._op  # type: ignore[no-any-return]


def obstacle(backend: str, tensors: Sequence[Tensor | None]) -> str | None:
    """The reason that `backend` cannot serve a verb with these tensors, or None."""
    device = None
    for tensor in tensors:
        if tensor is None:
            continue
        if device is None or tensor.device != device:
            if device is not None and tensor.dim() > 0:
                continue  # mixed devices have an error of their own
            if reason := unavailable_reason(backend, tensor.device):
                return reason
            device = device or tensor.device
        if reason := refusal(tensor):
            return reason
    return None


@availability.constant  # tracers must not follow into the loader
def unavailable_reason(backend: str, device: torch.device | None = None) -> str | None:
    """The reason that `backend` cannot run on `device` (None: on any here), or None. Loads the extension."""
    if backend == "eager":
        return None
    if backend == "cpu":
        if device is not None and device.type != "cpu":
            return f"the input is on {device}"
        return None if loader.load() else f"its extension could not be built: {loader.error()}"
    if backend == "cuda":
        reason = availability.why_not_cuda(device)
        if reason is None and not loader.load():
            reason = f"what launches it is the extension, which could not be built: {loader.error()}"
        return reason
    reason = availability.why_not_triton(device)
    if reason is None:
        define_triton()  # no tracer follows into this function
    return reason
