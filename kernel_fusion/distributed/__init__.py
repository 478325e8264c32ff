"""Tensors spread over ranks: sharding rules, parallel styles, norms of spread rows.

`import kernel_fusion` skips this, because `torch.distributed.tensor` takes half a second.
"""

from __future__ import annotations

from kernel_fusion.distributed.styles import (
    FeatureParallel,
    PackedColwiseParallel,
    ResidualSequenceParallel,
    fsdp_placement,
)

__all__ = ["FeatureParallel", "PackedColwiseParallel", "ResidualSequenceParallel", "fsdp_placement"]
