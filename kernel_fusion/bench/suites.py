"""The suites, as data: named shapes, and the dtypes they are measured in. A new suite is one more entry of `SUITES`.

`kind` says what is measured: the time of kernels, the host's time per call, or memory (`runner.MEASURES`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch

from kernel_fusion.testing.oracle import RowNormCase

Kind = Literal["kernels", "host", "memory"]
VERBS = ("layer_norm", "rms_norm")

# A tensor of the suite `odd`: large enough to leave every cache.
_ODD_BYTES = 128_000_000


@dataclass(frozen=True)
class Shape:
    """A named shape of the input, and how it lies in memory (as in `RowNormCase`)."""

    name: str
    sizes: tuple[int, ...]
    layout: str = "contiguous"


@dataclass(frozen=True)
class Workload:
    """One named call to measure."""

    name: str
    case: RowNormCase


@dataclass(frozen=True)
class Suite:
    """What is measured together.

    Attributes:
        name: what the command line calls it.
        title: what tables and plots call it.
        kind: what is measured of each shape.
        shapes: by device type and dtype of the input.
        dtypes, quick_dtypes: by device type, what is measured by default and under `--quick`.
    """

    name: str
    title: str
    kind: Kind
    shapes: Callable[[str, torch.dtype], Sequence[Shape]]
    dtypes: Mapping[str, Sequence[torch.dtype]]
    quick_dtypes: Mapping[str, Sequence[torch.dtype]]

    def with_shapes(self, shapes: Sequence[tuple[int, ...]]) -> Suite:
        """The same suite over other shapes, named after themselves."""
        return replace(self, title="Chosen shapes", shapes=_always([_plain(*s) for s in shapes]))

    def workloads(
        self, device: str, dtypes: Sequence[torch.dtype], verbs: Sequence[str], weights: torch.dtype | None = None
    ) -> list[Workload]:
        """Every shape in every dtype and verb; weight and bias in the dtype `weights`, by default the input's.

        RMSNorm has no bias here, since PyTorch's has none.
        """
        return [
            Workload(shape.name, _case(verb, shape, dtype, weights or dtype))
            for verb in verbs
            for dtype in dtypes
            for shape in self.shapes(device, dtype)
        ]


def _case(verb: str, shape: Shape, dtype: torch.dtype, weights: torch.dtype) -> RowNormCase:
    bias = weights if verb == "layer_norm" else None
    return RowNormCase(verb, shape.sizes, dtype, weight=weights, bias=bias, layout=shape.layout)


def _plain(*sizes: int) -> Shape:
    return Shape("x".join(map(str, sizes)), sizes)


def _always(shapes: Sequence[Shape]) -> Callable[[str, torch.dtype], Sequence[Shape]]:
    """The same shapes whatever the device and dtype."""
    return lambda device, dtype: shapes


def _odd(device: str, dtype: torch.dtype) -> list[Shape]:
    """Row lengths that no vector or no power of two divides, and rows that lie off alignment."""

    def rows(cols: int) -> int:
        return round(_ODD_BYTES / (cols * dtype.itemsize))

    shapes = [_plain(rows(cols), cols) for cols in (255, 1000, 1023, 3000, 5000, 7168, 14336, 50257)]
    return [*shapes, Shape(f"{rows(4096)}x4096, stride 4097", (rows(4096), 4096), "padded")]


def _host(device: str, dtype: torch.dtype) -> list[Shape]:
    """So small that only the host's time is left."""
    return [_plain(64, 1024) if device == "cuda" else _plain(1, 64)]


_MODELS = {  # (batch, sequence, hidden)
    "BERT-Base": (32, 512, 768),
    "BERT-Large": (32, 512, 1024),
    "GPT-2 Medium": (16, 512, 1024),
    "GPT-2 Large": (8, 512, 1280),
    "GPT-2 XL": (4, 512, 1600),
    "GPT-3 Small": (4, 512, 2048),
    "GPT-3 Medium": (2, 1024, 4096),
    "GPT-3 XL": (2, 1024, 5120),
    "GPT-3 Large": (2, 1024, 6144),
    "GPT-3 XXL": (1, 1024, 8192),
    "GPT-3 175B": (1, 512, 12288),
}
_LARGE = (
    *((131072, 256), (65536, 1024), (32768, 2048), (32768, 4096), (16384, 5120), (16384, 8192)),
    *((8192, 12288), (8192, 16384), (4096, 32768), (2048, 65536), (1024, 131072)),
)
_FEW_ROWS = (
    *((rows, cols) for cols in (4096, 8192) for rows in (4, 16, 64, 128, 512)),
    *((1_000_000, cols) for cols in (64, 128)),
)
_MEMORY = tuple((4096, cols) for cols in (1024, 4096, 16384))

_FP32, _FP16, _BF16 = torch.float32, torch.float16, torch.bfloat16
_DTYPES = {"cuda": (_BF16, _FP16, _FP32), "cpu": (_FP32, _BF16)}
_QUICK_DTYPES = {"cuda": (_BF16, _FP32), "cpu": (_FP32,)}
_HOST_DTYPES = {"cuda": (_BF16,), "cpu": (_FP32,)}

SUITES = {
    suite.name: suite
    for suite in (
        Suite(
            "models",
            "Eleven transformer models",
            "kernels",
            _always([Shape(name, sizes) for name, sizes in _MODELS.items()]),
            _DTYPES,
            _QUICK_DTYPES,
        ),
        Suite("large", "Large inputs", "kernels", _always([_plain(*s) for s in _LARGE]), _DTYPES, _QUICK_DTYPES),
        Suite("odd", "Odd row lengths and strides", "kernels", _odd, _DTYPES, _QUICK_DTYPES),
        Suite(
            "few-rows",
            "Few rows, and many short ones",
            "kernels",
            _always([_plain(*s) for s in _FEW_ROWS]),
            _DTYPES,
            _QUICK_DTYPES,
        ),
        Suite("host", "Host time per call", "host", _host, _HOST_DTYPES, _HOST_DTYPES),
        Suite("memory", "Memory in training", "memory", _always([_plain(*s) for s in _MEMORY]), _DTYPES, _QUICK_DTYPES),
    )
}
