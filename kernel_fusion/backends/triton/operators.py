"""The Triton backend's verbs: operators `kernel_fusion::triton_*` with the verbs' schemas.

Each sits on the `Autograd` key, so that a tracer keeps it as one node; below, Inductor sees the kernels
(`torch.library.triton_op`).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from kernel_fusion.backends.triton import (  # noqa: F401
    pointwise,
    quantize,
    reduce,
    rotary,
    row_norm_autograd,
)
from kernel_fusion.backends.triton.autograd import VERBS
from kernel_fusion.backends.triton.kernels import softmax  # noqa: F401
from kernel_fusion.core import arguments


def define(library: torch.library.Library, schemas: Mapping[str, str]) -> None:
    """Define the operators, with the verbs' `schemas`."""
    for name, function in VERBS.items():
        library.define(f"triton_{name}{schemas[name]}", tags=torch.Tag.pt2_compliant_tag)
        for key in ("Autograd", "CompositeExplicitAutograd"):
            library.impl(f"triton_{name}", arguments.checked(name, function), key)
