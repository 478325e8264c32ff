"""Makes the modules of an existing model call this library's kernels, with the same results."""

from __future__ import annotations

from kernel_fusion.patching.patch import patch, unpatch
from kernel_fusion.patching.report import Report

__all__ = ["Report", "patch", "unpatch"]
