"""Activation modules: recognises ours and makes a forward that computes them in one pass.

A module that PyTorch computes in a single kernel is left.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from kernel_fusion.core.activations import ACTIVATIONS
from kernel_fusion.functional import bias_act, softmax
from kernel_fusion.patching.agree import FLOATING, attempt, disagreement, is_floating, same_values
from kernel_fusion.patching.autocast import CudaAutocast, widened
from kernel_fusion.patching.examining import generator
from kernel_fusion.patching.reads import Name, Reads, noted
from kernel_fusion.patching.stand_in import StandIn, arguments
from kernel_fusion.patching.swap import Plan, Whole, is_captured, original_class

# Any two of our activations differ somewhere by 3e-4; two fp32 spellings of one differ by less than this.
_SAME = 1e-5


@dataclass(frozen=True)
class ActivationForm(Plan):
    """An activation, by name."""

    name: str
    reads: Reads
    widens: bool  # under CUDA's autocast

    def __str__(self) -> str:
        return f"bias_act, activation={self.name!r}"

    def read(self, original: type[nn.Module]) -> tuple[Any, ...]:
        """The functions that were examined."""
        return self.reads.now(original)

    def methods(self, original: type[nn.Module], whole: Whole) -> Mapping[str, Callable[..., Any]]:
        """The methods that replace those of a patched activation."""
        holds = self.reads.guard(original)

        def forward(self_: nn.Module, *args: Any, **kwargs: Any) -> Any:
            ours = not is_captured() and len(args) == 1 and not kwargs and is_floating(args[0])
            if not ours or not holds(self_):
                return original.forward(self_, *args, **kwargs)
            return bias_act(widened(args[0]) if self.widens else args[0], None, self.name)

        return {"forward": forward}


_FORWARD = Reads(names=(Name(0, ("forward",)),))


class Known(NamedTuple):
    """An activation that is ours: its name, whether CUDA's autocast makes its result fp32, and what its code reads."""

    name: str
    widens: bool
    reads: Reads


@dataclass(frozen=True)
class SoftmaxForm(Plan):
    """A softmax over the last dimension."""

    def __str__(self) -> str:
        return "softmax"

    def methods(self, original: type[nn.Module], whole: Whole) -> Mapping[str, Callable[..., Any]]:
        """The methods that replace those of a patched `nn.Softmax`."""
        holds = _FORWARD.guard(original)

        def forward(self_: nn.Module, input: Tensor) -> Tensor:
            dim = self_.dim
            last = isinstance(dim, int) and dim in (-1, input.dim() - 1)
            autocast = not input.is_meta and torch.is_autocast_enabled(input.device.type)  # PyTorch returns fp32
            if is_captured() or autocast or not last or not is_floating(input) or not holds(self_):
                return original.forward(self_, input)  # type: ignore[no-any-return]
            return softmax(input, -1)

        return {"forward": forward}


class _Operations(TorchDispatchMode):
    """Counts the operations that run, except views."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count an operation, unless it is a view, and call it."""
        self.count += not func.is_view
        return func(*args, **(kwargs or {}))


def name_of(function: Callable[[Tensor], Any]) -> str | None:
    """The name of the activation that a function computes, or None; found by calling it, forward and backward."""
    x = torch.linspace(-8, 8, 1001, dtype=torch.float32)
    x = torch.cat((x, x[::20] ** 7)).reshape(4, 263, 1)  # some act on large values only
    kept = x.clone()
    try:
        with torch.no_grad():
            y = function(x)
    except Exception:  # unknown code may raise anything
        return None
    if not isinstance(y, Tensor) or y.shape != x.shape or y.dtype != x.dtype or not torch.equal(x, kept):
        return None
    if isinstance(function, StandIn) and not function.is_steady(x):
        return None
    for name, activation in ACTIVATIONS.items():
        if bool(((y - activation(x)).abs() <= _SAME * torch.maximum(y.abs(), x.abs()).clamp(min=1)).all()):
            return name if _agrees(function, name) and _agrees_beyond(function, name) else None
    return None


def _agrees(function: Callable[[Tensor], Any], name: str) -> bool:
    """Whether our activation is no less exact in every dtype, forward and backward."""
    x = 3 * torch.randn(4, 16, 65, generator=generator())

    def ours(x: Tensor) -> Tensor:
        return bias_act(x, None, name, backend="eager")

    return all(disagreement(ours, function, ACTIVATIONS[name], [x.to(dtype)]) is None for dtype in FLOATING)


def _agrees_beyond(function: Callable[[Tensor], Any], name: str) -> bool:
    """Whether our activation gives the same for infinities and NaN."""
    odd = torch.tensor([torch.inf, -torch.inf, torch.nan]).reshape(3, 1, 1)
    y = attempt(function, odd)
    return y is not None and same_values(y, bias_act(odd, None, name, backend="eager"))


def known_activation(act: Any) -> Known | str | None:
    """The activation that a module or function computes, why it cannot be replaced, or None if it is none of ours."""
    function = StandIn(act) if isinstance(act, nn.Module) else act
    name = name_of(function)
    if name is None:
        return None
    with torch.no_grad(), CudaAutocast():
        widens = bool(function(torch.ones(4, 4, 4, dtype=torch.bfloat16)).dtype == torch.float32)
    module = function.module if isinstance(function, StandIn) else None

    def calls() -> None:
        for dtype, training in itertools.product(FLOATING, (True, False)):
            if module is not None:
                vars(module)["training"] = training
            attempt(function, torch.ones(4, 4, 4, dtype=dtype))
            with torch.enable_grad(), contextlib.suppress(Exception):
                function(torch.ones(4, 4, 4, dtype=dtype, requires_grad=True))

    reads, reason = noted(module, calls)
    return reason or Known(name, widens, reads)


def operations(function: Callable[[Tensor], Any]) -> int:
    """How many PyTorch operations a function of one tensor runs."""
    x = torch.ones(4, 4, 4)
    counted = _Operations()  # type: ignore[no-untyped-call]
    with torch.no_grad(), counted:
        function(x)
    return counted.count


def fit_activation(module: nn.Module) -> ActivationForm | str | None:
    """The form of an activation module, the reason to leave it, or None if it is no activation."""
    if module._parameters or module._buffers or not arguments(original_class(type(module)).forward):
        return None
    known = known_activation(module)
    if known is None:
        return None
    if operations(StandIn(module)) == 1:
        return "PyTorch computes it in one kernel"
    return known if isinstance(known, str) else ActivationForm(known.name, known.reads, known.widens)


def fit_softmax(module: nn.Module) -> SoftmaxForm | str:
    """The form of an `nn.Softmax`."""
    if original_class(type(module)).forward is not nn.Softmax.forward:
        return "its forward is its own"
    if getattr(module, "dim", None) is None:
        return "it has no dimension"
    if module.dim != -1:
        return "it is not over the last dimension"
    same = disagreement(lambda x: softmax(x, -1, backend="eager"), StandIn(module), _softmax, [_scores()])
    return SoftmaxForm() if same is None else f"{same} differs from ours"


def _softmax(x: Tensor) -> Tensor:
    return torch.softmax(x, -1)


def _scores() -> Tensor:
    return torch.randn(3, 5, 33, generator=generator())
