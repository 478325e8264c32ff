"""What `kernel_fusion.explain` says about a call that takes the CUDA kernels: one line per kernel, from its plan.

Each family contributes a function of the call's arguments, by name; a verb that is missing here has no lines.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from kernel_fusion.backends.cuda import planner

_Explainer = Callable[[str, Mapping[str, Any]], tuple[str, ...]]


def plan_lines(verb: str, arguments: Mapping[str, Any]) -> tuple[str, ...]:
    """The plans of the kernels that `verb` launches for these arguments, which are complete and by name."""
    explainer = _EXPLAINERS.get(verb)
    return () if explainer is None else explainer(verb, arguments)


def _row_norm(verb: str, arguments: Mapping[str, Any]) -> tuple[str, ...]:
    if arguments["pre_activation"] is not None or arguments["activation"] is not None:
        return ()
    input, out_dtype = arguments["input"], arguments["out_dtype"]
    if out_dtype is None and input.dtype.itemsize == 2 and torch.is_autocast_enabled("cuda"):
        out_dtype = torch.float32
    return planner.explain(verb, input, arguments["normalized_shape"], arguments["weight"], out_dtype=out_dtype)


_EXPLAINERS: dict[str, _Explainer] = {"layer_norm": _row_norm, "rms_norm": _row_norm}
