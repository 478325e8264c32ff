"""Tensors that are spread over ranks: sharding rules of every operator, parallel styles, norms of spread rows.

Verbs and modules take DTensors without any of this being imported. What is for users are the styles; to import them is
to import `torch.distributed.tensor`, which takes half a second, so `import kernel_fusion` does not.
"""

from __future__ import annotations

from kernel_fusion.distributed.styles import (
    FeatureParallel,
    PackedColwiseParallel,
    ResidualSequenceParallel,
    fsdp_placement,
)

__all__ = ["FeatureParallel", "PackedColwiseParallel", "ResidualSequenceParallel", "fsdp_placement"]
