"""Arrays of other libraries: CuPy, NumPy, JAX and whatever else speaks DLPack, taken and given back without a copy."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
import torch.utils.dlpack
from torch import Tensor

# The modules in which a library's `from_dlpack` lies, by the first name of the module of its arrays.
_HOMES = {"jaxlib": "jax.dlpack", "jax": "jax.dlpack", "tensorflow": "tensorflow.experimental.dlpack"}


def is_tensor(value: object) -> bool:
    """Whether `value` is a tensor; without telling a type checker that annotations already say so."""
    return isinstance(value, Tensor)


def with_tensors(verb: Callable[..., Any], *arrays: Any) -> Any:
    """`verb` of the arrays as tensors that share their memory; the result as an array of the first one's kind.

    Raises:
        TypeError: the first argument is neither a tensor nor an array that can be exchanged by DLPack.
    """
    first = arrays[0]
    if not hasattr(first, "__dlpack__"):
        raise TypeError(f"expected a torch.Tensor or an array with `__dlpack__`, got {type(first).__name__}")
    result = verb(*(_tensor(array) for array in arrays))
    if isinstance(result, Tensor):
        return _like(first, result)
    return type(result)(*(_like(first, tensor) for tensor in result))


def _tensor(array: Any) -> Any:
    if isinstance(array, Tensor) or not hasattr(array, "__dlpack__"):
        return array
    if type(array).__module__.startswith("numpy"):
        return torch.from_numpy(array)  # which also takes arrays that are read-only
    return torch.utils.dlpack.from_dlpack(array)


def _like(array: Any, result: Tensor) -> Any:
    """`result` as an array of the kind of `array`."""
    root = type(array).__module__.partition(".")[0]
    if root == "numpy":
        return result.detach().numpy()
    return importlib.import_module(_HOMES.get(root, root)).from_dlpack(result.detach())
