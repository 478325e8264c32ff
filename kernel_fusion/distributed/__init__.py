"""Calls of tensors that are spread over ranks: DTensors, parallel styles, and norms of rows that ranks share.

`import kernel_fusion` does not import this package, because `torch.distributed.tensor` takes half a second.
"""

from __future__ import annotations

from kernel_fusion.distributed.styles import (
    FeatureParallel,
    PackedColwiseParallel,
    ResidualSequenceParallel,
    fsdp_placement,
)

__all__ = ["FeatureParallel", "PackedColwiseParallel", "ResidualSequenceParallel", "fsdp_placement"]
