"""Counts of the kernels that ran, so that a right result of a fallback does not pass for a backend's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from kernel_fusion.operators import loader

_LAUNCH_COUNTERS = {"cpu": ("cpu_forward", "cpu_backward"), "cuda": ("cuda_launch",)}


@contextmanager
def kernels_must_run(backend: str | None, every: bool = True) -> Iterator[None]:
    """A context that raises unless kernels of `backend` run in it, if that backend counts its kernels.

    Args:
        backend: The name of the backend.
        every: Whether every kind of kernel must run. Without it one kind is enough, because backward of one function
            may be the forward kernel of another.
    """
    before = launches(backend)
    yield
    # The counters exist once the extension is loaded, which the first call does.
    counts = launches(backend)
    idle = [counter for counter, count in counts.items() if count == before.get(counter, 0)]
    if idle and (every or len(idle) == len(counts)):
        raise AssertionError(f"no kernel of backend {backend!r} ran: {', '.join(idle)} unchanged")


def launches(backend: str | None) -> dict[str, int]:
    """Return how often each kind of kernel of `backend` ran in this process, if that backend counts them."""
    if backend == "triton":
        from kernel_fusion.backends.triton.launch import launches as by_name

        return {"triton": sum(by_name.values())}
    counters = _LAUNCH_COUNTERS.get(backend or "", ()) if loader.is_loaded() else ()
    return {counter: loader.launches(counter) for counter in counters}
