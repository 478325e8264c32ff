"""First arguments that are no tensors: arrays of other libraries, and the proxies of `torch.fx`.

Arrays of NumPy, CuPy, JAX and whatever else speaks DLPack are taken and given back without a copy. If the first
argument of a verb is one, the other array arguments may be arrays or tensors, and the result is an array of its kind,
detached from any autograd graph. If it is a proxy, the graph gets a call of the verb.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.overrides
import torch.utils.dlpack
from torch import Tensor

from kernel_fusion.errors import KernelFusionError
from kernel_fusion.functional.results import Quantized

# The modules in which a library's `from_dlpack` lies, where that is not the first name of the module of its arrays.
_HOMES = {"jaxlib": "jax.dlpack", "jax": "jax.dlpack"}


def refuse_script() -> None:
    """Raise; `torch.jit.script` calls the `__prepare_scriptable__` of a function or module, which this is, first."""
    raise KernelFusionError(
        "torch.jit.script cannot compile kernel_fusion; use torch.compile to make a model faster, or torch.export to "
        "save it as a program"
    )


def keep_from_scripts(namespace: dict[str, Any]) -> None:
    """Have `torch.jit.script` refuse the public functions of a module of the package, given its `globals()`."""
    for name, value in namespace.items():
        if inspect.isfunction(value) and value.__module__.startswith(namespace["__name__"]) and name[0] != "_":
            setattr(value, "__prepare_scriptable__", refuse_script)  # noqa: B010  # no attribute that mypy knows


def is_tensor(value: object) -> bool:
    """Whether `value` is a tensor; without telling a type checker that annotations already say so."""
    return isinstance(value, Tensor)


def records(value: object) -> bool:
    """Whether `value`, which is no tensor, stands for one and records what is called with it, as proxies do."""
    return hasattr(type(value), "__torch_function__")


def served(verb: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """The call `verb(*args, **options)`, whose first argument is no tensor.

    A proxy records it, without the options that are defaults. If it is an array, `verb` gets tensors that share the
    arrays' memory, and the result is an array of its kind.

    Raises:
        TypeError: the first argument is neither, or an array that cannot be exchanged by DLPack both ways.
    """
    if records(args[0]):
        parameters = inspect.signature(verb).parameters
        options = {name: value for name, value in options.items() if value is not parameters[name].default}
        return torch.overrides.handle_torch_function(verb, args, *args, **options)
    give_back = _converter(verb.__name__, args[0])
    result = verb(*map(as_tensor, args), **{name: as_tensor(value) for name, value in options.items()})
    if isinstance(result, Tensor):
        return give_back(result.detach())
    if any(isinstance(part, Quantized) for part in (result, *result)):
        raise TypeError(f"`{verb.__name__}`: quantised results need tensors, got {type(args[0]).__name__}")
    given = [give_back(tensor.detach()) for tensor in result]
    return type(result)(*given) if hasattr(result, "_fields") else tuple(given)


def as_tensor(value: Any) -> Any:
    """Return a tensor that shares the memory of an array; return anything else, tensors among them, as it is."""
    if isinstance(value, Tensor) or not hasattr(value, "__dlpack__"):
        return value
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value if value.flags.writeable else np.asarray(_WritableView(value)))
    return torch.utils.dlpack.from_dlpack(value)


class _WritableView:
    """A read-only array's memory without the flag, about which PyTorch would warn; nothing here writes to an input."""

    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        self._owner = array
        self.__array_interface__ = {**array.__array_interface__, "data": (array.__array_interface__["data"][0], False)}


def _converter(name: str, array: Any) -> Callable[[Tensor], Any]:
    """The function that makes a tensor an array of the kind of `array`."""
    if isinstance(array, np.ndarray):
        return Tensor.numpy
    kind = type(array)
    if hasattr(array, "__dlpack__"):
        home = kind.__module__.partition(".")[0]
        module = importlib.import_module(_HOMES.get(home, home))
        if hasattr(module, "from_dlpack"):
            return module.from_dlpack  # type: ignore[no-any-return]
    raise TypeError(
        f"`{name}`: expected a torch.Tensor, or an array with `__dlpack__` of a library with `from_dlpack`, got "
        f"{f'{kind.__module__}.{kind.__qualname__}'.removeprefix('builtins.')}"
    )
