"""LayerNorm and RMSNorm with their stages: the operators on the kernels."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._prims_common import suggest_memory_format

from kernel_fusion.backends.triton import plan
from kernel_fusion.backends.triton.kernels.constants import RowNorm, RowNormBackward, RowNormForward
from kernel_fusion.backends.triton.kernels.row_norm_bwd import row_norm_bwd
from kernel_fusion.backends.triton.kernels.row_norm_fwd import row_norm_fwd
from kernel_fusion.backends.triton.launch import launch, operator
from kernel_fusion.backends.triton.layout import rows_of
from kernel_fusion.backends.triton.reduce import sum_partials
from kernel_fusion.core import checks, dropout
from kernel_fusion.core.arguments import floating, is_seed, require
from kernel_fusion.core.groups import Groups, groups_of
from kernel_fusion.core.spec import ROWS, compute_dtype
from kernel_fusion.core.stages import (
    NAMES,
    TENSORS,
    Given,
    NormCall,
    around,
    compiled_in,
    conflict,
    lacks_residual,
    other_row,
)


class Operands(NamedTuple):
    """The arguments that all launches share.

    Attributes:
        read: tensors: rows, vectors and the seed.
        numbers: the kernels' numbers, except how many programs a group has.
    """

    read: list[Tensor | None]
    numbers: list[int]
    groups: int
    constants: dict[str, Any]

    @property
    def cols(self) -> int:
        """N."""
        return self.numbers[1] * int(self.constants["unit"])

    def launch(
        self,
        kernel: Any,
        compiled: type[RowNorm],
        layout: plan.Plan,
        results: Sequence[Tensor | None],
        per_group: int,
        *others: int,
        registers: int | None = None,
        **constants: Any,
    ) -> None:
        """Launch `per_group` programs for each group; `others` are further axes of the grid."""
        exact = self.cols % layout.block == 0
        values = compiled.of(layout, exact=exact, **self.constants | constants)
        args = *self.read, *results, per_group, *self.numbers
        grid = per_group * self.groups, *others
        launch(kernel, grid, *args, constants=values, warps=layout.warps, registers=registers)


def _operands(c: NormCall | Backward, rows: Sequence[Tensor], wide: bool, **constants: Any) -> Operands:
    """Those of a call that reads these rows, and computes in float64 if `wide`."""
    s, shape = c.stages, rows[0].shape
    groups, vectors, pitches = _grouped(shape, c.num_dims, c.vectors, s.grouped)
    tensors, laid = rows_of(rows, c.num_dims)
    size, (count, *others) = laid.in_units(prod(shape[len(shape) - c.num_dims :]), *pitches)
    numbers = [count // groups.count, *others, groups.step, groups.inner, *(pitch // size for pitch in pitches)]
    drops = s.seed is not None
    constants |= {
        "has_weight": c.weight is not None,
        "has_bias": c.bias is not None,
        "offset": c.weight_offset,
        "rms": c.rms,
        "wide": wide,
        "threshold": dropout.threshold(s.dropout_p) if drops else 0,
        "kept_scale": dropout.scale(s.dropout_p) if drops else 1.0,
        "flat": laid.simple,
        "unit": size,
        **compiled_in(s._asdict()),
    }
    return Operands([*(tensors * 2)[: max(2, len(rows))], *vectors, s.seed], numbers, groups.count, constants)


def _grouped(
    input: Sequence[int], num_dims: int, parameters: Sequence[Tensor | None], grouped: bool
) -> tuple[Groups, list[Tensor | None], list[int]]:
    """The groups; and parameters and their pitches, flat, or in place for groups."""
    shape = next((p.shape for p in parameters if p is not None), None)
    if not grouped or shape is None:
        return Groups(), [None if p is None else p.contiguous() for p in parameters], [0] * len(parameters)
    groups = groups_of(input, shape, num_dims)
    assert groups is not None
    laid = [_in_place(parameter, num_dims) for parameter in parameters]
    return groups, [t for t, _ in laid], [pitch for _, pitch in laid]


def _in_place(parameter: Tensor | None, num_dims: int) -> tuple[Tensor | None, int]:
    """The parameter, copied if one pitch is not enough, and that."""
    if parameter is None:
        return None, 0
    (laid,), rows = rows_of([parameter], num_dims)
    if not rows.simple:
        (laid,), rows = rows_of([parameter.contiguous()], num_dims)
    return laid, rows.strides[0][0]


def _takes(
    c: NormCall | Backward, input: Tensor, others: Sequence[Tensor | None], residual: Tensor | bool | None
) -> bool:
    """Whether the kernels take these tensors; `others` and the rows of stages have the input's shape."""
    stages, given = c.stages, c.stages._asdict()
    if not 1 <= c.num_dims <= input.dim() or any(given[name] not in names for name, names in NAMES.items()):
        return False
    if conflict(given, residual) or lacks_residual(given, residual):
        return False
    shape = checks.parameter_shape(input, c.num_dims, stages.grouped, *c.vectors)
    if groups_of(input.shape, shape, c.num_dims) is None:
        return False
    rows = *others, *(given[name] for name in ROWS)
    shapes = checks.shaped(shape, *c.vectors) and checks.shaped(input.shape, *rows)
    types = floating(input, *c.vectors, *rows) and is_seed(stages.seed)
    return shapes and types and input.numel() > 0 and 0.0 <= stages.dropout_p <= 1.0


