"""The Triton backend's verbs: operators `kernel_fusion::triton_*` with the verbs' schemas.

Each sits on the `Autograd` key, so that a tracer keeps it as one node; below, Inductor sees the kernels
(`torch.library.triton_op`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from kernel_fusion.backends.triton import quantize, row_norm_parts  # noqa: F401 - further operators on kernels
from kernel_fusion.backends.triton.pointwise import pointwise
from kernel_fusion.backends.triton.reduce import reduce
from kernel_fusion.backends.triton.rotary import qk_norm_rope
from kernel_fusion.backends.triton.row_norm_autograd import staged_row_norm
from kernel_fusion.backends.triton.softmax import softmax
from kernel_fusion.core import arguments

# Names are those that other backends use.
VERBS: dict[str, Callable[..., Any]] = {
    function.__name__: function for function in (staged_row_norm, pointwise, reduce, softmax, qk_norm_rope)
}


def define(library: torch.library.Library, schemas: Mapping[str, str]) -> None:
    """Define the operators, with the verbs' `schemas`."""
    for name, function in VERBS.items():
        library.define(f"triton_{name}{schemas[name]}", tags=torch.Tag.pt2_compliant_tag)
        operator: Any = getattr(torch.ops.kernel_fusion, f"triton_{name}").default
        for key in ("Autograd", "CompositeExplicitAutograd"):
            library.impl(f"triton_{name}", arguments.checked(operator, function), key)
