"""The operators `torch.ops.kernel_fusion.*`; importing any module here defines all."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from kernel_fusion.operators import linear_losses, meta, schemas, stubs, vmap

__all__ = ["decompositions", "linear_losses", "meta", "stubs", "vmap"]


def decompositions() -> dict[Any, Callable[..., Any]]:
    """The definition of each operator that a public function calls, by its overload, for `run_decompositions`.

    A decomposed program computes what `backend="eager"` does.

    Example:
        >>> import torch, kernel_fusion as kf
        >>> from kernel_fusion.operators import decompositions
        >>> program = torch.export.export(kf.FusedRMSNorm(8), (torch.randn(4, 8),))
        >>> program = program.run_decompositions(decompositions())
        >>> any("kernel_fusion" in str(node.target) for node in program.graph.nodes)
        False
    """
    return {schemas.overload(name): partial(_definition, name) for name in schemas.VERBS}


def _definition(name: str, *args: Any, **kwargs: Any) -> Any:
    return schemas.reference_call(name, *schemas.bind(schemas.overload(name), args, kwargs))
