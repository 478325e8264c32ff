"""The operators `torch.ops.kernel_fusion.*`. Importing any module here defines them all.

`stubs` replaces the C++ kernels until `loader` has loaded them.
"""

from __future__ import annotations

from kernel_fusion.operators import meta, stubs, vmap
from kernel_fusion.operators.decompositions import decompositions

__all__ = ["decompositions", "meta", "stubs", "vmap"]
