"""The suites, as data: named shapes and the dtypes they are measured in. A new suite is one more entry of `SUITES`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from kernel_fusion.testing.oracle import RowNormCase


@dataclass(frozen=True)
class Workload:
    """One named call to measure."""

    name: str
    case: RowNormCase


@dataclass(frozen=True)
class Suite:
    """Named shapes of one verb.

    Attributes:
        name: what the command line calls it.
        title: what tables and plots call it.
        verb: as in `RowNormCase`.
        shapes: name of the configuration to shape of the input.
        dtypes, quick_dtypes: by device type, what is measured by default and under `--quick`.
    """

    name: str
    title: str
    verb: str
    shapes: dict[str, tuple[int, ...]]
    dtypes: dict[str, tuple[torch.dtype, ...]]
    quick_dtypes: dict[str, tuple[torch.dtype, ...]]

    def with_shapes(self, shapes: Sequence[tuple[int, ...]]) -> Suite:
        """The same suite over other shapes, named after themselves."""
        named = {"x".join(map(str, shape)): shape for shape in shapes}
        return replace(self, title=f"{self.verb} on chosen shapes", shapes=named)

    def workloads(self, dtypes: Sequence[torch.dtype]) -> list[Workload]:
        """Every shape in every dtype, weight and bias in the same."""
        return [
            Workload(name, RowNormCase(self.verb, shape, dtype, weight=dtype, bias=dtype))
            for dtype in dtypes
            for name, shape in self.shapes.items()
        ]


MODELS = Suite(
    name="models",
    title="LayerNorm in eleven transformer models",
    verb="layer_norm",
    # (batch, sequence, hidden)
    shapes={
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
    },
    dtypes={"cuda": (torch.bfloat16, torch.float16, torch.float32), "cpu": (torch.float32, torch.bfloat16)},
    quick_dtypes={"cuda": (torch.bfloat16, torch.float32), "cpu": (torch.float32,)},
)

SUITES = {suite.name: suite for suite in (MODELS,)}
