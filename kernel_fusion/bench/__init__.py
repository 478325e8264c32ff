"""The benchmark harness: suites are data, workloads and providers small objects, and one module does the timing.

A provider is timed only after its results were compared with float64, and every time stands beside its floor: the time
in which PyTorch's own kernels move the same bytes. The way of a measurement: suites → workloads (bare norms, or
operations) → runner (or host, memory) → check → timing → results → tables, plot, report, compare.
`run_suite` goes all of that way, for the command line as for any program. `trace` looks into a single workload.
"""

from kernel_fusion.bench.functions import Times, compare
from kernel_fusion.bench.runner import run_suite

__all__ = ["Times", "compare", "run_suite"]
