"""Serves calls without the extension: by Triton, CUDA kernels launched from Python, or the definition."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

from kernel_fusion.backends import availability, triton
from kernel_fusion.core import checks
from kernel_fusion.operators import schemas, vmap

LAUNCHED_FROM_PYTHON = ("layer_norm", "rms_norm")


def serve(verb: str, *args: Any) -> Any:
    """The best that runs on this device."""
    on_gpu = args[0].device.type in ("cuda", "xpu")
    return (serve_on_gpu if on_gpu else schemas.reference_call)(verb, *args)


def serve_on_gpu(verb: str, *args: Any) -> Any:
    """CUDA kernels if Python launches them, else Triton's, else the definition."""
    input = args[0]
    if availability.refusal(input) is None:
        if verb in LAUNCHED_FROM_PYTHON and availability.why_not_cuda(input.device) is None:
            return _launch_from_python(verb, *args)
        if availability.why_not_triton(input.device) is None:
            define_triton()
            return triton.serve(verb, *args)
    return schemas.reference_call(verb, *args)


def _launch_from_python(verb: str, *args: Any) -> Any:
    input, num_dims, weight, bias, eps, weight_offset, out_dtype = args
    if not checks.shaped(input.shape[input.dim() - num_dims :], weight, bias):
        return schemas.reference_call(verb, *args)
    from kernel_fusion.backends.cuda import python_launch

    checks.row_norm(verb, input, weight, bias, weight_offset, out_dtype)
    python_launch.register(schemas.library)
    if eps is None:
        eps = schemas.default_eps(input)
    apply: Callable[..., Any] = python_launch.RowNorm.apply
    return apply(input, num_dims, weight, bias, eps, weight_offset, out_dtype, verb == "rms_norm")


@cache
def define_triton() -> None:
    """Define the Triton backend's operators, late because they import Triton."""
    from kernel_fusion.backends.triton import operators

    operators.define(schemas.library, schemas.VERBS)
    for name in operators.VERBS:
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
    return lambda *args, **kwargs: triton.serve(name, *schemas.bind(operator, args, kwargs))
