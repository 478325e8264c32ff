"""Finds which of our norms a module computes, by calling it.

First the function, in fp32 against float64: LayerNorm or RMSNorm, which parameter is weight and which bias, where eps
is, the weight's offset, how a gate comes in. Rows of many sizes reveal eps. Then, for each pair of dtypes, how the
module rounds and which dtype it returns, forward and backward.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from kernel_fusion.core.activations import ACTIVATIONS
from kernel_fusion.patching.agree import FLOATING, attempt, differing_bits, disagreement, same_function, same_values
from kernel_fusion.patching.autocast import HALF, CudaAutocast
from kernel_fusion.patching.examining import generator
from kernel_fusion.patching.norms import CONTIGUOUS, KEPT, Case, Gate, Key, NormForm
from kernel_fusion.patching.reads import noted
from kernel_fusion.patching.stand_in import StandIn, arguments
from kernel_fusion.patching.swap import original_class

_EPS = (1e-5, 1e-6, 1e-8, 1e-12, torch.finfo(torch.float32).eps)
# A longer row is tried out only for PyTorch's own forward, which is known to read nothing but the shape it was given,
# and then shorter.
_LONGEST, _SHORTER = 2**16, 2**12
TOO_LONG = "its rows are too long to be tried out"
_NO_ROWS = "it takes no batches of rows of its parameters' length, or returns something else"
_NO_NORM = "it computes none of our norms over the last dimensions"
_SIZES = (10.0 ** torch.arange(-6, 3)).repeat(2)  # of rows
_FEW = torch.tensor([3, 8])  # rows of middle and large size, since most hypotheses fail at once
_LEADS = ((18,), (2, 9), (2, 3, 3), (1, 2, 3, 3), (3, 1, 2, 1, 3))  # shapes of as many rows
_ACTIVATIONS = sorted({*ACTIVATIONS, None}, key=lambda name: (name != "silu", name != "sigmoid", str(name)))


def _normal(random: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(shape, generator=random, dtype=torch.float32)


class Examination:
    """A module's stand-in, as a function of input, gate and parameters; with rows of another `shape`, if given."""

    def __init__(self, module: nn.Module, gated: bool, shape: tuple[int, ...] | None = None) -> None:
        self.module = module
        self.stand_in = StandIn(module, shape)
        self.names = list(self.stand_in.parameters)
        self.gated = gated
        self.shape = shape or shape_of(module)
        self.row = self.shape or (64,)

    def rows(self, count: int, dtype: torch.dtype, sizes: Tensor | None = None) -> list[Tensor]:
        """Draw rows whose mean is not zero, and a gate if there is one."""
        random = generator(1)
        x = _normal(random, count, *self.row) + _normal(random, count, *[1] * len(self.row))
        if sizes is not None:
            x *= sizes.view(-1, *[1] * len(self.row))
        gate = [_normal(random, count, *self.row).to(dtype)] if self.gated else []
        return [x.to(dtype), *gate]

    def theirs(self, *tensors: Tensor) -> Tensor:
        """Call the module's own code."""
        inputs = 1 + self.gated
        self.stand_in.set(dict(zip(self.names, tensors[inputs:], strict=True)))
        return self.stand_in(*tensors[:inputs])  # type: ignore[no-any-return]

    def ours(self, form: NormForm, case: Case, backend: str | None = "eager") -> Callable[..., Tensor]:
        """Our verb as a function of the same tensors."""
        verb = form.verb(case, backend=backend)

        def call(*tensors: Tensor) -> Tensor:
            inputs = 1 + self.gated
            shape = form.shape or tensors[0].shape[-1:]
            return verb(*tensors[:inputs], shape, **self.parts(form, tensors[inputs:]))  # type: ignore[no-any-return]

        return call

    def parts(self, form: NormForm, parameters: Sequence[Tensor]) -> dict[str, Any]:
        """Weight, bias and eps of a verb, with these parameters."""
        by_name: dict[str | None, Tensor] = dict(zip(self.names, parameters, strict=True))
        eps = getattr(self.module, form.eps) if isinstance(form.eps, str) else form.eps
        return {"weight": by_name.get(form.weight), "bias": by_name.get(form.bias), "eps": eps}

    def exact(self, form: NormForm) -> Callable[..., Tensor]:
        """The definition, for float64 tensors."""
        return self.ours(form, Case("once", None))

    def parameters(self, dtype: torch.dtype) -> list[Tensor]:
        """Random parameters of a dtype."""
        return [p.to(dtype) for p in self.stand_in.parameters.values()]


