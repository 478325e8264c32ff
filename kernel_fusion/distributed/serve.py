"""Runs an operator on DTensors: every rank runs it on its part, by the rules of axes.py.

PyTorch's `to_local` and `from_local` tell autograd the gradients, so a part is an ordinary tensor.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from kernel_fusion.backends import eager
from kernel_fusion.core.signatures import OPERATORS
from kernel_fusion.core.spec import compute_dtype
from kernel_fusion.distributed import hidden
from kernel_fusion.distributed.axes import Call, axes_of
from kernel_fusion.distributed.shards import Shards, elements


def serve(name: str, local: Callable[..., Any], backend: str | None, *args: Any) -> Any:
    """The operator `name` of DTensors.

    Args:
        local: the operator for plain tensors, by the backend.
        backend: the one that was asked for, or None.
        args: the operator's, by position.

    Raises:
        RuntimeError: DTensors and tensors are mixed, meshes differ, or shapes don't fit.
    """
    if name == "qk_norm_rope" and args[1] is not None:  # query and key may differ in heads and placements
        query, key, query_weight, key_weight, *rest = args
        (of_query, _), (of_key, _) = (
            serve(name, local, backend, x, None, weight, None, *rest)
            for x, weight in ((query, query_weight), (key, key_weight))
        )
        return of_query, of_key
    call = axes_of(name, args)
    mesh = _mesh(name, [args[i] for i in call.operands])
    operands = {i: _as_dtensor(name, args[i], mesh) for i in call.operands}
    shards = Shards.chosen(call, operands, mesh)
    parts = list(args)
    largest = max(map(elements, operands.values()))
    for i, operand in operands.items():
        parts[i] = shards.local(operand, call.operands[i], is_small=elements(operand) < largest)
    if call.seed is not None and len(args) > call.seed and args[call.seed] is not None:
        parts[call.seed] = shards.seed(args[call.seed])
    results = _local_call(name, local, backend, call, shards)(*parts)
    if isinstance(results, Tensor):
        return shards.whole(results, call.results[0] or (), call.sizes)
    return tuple(
        result if axes is None else shards.whole(result, axes, call.sizes)
        for result, axes in zip(results, call.results, strict=True)
    )


def _mesh(name: str, tensors: list[Tensor]) -> DeviceMesh:
    meshes = [t.device_mesh for t in tensors if isinstance(t, DTensor)]
    for mesh in meshes[1:]:
        if mesh != meshes[0]:
            raise RuntimeError(f"kernel_fusion::{name}: DTensors must be on one mesh, got {meshes[0]} and {mesh}")
    return meshes[0]


def _as_dtensor(name: str, tensor: Tensor, mesh: DeviceMesh) -> DTensor:
    """Take a plain tensor as replicated if PyTorch would."""
    if isinstance(tensor, DTensor):
        return tensor
    if tensor.numel() != 1 and not DTensor._op_dispatcher._allow_implicit_replication:
        raise RuntimeError(
            f"kernel_fusion::{name}: got mixed torch.Tensor and DTensor, need to convert all torch.Tensor to DTensor "
            "before calling distributed operators!"
        )
    return DTensor.from_local(tensor, mesh, [Replicate()] * mesh.ndim, run_check=False)


def _local_call(
    name: str, local: Callable[..., Any], backend: str | None, call: Call, shards: Shards
) -> Callable[..., Any]:
    """The callable for a rank's part: usually the operator itself."""
    if joined := shards.along(call.joined):
        groups = tuple(shards.mesh.get_group(mesh_dim) for mesh_dim in joined)
        return hidden.operator(name, backend, groups)
    if name == "reduce" and shards.along(frozenset(range(len(call.sizes)))):
        return partial(_reduce_part, local, call)
    if any(each.name == "causal" for each in OPERATORS[name].arguments) and len(call.sizes) > 1:
        return partial(_causal_part, local, getattr(eager, name), call, shards)
    return local


def _reduce_part(
    local: Callable[..., Tensor],
    call: Call,
    part: Tensor,
    dim: list[int],
    keepdim: bool,
    kind: str,
    dtype: torch.dtype | None,
) -> Tensor:
    """Weigh a rank's mean by its share of the elements; an empty part still has a gradient."""
    gone = [d for d in range(part.dim()) if d not in (call.results[0] or ())]
    whole, mine = 1, 1
    for d in gone:
        whole, mine = whole * call.sizes[d], mine * part.shape[d]
    if kind != "mean_abs" or whole == mine:
        return local(part, dim, keepdim, kind, dtype)
    result = dtype or part.dtype
    if mine == 0:
        return part.abs().sum(dim, keepdim).to(result)
    wide = compute_dtype(part.dtype)
    return (local(part, dim, keepdim, kind, wide) * (mine / whole)).to(result)


def _causal_part(
    local: Callable[..., Tensor],
    definition: Callable[..., Tensor],
    call: Call,
    shards: Shards,
    part: Tensor,
    mask: Tensor | None,
    scale: float,
    causal: bool,
    *options: bool,
) -> Tensor:
    """Mask by the row's number in the whole tensor: `local` would count this rank's rows from 0."""
    rows = len(call.sizes) - 2
    if not causal or not shards.along(frozenset([rows])):
        return local(part, mask, scale, causal, *options)
    numbers = shards.slice(torch.arange(call.sizes[rows], device=part.device), 0, rows)
    keep = (torch.arange(part.shape[-1], device=part.device) <= numbers[:, None]).expand(part.shape)
    if mask is None or mask.dtype == torch.bool:
        return local(part, keep if mask is None else mask & keep, scale, False, *options)
    y = local(part, mask.masked_fill(~keep, -math.inf), scale, False, *options)
    nothing = definition(part.new_zeros(1, 1), keep.new_zeros(1, 1), scale, False, *options)
    return torch.where(keep, y, nothing)  # also in a row with NaN
