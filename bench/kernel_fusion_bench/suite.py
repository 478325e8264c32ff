"""What a suite is: parts (operations or models) that turn shapes into workloads, and the defaults of a run.

`kind` says what is measured (`runner.MEASURES`). suites.py has the suites.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol

import torch

from kernel_fusion_bench.workloads import DIRECTIONS, Direction, Operation, Workload

Kind = Literal["kernels", "host", "memory", "steps"]
PlotKind = Literal["speedup", "time", "bandwidth", "memory"]


@dataclass(frozen=True)
class Shape:
    """A named shape of the input, and how it lies in memory (as in `RowNormCase`)."""

    name: str
    sizes: tuple[int, ...]
    layout: str = "contiguous"


Shapes = Callable[[str, torch.dtype], Sequence[Shape]]  # by device type and dtype of the input
Dtypes = Mapping[str, Sequence[torch.dtype]]  # by device type

_DTYPES: Dtypes = {"cuda": (torch.bfloat16, torch.float16, torch.float32), "cpu": (torch.float32, torch.bfloat16)}
_QUICK_DTYPES: Dtypes = {"cuda": (torch.bfloat16, torch.float32), "cpu": (torch.float32,)}


class Part(Protocol):
    """A part of a suite."""

    @property
    def verbs(self) -> tuple[str, ...]:
        """The verbs it can measure."""

    def with_shapes(self, sizes: Sequence[tuple[int, int]]) -> Part:
        """The same at other shapes (rows, columns), named after themselves."""

    def workloads(self, device: str, dtype: torch.dtype, verb: str, weights: torch.dtype | None) -> list[Workload]:
        """One verb in one dtype at every shape; `weights` is the dtype of parameters, if bare norms have another."""


@dataclass(frozen=True)
class Operations:
    """A `Part`: operations at the same shapes.

    Attributes:
        grouped: as in `Workload`.
        batch: the first dimension of all shapes, where they have three.
    """

    operations: tuple[Operation, ...]
    shapes: Shapes
    grouped: bool = True
    batch: tuple[int, ...] = ()

    @property
    def verbs(self) -> tuple[str, ...]:
        """See `Part`."""
        return tuple(dict.fromkeys(operation.verb for operation in self.operations))

    def with_shapes(self, sizes: Sequence[tuple[int, int]]) -> Operations:
        """See `Part`."""
        return replace(self, shapes=fixed(*((*self.batch, *s) for s in sizes)))

    def workloads(self, device: str, dtype: torch.dtype, verb: str, weights: torch.dtype | None) -> list[Workload]:
        """See `Part`."""
        wanted = [o for o in self.operations if o.verb == verb and (o.dtypes is None or dtype in o.dtypes)]
        return [
            Workload(s.name, o, s.sizes, dtype, self.grouped, weights if o.bare else None, s.layout)
            for s in self.shapes(device, dtype)
            for o in wanted
        ]


@dataclass(frozen=True)
class Suite:
    """Things that are measured together.

    Attributes:
        name, title: its names on the command line, and in tables and pictures.
        parts, kind: on which workloads, and what is measured.
        dtypes, directions, peers: the defaults; quick_dtypes, quick_peers: those for `--quick`.
        quick_verbs, quick_parts: the subset for `--quick`, if not all.
        backends: ours, by device type, if not just the device's own.
        single_thread: whether a CPU is also measured with one thread.
        settles_memory: as in `Setup`.
    """

    name: str
    title: str
    about: str
    parts: tuple[Part, ...]
    kind: Kind = "kernels"
    dtypes: Dtypes = field(default_factory=lambda: _DTYPES)
    quick_dtypes: Dtypes = field(default_factory=lambda: _QUICK_DTYPES)
    quick_verbs: tuple[str, ...] | None = None
    quick_parts: tuple[Part, ...] | None = None
    directions: tuple[Direction, ...] = DIRECTIONS
    peers: tuple[str, ...] = ()
    quick_peers: tuple[str, ...] = ()
    backends: Mapping[str, Sequence[str]] = field(default_factory=dict)
    plots: tuple[PlotKind, ...] = ("speedup", "time")
    single_thread: bool = False
    settles_memory: bool = False

    @property
    def verbs(self) -> tuple[str, ...]:
        """The verbs that it can measure."""
        return tuple(dict.fromkeys(verb for part in self.parts for verb in part.verbs))

    def quick(self) -> Suite:
        """The suite for `--quick`; the other verbs can still be asked for."""
        parts = self.quick_parts or self.parts
        return replace(self, parts=parts, dtypes=self.quick_dtypes, peers=self.quick_peers)

    def dtypes_on(self, device: str) -> Sequence[torch.dtype]:
        """The default dtypes of a device type; a CPU's if we have no kernels for it."""
        return self.dtypes.get(device, self.dtypes["cpu"])

    def with_shapes(self, sizes: Sequence[tuple[int, int]]) -> Suite:
        """The same suite at other shapes, named after themselves."""
        return replace(self, title="Chosen shapes", parts=tuple(part.with_shapes(sizes) for part in self.parts))

    def workloads(
        self, device: str, dtypes: Sequence[torch.dtype], verbs: Sequence[str], weights: torch.dtype | None = None
    ) -> list[Workload]:
        """Every shape in every dtype and verb."""
        return [
            workload
            for verb in verbs
            for dtype in dtypes
            for part in self.parts
            if verb in part.verbs
            for workload in part.workloads(device, dtype, verb, weights)
        ]


def plain(*sizes: int) -> Shape:
    """A shape that is named after its sizes."""
    return Shape("x".join(map(str, sizes)), sizes)


def fixed(*sizes: tuple[int, ...]) -> Shapes:
    """The same shapes whatever the device and dtype."""
    return lambda device, dtype: [plain(*s) for s in sizes]
