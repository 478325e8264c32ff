"""Where unknown code is tried out: nothing that it does reaches the process, other threads or other processes.

The user's random generators are not even read. Code that would draw from one is stopped, because no form of ours draws:
to save and restore a generator would give other threads the same numbers twice.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

DRAWS = "it draws random numbers"
COMMUNICATES = "it communicates with other processes"
_COLLECTIVE = ("c10d", "dtensor", "symm_mem")  # parts of the names of namespaces
_one_at_a_time = threading.RLock()  # threads and warnings are the process's


def generator(seed: int = 0) -> torch.Generator:
    """A generator that leaves the user's random numbers alone."""
    return torch.Generator().manual_seed(seed)


class Isolation(TorchDispatchMode):
    """Stops operations that draw from the process's generators, or that other processes take part in.

    Attributes:
        stopped: why the last operation that was stopped was, or None. Code may have caught the error and gone on in
            another way, so what it returned then says nothing about it.
    """

    stopped: str | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call an operation, or raise if it has an effect beside its result."""
        reason = _effect(func)
        if reason is None or (reason is DRAWS and kwargs and kwargs.get("generator") is not None):
            return func(*args, **(kwargs or {}))
        self.stopped = reason
        raise RuntimeError(f"kernel_fusion tries this code out, where {func} is not allowed")


@functools.cache
def _effect(operation: Any) -> str | None:
    """Name what an operation does beside its result, or None."""
    if torch.Tag.nondeterministic_seeded in operation.tags:
        return DRAWS
    return COMMUNICATES if any(part in operation.namespace for part in _COLLECTIVE) else None


def _no_hooks() -> contextlib.AbstractContextManager[None]:
    """Within, no checkpoint sees which tensors are saved; torch.func allows no hooks at all."""
    if not torch._C._autograd._saved_tensors_hooks_is_enabled():  # type: ignore[attr-defined]
        return contextlib.nullcontext()
    return torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t)


@contextlib.contextmanager
def examining() -> Iterator[Isolation]:
    """Within: one thread, faster for small tensors; new tensors on the CPU; no warnings, modes or transforms.

    Code that runs within affects nothing outside, and what it tried to affect is known: see :class:`Isolation`.
    """
    isolation = Isolation()  # type: ignore[no-untyped-call]
    with (
        _one_at_a_time,
        warnings.catch_warnings(),
        torch.autocast("cpu", enabled=False),
        torch.autocast("cuda", enabled=False),
        torch.inference_mode(False),
        _disable_current_modes(),  # such as FakeTensorMode
        temporarily_clear_interpreter_stack(),  # torch.func's
        _no_hooks(),
        torch.device("cpu"),
        isolation,
    ):
        warnings.simplefilter("ignore")
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            yield isolation
        finally:
            torch.set_num_threads(threads)
