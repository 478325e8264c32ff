"""Keeps a module out of the fused inference path of `nn.TransformerEncoderLayer`.

That path reads the weight and bias of a plain LayerNorm and never calls the module. It steps aside for modules whose
hooks have a length, so hooks are given one that costs a call nothing: `nn.Module` asks only whether they are true.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from torch import nn


class _CountedHooks(OrderedDict[int, Callable[..., Any]]):
    """Hooks of a module, counted as one more than there are; saved and copied as the plain dictionary."""

    def __len__(self) -> int:
        return super().__len__() + 1

    def __bool__(self) -> bool:
        return super().__len__() > 0

    def __reduce__(self) -> tuple[Any, ...]:
        return OrderedDict, (list(self.items()),)


def keep_out_of_fast_paths(module: nn.Module) -> None:
    """Have `nn.TransformerEncoderLayer` call `module` in inference too."""
    if not isinstance(module._forward_pre_hooks, _CountedHooks):
        module._forward_pre_hooks = _CountedHooks(module._forward_pre_hooks)
