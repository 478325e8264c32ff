"""Serves calls without the extension: by Triton, or the definition."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

from kernel_fusion.backends import availability, triton
from kernel_fusion.core import checks
from kernel_fusion.operators import schemas, vmap


def serve(verb: str, *args: Any) -> Any:
    """The best that runs on this device."""
    on_gpu = args[0].device.type in ("cuda", "xpu")
    return (serve_on_gpu if on_gpu else schemas.reference_call)(verb, *args)


def serve_on_gpu(verb: str, *args: Any) -> Any:
    """Triton's kernels if they run, else the definition."""
    input = args[0]
    if checks.without_kernels(verb, "triton"):
        return schemas.reference_call(verb, *args)
    if availability.refusal(input) is None and availability.why_not_triton(input.device) is None:
        define_triton()
        return triton.serve(verb, *args)
    return schemas.reference_call(verb, *args)


@cache
def define_triton() -> None:
    """Define the Triton backend's operators, late because they import Triton."""
    from kernel_fusion.backends.triton import autograd, operators

    operators.define(schemas.library, schemas.VERBS)
    for name in autograd.VERBS:
        vmap.register(name, "triton_")


def take_over(device: str) -> None:
    """Let Triton serve the verbs on a device type."""
    define_triton()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch warns that the extension's kernels are replaced
        for name in schemas.VERBS:
            for key in (f"Autograd{device}", device):
                schemas.library.impl(name, _by_triton(name), key, allow_override=True)
        for name in schemas.QUANTIZED:
            schemas.library.impl(name, schemas.overload(f"triton_{name}"), device, allow_override=True)


def _by_triton(name: str) -> Callable[..., Any]:
    operator = schemas.overload(name)
    if checks.without_kernels(name, "triton"):
        return lambda *args, **kwargs: schemas.reference_call(name, *schemas.bind(operator, args, kwargs))
    return lambda *args, **kwargs: triton.serve(name, *schemas.bind(operator, args, kwargs))
