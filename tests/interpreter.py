"""Triton's interpreter in a fifth of its time.

At each call of a function inside a kernel the interpreter searches all of triton.language for what it must replace,
though the kernel's launch has replaced it, until the launch ends. Here it searches only where something is left. It
reduces by a kernel's function one element at a time; here all pairs of neighbours are joined at once, as on a GPU. And
what it derives anew for each tensor, a shape's constants and NumPy's dtype, is kept here.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache
from math import prod
from types import ModuleType
from typing import Any

from triton import language
from triton.language import core
from triton.runtime import interpreter


def speed_up() -> None:
    """Replace what is slow where this process interprets."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        interpreter._patch_lang = _patch_what_is_left
        interpreter.ReduceOps.generic_reduce = _reduce
        interpreter._get_np_dtype = _dtype_of
        core.tensor.__init__, core.block_type.__init__ = _init_tensor, _init_block


_patch_all: Callable[[Callable[..., Any]], Any] = interpreter._patch_lang


def _patch_what_is_left(function: Callable[..., Any]) -> Any:
    modules = _languages(function)
    # What the launch replaces stays so: builtins of the modules that the function sees, and methods of tensors.
    if modules and not any(map(core.is_builtin, (core.tensor.to, *(module.load for module in modules)))):
        return None  # nobody restores what a function replaces
    return _patch_all(function)


@cache
def _languages(function: Callable[..., Any]) -> tuple[ModuleType, ...]:
    return tuple(module for module in (language, core) if any(each is module for each in function.__globals__.values()))


_search_dtype: Callable[[Any], Any] = interpreter._get_np_dtype
_known_dtype = cache(_search_dtype)


def _dtype_of(type: Any) -> Any:
    return (_search_dtype if type.scalar.is_ptr() else _known_dtype)(type.scalar)


@cache
def _constants(shape: tuple[int, ...]) -> tuple[Any, Any]:
    return core.tuple([*map(core.constexpr, shape)]), core.constexpr(prod(shape))


_init_any_block: Callable[..., None] = core.block_type.__init__


@cache
def _block(shape: tuple[int, ...]) -> tuple[Any, int, str]:
    block = object.__new__(core.block_type)
    _init_any_block(block, core.int32, [*shape])
    return block.shape, block.numel, str(block.shape)


def _init_block(self: Any, element_ty: Any, shape: Any) -> None:
    self.element_ty = element_ty
    self.shape, self.numel, text = _block(tuple([getattr(size, "value", size) for size in shape]))
    self.name = f"<{text}, {element_ty}>"


def _init_tensor(self: Any, handle: Any, type: Any) -> None:
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.shape, self.numel = _constants(tuple(type.shape) if type.is_block() else ())


def _reduce(self: Any, parts: Any) -> list[Any]:
    dtypes = [part.dtype for part in parts]
    while parts[0].handle.data.shape[self.axis] > 1:
        halves = [
            [
                self.to_tensor(part.handle.data.swapaxes(0, self.axis)[which::2].swapaxes(0, self.axis), dtype)
                for part, dtype in zip(parts, dtypes, strict=True)
            ]
            for which in (0, 1)
        ]
        parts = self.combine_fn.fn(*halves[0], *halves[1])
        parts = parts if isinstance(parts, tuple) else (parts,)
    found = [part.handle.data if self.keep_dims else part.handle.data.squeeze(self.axis) for part in parts]
    return [*map(self.to_tensor, found, dtypes)]
