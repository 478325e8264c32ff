"""What an examination may cost and touch: seconds, memory, random numbers, other processes, the life of classes."""

from __future__ import annotations

import json

from support import python

_LEAVES = """
    import json, resource, sys, time, torch
    from torch import nn
    from transformers.models.aria.modeling_aria import AriaGroupedExpertsGemm
    from transformers.models.csm.modeling_csm import CsmCodebooksHead
    from transformers.models.jetmoe.modeling_jetmoe import JetMoeParallelExperts
    import kernel_fusion as kf

    class Own(nn.Module):
        def __init__(self, *shape):
            super().__init__()
            self.weight = nn.Parameter(torch.empty(shape))

    class OwnLinear(Own):
        def forward(self, x):
            return x @ self.weight.T

    class OwnEmbedding(Own):
        def forward(self, x):
            return self.weight[x]

    class OwnMask(nn.Module):
        def __init__(self, size):
            super().__init__()
            self.register_buffer("mask", torch.ones(size, size))

        def forward(self, x, y):
            return x * self.mask[: len(x)], y * self.mask[: len(y)]

    class OwnNorm(Own):
        def forward(self, x):
            return self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)

    kinds = {
        "linear": lambda: OwnLinear(1024, 1024),
        "small linear": lambda: OwnLinear(256, 256),
        "embedding": lambda: OwnEmbedding(1_000_000, 256),
        "mask": lambda: OwnMask(32768),
        "norm": lambda: OwnNorm(2**16),
        "long norm": lambda: OwnNorm(2**16 + 1),
        "LayerNorm": lambda: nn.LayerNorm((256, 128, 128)),
        "csm": lambda: CsmCodebooksHead(1024, 32, 2051),
        "jetmoe": lambda: JetMoeParallelExperts(8, 2048, 11264),
        "aria": lambda: AriaGroupedExpertsGemm(4096, 8192, 64),
    }
    kf.patch(nn.LayerNorm(8))  # what the first call of a process loads
    for name, make in kinds.items():
        with torch.device("meta"):
            model = make()
        before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
        report = kf.patch(model)
        seconds, kilobytes = time.process_time() - start, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        print(json.dumps([name, len(report.replaced), [line.text for line in report.left], seconds, kilobytes / 1e6]))
"""


def test_an_examination_is_bounded_before_it_allocates() -> None:
    """A large parameter, buffer or row takes neither minutes nor gigabytes, whether it belongs to a norm or not."""
    for line in python(_LEAVES).stdout.splitlines():
        name, replaced, left, seconds, gigabytes = json.loads(line)
        assert replaced == (name in ("norm", "LayerNorm")), name
        assert left == (["its rows are too long to be tried out"] if name == "long norm" else []), name
        assert seconds < 5, name
        assert gigabytes < 1, name
