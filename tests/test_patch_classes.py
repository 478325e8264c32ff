"""`kf.patch` and the classes of a model: wrappers of methods, lists of one class, and code that asks for a class."""

# ruff: noqa: D102 (the docstring of a module here says what its forward computes)
from __future__ import annotations

import copy
import functools
import pickle
from typing import Any

import pytest
import torch
from patch_support import texts
from support import python
from torch import Tensor, nn

import kernel_fusion as kf


class Checkpointing(nn.Module):
    """Wraps the forward of each subclass in a checkpoint, which only the outermost wrapper makes, as transformers."""

    checkpointing = True

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        forward = cls.forward

        @functools.wraps(forward)
        def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
            if type(self).forward is wrapper and self.checkpointing:
                run = functools.partial(forward, self, **kwargs)
                return torch.utils.checkpoint.checkpoint(run, *args, use_reentrant=False)
            return forward(self, *args, **kwargs)

        cls.forward = wrapper  # type: ignore[method-assign]


class Layer(Checkpointing):
    """norm(h) + h after an addition."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        h = x + self.mix(x)
        return self.norm(h) + h  # type: ignore[no-any-return]


class Extended(Layer):
    """The same, wrapped a second time, as FSDP2 extends a class."""


def runs(model: nn.Module, layer: nn.Module) -> int:
    """How often a layer runs in forward and backward."""
    count = []
    handle = layer.register_forward_hook(lambda *_: count.append(1))
    model(torch.randn(4, 16, requires_grad=True)).sum().backward()
    handle.remove()
    return len(count)


def test_a_copied_wrapper_sees_itself() -> None:
    """A wrapper that works only as its class's method still checkpoints when the method is rewritten."""
    for kind in (Layer, Extended):
        model = kind()
        assert runs(model, model.mix) == 2
        assert texts(kf.patch(model))[kind.__name__] == "addition before self.norm"
        assert runs(model, model.mix) == 2
        model.checkpointing = False
        assert runs(model, model.mix) == 1


class Adapter(nn.LayerNorm):
    """LayerNorm with something after it that no form of ours has."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input).sin()


class Sized(nn.Module):
    """RMSNorm of any size."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


@pytest.mark.parametrize("how", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model)), lambda model: model])
def test_modules_of_one_class_keep_one_class(how: Any) -> None:
    """Wrapping by class name finds them all, though they have several plans, or none; each computes by its own."""
    model = nn.Sequential(*(Layer() for _ in range(4)), Sized(16), nn.Unflatten(-1, (2, 8)), Sized(8))
    model[1].norm, model[2].norm = Adapter(16), nn.LayerNorm(16, bias=False)
    x = torch.randn(4, 16)
    expected = model(x)
    kf.patch(model)
    twin = how(model)
    torch.testing.assert_close(twin(x), expected)
    for kind in (Layer, Sized, nn.LayerNorm):
        own = {type(m) for m in twin.modules() if isinstance(m, kind) and not isinstance(m, Adapter)}
        assert len(own) == 1
    assert runs(nn.Sequential(twin[1]), twin[1].mix) == runs(nn.Sequential(twin[2]), twin[2].mix) == 2
    kf.unpatch(twin)
    assert {type(m) for m in twin.modules()} >= {Layer, Sized, nn.LayerNorm, Adapter}
    assert not any("_kf_place" in vars(m) for m in twin.modules())


def test_caches_of_diffusers_know_a_patched_block() -> None:
    """Their registry is asked for the exact class of a block; a changed class is entered like its original."""
    helpers = pytest.importorskip("diffusers.hooks._helpers", reason="diffusers keeps its registry elsewhere")

    class Block(Layer):
        """A block of its own."""

    helpers.TransformerBlockRegistry.register(Block, helpers.TransformerBlockMetadata(return_hidden_states_index=3))
    model = nn.Sequential(Block())
    kf.patch(model)
    assert type(model[0]) is not Block
    assert helpers.TransformerBlockRegistry.get(type(model[0])).return_hidden_states_index == 3
    assert helpers.TransformerBlockRegistry.get(Block)._cls is Block


def test_what_wraps_a_patched_method_is_named_and_found_again() -> None:
    """diffusers' hooks keep the bound method of a module: it stays patched, and is restored once the hook is gone."""
    model = nn.Sequential(Layer(), Layer())
    kf.patch(model)
    model[0].forward = functools.partial(lambda forward, x: forward(x) + 1, model[0].forward)  # type: ignore[method-assign]
    report = kf.unpatch(model)
    assert [(line.name, line.text) for line in report.left] == [
        ("0", "something holds its patched `forward`, such as a hook that wraps it")
    ]
    assert type(model[1]) is Layer
    assert type(model[0]) is not Layer
    del model[0].forward
    report = kf.unpatch(model)
    assert report.left == []
    assert [line.name for line in report.replaced] == ["0"]


_FLAT = """
    import torch, torch.distributed as dist, warnings
    warnings.simplefilter("ignore")
    from torch import nn
    from torch.distributed.fsdp import FullyShardedDataParallel
    import kernel_fusion as kf
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    for original in (False, True):
        model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))
        wrapped = FullyShardedDataParallel(model, use_orig_params=original, device_id=torch.device("cpu"))
        for one in (wrapped, model, nn.Sequential(nn.LayerNorm(8), wrapped)):
            try:
                kf.patch(one)
            except RuntimeError as error:
                print("FullyShardedDataParallel" in str(error))
                print(not any("_kf_plans" in vars(type(m)) for m in one.modules()))
    dist.destroy_process_group()
"""


@pytest.mark.slow
def test_a_model_that_fsdp1_has_wrapped_is_refused() -> None:
    """The error names the part, with both kinds of parameters, and nothing was touched."""
    assert python(_FLAT).stdout.split() == ["True"] * 12


def test_code_that_asks_for_an_exact_class_sees_another() -> None:
    """A patch promises `isinstance`, not `type(module) is Class`; the page says so."""
    model = nn.Sequential(nn.LayerNorm(16))
    kf.patch(model)
    assert isinstance(model[0], nn.LayerNorm)
    assert type(model[0]) is not nn.LayerNorm
