"""LayerNorm and RMSNorm with their stages: the operators on the kernels."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import wraps
from math import prod
from typing import Any, NamedTuple, get_type_hints

import torch
from torch import Tensor
from torch._prims_common import suggest_memory_format

from kernel_fusion.backends.triton import plan
from kernel_fusion.backends.triton.kernels.constants import RowNormBackward, RowNormForward
from kernel_fusion.backends.triton.kernels.row_norm_bwd import row_norm_bwd
from kernel_fusion.backends.triton.kernels.row_norm_fwd import row_norm_fwd
from kernel_fusion.backends.triton.launch import launch, row_tile
from kernel_fusion.backends.triton.layout import Rows, rows_of, unit
from kernel_fusion.backends.triton.reduce import sum_partials
from kernel_fusion.core import checks, dropout
from kernel_fusion.core.arguments import floating, is_seed, require, shaped
from kernel_fusion.core.groups import Groups, groups_of
from kernel_fusion.core.spec import ROWS, Stages, compute_dtype
from kernel_fusion.core.stages import (
    ARGUMENTS,
    FIRST,
    NAMES,
    TENSORS,
    Given,
    NormCall,
    around,
    compiled_in,
    conflict,
    lacks_residual,
    norm_call,
    other_row,
)


def _constants(
    weight: Tensor | None, bias: Tensor | None, weight_offset: float, rms: bool, wide: bool, stages: Given
) -> dict[str, Any]:
    """The constants of both directions, except those of the rows' layout."""
    drops = stages.seed is not None
    return {
        "has_weight": weight is not None,
        "has_bias": bias is not None,
        "offset": weight_offset,
        "rms": rms,
        "wide": wide,
        "threshold": dropout.threshold(stages.dropout_p) if drops else 0,
        "kept_scale": dropout.scale(stages.dropout_p) if drops else 1.0,
        **compiled_in(stages._asdict()),
    }


