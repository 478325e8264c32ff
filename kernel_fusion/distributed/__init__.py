"""Tensors spread over ranks. `import kernel_fusion` skips it: `torch.distributed.tensor` takes half a second."""

from __future__ import annotations

from kernel_fusion.distributed.styles import (
    FeatureParallel,
    PackedColwiseParallel,
    ResidualSequenceParallel,
    fsdp_placement,
)

__all__ = ["FeatureParallel", "PackedColwiseParallel", "ResidualSequenceParallel", "fsdp_placement"]
