"""The benchmark harness: nothing is timed before its results were compared with float64.

suites → workloads → runner (or host, memory) → check → timing → results → tables, summary, plot, report, changes.
`run_suite` runs all of it; `compare` times a user's own functions.
"""

from kernel_fusion_bench.functions import Times, compare
from kernel_fusion_bench.runner import run_suite

__all__ = ["Times", "compare", "run_suite"]
