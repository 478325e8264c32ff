"""What an examination may cost and touch: seconds, memory, random numbers, other processes, the life of classes."""

from __future__ import annotations

import gc
import importlib
import json
import sys
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from support import python
from torch import Tensor, nn

import kernel_fusion as kf

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


class Buffered(nn.Module):
    """An RMSNorm with a buffer that it does not read, as FalconMamba's."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weight", torch.ones(64), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """The norm."""
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


def test_layers_with_buffers_on_meta_are_examined_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model of many layers costs as much as one: on `meta` two buffers of a shape and dtype look alike."""
    home = importlib.import_module("kernel_fusion.patching.norm_fit")
    examined, fit = [], home.fit
    monkeypatch.setattr(home, "fit", lambda module, rounding: [examined.append(module), fit(module, rounding)][1])
    with torch.device("meta"):
        model = nn.Sequential(*(Buffered() for _ in range(3)))
    assert len(kf.patch(model).replaced) == 3
    assert len(examined) == 1


class Turning(nn.Module):
    """Takes the next of its norms in each call."""

    def __init__(self) -> None:
        super().__init__()
        self.norms, self.calls = nn.ModuleList([nn.LayerNorm(16), nn.LayerNorm(16)]), 0

    def following(self) -> int:
        """The place of the next norm."""
        self.calls += 1
        return self.calls % 2

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """The norm of a sum."""
        return self.norms[self.following()](x + y)


def test_a_method_that_names_a_norm_is_not_called() -> None:
    """A call in the text of an expression may have an effect, so a patch does not evaluate the expression."""
    model = Turning()
    kf.patch(model)
    assert model.calls == 0
    model(*torch.randn(2, 4, 16))
    assert model.calls == 1


class Call(nn.Module):
    """A function that the module holds."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        """The function."""
        return self.function(x)


def test_no_number_comes_twice() -> None:
    """Another thread draws while code is tried out, and what it drew does not come again after the patch."""
    drawn: list[Tensor] = []

    def watched(x: Tensor) -> Tensor:
        with ThreadPoolExecutor(1) as pool:
            drawn.append(pool.submit(torch.rand, 4).result())
        return x * torch.sigmoid(x)

    kf.patch(nn.Sequential(Call(watched)))
    drawn.append(torch.rand(4))
    assert len(torch.stack(drawn).unique(dim=0)) == len(drawn) > 1


class NoisyNorm(nn.LayerNorm):
    """LayerNorm of a noisy input in training, or a plain one if noise is refused."""

    def forward(self, input: Tensor) -> Tensor:
        """The norm."""
        try:
            noise = torch.randn_like(input) if self.training else 0.0
        except RuntimeError:
            noise = 0.0
        return super().forward(input + noise)


@pytest.mark.parametrize("training", [True, False])
def test_a_norm_that_draws_is_left(training: bool) -> None:
    """The report says so, in both modes, though the code goes on without a draw when it is stopped."""
    report = kf.patch(nn.Sequential(NoisyNorm(16)).train(training))
    assert [line.text for line in report.left] == ["it draws random numbers"]
    assert report.replaced == []


_COLLECTIVE = """
    import torch, torch.distributed as dist
    from torch import nn
    from torch.distributed._functional_collectives import all_reduce
    from torch.testing._internal.distributed.fake_pg import FakeStore
    import kernel_fusion as kf

    class Shared(nn.Module):
        def __init__(self, reduce):
            super().__init__()
            self.reduce = reduce

        def forward(self, x):
            self.reduce(x)
            return x * torch.sigmoid(x)

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    reduces = dist.all_reduce, lambda x: dist.barrier(), lambda x: all_reduce(x, "sum", dist.group.WORLD).wait()
    report = kf.patch(nn.Sequential(*map(Shared, reduces), Shared(lambda x: x)))
    print([line.name for line in report.replaced], [(line.name, line.text) for line in report.left])
    dist.destroy_process_group()
"""


def test_what_communicates_is_left() -> None:
    """Other ranks may not come to a collective that an examination starts, so none is started; the report says why."""
    reason = "it communicates with other processes"
    assert python(_COLLECTIVE).stdout.strip() == str(["3"]) + " " + str([(str(n), reason) for n in range(3)])


_FILE = """
import torch
from torch import nn

def turn(q, k, cos, sin):
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    a, b = (torch.cat((-t[..., 8:], t[..., :8]), -1) for t in (q, k))
    return q * cos + a * sin, k * cos + b * sin

class Angles(nn.Module):
    def forward(self, x, positions):
        angles = (positions.unsqueeze(-1) * torch.linspace(0.1, 1.0, 8)).repeat(1, 1, 2)
        return angles.cos(), angles.sin()

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.act, self.norm, self.angles = nn.SiLU(), nn.LayerNorm(16), Angles()

    def forward(self, x):
        cos, sin = self.angles(x, torch.arange(x.shape[2])[None])
        q, k = turn(x, x, cos, sin)
        h = q + self.act(k) * x
        return self.norm(h) + h
"""


def test_classes_of_a_reloaded_module_are_freed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A notebook that loads its model again and again keeps none of the classes and functions that it had."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "reloaded_later.py").write_text(_FILE)
    loaded = importlib.import_module("reloaded_later")
    model = nn.Sequential(loaded.Block())
    assert len(kf.patch(model).replaced) == 3
    model(torch.randn(2, 3, 5, 16))
    alive = [weakref.ref(thing) for thing in (loaded.Block, loaded.Angles, loaded.turn, type(model[0]))]
    del model, loaded, sys.modules["reloaded_later"]
    gc.collect()
    assert not any(ref() for ref in alive)
