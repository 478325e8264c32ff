"""Memory of one training step (forward and backward) beyond its inputs.

A CUDA device reports its peak. The CPU allocator reports nothing, so there the bytes are counted that must exist at
once: what autograd saved, the output and the gradients.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernel_fusion.bench.providers import Provider, gradient_leaves
from kernel_fusion.testing.oracle import Inputs, RowNormCase

METHODS = {
    "cuda": "peak of torch.cuda.max_memory_allocated in forward and backward, above what the inputs take",
    "cpu": "bytes of the tensors that autograd saved (inputs apart), of the output and of the gradients",
}


def training_bytes(provider: Provider, case: RowNormCase, inputs: Inputs) -> int:
    """Bytes that one forward and backward take above the inputs."""
    if inputs.x.device.type == "cuda":
        return _peak_bytes(provider, case, inputs)
    return _saved_and_result_bytes(provider, case, inputs)


def _peak_bytes(provider: Provider, case: RowNormCase, inputs: Inputs) -> int:
    device = inputs.x.device
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    provider.prepare("forward+backward", case, inputs)()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def _saved_and_result_bytes(provider: Provider, case: RowNormCase, inputs: Inputs) -> int:
    storages: dict[int, int] = {}

    def count(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        # The graph holds what it saved until the result is dropped, so no two storages share an address.
        y = provider.forward(case, inputs)
    leaves = gradient_leaves(inputs)
    gradients = provider.backward(y, tuple(leaves.values()), inputs.dy, True)
    for result in (y, *gradients):
        count(result)
    for leaf in leaves.values():
        storages.pop(leaf.untyped_storage().data_ptr(), None)
    return sum(storages.values())
