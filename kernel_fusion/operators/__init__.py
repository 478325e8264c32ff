"""The operators `torch.ops.kernel_fusion.*`; importing any module here defines all."""

from __future__ import annotations

from kernel_fusion.operators import meta, stubs, vmap
from kernel_fusion.operators.decompositions import decompositions

__all__ = ["decompositions", "meta", "stubs", "vmap"]
