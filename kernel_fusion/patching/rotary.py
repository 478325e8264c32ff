"""Rotary embeddings: finds modules that make angles and functions that apply them, by calling both.

Transformers repeats each angle for both columns of a pair; ours takes it once. No tensor shows that it was repeated, so
a patched module marks those it makes. A call whose angles have no mark runs its own code.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from kernel_fusion.functional.rotary import rotate
from kernel_fusion.patching.agree import FLOATING, attempt, differing_bits, disagreement
from kernel_fusion.patching.examining import examining, generator
from kernel_fusion.patching.reads import Name, Reads, noted
from kernel_fusion.patching.stand_in import StandIn, arguments
from kernel_fusion.patching.swap import Plan, Whole, is_bare, is_captured, original_class

_MARK = "_kf_angles"
_COLUMNS = 16  # of made-up heads
_FAR = [2**power for power in range(6, 18)]  # positions; some makers have tables of fewer, others make them so long
ONCE, HALVES, PAIRS = "once", "halves", "pairs"
# How the columns of cos and sin stand for the pairs of columns of a head.
_REPEAT: dict[str, Callable[[Tensor], Tensor]] = {
    ONCE: lambda t: t,
    HALVES: lambda t: torch.cat((t, t), -1),
    PAIRS: lambda t: t.repeat_interleave(2, -1),
}
_HALVE: dict[str, Callable[[Tensor], Tensor]] = {
    HALVES: lambda t: t[..., : t.shape[-1] // 2],
    PAIRS: lambda t: t[..., ::2],
}


class Mark(NamedTuple):
    """How a tensor repeats its angles, and each once in a version; None in inference mode, which counts no writes."""

    layout: str
    once: Tensor | None = None
    version: int = 0


@dataclass(frozen=True)
class AnglesForm(Plan):
    """A module that makes cos and sin, each angle twice."""

    layout: str
    reads: Reads  # names alone: the module's own code runs, with whatever else it reads

    def __str__(self) -> str:
        return f"cos and sin for rope, from {self.layout}"

    def read(self, original: type[nn.Module]) -> tuple[Any, ...]:
        """The functions that were examined."""
        return self.reads.now(original)

    def methods(self, original: type[nn.Module], whole: Whole) -> Mapping[str, Callable[..., Any]]:
        """A forward that marks its angles, in place of the module's."""
        layout, holds = self.layout, self.reads.guard(original)

        def forward(self_: nn.Module, *args: Any, **kwargs: Any) -> Any:
            found = original.forward(self_, *args, **kwargs)
            if isinstance(found, tuple) and not is_captured() and holds(self_):
                for t in found:
                    if type(t) is Tensor and not t.requires_grad:
                        mark = Mark(layout) if t.is_inference() else Mark(layout, _halved(t, layout), t._version)
                        setattr(t, _MARK, mark)
            return found

        return {"forward": forward}


def _halved(t: Tensor, layout: str) -> Tensor:
    return _HALVE[layout](t).contiguous()


def fit_angles(module: nn.Module) -> AnglesForm | None:
    """The form of a module that makes cos and sin from an example and positions; others get None."""
    positional = arguments(original_class(type(module)).forward)
    if module._parameters or not positional or not 2 <= sum(p.default is p.empty for p in positional) <= 3:
        return None
    kinds = getattr(module, "layer_types", None)
    stand_in, layouts = _made_up(module), set()

    def calls() -> None:
        layouts.update({_layout(stand_in, *kind) for kind in ([(kind,) for kind in kinds] if kinds else [()])})

    reads, _ = noted(stand_in.module, calls)
    layout = layouts.pop()
    return AnglesForm(layout, Reads(names=reads.names)) if layout and not layouts else None


def _made_up(module: nn.Module) -> StandIn:
    """A stand-in with other frequencies, so that no two are equal."""
    stand_in, random = StandIn(module), generator()
    buffers: dict[str, Any] = stand_in.module._buffers
    for name, b in buffers.items():
        if isinstance(b, Tensor) and b.is_floating_point():
            buffers[name] = torch.rand(b.shape, generator=random, dtype=torch.float32).to(b.dtype)
    return stand_in