def _are_statistics(stats: Tensor, h: Tensor, num_dims: int, each: int) -> bool:
    rows = prod(h.shape[: h.dim() - num_dims])
    known = stats.dtype == compute_dtype(h.dtype) and stats.is_contiguous()
    return known and checks.shaped((each, rows), stats)


@operator("row_norm_fwd")
def forward(wants_stats: bool, call: NormCall) -> tuple[Tensor, Tensor, Tensor]:
    """y, h and the statistics; h is empty without a residual, the statistics if unwanted."""
    input, residual, num_dims, *_, rms, s = call
    require_forward("triton_row_norm_fwd", call)
    count = prod(input.shape[: input.dim() - num_dims])
    y = torch.empty(input.shape, dtype=call.out_dtype, device=input.device)
    h = input.new_empty(0) if residual is None else input.new_empty(input.shape, dtype=residual.dtype)
    stats = input.new_empty(((1 if rms else 2) * wants_stats, count), dtype=compute_dtype(input.dtype))
    launch_forward(call, [y, h, stats, None], stats=wants_stats)
    bare = other_row(s, residual) is None and not around(compiled_in(s._asdict()))
    if rms and bare and input.dim() > 3:  # PyTorch's LayerNorm gives a contiguous result
        y = y.contiguous(memory_format=suggest_memory_format(input))
    return y, h, stats


def require_forward(operator: str, c: NormCall) -> None:
    """Raise unless forward's kernels take this."""
    takes = _takes(c, c.input, [c.residual], c.residual)
    tensors = [c.input, c.residual, c.weight, c.bias, *(getattr(c.stages, name) for name in TENSORS)]
    require(operator, tensors, takes and c.out_dtype in checks.FLOATING)


def forward_plan(c: NormCall) -> plan.Plan:
    """The plan of forward."""
    return plan.norm_forward(prod(c.input.shape[c.input.dim() - c.num_dims :]), c.input.dtype.itemsize)