def shape_of(module: nn.Module) -> tuple[int, ...] | None:
    """The shape of a module's rows; None if they may have any length."""
    given = next((p.shape for p in module._parameters.values() if p is not None), None)
    given = getattr(module, "normalized_shape", None) if given is None else given
    return tuple(given) if isinstance(given, tuple) else None


def _is_torchs(module: nn.Module) -> bool:
    """Whether the forward is that of a norm of PyTorch."""
    return original_class(type(module)).forward in (nn.LayerNorm.forward, nn.RMSNorm.forward)


def fit(module: nn.Module, rounding: str) -> NormForm | str:
    """The form of a norm, or the reason why it has none."""
    positional = arguments(original_class(type(module)).forward)
    if not positional or sum(p.default is p.empty for p in positional) > 2:
        return "its forward takes other arguments than a norm"
    shapes = {tuple(p.shape) for p in module._parameters.values() if p is not None}
    if len(shapes) > 1 or any(not shape or 0 in shape for shape in shapes):
        return "its parameters are not one weight and one bias of a row"
    shape, tried = shape_of(module), None
    if shape is not None and math.prod(shape) > _LONGEST:
        if not _is_torchs(module):
            return TOO_LONG
        tried = tuple(min(size, round(_SHORTER ** (1 / len(shape)))) for size in shape)
    reason = "its forward takes other arguments than a norm"
    for gated in (True, False):
        required = sum(p.default is p.empty for p in positional)
        if required <= 1 + gated <= len(positional) and (shapes or not gated):
            form = _function(Examination(module, gated, tried), positional[gated].name)
            if isinstance(form, NormForm):
                form = _with_cases(Examination(module, gated, tried), form, rounding)
                return replace(form, shape=shape) if tried and isinstance(form, NormForm) else form
            reason = form
    return reason


def _function(examination: Examination, gate_name: str) -> NormForm | str:
    """The norm that the module computes, if nothing is rounded."""
    if (reason := _depends_on_size(examination)) is not None:
        return reason
    inputs = examination.rows(len(_SIZES), torch.float32, _SIZES)
    parameters = examination.parameters(torch.float32)
    peak = int(parameters[0].argmax()) if parameters else 0
    inputs[0].flatten(1)[-2:, peak] *= torch.tensor([-1e3, 1e3])  # for norms that clip
    found = _results(examination, inputs, parameters)
    if 2 not in found:  # a norm over another dimension may take rows
        return _NO_ROWS
    wide = [t.double() for t in (*inputs, *parameters)]
    first = [*(t[_FEW] for t in wide[: len(inputs)]), *wide[len(inputs) :]]
    for form in _hypotheses(examination, gate_name):
        definition = examination.exact(form)
        if not same_function(found[2][_FEW].flatten(1), definition(*first).flatten(1)):
            continue
        exact = definition(*wide).flatten(1)
        if not same_function(found[2].flatten(1), exact) or not _reads_eps(examination, form, inputs, parameters):
            continue
        if not all(same_function(y.flatten(1), exact) for y in found.values()):
            return "it normalises other dimensions where the input has more of them"
        form = replace(form, dims=frozenset(found))
        return _doubt(examination, form, inputs, parameters) or _of_its_length(examination, form, inputs)
    return _NO_NORM


def _results(examination: Examination, inputs: list[Tensor], parameters: list[Tensor]) -> dict[int, Tensor]:
    """What the module makes of rows, by the numbers of leading dimensions that it takes, also where all are 1."""

    def result(index: Any, *lead: int) -> Tensor | None:
        shape = *lead, *examination.row
        y = attempt(examination.theirs, *(t[index].reshape(shape) for t in inputs), *parameters)
        return y if y is not None and y.shape == shape else None

    singles = [result(slice(index, index + 1)) for index in range(len(_SIZES))]
    found = {0: torch.stack([y for y in singles if y is not None])} if all(y is not None for y in singles) else {}
    for lead in _LEADS:
        y = result(slice(None), *lead)
        if y is not None and result(slice(1), *[1] * len(lead)) is not None:
            found[len(lead)] = y.reshape(-1, *examination.row)
    return found


