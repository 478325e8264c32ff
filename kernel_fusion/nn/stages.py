"""What the modules have in common, and the keyword-only extras of the norms.

The files of the modules themselves do without `from __future__ import annotations`: `torch.fx` cannot save a graph of a
`forward` whose annotations are text.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from kernel_fusion.backends.availability import is_dtensor
from kernel_fusion.core import checks
from kernel_fusion.core.quantize import Quantize
from kernel_fusion.functional.interop import refuse_script

Shape = int | Sequence[int] | torch.Size


class Fused(nn.Module):
    """The base of all modules here."""

    __prepare_scriptable__ = staticmethod(refuse_script)

    def _repr(self, *always: str, options: Sequence[str] = ()) -> str:
        """The text of `extra_repr`: what is always shown, and those options that differ from the class's defaults."""
        values = {name: getattr(self, name) for name in options}
        return ", ".join([*always, *(f"{k}={v!r}" for k, v in values.items() if v != getattr(type(self), k))])


class _CountedHooks(OrderedDict[int, Callable[..., Any]]):
    """Hooks of a module, counted as one more than there are; saved and copied as the plain dictionary.

    The fused inference path of `nn.TransformerEncoderLayer` reads the weight and bias of a plain LayerNorm and never
    calls the module. It steps aside for modules whose hooks have a length. A call costs nothing more: `nn.Module` asks
    only whether hooks are true.
    """

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


class Stages(Fused):
    """The keyword-only extras of the norms: their checks, how they start, how they print.

    The defaults are those of the class, so a module that became one of ours by `__class__`, or was saved before an
    extra existed, has them too.
    """

    if TYPE_CHECKING:
        weight: nn.Parameter
        normalized_shape: tuple[int, ...]
    weight_offset: float = 0.0
    pre_activation: str | None = None
    activation: str | None = None
    out_dtype: torch.dtype | Quantize | None = None
    rounding: str = "once"

    def __init__(self, shape: Shape, eps: float | None, affine: bool, *others: Any, extras: Sequence[Any]) -> None:
        """Construct PyTorch's norm with the first arguments, which initialises the weight by the extras.

        Args:
            extras: weight_offset, pre_activation, activation, out_dtype and rounding.
        """
        kind = type(self).__name__
        self.weight_offset, self.pre_activation, self.activation, self.out_dtype, self.rounding = extras
        if self.weight_offset and not affine:
            raise checks.refusal(kind, "weight_offset", "weight", f", got {self.weight_offset} without affine")
        checks.activation(kind, "pre_activation", self.pre_activation)
        checks.activation(kind, "activation", self.activation)
        checks.of_kind(kind, "out_dtype", self.out_dtype, checks.RESULT_DTYPE)
        checks.rounding(kind, self.rounding)
        super().__init__(shape, eps, affine, *others)
        self._keep_out_of_fast_paths()

    def _stages(self) -> dict[str, Any]:
        """The extras by name; a false one is not set."""
        return {
            "pre_activation": self.pre_activation,
            "activation": self.activation,
            "weight_offset": self.weight_offset,
            "out_dtype": self.out_dtype,
            "rounding": self.rounding if self.rounding != "once" else None,
        }

    def _keep_out_of_fast_paths(self) -> None:
        """Have nobody read the parameters instead of calling the module, where that would miss an extra."""
        if any(self._stages().values()):
            keep_out_of_fast_paths(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._keep_out_of_fast_paths()

    def reset_parameters(self) -> None:
        """Initialise to the plain normalisation: weight 1 - weight_offset, bias 0."""
        super().reset_parameters()  # type: ignore[misc]
        if self.weight is not None and self.weight_offset:
            with torch.no_grad():
                self.weight.sub_(self.weight_offset)

    def extra_repr(self) -> str:
        """PyTorch's text, and the extras that are set."""
        extras = ", ".join(f"{name}={value!r}" for name, value in self._stages().items() if value)
        return ", ".join(filter(None, (super().extra_repr(), extras)))


class AddStages(Stages):
    """The same of the norms that add to a residual, which have dropout too."""

    dropout: float = 0.0

    def _set_dropout(self, dropout: float) -> None:
        checks.dropout_p(type(self).__name__, "dropout", dropout)
        self.dropout = dropout

    def _stages(self) -> dict[str, Any]:
        return {"dropout": self.dropout} | super()._stages()

    def _keep_out_of_fast_paths(self) -> None:
        keep_out_of_fast_paths(self)

    def _stream(self, input: Tensor, residual: Tensor | None) -> Tensor:
        """The residual; where a stream begins, one row of negative zeros for all rows, which changes no bit of u."""
        if residual is not None:
            return residual
        refuse_lost(self, "residual", input)
        checks.tensor("add_layer_norm" if isinstance(self, nn.LayerNorm) else "add_rms_norm", "input", input)
        if isinstance(input, Tensor) and input.is_nested:  # which does not expand
            return torch.full_like(input, -0.0)
        row = input.shape[input.dim() - len(self.normalized_shape) :]  # where it is another shape, the verb says so
        return input.new_full(row, -0.0).expand_as(input)


def refuse_lost(module: nn.Module, argument: str, input: Tensor) -> None:
    """Raise of a DTensor without the second argument: `SequenceParallel` hands on the first, and this one is lost."""
    if is_dtensor(input):
        raise TypeError(
            f"{type(module).__name__}: `{argument}` must be given beside a DTensor, got None; `SequenceParallel` hands "
            "on the first input alone: use `kernel_fusion.distributed.ResidualSequenceParallel`"
        )


def shape_of(module: str, normalized_shape: Shape | None, hidden_size: Shape | None) -> Shape:
    """`normalized_shape` by either of its names."""
    if (normalized_shape is None) == (hidden_size is None):
        raise TypeError(f"{module}() takes exactly one of `normalized_shape` and its other name `hidden_size`")
    return hidden_size if normalized_shape is None else normalized_shape  # type: ignore[return-value]
