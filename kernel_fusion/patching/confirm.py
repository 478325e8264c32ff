"""The last check before a norm, or a norm of a sum, is replaced: with its own parameters, device, dtype and kernels."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from kernel_fusion.patching.agree import Function, disagreement
from kernel_fusion.patching.norm_fit import TOO_LONG, Examination
from kernel_fusion.patching.norms import Case, Key, NormForm

_PLAIN = (Tensor, nn.Parameter)
_LARGEST = 2**22  # elements of an input that is tried out
_ELSEWHERE = ("DTensor", "FakeTensor")


def confirm(module: nn.Module, form: NormForm, after_sum: bool = False, modulated: bool = False) -> str | None:
    """Why the norm, or the norm of a sum together with the sum, should not be replaced after all, or None.

    With `modulated`, scale and shift of samples follow the norm, and a gate multiplies a term of the sum. Parameters
    on `meta`, fake, or sharded and gathered only while the model runs, cannot be checked.
    """
    parameters = [p for p in module._parameters.values() if p is not None]
    if any(not p.is_floating_point() for p in parameters):
        return "its parameters are quantised"
    if any(type(p) not in _PLAIN and type(p).__name__ not in _ELSEWHERE for p in parameters):
        return f"its parameters are {type(parameters[0]).__name__}s"
    if any(p.is_meta or type(p) not in _PLAIN or p.device.type not in ("cpu", "cuda") for p in parameters):
        return None
    dtypes = {p.dtype for p in parameters} or {torch.float32}
    dtype, cases = dtypes.pop(), dict(form.cases)
    case: Case | None = cases.get(Key(dtype, dtype if parameters else None, False))
    if dtypes or case is None:
        return f"it computes none of our norms in {dtype}" if not dtypes else "its parameters have several dtypes"
    device = parameters[0].device if parameters else torch.device("cpu")
    rows = min(4, _LARGEST // math.prod(form.shape or (1,)))
    if rows < (4 if after_sum or modulated else 1):
        return TOO_LONG
    examination = Examination(module, form.gate is not None)
    inputs = [x.to(device) for x in examination.rows(rows, dtype)]
    values = [p.detach().clone() for p in parameters]
    ours, theirs, exact = examination.ours(form, case, backend=None), examination.theirs, examination.exact(form)
    if modulated:
        ours = _in_one(form, case, examination.parts(form, [])["eps"], after_sum)
        theirs, exact = (_in_steps(norm, after_sum) for norm in (theirs, exact))
        samples = inputs[0].unflatten(0, (2, 2))
        vectors = [inputs[0].roll(n, -1).unflatten(0, (4, 1))[:2] for n in range(1, 4)]
        inputs = [samples, samples.flip(0), *vectors] if after_sum else [samples, *vectors[1:]]
    elif after_sum:
        ours, theirs, exact = _fused(examination, form, case), _with_sum(theirs), _with_sum(exact)
        inputs += [x.flip(0) for x in inputs]
    worse = disagreement(ours, theirs, exact, [*inputs, *values])
    return worse and f"{worse} differs from ours in {dtype} on {device.type}"


def _fused(examination: Examination, form: NormForm, case: Case) -> Function:
    """The norm of a sum by one verb, and the sum."""
    add = form.verb(case, adds=True)

    def fused(a: Tensor, b: Tensor, *parameters: Tensor) -> Tensor:
        return torch.cat(add(a, b, form.shape or a.shape[-1:], **examination.parts(form, parameters)))

    return fused


def _with_sum(norm: Function) -> Function:
    """The same norm and sum in two steps, an addition and a norm."""
    return lambda a, b, *parameters: torch.cat([norm(a + b, *parameters), a + b])


def _in_one(form: NormForm, case: Case, eps: float | None, adds: bool) -> Function:
    """The modulated norm by one verb, and the sum if it is of a gated sum."""
    verb = form.verb(case, adds=adds, modulated=True)

    def add(x: Tensor, residual: Tensor, gate: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        return torch.cat(verb(x, residual, x.shape[-1:], scale, shift, gate=gate, eps=eps))

    def modulate(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        return verb(x, x.shape[-1:], scale, shift, eps=eps)  # type: ignore[no-any-return]

    return add if adds else modulate


def _in_steps(norm: Function, adds: bool) -> Function:
    """The same modulated norm, and the sum, one operation after the other."""

    def modulate(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        return norm(x) * (1 + scale) + shift

    def add(x: Tensor, residual: Tensor, gate: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        h = residual + gate * x
        return torch.cat([modulate(h, scale, shift), h])

    return add if adds else modulate
