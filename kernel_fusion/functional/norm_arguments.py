"""The arguments that all norms have: the normalised sizes, and errors that name them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from kernel_fusion.backends import eager
from kernel_fusion.backends.availability import PLAIN_TENSORS
from kernel_fusion.core import checks
from kernel_fusion.core.quantize import Quantize
from kernel_fusion.functional import interop
from kernel_fusion.operators import schemas

# normalized_shape, weight, bias, eps, weight_offset, out_dtype.
Norm = tuple[int | Sequence[int], Tensor | None, Tensor | None, float | None, float, torch.dtype | Quantize | None]


def sizes(normalized_shape: int | Sequence[int]) -> tuple[int, ...]:
    """The normalised sizes, of one or several dimensions."""
    return (normalized_shape,) if isinstance(normalized_shape, int) else tuple(normalized_shape)


def num_normalized_dims(input: Tensor, normalized_shape: int | Sequence[int]) -> int:
    """How many dimensions `normalized_shape` has, or 0 where anything about the call needs a closer look."""
    if type(input) not in PLAIN_TENSORS or input.is_nested:
        return 0
    shape = input.shape
    expected = (normalized_shape,) if isinstance(normalized_shape, int) else normalized_shape
    # One dimension, the usual case, without slicing the shape.
    if len(expected) == 1:
        return 1 if shape and isinstance(expected[0], int) and shape[-1] == expected[0] else 0
    return len(expected) if ends_with(input, expected) else 0


def ends_with(input: Tensor, shape: Sequence[int]) -> bool:
    """Whether the input's last dimensions are these."""
    integers = all(isinstance(size, (int, torch.SymInt)) for size in shape)
    return integers and 0 < len(shape) <= input.dim() and input.shape[input.dim() - len(shape) :] == tuple(shape)


def resolved(verb: str, input: Tensor, norm: Norm, affine: bool = False) -> tuple[tuple[int, ...], float | None]:
    """The normalised sizes and eps; raises, in PyTorch's words, if input or, with `affine`, parameters have others."""
    normalized_shape, weight, bias, eps, _, _ = norm
    shape, rms = sizes(normalized_shape), verb.endswith("rms_norm")
    fits = num_normalized_dims(input, shape) or ends_with(input, shape)
    if not fits or (affine and not checks.shaped(shape, weight, bias)):
        eager.pytorch_row_norm(input, shape, weight, bias, eps, 0.0, None, rms)
    return shape, schemas.default_eps(input) if eps is None and rms else eps


def served(verb: Callable[..., Any], rows: Sequence[Any], norm: Norm, **options: Any) -> Any:
    """A call of a verb whose first argument is no tensor; `rows` come before the normalised sizes."""
    names = "weight", "bias", "eps", "weight_offset", "out_dtype"
    return interop.served(verb, *rows, norm[0], **dict(zip(names, norm[1:], strict=True)), **options)


def explain_norm(verb: str, error: Exception, rows: dict[str, Any], norm: Norm, **others: Any) -> None:
    """Raise a better error than `error`, if an argument of the norm explains it; `rows` and `others` by their names."""
    normalized_shape, weight, bias, eps, weight_offset, out_dtype = norm
    tensors = rows | {"weight": weight, "bias": bias}
    others |= {"normalized_shape": normalized_shape, "weight_offset": weight_offset}
    if eps is not None or not verb.endswith("rms_norm"):  # where None is a number
        others["eps"] = eps
    checks.explain(verb, error, tensors, out_dtype=out_dtype, **others)