def launch_forward(
    c: NormCall, results: Sequence[Tensor | None], layout: plan.Plan | None = None, **constants: Any
) -> None:
    """Launch the kernel of forward.

    Args:
        c: The arguments of the norm.
        results: y, h, the statistics and the codes, which the kernel fills; None for what it does not write.
        layout: The plan, if programs share the columns of a row; otherwise `forward_plan` gives it.
        constants: Constants of `RowNormForward` that this call sets.
    """
    other, residual = other_row(c.stages, c.residual), c.residual is not None
    call = _operands(c, [c.input] if other is None else [c.input, other], c.input.dtype == torch.float64)
    beside = 1 if layout is None else -(-call.cols // layout.block)
    layout = layout or forward_plan(c)
    constants |= {"eps": c.eps, "has_residual": residual}
    per_group = -(-call.numbers[0] // layout.rows) * beside
    call.launch(row_norm_fwd, RowNormForward, layout, results, per_group, **constants)


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

    @property
    def vectors(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """As of `NormCall`."""
        return self.weight, self.bias, self.stages.residual_gate

    @property
    def arguments(self) -> tuple[Any, ...]:
        """One by one."""
        return *self[:-1], *self.stages

    def require(self, operator: str, wants: Sequence[bool], *dtypes: torch.dtype | None, shifted: bool = False) -> None:
        """Raise unless the kernels take it, and can write gradients of these dtypes. `shifted`: as of the kernels."""
        s, h = self.stages, self.h
        takes = _takes(self, h, [self.dy, self.dh, self.x], self.stored)
        takes = takes and {*dtypes} <= {None, *checks.FLOATING} and len(wants) == 5
        takes = takes and _are_statistics(self.stats, h, self.num_dims, (1 if self.rms else 2) + shifted)
        takes = takes and (s.residual_gate is None or self.x is not None)
        tensors = [self.dy, self.dh, h, self.x, self.stats, self.weight, self.bias]
        require(operator, [*tensors, *(getattr(s, name) for name in TENSORS)], takes)

    def operands(self) -> Operands:
        """The kernels' operands."""
        h, x, other = self.h, self.x, other_row(self.stages, None)
        rows = [self.dy, h, other if other is not None else h if x is None else x]
        wide, has_dh = self.stats.dtype == torch.float64, self.dh is not None
        found = _operands(self, rows, wide, stored=self.stored, has_dh=has_dh)
        dh = None if self.dh is None else self.dh.contiguous()
        return found._replace(read=[*found.read, dh, self.stats])

    def launch(self, results: Sequence[Tensor], wants: Sequence[bool], **parts: Any) -> None:
        """Fill the wanted gradients; `parts` are constants of parts of rows."""
        call, device = self.operands(), plan.device_of(self.h.device)
        count, staged = call.numbers[0], around(call.constants)
        layout = plan.norm_backward(call.cols, self.h.dtype.itemsize, staged)
        # Whether the row kernel has registers for the sums; a column kernel sums those of long rows.
        whole = any(wants[2:]) and layout.resident > 0
        programs = device.programs(layout, count, call.groups) if whole else 0
        partials = self._partials(programs * call.groups * call.cols, wants)
        if wants[0] or wants[1] or whole:
            asked = [*wants[:2], *(whole and wanted for wanted in wants[2:])]
            parts |= dict(zip(_GRADIENTS, asked, strict=True))
            per_group = programs if whole else -(-count // layout.rows)
            registers = None if staged else device.registers_of(layout)
            filled = *results[:2], *partials
            call.launch(row_norm_bwd, RowNormBackward, layout, filled, per_group, registers=registers, **parts)
        if whole:
            _add_up(partials, programs, results, wants, call.groups > 1)
        elif any(wants[2:]):
            self.sum_columns(call, results, wants)

    def sum_columns(self, call: Operands, results: Sequence[Tensor], wants: Sequence[bool]) -> None:
        """Fill the wanted gradients of vectors by a kernel of their own."""
        device, layout = plan.device_of(self.h.device), plan.norm_columns(self.h.dtype.itemsize)
        beside = -(-call.cols // layout.block)
        programs = device.programs(layout, call.numbers[0], beside * call.groups)
        partials = self._partials(programs * call.groups * call.cols, wants)
        asked = dict(zip(_GRADIENTS[2:], wants[2:], strict=True)) | {"columns": True, "has_dh": False}
        filled = *results[:2], *partials
        call.launch(row_norm_bwd, RowNormBackward, layout, filled, beside, programs, **asked)
        _add_up(partials, programs, results, wants, call.groups > 1)

    def _partials(self, size: int, wants: Sequence[bool]) -> list[Tensor]:
        counts = wants[2] + wants[3], int(wants[4])
        return [torch.empty(count * size, dtype=self.stats.dtype, device=self.h.device) for count in counts]


def _add_up(
    partials: Sequence[Tensor], programs: int, results: Sequence[Tensor], wants: Sequence[bool], many: bool
) -> None:
    if outputs := [result for result, wanted in zip(results[2:4], wants[2:4], strict=True) if wanted]:
        sum_partials(partials[0], programs, outputs, many)
    if wants[4]:
        sum_partials(partials[1], programs, results[4:], many)


@operator("row_norm_bwd")
def backward(
    input_dtype: torch.dtype, bias_dtype: torch.dtype | None, wants: Sequence[bool], call: Backward
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The gradients of x, the other row, weight, bias and the residual's gate; unwanted ones are empty."""
    call.require("triton_row_norm_bwd", wants, input_dtype, bias_dtype)
    s, h = call.stages, call.h
    other = other_row(s, None)
    shape = checks.parameter_shape(h, call.num_dims, s.grouped, *call.vectors)
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