def _reads_eps(examination: Examination, form: NormForm, inputs: list[Tensor], parameters: list[Tensor]) -> bool:
    """Whether the module reads eps from the attribute of the form; another may have the same value."""
    if not isinstance(form.eps, str):
        return True
    own = vars(examination.stand_in.module)
    before, other = own[form.eps], 0.5 if own[form.eps] != 0.5 else 0.25
    own[form.eps] = other
    y = attempt(examination.theirs, *(t[None] for t in inputs), *parameters)
    own[form.eps] = before
    exact = examination.exact(replace(form, eps=other))(*(t.double() for t in (*inputs, *parameters)))
    return y is not None and same_function(y.reshape(exact.shape).flatten(1), exact.flatten(1))


def _doubt(examination: Examination, form: NormForm, inputs: list[Tensor], parameters: list[Tensor]) -> str | None:
    """Why a module that computes a norm is none of ours, or None."""
    batches = [t.reshape(2, 9, *examination.row) for t in inputs]
    if not examination.stand_in.is_steady(*batches):
        return "it keeps something, or its result or gradient depends on a buffer or on training"
    others = [-100 * p for p in parameters]
    y = attempt(examination.theirs, *batches, *others)
    exact = examination.exact(form)(*(t.double() for t in (*batches, *others)))
    if y is None or not same_function(y.flatten(2), exact.flatten(2)):
        return "it limits its parameters"
    odd = batches[0].clone()
    odd.flatten(2)[0, :3, 1] = torch.tensor([math.inf, -math.inf, math.nan])
    y = attempt(examination.theirs, odd, *batches[1:], *parameters)
    ours = examination.ours(form, Case("once", None))(odd, *batches[1:], *parameters)
    return None if y is not None and same_values(y, ours) else "it treats infinities or NaN in another way"


def _of_its_length(examination: Examination, form: NormForm, inputs: list[Tensor]) -> NormForm:
    """The form, for rows of the length that was tried only, unless others come out right, too."""
    if examination.shape is not None:
        return form
    shorter = [t[None, ..., :33] for t in inputs]
    y = attempt(examination.theirs, *shorter)
    exact = examination.exact(form)(*(t.double() for t in shorter))
    same = y is not None and y.shape == exact.shape and same_function(y[0], exact[0])
    return form if same else replace(form, shape=examination.row)


def _depends_on_size(examination: Examination) -> str | None:
    """Why it is no norm, found cheaply: of rows much larger than any eps, a multiple has the same norm."""
    x, *gate = (t[None] for t in examination.rows(2, torch.float32, torch.full((2,), 1e4)))
    parameters = examination.parameters(torch.float32)
    one, other = (attempt(examination.theirs, t, *gate, *parameters) for t in (x, 16 * x))
    if one is None or other is None or one.shape != x.shape:
        return _NO_ROWS
    return None if same_function(one.flatten(2), other.flatten(2).double()) else _NO_NORM


def _hypotheses(examination: Examination, gate_name: str) -> Iterator[NormForm]:
    """Every form that the module might have."""
    names = examination.names
    roles: list[tuple[str | None, str | None]] = [(None, None)]
    if len(names) == 1:
        roles = [(names[0], None), (None, names[0])]
    elif len(names) == 2:
        roles = [(names[0], names[1]), (names[1], names[0])]
    attributes: list[str | float] = [
        name for name, value in vars(examination.module).items() if isinstance(value, float) and value > 0
    ]
    for eps, rms, (weight, bias), gate in itertools.product(
        (*attributes, *_EPS), (True, False), roles, _gates(examination, gate_name)
    ):
        for offset in (0.0, 1.0) if weight else (0.0,):
            yield NormForm(rms, examination.shape, weight, bias, eps, offset, gate)


def _gates(examination: Examination, name: str) -> list[Gate | None]:
    """How a gate may come in; the columns that change with the first one are its group."""
    if not examination.gated:
        return [None]
    x, gate = examination.rows(4, torch.float32)
    parameters = examination.parameters(torch.float32)
    other = x.clone()
    other[..., 0] += 1
    both = [attempt(examination.theirs, t, gate, *parameters) for t in (x, other)]
    if both[0] is None or both[1] is None or both[0].shape != x.shape:
        return []
    size = int((both[0] != both[1]).any(0).sum())
    columns = x.shape[-1]
    if len(examination.row) != 1 or size == 0 or columns % size:
        return []
    group = None if size == columns else size
    return [Gate(name, activation, first, group) for activation in _ACTIVATIONS for first in (False, True)]


