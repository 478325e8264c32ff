"""Memory in training: the bytes that autograd keeps, and the peak of a step without the inputs.

A CUDA device reports its peak. On a CPU the peak is the bytes of saved tensors, outputs and gradients.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from kernel_fusion.bench import check
from kernel_fusion.bench.providers import Provider
from kernel_fusion.bench.results import Results
from kernel_fusion.bench.timing import Setup
from kernel_fusion.bench.workloads import Inputs, Workload

METHODS = {
    "saved": "bytes of the tensors that autograd saved, inputs apart",
    "cuda": "peak of torch.cuda.max_memory_allocated in forward and backward, above what the inputs take",
    "cpu": "bytes of the tensors that autograd saved (inputs apart), of the outputs and of the gradients",
}


def measure(results: Results, workload: Workload, setup: Setup) -> Iterator[str]:
    """Measure saved and peak bytes of a training step; yields once."""
    (inputs,) = workload.input_sets(setup.device, 1)
    for provider, errors in check.passing(results, workload, setup, inputs).items():
        saved = saved_bytes(provider, workload, inputs)
        peak = training_bytes(provider, workload, inputs)
        results.add(setup, workload, "forward+backward", provider, None, errors, saved, peak)
    yield "bytes"


def training_bytes(provider: Provider, workload: Workload, inputs: Inputs) -> int:
    """Bytes that one forward and backward add to the inputs."""
    device = inputs.cotangents[0].device
    if device.type != "cuda":
        return _bytes_kept(provider, workload, inputs, with_results=True)
    call = provider.prepare("forward+backward", workload, inputs)
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    call()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def saved_bytes(provider: Provider, workload: Workload, inputs: Inputs) -> int:
    """Bytes, without inputs, that autograd keeps for backward; an output counts if backward reads it."""
    return _bytes_kept(provider, workload, inputs, with_results=False)


def _bytes_kept(provider: Provider, workload: Workload, inputs: Inputs, with_results: bool) -> int:
    """Bytes of the storages that autograd saved and, if wanted, of results and gradients; each counts once."""
    storages: dict[int, int] = {}

    def count(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
        return tensor.detach()  # otherwise result and saved tensor keep each other alive

    inputs = provider.accepted(workload, inputs)
    with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        # The graph keeps what it saved until the results go, so no two storages share an address.
        outputs = inputs.call(provider.function(workload))
    if with_results:
        gradients = inputs.gradients(outputs, retain_graph=True)
        for result in (*outputs, *gradients):
            count(result)
    for tensor in inputs.tensors:
        storages.pop(tensor.untyped_storage().data_ptr(), None)
    return sum(storages.values())
