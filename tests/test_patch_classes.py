"""`kf.patch` and the classes of a model: wrappers of methods, lists of one class, and code that asks for a class."""

# ruff: noqa: D102 (the docstring of a module here says what its forward computes)
from __future__ import annotations

import functools
from typing import Any

import torch
from patch_support import texts
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

        wrapper.outermost = wrapper  # type: ignore[attr-defined]
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
        forward: Any = type(model).forward
        assert forward.outermost is forward
        model.checkpointing = False
        assert runs(model, model.mix) == 1
