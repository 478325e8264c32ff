"""The exceptions of the library. Each is also the built-in type that the corresponding PyTorch call would raise."""

from __future__ import annotations


class KernelFusionError(RuntimeError):
    """Base class of errors of this library, as opposed to wrong arguments."""


class BackendUnavailableError(KernelFusionError):
    """An explicitly requested backend cannot serve this call; the message says why."""


class BuildError(KernelFusionError):
    """The C++ extension could not be built or loaded; the message holds the compiler's output."""


class CompileError(KernelFusionError):
    """A CUDA kernel could not be compiled; the message holds the compiler's log."""
