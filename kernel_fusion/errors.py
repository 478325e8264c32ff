"""The exceptions of the library. Each also is the built-in type that the PyTorch call it stands for would raise."""

from __future__ import annotations


class KernelFusionError(RuntimeError):
    """Base class of every error that is about this library rather than about the caller's arguments."""


class BackendUnavailableError(KernelFusionError):
    """An explicitly requested backend cannot serve this call; the message says why."""


class BuildError(KernelFusionError):
    """The C++ extension could not be built or loaded; the message holds the compiler's output."""


class CompileError(KernelFusionError):
    """A CUDA kernel could not be compiled; the message holds the compiler's log."""
