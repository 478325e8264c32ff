"""Autograd for the operators of all families.

Nothing can differentiate through a kernel, so `torch.func`, forward mode and differentiated backward passes take the
eager definition, through the operators `*_reference`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.autograd import forward_ad

from kernel_fusion.core import arguments, checks
from kernel_fusion.core.symbols import known


def needs_definition(values: Sequence[Tensor | None], others: Sequence[Tensor | None] = ()) -> bool:
    """Whether a transform must see through the operator, or kernels cannot read the tensors.

    Args:
        values: the tensors that it computes with.
    """
    tensors = [t for t in (*values, *others) if t is not None]
    for t in tensors:
        arguments.memory(t)
    included = torch._C._dispatch_tls_is_dispatch_key_included
    if included(torch._C.DispatchKey.FuncTorchDynamicLayerFrontMode) or included(
        torch._C.DispatchKey.FuncTorchDynamicLayerBackMode
    ):
        return True
    if forward_ad._current_level >= 0 and any(forward_ad.unpack_dual(t).tangent is not None for t in tensors):
        return True
    if any(t is not None and t.dtype not in checks.FLOATING for t in values):
        return True
    return any(
        t.layout != torch.strided or t.is_nested or known(t.numel() == 0) or t.device != tensors[0].device
        for t in tensors
    )


def unread(t: Tensor | None) -> Tensor | None:
    """Return what a function saves of a tensor of which backward needs the shape and the dtype, but not the values.

    The tensor may be written to meanwhile.
    """
    return None if t is None else t.data.requires_grad_(t.requires_grad)


def requires_grad(*tensors: Tensor | None) -> bool:
    """Whether a graph is being recorded through these tensors."""
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def differentiable(
    definition: Callable[..., Sequence[Tensor]],
    cotangents: Sequence[Tensor | None],
    inputs: Sequence[Tensor | None],
    wants: Sequence[bool],
) -> list[Tensor | None]:
    """The wanted gradients of the definition's outputs with respect to its inputs, themselves differentiable."""
    for dy in cotangents:
        if dy is not None:
            arguments.memory(dy)
    # Aliases, so that no gradient is also looked for behind an input, which may depend on another one.
    inputs = [None if t is None else t.view_as(t) for t in inputs]
    pairs = [
        (y, dy) for y, dy in zip(definition(*inputs), cotangents, strict=True) if dy is not None and y.requires_grad
    ]
    leaves = [t for t, wanted in zip(inputs, wants, strict=True) if wanted and t is not None]
    found = iter(
        torch.autograd.grad(
            [y for y, _ in pairs], leaves, [dy for _, dy in pairs], create_graph=True, allow_unused=True
        )
    )
    return [next(found) if wanted and t is not None else None for t, wanted in zip(inputs, wants, strict=True)]
