"""The operators `torch.ops.kernel_fusion.*`: schemas, tracing, `torch.vmap`, loading, and the choice of a backend.

Importing any module here defines them all. Schemas are in Python, so that `import kernel_fusion` builds nothing and
`torch.export.load` works in a fresh process. `stubs` replaces the C++ kernels until `loader` has loaded them.
"""

from __future__ import annotations

from kernel_fusion.operators import meta, stubs, vmap
from kernel_fusion.operators.decompositions import decompositions

__all__ = ["decompositions", "meta", "stubs", "vmap"]
