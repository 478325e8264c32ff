"""Memory in training: the bytes that autograd keeps, and the peak of a step without the inputs.

A CUDA device reports its peak. On a CPU the peak is the bytes of saved tensors, outputs and gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from kernel_fusion_bench import check
from kernel_fusion_bench.providers import Provider
from kernel_fusion_bench.results import Results
from kernel_fusion_bench.timing import Setup
from kernel_fusion_bench.workloads import Call, Inputs, Workload

_Result = TypeVar("_Result")

METHODS = {
    "saved": "bytes of the tensors that autograd saved, inputs apart",
    "cuda": "peak of torch.cuda.max_memory_allocated in forward and backward, above what the inputs take",
    "cpu": "bytes of the tensors that autograd saved (inputs apart), of the outputs and of the gradients",
}


def measure(results: Results, workload: Workload, setup: Setup) -> Iterator[str]:
    """Measure saved and peak bytes of a training step; yields once."""
    (inputs,) = workload.input_sets(setup.device, 1)
    for provider, errors in check.passing(results, workload, setup, inputs).items():
        counts = {
            "saved_bytes": saved_bytes(provider, workload, inputs),
            "training_memory_bytes": training_bytes(provider, workload, inputs),
        }
        results.add(setup, workload, "forward+backward", provider, errors, **counts)
    yield "bytes"


def training_bytes(provider: Provider, workload: Workload, inputs: Inputs) -> int:
    """Bytes that one forward and backward add to the inputs."""
    device = inputs.cotangents[0].device
    if device.type != "cuda":
        return saved_bytes(provider, workload, inputs, with_results=True)
    call = provider.prepare("forward+backward", workload, inputs)
    before = torch.cuda.memory_allocated(device)
    return peak_bytes(call, device) - before


def peak_bytes(call: Call, device: torch.device) -> int:
    """The most memory allocated on a CUDA device during a call."""
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    call()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device)


def saved_bytes(provider: Provider, workload: Workload, inputs: Inputs, with_results: bool = False) -> int:
    """Bytes, without inputs, that autograd keeps for backward and, if wanted, of results and gradients.

    Each storage counts once; an output that backward reads is kept.
    """
    inputs = provider.accepted(workload, inputs)
    outputs, saved = saving(partial(inputs.call, provider.function(workload)))
    if with_results:
        saved |= storages((*outputs, *inputs.gradients(outputs, retain_graph=True)))
    return sum(saved[at] for at in saved.keys() - storages(inputs.tensors))


def saving(forward: Callable[[], _Result]) -> tuple[_Result, dict[int, int]]:
    """The results of a forward, and the bytes of the storages that autograd saved, by address.

    The graph keeps what it saved until the results go, so no two storages share an address.
    """
    saved: dict[int, int] = {}

    def count(tensor: Tensor) -> Tensor:
        saved.update(storages([tensor]))
        return tensor.detach()  # otherwise result and saved tensor keep each other alive

    with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        return forward(), saved


def storages(tensors: Iterable[Tensor]) -> dict[int, int]:
    """The bytes of the tensors' storages, by address."""
    return {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
