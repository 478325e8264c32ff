"""The schemas of `torch.ops.kernel_fusion.*`, and the definitions as operators.

Import defines them and builds nothing, so `torch.export.load` works in a fresh process.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from kernel_fusion.backends import eager
from kernel_fusion.core import arguments, signatures

VERBS = {name: each.schema for name, each in signatures.VERBS.items()}
PARTS = {name: each.schema for name, each in signatures.PARTS.items()}
QUANTIZED = {name: each.schema for name, each in signatures.QUANTIZED.items()}
SPREAD = {name: each.schema for name, each in signatures.SPREAD.items()}
ALL = VERBS | PARTS | QUANTIZED | SPREAD
# The definitions of verbs, which are operators too, for C++ to call and tracers to decompose. The plain norms are
# forms of the staged one.
_DEFINITIONS: dict[str, Callable[..., Any]] = {
    name: getattr(eager, name) for name in VERBS if name not in ("layer_norm", "rms_norm")
}


def _spread_row_norm(*args: Any) -> Any:
    from kernel_fusion.distributed import hidden  # imports torch.distributed

    return hidden.by_definition(*args)


_DEFINITIONS["spread_row_norm"] = _spread_row_norm
library = torch.library.Library("kernel_fusion", "DEF")


def overload(name: str) -> Any:
    """The overload of an operator, which is what tracers know."""
    return getattr(torch.ops.kernel_fusion, name).default


for _name, _schema in ALL.items():
    library.define(_name + _schema, tags=torch.Tag.pt2_compliant_tag)
for _name, _definition in _DEFINITIONS.items():
    _reference = f"{_name}_reference"
    library.define(_reference + ALL[_name], tags=torch.Tag.pt2_compliant_tag)
    library.impl(_reference, arguments.checked(_name, _definition), "CompositeImplicitAutograd")


def default_eps(input: Tensor) -> float:
    """The value of rms_norm's `eps=None`: the compute type's epsilon, as a literal: Dynamo makes globals inputs."""
    return 2.0**-52 if input.dtype == torch.float64 else 2.0**-23


def reference_call(name: str, *args: Any) -> Any:
    """Call the definition of an operator with the operator's arguments."""
    if name in _DEFINITIONS:
        return _DEFINITIONS[name](*args)
    input, num_dims, weight, bias, eps, weight_offset, out_dtype = args
    if eps is None:
        eps = default_eps(input)
    return eager.row_norm(input, num_dims, weight, bias, eps, weight_offset, out_dtype, name == "rms_norm")


def bind(operator: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
    """All arguments of a call by position, with the defaults that the dispatcher omits."""
    arguments = operator._schema.arguments
    defaults = {a.name: a.default_value for a in arguments if a.has_default_value()}
    bound = defaults | dict(zip((a.name for a in arguments), args, strict=False)) | kwargs
    return [bound[a.name] for a in arguments]
