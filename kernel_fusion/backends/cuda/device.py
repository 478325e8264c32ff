"""The properties of a device that plans depend on."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Device:
    """A device's properties.

    Attributes:
        arch: the architecture, such as 90 for sm_90.
        shared_bytes: the largest shared memory of a block.
        name: the driver's name of the device, by which tuned tables know it; "" for a device that is not there.
    """

    arch: int
    shared_bytes: int
    name: str = ""

    @property
    def has_clusters(self) -> bool:
        """Whether blocks can form clusters, whose blocks write to each other's shared memory."""
        return self.arch >= 90

    @property
    def has_dependent_launch(self) -> bool:
        """Whether a kernel can start while the kernel before it runs (kernels/vectors.cuh)."""
        return self.arch >= 90

    @property
    def resident_threads(self) -> int:
        """The number of threads that a multiprocessor holds."""
        return 2048 if self.arch in (80, 90, 100) else 1536

    @staticmethod
    def of(index: int) -> Device:
        """The device `cuda:index`."""
        properties = torch.cuda.get_device_properties(index)
        shared_bytes: int = properties.shared_memory_per_block_optin  # type: ignore[attr-defined]
        return Device(properties.major * 10 + properties.minor, shared_bytes, properties.name)


# The properties of architectures, for planning without a device. Source: CUDA C++ Programming Guide, technical
# specifications.
KNOWN_DEVICES = {
    arch: Device(arch, kilobytes * 1024)
    for arch, kilobytes in {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}.items()
}
