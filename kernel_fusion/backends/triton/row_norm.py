"""LayerNorm and RMSNorm with their stages: the operators that launch the kernels, without gradients.

`NormCall` of core/stages.py has the arguments of forward, and `Backward` those of backward. Both become the same
`Operands`: the tensors and numbers that all launches of a call share.
"""

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
from kernel_fusion.core.symbols import possible


class Operands(NamedTuple):
    """The kernel's arguments that all launches of one call share.

    Attributes:
        read: The tensors that kernels read, in the order of their parameters: rows, vectors and the seed.
        numbers: The numbers that kernels take, except how many programs a group of rows has.
        groups: How many groups of rows have a weight and a bias of their own.
        constants: The constants of kernels that do not depend on the plan.
    """

    read: list[Tensor | None]
    numbers: list[int]
    groups: int
    constants: dict[str, Any]

    @property
    def cols(self) -> int:
        """The length of a row."""
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
        """Launch a kernel.

        Args:
            kernel: The kernel.
            compiled: The class of its constants.
            layout: Its plan.
            results: The tensors that it writes, in the order of its parameters; None for one that it does not write.
            per_group: How many programs each group of rows has, along the grid's first axis.
            others: The further axes of the grid.
            registers: The most registers of a thread, or None for no bound.
            constants: Constants that this launch adds to those of the call.
        """
        exact = self.cols % layout.block == 0
        values = compiled.of(layout, exact=exact, **self.constants | constants)
        args = *self.read, *results, per_group, *self.numbers
        grid = per_group * self.groups, *others
        launch(kernel, grid, *args, constants=values, warps=layout.warps, registers=registers)


def _operands(c: NormCall | Backward, rows: Sequence[Tensor], wide: bool, **constants: Any) -> Operands:
    """Return the operands of a call.

    Args:
        c: The call.
        rows: The tensors of the input's shape that its kernels read.
        wide: Whether kernels compute in float64.
        constants: Constants of kernels that `c` does not tell.
    """
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
    """Return the groups of rows, the parameters as kernels read them, and how far those of two groups are apart.

    Without groups a parameter is a contiguous vector. With them it stays in place if one stride leads to the next.
    """
    shape = next((p.shape for p in parameters if p is not None), None)
    if not grouped or shape is None:
        return Groups(), [None if p is None else p.contiguous() for p in parameters], [0] * len(parameters)
    groups = groups_of(input, shape, num_dims)
    assert groups is not None
    laid = [_in_place(parameter, num_dims) for parameter in parameters]
    return groups, [t for t, _ in laid], [pitch for _, pitch in laid]


def _in_place(parameter: Tensor | None, num_dims: int) -> tuple[Tensor | None, int]:
    """Return the parameter, copied if its groups are not evenly spaced, and the distance between two groups."""
    if parameter is None:
        return None, 0
    (laid,), rows = rows_of([parameter], num_dims)
    if not rows.simple:
        (laid,), rows = rows_of([parameter.contiguous()], num_dims)
    return laid, rows.strides[0][0]


def _takes(
    c: NormCall | Backward, input: Tensor, others: Sequence[Tensor | None], residual: Tensor | bool | None
) -> bool:
    """Whether the kernels take a call.

    Args:
        c: The call.
        input: The tensor that is normalised.
        others: Further tensors that must have the input's shape, as the rows of stages must.
        residual: The residual, or whether there is one.
    """
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
    return shapes and types and possible(input.numel() > 0) and 0.0 <= stages.dropout_p <= 1.0


def _are_statistics(stats: Tensor, h: Tensor, num_dims: int, each: int) -> bool:
    """Whether `stats` can be what forward kept of h: `each` numbers for every row."""
    rows = prod(h.shape[: h.dim() - num_dims])
    known = stats.dtype == compute_dtype(h.dtype) and stats.is_contiguous()
    return known and checks.shaped((each, rows), stats)