def _layout(stand_in: StandIn, *kind: Any) -> str | None:
    """How cos and sin repeat their angles, at positions of one and of three axes, near and as far as they go."""
    x, layout = torch.ones(2, 5, 8), None
    for axes, farthest in itertools.product(((), (3,)), (40, *_FAR)):
        positions = torch.randint(farthest // 2, farthest, (*axes, 2, 5), generator=generator())
        positions[..., 0] = 0
        try:
            found = stand_in(x, positions, *kind)
        except Exception:  # unknown code may raise anything for unexpected positions
            continue
        if not isinstance(found, tuple) or len(found) != 2 or not all(isinstance(t, Tensor) for t in found):
            return None
        repeats = [name for name in ([layout] if layout else _HALVE) if all(_repeats(t, name) for t in found)]
        if not repeats:
            return None
        layout = repeats[0]
    return layout


def _repeats(t: Tensor, layout: str) -> bool:
    return t.shape[-1] % 2 == 0 and torch.equal(_REPEAT[layout](_HALVE[layout](t)), t)


class RotaryForm(NamedTuple):
    """A function of query, key, cos and sin as arguments of ours."""

    layout: str
    interleaved: bool
    partial: bool  # whether columns without angles stay
    heads: int  # the dimension of heads
    moves: bool  # whether `unsqueeze_dim` may say another
    rounding: Mapping[tuple[torch.dtype, torch.dtype], str]  # by the dtypes of query and cos
    holds: Callable[[Any], bool]  # whether what its code reads is as it was

    def call(self, *args: Any, unsqueeze_dim: Any = None) -> Any:
        """The result of our operator; None for arguments that were not examined."""
        *heads, cos, sin = args
        dim = self.heads if unsqueeze_dim is None else unsqueeze_dim
        cos, sin = self._once(cos), self._once(sin)
        if cos is None or sin is None or (dim != self.heads and not (self.moves and dim in (1, 2))):
            return None
        rounding = self.rounding.get((heads[0].dtype, cos.dtype)) if type(heads[0]) is Tensor else None
        if rounding is None or not self._fits(heads, cos, sin, dim):
            return None
        found = rotate(heads, cos, sin, interleaved=self.interleaved, unsqueeze_dim=dim, rounding=rounding)
        return found if len(heads) == 2 else found[0]

    def _once(self, t: Any) -> Any:
        """Cos or sin with each angle once, if it is known how they repeat; else None."""
        if type(t) is not Tensor or t.requires_grad:  # the kernels have no gradients of angles
            return None
        if self.layout == ONCE:
            return t
        mark = getattr(t, _MARK, None)
        if not mark or mark.layout != self.layout:
            return None
        if t.is_inference():
            return _halved(t, self.layout)
        return mark.once if mark.version == t._version else None

    def _fits(self, heads: list[Tensor], cos: Tensor, sin: Tensor, dim: int) -> bool:
        """Whether heads and angles fit together."""
        shape, dtype, angles = heads[0].shape, heads[0].dtype, cos.shape
        if len(shape) != 4 or len(angles) != 3 or sin.shape != angles or sin.dtype != cos.dtype:
            return False
        batch, tokens, columns = shape[0], shape[3 - dim], shape[3]
        for t in heads[1:]:
            other = t.shape if type(t) is Tensor and t.dtype == dtype else ()
            if len(other) != 4 or (other[0], other[3 - dim], other[3]) != (batch, tokens, columns):
                return False
        turning = 2 * angles[2]
        known = turning == columns or (self.partial and turning < columns)
        return known and angles[1] == tokens and angles[0] in (1, batch)


# Keys have the identity of a function, which a reloaded module replaces; an entry is forgotten with its function.
_forms: dict[tuple[int, int], RotaryForm | None] = {}


def known_rotary(function: Any, count: int) -> RotaryForm | None:
    """The form of a function, examined once: after a pickle was loaded at its first call."""
    key = id(function), count
    return _forms[key] if key in _forms else fit_rotary(function, count)


def fit_rotary(function: Any, count: int) -> RotaryForm | None:
    """The form of a function of `count` tensors of heads, cos and sin, or None; kept for calls."""
    forms: list[RotaryForm | None] = []
    with examining() as isolation:
        reads, reason = noted(None, lambda: forms.append(_fit_rotary(function, count)))
    form = forms[0] if reason is None and isolation.stopped is None else None
    if form is not None:
        kind = type(function) if isinstance(function, nn.Module) else None
        names = (*reads.names, Name(0, ("forward",))) if kind else reads.names
        form = form._replace(holds=Reads(names=names).guard(kind))
    key = id(function), count
    if key not in _forms:
        weakref.finalize(function, _forms.pop, key, None).atexit = False
    _forms[key] = form
    return form


def _fit_rotary(function: Any, count: int) -> RotaryForm | None:
    for layout, interleaved, dim in itertools.product(_REPEAT, (False, True), (1, 2)):
        trial = _Trial(function, count, layout, interleaved, dim)
        if not trial.same(_COLUMNS // 2):
            continue
        rounding = {key: found for key in itertools.product(FLOATING, FLOATING) if (found := trial.rounding(*key))}
        if (torch.float32, torch.float32) not in rounding:
            return None
        moved = _Trial(function, count, layout, interleaved, 3 - dim)
        moves = moved.same(_COLUMNS // 2, unsqueeze_dim=3 - dim)
        return RotaryForm(layout, interleaved, trial.same(_COLUMNS // 2 - 2), dim, moves, rounding, bool)
    return None


def confirm_rotary(function: Any, count: int, form: RotaryForm, device: torch.device, dtype: torch.dtype) -> str | None:
    """Why a device's kernels should not replace the function after all, or None."""
    if device.type not in ("cpu", "cuda") or (dtype, dtype) not in form.rounding:
        return None  # as on `meta`: nothing to try
    trial = _Trial(function, count, form.layout, form.interleaved, form.heads, device)
    worse = trial.worse(dtype, dtype, form.rounding[dtype, dtype], backend=None)
    return worse and f"{worse} differs from ours in {dtype} on {device.type}"


class _Trial:
    """A function with made-up heads and angles, beside our operator."""

    def __init__(
        self, function: Any, count: int, layout: str, interleaved: bool, dim: int, device: Any = "cpu"
    ) -> None:
        self.function, self.count, self.repeat = function, count, _REPEAT[layout]
        self.interleaved, self.dim, self.device = interleaved, dim, device

    def heads(self, dtype: torch.dtype) -> list[Tensor]:
        random = generator(1)
        sizes = torch.tensor([1.0, 100.0]).view(2, 1, 1, 1)  # for functions that clip
        shaped = [torch.randn(2, 5, heads, _COLUMNS, generator=random) * sizes for heads in (3, 2)]
        shaped = [t.to(self.device, dtype) for t in shaped]
        return [t.transpose(1, 2) if self.dim == 1 else t for t in shaped[: self.count]]

    def angles(self, pairs: int, dtype: torch.dtype) -> list[Tensor]:
        values = torch.randn(2, 5, pairs, generator=generator(2)) * 3
        return [t.to(self.device, dtype) for t in (values.cos(), values.sin())]

    def theirs(self, pairs: int, dtype: torch.dtype, **options: Any) -> Callable[..., Tensor]:
        angles = [self.repeat(t) for t in self.angles(pairs, dtype)]
        return lambda *heads: _joined(self.function(*heads, *angles, **options))

    def ours(self, pairs: int, dtype: torch.dtype, rounding: str, backend: str | None = "eager") -> Any:
        angles = self.angles(pairs, dtype)

        def call(*heads: Tensor) -> Tensor:
            tables = [t.to(torch.float64) if heads[0].dtype == torch.float64 else t for t in angles]
            options: dict[str, Any] = {"interleaved": self.interleaved, "unsqueeze_dim": self.dim}
            return _joined(rotate(heads, *tables, rounding=rounding, backend=backend, **options))

        return call

    def same(self, pairs: int, **options: Any) -> bool:
        heads = self.heads(torch.float32)
        found = attempt(self.theirs(pairs, torch.float32, **options), *heads)
        if not all(map(torch.equal, heads, self.heads(torch.float32))):  # it turns its arguments in place
            return False
        ours = self.ours(pairs, torch.float32, "once")(*heads)
        return found is not None and found.shape == ours.shape and torch.allclose(found, ours, 1e-5, 1e-4)

    def rounding(self, dtype: torch.dtype, angles: torch.dtype) -> str | None:
        """The rounding in which both agree, forward and backward."""
        heads = self.heads(dtype)
        found = attempt(self.theirs(_COLUMNS // 2, angles), *heads)
        if found is None or found.dtype != dtype:
            return None
        candidates = ("once", "hf") if dtype == angles != torch.float32 else ("once",)
        rounding = min(candidates, key=lambda r: differing_bits(self.ours(_COLUMNS // 2, angles, r)(*heads), found))
        return None if self.worse(dtype, angles, rounding, "eager") else rounding

    def worse(self, dtype: torch.dtype, angles: torch.dtype, rounding: str, backend: str | None) -> str | None:
        pairs = _COLUMNS // 2
        ours, exact = self.ours(pairs, angles, rounding, backend), self.ours(pairs, angles, "once")
        return disagreement(ours, self.theirs(pairs, angles), exact, self.heads(dtype))


def _joined(results: Any) -> Tensor:
    many = (results,) if isinstance(results, Tensor) else results
    return torch.cat([t.reshape(-1) for t in many])


def turned(function: Any, *args: Any, **kwargs: Any) -> Any:
    """Turn query and key in one pass if the result is the same, else by the function."""
    if not is_captured() and (not isinstance(function, nn.Module) or is_bare(function)):
        form = known_rotary(function, len(args) - 2)
        if form is not None and form.holds(function) and (found := form.call(*args, **kwargs)) is not None:
            return found
    return function(*args, **kwargs)
