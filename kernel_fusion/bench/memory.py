"""Memory in training: what autograd keeps between forward and backward, and what a training step takes at its peak.

A CUDA device reports its peak. The CPU allocator reports nothing, so there the bytes are counted that must exist at
once: what autograd saved, the output and the gradients. Inputs are counted nowhere.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from kernel_fusion.bench import check
from kernel_fusion.bench.providers import Provider, arguments, gradient_leaves, input_sets
from kernel_fusion.bench.results import Results
from kernel_fusion.bench.suites import Workload
from kernel_fusion.bench.timing import Setup
from kernel_fusion.testing.oracle import Inputs, RowNormCase

METHODS = {
    "saved": "bytes of the tensors that autograd saved, inputs apart",
    "cuda": "peak of torch.cuda.max_memory_allocated in forward and backward, above what the inputs take",
    "cpu": "bytes of the tensors that autograd saved (inputs apart), of the output and of the gradients",
}


def measure(results: Results, workload: Workload, setup: Setup) -> Iterator[str]:
    """Saved and peak bytes of a training step; yields once."""
    (inputs,) = input_sets(workload.case, setup.device, 1)
    for provider, errors in check.passing(results, workload, setup, inputs).items():
        saved = saved_bytes(provider, workload.case, inputs)
        peak = training_bytes(provider, workload.case, inputs)
        results.add(workload, "forward+backward", provider, None, errors, saved, peak)
    yield "bytes"


def training_bytes(provider: Provider, case: RowNormCase, inputs: Inputs) -> int:
    """Bytes that one forward and backward take above the inputs."""
    if inputs.x.device.type != "cuda":
        return _bytes_kept(provider, case, inputs, with_results=True)
    device = inputs.x.device
    call = provider.prepare("forward+backward", case, inputs)
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    call()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def saved_bytes(provider: Provider, case: RowNormCase, inputs: Inputs) -> int:
    """Bytes that autograd keeps for backward, inputs apart; the output is among them where backward reads it."""
    return _bytes_kept(provider, case, inputs, with_results=False)


def _bytes_kept(provider: Provider, case: RowNormCase, inputs: Inputs, with_results: bool) -> int:
    """Bytes of the storages that autograd saved and, if wanted, of y and the gradients; each counts once."""
    storages: dict[int, int] = {}

    def count(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    inputs = provider.accepted(case, inputs)
    leaves = gradient_leaves(inputs)
    with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        # The graph holds what it saved until the result is dropped, so no two storages share an address.
        y = provider.norm(case)(*arguments(inputs))
    if with_results:
        for result in (y, *torch.autograd.grad(y, tuple(leaves.values()), inputs.dy, retain_graph=True)):
            count(result)
    for leaf in leaves.values():
        storages.pop(leaf.untyped_storage().data_ptr(), None)
    return sum(storages.values())