@operator("row_norm_fwd")
def forward(wants_stats: bool, call: NormCall) -> tuple[Tensor, Tensor, Tensor]:
    """Return y, h and the statistics. h is empty without a residual, and so are statistics that are not wanted."""
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
    """Raise an error that names `operator` unless the kernels of forward take this call."""
    takes = _takes(c, c.input, [c.residual], c.residual)
    tensors = [c.input, c.residual, c.weight, c.bias, *(getattr(c.stages, name) for name in TENSORS)]
    require(operator, tensors, takes and c.out_dtype in checks.FLOATING)


def forward_plan(c: NormCall) -> plan.Plan:
    """Return the plan of forward."""
    return plan.norm_forward(prod(c.input.shape[c.input.dim() - c.num_dims :]), c.input.dtype.itemsize)


def launch_forward(c: NormCall, results: Sequence[Tensor | None], **constants: Any) -> None:
    """Launch the kernel of forward.

    Args:
        c: The arguments of the norm.
        results: y, h, the statistics and the codes, which the kernel fills; None for what it does not write.
        constants: Constants of `RowNormForward` that this call sets.
    """
    other, residual = other_row(c.stages, c.residual), c.residual is not None
    call = _operands(c, [c.input] if other is None else [c.input, other], c.input.dtype == torch.float64)
    layout = forward_plan(c)
    constants |= {"eps": c.eps, "has_residual": residual}
    per_group = -(-call.numbers[0] // layout.rows)
    call.launch(row_norm_fwd, RowNormForward, layout, results, per_group, **constants)


# The results of backward, by the names of constants that say whether they are wanted.
_GRADIENTS = "dx", "dother", "dweight", "dbias", "dgate"


class Backward(NamedTuple):
    """The arguments of backward. Those that are not listed here are forward's.

    Attributes:
        dy: The gradient at y.
        dh: The gradient at h, if there is one.
        h: The normalised tensor if forward stored it, and otherwise the input, from which h is computed again.
        x: The input, if h was stored and there is a pre-activation or a gate.
        stats: The statistics that forward kept.
        stored: Whether forward stored h.
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
        """The vectors of a row's length: weight, bias and the gate of a residual."""
        return self.weight, self.bias, self.stages.residual_gate

    @property
    def arguments(self) -> tuple[Any, ...]:
        """The fields one by one, as the operator takes them."""
        return *self[:-1], *self.stages

    def require(self, operator: str, wants: Sequence[bool], *dtypes: torch.dtype | None) -> None:
        """Raise an error that names `operator` unless the kernels take this call.

        Args:
            operator: The name of the operator.
            wants: Which of the five gradients are wanted.
            dtypes: The types of gradients that kernels must be able to write.
        """
        s, h = self.stages, self.h
        takes = _takes(self, h, [self.dy, self.dh, self.x], self.stored)
        takes = takes and {*dtypes} <= {None, *checks.FLOATING} and len(wants) == 5
        takes = takes and _are_statistics(self.stats, h, self.num_dims, 1 if self.rms else 2)
        takes = takes and (s.residual_gate is None or self.x is not None)
        tensors = [self.dy, self.dh, h, self.x, self.stats, self.weight, self.bias]
        require(operator, [*tensors, *(getattr(s, name) for name in TENSORS)], takes)

    def operands(self) -> Operands:
        """Return the operands of the kernels."""
        h, x, other = self.h, self.x, other_row(self.stages, None)
        rows = [self.dy, h, other if other is not None else h if x is None else x]
        wide, has_dh = self.stats.dtype == torch.float64, self.dh is not None
        found = _operands(self, rows, wide, stored=self.stored, has_dh=has_dh)
        dh = None if self.dh is None else self.dh.contiguous()
        return found._replace(read=[*found.read, dh, self.stats])

    def launch(self, results: Sequence[Tensor], wants: Sequence[bool]) -> None:
        """Launch the kernels.

        Args:
            results: The tensors for dx, the other row's gradient, dweight, dbias and dgate.
            wants: Which of them are wanted, and filled.
        """
        call, device = self.operands(), plan.device_of(self.h.device)
        count, staged = call.numbers[0], around(call.constants)
        layout = plan.norm_backward(call.cols, self.h.dtype.itemsize, staged)
        # Whether the kernel of rows has registers for the sums of columns. Long rows have another kernel for these.
        whole = any(wants[2:]) and layout.resident > 0
        programs = device.programs(layout, count, call.groups) if whole else 0
        partials = self._partials(programs * call.groups * call.cols, wants)
        if wants[0] or wants[1] or whole:
            asked = [*wants[:2], *(whole and wanted for wanted in wants[2:])]
            compiled = dict(zip(_GRADIENTS, asked, strict=True))
            per_group = programs if whole else -(-count // layout.rows)
            registers = None if staged else device.registers_of(layout)
            filled = *results[:2], *partials
            call.launch(row_norm_bwd, RowNormBackward, layout, filled, per_group, registers=registers, **compiled)
        if whole:
            _add_up(partials, programs, results, wants, possible(call.groups > 1))
        elif any(wants[2:]):
            self.sum_columns(call, results, wants)

    def sum_columns(self, call: Operands, results: Sequence[Tensor], wants: Sequence[bool]) -> None:
        """Launch the kernel that sums columns and does nothing else; the arguments are as for `launch`."""
        device, layout = plan.device_of(self.h.device), plan.norm_columns(self.h.dtype.itemsize)
        beside = -(-call.cols // layout.block)
        programs = device.programs(layout, call.numbers[0], beside * call.groups)
        partials = self._partials(programs * call.groups * call.cols, wants)
        asked = dict(zip(_GRADIENTS[2:], wants[2:], strict=True)) | {"columns": True, "has_dh": False}
        filled = *results[:2], *partials
        call.launch(row_norm_bwd, RowNormBackward, layout, filled, beside, programs, **asked)
        _add_up(partials, programs, results, wants, possible(call.groups > 1))

    def _partials(self, size: int, wants: Sequence[bool]) -> list[Tensor]:
        """Memory for the partial rows of dweight and dbias, and of dgate; those of one sum have `size` elements."""
        counts = wants[2] + wants[3], int(wants[4])
        return [torch.empty(count * size, dtype=self.stats.dtype, device=self.h.device) for count in counts]


def _add_up(
    partials: Sequence[Tensor], programs: int, results: Sequence[Tensor], wants: Sequence[bool], many: bool
) -> None:
    """Add the partial rows of each of the `programs` into the wanted gradients of vectors.

    `many` says that there may be more columns than 32 bits count, as groups of rows may have together.
    """
    if outputs := [result for result, wanted in zip(results[2:4], wants[2:4], strict=True) if wanted]:
        sum_partials(partials[0], programs, outputs, many)
    if wants[4]:
        sum_partials(partials[1], programs, results[4:], many)


@operator("row_norm_bwd")
def backward(
    input_dtype: torch.dtype, bias_dtype: torch.dtype | None, wants: Sequence[bool], call: Backward
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of x, the other row, weight, bias and the residual's gate; unwanted ones are empty."""
    call.require("triton_row_norm_bwd", wants, input_dtype, bias_dtype)
    s, h = call.stages, call.h
    other = other_row(s, None)
    shape = checks.parameter_shape(h, call.num_dims, s.grouped, *call.vectors)
    weight_dtype, gate_dtype = (input_dtype if p is None else p.dtype for p in (call.weight, s.residual_gate))
    dtypes = input_dtype, (h if other is None else other).dtype, weight_dtype, bias_dtype or input_dtype, gate_dtype
    # A kernel that sums columns alone computes dgate from the gradient of the residual, which must then be written.
    made = [wants[0], wants[1] or wants[4], *wants[2:]]
    shapes = h.shape, h.shape, shape, shape, shape
    dx, dother, dweight, dbias, dgate = (
        torch.empty(of if wanted else (0,), dtype=dtype, device=h.device)
        for of, dtype, wanted in zip(shapes, dtypes, made, strict=True)
    )
    call.launch((dx, dother, dweight, dbias, dgate), made)
    return dx, dother, dweight, dbias, dgate
