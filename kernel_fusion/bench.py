"""`kf.bench`: the functions of kernel-fusion-bench that programs call; its package `kernel_fusion_bench` has all."""

try:
    from kernel_fusion_bench import Times, compare, run_suite
except ModuleNotFoundError as error:
    if error.name != "kernel_fusion_bench":
        raise
    message = "`kernel_fusion.bench` needs kernel-fusion-bench (in a checkout: pip install ./bench)"
    raise ModuleNotFoundError(message, name=error.name) from error

__all__ = ["Times", "compare", "run_suite"]