def _with_cases(examination: Examination, form: NormForm, rounding: str) -> NormForm | str:
    """The form, with the pairs of dtypes in which both agree."""
    inherited = _is_torchs(examination.module)
    cases: dict[Key, Case] = {}
    weights = FLOATING if examination.names else (None,)
    for input_dtype, weight_dtype in [
        *itertools.product(FLOATING, weights),
        (torch.float64, weights[0] and torch.float64),
    ]:
        for autocast in (False, True):
            key = Key(input_dtype, weight_dtype, autocast)
            plain = cases.get(key._replace(autocast=False))
            if inherited and autocast:  # the verb follows PyTorch's norms
                case = plain and plain._replace(out_dtype=None)
            else:
                case = _agreed(examination, form, key, rounding)
            if case is not None:
                cases[key] = case
    if Key(torch.float32, weights[0], False) not in cases:
        return "its results or gradients in fp32 differ from ours"
    reads, reason = noted(examination.stand_in.module, lambda: _calls(examination, cases))
    eps = form.eps if isinstance(form.eps, str) else None
    return reason or replace(form, cases=tuple(cases.items()), reads=reads.without(eps), strides=_strides(examination))


def _calls(examination: Examination, cases: Iterable[Key]) -> None:
    """Call the module in each case, both modes, with and without gradients, so that what its code reads is noted."""
    inputs = 1 + examination.gated
    for key, training, lead in itertools.product(cases, (True, False), ((4,), (2, 2), (2, 1, 2))):
        tensors = [*examination.rows(4, key.input), *examination.parameters(key.weight or torch.float32)]
        shaped = [t.reshape(*lead, *examination.row) for t in tensors[:inputs]]
        vars(examination.stand_in.module)["training"] = training
        attempt(examination.theirs, *shaped, *tensors[inputs:])
        with torch.enable_grad(), suppress(Exception):
            examination.theirs(*(t.requires_grad_() for t in (*shaped, *tensors[inputs:])))


def _strides(examination: Examination) -> str | None:
    """Which strides results have for inputs that are swapped, with gaps, or whose rows are not in one piece."""
    swapped = torch.ones(3, 5, *examination.row)[:, :2].transpose(0, 1)
    apart = torch.ones(*examination.row, 2, 3).movedim((-2, -1), (0, 1))
    found = set()
    for t, dtype in itertools.product((swapped, apart), FLOATING):
        x = t.to(dtype)
        y = attempt(examination.theirs, *[x] * (1 + examination.gated), *examination.parameters(dtype))
        if y is not None:
            same = _proper(y) == _proper(torch.empty_like(x))
            found.add(KEPT if same else CONTIGUOUS if y.is_contiguous() else None)
    return found.pop() if len(found) == 1 else None


def _proper(t: Tensor) -> list[int]:
    """The strides, without those of dimensions of size 1, which may have any."""
    return [stride for stride, size in zip(t.stride(), t.shape, strict=True) if size > 1]


def _agreed(examination: Examination, form: NormForm, key: Key, rounding: str) -> Case | None:
    """The rounding in which both agree for these dtypes, forward and backward, or None."""
    count = max(4, 4096 // max(1, torch.Size(examination.row).numel()))
    inputs = [*examination.rows(count, key.input), *examination.parameters(key.weight or torch.float32)]
    mode: AbstractContextManager[Any] = CudaAutocast() if key.autocast else nullcontext()
    with mode:
        y = attempt(examination.theirs, *inputs)
    if y is None or y.shape != inputs[0].shape:
        return None
    kinds = ("once",) if key.input not in HALF else ("once", "hf") if rounding == "match" else (rounding,)
    candidates = [Case(kind, y.dtype) for kind in kinds]
    results = {case: attempt(examination.ours(form, case), *inputs) for case in candidates}
    off = {case: differing_bits(result, y) for case, result in results.items() if result is not None}
    if not off:
        return None
    case = min(off, key=lambda case: off[case])

    def theirs(*tensors: Tensor) -> Tensor:
        with CudaAutocast() if key.autocast else nullcontext():
            return examination.theirs(*tensors)

    worse = disagreement(examination.ours(form, case), theirs, examination.exact(form), inputs)
    return None if worse else case
