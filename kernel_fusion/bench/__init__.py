"""The benchmark harness: suites are data, workloads and providers small objects, and one module does the timing.

A provider is timed only after its results were compared with float64, and every time stands beside its floor: the time
in which PyTorch's own kernels move the same bytes. The way of a measurement: suites → workloads (bare norms, or chains
of operations) → runner (or host, memory) → check → timing → results → tables, plot, report, compare.
`trace` looks into a single workload.
"""
