"""The floor: the time of a PyTorch kernel that moves the bytes of a workload, plus the bare matrix products.

`torch.neg` stands for workloads that read about as much as they write, `torch.add` for those that read nearly twice as
much. If almost nothing is written, the floor is the time of reading: computed from a known bandwidth, or PyTorch's sum.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from kernel_fusion_bench.providers import Contender
from kernel_fusion_bench.workloads import Call, Direction, Inputs, Part, Traffic, Workload

# Bytes per second that a read-only kernel reaches on large tensors, by a part of the device's name.
READ_BANDWIDTH = {"H200": 4.5e12}

# From this many bytes read per byte written, `add` (two) is closer than `neg` (one).
_ADD_FROM = 1.75
# A workload that writes less than one byte per this many read counts as read-only.
_READ_ONLY_FROM = 32
# An input tensor is reused if its size differs by at most this share.
_CLOSE = 0.02

METHOD = (
    "the bytes of the inputs and results by one PyTorch kernel, timed like the rest: torch.neg, or torch.add where at "
    f"least {_ADD_FROM} times as much is read as written (for a norm: neg(x) forward, add(x, dy) backward); where next "
    "to nothing is written, the bytes over "
    + ", ".join(f"{bandwidth / 1e12:g} TB/s on an {name}" for name, bandwidth in READ_BANDWIDTH.items())
    + " (forward alone, computed: 0 iterations), on other devices torch.sum over rows; matrix products: torch.bmm "
    "alone before the passes over their result"
)


@dataclass(frozen=True)
class Floor(Contender):
    """A contender that only moves bytes."""

    name: str = "floor"
    version: str = torch.__version__

    def prepare(self, direction: Direction, workload: Workload, inputs: Inputs) -> Call:
        """The kernels of `direction`, on contiguous tensors whatever the layout of the inputs."""
        parts: tuple[Part, ...] = ("forward", "backward") if direction == "forward+backward" else (direction,)
        calls = [
            call
            for part in parts
            for call in (*workload.products(part, inputs), *_moves(workload.traffic(part), inputs))
        ]
        if len(calls) == 1:
            return calls[0]
        return lambda: tuple(call() for call in calls)


def computed_ms(direction: Direction, workload: Workload, device: torch.device) -> float | None:
    """The floor in ms if it is computed; None if it must be measured."""
    if direction != "forward" or device.type != "cuda":
        return None
    traffic = workload.traffic("forward")
    name = torch.cuda.get_device_name(device)
    bandwidth = next((known for part, known in READ_BANDWIDTH.items() if part in name), None)
    return traffic.total / bandwidth * 1e3 if bandwidth and _reads_only(traffic) else None


def _reads_only(traffic: Traffic) -> bool:
    return traffic.written * _READ_ONLY_FROM <= traffic.read and traffic.read > 0


def _moves(traffic: Traffic, inputs: Inputs) -> list[Call]:
    if traffic.total == 0:
        return []
    if _reads_only(traffic):
        (x,) = _tensors_of(traffic.read, 1, inputs)
        return [partial(torch.sum, x, -1)]
    if traffic.read >= _ADD_FROM * traffic.written:
        return [partial(torch.add, *_tensors_of(traffic.total // 3, 2, inputs))]
    return [partial(torch.neg, *_tensors_of(traffic.total // 2, 1, inputs))]


def _tensors_of(num_bytes: int, count: int, inputs: Inputs) -> list[Tensor]:
    """`count` contiguous tensors of about this size and one dtype; inputs are reused if they fit."""
    dtype = inputs.cotangents[0].dtype

    def fits(t: Tensor) -> bool:
        return t.dtype == dtype and abs(t.nbytes - num_bytes) <= _CLOSE * num_bytes

    candidates = [t.detach().contiguous() for t in inputs.tensors if fits(t)]
    found = [t for t in candidates if t.shape == candidates[0].shape][:count]
    generator = torch.Generator(inputs.cotangents[0].device).manual_seed(1)
    while len(found) < count:
        size = found[0].shape if found else (num_bytes // dtype.itemsize,)
        found.append(torch.randn(size, dtype=dtype, device=generator.device, generator=generator))
    return found
