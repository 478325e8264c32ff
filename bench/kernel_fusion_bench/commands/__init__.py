"""The commands that this distribution adds to `kernel-fusion`; pyproject.toml lists them as entry points."""

from kernel_fusion_bench.commands.bench import bench
from kernel_fusion_bench.commands.compare import compare, plot, report
from kernel_fusion_bench.commands.profile import profile
from kernel_fusion_bench.commands.tune import tune

__all__ = ["bench", "compare", "plot", "profile", "report", "tune"]
