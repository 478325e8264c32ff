"""A case: one call of a verb, its random inputs, and three ways to the same results.

The ways are our verb on a backend, PyTorch's unfused call in the same dtypes, and the reference: the eager definition
in float64, or for float64 hand-written formulas in NumPy's long double. If PyTorch refuses a mix of dtypes, its inputs
are widened to float32 and its result is rounded, as users would do.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kernel_fusion.backends import eager
from kernel_fusion.core.spec import dtype_name
from kernel_fusion.testing.budget import Array, Reference

Results = dict[str, Tensor]
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_MAX_DRAWS, _MAX_DRAWN = 64, 2**21
_DROPOUT_SEED = 20
# Short forms of fields, for the names of cases.
_SHORT = {
    "activation": "act",
    "bias": "b",
    "dropout_p": "p",
    "gate_activation": "act",
    "gate_first": "first",
    "gate_layout": "lies",
    "group_size": "group",
    "num_dims": "dims",
    "out_dtype": "out",
    "pre_activation": "pre",
    "residual": "r",
    "weight": "w",
    "weight_offset": "offset",
}


class Tensors(SimpleNamespace):
    """The tensors of a case by name, some of them None.

    They are the leaves of the graph, other arguments, and the gradients that arrive at the results: "dy" for "y".
    """

    def leaves(self) -> dict[str, Tensor]:
        """Return the tensors whose gradients are computed, by the names of these gradients."""
        return {f"d{name}": t for name, t in vars(self).items() if t is not None and t.requires_grad}

    def widened(self) -> Tensors:
        """Return the same tensors in float64 on the CPU, with the same strides."""
        return Tensors(**{name: _widened(t) for name, t in vars(self).items()})


def _widened(t: Tensor | None) -> Tensor | None:
    if t is None or not t.is_floating_point():
        return None if t is None else t.cpu()
    if t.numel() == 0:
        return t.detach().cpu().double().requires_grad_(t.requires_grad)
    # Converts the whole storage, because a conversion changes the strides of tensors with gaps or overlaps.
    whole = t.detach().as_strided((t.untyped_storage().nbytes() // t.element_size(),), (1,), 0)
    wide = whole.cpu().double().as_strided(t.shape, t.stride(), t.storage_offset())
    return wide.requires_grad_(t.requires_grad)


def with_gradients(results: Results, inputs: Tensors) -> Results:
    """The detached results and the gradients of all leaves."""
    leaves = inputs.leaves()
    cotangents = [getattr(inputs, f"d{name}").to(y.device) for name, y in results.items()]
    gradients = torch.autograd.grad(list(results.values()), list(leaves.values()), cotangents)
    return {name: y.detach() for name, y in results.items()} | dict(zip(leaves, gradients, strict=True))


@dataclass(frozen=True)
class Case(ABC):
    """One call of a verb, forward and backward, on an input of `shape` and `dtype`; other fields are the verb's."""

    verb: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @abstractmethod
    def make_inputs(self, device: torch.device | str, seed: int = 0) -> Tensors:
        """Return random tensors. They are drawn on the CPU, so that every device sees the same values."""

    @abstractmethod
    def ours(self, inputs: Tensors, backend: str | None) -> Results:
        """Return the results of our function on `backend`, by name, attached to the graph."""

    @abstractmethod
    def definition(self, inputs: Tensors) -> Results:
        """Return the results of the eager definition, by name."""

    @abstractmethod
    def pytorch(self, inputs: Tensors) -> Results:
        """Return the results of PyTorch's own unfused calls in the dtypes of the inputs, by name."""

    @abstractmethod
    def long_double(self, inputs: Tensors) -> Reference:
        """Return results and gradients of hand-written formulas in NumPy's widest type, by name."""

    @property
    def runs_kernels(self) -> bool:
        """Whether kernels must run. Tensors without elements need none."""
        return math.prod(self.shape) > 0

    @property
    def result_size(self) -> int:
        """The number of elements of the smallest result."""
        return math.prod(self.shape)

    @property
    def draws(self) -> int:
        """How many draws are judged at most, so that small inputs and results show enough values."""
        size = max(1, math.prod(self.shape))
        return self.at_most(max(2048 // size, 64 // max(1, self.result_size)))

    def at_most(self, draws: int) -> int:
        """Return `draws`, or a smaller number if the case would be slow otherwise."""
        return max(1, min(_MAX_DRAWS, _MAX_DRAWN // max(1, math.prod(self.shape)), draws))

    def __str__(self) -> str:
        parts = [self.verb, _text(self.shape), dtype_name(self.dtype)]
        shown = [f for f in fields(self)[len(parts) :] if getattr(self, f.name) != f.default]
        return "-".join(parts + [f"{_SHORT.get(f.name, f.name)}={_text(getattr(self, f.name))}" for f in shown])


def _text(value: Any) -> str:
    if isinstance(value, tuple):
        return "x".join(map(str, value)) or "0d"
    if isinstance(value, torch.dtype):
        return dtype_name(value)
    return f"{value:g}" if isinstance(value, float) else str(value)


class Draw:
    """A source of random tensors, from one seed and on one device."""

    def __init__(self, device: torch.device | str, seed: int) -> None:
        self.device = device
        self._generator = torch.Generator().manual_seed(seed)

    def normal(
        self,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        mean: float = 0.0,
        std: float = 1.0,
        layout: str = "contiguous",
    ) -> Tensor:
        """Return normally distributed values of this shape and dtype, in this layout of `lay_out`."""
        values = torch.randn(shape, generator=self._generator, dtype=torch.float64) * std + mean
        return lay_out(values.to(dtype).to(self.device), layout)

    def boolean(self, shape: tuple[int, ...], probability: float) -> Tensor:
        """Return a boolean tensor whose elements are True with this probability."""
        return (torch.rand(shape, generator=self._generator) < probability).to(self.device)


_LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda t: t.clone(memory_format=torch.contiguous_format),
    # Rows of a wider tensor.
    "padded": lambda t: t.new_empty(*t.shape[:-1], t.shape[-1] + 1)[..., :-1].copy_(t),
    # A storage offset of one element.
    "unaligned": lambda t: t.new_empty(t.numel() + 1)[1:].view(t.shape).copy_(t),
    # The first two dimensions permuted.
    "transposed": lambda t: t.movedim(0, 1).contiguous().movedim(0, 1),
    # The last dimension stored before all others, as in an NCHW tensor stored as NHWC.
    "channels-last": lambda t: t.movedim(1, -1).contiguous().movedim(-1, 1),
    # The second half of a tensor twice as wide.
    "half": lambda t: t.new_empty(*t.shape[:-1], 2 * t.shape[-1]).chunk(2, -1)[1].copy_(t),
    # Every second element.
    "strided": lambda t: t.new_empty(*t.shape[:-1], 2 * t.shape[-1])[..., ::2].copy_(t),
    # The first row repeated with stride 0.
    "expanded": lambda t: t[:1].clone().expand_as(t),
}


def lay_out(values: Tensor, layout: str) -> Tensor:
    """Return a tensor with the memory layout `layout` that equals `values`, or for "expanded" their first row."""
    if layout not in _LAYOUTS:
        raise ValueError(f"unknown layout {layout!r}")
    return _LAYOUTS[layout](values)


@contextmanager
def seeded(device: torch.device | str) -> Iterator[None]:
    """A context in which every function draws the same seed for dropout. Its end restores the generators."""
    on_gpu = torch.device(device).type == "cuda"
    with torch.random.fork_rng(devices=[torch.device(device)] if on_gpu else []):
        torch.manual_seed(_DROPOUT_SEED)
        yield


def dropout_seed(device: torch.device | str) -> Tensor:
    """Return the seed that a function draws within `seeded`."""
    with seeded(device):
        return eager.draw_seed(torch.device(device))


def wide(t: Tensor) -> Array:
    """Return a tensor as an array of NumPy's long double."""
    return t.detach().cpu().double().numpy().astype(np.longdouble)


def dropout_factors(like: Tensor, p: float, seed: Tensor | None) -> Tensor:
    """Return the factors of dropout, each 0 or a scale, in a tensor with the layout of `like`.

    Args:
        like: The tensor whose elements are dropped.
        p: The probability with which an element is dropped.
        seed: The seed, or None without dropout.
    """
    return eager.dropout(torch.ones_like(like), p, None if seed is None else seed.to(like.device))
