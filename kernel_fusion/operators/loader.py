"""Loads the C++ extension once per process."""

from __future__ import annotations

import ctypes
import os
import threading
import warnings
from collections.abc import Callable
from functools import partial

import torch

from kernel_fusion.backends import availability
from kernel_fusion.core.fields import COUNTERS
from kernel_fusion.errors import BuildError
from kernel_fusion.native import library as native
from kernel_fusion.operators import schemas
from kernel_fusion.operators.fallback import take_over

_lock = threading.RLock()
_library: ctypes.CDLL | None = None
_error: str | None = None
_from_wheel = False
_why_not_from_wheel: str | None = None


def _in_forked_child() -> None:
    """Make a new lock: a thread of the parent may hold the old one, and does not exist here."""
    global _lock
    _lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_forked_child)


def is_loaded() -> bool:
    """Whether the extension is loaded."""
    return _library is not None


def load() -> bool:
    """Load the extension, building it if need be. If that fails, warn once and return False."""
    global _library, _error
    if _library is not None:
        return True
    with _lock:
        if _library is None and _error is None:
            try:
                _library = _open()
            except Exception as error:  # whatever failed, the definition can serve the call
                _error = str(error) if isinstance(error, BuildError) else f"{type(error).__name__}: {error}"
                _error += f"; {_why_not_from_wheel}" if _why_not_from_wheel else ""
                warnings.warn(
                    f"kernel_fusion works without its C++ extension, which could not be built: {_error}\n"
                    "CPU tensors take the plain PyTorch definition, GPU tensors Triton's kernels.",
                    stacklevel=2,
                )
        return _library is not None


def is_from_wheel() -> bool:
    """Whether the loaded extension came with this package, instead of being built here."""
    return _from_wheel


def why_not_from_wheel() -> str | None:
    """Why the library of the wheel was not used, or None; None too if there is none, or nothing is loaded yet."""
    return _why_not_from_wheel


def error() -> str | None:
    """The reason that loading failed, or None."""
    return _error


def library() -> ctypes.CDLL:
    """The loaded extension. Raises BuildError if it cannot be loaded."""
    if not load():
        raise BuildError(str(_error))
    assert _library is not None
    return _library


def launches(counter: str) -> int:
    """How often kernels of a kind, one of `COUNTERS`, ran in this process."""
    return int(library().kf_count(COUNTERS.code(counter)))


def cpu_variant() -> str:
    """The name of the build of the CPU kernels that is in use. Raises BuildError without the extension."""
    return str(library().kf_cpu_variant().decode())


def use_cpu_variant(name: str) -> None:
    """Make all threads run one build of the CPU kernels, for measurements and tests.

    Raises:
        ValueError: the machine or the library lacks it (`kernel-fusion warmup --any-cpu` builds all).
        BuildError: there is no extension.
    """
    if not library().kf_use_cpu_variant(name.encode()):
        raise ValueError(
            "`name` must be a build of the CPU kernels that this machine can run and the extension has "
            f"(`kernel-fusion warmup --any-cpu` builds all of them), got {name!r}"
        )


def keep_memory(largest: int | None) -> None:
    """Reuse the freed memory of CPU tensors of up to `largest` bytes; None restores PyTorch's allocator.

    This is for measurements only: the system gets no memory back before the next call of this function. Raises
    BuildError without the extension.
    """
    library().kf_keep_memory(-1 if largest is None else largest)


def _open() -> ctypes.CDLL:
    global _from_wheel, _why_not_from_wheel
    opened, _why_not_from_wheel = _open_prebuilt()
    _from_wheel = opened is not None
    if opened is None:
        opened = native.open_built(_why_not_from_wheel)
    _forget_stubs()
    _enable_cuda(opened)
    return opened


def _open_prebuilt() -> tuple[ctypes.CDLL | None, str | None]:
    """The wheel's extension if it works here, and, if there is one that does not, why."""
    try:
        opened = native.open_prebuilt()
        if opened is not None and (problem := _problem(opened)):
            opened.kf_withdraw()
            raise OSError(problem)
        return opened, None
    except OSError as error:
        return None, f"the library of its wheel is not used: {error}"


def _problem(opened: ctypes.CDLL) -> str | None:
    """What is wrong with a small norm and its gradient, beside the definition.

    A thread of its own has no modes, transforms or autocast of the caller's.
    """
    if not opened.kf_use_cpu_variant(opened.kf_cpu_variant()):
        return "it lacks the CPU kernels of this machine"
    problems: list[str] = []

    def results(norm: Callable[..., torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor | None]:
        x = torch.arange(24, dtype=torch.float32, device="cpu").view(3, 8).sin().requires_grad_()
        y = norm(x, 1, x.detach()[0].cos(), None, 1e-5, 0.0, None)
        (y * x.detach().exp()).sum().backward()  # `torch.autograd.grad` would import modules for a second
        return y, x.grad

    def run() -> None:
        before = opened.kf_count(COUNTERS.code("cpu_backward"))
        try:
            ours, definition = (
                results(schemas.overload("layer_norm")),
                results(partial(schemas.reference_call, "layer_norm")),
            )
            if opened.kf_count(COUNTERS.code("cpu_backward")) == before:
                problems.append("it does not compute")
            if not all(map(partial(torch.allclose, rtol=1e-4, atol=1e-4), ours, definition)):
                problems.append("it computes something else than the definition")
        except Exception as error:
            problems.append(f"{type(error).__name__}: {error}")

    trial = threading.Thread(target=run)
    trial.start()
    trial.join()
    return problems[0] if problems else None


def _forget_stubs() -> None:
    """Make the operators look for new kernels, because Python's dispatchers remember the stubs."""
    for name in schemas.ALL:
        schemas.overload(name)._dispatch_cache.clear()


def _enable_cuda(library: ctypes.CDLL) -> None:
    """Give the extension its planner, if CUDA kernels can run here. Otherwise the definition serves CUDA tensors."""
    devices = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    able = [device.index for device in devices if availability.why_not_cuda(device) is None]
    if able:
        from kernel_fusion.backends.cuda import planner

        planner.install(library, able)
    elif devices and availability.why_not_triton(devices[0]) is None:
        take_over("CUDA")
