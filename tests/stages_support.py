"""Norms with stages, for their tests: one call for all verbs, its inputs, PyTorch's unfused composition, the budget."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from support import Target, widened
from torch import Tensor

import kernel_fusion as kf
from kernel_fusion.backends.eager.dropout import dropout
from kernel_fusion.testing import oracle, unfused

VERBS = ("layer_norm", "rms_norm", "add_layer_norm", "add_rms_norm")
ADD_VERBS = VERBS[2:]
F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64

# The same for every dtype.
EPS = {"layer_norm": 1e-5, "rms_norm": torch.finfo(torch.float32).eps}


def norm_of(verb: str) -> str:
    """layer_norm or rms_norm."""
    return verb.removeprefix("add_")


def make(
    verb: str,
    shape: tuple[int, ...] = (7, 17),
    x: torch.dtype = F32,
    residual: torch.dtype | None = None,
    parameters: torch.dtype | None = None,
    device: str = "cpu",
) -> list[Tensor]:
    """x, the residual where the verb has one, weight and bias: random leaves that require gradients."""
    shapes = [(shape, x), (shape, residual or x)][: 1 + verb.startswith("add_")]
    shapes += [(shape[-1:], parameters or x)] * 2
    return [torch.randn(s, device=device).to(dtype).requires_grad_() for s, dtype in shapes]


def cotangents(outputs: list[Tensor]) -> list[Tensor]:
    """A random one for each output."""
    return [torch.randn_like(output) for output in outputs]


def call(verb: str, *tensors: Tensor, **options: Any) -> list[Tensor]:
    """The verb over the last dimension: [y], or [y, h]. `tensors` as from `make`."""
    *rows, weight, bias = tensors
    options.setdefault("eps", EPS[norm_of(verb)])
    result = getattr(kf, verb)(*rows, rows[0].shape[-1:], weight, bias=bias, **options)
    return list(result) if isinstance(result, tuple) else [result]


def composition(
    verb: str,
    *tensors: Tensor,
    pre_activation: str = "identity",
    activation: str = "identity",
    dropout_p: float = 0.0,
    seed: Tensor | None = None,
) -> list[Tensor]:
    """The same by PyTorch's calls, each of which writes its result; dropout with the mask of `seed`."""
    x, *residual, weight, bias = tensors
    y, h = unfused.staged_norm(
        x,
        residual[0] if residual else None,
        x.shape[-1:],
        weight,
        bias,
        EPS[norm_of(verb)],
        rms=verb.endswith("rms_norm"),
        pre_activation=pre_activation,
        activation=activation,
        dropout=lambda u: dropout(u, dropout_p, seed),
    )
    return [y, h] if residual else [y]


def with_gradients(outputs: list[Tensor], tensors: list[Tensor], grads: list[Tensor]) -> list[Tensor]:
    """The outputs and the gradients of all tensors."""
    gradients = torch.autograd.grad(outputs, tensors, [g.to(o.dtype) for g, o in zip(grads, outputs, strict=True)])
    return [*(o.detach() for o in outputs), *gradients]


def run(verb: str, tensors: list[Tensor], grads: list[Tensor], **options: Any) -> list[Tensor]:
    """Outputs and gradients of our verb, of leaves with the same values, with the random numbers of seed 0."""
    leaves = [t.detach().requires_grad_() for t in tensors]
    torch.manual_seed(0)
    return with_gradients(call(verb, *leaves, **options), leaves, grads)


def assert_within_budget(
    ours: list[Tensor], verb: str, tensors: list[Tensor], grads: list[Tensor], **options: Any
) -> None:
    """Judge outputs and gradients against the definition in float64, beside PyTorch's composition."""
    wide, wide_grads = widened(tensors), [g.double() for g in grads]
    expected = run(verb, wide, wide_grads, backend="eager", **options)
    torch.manual_seed(0)
    seed = torch.randint(-(2**63), 2**63 - 1, (1,), device=tensors[0].device) if options.get("dropout_p") else None
    theirs = with_gradients(composition(verb, *tensors, seed=seed, **options), tensors, grads)
    names = ["y", "h"][: len(grads)] + ["dx", "dresidual"][: len(grads)] + ["dweight", "dbias"]
    for name, one, exact, other in zip(names, ours, expected, theirs, strict=True):
        judged = oracle.judge(name, [(one, exact.cpu().numpy().astype(np.longdouble), other)])
        assert judged.ok, judged


def assert_equal(ones: list[Tensor], others: list[Tensor]) -> None:
    """Bit for bit, dtypes included."""
    for index, (one, other) in enumerate(zip(ones, others, strict=True)):
        assert one.dtype == other.dtype
        assert torch.equal(one, other), f"result {index}"


def ran_both(target: Target) -> Any:
    """Forward and backward ran once each, natively where the target is native."""
    return target.ran(forward=1, backward=1)
