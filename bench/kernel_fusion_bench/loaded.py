"""Loads compiled kernels, to learn what a plan takes on a device before anything is launched."""

from __future__ import annotations

from typing import Any

import torch


class Kernel:
    """A kernel loaded on one device, and how many blocks run at once."""

    def __init__(self, plan: Any, name: str, code: bytes, index: int) -> None:  # pragma: gpu
        from cuda.bindings import driver

        torch.cuda.current_stream(index).synchronize()  # makes the device's context current on this thread
        library = _checked(driver.cuLibraryLoadData(code, [], [], 0, [], [], 0))
        kernel = _checked(driver.cuLibraryGetKernel(library, name.encode()))
        self.function = _checked(driver.cuKernelGetFunction(kernel))
        if plan.shared_bytes:
            attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            _checked(driver.cuFuncSetAttribute(self.function, attribute, plan.shared_bytes))
        if plan.cluster > 8:
            attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED
            _checked(driver.cuFuncSetAttribute(self.function, attribute, 1))
        if plan.cluster > 1:
            clusters = _checked(driver.cuOccupancyMaxActiveClusters(self.function, _in_clusters(plan)))
            self.max_blocks = plan.cluster * max(1, clusters)
            return
        blocks = driver.cuOccupancyMaxActiveBlocksPerMultiprocessor(self.function, plan.threads, plan.shared_bytes)
        multiprocessors = torch.cuda.get_device_properties(index).multi_processor_count
        self.max_blocks = max(1, _checked(blocks) * multiprocessors)

    @property
    def local_bytes(self) -> int:  # pragma: gpu
        """The bytes of memory that each thread has for what registers cannot hold."""
        from cuda.bindings import driver

        attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES
        return int(_checked(driver.cuFuncGetAttribute(attribute, self.function)))


def _in_clusters(plan: Any) -> Any:  # pragma: gpu
    """The launch of one cluster."""
    from cuda.bindings import driver

    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = plan.cluster, 1, 1
    config.blockDimX, config.blockDimY, config.blockDimZ = plan.threads, 1, 1
    config.sharedMemBytes = plan.shared_bytes
    config.hStream = driver.CUstream(0)
    attribute = driver.CUlaunchAttribute()
    attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
    dimension = attribute.value.clusterDim
    dimension.x, dimension.y, dimension.z = plan.cluster, 1, 1
    config.attrs, config.numAttrs = [attribute], 1
    return config


def _checked(result: Any) -> Any:  # pragma: gpu
    error, *values = result
    if int(error):
        raise RuntimeError(f"kernel_fusion: the CUDA driver answered {error}")
    return values[0] if values else None
