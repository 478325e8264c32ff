"""The benchmark harness. A provider is timed only after its results were compared with float64.

The way of a measurement: suites → workloads → runner (or host, memory) → check → timing → results → tables, summary,
plot, report, changes. `run_suite` goes all of that way; `compare` times functions of one's own.
"""

from kernel_fusion.bench.functions import Times, compare
from kernel_fusion.bench.runner import run_suite

__all__ = ["Times", "compare", "run_suite"]
