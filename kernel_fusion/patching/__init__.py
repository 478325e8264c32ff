"""One line for a model that exists: its modules call this library's kernels, and it computes the same."""

from __future__ import annotations

from kernel_fusion.patching.patch import patch, unpatch
from kernel_fusion.patching.report import Report

__all__ = ["Report", "patch", "unpatch"]
