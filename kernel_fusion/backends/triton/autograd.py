"""The verbs of all families, with their autograd, from what their kernels know.

Nothing can differentiate through a kernel, so `torch.func`, forward mode and differentiated backward passes take the
eager definition, through the operators `*_reference`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from kernel_fusion.core import arguments, checks, signatures
from kernel_fusion.core.symbols import known

# The verbs on the Triton kernels, by their names: functions of an operator's arguments.
VERBS: dict[str, Callable[..., Any]] = {}
Gradients = Sequence[Tensor | None]


def verb(function: Callable[..., Any]) -> Callable[..., Any]:
    """A decorator for a verb that has an autograd of its own."""
    VERBS[function.__name__] = function
    return function


def define(
    name: str,
    takes: Callable[..., bool],
    forward: Callable[..., Any],
    backward: Callable[[Sequence[Any], Sequence[Tensor | None], Sequence[bool]], Gradients],
    keep: Callable[[Sequence[Any], Any, Sequence[bool]], Sequence[Any]] = lambda args, *_: args,
) -> None:
    """Define the verb `name`. Its signature says which arguments are tensors that it computes with.

    Args:
        takes: from the verb's arguments, whether the kernels take them if PyTorch's operations would.
        forward: the operator on the kernels, from the same arguments.
        backward: the gradients of the first arguments, from what was kept, the gradients of the results, and which
            gradients somebody wants. It is differentiable where gradients are recorded.
        keep: what backward reads, from the arguments, the results, and which gradients somebody wants. It keeps
            the arguments by default.
    """
    signature = signatures.OPERATORS[name]
    reference = getattr(torch.ops.kernel_fusion, f"{name}_reference")

    class Recorded(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *args: Any) -> Any:
            results = forward(*args)
            kept = keep(args, results, ctx.needs_input_grad)
            ctx.save_for_backward(*(each if isinstance(each, Tensor) else None for each in kept))
            ctx.constants = tuple(None if isinstance(each, Tensor) else each for each in kept)
            return results

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            pairs = zip(ctx.saved_tensors, ctx.constants, strict=True)
            wants = ctx.needs_input_grad
            found = backward([constant if t is None else t for t, constant in pairs], grads, wants)
            return *found, *(None,) * (len(wants) - len(found))

    Recorded.__name__ = Recorded.__qualname__ = "".join(part.capitalize() for part in name.split("_"))

    def serve(*args: Any) -> Any:
        values = [each for kind in ("rows", "vector") for each in signature.of_kind(kind, args)]
        others = [each for kind in ("mask", "place") for each in signature.of_kind(kind, args)]
        if needs_definition(values, others) or not takes(*args):
            return reference(*args)
        return Recorded.apply(*args) if requires_grad(*values, *others) else forward(*args)  # type: ignore[no-untyped-call]

    VERBS[name] = serve


def by_definition(name: str, args: Sequence[Any], grads: Sequence[Tensor | None], wants: Sequence[bool]) -> Gradients:
    """The wanted gradients of a verb's first arguments, differentiable, by its definition."""
    reference = getattr(torch.ops.kernel_fusion, f"{name}_reference")

    def results(*first: Tensor | None) -> list[Tensor]:
        return [reference(*first, *args[len(first) :])]

    count = next(i for i, each in enumerate(args) if not (each is None or isinstance(each, Tensor)))
    return differentiable(results, grads, args[:count], wants[:count])


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