class _Grouped(NamedTuple):
    """Weight and bias, and the rows that they belong to.

    Attributes:
        parameters: flat, or in place for groups.
        pitches: their distances in elements; 0 without groups.
    """

    groups: Groups
    parameters: list[Tensor | None]
    pitches: list[int]

    def numbers(self, unit: int) -> list[int]:
        """The kernels' numbers: steps between rows, and pitches in units."""
        return [self.groups.step, self.groups.inner, *(pitch // unit for pitch in self.pitches)]


def _grouped(input: Tensor, num_dims: int, parameters: Sequence[Tensor | None], grouped: bool) -> _Grouped:
    shape = next((p.shape for p in parameters if p is not None), None)
    if not grouped or shape is None:
        return _Grouped(Groups(), [None if p is None else p.contiguous() for p in parameters], [0] * len(parameters))
    groups = groups_of(input.shape, shape, num_dims)
    assert groups is not None
    found, pitches = [], []
    for parameter in parameters:
        pitch, of = 0, parameter
        if of is not None:
            (of,), rows = rows_of([of], num_dims)
            if not rows.simple:
                (of,), rows = rows_of([of.contiguous()], num_dims)
            pitch = rows.strides[0][0]
        found.append(of)
        pitches.append(pitch)
    return _Grouped(groups, found, pitches)


def _in_units(rows: Rows, cols: int, of: _Grouped) -> tuple[int, list[int]]:
    """The unit, and in it the kernels' numbers: lengths, strides of at least two tensors, and those of groups."""
    strides = [stride for of in (rows.strides * 2)[: max(2, len(rows.strides))] for stride in of]
    size = unit(cols, *strides, *of.pitches)
    lengths = [rows.count // of.groups.count, cols // size, rows.middle, rows.inner]
    return size, [*lengths, *(stride // size for stride in strides), *of.numbers(size)]


def _takes(
    input: Tensor,
    num_dims: int,
    parameters: Sequence[Tensor | None],
    others: Sequence[Tensor | None],
    stages: Given,
    residual: Tensor | bool | None,
) -> bool:
    """Whether the kernels take these tensors; `others` and the rows of stages have the input's shape."""
    given = stages._asdict()
    if not 1 <= num_dims <= input.dim() or any(given[name] not in names for name, names in NAMES.items()):
        return False
    if conflict(given, residual) or lacks_residual(given, residual):
        return False
    vectors = *parameters, stages.residual_gate
    shape = checks.parameter_shape(input, num_dims, stages.grouped, *vectors)
    if groups_of(input.shape, shape, num_dims) is None:
        return False
    rows = *others, *(given[name] for name in ROWS)
    shapes = shaped(shape, *vectors) and shaped(input.shape, *rows)
    types = floating(input, *vectors, *rows) and is_seed(stages.seed)
    return shapes and types and input.numel() > 0 and 0.0 <= stages.dropout_p <= 1.0


def _are_statistics(stats: Tensor, h: Tensor, num_dims: int, rms: bool) -> bool:
    rows = prod(h.shape[: h.dim() - num_dims])
    known = stats.dtype == compute_dtype(h.dtype) and stats.is_contiguous()
    return known and shaped((1 if rms else 2, rows), stats)


_PARAMETER_TYPES = {"str": str, "float": float, "bool": bool, "Tensor?": Tensor | None}
_KIND = inspect.Parameter.POSITIONAL_OR_KEYWORD
_STAGES = [
    inspect.Parameter(each.name, _KIND, default=each.default, annotation=_PARAMETER_TYPES[each.type])
    for each in ARGUMENTS
]
_NORM = [
    inspect.Parameter(name, _KIND, annotation=torch.dtype if name == "out_dtype" else annotation)
    for name, annotation in [*get_type_hints(NormCall).items()][:FIRST]
]


def _with_parameters(function: Callable[..., Any], parameters: Sequence[inspect.Parameter]) -> Callable[..., Any]:
    """The function, from whose signature PyTorch makes the operator's schema."""
    signature = inspect.signature(function).replace(parameters=parameters)
    setattr(function, "__signature__", signature)  # noqa: B010
    return function


def with_stages(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function with a parameter per stage argument."""
    *own, _ = inspect.signature(function).parameters.values()
    return _with_parameters(function, [*own, *_STAGES])


def of_norm(at: int) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A decorator of functions of a call, and of others that an operator has at this position."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        _, *own = inspect.signature(function).parameters.values()
        end = at + len(own)

        @wraps(function)
        def flat(*args: Any) -> Any:
            return function(norm_call(*args[:at], *args[end:]), *args[at:end])

        return _with_parameters(flat, [*_NORM[:at], *own, *_NORM[at:], *_STAGES])

    return decorate


@torch.library.triton_op("kernel_fusion::triton_row_norm_fwd", mutates_args={})
@of_norm(FIRST)
def forward(call: NormCall, wants_stats: bool) -> tuple[Tensor, Tensor, Tensor]:
    """y, h and the statistics; h is empty without a residual, the statistics if unwanted."""
    input, residual, num_dims, *_, out_dtype, rms, s = call
    assert out_dtype is not None
    require_forward("triton_row_norm_fwd", call)
    count = prod(input.shape[: input.dim() - num_dims])
    y = torch.empty(input.shape, dtype=out_dtype, device=input.device)
    h = input.new_empty(0) if residual is None else input.new_empty(input.shape, dtype=residual.dtype)
    stats = input.new_empty(((1 if rms else 2) * wants_stats, count), dtype=compute_dtype(input.dtype))
    launch_forward(call, [y, h, stats, None], stats=wants_stats)
    bare = other_row(s, residual) is None and not around(compiled_in(s._asdict()))
    if rms and bare and input.dim() > 3:  # PyTorch's LayerNorm gives a contiguous result
        y = y.contiguous(memory_format=suggest_memory_format(input))
    return y, h, stats


def require_forward(operator: str, c: NormCall) -> None:
    """Raise unless forward's kernels take this."""
    takes = _takes(c.input, c.num_dims, [c.weight, c.bias], [c.residual], c.stages, c.residual)
    tensors = [c.input, c.residual, c.weight, c.bias, *(getattr(c.stages, name) for name in TENSORS)]
    require(operator, tensors, takes and c.out_dtype in checks.FLOATING)


def forward_plan(c: NormCall) -> plan.Plan:
    """How forward runs."""
    cols = prod(c.input.shape[c.input.dim() - c.num_dims :])
    return plan.norm_forward(cols, c.input.dtype.itemsize, plan.device_of(c.input.device).warp_size, c.rms)


def launch_forward(
    c: NormCall, results: Sequence[Tensor | None], layout: plan.Plan | None = None, **constants: Any
) -> None:
    """Launch the kernel of forward, which fills `results`.

    A `layout` is for programs that have parts of rows, and are not chained.
    """
    s, input, num_dims = c.stages, c.input, c.num_dims
    other, wide = other_row(s, c.residual), input.dtype == torch.float64
    of = _grouped(input, num_dims, c.vectors, s.grouped)
    tensors, rows = rows_of([input] if other is None else [input, other], num_dims)
    cols = prod(input.shape[input.dim() - num_dims :])
    device = plan.device_of(input.device)
    beside, chained = (1, device.chained) if layout is None else (-(-cols // layout.block), False)
    layout = layout or forward_plan(c)
    size, numbers = _in_units(rows, cols, of)
    constants |= _constants(c.weight, c.bias, c.weight_offset, c.rms, wide, s)
    constants |= {name: getattr(layout, name) for name in ("pieces", "looped", "slices", "early", "releases")}
    constants |= {"eps": c.eps, "has_residual": c.residual is not None, "chained": chained}
    compiled = RowNormForward(flat=rows.simple, unit=size, **row_tile(layout, cols), **constants)
    per_group = -(-numbers[0] // layout.rows) * beside
    args = tensors[0], tensors[-1], *of.parameters, s.seed, *results, per_group, *numbers
    launch(row_norm_fwd, (per_group * of.groups.count,), *args, constants=compiled, warps=layout.warps)


def _bytes(*tensors: Tensor | None) -> int:
    """Bytes per element of all given tensors together."""
    return sum(t.dtype.itemsize for t in tensors if t is not None)


_GRADIENTS = "dx", "dother", "dweight", "dbias", "dgate"


class Backward(NamedTuple):
    """The arguments of backward.

    Attributes:
        dy, dh: the gradients at y and h.
        h: the normalised tensor, if it was `stored`; else the input, from which it is recomputed.
        x: the input, if h was stored and there is a pre-activation or a gate.
    """

    dy: Tensor
    dh: Tensor | None
    h: Tensor
    x: Tensor | None
    stats: Tensor
    num_dims: int
    weight: Tensor | None
    bias: Tensor | None
    weight_offset: float
    rms: bool
    stored: bool
    stages: Given

    def require(self, operator: str, wants: Sequence[bool], *dtypes: torch.dtype | None) -> None:
        """Raise unless the kernels take it, and can write gradients of these dtypes."""
        s, h = self.stages, self.h
        takes = _takes(h, self.num_dims, [self.weight, self.bias], [self.dy, self.dh, self.x], s, self.stored)
        takes = takes and {*dtypes} <= {None, *checks.FLOATING} and len(wants) == 5
        takes = takes and _are_statistics(self.stats, h, self.num_dims, self.rms)
        takes = takes and (s.residual_gate is None or self.x is not None)
        tensors = [self.dy, self.dh, h, self.x, self.stats, self.weight, self.bias]
        require(operator, [*tensors, *(getattr(s, name) for name in TENSORS)], takes)

    def arguments(self) -> tuple[list[Tensor | None], list[int], int, dict[str, Any]]:
        """The kernels' tensors, which are read, and numbers; how many groups; and constants."""
        s, h, x, other = self.stages, self.h, self.x, other_row(self.stages, None)
        of = _grouped(h, self.num_dims, [self.weight, self.bias, s.residual_gate], s.grouped)
        read, rows = rows_of([self.dy, h, other if other is not None else h if x is None else x], self.num_dims)
        size, numbers = _in_units(rows, prod(h.shape[h.dim() - self.num_dims :]), of)
        constants = _constants(
            self.weight, self.bias, self.weight_offset, self.rms, self.stats.dtype == torch.float64, s
        )
        constants |= {"stored": self.stored, "flat": rows.simple, "unit": size}
        dh = None if self.dh is None else self.dh.contiguous()
        return [*read, dh, *of.parameters, s.seed, self.stats], numbers, of.groups.count, constants

    @property
    def fetched(self) -> int:
        """Bytes that a program reads per column."""
        other = other_row(self.stages, None)
        again = (
            (self.h, other) if other is not None and not Stages(**compiled_in(self.stages._asdict())).follows else ()
        )
        return _bytes(self.dy, self.dh, self.h, self.x, self.weight, self.bias, other) + _bytes(*again)

    def launch(self, results: Sequence[Tensor], wants: Sequence[bool], **parts: Any) -> None:
        """Fill the wanted gradients; `parts` are constants of parts of rows."""
        given, numbers, groups, constants = arguments = self.arguments()
        device = plan.device_of(self.h.device)
        count, cols = numbers[0], numbers[1] * constants["unit"]
        itemsize, staged = self.h.dtype.itemsize, around(constants)
        sizes = self.fetched, device.shared_bytes
        layout = plan.norm_backward(cols, itemsize, device.warp_size, self.rms, staged, *sizes)
        # Whether the row kernel has registers for the sums; a column kernel sums those of long rows.
        whole = any(wants[2:]) and layout.resident > 0
        programs = device.programs(layout, count, groups) if whole else 0
        partials = self._partials(programs * groups * cols, wants)
        if wants[0] or wants[1] or whole:
            laid = {name: getattr(layout, name) for name in ("pieces", "again", "looped", "stages")}
            laid |= {"chained": device.chained and whole and layout.chained, **row_tile(layout, cols)}
            asked = [*wants[:2], *(whole and wanted for wanted in wants[2:])]
            found: dict[str, Any] = dict(zip(_GRADIENTS, asked, strict=True))
            compiled = RowNormBackward(has_dh=self.dh is not None, **found, **laid, **constants, **parts)
            per_group = programs if whole else -(-count // layout.rows)
            args = *given, *results[:2], *partials, per_group, *numbers
            registers = None if staged else device.registers_of(layout)
            launch(
                row_norm_bwd, (per_group * groups,), *args, constants=compiled, warps=layout.warps, registers=registers
            )
        if whole:
            _add_up(partials, programs, results, wants, groups > 1)
        elif any(wants[2:]):
            self.sum_columns(arguments, results, wants)

    def sum_columns(
        self,
        arguments: tuple[list[Tensor | None], list[int], int, dict[str, Any]],
        results: Sequence[Tensor],
        wants: Sequence[bool],
    ) -> None:
        """Fill the wanted gradients of vectors by a kernel of their own, which makes dgate of the other row's."""
        given, numbers, groups, constants = arguments
        device, cols = plan.device_of(self.h.device), numbers[1] * constants["unit"]
        layout = plan.norm_columns(self.h.dtype.itemsize, device.warp_size)
        beside = -(-cols // layout.block)
        programs = device.programs(layout, numbers[0], beside * groups)
        partials = self._partials(programs * groups * cols, wants)
        asked: dict[str, Any] = dict(zip(_GRADIENTS[2:], wants[2:], strict=True))
        compiled = RowNormBackward(columns=True, **asked, **row_tile(layout, cols), **constants)
        args = *given, *results[:2], *partials, beside, *numbers
        launch(row_norm_bwd, (beside * groups, programs), *args, constants=compiled, warps=layout.warps)
        _add_up(partials, programs, results, wants, groups > 1)

    def _partials(self, size: int, wants: Sequence[bool]) -> list[Tensor]:
        """Memory for partial sums, `size` numbers each."""
        counts = wants[2] + wants[3], int(wants[4])
        return [torch.empty(count * size, dtype=self.stats.dtype, device=self.h.device) for count in counts]


def _add_up(
    partials: Sequence[Tensor], programs: int, results: Sequence[Tensor], wants: Sequence[bool], many: bool
) -> None:
    if outputs := [result for result, wanted in zip(results[2:4], wants[2:4], strict=True) if wanted]:
        sum_partials(partials[0], programs, outputs, many)
    if wants[4]:
        sum_partials(partials[1], programs, results[4:], many)


_BACKWARD = [
    inspect.Parameter(name, _KIND, annotation=annotation)
    for name, annotation in [*get_type_hints(Backward).items()][:-1]
]


def of_backward(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function of a call of backward, and of others that an operator has after it."""
    _, *own = inspect.signature(function).parameters.values()
    first, end = len(_BACKWARD), len(_BACKWARD) + len(own)

    @wraps(function)
    def flat(*args: Any) -> Any:
        return function(Backward._make([*args[:first], Given(*args[end:])]), *args[first:end])

    return _with_parameters(flat, [*_BACKWARD, *own, *_STAGES])


def by_operator(operator: Callable[..., Any], call: Backward, *own: Any) -> Any:
    """The results of such an operator."""
    return operator(*call[:-1], *own, *call.stages)


@torch.library.triton_op("kernel_fusion::triton_row_norm_bwd", mutates_args={})
@of_backward
def backward(
    call: Backward, input_dtype: torch.dtype, bias_dtype: torch.dtype | None, wants: Sequence[bool]
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """dx, the other row's gradient, dweight, dbias and that of the residual's gate; unwanted ones are empty."""
    call.require("triton_row_norm_bwd", wants, input_dtype, bias_dtype)
    s, h = call.stages, call.h
    other, vectors = other_row(s, None), (call.weight, call.bias, s.residual_gate)
    shape = checks.parameter_shape(h, call.num_dims, s.grouped, *vectors)
    weight_dtype, gate_dtype = (input_dtype if p is None else p.dtype for p in (call.weight, s.residual_gate))
    dtypes = input_dtype, (h if other is None else other).dtype, weight_dtype, bias_dtype or input_dtype, gate_dtype
    # A kernel that sums columns alone makes dgate of the gradient of the residual.
    made = [wants[0], wants[1] or wants[4], *wants[2:]]
    shapes = h.shape, h.shape, shape, shape, shape
    dx, dother, dweight, dbias, dgate = (
        torch.empty(of if wanted else (0,), dtype=dtype, device=h.device)
        for of, dtype, wanted in zip(shapes, dtypes, made, strict=True)
    )
    call.launch((dx, dother, dweight, dbias, dgate), made)
    return dx, dother, dweight, dbias, dgate
