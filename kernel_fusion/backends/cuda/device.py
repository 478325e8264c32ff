"""The properties of a device that plans depend on."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Device:
    """A device's properties.

    Attributes:
        arch: 90 for sm_90.
        shared_bytes: the largest shared memory of a block.
        name: the driver's, which tuned tables use; "" for an absent device.
    """

    arch: int
    shared_bytes: int
    name: str = ""

    @property
    def has_clusters(self) -> bool:
        """Whether a cluster's blocks can write to each other's shared memory."""
        return self.arch >= 90

    @property
    def has_dependent_launch(self) -> bool:
        """Whether a kernel can start while the last one runs (kernels/vectors.cuh)."""
        return self.arch >= 90

    @property
    def resident_threads(self) -> int:
        """Threads of a multiprocessor."""
        return 2048 if self.arch in (80, 90, 100) else 1536

    @staticmethod
    def of(index: int) -> Device:
        """The device `cuda:index`."""
        properties = torch.cuda.get_device_properties(index)
        shared_bytes: int = properties.shared_memory_per_block_optin  # type: ignore[attr-defined]
        return Device(properties.major * 10 + properties.minor, shared_bytes, properties.name)


# Architectures without a device. Source: CUDA C++ Programming Guide, technical specifications.
KNOWN_DEVICES = {
    arch: Device(arch, kilobytes * 1024)
    for arch, kilobytes in {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}.items()
}
